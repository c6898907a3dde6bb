"""A look at every sample: what is wrong with it, how large its image and how long its caption is."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from clipscale.config.data import Caption
from clipscale.data.captions import Unusable, read_caption
from clipscale.data.counts import stated_counts
from clipscale.data.decode import image_bytes, read_image
from clipscale.data.index import Report, Shard, scan_shard
from clipscale.data.store import LOCAL, Store
from clipscale.data.tar import Sample
from clipscale.errors import DataError

_AT_A_TIME = 64  # samples in memory, per thread

CountTokens = Callable[[str], int]


@dataclass(frozen=True)
class Wanted:
    """What a sound sample is. max_tokens: longest caption, 0 for any; counted by `count_tokens`."""

    caption: Caption
    max_pixels: int = 100_000_000
    max_tokens: int = 0
    count_tokens: CountTokens | None = None
    decode: bool = True


class Fault(NamedTuple):
    """One thing that is wrong. `key`: "" where it is the shard."""

    shard: str
    key: str
    what: str

    def __str__(self) -> str:
        return f"{self.shard}: {self.key}: {self.what}" if self.key else f"{self.shard}: {self.what}"


@dataclass
class Findings:
    """What was found in some shards; the lists have an entry for each usable sample."""

    faults: list[Fault] = field(default_factory=list)
    num_shards: int = 0
    num_samples: int = 0
    num_bytes: int = 0
    fields: Counter[str] = field(default_factory=Counter)
    widths: list[int] = field(default_factory=list)
    heights: list[int] = field(default_factory=list)
    caption_chars: list[int] = field(default_factory=list)
    captions: Counter[int] = field(default_factory=Counter)  # by hash
    images: Counter[int] = field(default_factory=Counter)

    def add(self, other: Findings) -> None:
        self.faults += other.faults
        self.num_shards += other.num_shards
        self.num_samples += other.num_samples
        self.num_bytes += other.num_bytes
        self.widths += other.widths
        self.heights += other.heights
        self.caption_chars += other.caption_chars
        self.fields.update(other.fields)
        self.captions.update(other.captions)
        self.images.update(other.images)

    def as_dict(self) -> dict[str, Any]:
        """The numbers, for a table or JSON."""
        return {
            "shards": self.num_shards,
            "samples": self.num_samples,
            "bytes": self.num_bytes,
            "fields": dict(sorted(self.fields.items())),
            "width": _spread(self.widths),
            "height": _spread(self.heights),
            "caption_characters": _spread(self.caption_chars),
            "repeated_captions": sum(count - 1 for count in self.captions.values()),
            "repeated_images": sum(count - 1 for count in self.images.values()),
            "unusable": dict(Counter(fault.what.partition(" (")[0] for fault in self.faults if fault.key)),
            "damaged_shards": len({fault.shard for fault in self.faults if not fault.key}),
        }


def _spread(values: Sequence[int]) -> dict[str, float]:
    if not values:
        return {}
    names = ("min", "p05", "median", "p95", "max")
    return dict(zip(names, np.percentile(values, (0, 5, 50, 95, 100)).tolist(), strict=True))


def inspect(
    paths: Sequence[str],
    wanted: Wanted,
    *,
    counts: Mapping[str, int] | None = None,
    store: Store = LOCAL,
    threads: int = 4,
    report: Report | None = None,
) -> Findings:
    """Look at every sample of every shard. `counts`: how many samples an index says that a shard holds."""
    stated = {path: (count, "the index") for path, count in (counts or {}).items()}
    stated = {**stated_counts(paths, store), **stated}
    total = Findings()
    with ThreadPoolExecutor(threads) as pool:
        for done, found in enumerate(pool.map(lambda path: _look_at(path, wanted, stated, store), paths), 1):
            total.add(found)
            if report is not None:
                report("shards", done, len(paths))
    return total


def _look_at(path: str, wanted: Wanted, stated: Mapping[str, tuple[int, str]], store: Store) -> Findings:
    shard = scan_shard(path, store, stated)
    found = Findings([Fault(path, "", fault) for fault in shard.faults], 1, shard.num_samples, shard.num_bytes)
    try:
        for sample in _samples(shard, store):
            found.fields.update(sample.members.keys())
            _examine(sample, path, wanted, found)
    except DataError as fault:
        found.faults.append(Fault(path, "", str(fault)))
    return found


def _samples(shard: Shard, store: Store) -> Iterator[Sample]:
    for start in range(0, shard.num_samples, _AT_A_TIME):
        yield from shard.read(range(start, min(start + _AT_A_TIME, shard.num_samples)), store)


def _examine(sample: Sample, path: str, wanted: Wanted, found: Findings) -> None:
    """One sample: its image, and then, whatever that was like, its caption."""
    try:
        data = image_bytes(sample.members)
        if wanted.decode:
            width, height = read_image(data, wanted.max_pixels).size
            found.widths.append(width)
            found.heights.append(height)
        found.images[_hash(data)] += 1
    except Unusable as fault:
        found.faults.append(Fault(path, sample.key, fault.reason))
    try:
        caption = read_caption(sample.members, wanted.caption, np.random.default_rng(0))
    except Unusable as fault:
        found.faults.append(Fault(path, sample.key, fault.reason))
        return
    found.caption_chars.append(len(caption))
    found.captions[_hash(caption.encode())] += 1
    # A token is a character at least: most captions need not be tokenised.
    if wanted.count_tokens is not None and wanted.max_tokens and len(caption) + 2 > wanted.max_tokens:
        tokens = wanted.count_tokens(caption) + 2  # start and end
        if tokens > wanted.max_tokens:
            found.faults.append(Fault(path, sample.key, f"caption_too_long ({tokens} tokens of {wanted.max_tokens})"))


def _hash(data: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "big")


def draw(found: Findings, path: str) -> None:
    """Histograms of sizes and caption lengths as a PNG. Raises `DataError` without matplotlib."""
    try:
        import matplotlib as mpl
    except ImportError as fault:
        raise DataError("--plot needs matplotlib: pip install 'clipscale[demo]'") from fault
    mpl.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 3, figsize=(12, 3.4), layout="constrained")
    for axis, (name, values) in zip(
        axes,
        [
            ("width, pixels", found.widths),
            ("height, pixels", found.heights),
            ("caption, characters", found.caption_chars),
        ],
        strict=True,
    ):
        axis.hist(values, bins=40)
        axis.set_xlabel(name)
        axis.set_ylabel("samples")
    figure.suptitle(f"{found.num_samples:,} samples in {found.num_shards:,} shards")
    figure.savefig(path)
    pyplot.close(figure)
