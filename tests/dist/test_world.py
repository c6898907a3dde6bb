"""Seats, and words between ranks that end in an error everywhere or nowhere."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from clipscale.dist.launch import Seat, seat_from_environment
from clipscale.dist.world import World, _first_slurm_host, _set_address, joined, leave
from clipscale.errors import ClipscaleError, ConfigError, DataError, DistributedError
from tests.helpers.ranks import RankError, run_ranks

ALONE = World(0, 1, torch.device("cpu"))
SLURM_JOB = {"SLURM_JOB_ID": "123456", "SLURM_NTASKS": "8"}
SLURM_STEP = {"SLURM_STEP_NUM_TASKS": "8", "SLURM_PROCID": "5", "SLURM_LOCALID": "1"}


@pytest.mark.parametrize(
    ("env", "seat"),
    [
        ({}, None),
        ({"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1"}, Seat(3, 8, 1)),  # torchrun, deepspeed
        ({"RANK": "3", "WORLD_SIZE": "8"}, Seat(3, 8, 0)),
        ({"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}, Seat(0, 1, 0)),
        ({"WORLD_SIZE": "8"}, None),
        (SLURM_JOB, None),  # a bare sbatch or salloc shell
        (SLURM_JOB | {"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}, None),
        (SLURM_JOB | SLURM_STEP, Seat(5, 8, 1)),  # srun
        (SLURM_JOB | SLURM_STEP | {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}, Seat(0, 2, 0)),  # srun torchrun
    ],
)
def test_seats(env: dict[str, str], seat: Seat | None) -> None:
    assert seat_from_environment(env) == seat


@pytest.mark.parametrize(
    ("nodelist", "host"),
    [
        ("gpu03", "gpu03"),
        ("gpu03,gpu07", "gpu03"),
        ("gpu[03-05,09],big1", "gpu03"),
        ("gpu[3,5]", "gpu3"),
        ("big1,gpu[03-05]", "big1"),
        ("rack-2-gpu[007-012]", "rack-2-gpu007"),
    ],
)
def test_the_first_host_of_a_slurm_list(nodelist: str, host: str) -> None:
    assert _first_slurm_host(nodelist) == host


def test_an_unreadable_list_asks_for_the_address() -> None:
    with pytest.raises(ConfigError, match="set MASTER_ADDR"):
        _first_slurm_host("")


def test_all_steps_of_a_job_agree_on_address_and_port(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "")  # so that what the call sets is undone
        monkeypatch.delenv(name)
    _set_address({"SLURM_STEP_NODELIST": "gpu[03-05]", "SLURM_JOB_ID": "123456"})
    assert os.environ["MASTER_ADDR"] == "gpu03"
    assert os.environ["MASTER_PORT"] == str(20000 + 123456 % 20000)


def test_one_rank_alone_needs_nobody() -> None:
    ALONE.barrier("here", timeout_s=0.0)
    ALONE.agree("it", 3)
    assert ALONE.is_main
    assert ALONE.gather_objects("x") == ["x"]
    assert ALONE.together("work", lambda: 5) == 5
    with pytest.raises(DataError, match="^lost$") as caught:
        ALONE.together("work", lambda: fail(DataError, "lost"))
    assert caught.value.on_all_ranks


def test_a_world_of_one_has_a_process_group_for_as_long_as_it_lasts() -> None:
    with joined() as world:
        assert (world.rank, world.size, world.device) == (0, 1, torch.device("cpu"))
        assert dist.is_initialized()
    assert not dist.is_initialized()


def threads_after_leaving(world: World) -> list[str]:
    world.gather_objects(1)
    before, _ = thread_names(), leave(world)
    assert any("gloo" in name for name in before)
    return thread_names()


def thread_names() -> list[str]:
    """Of all threads of this process, also those that Python knows nothing of."""
    return [(thread / "comm").read_text().strip() for thread in Path("/proc/self/task").iterdir()]


def test_whoever_leaves_leaves_no_thread_behind() -> None:
    """One that wants the interpreter while this shuts down aborts the process: exit code 134 in place of ours."""
    for names in run_ranks(2, threads_after_leaving):
        assert not [name for name in names if "gloo" in name]


def fail(kind: type[ClipscaleError], message: str) -> Any:
    raise kind(message)


def told(work: Any) -> tuple[str, str, bool]:
    """The fault that `work` ends in, as plain values."""
    try:
        work()
    except ClipscaleError as error:
        return type(error).__name__, str(error), error.on_all_ranks
    return "", "", False


def talk(world: World) -> dict[str, Any]:
    def one_fails() -> int:
        return fail(ConfigError, "no such folder") if world.rank == 1 else 1

    def all_fail() -> int:
        return fail(DataError, "no shards")

    def two_fail() -> int:
        return fail(DataError, "no shards") if world.rank else 1

    world.barrier("the beginning", timeout_s=20)
    world.agree("the sum", 5)
    return {
        "gathered": world.gather_objects({"rank": world.rank}),
        "result": world.together("work", lambda: 10 * world.rank),
        "one fails": told(lambda: world.together("folder", one_fails)),
        "all fail": told(lambda: world.together("data", all_fail)),
        "two fail": told(lambda: world.together("data", two_fail)),
        "disagree": told(lambda: world.agree("the sum", world.rank % 2)),
        "still talking": world.gather_objects(world.rank),
    }


def test_what_one_rank_meets_all_ranks_raise() -> None:
    everybodys = run_ranks(3, talk)
    for rank, heard in enumerate(everybodys):
        assert heard["result"] == 10 * rank
        assert heard["gathered"] == [{"rank": 0}, {"rank": 1}, {"rank": 2}]
        assert heard["one fails"] == ("ConfigError", "folder, rank 1: no such folder", True)
        assert heard["all fail"] == ("DataError", "no shards", True)
        assert heard["two fail"] == ("DataError", "data, rank 1: no shards", True)
        kind, message, _ = heard["disagree"]
        assert kind == "DistributedError"
        assert message == "the ranks disagree about the sum: rank 0: 0, rank 1: 1, rank 2: 0"
        assert heard["still talking"] == [0, 1, 2]


def stay_away(world: World, silent: int, folder: Path) -> str:
    """The silent rank leaves when the others have given up."""
    if world.rank == silent:
        deadline = time.monotonic() + 20
        while len(list(folder.iterdir())) < world.size - 1 and time.monotonic() < deadline:
            time.sleep(0.05)
        return ""
    try:
        world.barrier("the checkpoint", timeout_s=1.0)
    except DistributedError as error:
        return str(error)
    finally:
        (folder / str(world.rank)).touch()
    return "nothing happened"


@pytest.mark.parametrize("silent", [1, 2])
def test_a_silent_rank_is_named(silent: int, tmp_path: Path) -> None:
    messages = run_ranks(3, stay_away, silent, tmp_path)
    assert "rank 0 waited 1 s at 'the checkpoint'" in messages[0]
    assert f"Ranks {silent} failed" in messages[0]
    others = [message for rank, message in enumerate(messages) if rank not in (0, silent)]
    assert all("at 'the checkpoint'" in message for message in others)


def die(world: World) -> None:
    if world.rank == 1:
        os._exit(7)
    world.gather_objects(1)


def test_the_death_of_a_rank_ends_the_wait_of_the_others() -> None:
    with pytest.raises(RankError, match="exit code 7") as caught:
        run_ranks(2, die, timeout_s=20)
    assert "DistributedError: rank 0 lost contact with another rank" in caught.value.reports[0]
