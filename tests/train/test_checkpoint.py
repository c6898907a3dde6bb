"""The run folder: whole or not at all, the newest first, the oldest thinned out."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from pathlib import Path

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
    return Progress(step, step, {0: step, 7: step + 1}, "order", asdict(MODEL))


def names(out: Path) -> list[str]:
    return sorted(path.name for path in (out / "checkpoints").iterdir())


def test_what_is_saved_comes_back(tmp_path: Path) -> None:
    saved, loaded = engine(), engine()
    checkpoint.save(tmp_path, saved, progress(3), ALONE, keep=3)
    found = checkpoint.load(tmp_path / "checkpoints" / "step-00000003", loaded, order="order", model=MODEL)
    assert (found.step, found.cursors, found.order) == (3, {0: 3, 7: 4}, "order")
    assert all(torch.equal(loaded.weights()[name], weight) for name, weight in saved.weights().items())


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
    checkpoint.load(tmp_path / "checkpoints" / "step-00000005", loaded, order="order", model=MODEL)
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


def test_another_order_and_another_model(tmp_path: Path) -> None:
    checkpoint.save(tmp_path, engine(), progress(1), ALONE, keep=1)
    folder = tmp_path / "checkpoints" / "step-00000001"
    with pytest.raises(ConfigError, match="another order of samples"):
        checkpoint.load(folder, engine(), order="other", model=MODEL)
    with pytest.raises(ConfigError, match="another model"):
        checkpoint.load(folder, engine(), order="order", model=Model(name="ViT-B-16"))


def test_progress_is_plain_json(tmp_path: Path) -> None:
    checkpoint.save(tmp_path, engine(), progress(1), ALONE, keep=1)
    saved = json.loads((tmp_path / "checkpoints" / "step-00000001" / "progress.json").read_text())
    assert saved["step"] == 1
    assert saved["cursors"] == {"0": 1, "7": 2}
