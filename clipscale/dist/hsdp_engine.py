"""Hybrid sharding: everything is cut over the ranks of a group, and the groups, which hold copies, talk once a step.

The hierarchy of MiCS (Zhang et al. 2022) on torch's FSDP2. Within a group, usually a node, weights are gathered and
gradients reduced and scattered for every chunk; between groups travels one all-reduce of each rank's own shard of the
gradients, in the step's last backward.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from clipscale.dist.engine import LossScale, Tower, clip_factor, set_rates
from clipscale.dist.world import World
from clipscale.errors import ConfigError

_STATE = "hsdp"
_SCALE = "loss_scale.pt"


@dataclass(frozen=True)
class Groups:
    """This rank's two circles: those it shares one copy of the weights with, and its peers in the other groups."""

    shard: dist.ProcessGroup
    replicate: dist.ProcessGroup
    replicas: int


def shard_model(model: nn.Module, world: World, shard_group: int) -> Groups:
    """Communicates. Cuts every parameter over the ranks of this rank's group, in place; before the optimizer is made.

    A unit of gathering is a block of a tower, then what is left of each tower, so that few weights are whole at a time.
    """
    mesh = init_device_mesh(
        world.device.type, (world.size // shard_group, shard_group), mesh_dim_names=("replicate", "shard")
    )
    model.to(world.device)
    for unit in [*reversed(_blocks(model)), *model.children(), model]:
        fully_shard(unit, mesh=mesh["shard"])
    return Groups(mesh.get_group("shard"), mesh.get_group("replicate"), world.size // shard_group)


def _blocks(model: nn.Module) -> list[nn.Module]:
    """The repeated parts of deep networks: members of a list or a sequence that are all of one class."""
    found = []
    for module in model.modules():
        if isinstance(module, nn.ModuleList | nn.Sequential) and len(module) > 1:
            kinds = {type(child) for child in module}
            if len(kinds) == 1 and len(list(module[0].parameters())) > 2:
                found += list(module)
    return found


class HsdpEngine:
    """See `Engine`. The model's parameters are DTensors already, see `shard_model`, and the optimizer holds those."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        world: World,
        groups: Groups,
        *,
        clip_norm: float = 0.0,
        loss_scaling: bool = False,
    ) -> None:
        self.model = model
        self.device = world.device
        self.groups = groups
        self._optimizer = optimizer
        self._clip_norm = clip_norm
        self._scale = LossScale(dynamic=loss_scaling)

    def forward(self, tower: Tower, inputs: Tensor) -> tuple[Tensor, Tensor]:
        return self.model(tower, inputs)

    def backward(self, surrogate: Tensor, *, last: bool) -> None:
        (surrogate * self._scale.value).backward()
        if last and self.groups.replicas > 1:
            self._average_over_groups()

    def _gradients(self) -> list[Tensor]:
        """This rank's shards, views of the parameters' `.grad`."""
        return [
            cast(DTensor, parameter.grad).to_local()
            for parameter in self.model.parameters()
            if parameter.grad is not None
        ]

    def _average_over_groups(self) -> None:
        """Communicates between groups: FSDP2 has made every gradient the mean over its own group."""
        gradients = self._gradients()
        flat = torch.cat([gradient.flatten() for gradient in gradients])
        dist.all_reduce(flat, group=self.groups.replicate)
        flat /= self.groups.replicas
        averaged = flat.split([gradient.numel() for gradient in gradients])
        for gradient, values in zip(gradients, averaged, strict=True):
            gradient.copy_(values.view_as(gradient))

    def step(self, lr_factor: float) -> float:
        gradients = self._gradients()
        squares = torch.stack([gradient.float().square().sum() for gradient in gradients]).sum()
        dist.all_reduce(squares, group=self.groups.shard)
        norm = squares.sqrt().item() / self._scale.value  # waits for the device, once a step
        if finite := math.isfinite(norm):
            torch._foreach_mul_(gradients, clip_factor(norm, self._clip_norm) / self._scale.value)
            set_rates(self._optimizer, lr_factor)
            self._optimizer.step()
        self._scale.update(finite=finite)
        self._optimizer.zero_grad()
        return norm

    def weights(self) -> dict[str, Tensor]:
        whole = {}
        for name, tensor in self.model.state_dict().items():
            whole[name] = (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().cpu().clone()
        return whole

    def _state(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self._optimizer)
        return {"model": model, "optimizer": optimizer}

    def save(self, folder: Path) -> None:
        dcp.save(self._state(), checkpoint_id=folder / _STATE)
        if dist.get_rank() == 0:
            torch.save(self._scale.state(), folder / _SCALE)

    def load(self, folder: Path) -> None:
        if not (folder / _STATE).is_dir():
            raise ConfigError(
                f"{folder} was not written by engine.kind = 'hsdp'; resume with the engine that wrote it"
            )
        state = self._state()
        dcp.load(state, checkpoint_id=folder / _STATE)
        set_state_dict(
            self.model, self._optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
        )
        self._scale.load(torch.load(folder / _SCALE, weights_only=True))
