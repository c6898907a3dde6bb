"""The learning rate by hand."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clipscale.optim.schedule import warmup_cosine


@pytest.mark.parametrize(
    ("step", "factor"),
    [
        (0, 0.25),
        (1, 0.5),
        (2, 0.75),
        (3, 1.0),
        (4, 1.0),
        (6, 0.5 * (1 + math.cos(math.pi / 4))),
        (8, 0.5),
        (10, 0.5 * (1 + math.cos(3 * math.pi / 4))),
        (12, 0.0),
        (20, 0.0),
    ],
)
def test_four_steps_up_and_eight_down(step: int, factor: float) -> None:
    assert warmup_cosine(step, warmup_steps=4, total_steps=12) == pytest.approx(factor, abs=1e-15)


def test_down_to_a_share() -> None:
    assert warmup_cosine(0, warmup_steps=0, total_steps=10, final=0.1) == 1.0
    assert warmup_cosine(5, warmup_steps=0, total_steps=10, final=0.1) == pytest.approx(0.55)
    assert warmup_cosine(10, warmup_steps=0, total_steps=10, final=0.1) == pytest.approx(0.1)


def test_warm_up_alone() -> None:
    factors = [warmup_cosine(step, warmup_steps=4, total_steps=4) for step in range(4)]
    assert factors == [0.25, 0.5, 0.75, 1.0]


@settings(derandomize=True, deadline=None)
@given(warmup=st.integers(0, 50), rest=st.integers(0, 50), final=st.floats(0, 1))
def test_up_then_down_within_bounds(warmup: int, rest: int, final: float) -> None:
    total = warmup + rest
    factors = [warmup_cosine(step, warmup_steps=warmup, total_steps=total, final=final) for step in range(total)]
    assert all(0 <= factor <= 1 + 1e-12 for factor in factors)
    assert factors[:warmup] == sorted(factors[:warmup])
    assert factors[warmup:] == sorted(factors[warmup:], reverse=True)
    assert all(factor > 0 for factor in factors[:-1] or [1])
