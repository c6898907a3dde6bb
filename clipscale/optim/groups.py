"""Which parameter is updated how: weight decay for matrices, none for the rest, bounds for the log scale."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

LOG_SCALE = "logits.log_scale"
LOG_SCALE_BOUNDS = (0.0, math.log(100))  # a logit scale of 1 to 100, as in Radford et al. 2021, section 2.5


def parameter_groups(model: nn.Module, *, lr: float, weight_decay: float) -> list[dict[str, Any]]:
    """Every trained parameter in exactly one group; no group is empty.

    Vectors and scalars (biases, norms, embeddings of one row, the log scale) do not decay. `base_lr` is what the
    schedule's factor multiplies; `clamp` is kept after each update, see `clamp_after_step`.
    """
    named = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    scale = [parameter for name, parameter in named if name == LOG_SCALE]
    matrices = [parameter for name, parameter in named if name != LOG_SCALE and parameter.ndim >= 2]
    vectors = [parameter for name, parameter in named if name != LOG_SCALE and parameter.ndim < 2]
    groups = [
        {"name": "matrices", "params": matrices, "weight_decay": weight_decay},
        {"name": "vectors", "params": vectors, "weight_decay": 0.0},
        {"name": "log_scale", "params": scale, "weight_decay": 0.0, "clamp": LOG_SCALE_BOUNDS},
    ]
    return [{**group, "lr": lr, "base_lr": lr} for group in groups if group["params"]]


def clamp_after_step(optimizer: torch.optim.Optimizer, *_: object) -> None:
    """A step hook: keeps each group with a `clamp` within its bounds.

    Done where the optimizer works, on its own copy: under ZeRO that is a flat partition, which DeepSpeed copies back to
    the model afterwards. A clamp inside the forward would stick above the bound, for want of a gradient.
    """
    with torch.no_grad():
        for group in optimizer.param_groups:
            if "clamp" in group:
                for parameter in group["params"]:
                    parameter.clamp_(*group["clamp"])
