"""Every engine by a short name, for tests that go through all of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn
from torch.optim import Optimizer

from clipscale.dist import hsdp_engine
from clipscale.dist.engine import Engine, PlainEngine
from clipscale.dist.world import World
from clipscale.optim import segments
from clipscale.optim.layerwise import LayerwiseOptimizer
from clipscale.optim.segments import Layout


def make_engine(
    world: World,
    name: str,
    model: nn.Module,
    make_optimizer: Callable[[nn.Module], Optimizer],
    *,
    rank_batch: int = 1,
    **options: Any,
) -> tuple[Engine, Optimizer, Layout]:
    """Communicates. `name`: plain, ZeRO-0 to ZeRO-3, hpZ-2 or hsdp-2 (ranks per group), "ZeRO-3 host" (offloaded)."""
    if name.startswith("hsdp"):
        groups = hsdp_engine.shard_model(model, world, int(name[-1]))
        optimizer = make_optimizer(model)
        engine: Engine = hsdp_engine.HsdpEngine(model, optimizer, world, groups, **options)
        layout = segments.sharded_layers(model, groups.shard)
    elif name == "plain":
        optimizer = make_optimizer(model)
        engine, layout = PlainEngine(model, optimizer, world, **options), segments.whole_layers(model)
    else:
        from clipscale.dist.deepspeed_engine import DeepSpeedEngine, Zero

        hpz_group = int(name[-1]) if name.startswith("hpZ") else 0
        stage = 3 if hpz_group else int(name[5])
        host = name.endswith("host")
        optimizer = make_optimizer(model)
        zero = Zero(stage, hpz_group, host, host and stage == 3)
        engine = DeepSpeedEngine(model, optimizer, world, rank_batch=rank_batch, zero=zero, **options)
        layout = segments.of_zero(model, engine.sharded_optimizer, stage)
    if isinstance(optimizer, LayerwiseOptimizer):
        optimizer.layout = layout
    return engine, optimizer, layout
