"""The tiled sigmoid loss against torch's autograd on the undivided batch, and against open_clip's."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from clipscale.dist.world import World
from clipscale.loss.sigmoid import sigmoid_loss
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
from tests.loss.test_contrastive import ALONE, BUDGETS, LAYOUTS, RINGS, watch


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_equals_autograd_in_float64(size: int) -> None:
    problems = [
        Problem("sigmoid", rows, scale, noise, budget_bytes=budget, ring=ring, num_concepts=concepts)
        for rows, (scale, noise), budget, ring, concepts in product(
            LAYOUTS[size], [(10.0, 1.0), (100.0, 5.0)], BUDGETS[:3], RINGS[size], (None, 3)
        )
    ]
    problems += [Problem("sigmoid", LAYOUTS[size][-1], rows_known=False, begun=True)]
    assert_answers(problems, run_ranks(size, compute_all, problems), 1e-12)


@pytest.mark.parametrize("size", [1, 3])
def test_equals_autograd_in_float32_and_bfloat16(size: int) -> None:
    base = Problem("sigmoid", (150,) if size == 1 else (50, 1, 99), d=32, budget_bytes=2**14)
    dtypes = [(torch.float32, None), (torch.bfloat16, None), (torch.float32, torch.bfloat16)]
    problems = [
        replace(base, dtype=dtype, gather_dtype=gather_dtype, scale=scale, ring=ring)
        for (dtype, gather_dtype), scale, ring in product(dtypes, (10.0, 100.0), (False, True))
    ]
    assert_answers(problems, run_ranks(size, compute_all, problems), 1e-5)


@settings(derandomize=True, deadline=None, max_examples=100)
@given(
    n=st.integers(1, 20),
    d=st.integers(1, 6),
    scale=st.sampled_from([0.01, 1.0, 30.0, 100.0]),
    bias=st.sampled_from([-60.0, -10.0, 0.0, 25.0]),
    budget=st.integers(1, 20_000),
    seed=st.integers(0, 2**31),
)
def test_any_batch(n: int, d: int, scale: float, bias: float, budget: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    image, text = torch.randn(2, n, d, dtype=torch.float64, generator=generator)
    log_scale = torch.tensor(scale, dtype=torch.float64).log()
    offset = torch.tensor(bias, dtype=torch.float64)
    found = sigmoid_loss(image, text, log_scale, offset, ALONE, budget_bytes=budget)
    wanted = oracle("sigmoid", image, text, log_scale, offset)
    for name in ("loss", "d_image", "d_text", "d_log_scale", "d_bias"):
        x, y = getattr(found, name), getattr(wanted, name)
        assert (x - y).norm() <= 1e-12 * y.norm() + 1e-12, name


def test_gradients_of_good_pairs_keep_their_digits() -> None:
    """A well-matched pair has dloss/dz = sigmoid(z) - 1: tiny in float32, and none of it may be rounding."""
    image = torch.eye(4)
    log_scale, bias = torch.tensor(30.0).log(), torch.tensor(-10.0)
    found = sigmoid_loss(image, image, log_scale, bias, ALONE)
    assert_close(found, oracle("sigmoid", image, image, log_scale, bias), 1e-5, 0.0, "good pairs")


def test_only_features_are_exchanged() -> None:
    n, d, size = 6, 8, 3
    for calls in run_ranks(size, watch, Problem("sigmoid", (n,) * size, d=d)):
        assert calls[2:] == [("allreduce_", [3])]
        assert [sizes for _, sizes in calls[:2]] == [[size * n * d, n * d]] * 2
    for calls in run_ranks(size, watch, Problem("sigmoid", (n,) * size, d=d, ring=True)):
        assert sum(sizes[0] for name, sizes in calls if name == "recv_") == 2 * (size - 1) * n * d
        assert {name for name, _ in calls} == {"send", "recv_", "allreduce_"}


def test_agrees_with_open_clip() -> None:
    """The same sign, the same division by the number of samples, the same place for the bias."""
    from open_clip.loss import SigLipLoss

    problem = Problem("sigmoid", (40,), dtype=torch.float32)
    image, text = (x.requires_grad_() for x in problem.features())
    bias = problem.bias.requires_grad_()
    loss = SigLipLoss()(image, text, problem.log_scale.exp(), bias)
    loss.backward()
    found = compute(ALONE, problem)
    torch.testing.assert_close(found.loss, loss.detach(), rtol=1e-5, atol=0)
    torch.testing.assert_close(found.d_image, image.grad, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(found.d_bias, bias.grad, rtol=1e-5, atol=0)


def compute_with_bias_per_rank(world: World, problem: Problem) -> object:
    answer = compute(world, problem)
    assert answer.d_bias is not None
    return replace(answer, d_bias=answer.d_bias * world.size)


def test_bias_gradient_counted_per_rank_is_seen() -> None:
    problem = Problem("sigmoid", (5, 4))
    answer = join(run_ranks(2, compute_with_bias_per_rank, problem))
    assert errors(answer, expected(problem), problem.scale)["d_bias"] > 0.5
