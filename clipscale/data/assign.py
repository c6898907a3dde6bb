"""Which sample, when, on which rank: pure arithmetic, no I/O, no state.

The whole order of a training run is one endless row of *slots*. Epoch e holds the slots [e*T, (e+1)*T), T the number of
samples; step k with global batch B takes the slots [k*B, (k+1)*B). Slot g belongs to *stream* g mod S, where it is that
stream's position g // S. Ranks and loader workers share the streams out, and only that depends on how many there are:
the global batch of a step is the same set of samples on any number of them.

Inside an epoch the shards stand in an order drawn from (seed, epoch), laid end to end and turned by an offset drawn
likewise; each stream takes one contiguous slice of that row and is shuffled inside blocks, so that it reads shards
from front to back. As a stream holds exactly its own slots of every epoch, each sample is met exactly once an epoch,
and what does not fill a batch at an epoch's end opens the first batch of the next.

A stream whose sample is unusable moves on to its next one. From there on it stands a little ahead of its slots, so its
*cursor* (positions consumed) is what resumes it exactly, on any number of ranks.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

# What a random key is for: two uses of one (seed, epoch) never share numbers.
SHARD_ORDER, TURN, BLOCK_ORDER, SAMPLE, DRAW, DRAWN_BLOCK, PACKING = range(7)


def bits(seed: int, use: int, a: int, b: int = 0, c: int = 0) -> np.random.Philox:
    """A counter-based generator for the key (seed, use, a, b, c), each in [0, 2**64): equal keys, equal bits, anywhere.

    Nothing is hashed or carried over: the key is the generator's state (Philox 4x64; Salmon et al. 2011).
    """
    return np.random.Philox(key=np.array([seed, use], np.uint64), counter=np.array([0, a, b, c], np.uint64))


def sample_rng(seed: int, epoch: int, sample: int) -> np.random.Generator:
    """The generator of one sample's random choices (crop, caption) in one epoch; `sample`: its number in the index."""
    return np.random.Generator(bits(seed, SAMPLE, epoch, sample))


def _permutation(generator: np.random.Philox, n: int) -> np.ndarray:
    # numpy promises the raw bits of a generator for ever, but not what Generator.permutation makes of them.
    return np.argsort(generator.random_raw(n), kind="stable")


def shuffled(n: int, seed: int) -> np.ndarray:
    """0 .. n-1 in an order drawn from `seed`, the same for ever."""
    return _permutation(bits(seed, PACKING, 0), n)


def _digest(state: object) -> str:
    return hashlib.sha256(json.dumps(state).encode()).hexdigest()[:16]


class Range(NamedTuple):
    """The samples [start, stop) of shard number `shard`."""

    shard: int
    start: int
    stop: int


@dataclass(frozen=True)
class Block:
    """A stretch of one stream that is read as a whole and shuffled.

    The block's samples, in reading order, are those of `ranges`; the stream meets number `order[i]` of them at position
    `first + i`.
    """

    epoch: int
    first: int
    ranges: tuple[Range, ...]
    order: np.ndarray  # int64 [n], a permutation

    @property
    def stop(self) -> int:
        return self.first + len(self.order)

    def sample(self, index: int) -> tuple[int, int]:
        """(shard, sample in shard) of number `index` in reading order."""
        for shard, start, stop in self.ranges:
            if index < stop - start:
                return shard, start + index
            index -= stop - start
        raise AssertionError("index lies outside the block")


class _Streams:
    """Slots and streams, and which rank has which."""

    streams: int

    def owned(self, rank: int, world_size: int) -> range:
        """The streams of one rank."""
        assert self.streams % world_size == 0
        return range(rank, self.streams, world_size)

    def slots(self, stream: int, begin: int, end: int) -> range:
        """The slots of `stream` among the global slots [begin, end)."""
        return range(begin + (stream - begin) % self.streams, end, self.streams)


