"""Everybody's features, without autograd: gathered once, or passed round in a ring.

The gradients of a rank's own features are complete on that rank (see `contrastive.py`), so nothing here has a backward.
A gather receives what the other ranks hold: 2(W-1)nd elements where each of W ranks has n rows of d in both towers. The
ring receives as much in every pass over the batch, and never holds more than three ranks' rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
import torch.distributed as dist
from jaxtyping import Float, Shaped
from torch import Tensor

from clipscale.dist.world import World

# torch 2.14 renamed the function and warns about the old name, which is the only one before.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def exchange_rows(num_rows: int, world: World) -> tuple[int, ...]:
    """Communicates (one number a rank). How many rows every rank holds, in rank order. Waits for the device."""
    if world.size == 1:
        return (num_rows,)
    counts = torch.empty(world.size, dtype=torch.int64, device=world.device)
    _all_gather(counts, counts.new_tensor([num_rows]), group=world.group)
    return tuple(counts.tolist())


class Gathering:
    """One tensor's rows on their way from every rank to every rank. `own` is this rank's part, as the others see it."""

    def __init__(self, own: Tensor, world: World, rows: tuple[int, ...]) -> None:
        assert len(rows) == world.size, f"rows lists {len(rows)} ranks, the world has {world.size}"
        assert rows[world.rank] == len(own), f"rank {world.rank} holds {len(own)} rows, `rows` says {rows[world.rank]}"
        self.own, self.rows = own, rows
        self._work: dist.Work | None = None
        if world.size == 1:
            self._padded = own
            return
        # One equal-sized collective also for unequal rows: gloo has no other, and ranks differ by a few rows at most.
        longest = max(rows)
        if len(own) < longest:
            own = torch.cat([own, own.new_zeros(longest - len(own), *own.shape[1:])])
        self._sent = own.contiguous()  # must live until the collective is done
        self._padded = own.new_empty(world.size * longest, *own.shape[1:])
        self._work = _all_gather(self._padded, self._sent, group=world.group, async_op=True)

    def wait(self) -> Tensor:
        """Waits for the other ranks. n x [n, ...] -> [N, ...], in rank order; a copy is made only for unequal rows."""
        if self._work is not None:
            self._work.wait()
            self._work = None
            if len(set(self.rows)) > 1:
                parts = self._padded.view(len(self.rows), -1, *self.own.shape[1:])
                self._padded = torch.cat([part[:count] for part, count in zip(parts, self.rows, strict=True)])
        return self._padded


@torch.no_grad()
def start_gather(
    x: Shaped[Tensor, "n ..."], world: World, *, rows: Sequence[int] | None = None, dtype: torch.dtype | None = None
) -> Gathering:
    """Communicates. Begins to gather `x` and returns at once, so that the caller may compute in the meantime.

    `rows` are the row counts of all ranks; without them they are exchanged first, in one more small collective.
    `dtype` is what travels. A narrower one rounds this rank's own rows too: all ranks work with the same numbers.
    """
    own = x.detach().to(dtype or x.dtype)
    return Gathering(own, world, exchange_rows(len(own), world) if rows is None else tuple(rows))


def gather_rows(
    x: Shaped[Tensor, "n *d"], world: World, rows: Sequence[int] | None = None
) -> Shaped[Tensor, "total *d"]:
    """Communicates. `start_gather` and its `wait` in one: the rows of all ranks in rank order, without autograd."""
    return start_gather(x, world, rows=rows).wait()


@dataclass(frozen=True)
class Block:
    """Consecutive rows of the global batch: `image` and `text` [m, d], the first of them at global position `start`."""

    start: int
    image: Float[Tensor, "m d"]
    text: Float[Tensor, "m d"]


class GatheredBatch:
    """The global batch as seen from one rank that holds all features."""

    def __init__(self, image: Gathering, text: Gathering, world: World, dtype: torch.dtype) -> None:
        assert image.rows == text.rows, f"the towers disagree about rows: {image.rows} images, {text.rows} texts"
        self.rows = image.rows
        starts = [0, *accumulate(self.rows)]
        self._span = starts[world.rank], starts[world.rank + 1]
        self._image, self._text = image.wait().to(dtype), text.wait().to(dtype)  # n x [n, d] -> [N, d]
        self.own = self._block(*self._span)

    def _block(self, start: int, stop: int) -> Block:
        return Block(start, self._image[start:stop], self._text[start:stop])

    def others(self) -> Iterator[Block]:
        """All rows but this rank's own: those before and those after."""
        start, stop = self._span
        if start > 0:
            yield self._block(0, start)
        if stop < len(self._image):
            yield self._block(stop, len(self._image))


