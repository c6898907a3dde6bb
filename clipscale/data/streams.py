"""What a loader worker does in training: the rows of its streams, step by step, unusable samples replaced."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple, Protocol

import torch
from jaxtyping import Int64, UInt8
from torch import Tensor

from clipscale.data.assign import Block, Order, Resampled
from clipscale.data.captions import Unusable, concept_id
from clipscale.data.decode import IMAGE_EXTENSIONS
from clipscale.data.index import ShardIndex
from clipscale.data.mixture import Mixture, Source
from clipscale.data.tar import Sample, read_block
from clipscale.errors import DataError

Tokenize = Callable[[list[str]], Int64[Tensor, "n length"]]

_MIN_JUDGED = 250  # samples, before a share of bad ones says anything
_MIN_JUDGED_SHARDS = 10


class Drop(NamedTuple):
    """Why a sample was left out, and where it stood."""

    reason: str
    source: str
    shard: str


@dataclass(frozen=True)
class Part:
    """The rows of some streams in one step."""

    rows: list[int]  # of the global batch
    images: UInt8[Tensor, "n 3 size size"]
    tokens: Int64[Tensor, "n length"]
    concepts: Int64[Tensor, "n"]
    keys: list[str]
    cursors: dict[int, int]  # of these streams, after the step
    dropped: Counter[Drop] = field(default_factory=Counter)  # in this step
    read_s: float = 0.0  # spent on fetching and reading shards, and
    decode_s: float = 0.0  # on images and captions


@dataclass
class StreamWork:
    """Endless parts, one a step from `start_step` on, of the streams in `cursors`. Raises `DataError`."""

    mixture: Mixture
    tokenize: Tokenize
    cursors: Mapping[int, int]
    start_step: int
    max_bad_fraction: float
    concept: str = ""
    at: str = "the start"

    def items(self, share: slice) -> Iterator[Part]:
        tallies = [_Tally(source, self.max_bad_fraction) for source in self.mixture.sources]
        streams = {number: self._stream(number, tallies) for number in sorted(self.cursors)[share]}
        step = self.start_step
        while True:
            start = time.perf_counter()
            part = self._part(step, streams)
            read_s = sum(tally.read_s for tally in tallies)
            yield replace(
                part,
                dropped=sum((tally.fresh for tally in tallies), Counter()),
                read_s=read_s,
                decode_s=time.perf_counter() - start - read_s,
            )
            for tally in tallies:
                tally.fresh.clear()
                tally.read_s = 0.0
            step += 1

    def _stream(self, number: int, tallies: list[_Tally]) -> _Stream:
        source, stream = self.mixture.place(number)
        index, order = self.mixture.sources[source].index, self.mixture.sources[source].order
        tally = tallies[source]
        if isinstance(order, Order):
            return _OrderedStream(index, order, tally, stream, self.cursors[number])
        return _DrawnStream(index, order, tally, stream, self.cursors[number])

    def _part(self, step: int, streams: Mapping[int, _Stream]) -> Part:
        rows, images, captions, concepts, keys = [], [], [], [], []
        for number, stream in streams.items():
            for row in self.mixture.rows(number, step):
                key, image, caption, concept = self._usable(stream)
                rows.append(row)
                images.append(image)
                captions.append(caption)
                concepts.append(concept)
                keys.append(key)
        num_rows = len(rows)
        if not num_rows:  # a step has fewer rows than there are streams; the shapes still count
            size = self.mixture.size
            images, captions = [torch.empty(3, size, size, dtype=torch.uint8)], [""]
        return Part(
            rows,
            torch.stack(images)[:num_rows],
            self.tokenize(captions)[:num_rows],
            torch.tensor(concepts, dtype=torch.int64),
            keys,
            cursors={number: stream.cursor for number, stream in streams.items()},
        )

    def _usable(self, stream: _Stream) -> tuple[str, Tensor, str, int]:
        """The stream's next usable sample: key, image, caption, concept (0 where none is asked for)."""
        tally = stream.tally
        num_barren = 0
        while True:
            start = time.perf_counter()
            met = stream.next()
            tally.read_s += time.perf_counter() - start
            self.at = met.key
            tally.num_seen += 1
            try:
                concept = concept_id(met.sample.members, self.concept) if self.concept else 0
                image, caption = tally.source.decoder(met.sample.members, epoch=met.epoch, sample=met.number)
                return met.key, image, caption, concept
            except Unusable as fault:
                tally.drop(fault.reason, met.key)
            num_barren += 1
            if num_barren > max(tally.source.order.num_samples // self.mixture.streams, _MIN_JUDGED):
                raise DataError(f"{num_barren:,} samples in a row cannot be used: {tally}")


class _Met(NamedTuple):
    """A sample on a stream's way; its random choices are keyed by epoch and number."""

    key: str
    sample: Sample
    epoch: int
    number: int


class _Stream(Protocol):
    """One stream's way through the shards."""

    cursor: int
    tally: _Tally

    def next(self) -> _Met:
        """The sample at the cursor, which moves on."""
        ...


class _OrderedStream:
    """A stream of an `Order`: its cursor, and the block that it has read."""

    def __init__(self, index: ShardIndex, order: Order, tally: _Tally, number: int, cursor: int) -> None:
        self.cursor, self.tally = cursor, tally
        self._index, self._order, self._number = index, order, number
        self._block: Block | None = None
        self._samples: list[Sample | None] = []

    def next(self) -> _Met:
        block = self._block
        if block is None or self.cursor >= block.stop:
            block = self._block = self._order.block(self._number, self.cursor)
            self._samples = [
                sample for shard, start, stop in block.ranges for sample in self._index.read(shard, range(start, stop))
            ]
        place = int(block.order[self.cursor - block.first])
        sample, self._samples[place] = self._samples[place], None  # its memory is free again once it is decoded
        assert sample is not None
        self.cursor += 1
        shard, position = block.sample(place)
        key = f"{self._index.shards[shard].stem}/{sample.key}"
        return _Met(key, sample, block.epoch, self._index.number(shard, position))


class _DrawnStream:
    """A stream of `Resampled`: shards that cannot be read are counted and passed over."""

    def __init__(self, index: ShardIndex, order: Resampled, tally: _Tally, number: int, cursor: int) -> None:
        self.cursor, self.tally = cursor, tally
        self._index, self._order, self._number = index, order, number
        self._samples: list[Sample] = []
        self._read: tuple[int, int] = (-1, -1)  # draw and block of these samples

    def next(self) -> _Met:
        while True:
            draw, position = divmod(self.cursor, _PER_DRAW)
            block, place = divmod(position, self._order.shuffle_block)
            shard = self._index.shards[self._order.shard(self._number, draw)]
            if self._read != (draw, block):
                self._samples, self._read = self._block(shard.path, draw, block), (draw, block)
            if place < len(self._samples):
                self.cursor += 1
                sample = self._samples[place]
                return _Met(f"{shard.stem}/{sample.key}", sample, self._number, self.cursor - 1)
            self.cursor = (draw + 1) * _PER_DRAW

    def _block(self, path: str, draw: int, block: int) -> list[Sample]:
        start = block * self._order.shuffle_block
        try:
            with self._index.store.open(path) as file:
                samples = read_block(file, path, start, self._order.shuffle_block)
        except (DataError, OSError) as fault:
            self.tally.skip_shard(path, str(fault))
            return []
        if not block:
            self.tally.num_shards += 1
            if not samples:
                self.tally.skip_shard(path, f"{path}: holds no sample")
        order = self._order.block_order(self._number, draw, block, len(samples))
        return [samples[place] for place in order]


_PER_DRAW = 2**32  # cursors of one draw


@dataclass
class _Tally:
    """What one worker has met so far in one source."""

    source: Source
    max_bad_fraction: float
    num_seen: int = 0
    num_shards: int = 0  # drawn, and read
    num_bad_shards: int = 0
    dropped: Counter[str] = field(default_factory=Counter)  # by reason
    fresh: Counter[Drop] = field(default_factory=Counter)  # in the step under way
    examples: dict[str, str] = field(default_factory=dict)  # reason -> the first key
    read_s: float = 0.0  # in the step under way

    def drop(self, reason: str, key: str) -> None:
        self.dropped[reason] += 1
        self.fresh[Drop(reason, self.source.name, key.partition("/")[0])] += 1
        self.examples.setdefault(reason, key)
        num_bad = self.dropped.total()
        if self.num_seen >= _MIN_JUDGED and num_bad > self.max_bad_fraction * self.num_seen:
            raise DataError(
                f"{num_bad:,} of {self.num_seen:,} samples cannot be used: {self}; this is more than "
                f"data.max_bad_fraction = {self.max_bad_fraction:g} allows"
            )

    def skip_shard(self, path: str, fault: str) -> None:
        """Count a drawn shard that gave nothing, or broke off."""
        self.num_bad_shards += 1
        self.fresh[Drop("bad_shard", self.source.name, path)] += 1
        seen = self.num_shards + self.num_bad_shards
        if seen >= _MIN_JUDGED_SHARDS and self.num_bad_shards > self.max_bad_fraction * seen:
            raise DataError(
                f"{self.num_bad_shards:,} of {seen:,} drawn shards cannot be read, which is more than "
                f"data.max_bad_fraction = {self.max_bad_fraction:g} allows; the last one: {fault}"
            )

    def __str__(self) -> str:
        reasons = ", ".join(
            f"{count:,} {reason} (such as {self.examples[reason]})" for reason, count in self.dropped.most_common()
        )
        found = " ".join(f".{name}" for name in sorted(self.source.index.fields)[:20])
        known = f"; the shards' members end in {found}" if found else ""
        return f"{reasons}{known}, images are looked for in .{' .'.join(IMAGE_EXTENSIONS)}"
