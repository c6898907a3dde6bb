"""Every derived integer of a run, computed once: rows per rank, steps, chunks, when to save.

`make_plan` is pure; it lists every fault at once, so a run that cannot work stops before a tower is built.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from clipscale.config.schema import Chunk, Config, Duration
from clipscale.errors import ConfigError


@dataclass(frozen=True)
class Plan:
    """What the loop needs to know. All in steps or rows; nothing changes during a run."""

    world_size: int
    global_batch: int
    rank_batch: int
    total_steps: int
    warmup_steps: int
    image_chunk: int
    text_chunk: int
    save_every_steps: int  # 0: only at the end
    eval_every_steps: int
    num_samples: int  # per epoch

    @property
    def epochs(self) -> float:
        """How often training sees each sample, on average."""
        return self.total_steps * self.global_batch / self.num_samples


def steps_of(duration: Duration, *, global_batch: int, num_samples: int, total_steps: int | None = None) -> int:
    """A duration in whole steps, rounded up. `fraction` needs the `total_steps` it is a fraction of."""
    if duration.steps is not None:
        return duration.steps
    if duration.samples is not None:
        return math.ceil(Fraction(duration.samples, global_batch))
    if duration.epochs is not None:
        return math.ceil(_as_written(duration.epochs) * num_samples / global_batch)
    assert duration.fraction is not None
    if total_steps is None:
        raise ConfigError("train.duration: a fraction of what? wanted steps, samples or epochs")
    return math.ceil(_as_written(duration.fraction) * total_steps)


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

    warmup = in_steps(config.optim.warmup)
    if faults:
        raise ConfigError("this run cannot work:\n" + "\n".join(f"  - {fault}" for fault in faults))
    rank_batch = batch // world_size
    return Plan(
        world_size=world_size,
        global_batch=batch,
        rank_batch=rank_batch,
        total_steps=total,
        warmup_steps=warmup,
        image_chunk=_chunk(config.train.image_chunk, rank_batch),
        text_chunk=_chunk(config.train.text_chunk, rank_batch),
        save_every_steps=in_steps(config.train.save_every),
        eval_every_steps=in_steps(config.train.eval_every),
        num_samples=num_samples,
    )


def _chunk(chunk: Chunk, rank_batch: int) -> int:
    return rank_batch if chunk == "whole" else min(chunk, rank_batch)
