"""Mixtures and drawn shards: exact shares, the same batches on any layout, resumed to the sample."""

from __future__ import annotations

import math
from collections import Counter
from itertools import islice
from pathlib import Path

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from clipscale.data.assign import Order, Resampled
from clipscale.data.index import Shard, ShardIndex
from clipscale.data.loader import TrainLoader
from clipscale.data.mixture import Mixture, Source, share_out
from clipscale.data.store import LOCAL
from clipscale.data.streams import Drop, StreamWork
from clipscale.errors import DataError

from .shard_files import PLAIN, members, write_shards

properties = settings(derandomize=True, deadline=None, max_examples=200)
samples_are_dear = settings(derandomize=True, deadline=None, max_examples=15, phases=[Phase.generate])
WORLD_SIZES = range(1, 9)

Run = tuple[list[list[tuple[int, str]]], list[dict[int, int]]]


def tokenize(captions: list[str]) -> torch.Tensor:
    return torch.tensor([[len(caption)] for caption in captions])


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> list[ShardIndex]:
    """Of 31, 50 and 7 samples; sample i of source s is called s00i."""
    found = []
    for number, counts in enumerate([(11, 0, 20), (17, 33), (7,)]):
        folder = tmp_path_factory.mktemp(f"source{number}")
        found.append(
            ShardIndex.scan(
                write_shards(folder, counts, lambda i, n=number: members(n * 1000 + i)), strict=False, store=LOCAL
            )
        )
    return found


