"""The only place that turns a `kind` into an object."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass
from typing import Any

import timm.optim
import torch
from torch import Tensor

from clipscale.config import optim as optims
from clipscale.config import schema
from clipscale.config.optim import Optim
from clipscale.config.plan import Plan, make_plan
from clipscale.config.schema import Config
from clipscale.data.index import Report
from clipscale.data.mixture import Mixture
from clipscale.dist import engine as engines
from clipscale.dist.world import World
from clipscale.loss.contrastive import contrastive_loss
from clipscale.loss.sigmoid import sigmoid_loss
from clipscale.loss.tiles import LossGradients
from clipscale.model.towers import Tokenize, build_towers, image_size
from clipscale.optim import segments
from clipscale.optim.average import WeightAverage
from clipscale.optim.groups import Treatment, clamp_after_step, parameter_groups, treatments
from clipscale.optim.lamb import Lamb
from clipscale.optim.lars import Lars
from clipscale.optim.layerwise import LayerwiseOptimizer
from clipscale.optim.schedule import Curve
from clipscale.optim.segments import Layout
from clipscale.step import Loss, StepShape
from clipscale.train import sources
from clipscale.train.checkpoint import Progress


@dataclass(frozen=True)
class Parts:
    """Everything a run is made of."""

    config: Config
    plan: Plan
    found: list[sources.Found]
    mixture: Mixture
    tokenize: Tokenize
    architecture: dict[str, Any]
    engine: engines.Engine
    optimizer: torch.optim.Optimizer
    treatments: dict[str, Treatment]
    layout: Layout
    curve: Curve
    loss: Loss
    shape: StepShape

    def progress(self, step: int, applied: int, cursors: dict[int, int]) -> Progress:
        """What a checkpoint at this point has to say, and what one must say to be gone on from."""
        groups = Counter(self.treatments.values())
        sizes = (
            sorted(groups.values()) if not isinstance(self.optimizer, LayerwiseOptimizer) else [sum(groups.values())]
        )
        optim = [self.config.optim.kind, sizes]
        model = asdict(self.config.model)
        return Progress(step, applied, cursors, self.mixture.signature, model, optim, self.plan.global_batch)


def build(config: Config, world: World, report: Report | None = None) -> Parts:
    """Communicates. Checks the data and the model, then builds; a fault on any rank ends all of them with its words.

    `report` is told how far the shards have been looked at.
    """
    found, plan = world.together("data", lambda: _plan(config, world, report))
    world.agree("the shards", [source.index.counts for source in found])
    torch.manual_seed(config.run.seed)  # every rank draws the same first weights
    towers, architecture = world.together(
        "model", lambda: build_towers(config.model, config.loss, half=_HALF.get(config.train.precision))
    )
    mixture = sources.mix(config, found, image_size(architecture))
    tokenize = Tokenize(config.model, architecture)
    towers.to(world.device)
    treated = world.together("groups", lambda: treatments(towers, config.optim, towers.depths()))
    engine, optimizer, layout = _engine(config, plan, towers, treated, world)
    if isinstance(optimizer, LayerwiseOptimizer):
        optimizer.layout = layout
    schedule = config.optim.schedule
    curve = Curve(schedule, plan.total_samples, plan.warmup_samples, plan.cooldown_samples)
    shape = StepShape(
        plan.image_chunk,
        plan.text_chunk,
        always_graph=config.model.compile,
        gather_early=not config.loss.ring,
        gather_dtype=_gather_dtype(config.loss),
        check_replay=config.train.check_replay,
    )
    return Parts(
        config,
        plan,
        found,
        mixture,
        tokenize,
        architecture,
        engine,
        optimizer,
        treated,
        layout,
        curve,
        _loss(config.loss),
        shape,
    )


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


def _plan(config: Config, world: World, report: Report | None) -> tuple[list[sources.Found], Plan]:
    found = sources.find_sources(config, report)
    faults = sources.data_faults(config, found, world.size) + sources.eval_faults(config)
    return found, make_plan(config, world.size, sources.epoch_samples(config, found), faults)


def _optimizer(
    config: Config, plan: Plan, model: torch.nn.Module, treated: dict[str, Treatment]
) -> torch.optim.Optimizer:
    optimizer = bare_optimizer(config.optim, plan.lr, model, treated)
    optimizer.register_step_post_hook(clamp_after_step)
    if config.train.ema_decay:
        optimizer.register_step_post_hook(WeightAverage(config.train.ema_decay))
    return optimizer


def bare_optimizer(
    optim: Optim, lr: float, model: torch.nn.Module, treated: dict[str, Treatment]
) -> torch.optim.Optimizer:
    """`[optim]` as an object at this peak rate, without hooks."""
    groups = parameter_groups(model, treated, lr)
    match optim:
        case optims.AdamW():
            return torch.optim.AdamW(groups, betas=optim.betas, eps=optim.eps)
        case optims.Lamb():
            bound = optim.max_trust_ratio
            return Lamb(model, treated, lr, betas=optim.betas, eps=optim.eps, max_trust_ratio=bound)
        case optims.Lars():
            bound = optim.max_trust_ratio
            options = {"momentum": optim.momentum, "trust_coefficient": optim.trust_coefficient}
            return Lars(model, treated, lr, max_trust_ratio=bound, **options)
        case optims.Lion():
            return timm.optim.Lion(groups, betas=optim.betas)
        case optims.Sgd():
            return torch.optim.SGD(groups, momentum=optim.momentum, nesterov=optim.nesterov)
        case optims.Muon():
            # Tables are no matrices that map one space to another: AdamW updates them, as it does the vectors.
            by_adamw = [{**group, "use_fallback": not group["adapt"]} for group in groups]
            return timm.optim.Muon(by_adamw, momentum=optim.momentum, betas=optim.betas, eps=optim.eps)


def _engine(
    config: Config, plan: Plan, towers: torch.nn.Module, treated: dict[str, Treatment], world: World
) -> tuple[engines.Engine, torch.optim.Optimizer, Layout]:
    """The engine, the optimizer inside it, and where the layers lie in what that is given."""
    options: dict[str, Any] = {
        "clip_norm": config.train.clip_norm,
        "loss_scaling": config.train.precision == "fp16",
    }
    match config.engine:
        case schema.PlainEngine():
            optimizer = _optimizer(config, plan, towers, treated)
            sparse_rows = not config.model.compile
            engine = engines.PlainEngine(towers, optimizer, world, sparse_rows=sparse_rows, **options)
            return engine, optimizer, segments.whole_layers(towers)
        case schema.HsdpEngine(shard_group=shard_group):
            from clipscale.dist import hsdp_engine

            groups = hsdp_engine.shard_model(towers, world, shard_group)
            optimizer = _optimizer(config, plan, towers, treated)
            engine = hsdp_engine.HsdpEngine(towers, optimizer, world, groups, **options)
            return engine, optimizer, segments.sharded_layers(towers, groups.shard)
        case schema.DeepSpeedEngine() as chosen:
            from clipscale.dist import deepspeed_engine  # takes seconds to import

            zero = deepspeed_engine.Zero(
                chosen.zero_stage, chosen.hpz_group, chosen.offload_optimizer, chosen.offload_parameters
            )
            optimizer = _optimizer(config, plan, towers, treated)
            engine = deepspeed_engine.DeepSpeedEngine(
                towers, optimizer, world, rank_batch=plan.rank_batch, zero=zero, **options
            )
            return engine, optimizer, segments.of_zero(towers, engine.sharded_optimizer, chosen.zero_stage)
