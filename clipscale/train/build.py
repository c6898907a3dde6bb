"""The only place that turns a `kind` into an object."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from clipscale.config import schema
from clipscale.config.plan import Plan, make_plan
from clipscale.config.schema import Config, DeepSpeedEngine, PlainEngine
from clipscale.data import assign
from clipscale.data.decode import Decoder
from clipscale.data.index import ShardIndex
from clipscale.data.tar import expand_shards
from clipscale.dist import engine as engines
from clipscale.dist.world import World
from clipscale.loss.contrastive import contrastive_loss
from clipscale.loss.sigmoid import sigmoid_loss
from clipscale.loss.tiles import LossGradients
from clipscale.model.towers import Tokenize, build_towers, image_size
from clipscale.optim.groups import clamp_after_step, parameter_groups
from clipscale.optim.schedule import warmup_cosine
from clipscale.step import Loss, StepShape


@dataclass(frozen=True)
class Parts:
    """Everything a run is made of."""

    config: Config
    plan: Plan
    index: ShardIndex
    order: assign.Order
    decoder: Decoder
    tokenize: Tokenize
    architecture: dict[str, Any]
    engine: engines.Engine
    loss: Loss
    shape: StepShape

    def lr_factor(self, step: int) -> float:
        return warmup_cosine(
            step,
            warmup_steps=self.plan.warmup_steps,
            total_steps=self.plan.total_steps,
            final=self.config.optim.final_lr,
        )


def build(config: Config, world: World) -> Parts:
    """Communicates. Checks the whole request, then builds; a fault on any rank ends all of them with its words."""
    index, plan = world.together("data", lambda: _plan(config, world))
    world.agree("the shards", index.counts)
    order = assign.Order(index.counts, config.run.seed, config.data.streams, config.data.shuffle_block)
    torch.manual_seed(config.run.seed)  # every rank draws the same first weights
    towers, architecture = world.together(
        "model", lambda: build_towers(config.model, config.loss, half=_HALF.get(config.train.precision))
    )
    decoder = Decoder(
        image_size(architecture),
        config.data.augment,
        config.data.caption,
        seed=config.run.seed,
        max_pixels=config.data.max_pixels,
        draft=True,
    )
    tokenize = Tokenize(config.model, architecture)
    towers.to(world.device)
    optimizer = _optimizer(config, towers)
    engine = _engine(config, plan, towers, optimizer, world)
    shape = StepShape(
        plan.image_chunk,
        plan.text_chunk,
        always_graph=config.model.compile,
        gather_early=not config.loss.ring,
        gather_dtype=_gather_dtype(config.loss),
        check_replay=config.train.check_replay,
    )
    return Parts(config, plan, index, order, decoder, tokenize, architecture, engine, _loss(config.loss), shape)


def _gather_dtype(loss: schema.Loss) -> torch.dtype | None:
    return torch.bfloat16 if loss.gather_dtype == "bf16" else None


def _loss(loss: schema.Loss) -> Loss:
    options: dict[str, Any] = {
        "ring": loss.ring,
        "budget_bytes": loss.budget_bytes,
        "gather_dtype": _gather_dtype(loss),
    }

    def softmax(image: Any, text: Any, scalars: Tensor, world: World, concepts: Tensor | None) -> LossGradients:
        rows = [len(image)] * world.size
        return contrastive_loss(image, text, scalars[0], world, rows=rows, concepts=concepts, **options)

    def sigmoid(image: Any, text: Any, scalars: Tensor, world: World, concepts: Tensor | None) -> LossGradients:
        rows = [len(image)] * world.size
        return sigmoid_loss(image, text, scalars[0], scalars[1], world, rows=rows, concepts=concepts, **options)

    return softmax if loss.kind == "softmax" else sigmoid


_HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}


def _plan(config: Config, world: World) -> tuple[ShardIndex, Plan]:
    index = ShardIndex.scan(expand_shards(config.data.shards))
    faults = assign.check(
        index.counts,
        streams=config.data.streams,
        global_batch=config.train.global_batch,
        world_size=world.size,
    )
    if config.train.precision == "fp16" and config.engine.kind == "deepspeed":
        faults.append(
            "train.precision: fp16 needs its gradients scaled, which engine.kind = 'plain' does; "
            "with 'deepspeed' use bf16, which needs no scaling"
        )
    return index, make_plan(config, world.size, index.num_samples, faults)


def _optimizer(config: Config, towers: torch.nn.Module) -> torch.optim.Optimizer:
    optim = config.optim
    groups = parameter_groups(towers, lr=optim.lr, weight_decay=optim.weight_decay)
    optimizer = torch.optim.AdamW(groups, betas=optim.betas, eps=optim.eps)
    optimizer.register_step_post_hook(clamp_after_step)
    return optimizer


def _engine(
    config: Config, plan: Plan, towers: torch.nn.Module, optimizer: torch.optim.Optimizer, world: World
) -> engines.Engine:
    clip_norm = config.train.clip_norm
    match config.engine:
        case PlainEngine():
            sparse_rows = not config.model.compile
            return engines.PlainEngine(
                towers,
                optimizer,
                world,
                clip_norm=clip_norm,
                sparse_rows=sparse_rows,
                loss_scaling=config.train.precision == "fp16",
            )
        case DeepSpeedEngine(zero_stage=stage):
            from clipscale.dist import deepspeed_engine  # takes seconds to import

            return deepspeed_engine.DeepSpeedEngine(
                towers, optimizer, world, rank_batch=plan.rank_batch, zero_stage=stage, clip_norm=clip_norm
            )
