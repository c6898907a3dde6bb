"""An exponential moving average of the weights, kept in fp32 where the optimizer keeps its own state."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from clipscale.dist.engine import local
from clipscale.optim.segments import Layout


class WeightAverage:
    """An optimizer's step hook: average += (1 - decay) * (weights - average), after each update.

    It lives in the optimizer's state beside the moments, so it is sharded and saved as they are. The decay grows with
    the number of updates, min(decay, (1 + t) / (10 + t)), so that the first weights, which are noise, are soon
    forgotten.
    """

    def __init__(self, decay: float) -> None:
        self._decay = decay

    @torch.no_grad()
    def __call__(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        for group in optimizer.param_groups:
            for holder in group["params"]:
                state = optimizer.state[holder]
                if not state:  # it had no gradient, so it did not move
                    continue
                if "average" not in state:
                    state["average"] = holder.detach().clone()
                    state["averaged"] = 0
                    continue
                state["averaged"] += 1
                done = state["averaged"]
                decay = min(self._decay, (1 + done) / (10 + done))
                local(state["average"]).lerp_(local(holder.detach()), 1 - decay)


def average_weights(optimizer: torch.optim.Optimizer, layout: Layout) -> dict[str, Tensor]:
    """Communicates where layers are cut. The average of every trained parameter, whole, on the CPU of every rank."""
    return layout.whole(lambda holder: optimizer.state[holder].get("average", holder.detach()))
