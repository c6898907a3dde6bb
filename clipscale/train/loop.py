"""A whole run: build, resume, step after step, save, evaluate, export."""

from __future__ import annotations

import math
import shutil
import time
from collections import Counter
from contextlib import closing
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from clipscale.config.schema import Config
from clipscale.config.support import require_supported
from clipscale.data.loader import TrainLoader
from clipscale.data.streams import Drop
from clipscale.dist.world import World
from clipscale.evaluate.run import ForwardEmbedder, evaluate
from clipscale.optim.average import average_weights
from clipscale.step import train_step
from clipscale.train import checkpoint, memory
from clipscale.train.build import Parts, build
from clipscale.train.describe import describe
from clipscale.train.ledger import KeysFile, as_record, from_saved, gather_drops, lines, to_saved
from clipscale.train.metrics import Display, MetricsFile, is_evaluated
from clipscale.train.sources import store_of
from clipscale.train.watch import Skips, Waits, metered, say_traffic


def train(config: Config, out: Path, world: World, console: Console, *, resume: checkpoint.Resume = False) -> None:
    """Communicates. Runs the experiment into `out`, or goes on with what is there."""
    require_supported(config, world.size)
    # The main rank looks and makes the folder; the others would find it made.
    found = world.together("run folder", lambda: checkpoint.prepare(out, resume=resume) if world.is_main else None)
    folder = world.gather_objects(found)[0]
    with console.status("looking at the shards") as status:
        parts = build(config, world, lambda what, done, total: status.update(f"{what} of {done:,} / {total:,} shards"))
    progress = parts.progress(0, 0, parts.mixture.start())
    if folder is not None:
        start = progress
        total_steps = parts.plan.total_steps
        progress = world.together(
            "resume", lambda: checkpoint.load(folder, parts.engine, parts.optimizer, start, total_steps)
        )
    if world.is_main:
        describe(parts, out, world, console, progress.step)
    finished = progress.step >= parts.plan.total_steps
    if finished and world.gather_objects(is_evaluated(out / "metrics.jsonl", progress.step, config.eval))[0]:
        return
    metrics = MetricsFile(out / "metrics.jsonl", from_step=progress.step) if world.is_main else None
    # What other ranks have to show is the same, so they show it to nobody.
    watched = console if world.is_main else Console(quiet=True)
    with Display(watched, total_steps=parts.plan.total_steps, step=progress.step) as display:
        try:
            if finished:  # it died after its last checkpoint, before its evaluation was done
                _evaluate(parts, world, display, metrics, progress.step)
            else:
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
    skips = Skips(parts.config.train.max_skipped)
    config, plan, shape = parts.config, parts.plan, parts.shape
    dropped = from_saved(progress.dropped) if world.is_main else Counter[Drop]()
    keys = KeysFile(out / "keys.jsonl", world, wanted=config.train.write_keys, from_step=step)
    waits = Waits()
    rates = _rates(parts)
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
            with metered(world, config, when=step == progress.step + 1) as meter:
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
                    **({"lr_by_group": {name: lr * lr_factor for name, lr in rates.items()}} if rates else {}),
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
                if meter is not None:
                    record["traffic"] = [asdict(flow) for flow in meter.flows()]
                metrics.write(record)
                pace_s = waits.note(step_s, data_wait_s, batch.read_s, batch.decode_s)
                display.show({**record, "eta_s": pace_s * (plan.total_steps - step)})
                if warning := waits.warning(config.data.workers):
                    display.say(warning)
                if not result.applied:
                    display.say(f"step {step} left out: loss {result.loss:.4g}, gradient norm {result.grad_norm:.4g}")
                if meter is not None:
                    display.say("; ".join(say_traffic(meter)))
            skips.note(step, result)
            last = step == plan.total_steps
            if last or (plan.save_every_steps and step % plan.save_every_steps == 0):
                _save(parts, out, world, step, applied, cursors, dropped)
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


def _save(
    parts: Parts,
    out: Path,
    world: World,
    step: int,
    applied: int,
    cursors: dict[int, int],
    dropped: Counter[Drop],
) -> None:
    """Communicates: each rank knows how far its own streams are."""
    everybodys: dict[int, int] = {}
    for rank, theirs in enumerate(world.gather_objects(cursors)):
        everybodys.update({stream: theirs[stream] for stream in parts.mixture.owned(rank, world.size)})
    progress = replace(parts.progress(step, applied, everybodys), dropped=to_saved(gather_drops(dropped, world)))
    checkpoint.save(out, parts.engine, progress, world, keep=parts.config.train.keep_checkpoints)
    folders = {"model": parts.engine.weights()}
    if parts.config.train.ema_decay:
        folders["model-ema"] = folders["model"] | average_weights(parts.optimizer, parts.layout)
    elif world.is_main:
        shutil.rmtree(out / "model-ema", ignore_errors=True)  # of an earlier part of the run: it would pass for current
    if world.is_main:
        for name, weights in folders.items():
            checkpoint.export(out / name, weights, parts.config.model, parts.architecture)


def _evaluate(parts: Parts, world: World, display: Display, metrics: MetricsFile | None, step: int) -> None:
    """Communicates. Every [[eval]] table, on all ranks together."""
    embedder = ForwardEmbedder(parts.engine.forward, parts.tokenize, world.device)
    parts.engine.model.eval()
    for spec in parts.config.eval:
        data = parts.config.data
        result = evaluate(spec, embedder, parts.mixture.size, world, workers=data.workers, store=store_of(data))
        if metrics is not None:
            metrics.write({"step": step, "eval": spec.name, **result.as_dict()})
            display.say(f"step {step}  {spec.name}: " + _short(result.as_dict()))
    parts.engine.model.train()


def _short(values: dict[str, Any]) -> str:
    return "  ".join(f"{name} {value:.4g}" for name, value in values.items() if not name.startswith("chance"))


def _finite(value: float) -> float | None:
    """JSON has no word for infinity."""
    return value if math.isfinite(value) else None


def _rates(parts: Parts) -> dict[str, float]:
    """Each group's peak rate, where they are not all the same."""
    scales = {each.name: each.lr_scale for each in parts.treatments.values()}
    return {name: parts.plan.lr * scale for name, scale in scales.items()} if set(scales.values()) != {1.0} else {}
