"""The learning rate over a run, as a factor of each group's own rate, over samples."""

from __future__ import annotations

import math
from dataclasses import dataclass

from clipscale.config.optim import (
    ConstantSchedule,
    CosineSchedule,
    PolynomialSchedule,
    Schedule,
    WarmupStableDecaySchedule,
)


@dataclass(frozen=True)
class Curve:
    """A schedule laid over a run of `total_samples`, all lengths in samples."""

    schedule: Schedule
    total_samples: int
    warmup_samples: int
    cooldown_samples: int

    def factor(self, seen: int, global_batch: int) -> float:
        """For the update that learns from the batch after `seen` samples.

        The warm-up counts this batch in, so that the first update moves; the descent counts it out, so that the first
        one after the warm-up has the full rate.
        """
        warmed_up = min(1.0, (seen + global_batch) / self.warmup_samples) if self.warmup_samples else 1.0
        return min(warmed_up, self._after_warmup(seen))

    def _after_warmup(self, seen: int) -> float:
        done = _share(seen - self.warmup_samples, self.total_samples - self.warmup_samples)
        cooled = _share(seen - (self.total_samples - self.cooldown_samples), self.cooldown_samples)
        match self.schedule:
            case CosineSchedule(final=final):
                height = 0.5 * (1 + math.cos(math.pi * done))
            case PolynomialSchedule(power=power, final=final):
                height = (1 - done) ** power
            case ConstantSchedule(power=power, final=final):
                height = (1 - cooled) ** power
            case WarmupStableDecaySchedule(final=final):
                height = 1 - math.sqrt(cooled)
        return final + (1 - final) * height


def _share(part: int, whole: int) -> float:
    """How much of a stretch lies behind, from 0 to 1; a stretch of no length has not begun."""
    return min(1.0, max(0.0, part / whole)) if whole > 0 else 0.0
