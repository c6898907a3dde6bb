"""ZeRO stages 0 to 3 through DeepSpeed. The only file that imports deepspeed."""

from __future__ import annotations

import json
import logging
import math
import os
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from clipscale.dist.engine import LossScale, Tower, clip_factor, set_rates
from clipscale.dist.world import World
from clipscale.errors import ConfigError

_TAG = "deepspeed"
_LAYOUT = "layout.json"


def _import_deepspeed(device: torch.device) -> Any:
    """Imports deepspeed for this device, without its banner and without compiling anything."""
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    if device.type == "cpu":
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    # DeepSpeed still calls these by their old names, once a step: nothing that a user could change.
    warnings.filterwarnings("ignore", r"`torch\.distributed\.\w+` is deprecated", FutureWarning)
    import deepspeed

    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)  # the import sets its own level
    logging.getLogger("DeepSpeed").addFilter(_is_news)
    if device.type == "cpu":
        # An all-reduce through shared memory that it would compile for minutes on first use; gloo serves as well.
        ops = cast(dict[str, bool], deepspeed.ops.__compatible_ops__)
        ops["deepspeed_shm_comm"] = False
    return deepspeed


def _is_news(record: logging.LogRecord) -> bool:
    """Our optimizers are tested under ZeRO here, whatever DeepSpeed knows of them; a skipped step is told by the run."""
    message = record.getMessage()
    return "untested optimizer" not in message and "OVERFLOW! Skipping step" not in message


@dataclass(frozen=True)
class Zero:
    """How DeepSpeed shards."""

    stage: int
    hpz_group: int = 0
    offload_optimizer: bool = False
    offload_parameters: bool = False

    def settings(self, device: torch.device) -> dict[str, Any]:
        on_host = {"device": "cpu", "pin_memory": device.type == "cuda"}
        settings: dict[str, Any] = {
            "stage": self.stage,
            # Stage 3 updates so many elements at a time, each time with a call of the optimizer's step; a layer-wise
            # one must see all of them at once, to sum over the ranks once.
            "sub_group_size": 10**12,
        }
        if self.hpz_group:
            settings["zero_hpz_partition_size"] = self.hpz_group
        if self.offload_optimizer:
            settings["offload_optimizer"] = on_host
        if self.offload_parameters:
            settings["offload_param"] = on_host
        return settings


def _settings(world: World, rank_batch: int, zero: Zero, clip_norm: float) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": rank_batch,
        "gradient_accumulation_steps": 1,
        "train_batch_size": rank_batch * world.size,
        # Stage 0 is clipped here, where the norm is wanted too. Left out, the key would mean 1.0.
        "gradient_clipping": clip_norm if zero.stage else 0.0,
        "zero_optimization": zero.settings(world.device),
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,  # ours work on the host as they do elsewhere
        "steps_per_print": 2**31,
    }


