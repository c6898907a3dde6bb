"""The run folder: whole or not at all, the newest first, the oldest thinned out."""

from __future__ import annotations

import json
import os
import re
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from clipscale.config.schema import Model
from clipscale.dist.engine import PlainEngine
from clipscale.dist.world import World
from clipscale.errors import ConfigError
from clipscale.train import checkpoint
from clipscale.train.checkpoint import Progress

ALONE = World(0, 1, torch.device("cpu"))
MODEL = Model(name="ViT-B-32", vision_cfg={"image_size": [32, 32], "layers": (1, 2)})


def engine() -> PlainEngine:
    model = nn.Linear(2, 2)
    return PlainEngine(model, torch.optim.SGD([{"params": model.parameters(), "base_lr": 1.0}]), ALONE)


def progress(step: int) -> Progress:
    return Progress(step, step, {0: step, 7: step + 1}, "order", asdict(MODEL), ["sgd", [2]], 64)


def load(folder: Path, into: PlainEngine, **other: Any) -> Progress:
    return checkpoint.load(folder, into, into._optimizer, replace(progress(0), **other), total_steps=9)


def names(out: Path) -> list[str]:
    return sorted(path.name for path in (out / "checkpoints").iterdir())


def test_what_is_saved_comes_back(tmp_path: Path) -> None:
    saved, loaded = engine(), engine()
    checkpoint.save(tmp_path, saved, progress(3), ALONE, keep=3)
    found = load(tmp_path / "checkpoints" / "step-00000003", loaded)
    assert (found.step, found.cursors, found.order) == (3, {0: 3, 7: 4}, "order")
    assert all(torch.equal(loaded.weights()[name], weight) for name, weight in saved.weights().items())


def test_a_run_shorter_than_its_checkpoint_is_refused(tmp_path: Path) -> None:
    for step in (9, 10):
        checkpoint.save(tmp_path, engine(), progress(step), ALONE, keep=3)
    assert load(tmp_path / "checkpoints" / "step-00000009", engine()).step == 9  # just finished
    with pytest.raises(ConfigError, match=r"found 10, wanted at most 9\. Lengthen train\.duration"):
        load(tmp_path / "checkpoints" / "step-00000010", engine())


def test_only_the_newest_are_kept(tmp_path: Path) -> None:
    for step in (8, 9, 10, 11):
        checkpoint.save(tmp_path, engine(), progress(step), ALONE, keep=2)
    assert names(tmp_path) == ["step-00000010", "step-00000011"]
    assert checkpoint.newest(tmp_path) == tmp_path / "checkpoints" / "step-00000011"


def test_saving_a_step_again_replaces_it(tmp_path: Path) -> None:
    first, second = engine(), engine()
    for each in (first, second):
        checkpoint.save(tmp_path, each, progress(5), ALONE, keep=2)
    loaded = engine()
    load(tmp_path / "checkpoints" / "step-00000005", loaded)
    assert torch.equal(loaded.model.weight, second.model.weight)


class FullDisk(PlainEngine):
    def save(self, folder: Path) -> None:
        super().save(folder)
        raise OSError(28, "No space left on device")


def test_a_save_that_fails_leaves_no_checkpoint_behind(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    full = FullDisk(model, torch.optim.SGD([{"params": model.parameters(), "base_lr": 1.0}]), ALONE)
    checkpoint.save(tmp_path, engine(), progress(4), ALONE, keep=1)
    with pytest.raises(OSError, match="No space left"):
        checkpoint.save(tmp_path, full, progress(5), ALONE, keep=1)
    assert checkpoint.newest(tmp_path) == tmp_path / "checkpoints" / "step-00000004"
    checkpoint.save(tmp_path, engine(), progress(5), ALONE, keep=1)  # what was begun is no hindrance
    assert names(tmp_path) == ["step-00000005"]


def test_nothing_is_named_before_it_is_on_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[tuple[str, str]] = []
    fsync, rename = os.fsync, Path.rename

    def note_fsync(descriptor: int) -> None:
        events.append(("sync", Path(f"/proc/self/fd/{descriptor}").readlink().name))
        fsync(descriptor)

    def note_rename(self: Path, target: Path) -> Path:
        events.append(("rename", target.name))
        return rename(self, target)

    monkeypatch.setattr(os, "fsync", note_fsync)
    monkeypatch.setattr(Path, "rename", note_rename)
    checkpoint.save(tmp_path, engine(), progress(1), ALONE, keep=1)
    place = events.index(("rename", "step-00000001"))
    assert {name for kind, name in events[:place] if kind == "sync"} == {"plain.pt", "progress.json"}
    assert events[place + 1 :] == [("sync", "checkpoints")]


def test_other_things_beside_checkpoints_are_not_taken_for_one(tmp_path: Path) -> None:
    assert checkpoint.newest(tmp_path) is None
    for name in (".writing-step-00000009", "best"):
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
    assert checkpoint.newest(tmp_path) is None


@pytest.mark.parametrize(
    ("other", "said"),
    [
        ({"order": "other"}, "another order of samples"),
        ({"model": {"name": "ViT-B-16"}}, "another model"),
        ({"optim": ["lamb", [2]]}, "the state of optim.kind = 'sgd', wanted 'lamb'"),
        ({"optim": ["sgd", [1, 1]]}, "optim.rules, layer decay and whether decay is 0 must stay"),
        ({"global_batch": 128}, "trained with train.global_batch = 64, wanted 128"),
    ],
)
def test_another_run_is_refused(other: dict[str, Any], said: str, tmp_path: Path) -> None:
    checkpoint.save(tmp_path, engine(), progress(1), ALONE, keep=1)
    with pytest.raises(ConfigError, match=re.escape(said)):
        load(tmp_path / "checkpoints" / "step-00000001", engine(), **other)


@pytest.mark.parametrize("file", ["plain.pt", "progress.json"])
def test_a_damaged_checkpoint_is_named(file: str, tmp_path: Path) -> None:
    checkpoint.save(tmp_path, engine(), progress(1), ALONE, keep=1)
    folder = tmp_path / "checkpoints" / "step-00000001"
    whole = (folder / file).read_bytes()
    for size in (0, len(whole) // 2, len(whole) - 5):
        (folder / file).write_bytes(whole[:size])
        with pytest.raises(ConfigError, match="step-00000001 cannot be read; remove it to go on"):
            load(folder, engine())


def test_rates_and_decay_are_this_run_s(tmp_path: Path) -> None:
    """torch would bring back those that were saved."""
    checkpoint.save(tmp_path, engine(), progress(1), ALONE, keep=1)
    model = nn.Linear(2, 2)
    groups = [{"params": model.parameters(), "base_lr": 7.0, "weight_decay": 0.5, "momentum": 0.3}]
    changed = PlainEngine(model, torch.optim.SGD(groups), ALONE)
    load(tmp_path / "checkpoints" / "step-00000001", changed)
    (group,) = changed._optimizer.param_groups
    assert (group["base_lr"], group["weight_decay"], group["momentum"]) == (7.0, 0.5, 0.3)


def test_progress_is_plain_json(tmp_path: Path) -> None:
    checkpoint.save(tmp_path, engine(), progress(1), ALONE, keep=1)
    saved = json.loads((tmp_path / "checkpoints" / "step-00000001" / "progress.json").read_text())
    assert saved["step"] == 1
    assert saved["cursors"] == {"0": 1, "7": 2}
