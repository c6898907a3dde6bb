"""Retrieval against hand counts and a sorted loop: any true item counts, both ways."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from clipscale.errors import DataError, DivergedError
from clipscale.evaluate.retrieval import retrieval

properties = settings(max_examples=40, deadline=None, derandomize=True)


def draw(num_images: int, num_texts: int, num_groups: int, seed: int = 0):
    """Random unit features; every group has an image and a text, the rest fall anywhere; texts 1 and 2 are equal."""
    rng = torch.Generator().manual_seed(seed)
    images, texts = (F.normalize(torch.randn(n, 5, generator=rng), dim=1) for n in (num_images, num_texts))
    texts[1] = texts[2].clone()
    groups = [
        torch.cat([torch.arange(num_groups), torch.randint(num_groups, (n - num_groups,), generator=rng)])
        for n in (num_images, num_texts)
    ]
    return images, texts, *groups


def at_angle(*degrees: float) -> torch.Tensor:
    radians = torch.tensor(degrees).deg2rad()
    return torch.stack([radians.cos(), radians.sin()], dim=1)


def test_two_images_of_five_captions_by_hand():
    images = at_angle(0, 90)
    texts = at_angle(2, 12, 22, 32, 42, 1, 11, 21, 31, 41)
    groups = torch.tensor([0] * 5 + [1] * 5)
    result = retrieval(images, texts, torch.tensor([0, 1]), groups).as_dict()
    # For image 0 the caption at 1 degree (of image 1) comes first, its own at 2 degrees second; for image 1, at 90, the
    # one at 42 (of image 0) first, its own at 41 second. All captions are nearer to image 0, as half of them should be.
    assert result["image_to_text_r1"] == 0.0
    assert result["image_to_text_r5"] == result["image_to_text_r10"] == 1.0
    assert result["image_to_text_median_rank"] == 2.0
    assert result["text_to_image_r1"] == 0.5
    assert result["text_to_image_median_rank"] == 1.5
    assert result["chance_image_to_text_r1"] == pytest.approx(0.5)
    assert result["chance_image_to_text_r5"] == pytest.approx(1 - 1 / 252)  # all five wrong: 1 of C(10, 5)
    assert result["chance_image_to_text_median_rank"] == pytest.approx(11 / 6)
    assert result["chance_text_to_image_r1"] == pytest.approx(0.5)
    assert (result["n_images"], result["n_texts"]) == (2, 10)
    assert "text_to_image_r5" not in result  # five of two images would always be right


def test_a_later_caption_counts_as_much_as_the_first():
    texts = at_angle(80, 1, 60, 61)  # image 0 (0 degrees) fits its second caption only
    result = retrieval(at_angle(0, 60), texts, torch.tensor([0, 1]), torch.tensor([0, 0, 1, 1]), ks=(1,)).as_dict()
    assert result["image_to_text_r1"] == 1.0


def test_several_images_share_a_caption():
    images, texts = at_angle(50, 1, 90), at_angle(0, 91)
    result = retrieval(images, texts, torch.tensor([0, 0, 1]), torch.tensor([0, 1]), ks=(1, 2)).as_dict()
    assert result["text_to_image_r1"] == 1.0
    assert result["chance_text_to_image_r1"] == pytest.approx((2 / 3 + 1 / 3) / 2)
    assert result["image_to_text_r1"] == pytest.approx(2 / 3)  # 50 degrees is nearer to 91 than to 0


def test_random_features_match_a_sorted_loop():
    images, texts, image_groups, text_groups = draw(40, 60, 25)
    texts[1] = at_angle(10).repeat(1, 3)[0, :5]  # no ties here
    result = retrieval(images, texts, image_groups, text_groups).as_dict()
    scores = (F.normalize(images.double(), dim=1) @ F.normalize(texts.double(), dim=1).T).numpy()
    for name, table, own, other in (
        ("image_to_text", scores, image_groups, text_groups),
        ("text_to_image", scores.T, text_groups, image_groups),
    ):
        firsts = []
        for row, group in zip(table, own.tolist(), strict=True):
            order = sorted(range(len(row)), key=lambda at, row=row: -row[at])
            firsts.append(1 + next(place for place, at in enumerate(order) if other[at] == group))
        for k in (1, 5, 10):
            assert result[f"{name}_r{k}"] == pytest.approx(np.mean([first <= k for first in firsts]))
        assert result[f"{name}_median_rank"] == np.median(firsts)


@properties
@given(chunk=st.integers(1, 45), seed=st.integers(0, 1000))
def test_the_chunk_and_the_order_change_nothing(chunk: int, seed: int):
    images, texts, image_groups, text_groups = draw(30, 40, 20, seed)
    whole = retrieval(images, texts, image_groups, text_groups)
    assert retrieval(images, texts, image_groups, text_groups, chunk=chunk) == whole
    rng = torch.Generator().manual_seed(seed)
    rows, columns = torch.randperm(30, generator=rng), torch.randperm(40, generator=rng)
    moved = retrieval(images[rows], texts[columns], image_groups[rows], text_groups[columns])
    assert moved.as_dict() == pytest.approx(whole.as_dict(), abs=1e-12)


def test_a_collapsed_model_scores_chance():
    _, _, image_groups, text_groups = draw(30, 40, 20)
    same = at_angle(33)
    result = retrieval(same.expand(30, 2), same.expand(40, 2), image_groups, text_groups)
    assert all(metric.value == metric.chance for metric in result.metrics)
    assert all(metric.times_chance == 1.0 for metric in result.metrics)


def test_broken_input_is_named_and_counted():
    images, texts, image_groups, text_groups = draw(30, 40, 20)
    with pytest.raises(DivergedError, match="40 of 40 text features are not finite"):
        retrieval(images, texts / 0, image_groups, text_groups)
    with pytest.raises(DataError, match="no text"):
        retrieval(images, texts[:0], image_groups, text_groups[:0])
    text_groups[7] = 99
    with pytest.raises(DataError, match="have no true"):
        retrieval(images, texts, image_groups, text_groups)
