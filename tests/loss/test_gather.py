"""Features from every rank to every rank: all at once, or round a ring."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from clipscale.dist.world import World
from clipscale.loss.gather import Block, exchange_rows, gather_rows, share_features, start_gather
from tests.helpers.ranks import run_ranks

LAYOUTS = [(3,), (2, 2), (1, 5), (4, 1, 2), (2, 2, 2, 2), (1, 2, 3, 1)]


def numbered(rows: tuple[int, ...], rank: int, dtype: torch.dtype, *shape: int) -> Tensor:
    """Rows that tell where they come from: global position, spread over `shape`."""
    x = torch.arange(sum(rows)).view(-1, *[1] * len(shape)) * 10 + torch.arange(int(torch.tensor(shape).prod())).view(
        shape
    )
    return x.to(dtype).split(rows)[rank]


def everything(rows: tuple[int, ...], dtype: torch.dtype, *shape: int) -> Tensor:
    return torch.cat([numbered(rows, rank, dtype, *shape) for rank in range(len(rows))])


def gather_all_kinds(world: World, rows: tuple[int, ...]) -> dict[str, Any]:
    features = numbered(rows, world.rank, torch.float32, 3).requires_grad_()
    begun = start_gather(features, world, rows=rows, dtype=torch.bfloat16)
    return {
        "rows": exchange_rows(rows[world.rank], world),
        "float32": gather_rows(features, world, rows),
        "rows unknown": gather_rows(features, world),
        "transposed": gather_rows(features.detach().T.contiguous().T, world, rows),
        "int64": gather_rows(numbered(rows, world.rank, torch.int64), world, rows),
        "own": begun.own,
        "bfloat16": begun.wait(),
        "bfloat16 again": begun.wait(),
    }


@pytest.mark.parametrize("rows", LAYOUTS)
def test_rows_arrive_in_rank_order_without_autograd(rows: tuple[int, ...]) -> None:
    for rank, found in enumerate(run_ranks(len(rows), gather_all_kinds, rows)):
        assert found["rows"] == rows
        for name in ("float32", "rows unknown", "transposed"):
            assert torch.equal(found[name], everything(rows, torch.float32, 3)), name
            assert not found[name].requires_grad
        assert torch.equal(found["int64"], everything(rows, torch.int64))
        for name in ("bfloat16", "bfloat16 again"):
            assert torch.equal(found[name], everything(rows, torch.bfloat16, 3)), name
        assert torch.equal(found["own"], numbered(rows, rank, torch.bfloat16, 3))


def collect_blocks(world: World, rows: tuple[int, ...], ring: bool) -> list[list[Block]]:
    image = numbered(rows, world.rank, torch.float32, 3)
    batch = share_features(image, -image, world, rows=rows, gather_dtype=None, ring=ring)
    assert batch.rows == rows
    return [[batch.own, *batch.others()] for _ in range(2)]  # a second pass sees the same


@pytest.mark.parametrize("ring", [False, True])
@pytest.mark.parametrize("rows", LAYOUTS)
def test_blocks_cover_the_batch_once_in_every_pass(rows: tuple[int, ...], ring: bool) -> None:
    whole = everything(rows, torch.float32, 3)
    for rank, passes in enumerate(run_ranks(len(rows), collect_blocks, rows, ring)):
        for blocks in passes:
            assert blocks[0].start == sum(rows[:rank])
            assert len(blocks[0].image) == rows[rank]
            if ring:
                assert len(blocks) == len(rows)
            in_order = sorted(blocks, key=lambda block: block.start)
            assert [b.start for b in in_order] == [
                sum(len(c.image) for c in in_order[:i]) for i in range(len(in_order))
            ]
            assert torch.equal(torch.cat([block.image for block in in_order]), whole)
            assert torch.equal(torch.cat([block.text for block in in_order]), -whole)


def test_wrong_row_counts_are_refused_before_anybody_waits() -> None:
    alone = World(0, 1, torch.device("cpu"))
    with pytest.raises(AssertionError, match="rank 0 holds 4 rows, `rows` says 5"):
        gather_rows(torch.zeros(4, 2), alone, rows=[5])
    with pytest.raises(AssertionError, match="lists 2 ranks"):
        gather_rows(torch.zeros(4, 2), alone, rows=[4, 4])
    with pytest.raises(AssertionError, match="rank 0 holds 3 rows, `rows` says 4"):
        share_features(torch.zeros(4, 2), torch.zeros(3, 2), alone, rows=None, gather_dtype=None, ring=False)
    image, text = (start_gather(torch.zeros(n, 2), alone) for n in (4, 3))
    with pytest.raises(AssertionError, match="disagree about rows"):
        share_features(image, text, alone, rows=None, gather_dtype=None, ring=False)
    with pytest.raises(AssertionError, match="not a begun gather"):
        share_features(image, image, alone, rows=None, gather_dtype=None, ring=True)
