"""Starts local ranks as processes of their own and stays with them: when one dies, none is left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path

from clipscale.dist.world import STORE_VARIABLE

_GRACE_S = 10.0


def run_ranks(arguments: Sequence[str], ranks: int) -> int:
    """Runs `python -m clipscale ARGUMENTS` once per rank; returns 0, or the exit code of the first rank that failed.

    The ranks meet through a file, so that no port has to be free. An interrupt reaches all of them. On the CPU the
    cores are shared out, since each rank would otherwise start a thread for every core.
    """
    with tempfile.TemporaryDirectory(prefix="clipscale-") as folder:
        env = os.environ | {STORE_VARIABLE: str(Path(folder) / "store"), "WORLD_SIZE": str(ranks)}
        env.setdefault("OMP_NUM_THREADS", str(max(1, _usable_cores() // ranks)))
        command = [sys.executable, "-m", "clipscale", *arguments]
        processes = [
            # A session of its own: Ctrl-C then comes from us alone, once, and not a second time from the terminal.
            subprocess.Popen(
                command, env=env | {"RANK": str(rank), "LOCAL_RANK": str(rank)}, start_new_session=True
            )
            for rank in range(ranks)
        ]
        return _stay_with(processes)


def _usable_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _stay_with(processes: list[subprocess.Popen[bytes]]) -> int:
    """Waits for all; the first failure or a signal to us ends the rest."""
    changed = threading.Event()
    codes: list[tuple[int, int]] = []  # (rank, exit code), in the order of ending

    def watch(rank: int, process: subprocess.Popen[bytes]) -> None:
        codes.append((rank, process.wait()))
        changed.set()

    def pass_on(number: int, _: object) -> None:
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
                break
        failed = next(((rank, code) for rank, code in list(codes) if code), None)
        if failed is None:
            return 0
        return _exit_code(failed[1])
    finally:
        _end(processes)
        for watcher in watchers:
            watcher.join()
        for number, handler in before.items():
            signal.signal(number, handler)


def _exit_code(code: int) -> int:
    """A process ended by signal n reports 128 + n, as shells do."""
    return 128 - code if code < 0 else code


def _end(processes: list[subprocess.Popen[bytes]]) -> None:
    """Asks those still running to stop, then insists."""
    running = [process for process in processes if process.poll() is None]
    for process in running:
        process.terminate()
    for process in running:
        try:
            process.wait(_GRACE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
