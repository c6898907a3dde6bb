"""The command line: faults in words with their family's exit code, and one whole way from shards to a table."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from clipscale.cli import main
from tests.helpers.runs import REPOSITORY, TINY, Toy, outcome

NAMED = """
[train]
global_batch = 64
duration = { steps = 2 }
[data]
shards = "nowhere"
[model]
name = "ViT-B-32"
[optim]
kind = "adamw"
lr = 1e-3
"""


@dataclass(frozen=True)
class Said:
    code: int
    out: str
    err: str


@pytest.fixture
def clipscale(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Said]:
    """The command in this process: the imports of a new one take seconds."""

    def run(*arguments: object) -> Said:
        monkeypatch.setattr(sys, "argv", ["clipscale", *map(str, arguments)])
        with pytest.raises(SystemExit) as left:
            main()
        captured = capsys.readouterr()
        return Said(int(left.value.code or 0), captured.out, captured.err)

    return run


def tiny(toy: Toy, *settings: str) -> list[str]:
    flags = [*toy.settings, "data.workers=0", "eval=[]", "train.duration.steps=2", *settings]
    return [str(TINY), *(part for setting in flags for part in ("--set", setting))]


def assert_fault(said: Said, code: int, *parts: str) -> None:
    assert said.code == code, said.err
    assert said.err.startswith("clipscale: ")
    assert "Traceback" not in said.err
    for part in parts:
        assert part in said.err


def test_what_does_not_go_together_is_refused_before_any_data_is_read(
    clipscale: Callable[..., Said], tmp_path: Path
) -> None:
    settings = (
        "engine.kind=hsdp",
        "engine.shard_group=2",
        "optim.kind=muon",
        "model.compile=true",
        "data.shards=absent",
    )
    said = clipscale("train", TINY, "--out", tmp_path / "run", *(word for each in settings for word in ("--set", each)))
    assert_fault(said, 2, "engine.shard_group: 2 does not divide the 1 ranks", "optim.kind = 'muon'", "model.compile")
    assert "absent" not in said.err
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("settings", "code", "parts"),
    [
        (["train.global_batsch=5"], 2, ["train.global_batsch", "unknown key; did you mean train.global_batch?"]),
        (["optim.lr='fast'"], 2, ["optim.lr (--set optim.lr='fast'): found 'fast', wanted a number"]),
        (["run.sed=5", "train.image_chunk=0"], 2, ["2 faults", "run.sed", "train.image_chunk"]),
        (["train.global_batch"], 2, ["wanted section.key=value"]),
        (["data.shards=/nowhere/at-all"], 3, ["shards are missing", "/nowhere/at-all"]),
        (["train.global_batch=1024"], 2, ["512 samples in 4 shards do not fill one global batch of 1,024"]),
        (["train.duration.fraction=0.5"], 2, ["found a fraction, wanted steps, samples or epochs"]),
        (["model.vision_cfg.timm_model_name=resnett"], 2, ["timm knows no 'resnett'"]),
        (["model.text_cfg.hed=5"], 2, ["model.text_cfg.hed: unknown key; did you mean heads"]),
        (["model.token_ids=/nowhere.json"], 2, ["no file at /nowhere.json"]),
    ],
)
def test_faults_of_a_training(
    settings: list[str], code: int, parts: list[str], clipscale: Callable[..., Said], toy: Toy, tmp_path: Path
) -> None:
    assert_fault(clipscale("train", *tiny(toy, *settings), "--out", tmp_path / "run"), code, *parts)


def test_an_unknown_architecture(clipscale: Callable[..., Said], toy: Toy, tmp_path: Path) -> None:
    file = tmp_path / "named.toml"
    file.write_text(NAMED.replace("ViT-B-32", "ViT-B32"))
    for command in (("config", "check", file), ("train", file, "--out", tmp_path / "run", "--set", toy.settings[0])):
        settings = ("--set", "data.streams=4") if command[0] == "train" else ()
        assert_fault(clipscale(*command, *settings), 2, "open_clip knows no 'ViT-B32'; did you mean", "ViT-B-32")


@pytest.mark.parametrize("ranks", [0, -1])
def test_no_ranks(ranks: int, clipscale: Callable[..., Said], toy: Toy, tmp_path: Path) -> None:
    said = clipscale("train", *tiny(toy), "--out", tmp_path / "run", "--ranks", ranks)
    assert_fault(said, 2, f"--ranks: found {ranks}, wanted at least 1")


def test_ranks_under_another_launcher(
    clipscale: Callable[..., Said], toy: Toy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    said = clipscale("train", *tiny(toy), "--out", tmp_path / "run", "--ranks", 2)
    assert_fault(said, 2, "a launcher has started this process already; leave --ranks out")


def test_folders_in_use_and_nothing_to_resume(clipscale: Callable[..., Said], toy: Toy, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").touch()
    assert_fault(clipscale("train", *tiny(toy), "--out", tmp_path), 2, "is not empty; go on with --resume")
    said = clipscale("train", *tiny(toy), "--out", tmp_path / "new", "--resume")
    assert_fault(said, 2, "holds no finished checkpoint; leave --resume out")
    assert_fault(clipscale("train", *tiny(toy), "--out", TINY), 2, "is a file, wanted a folder")
    assert_fault(clipscale("train", tmp_path / "absent.toml", "--out", tmp_path / "new"), 2, "no configuration file at")


@pytest.mark.parametrize(
    ("arguments", "code", "part"),
    [
        (["eval", "all", "{}"], 2, "holds no resolved.toml"),
        (["eval", "retrieval", "{}", "x"], 2, "holds no model/ folder"),
        (["eval", "zeroshot", "{}", "x"], 2, "holds no model/ folder"),
        (["data", "toy", "--out", "{}/toy", "--samples", "2", "--shards", "3"], 2, "2 samples cannot fill 3 shards"),
        (["data", "fetch", "imagenet", "--out", "{}/x"], 2, "imagenet"),
    ],
)
def test_faults_of_other_commands(
    arguments: list[str], code: int, part: str, clipscale: Callable[..., Said], tmp_path: Path
) -> None:
    assert_fault(clipscale(*(argument.format(tmp_path) for argument in arguments)), code, part)


def test_what_typer_itself_refuses_has_the_same_code(clipscale: Callable[..., Said]) -> None:
    for arguments in (["train", TINY], ["train", TINY, "--out", "x", "--rank", "2"], ["no-such-command"]):
        said = clipscale(*arguments)
        assert said.code == 2
        assert "Traceback" not in said.err


def test_looking_at_a_configuration(clipscale: Callable[..., Said], toy: Toy, tmp_path: Path) -> None:
    said = clipscale("config", "check", *tiny(toy))
    assert (said.code, said.out) == (0, f"{TINY}: valid\n")
    said = clipscale("config", "show", *tiny(toy, "run.seed=5"))
    shown = tmp_path / "shown.toml"
    shown.write_text(said.out)
    assert "seed = 5" in said.out
    assert clipscale("config", "show", shown).out == said.out


# ---- real processes ---------------------------------------------------------------------------------------------


def process(*arguments: object, timeout_s: float = 120) -> Said:
    done = subprocess.run(
        [sys.executable, "-m", "clipscale", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
        cwd=REPOSITORY,
    )
    return Said(done.returncode, done.stdout, done.stderr)


@pytest.mark.parametrize("arguments", [["--help"], ["train", "--help"]])
def test_help_imports_nothing_heavy(arguments: list[str]) -> None:
    """That is how it answers within a second."""
    script = (
        "import sys\n"
        f"sys.argv = ['clipscale', *{arguments!r}]\n"
        "from clipscale.cli import main\n"
        "try:\n    main()\nexcept SystemExit as left:\n    assert not left.code\n"
        "heavy = {'torch', 'deepspeed', 'open_clip', 'timm', 'webdataset', 'numpy'} & set(sys.modules)\n"
        "sys.exit(f'imported {heavy}' if heavy else 0)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "Usage" in done.stdout


def test_ranks_that_cannot_share_the_batch_say_so_once(toy: Toy, tmp_path: Path) -> None:
    said = process("train", *tiny(toy, "train.global_batch=63"), "--out", tmp_path / "run", "--ranks", 2)
    assert_fault(said, 2, "train.global_batch = 63 cannot be shared by 2 ranks: the nearest is 62 or 64")
    assert said.err.count("cannot be shared") == 1


@pytest.fixture(scope="module")
def trained(toy: Toy, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Said]:
    """40 steps on two real ranks, evaluated at the end."""
    out = tmp_path_factory.mktemp("trained") / "run"
    evaluation = (
        f"eval=[{{kind='retrieval', name='captions', shards='{toy.held_out}'}},"
        f" {{kind='zeroshot', name='names', shards='{toy.held_out}'}}]"
    )
    settings = tiny(toy, "train.duration.steps=40", evaluation)
    return out, process("train", *settings, "--out", out, "--ranks", 2)


def test_a_whole_training(trained: tuple[Path, Said]) -> None:
    out, said = trained
    assert (said.code, said.err) == (0, "")
    assert "512 samples" in said.out
    assert "2 rank(s) on cpu, plain" in said.out
    assert f"done: {out}/model holds the weights" in said.out
    found = outcome(out)
    assert len(found.curve()) == 40
    assert found.curve()[-1] < found.curve()[0] - 0.1
    assert [record["eval"] for record in found.evaluations] == ["captions", "names"]
    assert {path.name for path in out.iterdir()} == {
        "resolved.toml",
        "run.json",
        "metrics.jsonl",
        "checkpoints",
        "model",
    }
    described = json.loads((out / "run.json").read_text())
    assert described["ranks"] == 2
    assert {"clipscale", "torch", "deepspeed"} <= described["versions"].keys()


def test_evaluating_it(trained: tuple[Path, Said], clipscale: Callable[..., Said], toy: Toy, tmp_path: Path) -> None:
    out, _ = trained
    said = clipscale("eval", "all", out, "--json", tmp_path / "all.json", "--sheet", tmp_path / "sheet.png")
    assert said.code == 0, said.err
    assert "chance" in said.out
    assert f"picture: {tmp_path}/sheet.png" in said.out
    assert (tmp_path / "sheet.png").read_bytes().startswith(b"\x89PNG")
    everything = json.loads((tmp_path / "all.json").read_text())
    # The exported weights answer as the trained ones did.
    for record in outcome(out).evaluations:
        name = record.pop("eval")
        del record["step"]
        assert everything[name] == pytest.approx(record, abs=0.04)
    for command, name in (("retrieval", "captions"), ("zeroshot", "names")):
        said = clipscale("eval", command, out, toy.held_out, "--json", tmp_path / "one.json")
        assert said.code == 0, said.err
        (single,) = json.loads((tmp_path / "one.json").read_text()).values()
        assert single == everything[name]
    assert_fault(clipscale("eval", "retrieval", out, tmp_path / "absent"), 3, "shards are missing")


def test_an_interrupt_ends_everything_quietly(toy: Toy, tmp_path: Path) -> None:
    out = tmp_path / "run"
    arguments = tiny(toy, "data.workers=1", "train.duration.steps=100_000")
    command = [sys.executable, "-m", "clipscale", "train", *arguments, "--out", str(out), "--ranks", "2"]
    running = subprocess.Popen(
        command,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        # A shell's background job ignores interrupts, and hands that on to us.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    descendants: list[psutil.Process] = []
    try:
        deadline = time.monotonic() + 90
        while not ((out / "metrics.jsonl").exists() and (out / "metrics.jsonl").stat().st_size):
            assert running.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.1)
        descendants = psutil.Process(running.pid).children(recursive=True)
        running.send_signal(signal.SIGINT)
        _, err = running.communicate(timeout=60)
    finally:
        running.kill()
        running.wait()
    assert running.returncode == 130
    assert f"{REPOSITORY}/clipscale/" not in err  # no frame of ours, in no traceback
    _, alive = psutil.wait_procs(descendants, timeout=10)
    assert not [process for process in alive if process.status() != psutil.STATUS_ZOMBIE]


def test_config_check_names_what_needs_no_data(clipscale: Callable[..., Said]) -> None:
    said = clipscale(
        "config",
        "check",
        TINY,
        "--set",
        "optim.kind=muon",
        "--set",
        "engine={kind='hsdp', shard_group=2}",
        "--ranks",
        "3",
    )
    assert_fault(said, 2, "shard_group: 2 does not divide the 3 ranks", "'muon'", "cannot be shared by 3 ranks")
    said = clipscale("config", "check", TINY, "--set", "optim.rules=[{match='vision.*'}]")
    assert_fault(said, 2, "'vision.*' fits no parameter")
    assert clipscale("config", "check", TINY).code == 0
