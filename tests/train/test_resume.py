"""An interrupted run goes on as if nothing had happened, or says why it cannot."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from clipscale.dist.world import World, joined
from clipscale.errors import ClipscaleError, ConfigError
from tests.helpers.ranks import run_ranks
from tests.helpers.runs import Outcome, Toy, outcome, run

TEN = ("train.duration.steps=10", "train.save_every.steps=5", "train.text_chunk=9")


@pytest.fixture(scope="module")
def alone() -> Iterator[World]:
    with joined() as world:
        yield world


@pytest.fixture(scope="module")
def finished(alone: World, toy: Toy, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Ten steps at a stretch on one rank, with a checkpoint after the fifth."""
    out = tmp_path_factory.mktemp("finished") / "run"
    run(alone, toy.config(*TEN), out)
    return out


def cut_off(finished: Path, folder: Path) -> Path:
    """The same run as if it had died during its tenth step: beyond its last checkpoint, in the middle of a line."""
    out = folder / "run"
    shutil.copytree(finished, out)
    shutil.rmtree(out / "checkpoints" / "step-00000010")
    lines = (out / "metrics.jsonl").read_text().splitlines()
    (out / "metrics.jsonl").write_text("\n".join(lines[:9]) + "\n" + lines[9][:40])
    return out


def assert_identical(found: Outcome, wanted: Outcome) -> None:
    assert [record["step"] for record in found.records] == list(range(1, 11))
    for key in ("loss", "grad_norm", "logit_scale", "lr", "epoch", "samples"):
        assert found.curve(key) == wanted.curve(key), key
    assert found.weights.keys() == wanted.weights.keys()
    for name, weight in wanted.weights.items():
        assert torch.equal(found.weights[name], weight), name


def test_five_steps_and_five_more_are_ten(alone: World, toy: Toy, finished: Path, tmp_path: Path) -> None:
    out = cut_off(finished, tmp_path)
    found = run(alone, toy.config(*TEN), out, resume=True)
    assert found is not None
    assert_identical(found, outcome(finished))
    assert sorted(path.name for path in (out / "checkpoints").iterdir()) == ["step-00000005", "step-00000010"]


def test_random_numbers_of_the_towers_go_on_too(alone: World, toy: Toy, tmp_path: Path) -> None:
    config = toy.config(*TEN, "model.vision_cfg.patch_dropout=0.5", "data.augment.kind=affine")
    through = run(alone, config, tmp_path / "through")
    other = run(alone, toy.config(*TEN), tmp_path / "other")
    assert through is not None
    assert other is not None
    assert through.curve() != other.curve()
    (tmp_path / "cut").mkdir()
    found = run(alone, config, cut_off(tmp_path / "through", tmp_path / "cut"), resume=True)
    assert found is not None
    assert_identical(found, through)


def resume_elsewhere(world: World, toy: Toy, out: Path) -> Outcome | None:
    return run(world, toy.config(*TEN), out, resume=True)


@pytest.mark.parametrize("size", [2, 4])
def test_the_plain_engine_goes_on_with_any_number_of_ranks(size: int, toy: Toy, finished: Path, tmp_path: Path) -> None:
    found = run_ranks(size, resume_elsewhere, toy, cut_off(finished, tmp_path))[0]
    wanted = outcome(finished)
    assert [record["step"] for record in found.records] == list(range(1, 11))
    assert found.curve() == pytest.approx(wanted.curve(), rel=1e-5)
    assert found.curve()[:5] == wanted.curve()[:5]


def zero_five_and_five(world: World, toy: Toy, folder: Path) -> list[Outcome | None]:
    outcomes = []
    for stage in (2, 3):
        whole = ("train.image_chunk=whole", "train.text_chunk=whole")
        config = toy.config(*TEN, *whole, "engine.kind=deepspeed", f"engine.zero_stage={stage}")
        finished = folder / f"through-{stage}"
        outcomes.append(run(world, config, finished))
        if world.is_main:
            (folder / str(stage)).mkdir()
            cut_off(finished, folder / str(stage))
        world.barrier("the cut")
        outcomes.append(run(world, config, folder / str(stage) / "run", resume=True))
    return outcomes


def resume_zero(world: World, toy: Toy, out: Path, stage: int) -> str:
    config = toy.config(*TEN, "engine.kind=deepspeed", f"engine.zero_stage={stage}")
    try:
        run(world, config, out, resume=True)
    except ConfigError as error:
        return str(error)
    return "went on"


