"""Zero-shot metrics against sorted loops and hand counts; ties, chunks and order."""

from __future__ import annotations

import json
from itertools import permutations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from clipscale.errors import DataError, DivergedError
from clipscale.evaluate.ranks import rank_truth
from clipscale.evaluate.zeroshot import best_classes, zeroshot

properties = settings(max_examples=40, deadline=None, derandomize=True)


def draw(num_images: int, num_classes: int, dim: int, seed: int = 0, alike: int = 0):
    """Random unit features and labels; the last `alike` classes share one feature, so that they always tie."""
    rng = torch.Generator().manual_seed(seed)
    images = F.normalize(torch.randn(num_images, dim, generator=rng), dim=1)
    classes = F.normalize(torch.randn(num_classes, dim, generator=rng), dim=1)
    if alike:
        classes[-alike:] = classes[-1].clone()
    return images, torch.randint(num_classes, (num_images,), generator=rng), classes


def oracle_hit(scores: list[float], true: set[int], k: int) -> float:
    """The share of all orders of the candidates in which, sorted by score, a true one is among the first k."""
    orders = list(permutations(range(len(scores))))
    hits = [any(at in true for at in sorted(order, key=lambda at: -scores[at])[:k]) for order in orders]
    return sum(hits) / len(hits)


def test_top_k_and_recall_match_a_sorted_loop():
    images, labels, classes = draw(200, 12, 6)
    result = zeroshot(images, labels, classes).as_dict()
    order = np.argsort(-(images.double() @ classes.double().T).numpy(), axis=1)
    for k in (1, 5, 10):
        correct = [label in row[:k] for label, row in zip(labels.tolist(), order.tolist(), strict=True)]
        assert result[f"top{k}"] == pytest.approx(sum(correct) / 200, abs=1e-12)
        assert result[f"chance_top{k}"] == pytest.approx(k / 12)
    first = order[:, 0] == labels.numpy()
    recalls = [first[labels.numpy() == c].mean() for c in range(12) if (labels == c).any()]
    assert result["mean_class_recall"] == pytest.approx(np.mean(recalls))
    assert result["chance_mean_class_recall"] == pytest.approx(1 / 12)


def test_recall_weighs_classes_alike_and_skips_classes_without_images():
    classes = torch.eye(4)
    images = classes[[0, 0, 0, 1]]  # the last one belongs to class 2 but looks like class 1
    result = zeroshot(images, torch.tensor([0, 0, 0, 2]), classes, ks=(1,)).as_dict()
    assert result == {
        "top1": 0.75,
        "chance_top1": 0.25,
        "mean_class_recall": 0.5,
        "chance_mean_class_recall": 0.25,
        "n_samples": 4,
        "n_classes": 4,
        "n_classes_seen": 2,
    }


@pytest.mark.parametrize(("num_classes", "left"), [(3, {"top1"}), (5, {"top1", "top5"}), (1, {"top1"})])
def test_a_k_beyond_the_classes_is_left_out(num_classes: int, left: set[str]):
    result = zeroshot(*draw(20, num_classes, 8)).as_dict()
    assert {name for name in result if name.startswith("top")} == left
    assert json.loads(json.dumps(result)) == result


@properties
@given(
    scores=st.lists(st.sampled_from([0.0, 0.3, 0.6, 0.9]), min_size=1, max_size=5),
    true=st.sets(st.integers(0, 4), min_size=1),
    k=st.integers(1, 6),
)
def test_hits_are_the_mean_over_all_orders_of_the_tied(scores: list[float], true: set[int], k: int):
    true = {at % len(scores) for at in true}
    # In the plane, a candidate at the angle arccos(s) from the query scores s.
    candidates = torch.tensor([[s, (1 - s * s) ** 0.5] for s in scores])
    groups = torch.tensor([int(at in true) for at in range(len(scores))])
    ranks = rank_truth(torch.tensor([[1.0, 0.0]]), candidates, torch.tensor([1]), groups)
    assert ranks.hits(k).item() == pytest.approx(oracle_hit(scores, true, k))
    mean_rank = sum(1 - oracle_hit(scores, true, before) for before in range(len(scores)))
    assert ranks.first().item() == pytest.approx(mean_rank)


@pytest.mark.parametrize("noise", [0.0, 1e-7])
@pytest.mark.parametrize("label", [0, 500, 1000])
def test_a_collapsed_model_scores_chance_wherever_the_true_class_stands(noise: float, label: int):
    rng = torch.Generator().manual_seed(label)
    one = F.normalize(torch.randn(1, 37, generator=rng), dim=1)
    images, classes = (one * (1 + noise * torch.randn(n, 37, generator=rng)) for n in (50, 1001))
    result = zeroshot(images, torch.full((50,), label), classes).as_dict()
    for k in (1, 5, 10):
        assert result[f"top{k}"] == result[f"chance_top{k}"] == pytest.approx(k / 1001)


@properties
@given(chunk=st.integers(1, 70), seed=st.integers(0, 1000), alike=st.integers(0, 9))
def test_the_chunk_changes_nothing(chunk: int, seed: int, alike: int):
    images, labels, classes = draw(61, 9, 5, seed, alike)
    assert zeroshot(images, labels, classes, chunk=chunk) == zeroshot(images, labels, classes)


@properties
@given(seed=st.integers(0, 1000), alike=st.integers(0, 9))
def test_the_order_of_images_and_of_classes_changes_nothing(seed: int, alike: int):
    images, labels, classes = draw(61, 9, 5, seed, alike)
    rng = torch.Generator().manual_seed(seed)
    rows, columns = torch.randperm(61, generator=rng), torch.randperm(9, generator=rng)
    moved = zeroshot(images[rows], columns.argsort()[labels[rows]], classes[columns]).as_dict()
    assert moved == pytest.approx(zeroshot(images, labels, classes).as_dict(), abs=1e-12)


def test_memory_is_bounded_by_the_chunk():
    class Largest(TorchDispatchMode):
        elements = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            if isinstance(out, torch.Tensor):
                self.elements = max(self.elements, out.numel())
            return out

    images, labels, classes = draw(1000, 400, 8)
    with Largest() as largest:
        zeroshot(images, labels, classes, chunk=20)
    assert 20 * 400 <= largest.elements <= 1000 * 8


def test_the_best_classes_come_best_first():
    images, _, classes = draw(10, 7, 4)
    scores, indices = best_classes(images, classes, k=3)
    everything = (images.double() @ classes.double().T).numpy()
    assert np.array_equal(indices.numpy(), np.argsort(-everything, axis=1)[:, :3])
    assert np.allclose(scores.numpy(), np.sort(everything, axis=1)[:, ::-1][:, :3])


def test_broken_input_is_named_and_counted():
    images, labels, classes = draw(10, 4, 3)
    broken = images.clone()
    broken[3, 1], broken[7, 2] = torch.nan, torch.inf
    with pytest.raises(DivergedError, match="2 of 10 image features are not finite"):
        zeroshot(broken, labels, classes)
    with pytest.raises(DivergedError, match="4 of 4 class features"):
        zeroshot(images, labels, classes * torch.nan)
    with pytest.raises(DataError, match="no image to evaluate"):
        zeroshot(images[:0], labels[:0], classes)
    with pytest.raises(DataError, match="1 of 10 image features have no true class among the 4"):
        zeroshot(images, torch.tensor([4] + [0] * 9), classes)
