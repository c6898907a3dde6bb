"""The order of samples: exactly once, the same for any layout, a function of (seed, epoch)."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from clipscale.data.assign import Order, check, sample_rng

orders = st.builds(
    Order,
    counts=st.lists(st.integers(0, 40), min_size=1, max_size=12).filter(any).map(tuple),
    seed=st.integers(0, 2**63),
    streams=st.integers(1, 24),
    shuffle_block=st.integers(1, 50),
)
properties = settings(derandomize=True, deadline=None, max_examples=150)


def samples_in(order: Order, begin: int, end: int) -> list[tuple[int, int]]:
    """What fills the slots [begin, end) where nothing is dropped."""
    return [order.locate(slot % order.streams, slot // order.streams)[1:] for slot in range(begin, end)]


def all_samples(order: Order) -> Counter[tuple[int, int]]:
    return Counter((shard, sample) for shard, count in enumerate(order.counts) for sample in range(count))


@properties
@given(orders, st.integers(0, 3))
def test_an_epoch_holds_every_sample_exactly_once(order: Order, epoch: int) -> None:
    total = order.num_samples
    assert Counter(samples_in(order, epoch * total, (epoch + 1) * total)) == all_samples(order)


@properties
@given(orders, st.integers(0, 10**6))
def test_blocks_tile_a_stream_and_name_its_epoch(order: Order, far: int) -> None:
    stream = far % order.streams
    position = order.block(stream, far).first
    for _ in range(6):
        block = order.block(stream, position)
        assert block.first == position
        assert 1 <= len(block.order) <= order.shuffle_block
        assert sorted(block.order) == list(range(sum(stop - start for _, start, stop in block.ranges)))
        assert all(0 <= start < stop <= order.counts[shard] for shard, start, stop in block.ranges)
        epochs = {(p * order.streams + stream) // order.num_samples for p in range(position, block.stop)}
        assert epochs == {block.epoch}
        inside = order.block(stream, block.stop - 1)  # entered at its end, as a resumed run may
        assert (inside.first, inside.ranges, list(inside.order)) == (position, block.ranges, list(block.order))
        position = block.stop


@properties
@given(orders, st.integers(1, 8), st.integers(1, 6), st.integers(0, 4), st.integers(0, 20))
def test_ranks_and_workers_share_each_step_out_evenly(
    order: Order, world_size: int, per_rank: int, workers: int, step: int
) -> None:
    order = replace(order, streams=order.streams * world_size)
    batch = per_rank * world_size
    opening = step * batch
    shares = []
    for rank in range(world_size):
        mine = order.owned(rank, world_size)
        dealt = [mine[worker::workers] for worker in range(workers)] if workers else [mine]
        shares.append([slot for part in dealt for s in part for slot in order.slots(s, opening, opening + batch)])
    assert {len(share) for share in shares} == {per_rank}
    assert sorted(slot for share in shares for slot in share) == list(range(opening, opening + batch))


@properties
@given(orders, st.integers(0, 300))
def test_fresh_cursors_count_the_slots_that_are_filled(order: Order, slot: int) -> None:
    assert order.cursors_at(slot) == {s: sum(g % order.streams == s for g in range(slot)) for s in range(order.streams)}


@settings(properties, max_examples=40)
@given(orders)
def test_epochs_and_seeds_differ_and_runs_do_not(order: Order) -> None:
    assume(order.num_samples >= 30)
    total = order.num_samples
    first, second = samples_in(order, 0, total), samples_in(order, total, 2 * total)
    assert first != second
    assert samples_in(replace(order, seed=order.seed + 1), 0, total) != first
    assert samples_in(replace(order), 0, total) == first


def test_the_order_is_pinned() -> None:
    """Cursors outlive library versions: this may change only together with `Order.signature`."""
    order = Order((3, 0, 4, 2), seed=7, streams=2, shuffle_block=3)
    assert samples_in(order, 0, 9) == [(2, 3), (3, 1), (0, 0), (2, 0), (0, 1), (2, 1), (3, 0), (2, 2), (0, 2)]
    assert order.signature == "0815aed090042952"
    assert sample_rng(1, 2, 3).random(2).tolist() == [0.6929620910154011, 0.850783988808771]


def test_the_signature_changes_with_all_that_the_order_depends_on() -> None:
    order = Order((3, 4), seed=1, streams=2, shuffle_block=3)
    others = [
        replace(order, counts=(4, 3)),
        replace(order, seed=2),
        replace(order, streams=1),
        replace(order, shuffle_block=4),
    ]
    assert len({other.signature for other in [order, *others]}) == 5


def test_streams_do_not_all_read_in_the_same_step() -> None:
    order = Order((4000,), seed=0, streams=8, shuffle_block=64)
    starts = Counter(order.block(stream, 200).first for stream in range(8))
    assert max(starts.values()) == 1


def test_a_stream_sees_other_samples_of_a_single_shard_next_epoch() -> None:
    order = Order((1000,), seed=0, streams=10, shuffle_block=1000)
    seen = [{order.locate(0, position)[2] for position in range(e * 100, e * 100 + 100)} for e in range(4)]
    assert all(len(seen[e] & seen[e + 1]) < 90 for e in range(3))


def test_shards_and_samples_come_in_a_fair_order() -> None:
    order = Order((8,) * 8, seed=3, streams=1, shuffle_block=8)
    firsts = Counter(order.locate(0, epoch * 64)[1:] for epoch in range(3200))
    assert len(firsts) == 64
    assert max(firsts.values()) < 2 * 50  # 50 expected of each
    assert min(firsts.values()) > 50 / 2


def test_random_choices_are_keyed_by_seed_epoch_and_sample() -> None:
    keys = [(0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1), (1, 1, 0), (0, 1, 1)]
    np.random.seed(5)
    draws = [tuple(sample_rng(*key).random(3)) for key in keys]
    assert len(set(draws)) == len(keys)
    assert [tuple(sample_rng(*key).random(3)) for key in keys] == draws


def test_check_lists_every_fault_with_the_nearest_way_out() -> None:
    faults = check((10, 20), streams=50, global_batch=66, world_size=4)
    assert len(faults) == 4
    assert "30 samples in 2 shards do not fill one global batch of 66" in faults[0]
    assert "28 or less" in faults[0]
    assert "data.streams = 50: set it to 28" in faults[1]
    assert "train.global_batch = 66 cannot be shared by 4 ranks: the nearest is 64 or 68" in faults[2]
    assert "data.streams = 50 cannot be shared by 4 ranks: the nearest is 48 or 52" in faults[3]
    assert "the nearest is 4" in check((99,), streams=4, global_batch=3, world_size=4)[0]
    assert check((10, 20), streams=4, global_batch=28, world_size=4) == []
