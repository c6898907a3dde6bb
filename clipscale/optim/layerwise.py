"""What LAMB and LARS share: a step whose length is chosen layer by layer, right however the layers are cut up.

Read `LayerwiseOptimizer.step` downwards. The rules themselves are in `lamb.py` and `lars.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from clipscale.dist.engine import local
from clipscale.optim.groups import Treatment
from clipscale.optim.segments import Segment, whole_layers


def trust_ratios(weight_norms: Tensor, update_norms: Tensor, coefficient: float, bound: float) -> Tensor:
    """coefficient * |w| / |u| per layer, at most `bound` (0: no bound); 1 where a norm is zero.

    A layer of zeros must be able to move, and a layer without an update must not become NaN.
    """
    usable = (weight_norms > 0) & (update_norms > 0)
    ratios = coefficient * weight_norms / torch.where(usable, update_norms, 1.0)
    if bound:
        ratios = ratios.clamp(max=bound)
    return torch.where(usable, ratios, 1.0)


class LayerwiseOptimizer(torch.optim.Optimizer):
    """An optimizer with one trust ratio per layer.

    Under ZeRO the parameters it is given are slices of all layers end to end. So it takes all parameters in one group,
    each layer with its own `Treatment`, and learns from a `Layout` which elements belong to which layer: set `layout`
    once the engine has cut the model up. The gradients' memory is used for the update, to hold no third copy.

    Communicates once a step where layers are cut: the squared norms of all layers are summed over the ranks.
    """

    coefficient = 1.0
    max_trust_ratio = 0.0

    def __init__(self, model: nn.Module, treatments: Mapping[str, Treatment], lr: float) -> None:
        named = [(name, parameter) for name, parameter in model.named_parameters() if name in treatments]
        super().__init__([{"params": [parameter for _, parameter in named], "name": "all", "base_lr": lr}], {"lr": lr})
        self._treatments = [treatments[name] for name, _ in named]
        self.layout = whole_layers(model)

    def _directions(self, holders: list[Tensor], gradients: list[Tensor], states: list[dict[str, Tensor]]) -> None:
        """Turns each gradient into the update before decay and trust ratio, in place."""
        raise NotImplementedError

    def _move(self, holders: list[Tensor], updates: list[Tensor], states: list[dict[str, Tensor]]) -> None:
        """Subtracts the finished updates, rate and ratio included."""
        raise NotImplementedError

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Communicates, see the class. `closure` is not supported."""
        assert closure is None
        (group,) = self.param_groups
        held = [holder for holder in group["params"] if holder.grad is not None]
        states = [self._state_of(holder) for holder in held]
        holders, updates = [local(holder) for holder in held], [local(holder.grad) for holder in held]
        self._directions(holders, updates, states)

        of = {id(holder): update for holder, update in zip(held, updates, strict=True)}
        segments = [segment for segment in self.layout.segments if id(segment.holder) in of]
        weights = [segment.of(segment.holder) for segment in segments]
        parts = [segment.of(of[id(segment.holder)]) for segment in segments]
        self._decay(segments, weights, parts)
        ratios = self._ratios(segments, weights, parts).tolist()  # waits for the device, once
        scales = [group["lr"] * self._treatments[each.layer].lr_scale * ratios[each.layer] for each in segments]
        if parts:
            torch._foreach_mul_(parts, scales)
        self._move(holders, updates, states)
        self._clamp(segments, weights)

    def _state_of(self, holder: Tensor) -> dict[str, Tensor]:
        state = self.state[holder]
        if not state:
            state.update(self._fresh_state(holder))
        return {name: local(value) for name, value in state.items()}

    def _fresh_state(self, holder: Tensor) -> dict[str, Tensor]:
        raise NotImplementedError

    def _decay(self, segments: Sequence[Segment], weights: Sequence[Tensor], updates: Sequence[Tensor]) -> None:
        """Adds decay * w to the update, before its norm is taken, as both papers have it."""
        decays = [self._treatments[segment.layer].weight_decay for segment in segments]
        for decay in sorted(set(decays) - {0.0}):
            chosen = [index for index, each in enumerate(decays) if each == decay]
            torch._foreach_add_([updates[index] for index in chosen], [weights[index] for index in chosen], alpha=decay)

    def _ratios(self, segments: Sequence[Segment], weights: Sequence[Tensor], updates: Sequence[Tensor]) -> Tensor:
        """Communicates where layers are cut. -> a trust ratio per layer, [layers]"""
        adapted = [index for index, segment in enumerate(segments) if self._treatments[segment.layer].adapt]
        device = weights[0].device if weights else self.param_groups[0]["params"][0].device
        squares = torch.zeros(2, len(self._treatments), dtype=torch.float64, device=device)
        if adapted:
            layers = torch.tensor([segments[index].layer for index in adapted], device=device)
            for row, tensors in enumerate((weights, updates)):
                norms = torch.stack(torch._foreach_norm([tensors[index] for index in adapted]))
                # A layer may lie in several pieces.
                squares[row].index_add_(0, layers, norms.double().square())
        norms = self.layout.sum_over_ranks(squares).sqrt()
        ratios = trust_ratios(norms[0], norms[1], self.coefficient, self.max_trust_ratio)
        adapts = torch.tensor([treatment.adapt for treatment in self._treatments], device=device)
        return torch.where(adapts, ratios, 1.0)

    def _clamp(self, segments: Sequence[Segment], weights: Sequence[Tensor]) -> None:
        for segment, weight in zip(segments, weights, strict=True):
            bounds = self._treatments[segment.layer].clamp
            if bounds is not None:
                weight.clamp_(*bounds)