def test_zero_goes_on_with_the_ranks_and_the_stage_that_it_had(toy: Toy, tmp_path: Path) -> None:
    outcomes = run_ranks(2, zero_five_and_five, toy, tmp_path, timeout_s=120)[0]
    for through, found in zip(outcomes[::2], outcomes[1::2], strict=True):
        assert_identical(found, through)
    (tmp_path / "alone").mkdir()
    out = cut_off(tmp_path / "through-2", tmp_path / "alone")
    (told,) = run_ranks(1, resume_zero, toy, out, 2)
    assert "written under ZeRO-2 by 2 ranks, this run has ZeRO-2 and 1" in told
    for told in run_ranks(2, resume_zero, toy, out, 1):
        assert "written under ZeRO-2 by 2 ranks, this run has ZeRO-1 and 2" in told
    assert (out / "metrics.jsonl").read_text().count("\n") == 9  # a refusal leaves everything as it is


# ---- what cannot be resumed -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("setting", "fault"),
    [
        ("model.vision_cfg.layers=3", "holds another model"),
        ("model.embed_dim=16", "holds another model"),
        ("run.seed=1", "trained in another order of samples. run.seed"),
        ("data.streams=4", "trained in another order of samples"),
        ("data.shuffle_block=7", "trained in another order of samples"),
    ],
)
def test_another_run_is_refused(
    setting: str, fault: str, alone: World, toy: Toy, finished: Path, tmp_path: Path
) -> None:
    out = cut_off(finished, tmp_path)
    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    with pytest.raises(ConfigError, match=fault):
        run(alone, toy.config(*TEN, setting), out, resume=True)
    assert before == {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}


def test_another_engine_is_refused(toy: Toy, finished: Path, tmp_path: Path) -> None:
    (told,) = run_ranks(1, resume_zero, toy, cut_off(finished, tmp_path), 1)
    assert "was not written by engine.kind = 'deepspeed'" in told


def test_nothing_to_resume(alone: World, toy: Toy, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="holds no finished checkpoint; leave --resume out"):
        run(alone, toy.config(*TEN), tmp_path / "absent", resume=True)
    assert not (tmp_path / "absent").exists()


def test_a_folder_in_use_is_not_written_over(alone: World, toy: Toy, finished: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is not empty; go on with --resume, or name another folder"):
        run(alone, toy.config(*TEN), finished)
    (tmp_path / "notes.txt").write_text("mine")
    for resume in (False, "auto"):
        with pytest.raises(ConfigError, match="is not empty"):
            run(alone, toy.config(*TEN), tmp_path, resume=resume)  # pyright: ignore[reportArgumentType]
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]
    with pytest.raises(ConfigError, match="is a file, wanted a folder"):
        run(alone, toy.config(*TEN), tmp_path / "notes.txt")


# ---- auto -------------------------------------------------------------------------------------------------------


def test_auto_starts_then_goes_on_then_rests(alone: World, toy: Toy, finished: Path, tmp_path: Path) -> None:
    config = toy.config(*TEN)
    first = run(alone, config, tmp_path / "new", resume="auto")
    assert first is not None
    assert_identical(first, outcome(finished))
    again = run(alone, config, cut_off(finished, tmp_path), resume="auto")
    assert again is not None
    assert_identical(again, outcome(finished))
    times = {path: path.stat().st_mtime_ns for path in (tmp_path / "new" / "checkpoints").rglob("*")}
    rested = run(alone, config, tmp_path / "new", resume="auto")
    assert rested is not None
    assert_identical(rested, outcome(finished))
    assert times == {path: path.stat().st_mtime_ns for path in (tmp_path / "new" / "checkpoints").rglob("*")}


def test_auto_writes_over_a_run_that_died_before_its_first_checkpoint(
    alone: World, toy: Toy, finished: Path, tmp_path: Path
) -> None:
    out = cut_off(finished, tmp_path)
    (out / "checkpoints" / "step-00000005").rename(out / "checkpoints" / ".writing-step-00000005")
    found = run(alone, toy.config(*TEN), out, resume="auto")
    assert found is not None
    assert_identical(found, outcome(finished))
    assert sorted(path.name for path in (out / "checkpoints").iterdir()) == ["step-00000005", "step-00000010"]


def test_a_longer_run_goes_on_from_a_finished_one(alone: World, toy: Toy, finished: Path, tmp_path: Path) -> None:
    shutil.copytree(finished, tmp_path / "run")
    found = run(alone, toy.config(*TEN, "train.duration.steps=12"), tmp_path / "run", resume=True)
    assert found is not None
    assert [record["step"] for record in found.records] == list(range(1, 13))
    assert json.loads((tmp_path / "run" / "run.json").read_text())["ranks"] == 1


