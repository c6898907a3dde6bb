"""Engines: who holds the weights, the gradients and the optimizer state, and how the ranks combine them.

The contract is documented once, at `Engine`. `PlainEngine` keeps everything on every rank and is the reference;
`deepspeed_engine` and `hsdp_engine` shard it.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from clipscale.dist.world import World
from clipscale.errors import ConfigError

Tower = Literal["image", "text"]


class Engine(Protocol):
    """A model with its optimizer, on one rank of many.

    A step is any number of `forward` and `backward` calls, of which exactly the final one says `last`, then `step`.
    All ranks make the same calls in the same order.
    """

    @property
    def device(self) -> torch.device: ...

    @property
    def model(self) -> Any:
        """The bare towers, for what needs no weights (text lengths, train and eval mode)."""
        ...

    def forward(self, tower: Tower, inputs: Tensor) -> tuple[Tensor, Tensor]:
        """-> (features [n, d], log scale and maybe bias [1 or 2]).

        Communicates under ZeRO-3 and hsdp: all ranks call it equally often.
        """
        ...

    def backward(self, surrogate: Tensor, *, last: bool) -> None:
        """Adds the gradients of `surrogate`. With `last`, communicates: each gradient becomes the mean over ranks."""
        ...

    def step(self, lr_factor: float) -> float:
        """Communicates where anything is sharded. Clips, updates at the base rates times `lr_factor`, clears gradients.

        Returns the global gradient norm before clipping. Where that is not finite nothing was updated, on any rank.
        """
        ...

    def weights(self) -> dict[str, Tensor]:
        """Communicates under ZeRO-3 and hsdp. The whole state dict on the CPU, on every rank."""
        ...

    def save(self, folder: Path) -> None:
        """Communicates. Writes what `load` needs to go on exactly; called on all ranks."""
        ...

    def load(self, folder: Path) -> None:
        """Communicates. Raises `ConfigError` when the folder was written by another engine or number of ranks."""
        ...


def set_rates(optimizer: torch.optim.Optimizer, lr_factor: float) -> None:
    """Every group's rate becomes its `base_lr` times the schedule's factor."""
    for group in optimizer.param_groups:
        group["lr"] = group["base_lr"] * lr_factor


def local(tensor: Tensor) -> Tensor:
    """What this rank holds of it; shares its memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


class LossScale:
    """The factor on every gradient of towers in fp16, whose small ones would vanish; found by trial.

    Halved after a step whose gradients overflow, which is left out, and doubled after `_PATIENCE` good ones
    (Micikevicius et al. 2018). Without `dynamic` it is 1 for good.
    """

    _PATIENCE = 2000

    def __init__(self, *, dynamic: bool) -> None:
        self._dynamic = dynamic
        self.value = 2.0**16 if dynamic else 1.0
        self._good_steps = 0

    def update(self, *, finite: bool) -> None:
        if not self._dynamic:
            return
        self._good_steps = self._good_steps + 1 if finite else 0
        if not finite:
            self.value = max(1.0, self.value / 2)
        elif self._good_steps == self._PATIENCE:
            self.value, self._good_steps = self.value * 2, 0

    def state(self) -> dict[str, float]:
        return {"value": self.value, "good_steps": self._good_steps}

    def load(self, state: dict[str, float]) -> None:
        self.value, self._good_steps = state["value"], int(state["good_steps"])


def clip_factor(norm: float, clip_norm: float) -> float:
    """What brings a gradient of this norm within the bound; 0 is no bound."""
    return min(1.0, clip_norm / (norm + 1e-6)) if clip_norm else 1.0


class PlainEngine:
    """Whole weights and optimizer state on every rank; one all-reduce of all gradients a step.

    The gradients live in one flat buffer per dtype that each parameter's `.grad` looks into, so that averaging them is
    one collective and no copy. With `sparse_rows`, a chunk's backward adds only the rows of the token table that its
    captions use; a dense gradient of the whole table, made anew for every chunk, is most of a small chunk's time.
    torch.compile does not take that.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        world: World,
        *,
        clip_norm: float = 0.0,
        sparse_rows: bool = True,
        loss_scaling: bool = False,
    ) -> None:
        self.model = model.to(world.device)
        self.device = world.device
        self._optimizer = optimizer
        self._world = world
        self._clip_norm = clip_norm
        for module in model.modules():
            if isinstance(module, nn.Embedding):
                module.sparse = sparse_rows
        self._parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._buffers = _flat_gradients(self._parameters)
        self._scale = LossScale(dynamic=loss_scaling)

    def forward(self, tower: Tower, inputs: Tensor) -> tuple[Tensor, Tensor]:
        return self.model(tower, inputs)

    def backward(self, surrogate: Tensor, *, last: bool) -> None:
        (surrogate * self._scale.value).backward()
        if last and self._world.size > 1:
            for buffer in self._buffers:
                dist.all_reduce(buffer, group=self._world.group)
                buffer /= self._world.size

    def step(self, lr_factor: float) -> float:
        gradients = [parameter.grad for parameter in self._parameters if parameter.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients).item() / self._scale.value  # waits for the device, once a step
        if finite := math.isfinite(norm):
            factor = clip_factor(norm, self._clip_norm) / self._scale.value
            if factor != 1:
                torch._foreach_mul_(self._buffers, factor)
            set_rates(self._optimizer, lr_factor)
            self._optimizer.step()
        self._scale.update(finite=finite)
        for buffer in self._buffers:
            buffer.zero_()
        return norm

    def weights(self) -> dict[str, Tensor]:
        return {name: tensor.detach().cpu() for name, tensor in self.model.state_dict().items()}

    def save(self, folder: Path) -> None:
        if self._world.is_main:
            state = {"model": self.weights(), "optimizer": self._optimizer.state_dict(), "scale": self._scale.state()}
            torch.save(state, folder / "plain.pt")

    def load(self, folder: Path) -> None:
        path = folder / "plain.pt"
        if not path.is_file():
            raise ConfigError(
                f"{folder} was not written by engine.kind = 'plain'; resume with the engine that wrote it"
            )
        saved = torch.load(path, map_location=self.device, weights_only=True)
        self.model.load_state_dict(saved["model"])
        self._optimizer.load_state_dict(saved["optimizer"])
        self._scale.load(saved["scale"])


def _flat_gradients(parameters: list[nn.Parameter]) -> list[Tensor]:
    """One zeroed buffer per dtype, in which the parameters' gradients are views."""
    buffers = []
    for dtype in dict.fromkeys(parameter.dtype for parameter in parameters):
        members = [parameter for parameter in parameters if parameter.dtype == dtype]
        buffer = torch.zeros(sum(member.numel() for member in members), dtype=dtype, device=members[0].device)
        for member, flat in zip(members, buffer.split([member.numel() for member in members]), strict=True):
            member.grad = flat.view_as(member)
        buffers.append(buffer)
    return buffers
