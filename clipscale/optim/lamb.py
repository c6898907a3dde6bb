"""LAMB: Adam's direction, with each layer's step as long as a share of its weights.

You et al. 2020, "Large batch optimization for deep learning: training BERT in 76 minutes", algorithm 2.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from clipscale.optim.groups import Treatment
from clipscale.optim.layerwise import LayerwiseOptimizer


class Lamb(LayerwiseOptimizer):
    """m, v as in Adam, both bias-corrected; u = m / (sqrt(v) + eps) + decay * w; w -= lr * |w| / |u| * u.

    Layers without a trust ratio get Adam's step.
    """

    def __init__(
        self,
        model: nn.Module,
        treatments: Mapping[str, Treatment],
        lr: float,
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        max_trust_ratio: float = 0.0,
    ) -> None:
        super().__init__(model, treatments, lr)
        self._betas, self._eps = betas, eps
        self.max_trust_ratio = max_trust_ratio

    def _fresh_state(self, holder: Tensor) -> dict[str, Tensor]:
        moments = {name: torch.zeros_like(holder) for name in ("exp_avg", "exp_avg_sq")}
        return {"step": torch.tensor(0.0), **moments}

    def _directions(self, holders: list[Tensor], gradients: list[Tensor], states: list[dict[str, Tensor]]) -> None:  # noqa: ARG002
        if not gradients:
            return
        beta1, beta2 = self._betas
        first, second = [state["exp_avg"] for state in states], [state["exp_avg_sq"] for state in states]
        torch._foreach_lerp_(first, gradients, 1 - beta1)
        torch._foreach_mul_(second, beta2)
        torch._foreach_addcmul_(second, gradients, gradients, 1 - beta2)
        torch._foreach_copy_(gradients, second)
        torch._foreach_sqrt_(gradients)
        # The corrections of both moments, as in Adam's own paper: m / (1 - beta1^t), v / (1 - beta2^t).
        steps = [self._count(state) for state in states]
        torch._foreach_mul_(gradients, [(1 - beta2**step) ** -0.5 for step in steps])
        torch._foreach_add_(gradients, self._eps)
        torch._foreach_mul_(gradients, [1 - beta1**step for step in steps])
        torch._foreach_reciprocal_(gradients)
        torch._foreach_mul_(gradients, first)

    @staticmethod
    def _count(state: dict[str, Tensor]) -> float:
        state["step"] += 1  # on the CPU: no waiting
        return state["step"].item()

    def _move(self, holders: list[Tensor], updates: list[Tensor], states: list[dict[str, Tensor]]) -> None:  # noqa: ARG002
        if holders:
            torch._foreach_sub_(holders, updates)
