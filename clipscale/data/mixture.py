"""Several sources in fixed shares: which rows of a global batch are whose, and whose stream makes which row.

Each source has an order and streams of its own. Its share of a batch is a whole number of rows, a multiple of
gcd(global batch, streams): every number of ranks that divides both then divides each share too, so that the batch of a
step is the same set of samples on all of them, and no rank has more rows than another.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

from clipscale.data.assign import Order, Resampled, joint_signature
from clipscale.data.decode import Decoder
from clipscale.data.index import ShardIndex


@dataclass(frozen=True)
class Source:
    """One data set of a mixture. `rows`: how many of each global batch. `name`: "" where it stands alone."""

    index: ShardIndex
    order: Order | Resampled
    decoder: Decoder
    rows: int
    name: str = ""


class Place(NamedTuple):
    """One stream of one source."""

    source: int
    stream: int


@dataclass(frozen=True)
class Mixture:
    """The sources of a run, all of equally many streams; `epoch_of` is the source whose pass is called an epoch.

    Streams are numbered through: number i is stream i mod S of source i // S.
    """

    sources: tuple[Source, ...]
    epoch_of: int = 0
    epoch_samples: int = 0  # instead, so many samples of the mixture

    def __post_init__(self) -> None:
        assert len({source.order.streams for source in self.sources}) == 1

    @classmethod
    def of(cls, index: ShardIndex, order: Order | Resampled, decoder: Decoder, global_batch: int) -> Mixture:
        """One source alone."""
        return cls((Source(index, order, decoder, global_batch),))

    @property
    def streams(self) -> int:
        """Of each source."""
        return self.sources[0].order.streams

    @cached_property
    def _firsts(self) -> tuple[int, ...]:
        return (0, *accumulate(source.rows for source in self.sources))

    @property
    def global_batch(self) -> int:
        return self._firsts[-1]

    @property
    def size(self) -> int:
        """Side of the images."""
        return self.sources[0].decoder.size

    @property
    def num_samples(self) -> int:
        """Samples of the mixture that make an epoch, rounded up."""
        source = self.sources[self.epoch_of]
        return self.epoch_samples or -(-source.order.num_samples * self.global_batch // source.rows)

    @cached_property
    def signature(self) -> str:
        """Short digest of everything the order of samples depends on."""
        parts = [source.order.signature for source in self.sources]
        return parts[0] if len(parts) == 1 else joint_signature(parts, [source.rows for source in self.sources])

    def owned(self, rank: int, world_size: int) -> list[int]:
        """The streams of one rank, over all sources, by their number; those of one source side by side."""
        return [
            source * self.streams + stream
            for source in range(len(self.sources))
            for stream in self.sources[source].order.owned(rank, world_size)
        ]

    def place(self, number: int) -> Place:
        return Place(*divmod(number, self.streams))

    def start(self) -> dict[int, int]:
        """Every stream's cursor before the first step."""
        return {
            source * self.streams + stream: cursor
            for source in range(len(self.sources))
            for stream, cursor in self.sources[source].order.cursors_at(0).items()
        }

    def rows(self, number: int, step: int) -> Iterator[int]:
        """The rows of the global batch of `step` that this stream fills."""
        place = self.place(number)
        source = self.sources[place.source]
        opening = step * source.rows
        for slot in source.order.slots(place.stream, opening, opening + source.rows):
            yield self._firsts[place.source] + slot - opening

    def shares(self) -> Mapping[str, int]:
        """Source -> rows of each global batch."""
        return {source.name: source.rows for source in self.sources}


def share_out(weights: Sequence[float], global_batch: int, streams: int) -> list[int]:
    """Rows of a global batch for each source: the multiples of gcd(global_batch, streams) nearest to the weights.

    They sum up to `global_batch` (largest remainders; Hamilton). A source may get 0.
    """
    quantum = math.gcd(global_batch, streams)
    units = global_batch // quantum
    exact = [weight / math.fsum(weights) * units for weight in weights]
    rows = [math.floor(share) for share in exact]
    by_remainder = sorted(range(len(weights)), key=lambda source: (rows[source] - exact[source], source))
    for source in by_remainder[: units - sum(rows)]:
        rows[source] += 1
    return [count * quantum for count in rows]
