"""The tiled softmax loss against torch's autograd on the undivided batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from clipscale.dist.world import World
from clipscale.loss import contrastive, tiles
from clipscale.loss.contrastive import contrastive_loss
from clipscale.loss.gather import GatheredBatch, share_features
from clipscale.loss.tiles import LossGradients, Tile, tile_shape
from tests.helpers.ranks import run_ranks
from tests.loss.oracles import (
    Problem,
    assert_answers,
    assert_close,
    compute,
    compute_all,
    errors,
    expected,
    join,
    oracle,
)

ALONE = World(0, 1, torch.device("cpu"))
LAYOUTS = {
    1: [(1,), (2,), (13,)],
    2: [(5, 5), (1, 8), (7, 4)],
    3: [(4, 4, 4), (1, 7, 4)],
    4: [(3, 3, 3, 3), (3, 1, 5, 2)],
}
# Tiles of one logit, of an odd shape, of several rows, and all logits kept (the dense path); float64.
BUDGETS = [1, 7 * 32, 40 * 32, 2**20]
RINGS = {1: [False], 2: [False, True], 3: [False, True], 4: [False, True]}
# Unrelated pairs at the highest scale need running maxima; related ones a shift; at the usual scale neither.
TEMPERATURES = [(14.3, 1.0), (100.0, 5.0), (100.0, 0.7), (0.5, 5.0)]


def plain_problems(size: int) -> list[Problem]:
    grid = product(LAYOUTS[size], TEMPERATURES, BUDGETS, RINGS[size])
    return [
        Problem("softmax", rows, scale, noise, budget_bytes=budget, ring=ring)
        for rows, (scale, noise), budget, ring in grid
    ]


def special_problems(size: int) -> list[Problem]:
    rows = LAYOUTS[size][-1]
    base = Problem("softmax", rows)
    concepts = [
        replace(base, num_concepts=count, budget_bytes=budget, ring=ring, scale=scale, noise=noise)
        for count, budget, ring in product((1, 3), BUDGETS[1:], RINGS[size])
        for scale, noise in ((14.3, 1.0), (100.0, 5.0))
    ]
    ways = [replace(base, rows_known=False), replace(base, rows_known=False, ring=True), replace(base, begun=True)]
    return concepts + ways


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_problems_take_every_path(size: int) -> None:
    shifts = set()
    for rows, (scale, noise) in product(LAYOUTS[size], TEMPERATURES):
        image, text = Problem("softmax", rows, scale, noise).features()
        batch = share_features(image, text, ALONE, rows=None, gather_dtype=None, ring=False)
        factor = torch.tensor(scale)
        shift = contrastive._common_shift(batch, factor, factor * (image * text).sum(1), ALONE)
        shifts.add("no common shift" if shift is None else "shifted" if shift > 0 else "as it is")
    assert shifts == {"no common shift", "shifted", "as it is"}


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_equals_autograd_in_float64(size: int) -> None:
    problems = plain_problems(size) + special_problems(size)
    assert_answers(problems, run_ranks(size, compute_all, problems), 1e-12)


@pytest.mark.parametrize("size", [1, 3])
def test_equals_autograd_in_float32_and_bfloat16(size: int) -> None:
    rows = (150,) if size == 1 else (50, 1, 99)
    base = Problem("softmax", rows, d=32, budget_bytes=2**14)
    dtypes = [(torch.float32, None), (torch.bfloat16, None), (torch.float32, torch.bfloat16)]
    problems = [
        replace(base, dtype=dtype, gather_dtype=gather_dtype, scale=scale, noise=noise, ring=ring)
        for (dtype, gather_dtype), (scale, noise), ring in product(dtypes, TEMPERATURES, (False, True))
    ]
    assert_answers(problems, run_ranks(size, compute_all, problems), 1e-5)


def test_rounding_what_is_gathered_moves_the_loss_by_no_more_than_the_rounding() -> None:
    exact = Problem("softmax", (200,), d=32, dtype=torch.float32)
    rounded = compute(ALONE, replace(exact, gather_dtype=torch.bfloat16))
    off = errors(rounded, expected(exact), exact.scale)
    assert 1e-6 < off["d_image"] < 2e-2
    assert off["loss"] < 2e-3


@settings(derandomize=True, deadline=None, max_examples=150)
@given(
    n=st.integers(1, 20),
    d=st.integers(1, 6),
    length=st.sampled_from([0.0, 0.1, 1.0, 7.0]),
    scale=st.sampled_from([0.01, 1.0, 30.0, 100.0]),
    budget=st.integers(1, 20_000),
    concepts=st.none() | st.integers(1, 8),
    seed=st.integers(0, 2**31),
)
def test_any_batch(n: int, d: int, length: float, scale: float, budget: int, concepts: int | None, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    image, text = length * torch.randn(2, n, d, dtype=torch.float64, generator=generator)
    ids = None if concepts is None else torch.randint(concepts, (n,), generator=generator)
    log_scale = torch.tensor(scale, dtype=torch.float64).log()
    found = contrastive_loss(image, text, log_scale, ALONE, budget_bytes=budget, concepts=ids)
    wanted = oracle("softmax", image, text, log_scale, torch.zeros(()), ids)
    # Absolute errors, since gradients may vanish: the rounding of the largest logit, times what multiplies it.
    image_length, text_length = (x.norm(dim=1).max().item() for x in (image, text))
    largest = 1 + scale * image_length * text_length
    allowed = {
        "loss": 1e-14 * largest,
        "d_image": 1e-14 * largest * scale * text_length,
        "d_text": 1e-14 * largest * scale * image_length,
        "d_log_scale": 1e-14 * largest**2,
    }
    for name, tolerance in allowed.items():
        assert (getattr(found, name) - getattr(wanted, name)).abs().max() <= tolerance, name


def one_far_image() -> tuple[Tensor, Tensor, Tensor]:
    spread = 0.1 * torch.randn(2, 40, 16, generator=torch.Generator().manual_seed(0))
    image, text = F.normalize(spread + torch.eye(16)[0], dim=2)
    image[7] *= -1
    return image, text, torch.tensor(100.0).log()


def compute_far_image(world: World) -> LossGradients:
    image, text, log_scale = one_far_image()
    image, text = (x.tensor_split(world.size)[world.rank] for x in (image, text))
    return contrastive_loss(image, text, log_scale, world)


@pytest.mark.parametrize("size", [1, 2])
def test_an_image_far_from_all_texts_at_the_highest_scale_in_float32(size: int) -> None:
    """All logits of one row are near -100, all others near 100: no shift serves both, on its own rank or on another."""
    wanted = oracle("softmax", *one_far_image(), torch.zeros(()))
    assert_close(join(run_ranks(size, compute_far_image)), wanted, 1e-5, 100.0, "one far image")


def test_equal_features_give_log_n() -> None:
    features = torch.ones(64, 4) / 2
    assert contrastive_loss(features, features, torch.tensor(2.0), ALONE).loss.item() == pytest.approx(4.1588831)


def test_each_in_a_concept_of_its_own_is_plain_clip() -> None:
    plain = Problem("softmax", (30,))
    found, wanted = compute(ALONE, replace(plain, num_concepts=30)), compute(ALONE, plain)
    assert set(errors(found, wanted, plain.scale).values()) == {0.0}


def nan_on_the_last_rank(world: World, scale: float) -> LossGradients:
    image, text = (x.split((3, 4))[world.rank] for x in Problem("softmax", (3, 4)).features())
    if world.rank == 1:
        image[2, 1] = torch.nan
    return contrastive_loss(image, text, torch.tensor(scale).log(), world)


@pytest.mark.parametrize("scale", [10.0, 100.0])
def test_nan_on_one_rank_is_seen_by_all(scale: float) -> None:
    for answer in run_ranks(2, nan_on_the_last_rank, scale):
        assert answer.loss.isnan()
        assert answer.d_log_scale.isnan()
        assert answer.d_text.isnan().any()


class Watch(TorchDispatchMode):
    """Notes the collectives, the largest tensor, and the precision of matrix products."""

    def __init__(self) -> None:
        super().__init__()
        self.collectives: list[tuple[str, list[int]]] = []
        self.largest_bytes = 0
        self.products: set[tuple[str, torch.dtype]] = set()

    def __torch_dispatch__(self, func: Any, _types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in torch.utils._pytree.tree_leaves(out):
            if isinstance(tensor, Tensor):
                self.largest_bytes = max(self.largest_bytes, tensor.untyped_storage().nbytes())
        if func.namespace == "c10d":
            tensors = [x for x in torch.utils._pytree.tree_leaves(args) if isinstance(x, Tensor)]
            self.collectives.append((func._opname, [x.numel() for x in tensors]))
        if func._opname in ("mm", "addmm", "addmm_", "bmm"):
            self.products.add((torch.get_float32_matmul_precision(), args[0].dtype))
        return out


def watch(world: World, problem: Problem) -> list[tuple[str, list[int]]]:
    with Watch() as seen:
        compute(world, problem)
    return seen.collectives


@pytest.mark.parametrize("size", [2, 4])
def test_one_feature_gather_and_nothing_else_of_that_size(size: int) -> None:
    n, d = 6, 8
    for calls in run_ranks(size, watch, Problem("softmax", (n,) * size, d=d)):
        gathers = [(out, own) for name, (out, own) in (c for c in calls if len(c[1]) == 2) if "gather" in name]
        features, log_sums = gathers[:2], gathers[2:]
        assert sum(out - own for out, own in features) == 2 * (size - 1) * n * d
        assert log_sums == [(2 * size * n, 2 * n)]
        assert [c for c in calls if "gather" not in c[0]] == [("allreduce_", [4]), ("allreduce_", [2])]
        assert len(calls) == 5


def test_ring_receives_the_features_twice_and_never_gathers_them() -> None:
    n, d, size = 6, 8, 3
    for calls in run_ranks(size, watch, Problem("softmax", (n,) * size, d=d, ring=True)):
        assert sum(sizes[0] for name, sizes in calls if name == "recv_") == 2 * 2 * (size - 1) * n * d
        assert [sizes for name, sizes in calls if "gather" in name] == [[2 * size * n, 2 * n]]
        assert [sizes for name, sizes in calls if name == "allreduce_"] == [[4], [2]]


@pytest.mark.parametrize("scale", [14.3, 100.0])
def test_no_tensor_is_larger_than_features_or_a_tile(scale: float) -> None:
    n, d = 4096, 32
    image, text = F.normalize(torch.randn(2, n, d, generator=torch.Generator().manual_seed(0)), dim=-1)
    with Watch() as seen:
        contrastive_loss(image, text, torch.tensor(scale).log(), ALONE, budget_bytes=2**20)
    assert n * d * 4 <= seen.largest_bytes <= 2 * n * d * 4  # against 2**26 for all logits


def test_tower_precision_stays_outside() -> None:
    problem = Problem("softmax", (64,), dtype=torch.float32, d=64)
    wanted = compute(ALONE, problem)
    torch.set_float32_matmul_precision("medium")
    try:
        with torch.autocast("cpu", torch.bfloat16), Watch() as seen:
            found = compute(ALONE, problem)
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision("highest")
    assert set(errors(found, wanted, problem.scale).values()) == {0.0}
    assert seen.products == {("highest", torch.float32)}


def test_nothing_is_recorded_for_autograd() -> None:
    image, text = (x.requires_grad_() for x in Problem("softmax", (5,)).features())
    answer = contrastive_loss(image, text, torch.zeros((), requires_grad=True), ALONE)
    assert not any(x.requires_grad for x in vars(answer).values() if x is not None)


@pytest.mark.parametrize("elements", [1, 2, 7, 100, 10**6])
@pytest.mark.parametrize("shape", [(1, 1), (1, 50), (50, 1), (31, 47), (300, 300)])
def test_tile_shape_keeps_to_its_elements_and_its_matrix(shape: tuple[int, int], elements: int) -> None:
    height, width = tile_shape(*shape, elements)
    assert 1 <= height <= shape[0]
    assert 1 <= width <= shape[1]
    assert height * width <= elements
    assert height * width > min(elements, shape[0] * shape[1]) // 2


# The tests above must not be able to pass by accident: each of these mistakes has to be seen.


def forget_one_side(patch: pytest.MonkeyPatch) -> None:
    honest = contrastive._gradients

    def without_texts(tiles: Any, lse: Tensor, shift: float | None) -> tuple[Tensor, Tensor]:
        return honest(tiles, torch.stack([lse[:, 0], torch.full_like(lse[:, 1], torch.inf)], dim=1), shift)

    patch.setattr(contrastive, "_gradients", without_texts)


def count_scale_per_rank(patch: pytest.MonkeyPatch) -> None:
    honest = contrastive.sum_over_ranks

    def counted(values: Any, world: World, dtype: torch.dtype) -> list[Tensor]:
        loss, d_log_scale = honest(values, world, dtype)
        return [loss, d_log_scale * world.size]

    patch.setattr(contrastive, "sum_over_ranks", counted)


def use_local_labels(patch: pytest.MonkeyPatch) -> None:
    """Labels that count from 0 on every rank, though the logits across are everybody's."""

    def local(tile: Tile, x: Tensor) -> Tensor:
        return x.diagonal(tile.rows.start - tile.across.start)

    patch.setattr(Tile, "true_pairs", local)


