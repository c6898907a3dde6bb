"""The derived integers of a run, against counts by hand."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from math import ceil
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clipscale.config.load import load_config
from clipscale.config.optim import AdamW, ConstantSchedule, Lamb, WarmupStableDecaySchedule
from clipscale.config.plan import make_plan, samples_of, scaled_lr, steps_of
from clipscale.config.schema import Config
from clipscale.config.values import Duration
from clipscale.errors import ConfigError
from tests.helpers.runs import TINY


@pytest.fixture(scope="module")
def tiny() -> Config:
    """Global batch 64, 30 steps, 5 of warm-up, chunks of 16 and 32."""
    return load_config(TINY)


@pytest.mark.parametrize(
    ("duration", "steps"),
    [
        (Duration(steps=7), 7),
        (Duration(samples=640), 10),
        (Duration(samples=641), 11),
        (Duration(samples=1), 1),
        (Duration(epochs=1.0), 16),
        (Duration(epochs=0.5), 8),
        (Duration(epochs=0.513), 9),
        (Duration(fraction=0.5), 50),
        (Duration(fraction=0.001), 1),
        (Duration(fraction=1.0), 100),
    ],
)
def test_durations_in_steps_are_rounded_up(duration: Duration, steps: int) -> None:
    assert steps_of(duration, global_batch=64, num_samples=1000, total_steps=100) == steps


@settings(derandomize=True, deadline=None, max_examples=100)
@given(samples=st.integers(1, 10**12), batch=st.integers(1, 10**6))
def test_samples_fill_whole_steps(samples: int, batch: int) -> None:
    steps = steps_of(Duration(samples=samples), global_batch=batch, num_samples=1)
    assert steps == ceil(Fraction(samples, batch))


@pytest.mark.parametrize(("percent", "total"), [(7, 100), (29, 100), (58, 100), (10, 30), (5, 1000)])
def test_a_fraction_that_is_whole_is_not_rounded_up(percent: int, total: int) -> None:
    """0.07 * 100 is 7.000000000000001 in floating point."""
    steps = steps_of(Duration(fraction=percent / 100), global_batch=1, num_samples=1, total_steps=total)
    assert steps == percent * total // 100


def test_whole_epochs_are_not_rounded_up() -> None:
    assert steps_of(Duration(epochs=1.1), global_batch=1, num_samples=100) == 110


def test_the_plan_of_the_tiny_run(tiny: Config) -> None:
    plan = make_plan(tiny, world_size=2, num_samples=2048)
    assert (plan.rank_batch, plan.total_steps, plan.warmup_samples) == (32, 30, 5 * 64)
    assert (plan.lr, plan.cooldown_samples, plan.total_samples) == (5e-4, 0, 30 * 64)
    assert (plan.image_chunk, plan.text_chunk) == (16, 32)
    assert (plan.save_every_steps, plan.eval_every_steps) == (0, 0)
    assert plan.epochs == pytest.approx(30 * 64 / 2048)


@pytest.mark.parametrize(
    ("world_size", "chunk", "expected"),
    [(1, 16, 16), (1, 64, 64), (1, 65, 64), (4, 32, 16), (1, "whole", 64), (4, "whole", 16)],
)
def test_a_chunk_is_never_larger_than_a_ranks_batch(tiny: Config, world_size: int, chunk: int, expected: int) -> None:
    config = replace(tiny, train=replace(tiny.train, image_chunk=chunk, text_chunk=chunk))
    plan = make_plan(config, world_size=world_size, num_samples=2048)
    assert (plan.image_chunk, plan.text_chunk) == (expected, expected)


def test_other_durations_are_in_the_runs_own_units(tiny: Config) -> None:
    train = replace(
        tiny.train, duration=Duration(epochs=3), save_every=Duration(fraction=0.1), eval_every=Duration(samples=6400)
    )
    plan = make_plan(replace(tiny, train=train), world_size=1, num_samples=6400)
    assert (plan.total_steps, plan.save_every_steps, plan.eval_every_steps) == (300, 30, 100)


def test_every_contradiction_is_named_at_once(tiny: Config) -> None:
    config = replace(tiny, train=replace(tiny.train, duration=Duration(fraction=0.5)))
    with pytest.raises(ConfigError) as caught:
        make_plan(config, 1, 2048, faults=["the data are blue"])
    assert "the data are blue" in str(caught.value)
    assert "train.duration: found a fraction" in str(caught.value)


def test_a_short_trial_run_may_end_within_its_warmup(tiny: Config) -> None:
    config = replace(tiny, optim=replace(tiny.optim, warmup=Duration(steps=31)))
    plan = make_plan(config, 1, 2048)
    assert (plan.warmup_samples, plan.total_samples) == (31 * 64, 30 * 64)


def test_the_whole_duration_cannot_be_a_fraction(tiny: Config) -> None:
    config = replace(tiny, train=replace(tiny.train, duration=Duration(fraction=0.5)))
    with pytest.raises(ConfigError, match=r"train\.duration: found a fraction, wanted steps, samples or epochs"):
        make_plan(config, 1, 2048)


def test_a_plan_needs_no_files(tiny: Config) -> None:
    assert not Path(str(tiny.data.shards)).is_absolute()
    make_plan(tiny, 1, 10**9)


@pytest.mark.parametrize(
    ("duration", "samples"),
    [
        (Duration(steps=7), 448),
        (Duration(samples=641), 641),
        (Duration(epochs=0.513), 513),
        (Duration(fraction=0.05), 320),
        (Duration(fraction=0.0501), 321),
    ],
)
def test_parts_of_a_schedule_need_not_be_whole_steps(duration: Duration, samples: int) -> None:
    assert samples_of(duration, global_batch=64, num_samples=1000, total_samples=6400) == samples


@pytest.mark.parametrize(("rule", "lr"), [("none", 1e-3), ("sqrt", 2e-3), ("linear", 4e-3)])
def test_the_rate_grows_with_the_batch_where_a_rule_says_so(rule: str, lr: float) -> None:
    table = Lamb(kind="lamb", lr=1e-3, lr_rule=rule, base_batch=256)  # pyright: ignore[reportArgumentType]
    assert scaled_lr(table, 1024) == pytest.approx(lr)
    assert scaled_lr(table, 256) == pytest.approx(1e-3)


@pytest.mark.parametrize(
    ("schedule", "cooldown"),
    [
        (ConstantSchedule("constant"), 0),
        (ConstantSchedule("constant", cooldown=Duration(steps=3)), 3 * 64),
        (WarmupStableDecaySchedule("wsd"), 30 * 64 // 5),
    ],
)
def test_the_descent_at_the_end(tiny: Config, schedule: ConstantSchedule, cooldown: int) -> None:
    config = replace(tiny, optim=AdamW(kind="adamw", lr=1.0, schedule=schedule))
    assert make_plan(config, 1, 2048).cooldown_samples == cooldown