@dataclass(frozen=True)
class Order(_Streams):
    """The order of a whole run: a function of the shards' sample counts and three numbers, of nothing else.

    counts: samples per shard, in the index's order. seed: >= 0. streams: S above; the widest that ranks x workers can
    become. shuffle_block: samples read and shuffled together, per stream; larger ones mix better and cost memory.
    """

    counts: tuple[int, ...]
    seed: int
    streams: int
    shuffle_block: int = 1024

    def __post_init__(self) -> None:
        assert min(self.streams, self.shuffle_block) >= 1
        assert self.seed >= 0

    @cached_property
    def num_samples(self) -> int:
        return sum(self.counts)

    @cached_property
    def signature(self) -> str:
        """Short digest of everything the order depends on. Cursors mean something only under an equal signature."""
        return _digest([self.counts, self.seed, self.streams, self.shuffle_block])

    def cursors_at(self, slot: int) -> dict[int, int]:
        """Every stream's cursor once all slots below `slot` are filled and nothing was dropped: a fresh run's at 0."""
        return {stream: len(self.slots(stream, 0, slot)) for stream in range(self.streams)}

    def epoch_of(self, stream: int, position: int) -> int:
        return (position * self.streams + stream) // self.num_samples

    def block(self, stream: int, position: int) -> Block:
        """The block that holds `position` of `stream`."""
        epoch = self.epoch_of(stream, position)
        opening = len(self.slots(stream, 0, epoch * self.num_samples))
        length = len(self.slots(stream, epoch * self.num_samples, (epoch + 1) * self.num_samples))
        # All streams advance together: without a shift of their borders they would all read a block in the same step.
        shift = stream * self.shuffle_block // self.streams
        number = (position - opening + shift) // self.shuffle_block
        start = max(0, number * self.shuffle_block - shift)
        stop = min(length, (number + 1) * self.shuffle_block - shift)
        return Block(
            epoch=epoch,
            first=opening + start,
            ranges=self._ranges(epoch, self._slice_start(stream, epoch) + start, stop - start),
            order=_permutation(bits(self.seed, BLOCK_ORDER, epoch, stream, number), stop - start),
        )

    def locate(self, stream: int, position: int) -> tuple[int, int, int]:
        """(epoch, shard, sample in shard) at a position of a stream."""
        block = self.block(stream, position)
        return block.epoch, *block.sample(int(block.order[position - block.first]))

    def _slice_start(self, stream: int, epoch: int) -> int:
        """Where the stream's slice of the epoch's row begins: the number of the epoch's slots in lower streams."""

        def lower(slots: int) -> int:
            return slots // self.streams * stream + min(slots % self.streams, stream)

        return lower((epoch + 1) * self.num_samples) - lower(epoch * self.num_samples)

    def _ranges(self, epoch: int, start: int, length: int) -> tuple[Range, ...]:
        """[start, start + length) of the epoch's row of samples, as ranges of shards."""
        shards = _permutation(bits(self.seed, SHARD_ORDER, epoch), len(self.counts))
        ends = np.cumsum(np.array(self.counts, np.int64)[shards])
        # Without the turn, a slice would hold the same samples in every epoch when there are but a few shards.
        position = (start + int(bits(self.seed, TURN, epoch).random_raw())) % self.num_samples
        ranges = []
        while length:
            place = int(np.searchsorted(ends, position, side="right"))
            shard = int(shards[place])
            first = position - (int(ends[place]) - self.counts[shard])
            taken = min(length, self.counts[shard] - first)
            ranges.append(Range(shard, first, first + taken))
            length -= taken
            position = (position + taken) % self.num_samples
        return tuple(ranges)


@dataclass(frozen=True)
class Resampled(_Streams):
    """Shards drawn with replacement, for data whose shards cannot be counted beforehand.

    Each stream draws its own shards, keyed by (seed, stream, draw), and reads one after the other, shuffled in blocks.
    An epoch has no natural end: `num_samples` are called one. A stream's cursor is draw * 2**32 + samples met in that
    shard. Batches are the same on any number of ranks here, too.
    """

    num_shards: int
    seed: int
    streams: int
    num_samples: int
    shuffle_block: int = 1024

    @property
    def signature(self) -> str:
        return _digest(["resampled", self.num_shards, self.seed, self.streams, self.shuffle_block])

    def cursors_at(self, slot: int) -> dict[int, int]:
        assert slot == 0, "how far a stream has come is known from its cursor only"
        return dict.fromkeys(range(self.streams), 0)

    def shard(self, stream: int, draw: int) -> int:
        """The stream's shard number `draw`."""
        return int(bits(self.seed, DRAW, stream, draw).random_raw()) % self.num_shards

    def block_order(self, stream: int, draw: int, block: int, length: int) -> np.ndarray:
        """In which order the samples of a block are met."""
        return _permutation(bits(self.seed, DRAWN_BLOCK, stream, draw, block), length)


def joint_signature(signatures: Sequence[str], rows: Sequence[int]) -> str:
    """The signature of several orders of which each fills so many rows of a batch."""
    return _digest([list(signatures), list(rows)])


def check(counts: Sequence[int], *, streams: int, global_batch: int, world_size: int) -> list[str]:
    """Everything that keeps these samples from being shared out, one sentence each, with the nearest way out."""
    total = sum(counts)
    faults = []
    if total < global_batch:
        faults.append(
            f"{total:,} samples in {len(counts):,} shards do not fill one global batch of {global_batch:,}: "
            f"add shards, or set train.global_batch to {max(1, total // world_size * world_size):,} or less"
        )
    if total < streams:
        faults.append(
            f"{total:,} samples cannot be cut into data.streams = {streams:,}: "
            f"set it to {max(world_size, total // world_size * world_size):,} or less"
        )
    return faults + sharing_faults(streams=streams, global_batch=global_batch, world_size=world_size)


def sharing_faults(*, streams: int, global_batch: int, world_size: int) -> list[str]:
    """What so many ranks cannot share out evenly, whatever the samples are."""
    faults = []
    for name, value in (("train.global_batch", global_batch), ("data.streams", streams)):
        if value % world_size:
            below, above = value // world_size * world_size, (value // world_size + 1) * world_size
            nearest = f"{below:,} or {above:,}" if below else f"{above:,}"
            faults.append(f"{name} = {value:,} cannot be shared by {world_size:,} ranks: the nearest is {nearest}")
    return faults
