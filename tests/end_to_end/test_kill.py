"""A run of two ranks, killed outright in the middle of an epoch, goes on with other ranks as if nothing had been."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from clipscale.dist.world import World, joined
from tests.helpers.runs import REPOSITORY, TINY, Toy, run

STEPS, SAVE_EVERY = 16, 4  # of 64 pairs; an epoch of 512 is 8 steps
COMMAND = [sys.executable, "-c", "from clipscale.cli import main; main()", "train", str(TINY)]


SETTINGS = (
    "train.global_batch=64",
    f"train.duration.steps={STEPS}",
    f"train.save_every.steps={SAVE_EVERY}",
    "train.write_keys=true",
    "data.streams=8",
    "data.shuffle_block=16",
)


def command(toy: Toy, out: Path, ranks: int, workers: int, *more: str) -> list[str]:
    settings = [*toy.settings, *SETTINGS, "eval=[]", f"data.workers={workers}"]
    flags = [word for each in settings for word in ("--set", each)]
    return [*COMMAND, "--out", str(out), "--ranks", str(ranks), *flags, *more]


def kill_after(toy: Toy, out: Path, step: int) -> None:
    """Starts two ranks, with a loader worker each, and kills all of their processes once that step is written down."""
    metrics = out / "metrics.jsonl"
    with subprocess.Popen(
        command(toy, out, 2, 1),
        cwd=REPOSITORY,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    ) as process:
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline and not (metrics.exists() and metrics.read_text().count("\n") >= step):
            time.sleep(0.01)
            assert process.poll() is None, "ended before it could be killed"
        os.killpg(process.pid, signal.SIGKILL)
    assert 1 <= metrics.read_text().count("\n") < STEPS


def keys(out: Path) -> list[list[str]]:
    records = [json.loads(line) for line in (out / "keys.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records] == list(range(1, STEPS + 1))
    return [record["keys"] for record in records]


def losses(out: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (out / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def alone() -> Iterator[World]:
    with joined() as world:
        yield world


@pytest.fixture(scope="module")
def unbroken(alone: World, toy: Toy, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("unbroken") / "run"
    run(alone, toy.config(*SETTINGS), out)
    return out


@pytest.fixture(scope="module")
def killed(toy: Toy, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Dead in its sixth step or a little later: its newest checkpoint is of the fourth, within the first epoch."""
    out = tmp_path_factory.mktemp("killed") / "run"
    kill_after(toy, out, 6)
    return out


@pytest.mark.parametrize("ranks", [1, 4])
def test_it_goes_on_with_other_ranks(
    unbroken: Path, killed: Path, alone: World, toy: Toy, tmp_path: Path, ranks: int
) -> None:
    out = tmp_path / "run"
    shutil.copytree(killed, out)
    if ranks == 1:
        run(alone, toy.config(*SETTINGS), out, resume=True)
    else:
        arguments = command(toy, out, ranks, 0, "--resume")
        done = subprocess.run(arguments, cwd=REPOSITORY, capture_output=True, text=True, timeout=150, check=False)
        assert done.returncode == 0, done.stderr
    assert keys(out) == keys(unbroken)
    assert losses(out) == pytest.approx(losses(unbroken), rel=1e-5)
    epoch = [key for step in keys(out)[:8] for key in step]
    assert len(set(epoch)) == len(epoch) == 512
