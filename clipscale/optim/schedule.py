"""The learning rate over a run, as a factor of each group's base rate."""

from __future__ import annotations

import math


def warmup_cosine(step: int, *, warmup_steps: int, total_steps: int, final: float = 0.0) -> float:
    """The factor for update `step`, counted from 0: linear up to 1 at `warmup_steps`, then half a cosine to `final`.

    The first update of a warm-up already moves: factor 1 / warmup_steps (Loshchilov and Hutter 2017 for the cosine).
    """
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    done = (step - warmup_steps) / max(1, total_steps - warmup_steps)
    return final + (1 - final) * 0.5 * (1 + math.cos(math.pi * min(1.0, done)))
