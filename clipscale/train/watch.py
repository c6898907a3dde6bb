"""What is kept an eye on while a run goes: waiting for data, steps left out, traffic between ranks."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

from clipscale.config.schema import Config
from clipscale.dist.traffic import TrafficMeter
from clipscale.dist.world import World
from clipscale.errors import DivergedError
from clipscale.step import StepResult

_SLOW_DATA_SHARE = 0.3  # of the step's time spent waiting for data, from which on it is worth a word


class Waits:
    """How long steps take and how much of that is waiting for data."""

    def __init__(self) -> None:
        self._step_s = self._wait_s = 0.0
        self._read_s = self._decode_s = 0.0
        self._count = 0
        self._warned = False

    def note(self, step_s: float, wait_s: float, read_s: float = 0.0, decode_s: float = 0.0) -> float:
        """-> seconds per step, smoothed over about ten. `read_s` and `decode_s`: of the loader's workers."""
        weight = 0.1 if self._count else 1.0
        self._step_s += weight * (step_s - self._step_s)
        self._wait_s += weight * (wait_s - self._wait_s)
        self._read_s += read_s
        self._decode_s += decode_s
        self._count += 1
        return self._step_s

    def warning(self, workers: int) -> str | None:
        """Once, when data and not the towers set the pace."""
        if self._warned or self._count < 20 or self._wait_s < _SLOW_DATA_SHARE * self._step_s:
            return None
        self._warned = True
        share = self._wait_s / self._step_s
        reading = self._read_s / max(self._read_s + self._decode_s, 1e-9)
        if reading > 0.5:
            cause, way_out = f"reading shards ({reading:.0%} of the workers' time)", "bring the shards nearer"
        else:
            cause, way_out = f"decoding ({1 - reading:.0%} of the workers' time)", "store smaller images"
        return (
            f"the loader is the bottleneck: {share:.0%} of a step is waiting for data, most of all for {cause}. "
            f"Raise data.workers (now {workers} per rank), or {way_out}"
        )


class Skips:
    """Steps in a row that were left out. A few are bad luck; more than `most` are a run that will not come back."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._in_a_row = 0

    def note(self, step: int, result: StepResult) -> None:
        """Raises `DivergedError`, on all ranks, after one too many."""
        self._in_a_row = 0 if result.applied else self._in_a_row + 1
        if self._in_a_row > self._most:
            what = "the gradient's norm" if math.isfinite(result.loss) else "the loss"
            error = DivergedError(
                f"{what} was not finite for {self._in_a_row} steps in a row, the last being step {step}. Lower "
                "optim.lr, lengthen optim.warmup, or lower train.clip_norm, and start again from the last checkpoint "
                "with --resume; train.max_skipped bounds the number"
            )
            error.on_all_ranks = True  # loss and norm are the same everywhere
            raise error


@contextmanager
def metered(world: World, config: Config, *, when: bool) -> Iterator[TrafficMeter | None]:
    """A meter around one step, the second: the first may still set things up. Compiled towers do not take it."""
    if not when or world.size == 1 or config.model.compile:
        yield None
        return
    with TrafficMeter() as meter:
        yield meter


def say_traffic(meter: TrafficMeter) -> Iterator[str]:
    yield "a step receives on rank 0"
    for flow in meter.flows():
        ranks = ",".join(map(str, flow.ranks)) if len(flow.ranks) <= 8 else f"{len(flow.ranks)} ranks"
        yield f"{flow.collective} among {ranks}: {flow.received_bytes / 1e6:,.2f} MB in {flow.calls} calls"
