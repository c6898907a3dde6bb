"""Real ranks for tests: `run_ranks` runs a function in several processes that talk over gloo.

Processes are forked from one server that has imported the slow libraries already. The first call starts it (7 to 22 s),
later calls take about 0.3 s. Ranks meet through a file, so there are no ports to collide.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import pickle
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

from clipscale.dist.world import STORE_VARIABLE

_PRELOAD = [
    "torch",
    "torch._dynamo",
    "deepspeed.runtime.zero.stage_1_and_2",
    "deepspeed.runtime.zero.stage3",
    "clipscale.train.loop",  # and with it open_clip and timm
]
# Read when the server starts: DeepSpeed must not look for a GPU, and torch must not use one that is there.
_ENVIRONMENT = {"DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
_GRACE_S = 3.0  # for the other ranks to report, too, once one has failed


class RankError(AssertionError):
    """At least one rank raised, died or fell silent. `reports` holds a traceback or a sentence for each such rank."""

    def __init__(self, reports: dict[int, str]) -> None:
        self.reports = reports
        super().__init__("\n".join(f"--- rank {rank}: {report}" for rank, report in sorted(reports.items())))


@dataclass
class _Rank:
    process: ForkServerProcess
    pipe: Connection


def start_server() -> None:
    """Starts the fork server, if it is not running, without waiting for it: call early to hide its imports."""
    from multiprocessing import forkserver

    before = dict(os.environ)
    os.environ.update(_ENVIRONMENT)
    try:
        multiprocessing.get_context("forkserver").set_forkserver_preload(_PRELOAD)
        forkserver.ensure_running()
    finally:
        os.environ.clear()
        os.environ.update(before)


def run_ranks(world_size: int, fn: Callable[..., Any], *args: Any, timeout_s: float = 60.0) -> list[Any]:
    """`fn(world, *args)` on every rank; the results in rank order.

    `fn` must be a function at the top of a module; arguments and results must pickle. Every rank has one thread on the
    CPU. Raises `RankError` where a rank raises, dies, or has not answered after `timeout_s`. No rank outlives the call.
    """
    start_server()
    context = multiprocessing.get_context("forkserver")
    with tempfile.TemporaryDirectory() as folder:
        ranks: list[_Rank] = []
        try:
            for rank in range(world_size):
                receiver, sender = context.Pipe(duplex=False)
                seat = {
                    "RANK": str(rank),
                    "LOCAL_RANK": str(rank),
                    "WORLD_SIZE": str(world_size),
                    STORE_VARIABLE: str(Path(folder) / "store"),
                }
                process = context.Process(target=_run, args=(seat, sender, timeout_s, fn, args))
                process.start()
                sender.close()  # so that the death of a rank ends its pipe
                ranks.append(_Rank(process, receiver))
            return _collect(ranks, timeout_s)
        finally:
            for each in ranks:
                each.process.kill()
                each.process.join()
                each.pipe.close()


def _run(
    seat: dict[str, str], pipe: Connection, timeout_s: float, fn: Callable[..., Any], args: tuple[Any, ...]
) -> None:
    import torch

    from clipscale.dist.world import joined

    os.environ.update(_ENVIRONMENT | seat)
    torch.set_num_threads(1)
    gc.freeze()  # DeepSpeed collects garbage often; all that was imported need not be looked at each time
    try:
        with joined(timeout_s) as world:
            world.barrier("the start", timeout_s)  # a rank that leaves early breaks the connecting of the others
            # Plain pickle: tensors travel as bytes, not as shared memory of a process about to end.
            answer = pickle.dumps((True, fn(world, *args)))
    except BaseException:  # noqa: BLE001 (SystemExit, too, is news for the test)
        answer = pickle.dumps((False, traceback.format_exc()))
    pipe.send_bytes(answer)


def _collect(ranks: list[_Rank], timeout_s: float) -> list[Any]:
    results: dict[int, Any] = {}
    reports: dict[int, str] = {}
    waiting = {each.pipe: rank for rank, each in enumerate(ranks)}
    deadline = time.monotonic() + timeout_s
    while waiting and (left_s := deadline - time.monotonic()) > 0:
        for pipe in wait(list(waiting), timeout=left_s):
            assert isinstance(pipe, Connection)
            rank = waiting.pop(pipe)
            try:
                succeeded, value = pickle.loads(pipe.recv_bytes())
            except EOFError:
                ranks[rank].process.join(1.0)
                succeeded, value = False, f"died without a word, exit code {ranks[rank].process.exitcode}"
            (results if succeeded else reports)[rank] = value
            if not succeeded:
                deadline = min(deadline, time.monotonic() + _GRACE_S)
    for rank in waiting.values():
        reports[rank] = "was still running when it was ended" if reports else f"silent for {timeout_s:.0f} s"
    if reports:
        raise RankError(reports)
    return [results[rank] for rank in range(len(ranks))]