def test_a_run_that_died_before_its_last_evaluation_makes_up_for_it(alone: World, toy: Toy, tmp_path: Path) -> None:
    spec = f"eval=[{{kind = 'retrieval', name = 'held_out', shards = '{toy.held_out}'}}]"
    config = toy.config("train.duration.steps=2", spec)
    through = run(alone, config, tmp_path / "run")
    assert through is not None
    file = tmp_path / "run" / "metrics.jsonl"
    lines = file.read_text().splitlines()
    file.write_text("".join(f"{line}\n" for line in lines if "eval" not in json.loads(line)))
    again = run(alone, config, tmp_path / "run", resume="auto")
    assert again is not None
    assert again.evaluations == through.evaluations
    assert [record["step"] for record in again.records] == [record["step"] for record in through.records]
    rested = run(alone, config, tmp_path / "run", resume="auto")
    assert rested is not None
    assert rested.evaluations == through.evaluations


def other_rate(world: World, toy: Toy, folder: Path, *engine: str) -> list[float]:
    """Communicates. Two steps, then two more at ten times the rate; -> how far the weights went in each part."""
    recipe = ("optim.schedule.kind=constant", "optim.warmup.steps=1", "optim.kind=sgd", "optim.momentum=0.0")
    first = run(world, toy.config("train.duration.steps=2", *recipe, "optim.lr=0.001", *engine), folder)
    then = run(world, toy.config("train.duration.steps=3", *recipe, "optim.lr=0.1", *engine), folder, resume=True)
    if first is None or then is None:
        return []
    norm = then.records[-1]["grad_norm"]
    apart = torch.stack([(then.weights[name] - first.weights[name]).norm() for name in first.weights]).norm()
    return [apart.item(), 0.1 * min(1.0, norm)]


@pytest.mark.parametrize(
    "engine", [(), ("engine.kind=deepspeed", "engine.zero_stage=2"), ("engine.kind=hsdp", "engine.shard_group=2")]
)
def test_a_resumed_run_takes_its_own_rate(engine: tuple[str, ...], toy: Toy, tmp_path: Path) -> None:
    (apart, wanted), _ = run_ranks(2, other_rate, toy, tmp_path / "run", *engine, "optim.weight_decay=0.0")
    assert apart == pytest.approx(wanted, rel=1e-2)


def test_an_average_that_is_not_kept_up_is_taken_away(alone: World, toy: Toy, tmp_path: Path) -> None:
    run(alone, toy.config("train.duration.steps=2", "train.ema_decay=0.5"), tmp_path / "run")
    assert (tmp_path / "run" / "model-ema").is_dir()
    run(alone, toy.config("train.duration.steps=3"), tmp_path / "run", resume=True)
    assert not (tmp_path / "run" / "model-ema").exists()


def test_missing_evaluation_shards_are_told_at_the_start(alone: World, toy: Toy, tmp_path: Path) -> None:
    spec = "eval=[{kind = 'retrieval', name = 'later', shards = 'nowhere'}]"
    with pytest.raises(ClipscaleError, match=r"(?s)\[\[eval\]\] 'later': shards are missing.*nowhere"):
        run(alone, toy.config(*TEN, spec), tmp_path / "run")
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


# ---- hybrid sharding --------------------------------------------------------------------------------------------

HSDP = (*TEN, "engine.kind=hsdp", "optim.kind=lamb", "optim.lr=0.005", "train.ema_decay=0.9")


def hsdp_run(world: World, toy: Toy, out: Path, group: int, resume: bool) -> Outcome | None:
    return run(world, toy.config(*HSDP, f"engine.shard_group={group}"), out, resume=resume)


def test_hsdp_goes_on_with_other_ranks_and_other_groups(toy: Toy, tmp_path: Path) -> None:
    through = run_ranks(2, hsdp_run, toy, tmp_path / "through", 2, False)[0]
    for size, group in ((2, 2), (2, 1), (4, 2), (1, 1)):
        (tmp_path / f"{size}-{group}").mkdir()
        out = cut_off(tmp_path / "through", tmp_path / f"{size}-{group}")
        found = run_ranks(size, hsdp_run, toy, out, group, True)[0]
        if (size, group) == (2, 2):
            assert_identical(found, through)
        assert found.curve() == pytest.approx(through.curve(), rel=1e-5), (size, group)
        for name, weight in through.weights.items():
            torch.testing.assert_close(found.weights[name], weight, rtol=1e-3, atol=1e-5, msg=f"{size} {group} {name}")