def detach_others(patch: pytest.MonkeyPatch) -> None:
    """What a gather without gradient gives: the own side of other ranks' log-sums never reaches the own features."""
    honest = contrastive._gradients

    def detached(tiles: Any, lse: Tensor, shift: float | None) -> tuple[Tensor, Tensor]:
        lost = torch.full_like(lse, torch.inf)
        own = slice(tiles.own.start, tiles.own.start + len(tiles.own.image))
        lost[own] = lse[own]
        return honest(tiles, lost, shift)

    patch.setattr(contrastive, "_gradients", detached)


def miss_the_rows_after(patch: pytest.MonkeyPatch) -> None:
    honest = GatheredBatch.others

    def before(batch: GatheredBatch) -> Iterator[Any]:
        return (block for block in honest(batch) if block.start < batch.own.start)

    patch.setattr(GatheredBatch, "others", before)


def forget_the_scale(patch: pytest.MonkeyPatch) -> None:
    honest = tiles.LogitTiles._logits
    patch.setattr(tiles.LogitTiles, "_logits", lambda self, tile, _scaled: honest(self, tile, tile.left))


PLANTS = [
    forget_one_side,
    count_scale_per_rank,
    use_local_labels,
    detach_others,
    miss_the_rows_after,
    forget_the_scale,
]


def compute_planted(world: World, problem: Problem, plant: Callable[[pytest.MonkeyPatch], None]) -> LossGradients:
    with pytest.MonkeyPatch.context() as patch:
        plant(patch)
        return compute(world, problem)


@pytest.mark.parametrize("plant", PLANTS)
def test_planted_mistakes_are_seen(plant: Callable[[pytest.MonkeyPatch], None]) -> None:
    problem = Problem("softmax", (5, 4), budget_bytes=40 * 32)
    answer = join(run_ranks(2, compute_planted, problem, plant))
    with pytest.raises(AssertionError, match="relative errors"):
        assert_close(answer, expected(problem), 1e-3, problem.scale, problem)
