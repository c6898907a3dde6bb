"""Where a launcher placed this process, and our own launcher for the ranks of one machine. Imports no torch.

It starts local ranks as processes of their own and stays with them: when one dies, none is left behind.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from clipscale.errors import DistributedError

_GRACE_S = 10.0
STORE_VARIABLE = "CLIPSCALE_STORE"  # path of the file through which local ranks meet
LIFELINE_VARIABLE = "CLIPSCALE_LIFELINE"  # descriptor of a pipe that ends when the launcher does


@dataclass(frozen=True)
class Seat:
    """Where a launcher placed this process."""

    rank: int
    size: int
    local_rank: int


def seat_from_environment(env: Mapping[str, str]) -> Seat | None:
    """The seat that torchrun, the deepspeed launcher, `srun` or our own launcher gave; None when started by hand."""
    if "RANK" in env and "WORLD_SIZE" in env:
        return Seat(int(env["RANK"]), int(env["WORLD_SIZE"]), int(env.get("LOCAL_RANK", 0)))
    # Under a bare sbatch or salloc shell only SLURM_NTASKS is set; a step of several tasks means srun started us.
    if int(env.get("SLURM_STEP_NUM_TASKS", 1)) > 1:
        return Seat(int(env["SLURM_PROCID"]), int(env["SLURM_STEP_NUM_TASKS"]), int(env["SLURM_LOCALID"]))
    return None


def run_ranks(arguments: Sequence[str], ranks: int) -> int:
    """Runs `python -m clipscale ARGUMENTS` once per rank; returns 0, or the exit code of the first rank that failed.

    The ranks meet through a file, so that no port has to be free. An interrupt reaches all of them. On the CPU the
    cores are shared out, since each rank would otherwise start a thread for every core.
    """
    with tempfile.TemporaryDirectory(prefix="clipscale-") as folder:
        reading, writing = os.pipe()
        env = os.environ | {
            STORE_VARIABLE: str(Path(folder) / "store"),
            LIFELINE_VARIABLE: str(reading),
            "WORLD_SIZE": str(ranks),
            "LOCAL_WORLD_SIZE": str(ranks),
        }
        env.setdefault("OMP_NUM_THREADS", str(max(1, _usable_cores() // ranks)))
        command = [sys.executable, "-m", "clipscale", *arguments]
        processes = [
            # A session of its own: Ctrl-C then comes from us alone, once, and not a second time from the terminal.
            subprocess.Popen(
                command,
                env=env | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
                start_new_session=True,
                pass_fds=(reading,),
            )
            for rank in range(ranks)
        ]
        os.close(reading)
        try:
            return _stay_with(processes)
        finally:
            os.close(writing)


def end_with_launcher() -> None:
    """In a rank: makes this process end when its launcher is gone, even if that was killed outright."""
    lifeline = os.environ.get(LIFELINE_VARIABLE)
    if lifeline is None:
        return

    def wait() -> None:
        os.read(int(lifeline), 1)  # nothing is ever written: this returns when the last writer has closed
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


def _usable_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _stay_with(processes: list[subprocess.Popen[bytes]]) -> int:
    """Waits for all; the first failure or a signal to us ends the rest."""
    changed = threading.Event()
    codes: list[tuple[int, int]] = []  # (rank, exit code), in the order of ending

    def watch(rank: int, process: subprocess.Popen[bytes]) -> None:
        codes.append((rank, process.wait()))
        changed.set()

    asked: list[int] = []  # signals that came to us

    def pass_on(number: int, _: object) -> None:
        asked.append(number)
        for process in processes:
            if process.poll() is None:
                process.send_signal(number)

    before = {number: signal.signal(number, pass_on) for number in (signal.SIGINT, signal.SIGTERM)}
    watchers = [threading.Thread(target=watch, args=item, daemon=True) for item in enumerate(processes)]
    for watcher in watchers:
        watcher.start()
    try:
        while len(codes) < len(processes):
            changed.wait()
            changed.clear()
            if any(code for _, code in codes):
                _wait(processes, _GRACE_S / 4)  # those who still run may have last words
                break
        for process, watcher in zip(processes, watchers, strict=True):
            if process.poll() is not None:
                watcher.join()  # so that its exit code counts, if it came only just now
        _tell_signals(codes, expected=bool(asked))
        return _cause([code for _, code in codes])
    finally:
        _end(processes)
        for watcher in watchers:
            watcher.join()
        for number, handler in before.items():
            signal.signal(number, handler)


def _tell_signals(codes: list[tuple[int, int]], *, expected: bool) -> None:
    """A rank that was ended from outside had no last words of its own."""
    if expected:
        sys.stderr.write("clipscale: interrupted; --resume goes on from the last checkpoint\n")
        return
    for rank, code in codes:
        if code < 0:
            name = signal.Signals(-code).name
            reason = "; the system does that when memory runs out" if -code == signal.SIGKILL else ""
            sys.stderr.write(f"clipscale: rank {rank} was ended by {name}{reason}\n")
            return


def _cause(codes: list[int]) -> int:
    """The exit code that tells why a run failed: the first, but for ranks that only lost contact with another one.

    A process ended by signal n reports 128 + n, as shells do.
    """
    failed = [code for code in codes if code]
    code = next((code for code in failed if code != DistributedError.exit_code), failed[0] if failed else 0)
    return 128 - code if code < 0 else code


def _end(processes: list[subprocess.Popen[bytes]]) -> None:
    """Asks those still running to stop, then insists."""
    for urge, patience_s in ((signal.SIGTERM, _GRACE_S), (signal.SIGKILL, None)):
        for process in processes:
            if process.poll() is None:
                process.send_signal(urge)
        _wait(processes, patience_s)


def _wait(processes: list[subprocess.Popen[bytes]], patience_s: float | None) -> None:
    """Until all have ended, or for `patience_s` in all."""
    deadline = None if patience_s is None else time.monotonic() + patience_s
    for process in processes:
        try:
            process.wait(None if deadline is None else max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            continue
