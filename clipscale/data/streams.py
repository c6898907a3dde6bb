"""What a loader worker does in training: the rows of its streams, step by step, unusable samples replaced."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

import torch
from jaxtyping import Int64, UInt8
from torch import Tensor

from clipscale.data.assign import Block, Order
from clipscale.data.captions import Unusable, concept_id
from clipscale.data.decode import IMAGE_EXTENSIONS, Decoder
from clipscale.data.index import ShardIndex
from clipscale.data.tar import Sample
from clipscale.errors import DataError

Tokenize = Callable[[list[str]], Int64[Tensor, "n length"]]

_MIN_JUDGED = 1000  # samples, before a share of bad ones says anything


@dataclass(frozen=True)
class Part:
    """The rows of some streams in one step."""

    slots: list[int]
    images: UInt8[Tensor, "n 3 size size"]
    tokens: Int64[Tensor, "n length"]
    concepts: Int64[Tensor, "n"]
    keys: list[str]
    cursors: dict[int, int]  # of these streams, after the step
    dropped: Counter[str]  # in this step


@dataclass
class StreamWork:
    """Endless parts, one a step from `start_step` on, of the streams in `cursors`. Raises `DataError`."""

    index: ShardIndex
    order: Order
    decoder: Decoder
    tokenize: Tokenize
    global_batch: int
    cursors: Mapping[int, int]
    start_step: int
    max_bad_fraction: float
    concept: str = ""
    at: str = "the start"

    def items(self, share: slice) -> Iterator[Part]:
        streams = {number: _Stream(self, number, self.cursors[number]) for number in sorted(self.cursors)[share]}
        tally = _Tally(self.max_bad_fraction, self.index.fields)
        slot = self.start_step * self.global_batch
        while True:
            yield self._part(range(slot, slot + self.global_batch), streams, tally)
            slot += self.global_batch

    def _part(self, step: range, streams: dict[int, _Stream], tally: _Tally) -> Part:
        dropped_before = tally.dropped.copy()
        slots, images, captions, concepts, keys = [], [], [], [], []
        for number, stream in streams.items():
            for slot in self.order.slots(number, step.start, step.stop):
                key, image, caption, concept = self._usable(stream, tally)
                slots.append(slot)
                images.append(image)
                captions.append(caption)
                concepts.append(concept)
                keys.append(key)
        num_rows = len(slots)
        if not num_rows:  # a step has fewer slots than there are streams; the shapes still count
            images, captions = [torch.empty(3, self.decoder.size, self.decoder.size, dtype=torch.uint8)], [""]
        return Part(
            slots,
            torch.stack(images)[:num_rows],
            self.tokenize(captions)[:num_rows],
            torch.tensor(concepts, dtype=torch.int64),
            keys,
            cursors={number: stream.cursor for number, stream in streams.items()},
            dropped=tally.dropped - dropped_before,
        )

    def _usable(self, stream: _Stream, tally: _Tally) -> tuple[str, Tensor, str, int]:
        """The stream's next usable sample: key, image, caption, concept (0 where none is asked for)."""
        num_barren = 0
        while True:
            key, sample, epoch, number = stream.next()
            self.at = key
            tally.num_seen += 1
            try:
                concept = concept_id(sample.members, self.concept) if self.concept else 0
                return key, *self.decoder(sample.members, epoch=epoch, sample=number), concept
            except Unusable as fault:
                tally.drop(fault.reason, key)
            num_barren += 1
            if num_barren > max(self.order.num_samples // self.order.streams, _MIN_JUDGED):
                raise DataError(f"{num_barren:,} samples in a row cannot be used: {tally}")


class _Stream:
    """One stream's way through the shards: its cursor, and the block that it has read."""

    def __init__(self, work: StreamWork, number: int, cursor: int) -> None:
        self.cursor = cursor
        self._index, self._order, self._number = work.index, work.order, number
        self._block: Block | None = None
        self._samples: list[Sample | None] = []

    def next(self) -> tuple[str, Sample, int, int]:
        """(key, sample, epoch, number of the sample in the index) at the cursor, which moves on."""
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
        return key, sample, block.epoch, self._index.number(shard, position)


@dataclass
class _Tally:
    """What one worker has met so far."""

    max_bad_fraction: float
    fields: frozenset[str]  # extensions in the shards
    num_seen: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    examples: dict[str, str] = field(default_factory=dict)  # reason -> the first key

    def drop(self, reason: str, key: str) -> None:
        self.dropped[reason] += 1
        self.examples.setdefault(reason, key)
        num_bad = self.dropped.total()
        if self.num_seen >= _MIN_JUDGED and num_bad > self.max_bad_fraction * self.num_seen:
            raise DataError(
                f"{num_bad:,} of {self.num_seen:,} samples cannot be used: {self}; this is more than "
                f"data.max_bad_fraction = {self.max_bad_fraction:g} allows"
            )

    def __str__(self) -> str:
        reasons = ", ".join(
            f"{count:,} {reason} (such as {self.examples[reason]})" for reason, count in self.dropped.most_common()
        )
        found = " ".join(f".{name}" for name in sorted(self.fields)[:20])
        return f"{reasons}; the shards' members end in {found}, images are looked for in .{' .'.join(IMAGE_EXTENSIONS)}"
