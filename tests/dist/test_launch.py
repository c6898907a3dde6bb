"""Our own launcher with real processes: exit codes, interrupts, and that nobody is left behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from clipscale.dist import launch

# Stands in for the interpreter, so that a rank starts in a moment: `program -m clipscale BEHAVIOUR FOLDER`.
_PROGRAM = """#!{python}
import json, os, signal, sys, time
sys.path.insert(0, {repository!r})
behaviour, folder = sys.argv[3], sys.argv[4]
rank = int(os.environ["RANK"])
def note(**facts):
    with open(f"{{folder}}/{{rank}}.tmp", "w") as file:
        json.dump(facts, file)
    os.rename(f"{{folder}}/{{rank}}.tmp", f"{{folder}}/{{rank}}.json")
def all_here():
    while not all(os.path.exists(f"{{folder}}/{{other}}.json") for other in range(int(os.environ["WORLD_SIZE"]))):
        time.sleep(0.01)
def interrupted(number, frame):
    note(signal=number, pid=os.getpid())
    sys.exit(130)
if behaviour == "deaf":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
signal.signal(signal.SIGINT, interrupted)
if behaviour == "guarded":
    from clipscale.dist.launch import end_with_launcher
    end_with_launcher()
note(pid=os.getpid(), env=dict(os.environ))
all_here()
if behaviour == "fine":
    sys.exit(0)
if behaviour == "lost":
    if rank == 1:
        time.sleep(0.02)
    sys.exit((5, 4)[rank])
if rank == 1:
    if behaviour in ("fails", "deaf"):
        sys.exit(4)
    if behaviour == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
time.sleep(60)
"""


@pytest.fixture
def program(tmp_path: Path) -> Path:
    path = tmp_path / "program"
    path.write_text(_PROGRAM.format(python=sys.executable, repository=str(Path(launch.__file__).parents[2])))
    path.chmod(0o755)
    return path


@pytest.fixture
def run(program: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    monkeypatch.setattr(sys, "executable", str(program))
    monkeypatch.setattr(launch, "_GRACE_S", 0.5)
    return lambda behaviour, ranks=2: launch.run_ranks([behaviour, str(tmp_path)], ranks)


def notes(folder: Path, ranks: int = 2) -> list[dict]:
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(ranks)]


def is_running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def wait_until(fact: Callable[[], bool], timeout_s: float = 15.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not fact():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)


def test_all_is_well(run: Callable[..., int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS")
    monkeypatch.setattr(launch, "_usable_cores", lambda: 8)
    assert run("fine", 3) == 0
    environments = [note["env"] for note in notes(tmp_path, 3)]
    assert [env["RANK"] for env in environments] == [env["LOCAL_RANK"] for env in environments] == ["0", "1", "2"]
    assert {env["WORLD_SIZE"] for env in environments} == {"3"}
    assert {env["OMP_NUM_THREADS"] for env in environments} == {"2"}
    (store,) = {env[launch.STORE_VARIABLE] for env in environments}
    assert not Path(store).parent.exists()


def test_the_users_number_of_threads_stays(
    run: Callable[..., int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    assert run("fine", 1) == 0
    assert notes(tmp_path, 1)[0]["env"]["OMP_NUM_THREADS"] == "5"


@pytest.mark.parametrize(
    ("behaviour", "code"),
    [
        ("fails", 4),
        ("killed", 128 + 9),
        ("deaf", 4),  # to the request to end
        ("lost", 4),  # the rank that only lost contact, code 5, ends first, but the other one is the cause
    ],
)
def test_one_rank_ends_all(
    behaviour: str, code: int, run: Callable[..., int], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run(behaviour) == code
    assert ("rank 1 was ended by SIGKILL" in capfd.readouterr().err) == (behaviour == "killed")
    assert not any(is_running(note["pid"]) for note in notes(tmp_path))


@pytest.fixture
def launcher(program: Path, tmp_path: Path):
    """Starts our launcher in a process of its own, and waits for its ranks."""
    started: list[subprocess.Popen] = []

    def start(behaviour: str) -> subprocess.Popen:
        script = (
            "import sys\n"
            "from clipscale.dist.launch import run_ranks\n"
            f"sys.executable = {str(program)!r}\n"
            f"sys.exit(run_ranks([{behaviour!r}, {str(tmp_path)!r}], 2))\n"
        )
        env = os.environ | {"TMPDIR": str(tmp_path)}  # where a killed one leaves its folder
        started.append(subprocess.Popen([sys.executable, "-c", script], env=env))
        wait_until(lambda: all((tmp_path / f"{rank}.json").exists() for rank in range(2)))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.wait()


def test_an_interrupt_reaches_all_ranks(
    launcher: Callable[[str], subprocess.Popen], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    process = launcher("waits")
    process.send_signal(signal.SIGINT)
    assert process.wait(15) == 130
    assert capfd.readouterr().err == "clipscale: interrupted; --resume goes on from the last checkpoint\n"
    assert [note.get("signal") for note in notes(tmp_path)] == [signal.SIGINT, signal.SIGINT]
    assert not any(is_running(note["pid"]) for note in notes(tmp_path))


def test_a_request_to_end_reaches_all_ranks(launcher: Callable[[str], subprocess.Popen], tmp_path: Path) -> None:
    process = launcher("waits")
    process.terminate()
    assert process.wait(15) == 128 + signal.SIGTERM
    assert not any(is_running(note["pid"]) for note in notes(tmp_path))


def test_ranks_do_not_outlive_a_killed_launcher(launcher: Callable[[str], subprocess.Popen], tmp_path: Path) -> None:
    process = launcher("guarded")
    pids = [note["pid"] for note in notes(tmp_path)]
    assert all(is_running(pid) for pid in pids)
    process.kill()
    process.wait()
    wait_until(lambda: not any(is_running(pid) for pid in pids))


def test_the_launcher_imports_no_torch() -> None:
    script = "import sys; import clipscale.dist.launch; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0
