"""The harness itself: what happens to a test whose ranks misbehave."""

from __future__ import annotations

import os
import time

import pytest
import torch
import torch.distributed as dist

from clipscale.dist.world import World
from tests.helpers.ranks import RankError, run_ranks


def add_up(world: World, amount: int) -> tuple[int, torch.Tensor]:
    total = torch.tensor([float(world.rank + amount)])
    if world.size > 1:
        dist.all_reduce(total)
    return torch.get_num_threads(), total


def misbehave(world: World, how: str) -> None:
    if world.rank == 1:
        if how == "raise":
            raise ValueError("no such shard")
        if how == "die":
            os._exit(7)
        time.sleep(60)


@pytest.mark.parametrize("size", [1, 3])
def test_results_come_in_rank_order_from_ranks_with_one_thread(size: int) -> None:
    total = torch.tensor([float(sum(range(size)) + 10 * size)])
    assert run_ranks(size, add_up, 10) == [(1, total)] * size


@pytest.mark.parametrize(
    ("how", "report"), [("raise", "ValueError: no such shard"), ("die", "exit code 7"), ("sleep", "silent for 6 s")]
)
def test_the_guilty_rank_is_named(how: str, report: str) -> None:
    with pytest.raises(RankError) as caught:
        run_ranks(2, misbehave, how, timeout_s=6 if how == "sleep" else 60)
    assert list(caught.value.reports) == [1]
    assert report in caught.value.reports[1]
