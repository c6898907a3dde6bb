"""LARS: momentum, with each layer's step as long as a share of its weights.

You et al. 2017, "Large batch training of convolutional networks", algorithm 1, with the decay added to the gradient
before its norm is taken, as in the authors' later work and SimCLR.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from clipscale.optim.groups import Treatment
from clipscale.optim.layerwise import LayerwiseOptimizer


class Lars(LayerwiseOptimizer):
    """u = g + decay * w; velocity = momentum * velocity + lr * coefficient * |w| / |u| * u; w -= velocity.

    The rate is part of the velocity. Layers without a trust ratio get the plain momentum step.
    """

    def __init__(
        self,
        model: nn.Module,
        treatments: Mapping[str, Treatment],
        lr: float,
        *,
        momentum: float = 0.9,
        trust_coefficient: float = 0.001,
        max_trust_ratio: float = 0.0,
    ) -> None:
        super().__init__(model, treatments, lr)
        self._momentum = momentum
        self.coefficient = trust_coefficient
        self.max_trust_ratio = max_trust_ratio

    def _fresh_state(self, holder: Tensor) -> dict[str, Tensor]:
        return {"velocity": torch.zeros_like(holder)}

    def _directions(self, holders: list[Tensor], gradients: list[Tensor], states: list[dict[str, Tensor]]) -> None:
        """The gradient is the direction."""

    def _move(self, holders: list[Tensor], updates: list[Tensor], states: list[dict[str, Tensor]]) -> None:
        if not holders:
            return
        velocities = [state["velocity"] for state in states]
        torch._foreach_mul_(velocities, self._momentum)
        torch._foreach_add_(velocities, updates)
        torch._foreach_sub_(holders, velocities)
