"""A model of awkward layers with gradients that are known beforehand, and LAMB and LARS in float64."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn

STEPS = 5
LR, DECAY, EPS = 0.05, 0.1, 1e-6


class Layer(nn.Module):
    """Each weight in a module of its own, whose forward uses it: ZeRO-3 gathers it there."""

    def __init__(self, **weights: nn.Parameter) -> None:
        super().__init__()
        for name, weight in weights.items():
            self.register_parameter(name, weight)

    def forward(self, gradients: dict[str, Tensor]) -> Tensor:
        parts = [(weight * gradients[name]).sum() for name, weight in self.named_parameters()]
        return torch.stack(parts).sum()


class Awkward(nn.Module):
    """Layers that straddle ranks, are smaller than the number of ranks, are zero, have no gradient, or are frozen.

    `forward` answers with the sum of every weight times its gradient of (step, rank), so that backward gives just that.
    """

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)

        def weight(*shape: int, size: float = 1.0) -> nn.Parameter:
            return nn.Parameter(size * torch.randn(*shape, generator=generator))

        self.first = Layer(weight=weight(5, 7), bias=weight(5))
        self.large = Layer(weight=weight(13, 11, size=100.0))
        self.tiny = Layer(weight=weight(1, 2, size=0.01))
        self.cube = Layer(weight=weight(3, 2, 5))
        self.zero = Layer(weight=nn.Parameter(torch.zeros(4, 3)))
        self.still = Layer(weight=weight(3, 3))
        self.frozen = Layer(weight=weight(3, 3)).requires_grad_(False)
        self.logits = Layer(log_scale=nn.Parameter(torch.tensor([4.6])))

    def forward(self, tower: str, inputs: Tensor) -> tuple[Tensor, Tensor]:  # noqa: ARG002
        """`inputs`: step and rank."""
        step, rank = inputs.tolist()
        gradients = gradients_of(step, rank) | {"frozen.weight": torch.ones(3, 3)}
        parts = []
        for name, layer in self.named_children():
            own = {key.partition(".")[2]: value for key, value in gradients.items() if key.startswith(f"{name}.")}
            parts.append(layer(own))
        return torch.stack(parts).sum() * torch.ones(1, 1), torch.zeros(1)


SHAPES = {name: weight.shape for name, weight in Awkward().named_parameters() if weight.requires_grad}


def gradients_of(step: int, rank: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    gradients = {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}
    gradients["still.weight"].zero_()
    gradients["logits.log_scale"] = -gradients["logits.log_scale"].abs()  # against its upper bound
    return gradients


def reference(kind: str, num_ranks: int) -> dict[str, np.ndarray]:
    """The weights after all steps, by the papers' formulas, in float64."""
    weights = {name: weight.detach().double().numpy().copy() for name, weight in Awkward().named_parameters()}
    m = {name: np.zeros(shape) for name, shape in SHAPES.items()}
    v = {name: np.zeros(shape) for name, shape in SHAPES.items()}
    for t in range(1, STEPS + 1):
        everybodys = [gradients_of(t, rank) for rank in range(num_ranks)]
        for name, w in weights.items():
            if name not in SHAPES:
                continue
            g = sum(gradients[name].double().numpy() for gradients in everybodys) / num_ranks
            adapted = w.ndim >= 2
            if kind == "lamb":
                m[name] = 0.9 * m[name] + 0.1 * g
                v[name] = 0.999 * v[name] + 0.001 * g * g
                u = (m[name] / (1 - 0.9**t)) / (np.sqrt(v[name] / (1 - 0.999**t)) + EPS) + DECAY * adapted * w
            else:
                u = g + DECAY * adapted * w
            both = np.linalg.norm(w) * np.linalg.norm(u)
            share = 1.0 if kind == "lamb" else 0.02
            ratio = share * np.linalg.norm(w) / np.linalg.norm(u) if adapted and both > 0 else 1.0
            if kind == "lars":
                m[name] = 0.9 * m[name] + LR * ratio * u
            w -= LR * ratio * u if kind == "lamb" else m[name]
        weights["logits.log_scale"] = weights["logits.log_scale"].clip(0.0, np.log(100))
    return weights
