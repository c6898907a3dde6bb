"""What the shards hold, learnt from their headers before the first step: counts, fields, and every fault at once."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from pathlib import Path

from clipscale.data.tar import Sample, TarError, groups, read_samples
from clipscale.errors import DataError

_MARK_EVERY = 64  # samples between two remembered byte offsets: what a reader walks over at most to reach its start
_MAX_LISTED = 20  # faults shown in full; a folder of ten thousand cut shards need not fill the terminal


@dataclass(frozen=True)
class Shard:
    """One shard: its path, whole samples, bytes, extensions met, and what is wrong with it."""

    path: str
    num_samples: int
    num_bytes: int
    fields: frozenset[str] = frozenset()
    marks: tuple[int, ...] = ()  # byte offset of every 64th sample
    faults: tuple[str, ...] = ()

    @property
    def stem(self) -> str:
        return Path(self.path).stem


@dataclass(frozen=True)
class ShardIndex:
    """All shards of a data set, in the order in which samples are numbered through. Pickles; holds no open file."""

    shards: tuple[Shard, ...]

    @classmethod
    def scan(cls, paths: Sequence[str], *, strict: bool = True, threads: int = 4) -> ShardIndex:
        """Walk the headers of all shards.

        Raises `DataError` with every fault of every shard. Unless `strict`: a cut shard then counts with the whole
        samples before the cut, an unreadable one with none, and their faults stay in `faults`.
        """
        with ThreadPoolExecutor(threads) as pool:
            index = cls(tuple(pool.map(scan_shard, paths)))
        if strict and index.faults:
            more = len(index.faults) - _MAX_LISTED
            raise DataError(
                "\n  ".join(
                    [
                        f"{sum(bool(shard.faults) for shard in index.shards)} of {len(paths)} shards are damaged; "
                        "fetch or write them anew, or leave them out of data.shards:",
                        *index.faults[:_MAX_LISTED],
                        *([f"... and {more} more"] if more > 0 else []),
                    ]
                )
            )
        return index

    @cached_property
    def counts(self) -> tuple[int, ...]:
        """Samples per shard."""
        return tuple(shard.num_samples for shard in self.shards)

    @property
    def num_samples(self) -> int:
        return sum(self.counts)

    @property
    def fields(self) -> frozenset[str]:
        return frozenset().union(*(shard.fields for shard in self.shards))

    @property
    def faults(self) -> list[str]:
        return [f"{shard.path}: {fault}" for shard in self.shards for fault in shard.faults]

    @cached_property
    def _firsts(self) -> tuple[int, ...]:
        return (0, *accumulate(self.counts))

    def number(self, shard: int, sample: int) -> int:
        """A sample's number in the whole data set: what its random choices are keyed by."""
        return self._firsts[shard] + sample

    def pieces(self, numbers: range) -> Iterator[tuple[int, range]]:
        """Where the samples of rising `numbers` lie: (shard, positions in it), shard by shard."""
        while numbers:
            shard = bisect_right(self._firsts, numbers[0]) - 1
            first, stop = self._firsts[shard], min(self._firsts[shard + 1], numbers.stop)
            here = range(numbers[0] - first, stop - first, numbers.step)
            yield shard, here
            numbers = numbers[len(here) :]

    def read(self, shard: int, positions: range) -> list[Sample]:
        """The samples at rising positions of a shard, with their bytes. Raises `DataError` if the shard has changed."""
        mark = positions.start // _MARK_EVERY
        path, marks = self.shards[shard].path, self.shards[shard].marks
        return list(read_samples(path, positions, marks[mark], mark * _MARK_EVERY))

    def summary(self) -> str:
        """One line for the log: the number of shards, the first and the last, samples and bytes."""
        first, last = self.shards[0].path, self.shards[-1].path
        names = first if len(self.shards) == 1 else f"{first} .. {last}"
        size = sum(shard.num_bytes for shard in self.shards) / 1e6
        return f"{len(self.shards):,} shards ({names}): {self.num_samples:,} samples, {size:,.1f} MB"


def scan_shard(path: str) -> Shard:
    """Walk one shard's headers. Faults are listed, not raised."""
    keys, fields, marks, faults = set[str](), set[str](), list[int](), list[str]()
    count = num_bytes = 0
    try:
        num_bytes = Path(path).stat().st_size
        with Path(path).open("rb", buffering=0) as file:
            if num_bytes == 0:
                raise TarError("the file is empty")
            for group in groups(file.fileno()):
                if group.key in keys:
                    faults.append(f"key {group.key!r} comes again, apart from its first place")
                faults += (f"member {name!r} comes twice" for name in group.repeated)
                if count % _MARK_EVERY == 0:
                    marks.append(group.header)
                keys.add(group.key)
                fields |= group.members.keys()
                count += 1
    except (OSError, TarError) as fault:
        reason = fault.strerror or str(fault) if isinstance(fault, OSError) else str(fault)
        faults.append(f"{reason} ({count:,} whole samples before)" if count else reason)
    if not count and not faults:
        faults.append("holds no sample: no member is named <key>.<extension>")
    return Shard(path, count, num_bytes, frozenset(fields), tuple(marks), tuple(faults))
