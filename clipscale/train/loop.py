"""A whole run: build, resume, step after step, save, evaluate, export."""

from __future__ import annotations

import json
import math
import sys
import time
from collections import Counter
from contextlib import closing
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

import clipscale
from clipscale.config.load import to_toml
from clipscale.config.schema import Config, DeepSpeedEngine, Engine, HsdpEngine, PlainEngine
from clipscale.data.loader import TrainLoader
from clipscale.data.streams import Drop
from clipscale.dist.world import World
from clipscale.errors import DivergedError
from clipscale.evaluate.run import ForwardEmbedder, evaluate
from clipscale.step import StepResult, train_step
from clipscale.train import checkpoint, memory
from clipscale.train.build import Parts, build
from clipscale.train.ledger import KeysFile, as_record, gather_drops, lines
from clipscale.train.metrics import Display, MetricsFile
from clipscale.train.sources import data_lines

_SLOW_DATA_SHARE = 0.3  # of the step's time spent waiting for data, from which on it is worth a word


def train(config: Config, out: Path, world: World, console: Console, *, resume: checkpoint.Resume = False) -> None:
    """Communicates. Runs the experiment into `out`, or goes on with what is there."""
    # The main rank looks and makes the folder; the others would find it made.
    found = world.together("run folder", lambda: checkpoint.prepare(out, resume=resume) if world.is_main else None)
    folder = world.gather_objects(found)[0]
    with console.status("looking at the shards") as status:
        parts = build(config, world, lambda what, done, total: status.update(f"{what} of {done:,} / {total:,} shards"))
    progress = checkpoint.Progress(0, 0, parts.mixture.start(), parts.mixture.signature, asdict(config.model))
    if folder is not None:
        progress = world.together(
            "resume",
            lambda: checkpoint.load(folder, parts.engine, order=parts.mixture.signature, model=config.model),
        )
    if world.is_main:
        _describe(parts, out, world, console, progress.step)
    if progress.step >= parts.plan.total_steps:
        return
    metrics = MetricsFile(out / "metrics.jsonl", from_step=progress.step) if world.is_main else None
    # What other ranks have to show is the same, so they show it to nobody.
    watched = console if world.is_main else Console(quiet=True)
    with Display(watched, total_steps=parts.plan.total_steps, step=progress.step) as display:
        try:
            _steps(parts, out, world, display, metrics, progress)
        finally:
            if metrics is not None:
                metrics.close()


def _steps(
    parts: Parts,
    out: Path,
    world: World,
    display: Display,
    metrics: MetricsFile | None,
    progress: checkpoint.Progress,
) -> None:
    """The loop itself, from where `progress` stands to the plan's last step."""
    step, applied, cursors = progress.step, progress.applied, progress.cursors
    skips = _Skips(parts.config.train.max_skipped)
    config, plan, shape = parts.config, parts.plan, parts.shape
    dropped: Counter[Drop] = Counter()
    keys = KeysFile(out / "keys.jsonl", world, wanted=config.train.write_keys, from_step=step)
    waits = _Waits()
    with (
        closing(keys),
        TrainLoader(
            parts.mixture,
            parts.tokenize,
            rank=world.rank,
            world_size=world.size,
            workers=config.data.workers,
            cursors=cursors,
            start_step=step,
            max_bad_fraction=config.data.max_bad_fraction,
            concept=config.loss.concept,
            pin_memory=world.device.type == "cuda",
        ) as loader,
    ):
        while step < plan.total_steps:
            start = time.perf_counter()
            batch = next(loader)
            data_wait_s = time.perf_counter() - start
            # Dropout and patch dropout depend on (seed, step, rank) alone, so a resumed run draws them alike.
            torch.manual_seed((config.run.seed * 1_000_003 + step) * 65_537 + world.rank)
            # Over applied updates: one that was left out has not used up its share of the schedule.
            lr_factor = parts.curve.factor(applied * plan.global_batch, plan.global_batch)
            result = train_step(
                parts.engine,
                batch.images,
                batch.tokens,
                world,
                shape=shape,
                loss=parts.loss,
                lr_factor=lr_factor,
                concepts=None if batch.concepts is None else batch.concepts.to(world.device),
            )
            step += 1
            applied += result.applied
            if shape is parts.shape:  # the first step showed how much memory one takes: what is left may hold graphs
                shape = memory.keep_graphs(shape, parts, batch, world)
            cursors = cursors | batch.cursors
            dropped.update(batch.dropped)
            keys.note(step, batch.keys)
            step_s = time.perf_counter() - start
            if metrics is not None:
                record = {
                    "step": step,
                    "loss": _finite(result.loss),
                    "lr": plan.lr * lr_factor,
                    "logit_scale": result.logit_scale,
                    "grad_norm": _finite(result.grad_norm),
                    "applied": result.applied,
                    "samples_per_s": plan.global_batch / step_s,
                    "step_s": step_s,
                    "data_wait_s": data_wait_s,
                    "samples": step * plan.global_batch,
                    "epoch": batch.epoch,
                    **_source_samples(parts, step),
                }
                metrics.write(record)
                display.show({**record, "eta_s": waits.note(step_s, data_wait_s) * (plan.total_steps - step)})
                if warning := waits.warning(config.data.workers):
                    display.say(warning)
                if not result.applied:
                    display.say(f"step {step} left out: loss {result.loss:.4g}, gradient norm {result.grad_norm:.4g}")
            skips.note(step, result)
            last = step == plan.total_steps
            if last or (plan.save_every_steps and step % plan.save_every_steps == 0):
                _save(parts, out, world, step, applied, cursors)
            if last or (plan.eval_every_steps and step % plan.eval_every_steps == 0):
                _evaluate(parts, world, display, metrics, step)
    _tell_drops(gather_drops(dropped, world), step, display, metrics)
    if step > applied:
        display.say(f"{step - applied} of {step} steps were left out, as their loss or gradient was not finite")


