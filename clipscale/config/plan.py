"""Every derived integer of a run, computed once: rows per rank, steps, chunks, when to save.

`make_plan` is pure; it lists every fault at once, so a run that cannot work stops before a tower is built.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from clipscale.config.optim import ConstantSchedule, Optim, WarmupStableDecaySchedule
from clipscale.config.schema import Chunk, Config
from clipscale.config.values import Duration
from clipscale.errors import ConfigError, listed


@dataclass(frozen=True)
class Plan:
    """What the loop needs to know. All in steps or rows; nothing changes during a run."""

    world_size: int
    global_batch: int
    rank_batch: int
    total_steps: int
    warmup_samples: int
    cooldown_samples: int  # at the end of training; 0 for schedules that have none
    lr: float  # after the batch-size rule: the peak that groups' shares and the schedule multiply
    image_chunk: int
    text_chunk: int
    save_every_steps: int  # 0: only at the end
    eval_every_steps: int
    num_samples: int  # per epoch

    @property
    def total_samples(self) -> int:
        return self.total_steps * self.global_batch

    @property
    def epochs(self) -> float:
        """How often training sees each sample, on average."""
        return self.total_samples / self.num_samples


def steps_of(duration: Duration, *, global_batch: int, num_samples: int, total_steps: int | None = None) -> int:
    """A duration in whole steps, rounded up. `fraction` needs the `total_steps` it is a fraction of."""
    if duration.fraction is not None and total_steps is None:
        raise ConfigError("train.duration: a fraction of what? wanted steps, samples or epochs")
    total_samples = (total_steps or 0) * global_batch
    samples = samples_of(duration, global_batch=global_batch, num_samples=num_samples, total_samples=total_samples)
    return -(-samples // global_batch)


def samples_of(duration: Duration, *, global_batch: int, num_samples: int, total_samples: int) -> int:
    """A duration in samples, rounded up, which need not be whole steps: so are the parts of a schedule given."""
    if duration.steps is not None:
        return duration.steps * global_batch
    if duration.samples is not None:
        return duration.samples
    if duration.epochs is not None:
        return math.ceil(_as_written(duration.epochs) * num_samples)
    assert duration.fraction is not None
    return math.ceil(_as_written(duration.fraction) * total_samples)


def scaled_lr(optim: Optim, global_batch: int) -> float:
    """The peak rate for this batch: lr, times (batch / base_batch) or its root where a rule is chosen.

    The square root is LAMB's rule (You et al. 2020, section 4), the linear one LARS' and SGD's (Goyal et al. 2017).
    """
    growth = global_batch / optim.base_batch
    return optim.lr * {"none": 1.0, "sqrt": math.sqrt(growth), "linear": growth}[optim.lr_rule]


def _cooldown(optim: Optim) -> Duration | None:
    match optim.schedule:
        case ConstantSchedule(cooldown=cooldown):
            return cooldown
        case WarmupStableDecaySchedule(decay=decay):
            return decay
        case _:
            return None


def _as_written(number: float) -> Fraction:
    """0.07 is seven hundredths: as a float it is a little more, and 7% of 100 steps would be 8."""
    return Fraction(str(number))


def make_plan(config: Config, world_size: int, num_samples: int, faults: Sequence[str] = ()) -> Plan:
    """The plan for so many ranks and so many samples per epoch.

    Raises `ConfigError` with every contradiction; `faults` are those found beforehand by the parts that know the data.
    """
    batch = config.train.global_batch
    faults = list(faults)
    total = 1
    if config.train.duration.fraction is not None:
        faults.append("train.duration: found a fraction, wanted steps, samples or epochs")
    else:
        total = steps_of(config.train.duration, global_batch=batch, num_samples=num_samples)

    def in_steps(duration: Duration | None) -> int:
        if duration is None:
            return 0
        return steps_of(duration, global_batch=batch, num_samples=num_samples, total_steps=total)

    def in_samples(duration: Duration | None) -> int:
        if duration is None:
            return 0
        return samples_of(duration, global_batch=batch, num_samples=num_samples, total_samples=total * batch)

    if faults:
        raise ConfigError(listed("this run cannot work", faults))
    rank_batch = batch // world_size
    return Plan(
        world_size=world_size,
        global_batch=batch,
        rank_batch=rank_batch,
        total_steps=total,
        warmup_samples=in_samples(config.optim.warmup),
        cooldown_samples=in_samples(_cooldown(config.optim)),
        lr=scaled_lr(config.optim, batch),
        image_chunk=_chunk(config.train.image_chunk, rank_batch),
        text_chunk=_chunk(config.train.text_chunk, rank_batch),
        save_every_steps=in_steps(config.train.save_every),
        eval_every_steps=in_steps(config.train.eval_every),
        num_samples=num_samples,
    )


def _chunk(chunk: Chunk, rank_batch: int) -> int:
    return rank_batch if chunk == "whole" else min(chunk, rank_batch)