def run(mixture: Mixture, world_size: int, workers: int, steps: range, cursors: dict[int, int] | None = None) -> Run:
    """Per step the rows and keys of the global batch, and all cursors; workers stand side by side in here."""
    batches: list[list[tuple[int, str]]] = [[] for _ in steps]
    after: list[dict[int, int]] = [{} for _ in steps]
    cursors = mixture.start() if cursors is None else cursors
    for rank in range(world_size):
        mine = {number: cursors[number] for number in mixture.owned(rank, world_size)}
        rank_rows = Counter[int]()
        for worker in range(max(1, workers)):
            work = StreamWork(mixture, tokenize, mine, steps.start, 1.0)
            share = slice(worker, None, workers) if workers else slice(None)
            for place, part in zip(range(len(steps)), work.items(share), strict=False):
                batches[place] += zip(part.rows, part.keys, strict=True)
                rank_rows[place] += len(part.rows)
                assert all(row % world_size == rank for row in part.rows)
                after[place] |= part.cursors
        assert set(rank_rows.values()) == {mixture.global_batch // world_size}
    return [sorted(batch) for batch in batches], after


# --- shares -------------------------------------------------------------------------------------------------------


@properties
@given(st.lists(st.floats(0.01, 100), min_size=1, max_size=6), st.integers(1, 500), st.integers(1, 100))
def test_shares_are_near_the_weights_and_fit_every_number_of_ranks(
    weights: list[float], global_batch: int, streams: int
) -> None:
    rows = share_out(weights, global_batch, streams)
    quantum = math.gcd(global_batch, streams)
    assert sum(rows) == global_batch
    for weight, share in zip(weights, rows, strict=True):
        assert abs(share - weight / sum(weights) * global_batch) < quantum + 1e-6
    ranks = [size for size in range(1, 100) if global_batch % size == streams % size == 0]
    assert all(share % size == 0 for share in rows for size in ranks)


def test_shares_of_examples() -> None:
    assert share_out([3, 1], 64, 8) == [48, 16]
    assert share_out([1, 1, 1], 64, 8) == [24, 24, 16]
    assert share_out([1], 35, 48) == [35]
    assert share_out([1000, 1], 64, 8) == [64, 0]


# --- any shards, any layout, any stop --------------------------------------------------------------------------------


@samples_are_dear
@given(st.data())
def test_mixed_batches_do_not_depend_on_ranks_workers_or_interruptions(
    sources: list[ShardIndex], data: st.DataObject
) -> None:
    common = data.draw(st.sampled_from([24, 35]), "common")
    streams = common * data.draw(st.integers(1, 2), "streams")
    world_sizes = [size for size in WORLD_SIZES if common % size == 0]
    chosen = data.draw(st.lists(st.sampled_from(sources), min_size=1, max_size=3, unique_by=id), "sources")
    rows = [common * data.draw(st.integers(1, 2)) for _ in chosen]
    seed, block = data.draw(st.integers(0, 99)), data.draw(st.integers(1, 9))
    mixture = Mixture(
        tuple(
            Source(index, Order(index.counts, seed, streams, block), PLAIN, share, f"s{place}")
            for place, (index, share) in enumerate(zip(chosen, rows, strict=True))
        )
    )
    num_steps = 4
    stop = data.draw(st.integers(1, num_steps - 1), "stop")
    layouts = [(data.draw(st.sampled_from(world_sizes)), data.draw(st.integers(0, 4))) for _ in range(3)]
    whole, cursors = run(mixture, 1, 0, range(num_steps))
    assert run(mixture, *layouts[0], range(num_steps)) == (whole, cursors)
    head, reached = run(mixture, *layouts[1], range(stop))
    tail, end = run(mixture, *layouts[2], range(stop, num_steps), reached[-1])
    assert head + tail == whole
    assert reached + end == cursors
    for step in whole:
        assert [row for row, _ in step] == list(range(sum(rows)))
    for place, (index, share) in enumerate(zip(chosen, rows, strict=True)):  # exactly once a pass, source by source
        first = sum(rows[:place])
        keys = [key for step in whole for row, key in step if first <= row < first + share]
        counts = Counter(keys[: index.num_samples])
        assert max(Counter(keys).values()) - min([*Counter(keys).values()], default=0) <= 1
        if len(keys) >= index.num_samples:
            assert counts == Counter(dict.fromkeys(counts, 1))
            assert len(counts) == index.num_samples


@samples_are_dear
@given(
    st.lists(st.integers(0, 9), min_size=1, max_size=6).filter(lambda counts: sum(counts) > 0),
    st.integers(1, 24),
    st.integers(1, 3),
    st.integers(0, 20),
    st.data(),
)
def test_a_stop_on_an_epochs_last_step(
    tmp_path_factory: pytest.TempPathFactory,
    counts: list[int],
    streams: int,
    epochs: int,
    seed: int,
    data: st.DataObject,
) -> None:
    """Each epoch one step: every stop is an epoch's last."""
    index = ShardIndex.scan(write_shards(tmp_path_factory.mktemp("any"), counts), strict=False)
    total = index.num_samples
    mixture = Mixture.of(index, Order(index.counts, seed, streams, 3), PLAIN, total)
    world_sizes = [size for size in WORLD_SIZES if total % size == streams % size == 0]
    before, after = (data.draw(st.sampled_from(world_sizes)) for _ in range(2))
    head, reached = run(mixture, before, data.draw(st.integers(0, 4)), range(epochs))
    tail, _ = run(mixture, after, data.draw(st.integers(0, 4)), range(epochs, epochs + 2), reached[-1])
    assert head + tail == run(mixture, 1, 0, range(epochs + 2))[0]
    every = sorted(f"s-{shard:03d}/{sum(counts[:shard]) + i:05d}" for shard, n in enumerate(counts) for i in range(n))
    assert all(sorted(key for _, key in step) == every for step in head + tail)


# --- shards drawn with replacement ------------------------------------------------------------------------------------


def drawn(paths: list[str], streams: int = 24, seed: int = 1) -> Mixture:
    index = ShardIndex(tuple(Shard(path, 0, 0) for path in paths))
    return Mixture.of(index, Resampled(len(paths), seed, streams, 100, 3), PLAIN, 24)


@pytest.mark.parametrize(("before", "after", "stop"), [((1, 0), (8, 1), 1), ((3, 2), (4, 4), 3), ((2, 0), (2, 3), 5)])
def test_drawn_batches_do_not_depend_on_ranks_workers_or_interruptions(
    tmp_path: Path, before: tuple[int, int], after: tuple[int, int], stop: int
) -> None:
    mixture = drawn(write_shards(tmp_path, [4, 9, 1]))
    whole, _ = run(mixture, 1, 0, range(8))
    head, reached = run(mixture, *before, range(stop))
    tail, _ = run(mixture, *after, range(stop, 8), reached[-1])
    assert head + tail == whole
    assert len({key for step in whole for _, key in step}) == 14
    assert run(drawn([shard.path for shard in mixture.sources[0].index.shards], seed=2), 1, 0, range(8))[0] != whole


def test_a_drawn_stream_is_a_row_of_whole_shards_shuffled_in_blocks(tmp_path: Path) -> None:
    """Against the plainest program for it."""
    counts = [4, 9, 1]
    mixture = drawn(write_shards(tmp_path, counts), streams=2)
    order = mixture.sources[0].order
    assert isinstance(order, Resampled)
    expected: dict[int, list[str]] = {0: [], 1: []}
    for stream, keys in expected.items():
        for draw in range(60):
            shard = order.shard(stream, draw)
            names = [f"s-{shard:03d}/{sum(counts[:shard]) + number:05d}" for number in range(counts[shard])]
            for block, start in enumerate(range(0, len(names), 3)):
                part = names[start : start + 3]
                keys += [part[place] for place in order.block_order(stream, draw, block, len(part))]
    batches, _ = run(mixture, 1, 0, range(8))
    for stream, keys in expected.items():
        assert [key for step in batches for row, key in step if row % 2 == stream] == keys[: 8 * 12]


def test_streams_draw_other_shards() -> None:
    """Not all workers the same ones (webdataset 242), and each shard as often as the others."""
    order = Resampled(50, 0, 16, 100)
    firsts = [tuple(order.shard(stream, draw) for draw in range(4)) for stream in range(16)]
    assert len(set(firsts)) == 16
    often = Counter(order.shard(stream, draw) for stream in range(16) for draw in range(1000))
    assert len(often) == 50
    assert max(often.values()) < 1.3 * 16_000 / 50


def test_a_drawn_shard_that_cannot_be_read_is_counted_and_passed_over(tmp_path: Path) -> None:
    paths = write_shards(tmp_path, [4, 9, 3])
    Path(paths[2]).unlink()
    mixture = drawn(paths, streams=2)
    with TrainLoader(mixture, tokenize) as loader:
        batches = [next(loader) for _ in range(6)]
    dropped = sum((batch.dropped for batch in batches), Counter())
    assert set(dropped) == {Drop("bad_shard", "", paths[2])}
    assert all(len(batch.keys) == 24 for batch in batches)
    with TrainLoader(mixture, tokenize, max_bad_fraction=0.1) as loader:  # noqa: SIM117
        with pytest.raises(DataError, match=r"drawn shards cannot be read, which is more than(.|\n)*s-002\.tar"):
            list(islice(loader, 200))
