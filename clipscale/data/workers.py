"""Worker processes that make items in turn, hand them over in shared memory, and end for certain."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import shutil
import signal
import threading
import traceback
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from clipscale.errors import ConfigError, DataError

Item = TypeVar("Item")
Made = TypeVar("Made", covariant=True)

_PREFETCH = 2  # items that a worker may be ahead


class Work(Protocol[Made]):
    """What a worker does. Pickled once for each."""

    at: str  # where it stands, for the message should anything fail

    def items(self, share: slice) -> Iterator[Made]:
        """The items of one worker, whose share of anything that is dealt out is `[share]`."""
        ...


class Workers(Iterator[Item]):
    """The items of `num_workers` processes in turn: one of worker 0, one of worker 1, ..., again one of worker 0, ...

    With 0 they are made in this process. Iterating raises `DataError` for whatever a worker raised, at the place of the
    item that it should have been, and for a worker that died. `close` ends the processes; they also end when this
    process is gone, however it went.
    """

    def __init__(self, work: Work[Item], num_workers: int) -> None:
        self._items: Iterator[Any] | None = _start(work, num_workers) if num_workers else iter(_Guarded(work))

    def __next__(self) -> Item:
        assert self._items is not None, "closed"
        try:
            item = next(self._items)
        except (RuntimeError, OSError, EOFError, pickle.UnpicklingError) as fault:
            # Whatever fails in a worker comes as an item: this is the way here that is broken.
            raise DataError(
                f"a loader worker died, most likely killed for memory ({fault!r}): lower data.workers, "
                "data.shuffle_block or train.global_batch; where too many files are open, raise `ulimit -n`"
            ) from fault
        if isinstance(item, _Failure):
            raise DataError(item.message) from RuntimeError(item.trace)
        return item

    def close(self) -> None:
        self._items = None  # the iterator joins its processes when it goes


@dataclass(frozen=True)
class _Failure:
    """An exception as text: not every one survives pickling."""

    message: str
    trace: str


class _Guarded(IterableDataset[Any], Generic[Item]):
    """`work` as a data set whose last item is a `_Failure` if it fails."""

    def __init__(self, work: Work[Item]) -> None:
        self._work = work

    def __iter__(self) -> Iterator[Item | _Failure]:
        worker = get_worker_info()
        try:
            yield from self._work.items(slice(worker.id, None, worker.num_workers) if worker else slice(None))
        except DataError as fault:
            yield _Failure(str(fault), traceback.format_exc())
        except Exception as fault:  # noqa: BLE001 - raised again in the run's own process
            yield _Failure(f"loading failed at {self._work.at}: {fault!r}", traceback.format_exc())


def _start(work: Work[Any], num_workers: int) -> Iterator[Any]:
    # A forked child of a process with CUDA, gloo or OpenMP threads can hang. The fork server has none of these; it
    # imports torch once (2 s), and then forks every worker in a moment.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["__main__", "clipscale.data.loader"])
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "This DataLoader will create")  # how many is the user's choice
        return iter(
            DataLoader(
                _Guarded(work),
                batch_size=None,
                collate_fn=_unchanged,
                num_workers=num_workers,
                prefetch_factor=_PREFETCH,
                worker_init_fn=_settle,
                multiprocessing_context=context,
                generator=torch.Generator(),  # it draws a seed, but not from the generator that the model draws from
            )
        )


def _unchanged(item: Any) -> Any:
    return item


def _settle(_worker: int) -> None:
    threading.Thread(target=_end_with_the_run, daemon=True).start()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the run's own process decides, and ends us
    warnings.filterwarnings("ignore", module="PIL")  # of odd files; those that matter are dropped and counted


def _end_with_the_run() -> None:
    # The DataLoader's own watch is on the fork server, which in turn lives for as long as a worker does.
    run = multiprocessing.parent_process()
    assert run is not None
    run.join()
    os._exit(1)


def check_shared_memory(item_bytes: int) -> None:
    """Raise `ConfigError` if shared memory cannot hold a round of items, `item_bytes` for all workers together.

    Found out later, it is a bus error in a worker, without a word.
    """
    place = Path("/dev/shm")
    needed = (_PREFETCH + 1) * item_bytes
    if place.is_dir() and (free := shutil.disk_usage(place).free) < needed:
        raise ConfigError(
            f"{place} has {free / 1e6:,.0f} MB free and the loader's workers need {needed / 1e6:,.0f} MB for images: "
            "enlarge it (docker: --shm-size), set data.workers to 0, or lower train.global_batch"
        )
