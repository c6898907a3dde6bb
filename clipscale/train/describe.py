"""What a run is, in a few lines at its start and in its folder."""

from __future__ import annotations

import json
import sys
from collections import Counter
from importlib.metadata import version
from pathlib import Path

from rich.console import Console

import clipscale
from clipscale.config.load import to_toml
from clipscale.config.schema import DeepSpeedEngine, Engine, HsdpEngine, PlainEngine
from clipscale.dist.world import World
from clipscale.train.build import Parts
from clipscale.train.sources import data_lines

_TOO_LONG = "warm-up and descent do not both fit into the training; shorten optim.warmup or the schedule's descent"


def describe(parts: Parts, out: Path, world: World, console: Console, step: int) -> None:
    """Writes down what is being run, and says it."""
    (out / "resolved.toml").write_text(to_toml(parts.config))
    packages = ("torch", "open-clip-torch", "timm", "deepspeed", "webdataset")
    run = {
        "command": sys.argv,
        "ranks": world.size,
        "device": str(world.device),
        "versions": {"clipscale": clipscale.__version__, **{name: version(name) for name in packages}},
    }
    (out / "run.json").write_text(json.dumps(run, indent=2) + "\n")
    plan, config = parts.plan, parts.config
    weights = sum(getattr(parameter, "ds_numel", parameter.numel()) for parameter in parts.engine.model.parameters())
    steps = range(0, plan.total_steps, max(1, plan.total_steps // 1000))
    highest = max(parts.curve.factor(step * plan.global_batch, plan.global_batch) for step in steps)
    for line in (
        *data_lines(parts.found, parts.mixture, plan, config.data),
        f"{weights / 1e6:.1f} M parameters; {world.size} rank(s) on {world.device.type}, {_engine_name(config.engine)}",
        f"{plan.total_steps:,} steps of {plan.global_batch:,} pairs ({plan.epochs:.2f} epochs); per rank "
        f"{plan.rank_batch:,} pairs in image chunks of {plan.image_chunk:,} and text chunks of {plan.text_chunk:,}",
        f"{config.optim.kind}, peak rate {plan.lr:.4g}: " + "; ".join(_groups(parts)),
        *_untrimmed(parts),
        *([f"the highest rate of the schedule is {highest:.1%} of the peak: " + _TOO_LONG] if highest < 0.95 else []),
        *([f"going on after step {step:,}" if step < plan.total_steps else "finished already"] if step else []),
    ):
        console.print(line, highlight=False, markup=False, soft_wrap=True)


def _untrimmed(parts: Parts) -> list[str]:
    if parts.engine.model.trims_text:
        return []
    return [
        "captions go through the text tower in full length: cutting off what follows their end is exact only for "
        "towers that pool at the end of the text under a causal mask, which this one does not"
    ]


def _engine_name(engine: Engine) -> str:
    match engine:
        case PlainEngine():
            return "plain"
        case HsdpEngine(shard_group=ranks):
            return f"hsdp in groups of {ranks}"
        case DeepSpeedEngine():
            extras = [f", hpZ in groups of {engine.hpz_group}"] if engine.hpz_group else []
            extras += [", optimizer on the host"] if engine.offload_optimizer else []
            extras += [", weights on the host"] if engine.offload_parameters else []
            return f"deepspeed ZeRO-{engine.zero_stage}" + "".join(extras)


def _groups(parts: Parts) -> list[str]:
    """What is treated alike, with its number of parameters."""
    sizes = {name: shape.numel() for name, shape in zip(parts.layout.names, parts.layout.shapes, strict=True)}
    totals: Counter[str] = Counter()
    for name, treatment in parts.treatments.items():
        totals[treatment.name] += sizes[name]
    return [f"{name} ({number:,})" for name, number in totals.items()]
