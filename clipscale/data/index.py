"""What the shards hold, learnt from their headers before the first step: counts, fields, and every fault at once."""

from __future__ import annotations

import hashlib
import os
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from pathlib import Path

from clipscale.data.counts import stated_counts
from clipscale.data.store import LOCAL, Stat, Store
from clipscale.data.tar import Sample, TarError, groups, read_samples
from clipscale.errors import ConfigError, DataError

_MARK_EVERY = 64  # samples between two remembered byte offsets: what a reader walks over at most to reach its start
_MAX_LISTED = 20  # faults shown in full; a folder of ten thousand cut shards need not fill the terminal

Report = Callable[[str, int, int], None]
"""Told (what is being done, done, total) as work goes on."""


@dataclass(frozen=True)
class Shard:
    """One shard: its path, whole samples, bytes, extensions met, and what is wrong with it."""

    path: str
    num_samples: int
    num_bytes: int
    fields: frozenset[str] = frozenset()
    marks: tuple[int, ...] = ()  # byte offset of every 64th sample
    faults: tuple[str, ...] = ()
    version: str = ""  # of the file, as of `Store.stat`
    checksum: str = ""  # of all names, offsets and sizes in it

    @property
    def stem(self) -> str:
        return Path(self.path).stem

    def read(self, positions: range, store: Store) -> list[Sample]:
        """The samples at rising `positions`, with their bytes. Raises `DataError` if the shard has changed."""
        mark = min(positions.start // _MARK_EVERY, max(0, len(self.marks) - 1))
        start = self.marks[mark] if self.marks else 0
        try:
            with store.open(self.path, self.num_bytes, self.version) as file:
                return list(read_samples(file, self.path, positions, start, mark * _MARK_EVERY))
        except OSError as fault:
            raise DataError(f"{self.path}: cannot be read: {fault}") from fault


@dataclass(frozen=True)
class ShardIndex:
    """All shards of a data set, in the order in which samples are numbered through. Pickles; holds no open file."""

    shards: tuple[Shard, ...]
    store: Store = LOCAL

    @classmethod
    def scan(
        cls,
        paths: Sequence[str],
        *,
        strict: bool = True,
        threads: int = 4,
        store: Store = LOCAL,
        report: Report | None = None,
    ) -> ShardIndex:
        """Walk the headers of all shards; remote ones are fetched for it.

        Raises `DataError` with every fault of every shard. Unless `strict`: a cut shard then counts with the whole
        samples before the cut, an unreadable one with none, and their faults stay in `faults`.
        """
        stated = stated_counts(paths, store)
        shards = []
        with ThreadPoolExecutor(threads) as pool:
            for shard in pool.map(lambda path: scan_shard(path, store, stated), paths):
                shards.append(shard)
                if report is not None:
                    report("headers", len(shards), len(paths))
        index = cls(tuple(shards), store)
        if strict:
            index.refuse_faults()
        return index

    def refuse_faults(self) -> None:
        """Raise `DataError` with every fault of every shard, if there is any."""
        if not self.faults:
            return
        more = len(self.faults) - _MAX_LISTED
        raise DataError(
            "\n  ".join(
                [
                    f"{sum(bool(shard.faults) for shard in self.shards)} of {len(self.shards)} shards cannot be used; "
                    "fetch or write them anew, or leave them out of data.shards:",
                    *self.faults[:_MAX_LISTED],
                    *([f"... and {more} more"] if more > 0 else []),
                ]
            )
        )

    @cached_property
    def counts(self) -> tuple[int, ...]:
        """Samples per shard."""
        return tuple(shard.num_samples for shard in self.shards)

    @property
    def num_samples(self) -> int:
        return sum(self.counts)

    @property
    def num_bytes(self) -> int:
        return sum(shard.num_bytes for shard in self.shards)

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
        return self.shards[shard].read(positions, self.store)

    def summary(self) -> str:
        """One line for the log: the number of shards, the first and the last, samples and bytes."""
        first, last = self.shards[0].path, self.shards[-1].path
        names = first if len(self.shards) == 1 else f"{first} .. {last}"
        size = sum(shard.num_bytes for shard in self.shards) / 1e6
        return f"{len(self.shards):,} shards ({names}): {self.num_samples:,} samples, {size:,.1f} MB"


def scan_shard(path: str, store: Store = LOCAL, stated: Mapping[str, tuple[int, str]] | None = None) -> Shard:
    """Walk one shard's headers. Faults are listed, not raised. `stated`: path -> its count by a file of that name."""
    keys, fields, marks, faults = set[str](), set[str](), list[int](), list[str]()
    count, stat, walked = 0, Stat(0, ""), hashlib.blake2b(digest_size=16)
    try:
        stat = store.stat(path)
        with store.open(path, *stat) as file:
            stat = Stat(os.fstat(file.fileno()).st_size, stat.version)
            if stat.num_bytes == 0:
                raise TarError("the file is empty")
            for group in groups(file.fileno()):
                if group.key in keys:
                    faults.append(f"key {group.key!r} comes again, apart from its first place")
                faults += (f"member {name!r} comes twice" for name in group.repeated)
                if count % _MARK_EVERY == 0:
                    marks.append(group.header)
                keys.add(group.key)
                fields |= group.members.keys()
                walked.update(repr([(name, *member[1:]) for name, member in group.members.items()]).encode())
                walked.update(group.key.encode("utf-8", "surrogateescape"))
                count += 1
    except ConfigError:
        raise
    except (OSError, DataError) as fault:
        reason = fault.strerror or str(fault) if isinstance(fault, OSError) else str(fault).removeprefix(f"{path}: ")
        faults.append(f"{reason} ({count:,} whole samples before)" if count else reason)
    if not count and not faults:
        faults.append("holds no sample: no member is named <key>.<extension>")
    told, where = (stated or {}).get(path, (count, ""))
    if told != count and not faults:
        faults.append(f"holds {count:,} samples where {where} says {told:,}")
    return Shard(
        path, count, stat.num_bytes, frozenset(fields), tuple(marks), tuple(faults), stat.version, walked.hexdigest()
    )