def _source_samples(parts: Parts, step: int) -> dict[str, Any]:
    """What each source of a mixture has given so far."""
    shares = parts.mixture.shares()
    return {"source_samples": {name: rows * step for name, rows in shares.items()}} if len(shares) > 1 else {}


def _tell_drops(dropped: Counter[Drop], step: int, display: Display, metrics: MetricsFile | None) -> None:
    if dropped and metrics is not None:
        metrics.write({"step": step, "dropped": as_record(dropped)})
    for line in lines(dropped):
        display.say(line)


def _save(parts: Parts, out: Path, world: World, step: int, applied: int, cursors: dict[int, int]) -> None:
    """Communicates: each rank knows how far its own streams are."""
    everybodys: dict[int, int] = {}
    for rank, theirs in enumerate(world.gather_objects(cursors)):
        everybodys.update({stream: theirs[stream] for stream in parts.mixture.owned(rank, world.size)})
    progress = checkpoint.Progress(step, applied, everybodys, parts.mixture.signature, asdict(parts.config.model))
    checkpoint.save(out, parts.engine, progress, world, keep=parts.config.train.keep_checkpoints)
    checkpoint.export(out, parts.engine, parts.config.model, parts.architecture, world)


def _evaluate(parts: Parts, world: World, display: Display, metrics: MetricsFile | None, step: int) -> None:
    """Communicates. Every [[eval]] table, on all ranks together."""
    embedder = ForwardEmbedder(parts.engine.forward, parts.tokenize, world.device)
    parts.engine.model.eval()
    for spec in parts.config.eval:
        result = evaluate(spec, embedder, parts.mixture.size, world, workers=parts.config.data.workers)
        if metrics is not None:
            metrics.write({"step": step, "eval": spec.name, **result.as_dict()})
            display.say(f"step {step}  {spec.name}: " + _short(result.as_dict()))
    parts.engine.model.train()


def _short(values: dict[str, Any]) -> str:
    return "  ".join(f"{name} {value:.4g}" for name, value in values.items() if not name.startswith("chance"))


def _finite(value: float) -> float | None:
    """JSON has no word for infinity."""
    return value if math.isfinite(value) else None


class _Skips:
    """Steps in a row that were left out. A few are bad luck; more than `most` are a run that will not come back."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._in_a_row = 0

    def note(self, step: int, result: StepResult) -> None:
        """Raises `DivergedError`, on all ranks, after one too many."""
        self._in_a_row = 0 if result.applied else self._in_a_row + 1
        if self._in_a_row > self._most:
            what = "the gradient's norm" if math.isfinite(result.loss) else "the loss"
            error = DivergedError(
                f"{what} was not finite for {self._in_a_row} steps in a row, the last being step {step}. Lower "
                "optim.lr, lengthen optim.warmup, or lower train.clip_norm, and start again from the last checkpoint "
                "with --resume; train.max_skipped bounds the number"
            )
            error.on_all_ranks = True  # loss and norm are the same everywhere
            raise error


class _Waits:
    """How long steps take and how much of that is waiting for data."""

    def __init__(self) -> None:
        self._step_s = self._wait_s = 0.0
        self._count = 0
        self._warned = False

    def note(self, step_s: float, wait_s: float) -> float:
        """-> seconds per step, smoothed over about ten."""
        weight = 0.1 if self._count else 1.0
        self._step_s += weight * (step_s - self._step_s)
        self._wait_s += weight * (wait_s - self._wait_s)
        self._count += 1
        return self._step_s

    def warning(self, workers: int) -> str | None:
        """Once, when data and not the towers set the pace."""
        if self._warned or self._count < 20 or self._wait_s < _SLOW_DATA_SHARE * self._step_s:
            return None
        self._warned = True
        share = self._wait_s / self._step_s
        return (
            f"the loader is the bottleneck: {share:.0%} of a step is waiting for data. "
            f"Raise data.workers (now {workers} per rank), or store smaller images"
        )


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


def _describe(parts: Parts, out: Path, world: World, console: Console, step: int) -> None:
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
    longer = plan.warmup_samples > plan.total_samples
    for line in (
        *data_lines(parts.found, parts.mixture, plan, config.data),
        f"{weights / 1e6:.1f} M parameters; {world.size} rank(s) on {world.device.type}, {_engine_name(config.engine)}",
        f"{plan.total_steps:,} steps of {plan.global_batch:,} pairs ({plan.epochs:.2f} epochs); per rank "
        f"{plan.rank_batch:,} pairs in image chunks of {plan.image_chunk:,} and text chunks of {plan.text_chunk:,}",
        f"{config.optim.kind}, peak rate {plan.lr:.4g}: " + "; ".join(_groups(parts)),
        *(["optim.warmup is longer than the training: the full rate is never reached"] if longer else []),
        *([f"going on after step {step:,}" if step < plan.total_steps else "finished already"] if step else []),
    ):
        console.print(line, highlight=False, markup=False, soft_wrap=True)
