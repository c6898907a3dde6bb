"""The run folder: what is in it, how checkpoints come into being whole or not at all, and what a resume may change.

resolved.toml     the whole configuration, defaults included
run.json          command, versions, ranks
metrics.jsonl     one object per step, one per evaluation, one for what was dropped
keys.jsonl        with train.write_keys: the samples of each step
checkpoints/step-00000100/   the engine's state and progress.json
model/            the weights as an ordinary open_clip model folder
model-ema/        their average, where train.ema_decay asks for one
"""

from __future__ import annotations

import json
import os
import pickle
import shutil
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import safetensors.torch
from torch import Tensor
from torch.optim import Optimizer

from clipscale.config.schema import Model
from clipscale.dist.engine import Engine
from clipscale.dist.world import World
from clipscale.errors import ConfigError
from clipscale.model.towers import to_open_clip

_OWN_FILES = ("resolved.toml", "run.json", "metrics.jsonl", "keys.jsonl", "checkpoints", "model", "model-ema")


@dataclass(frozen=True)
class Progress:
    """Where a run stands, beside what its engine holds."""

    step: int  # batches learned from
    applied: int  # updates done: all but those left out because they were not finite
    cursors: dict[int, int]  # of all streams
    order: str  # signature of the data order the cursors belong to
    model: dict[str, Any]  # the [model] table
    optim: list[Any]  # kind of the optimizer, and how many parameters each of its groups has
    global_batch: int
    dropped: list[list[Any]] = field(default_factory=list)  # reason, source, shard, samples left out so far


Resume = bool | Literal["auto"]  # auto: if there is something to resume


def prepare(out: Path, *, resume: Resume) -> Path | None:
    """Makes the run folder; -> the checkpoint to go on from, if any.

    Raises `ConfigError` where that would mix two runs, or where there is nothing to resume.
    """
    if out.exists() and not out.is_dir():
        raise ConfigError(f"--out: {out} is a file, wanted a folder")
    checkpoint = newest(out) if resume else None
    if resume is True and checkpoint is None:
        raise ConfigError(f"--resume: {out} holds no finished checkpoint; leave --resume out to start afresh")
    # What a run that died before its first checkpoint leaves behind may be written over by `auto`.
    foreign = [item.name for item in out.iterdir() if item.name not in _OWN_FILES or not resume] if out.is_dir() else []
    if foreign and checkpoint is None:
        raise ConfigError(f"--out: {out} is not empty; go on with --resume, or name another folder")
    out.mkdir(parents=True, exist_ok=True)
    return checkpoint


def newest(out: Path) -> Path | None:
    """The checkpoint with the most steps; a folder gets its name only when it is complete."""
    found = sorted((out / "checkpoints").glob("step-*"))
    return found[-1] if found else None


def save(out: Path, engine: Engine, progress: Progress, world: World, *, keep: int) -> None:
    """Communicates. Writes a checkpoint beside the others under a provisional name, then names it, then thins out."""
    folder = out / "checkpoints" / f"step-{progress.step:08d}"
    provisional = out / "checkpoints" / f".writing-{folder.name}"
    if world.is_main:
        shutil.rmtree(provisional, ignore_errors=True)
        provisional.mkdir(parents=True)
    world.barrier("the start of a checkpoint")
    engine.save(provisional)
    world.barrier("the end of a checkpoint")
    if world.is_main:
        (provisional / "progress.json").write_text(json.dumps(asdict(progress)))
        for file in provisional.rglob("*"):
            if file.is_file():
                _sync(file)
        shutil.rmtree(folder, ignore_errors=True)
        provisional.rename(folder)
        _sync(folder.parent)
        for old in sorted(folder.parent.glob("step-*"))[:-keep]:
            shutil.rmtree(old)


def _sync(path: Path) -> None:
    """Waits until the disk holds it: a rename that survives a power cut must not name contents that did not."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def load(folder: Path, engine: Engine, optimizer: Optimizer, wanted: Progress, total_steps: int) -> Progress:
    """Communicates. Fills the engine. Raises `ConfigError` where this run is another one than the checkpoint's.

    Rates, decay and betas are this run's, not those that were saved: they may change on the way.
    """
    progress = _read_progress(folder)
    _require_same_run(folder, progress, wanted)
    if progress.step > total_steps:
        raise ConfigError(
            f"--resume: {folder} has more steps than train.duration asks for: found {progress.step:,}, wanted at most "
            f"{total_steps:,}. Lengthen train.duration, or name another folder"
        )
    options = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    try:
        engine.load(folder)
    except (OSError, EOFError, RuntimeError, ValueError, KeyError, pickle.UnpicklingError) as error:
        raise ConfigError(f"--resume: {_damaged(folder)} ({type(error).__name__}: {error})") from error
    for group, own in zip(optimizer.param_groups, options, strict=True):
        group.update(own)
    return progress


def _read_progress(folder: Path) -> Progress:
    try:
        saved = json.loads((folder / "progress.json").read_text())
        cursors = {int(stream): cursor for stream, cursor in saved.pop("cursors").items()}
        return Progress(cursors=cursors, **saved)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"--resume: {_damaged(folder)} (progress.json: {error})") from error


def _damaged(folder: Path) -> str:
    return f"{folder} cannot be read; remove it to go on from the checkpoint before it, if there is one"


def _require_same_run(folder: Path, saved: Progress, wanted: Progress) -> None:
    # Through JSON, as the saved ones went: tuples are lists there.
    model, optim = json.loads(json.dumps([wanted.model, wanted.optim]))
    if saved.model != model:
        raise ConfigError(f"--resume: {folder} holds another model; found {saved.model}, wanted {model}")
    if saved.order != wanted.order:
        raise ConfigError(
            f"--resume: {folder} was trained in another order of samples. run.seed, data.streams, data.shuffle_block "
            "and the shards must stay as they were"
        )
    if saved.optim[0] != optim[0]:
        raise ConfigError(
            f"--resume: {folder} holds the state of optim.kind = {saved.optim[0]!r}, wanted {optim[0]!r}. Keep the "
            "kind, or start a new run from the weights: --set model.pretrained=RUN/model"
        )
    if saved.optim != optim:
        raise ConfigError(
            f"--resume: {folder} has groups of {saved.optim[1]} parameters, this run of {optim[1]}: optim.rules, layer "
            "decay and whether decay is 0 must stay as they were"
        )
    if saved.global_batch != wanted.global_batch:
        raise ConfigError(
            f"--resume: {folder} was trained with train.global_batch = {saved.global_batch:,}, wanted "
            f"{wanted.global_batch:,}; its schedule and order count in these batches"
        )


def export(folder: Path, weights: dict[str, Tensor], model: Model, architecture: dict[str, Any]) -> None:
    """Whole weights as `open_clip.create_model('local-dir:FOLDER')` loads them. On the main rank alone."""
    tensors, description = to_open_clip(weights, model, architecture)
    folder.mkdir(exist_ok=True)
    provisional = folder / ".writing"
    safetensors.torch.save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, provisional)
    provisional.replace(folder / "open_clip_model.safetensors")
    (folder / "open_clip_config.json").write_text(json.dumps(description, indent=2) + "\n")
