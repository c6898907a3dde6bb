"""The learning rate by hand, over samples."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clipscale.config.optim import (
    ConstantSchedule,
    CosineSchedule,
    PolynomialSchedule,
    Schedule,
    WarmupStableDecaySchedule,
)
from clipscale.config.values import Duration
from clipscale.optim.schedule import Curve

COSINE = CosineSchedule("cosine")
SCHEDULES: list[Schedule] = [
    COSINE,
    CosineSchedule("cosine", final=0.1),
    PolynomialSchedule("polynomial", power=2.0),
    ConstantSchedule("constant"),
    ConstantSchedule("constant", cooldown=Duration(fraction=0.2), final=0.01),
    WarmupStableDecaySchedule("wsd"),
]


def factors(schedule: Schedule, *, batch: int, total: int, warmup: int = 0, cooldown: int = 0) -> list[float]:
    curve = Curve(schedule, total, warmup, cooldown)
    return [curve.factor(seen, batch) for seen in range(0, total, batch)]


def test_four_steps_up_and_eight_down() -> None:
    found = factors(COSINE, batch=10, total=120, warmup=40)
    down = [0.5 * (1 + math.cos(math.pi * k / 8)) for k in range(8)]
    assert found == pytest.approx([0.25, 0.5, 0.75, 1.0, *down], abs=1e-15)


def test_after_the_end_it_stays_down() -> None:
    assert Curve(COSINE, 120, 40, 0).factor(120, 10) == pytest.approx(0.0, abs=1e-15)
    assert Curve(COSINE, 120, 40, 0).factor(1000, 10) == pytest.approx(0.0, abs=1e-15)


def test_down_to_a_share() -> None:
    found = factors(CosineSchedule("cosine", final=0.1), batch=1, total=10)
    assert (found[0], found[5]) == (1.0, pytest.approx(0.55))
    assert factors(PolynomialSchedule("polynomial", final=0.2), batch=1, total=4) == pytest.approx([1, 0.8, 0.6, 0.4])


def test_polynomial_powers() -> None:
    assert factors(PolynomialSchedule("polynomial", power=2.0), batch=1, total=4) == pytest.approx(
        [1, 9 / 16, 1 / 4, 1 / 16]
    )


def test_constant_then_cooldown() -> None:
    schedule = ConstantSchedule("constant", cooldown=Duration(steps=4))
    found = factors(schedule, batch=5, total=50, warmup=10, cooldown=20)
    assert found == pytest.approx([0.5, 1, 1, 1, 1, 1, 1, 0.75, 0.5, 0.25])
    assert factors(ConstantSchedule("constant"), batch=5, total=50) == [1.0] * 10


def test_warm_up_stable_decay() -> None:
    found = factors(WarmupStableDecaySchedule("wsd"), batch=1, total=8, warmup=2, cooldown=4)
    assert found == pytest.approx([0.5, 1, 1, 1, 1, 1 - math.sqrt(1 / 4), 1 - math.sqrt(2 / 4), 1 - math.sqrt(3 / 4)])


def test_warm_up_alone() -> None:
    assert factors(COSINE, batch=1, total=4, warmup=4) == [0.25, 0.5, 0.75, 1.0]
    assert factors(COSINE, batch=1, total=4, warmup=8) == [0.125, 0.25, 0.375, 0.5]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_another_batch_samples_the_same_curve(schedule: Schedule) -> None:
    """After the warm-up: the factor is a function of the samples seen."""
    small, large = Curve(schedule, 10_000, 1000, 2000), Curve(schedule, 10_000, 1000, 2000)
    for seen in range(1000, 10_000, 500):
        assert small.factor(seen, 10) == large.factor(seen, 500)


@settings(derandomize=True, deadline=None)
@given(
    warmup=st.integers(0, 50), rest=st.integers(0, 50), cooldown=st.integers(0, 40), schedule=st.sampled_from(SCHEDULES)
)
def test_up_then_down_within_bounds(warmup: int, rest: int, cooldown: int, schedule: Schedule) -> None:
    cooldown = min(cooldown, rest)
    found = factors(schedule, batch=1, total=warmup + rest, warmup=warmup, cooldown=cooldown)
    assert all(0 <= factor <= 1 + 1e-12 for factor in found)
    assert found[:warmup] == sorted(found[:warmup])
    assert found[warmup:] == sorted(found[warmup:], reverse=True)
    assert all(factor > 0 for factor in found)
