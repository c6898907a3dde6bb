"""The ranks that train together: who am I, how many are we, and words between us that cannot hang for ever."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist

from clipscale.dist.launch import STORE_VARIABLE, Seat, seat_from_environment
from clipscale.errors import ClipscaleError, ConfigError, DistributedError

Result = TypeVar("Result")


@dataclass(frozen=True)
class World:
    """One rank's view of the group. `group` is None when there is nobody to talk to (size 1)."""

    rank: int
    size: int
    device: torch.device
    local_rank: int = 0
    group: dist.ProcessGroup | None = None
    control: dist.ProcessGroup | None = None  # gloo: small words between ranks, also when tensors travel over NCCL

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def barrier(self, what: str, timeout_s: float = 600.0) -> None:
        """Communicates. Waits until every rank is at `what`; `DistributedError` names the ranks that stayed away."""
        if self.size == 1:
            return
        try:
            dist.monitored_barrier(self.control, timeout=timedelta(seconds=timeout_s), wait_all_ranks=True)
        except RuntimeError as error:
            raise DistributedError(f"rank {self.rank} waited {timeout_s:.0f} s at '{what}': {error}") from error

    def gather_objects(self, value: Any) -> list[Any]:
        """Communicates. Every rank's `value`, in rank order, on every rank. For small plain values."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self.control)
        return values

    def agree(self, what: str, value: Any) -> None:
        """Communicates. Raises `DistributedError` on every rank unless all ranks hold the same `value`."""
        values = self.gather_objects(value)
        if any(other != values[0] for other in values):
            table = ", ".join(f"rank {rank}: {other!r}" for rank, other in enumerate(values))
            raise DistributedError(f"the ranks disagree about {what}: {table}")

    def together(self, what: str, work: Callable[[], Result]) -> Result:
        """Communicates. Runs `work` on every rank; where one rank fails, all of them raise that rank's error.

        So that a fault which only one rank can see (a folder, a file, its own GPU) ends the run at once and in words,
        instead of leaving the others to wait in their next collective.
        """
        result, fault = None, None
        try:
            result = work()
        except ClipscaleError as error:
            fault = error
        faults = self.gather_objects(fault and (type(fault), str(fault)))
        for rank, found in enumerate(faults):
            if found is not None:
                kind, message = found
                everywhere = all(other == found for other in faults)
                error = kind(message if everywhere else f"{what}, rank {rank}: {message}")
                error.on_all_ranks = True
                raise error from fault
        return cast(Result, result)


def _first_slurm_host(nodelist: str) -> str:
    """`gpu[03-05,09],big1` -> `gpu03`."""
    match = re.match(r"([^,\[]+)(?:\[(\w+))?", nodelist)
    if match is None:
        raise ConfigError(f"cannot read SLURM_STEP_NODELIST={nodelist!r}; set MASTER_ADDR to the first node's name")
    return match[1] + (match[2] or "")


def _set_address(env: Mapping[str, str]) -> None:
    """Slurm gives no address: the first node of the step, and a port that follows from the job number."""
    if "MASTER_ADDR" not in env:
        os.environ["MASTER_ADDR"] = _first_slurm_host(env["SLURM_STEP_NODELIST"])
    if "MASTER_PORT" not in env:
        os.environ["MASTER_PORT"] = str(20000 + int(env["SLURM_JOB_ID"]) % 20000)


def _device(local_rank: int) -> torch.device:
    if not torch.cuda.is_available():
        return torch.device("cpu")
    if local_rank >= torch.cuda.device_count():
        raise ConfigError(
            f"local rank {local_rank} has no GPU of its own: {torch.cuda.device_count()} visible. "
            "Start at most one rank per GPU, or set CUDA_VISIBLE_DEVICES= to train on the CPU."
        )
    return torch.device("cuda", local_rank)


def join(timeout_s: float = 1800.0) -> World:
    """Joins the ranks that a launcher started, or makes a world of one. Call once a process; `leave` undoes it.

    A process group is made for a single rank too, since DeepSpeed insists on one. Collectives that wait longer than
    `timeout_s` fail instead of hanging.
    """
    env = os.environ
    seat = seat_from_environment(env) or Seat(0, 1, 0)
    device = _device(seat.local_rank)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    wait = timedelta(seconds=timeout_s)
    if seat.size == 1:
        alone = dist.HashStore()
        dist.init_process_group(backend, store=alone, rank=0, world_size=1, timeout=wait)
        return World(0, 1, device)
    if STORE_VARIABLE in env:
        init = f"file://{env[STORE_VARIABLE]}"
    else:
        if "RANK" not in env:
            _set_address(env)
        init = "env://"
    dist.init_process_group(backend, init_method=init, rank=seat.rank, world_size=seat.size, timeout=wait)
    group = control = dist.group.WORLD
    if device.type == "cuda":
        control = cast(dist.ProcessGroup, dist.new_group(backend="gloo", timeout=wait))
    return World(seat.rank, seat.size, device, seat.local_rank, group, control)


def leave(world: World) -> None:
    """Destroys the process groups; `world` can no longer communicate.

    gloo's threads end with the last reference to their group. They must not outlive the interpreter, which they need to
    free tensors: one that asks for it during its shutdown aborts the whole process.
    """
    if dist.is_initialized():
        dist.destroy_process_group()
    for name in ("group", "control"):
        object.__setattr__(world, name, None)


@contextmanager
def joined(timeout_s: float = 1800.0) -> Iterator[World]:
    """`join`, and `leave` however the block ends. A collective that breaks becomes a `DistributedError`."""
    world = join(timeout_s)
    try:
        yield world
    except RuntimeError as error:
        # gloo has no error class of its own; NCCL's is a DistBackendError.
        if not isinstance(error, dist.DistError) and "gloo" not in str(error).lower():
            raise
        raise DistributedError(
            f"rank {world.rank} lost contact with another rank; that rank's or the launcher's message says why. "
            f"(In torch's words: {str(error).splitlines()[0]})"
        ) from error
    finally:
        leave(world)