class RingBatch:
    """The global batch as seen from one rank of a ring: the others' rows come by, one rank's block at a time."""

    def __init__(
        self,
        image: Float[Tensor, "n d"],
        text: Float[Tensor, "n d"],
        world: World,
        rows: tuple[int, ...],
        dtype: torch.dtype,
    ) -> None:
        assert rows[world.rank] == len(image) == len(text), f"{len(image)} images, {len(text)} texts, rows {rows}"
        self.rows, self._world, self._dtype = rows, world, dtype
        self._starts = [0, *accumulate(rows)]
        self._sent = [image.contiguous(), text.contiguous()]
        self.own = Block(self._starts[world.rank], image.to(dtype), text.to(dtype))

    def others(self) -> Iterator[Block]:
        """Communicates. W - 1 hops; while one block is worked on, the next is on its way (double buffering)."""
        world, held = self._world, self._sent
        after, before = (world.rank + 1) % world.size, (world.rank - 1) % world.size
        arriving = self._pass_on(held, after, before, hop=1) if world.size > 1 else None
        for hop in range(1, world.size):
            assert arriving is not None
            works, held = arriving
            for work in works:
                work.wait()
            arriving = self._pass_on(held, after, before, hop + 1) if hop + 1 < world.size else None
            image, text = (x.to(self._dtype) for x in held)
            yield Block(self._starts[(world.rank - hop) % world.size], image, text)

    def _pass_on(self, held: list[Tensor], after: int, before: int, hop: int) -> tuple[list[dist.Work], list[Tensor]]:
        count = self.rows[(self._world.rank - hop) % self._world.size]
        coming = [x.new_empty(count, x.shape[1]) for x in held]
        group = self._world.group
        # Batched, because NCCL would wait for ever where every rank sends before it receives.
        sends = [dist.P2POp(dist.isend, x, group=group, group_peer=after) for x in held]
        receives = [dist.P2POp(dist.irecv, x, group=group, group_peer=before) for x in coming]
        return dist.batch_isend_irecv(sends + receives), coming


Batch = GatheredBatch | RingBatch


def share_features(
    image: Tensor | Gathering,
    text: Tensor | Gathering,
    world: World,
    *,
    rows: Sequence[int] | None,
    gather_dtype: torch.dtype | None,
    ring: bool,
) -> Batch:
    """Communicates. This rank's features [n, d] become its view of the global batch.

    The loss computes in float32, or in float64 where features come in it. A tower whose gather was begun earlier
    (`start_gather`) is taken as it is.
    """
    parts = [x.own if isinstance(x, Gathering) else x for x in (image, text)]
    dtype = torch.promote_types(torch.promote_types(parts[0].dtype, parts[1].dtype), torch.float32)
    if rows is None:
        known = next((x.rows for x in (image, text) if isinstance(x, Gathering)), None)
        rows = known or exchange_rows(len(parts[0]), world)
    assert min(rows) > 0, f"a rank without rows has no part in a loss: {rows}"
    if ring:
        assert not any(isinstance(x, Gathering) for x in (image, text)), "a ring takes features, not a begun gather"
        own_image, own_text = (x.detach().to(gather_dtype or x.dtype) for x in parts)
        return RingBatch(own_image, own_text, world, tuple(rows), dtype)
    begun = [
        x if isinstance(x, Gathering) else start_gather(x, world, rows=rows, dtype=gather_dtype) for x in (image, text)
    ]
    return GatheredBatch(begun[0], begun[1], world, dtype)