class DeepSpeedEngine:
    """See `Engine`. Chunks of both towers run under one DeepSpeed engine; only the last backward is a boundary."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        world: World,
        *,
        rank_batch: int,
        zero: Zero,
        clip_norm: float = 0.0,
        loss_scaling: bool = False,
    ) -> None:
        deepspeed = _import_deepspeed(world.device)
        os.environ.setdefault("LOCAL_RANK", str(world.local_rank))  # DeepSpeed will not start without it
        self.device = world.device
        self._world = world
        self._zero = zero
        self._clip_norm = clip_norm
        self._deepspeed = deepspeed
        self._engine, *_ = deepspeed.initialize(
            model=model.to(world.device),
            optimizer=optimizer,
            config=_settings(world, rank_batch, zero, clip_norm),
            dist_init_required=False,
        )
        self._scale = LossScale(dynamic=loss_scaling)
        self._set_scale()

    @property
    def sharded_optimizer(self) -> Any:
        """DeepSpeed's own around ours, which knows what was cut where; under stage 0 just ours."""
        return self._engine.optimizer

    def _set_scale(self) -> None:
        if self._zero.stage and self._scale.value != self._engine.optimizer.loss_scale:
            self._engine.optimizer.override_loss_scale(self._scale.value)

    @property
    def model(self) -> Any:
        return self._engine.module

    def forward(self, tower: Tower, inputs: Tensor) -> tuple[Tensor, Tensor]:
        return self._engine(tower, inputs)

    def backward(self, surrogate: Tensor, *, last: bool) -> None:
        if not self._zero.stage:  # the other stages scale it themselves
            surrogate = surrogate * self._scale.value
        self._engine.set_gradient_accumulation_boundary(last)
        self._engine.backward(surrogate, scale_wrt_gas=False)
        if self._zero.stage and not last:
            # DeepSpeed counts backwards in the forward that follows. Kept graphs have none between them, and under
            # stage 3 the second would then overwrite the first one's gradients.
            self._engine.optimizer.clear_backward_seen_flag()

    def step(self, lr_factor: float) -> float:
        set_rates(self._engine.optimizer, lr_factor)
        norm = self._step_sharded() if self._zero.stage else self._step_whole()
        self._scale.update(finite=math.isfinite(norm))
        self._set_scale()
        return norm

    def _step_sharded(self) -> float:
        self._engine.step()  # leaves the step out where the norm is not finite
        if self._zero.stage == 3:
            # Stage 3 overwrites last step's gradients only in the step's first backward. That is one of text: what
            # stands there for the image tower would be added to.
            self._engine.optimizer.grad_partitions_flat_buffer.zero_()
        return float(self._engine.get_global_grad_norm())

    def _step_whole(self) -> float:
        gradients = [parameter.grad for parameter in self.model.parameters() if parameter.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients).item() / self._scale.value
        if math.isfinite(norm):
            torch._foreach_mul_(gradients, clip_factor(norm, self._clip_norm) / self._scale.value)
            self._engine.step()
        else:
            self._engine.optimizer.zero_grad()
        return norm

    def weights(self) -> dict[str, Tensor]:
        if self._zero.stage < 3:
            return {name: tensor.detach().cpu() for name, tensor in self.model.state_dict().items()}
        whole = {}
        for name, tensor in self.model.named_parameters():
            # One parameter at a time, so that no rank ever holds all of them on its device.
            with self._deepspeed.zero.GatheredParameters([tensor]):
                whole[name] = tensor.detach().cpu().clone()
        persistent = self.model.state_dict().keys()
        whole.update({name: tensor.cpu() for name, tensor in self.model.named_buffers() if name in persistent})
        return whole

    def save(self, folder: Path) -> None:
        self._engine.save_checkpoint(
            str(folder), tag=_TAG, save_latest=False, client_state={"loss_scale": self._scale.state()}
        )
        if self._world.is_main:
            (folder / _LAYOUT).write_text(json.dumps(self._layout()))

    def load(self, folder: Path) -> None:
        path = folder / _LAYOUT
        if not path.is_file():
            raise ConfigError(
                f"{folder} was not written by engine.kind = 'deepspeed'; resume with the engine that wrote it"
            )
        found = json.loads(path.read_text())
        if found != self._layout():  # said here: DeepSpeed would fail in its own words, or load half of it
            raise ConfigError(
                f"{folder} was written under ZeRO-{found['zero_stage']} by {found['ranks']} ranks, this run has "
                f"ZeRO-{self._zero.stage} and {self._world.size}. Each rank holds its own part of the optimizer's "
                "state: resume with the stage and the number of ranks that wrote it"
            )
        _, client_state = self._engine.load_checkpoint(str(folder), tag=_TAG)
        self._scale.load(client_state["loss_scale"])
        self._set_scale()

    def _layout(self) -> dict[str, int]:
        return {"ranks": self._world.size, "zero_stage": self._zero.stage}
