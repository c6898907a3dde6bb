"""The loader: the same batches on any number of ranks and workers, from any point on, whatever the samples hold."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter, namedtuple
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from clipscale.config.data import AffineAugment, LabelAndTagsCaption
from clipscale.data.assign import Order
from clipscale.data.decode import Decoder
from clipscale.data.index import ShardIndex
from clipscale.data.loader import Batch, TrainLoader, eval_samples
from clipscale.data.mixture import Mixture
from clipscale.data.streams import Drop, StreamWork
from clipscale.errors import ConfigError, DataError

from .shard_files import PLAIN, members, picture, pixels, tokenize, tokenize_or_fail, write_shards

# Without shrinking: a failing example is slow to make small, and small enough as it is.
samples_are_dear = settings(derandomize=True, deadline=None, max_examples=15, phases=[Phase.generate])
COUNTS = (11, 0, 30, 1, 17, 25)
CHANGING = Decoder(4, AffineAugment("affine", degrees=90), LabelAndTagsCaption("label_and_tags", max_tags=2))
BAD = {
    4: ("decode_error", [("00004.png", b"<html>404</html>"), ("00004.txt", b"number 4")]),
    12: ("no_image", [("00012.txt", b"number 12"), ("00012.json", b"{}")]),
    13: ("empty_caption", [("00013.png", picture()), ("00013.txt", b"  ")]),
    40: ("not_utf8", [("00040.png", picture()), ("00040.txt", b"caf\xe9")]),
    41: ("no_caption", [("00041.png", picture())]),
    83: ("decode_error", [("00083.jpg", picture(kind="JPEG", size=(64, 64))[:400]), ("00083.txt", b"number 83")]),
}


def with_bad(number: int) -> list[tuple[str, bytes]]:
    return BAD[number][1] if number in BAD else members(number)


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> ShardIndex:
    """84 samples in 6 shards (one without any), 6 of them unusable."""
    return ShardIndex.scan(write_shards(tmp_path_factory.mktemp("bad"), COUNTS, with_bad), strict=False)


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> ShardIndex:
    counts = [count for count in COUNTS if count]
    return ShardIndex.scan(write_shards(tmp_path_factory.mktemp("sound"), counts))


@pytest.fixture(autouse=True)
def no_worker_is_left() -> Iterator[None]:
    yield
    assert multiprocessing.active_children() == []


def words(captions: list[str]) -> torch.Tensor:
    """Captions of label and tags as numbers."""
    return torch.tensor([list(caption.encode().ljust(24, b"\0")) for caption in captions])


def content(batch: Batch) -> list[tuple]:
    rows = zip(batch.keys, batch.images, batch.tokens, strict=True)
    return [(key, tuple(image.flatten().tolist()), tuple(token.tolist())) for key, image, token in rows]


Layout = namedtuple("Layout", "world_size workers")


def run(
    index: ShardIndex,
    order: Order,
    layout: Layout,
    global_batch: int,
    steps: range,
    cursors: dict[int, int] | None = None,
) -> tuple[list[list[tuple]], list[dict[int, int]]]:
    """Per step the global batch, in the order of its rows, and all cursors; workers stand side by side in here."""
    batches, after = [[] for _ in steps], [{} for _ in steps]
    mixture = Mixture.of(index, order, CHANGING, global_batch)
    for rank in range(layout.world_size):
        start = order.cursors_at(0) if cursors is None else cursors
        mine = {stream: start[stream] for stream in order.owned(rank, layout.world_size)}
        for worker in range(layout.workers):
            work = StreamWork(mixture, words, mine, steps.start, 1.0)
            share = slice(worker, None, layout.workers)
            for place, part in zip(range(len(steps)), work.items(share), strict=False):
                rows = zip(part.rows, part.keys, part.images, part.tokens, strict=True)
                batches[place] += [
                    (row, key, tuple(image.flatten().tolist()), tuple(token.tolist()))
                    for row, key, image, token in rows
                ]
                after[place] |= part.cursors
    return [sorted(batch) for batch in batches], after


# --- exactly once, on any layout, from any point --------------------------------------------------------------------


@samples_are_dear
@given(st.data())
def test_batches_do_not_depend_on_ranks_workers_or_interruptions(index: ShardIndex, data: st.DataObject) -> None:
    common, world_sizes = data.draw(st.sampled_from([(24, (1, 2, 3, 4, 6, 8)), (35, (5, 7))]))
    layouts = [Layout(data.draw(st.sampled_from(world_sizes)), data.draw(st.integers(1, 4))) for _ in range(3)]
    global_batch = common
    order = Order(index.counts, data.draw(st.integers(0, 99)), common, data.draw(st.integers(1, 9)))
    num_steps = 5  # more than an epoch
    stop = data.draw(st.integers(1, num_steps - 1), "stop")
    whole, cursors = run(index, order, Layout(1, 1), global_batch, range(num_steps))
    assert [len(batch) for batch in whole] == [global_batch] * num_steps
    assert run(index, order, layouts[0], global_batch, range(num_steps)) == (whole, cursors)
    head, reached = run(index, order, layouts[1], global_batch, range(stop))
    tail, end = run(index, order, layouts[2], global_batch, range(stop, num_steps), reached[-1])
    assert head + tail == whole
    assert reached + end == cursors


@samples_are_dear
@given(st.integers(1, 16), st.integers(1, 40), st.integers(1, 30), st.integers(0, 99))
def test_a_stream_gives_its_good_samples_in_order(
    index: ShardIndex, streams: int, block: int, batch: int, seed: int
) -> None:
    order = Order(index.counts, seed, streams, block)
    with TrainLoader(Mixture.of(index, order, PLAIN, batch), tokenize) as loader:
        batches = [next(loader) for _ in range(2 * 84 // batch + 2)]
    given_by: dict[int, list[int]] = {stream: [] for stream in range(streams)}
    for step, taken in enumerate(batches):
        for row, number in enumerate(taken.tokens[:, 0].tolist()):
            given_by[(step * batch + row) % streams].append(number)
    dropped: Counter[Drop] = Counter()
    for stream, cursor in batches[-1].cursors.items():
        passed = [order.locate(stream, position)[1:] for position in range(cursor)]
        numbers = [index.number(*place) for place in passed]
        assert given_by[stream] == [number for number in numbers if number not in BAD]
        for number, (shard, _) in zip(numbers, passed, strict=True):
            if number in BAD:
                dropped[Drop(BAD[number][0], "", index.shards[shard].stem)] += 1
    assert sum((taken.dropped for taken in batches), Counter()) == dropped


@pytest.mark.parametrize("batch", [7, 12, 21, 28])  # of 84 samples: ends on an epoch's border and off it
def test_an_epoch_of_sound_samples_is_seen_exactly_once(sound: ShardIndex, batch: int) -> None:
    order = Order(sound.counts, 3, 4, 10)
    with TrainLoader(Mixture.of(sound, order, PLAIN, batch), tokenize) as loader:
        batches = [next(loader) for _ in range(84 // batch * 3)]
    numbers = [number for taken in batches for number in taken.tokens[:, 0].tolist()]
    epochs = [numbers[84 * epoch : 84 * (epoch + 1)] for epoch in range(3)]
    assert all(sorted(epoch) == list(range(84)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]
    assert batches[84 // batch - 1].epoch == 1.0
    stop = 84 // batch  # resume where an epoch ends
    cursors = batches[stop - 1].cursors
    with TrainLoader(Mixture.of(sound, order, PLAIN, batch), tokenize, cursors=cursors, start_step=stop) as loader:
        assert [content(next(loader)) for _ in range(stop)] == [content(taken) for taken in batches[stop : 2 * stop]]


# --- real processes -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch", [20, 3])  # the latter leaves a worker without a row now and then
def test_worker_processes_give_what_one_process_gives(index: ShardIndex, batch: int) -> None:
    order = Order(index.counts, 1, 4, 9)
    results = []
    for workers in (0, 1, 5):
        with TrainLoader(Mixture.of(index, order, CHANGING, batch), words, workers=workers) as loader:
            assert loader.workers == min(workers, 4)
            batches = [next(loader) for _ in range(10)]
        assert multiprocessing.active_children() == []
        results.append([(content(taken), taken.cursors, taken.dropped, taken.epoch) for taken in batches])
    assert results[1:] == results[:1] * 2


def test_ranks_are_disjoint_and_resume_on_another_number_of_ranks_and_workers(index: ShardIndex) -> None:
    order = Order(index.counts, 1, 4, 9)

    def steps(world_size: int, workers: int, count: int, **start) -> tuple[list[list[str]], dict[int, int]]:
        keys, cursors = [[] for _ in range(count)], {}
        for rank in range(world_size):
            layout = {"rank": rank, "world_size": world_size, "workers": workers}
            with TrainLoader(Mixture.of(index, order, PLAIN, 8), tokenize, **layout, **start) as loader:
                for place in range(count):
                    taken = next(loader)
                    assert len(taken.keys) == 8 // world_size
                    keys[place] += taken.keys
            cursors |= taken.cursors
        return [sorted(step) for step in keys], cursors

    whole, _ = steps(1, 0, 9)
    head, cursors = steps(2, 2, 5)
    tail, _ = steps(4, 1, 4, cursors=cursors, start_step=5)
    assert head + tail == whole
    assert all(len(set(step)) == 8 for step in whole)


def test_loading_leaves_the_models_random_numbers_alone(sound: ShardIndex) -> None:
    before = torch.get_rng_state()
    with TrainLoader(Mixture.of(sound, Order(sound.counts, 0, 2), CHANGING, 2), words, workers=1) as loader:
        next(loader)
    assert torch.equal(torch.get_rng_state(), before)


def test_twenty_epochs_leave_memory_and_open_files_as_they_were(tmp_path: Path) -> None:
    """With shards of 2 MB: what is read and not let go would show at once."""
    noise = np.random.default_rng(0)

    def heavy(number: int) -> list[tuple[str, bytes]]:
        image = pixels(noise.integers(0, 256, (80, 80, 3), np.uint8))
        return [(f"{number}.png", image), (f"{number}.txt", b"number %d" % number)]

    index = ShardIndex.scan(write_shards(tmp_path, [100] * 3, heavy))
    process, memory, files = psutil.Process(), [], []
    with TrainLoader(Mixture.of(index, Order(index.counts, 0, 4, 20), PLAIN, 100), tokenize) as loader:
        for _ in range(20):
            for _ in range(3):
                next(loader)
            memory.append(process.memory_info().rss)
            files.append(process.num_fds())
    assert files[-1] == files[0]
    assert memory[-1] - memory[3] < 3e6  # 16 epochs read 100 MB


def test_workers_end_quickly_with_the_loader_even_after_an_error(sound: ShardIndex) -> None:
    order = Order(sound.counts, 0, 2)
    loader = TrainLoader(Mixture.of(sound, order, PLAIN, 8), tokenize, workers=2)
    next(loader)
    started = time.monotonic()
    with pytest.raises(KeyError), loader:
        raise KeyError
    loader.close()
    assert multiprocessing.active_children() == []
    assert time.monotonic() - started < 5
    forgotten = TrainLoader(Mixture.of(sound, order, PLAIN, 8), tokenize, workers=2)
    del forgotten
    assert multiprocessing.active_children() == []


RUN = """
import sys
from clipscale.data.assign import Order
from clipscale.data.index import ShardIndex
from clipscale.data.loader import TrainLoader
from clipscale.data.mixture import Mixture
from tests.data.shard_files import PLAIN, tokenize
import multiprocessing

if __name__ == "__main__":
    index = ShardIndex.scan(sys.argv[2:])
    loader = TrainLoader(Mixture.of(index, Order(index.counts, 0, 2), PLAIN, 8), tokenize, workers=2)
    next(loader)
    print(*(child.pid for child in multiprocessing.active_children()), flush=True)
    if sys.argv[1] == "wait":
        input()
"""


def running(pid: int) -> bool:
    """Neither gone nor waiting for its parent's notice."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.parametrize("how", ["kill", "exit"])
def test_workers_do_not_outlive_the_run(sound: ShardIndex, tmp_path: Path, how: str) -> None:
    """Killed outright, or left without a word at the end of the program."""
    script = tmp_path / "run.py"
    script.write_text(RUN)
    paths = [shard.path for shard in sound.shards]
    command = [sys.executable, "-W", "error", str(script), "wait" if how == "kill" else "go", *paths]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        pids = [int(pid) for pid in process.stdout.readline().split()]
        if how == "kill":
            process.kill()
        assert process.wait(timeout=60) == (-signal.SIGKILL if how == "kill" else 0)
        if how == "exit":
            assert process.stderr.read() == ""
    assert len(pids) == 2
    deadline = time.monotonic() + 20
    while any(running(pid) for pid in pids):
        assert time.monotonic() < deadline, "workers outlived the run"
        time.sleep(0.1)


def test_a_killed_worker_is_a_data_error(sound: ShardIndex) -> None:
    with TrainLoader(Mixture.of(sound, Order(sound.counts, 0, 2), PLAIN, 8), tokenize, workers=2) as loader:
        next(loader)
        for child in multiprocessing.active_children():
            os.kill(child.pid or 0, signal.SIGKILL)
        with pytest.raises(DataError, match="worker died"):
            list(islice(loader, 100))


@pytest.mark.parametrize("workers", [0, 2])
def test_a_failure_in_a_worker_names_the_sample(sound: ShardIndex, workers: int) -> None:
    order = Order(sound.counts, 0, 4)
    with TrainLoader(Mixture.of(sound, order, PLAIN, 4), tokenize_or_fail, workers=workers) as loader:
        failure = r"loading failed at s-00\d/\d{5}: ZeroDivisionError\('thirteen'\)"
        with pytest.raises(DataError, match=failure) as caught:
            list(islice(loader, 21))
        assert "tokenize_or_fail" in str(caught.value.__cause__)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_shard_that_goes_away_is_an_error_that_names_it(tmp_path: Path, workers: int) -> None:
    paths = write_shards(tmp_path, [20, 20])
    index = ShardIndex.scan(paths)
    Path(paths[1]).unlink()
    loader = TrainLoader(Mixture.of(index, Order(index.counts, 0, 2), PLAIN, 4), tokenize, workers=workers)
    with loader, pytest.raises(DataError, match=r"s-001.tar: cannot be read"):
        list(islice(loader, 10))


def test_too_little_shared_memory_is_said_before_the_start(sound: ShardIndex, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: namedtuple("usage", "total used free")(64, 0, 64))
    with pytest.raises(ConfigError, match="--shm-size"):
        TrainLoader(Mixture.of(sound, Order(sound.counts, 0, 2), PLAIN, 4), tokenize, workers=1)


# --- unusable samples -----------------------------------------------------------------------------------------------


def foreign(number: int) -> list[tuple[str, bytes]]:
    return [(f"{number}.picture", picture()), (f"{number}.txt", b"number 1")]


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("allowed", [0.1, 1.0])
def test_no_usable_sample_ends_with_counts_and_extensions(tmp_path: Path, workers: int, allowed: float) -> None:
    index = ShardIndex.scan(write_shards(tmp_path, [40], foreign))
    limits = {"workers": workers, "max_bad_fraction": allowed}
    loader = TrainLoader(Mixture.of(index, Order(index.counts, 0, 2), PLAIN, 4), tokenize, **limits)
    with loader, pytest.raises(DataError) as caught:
        next(loader)
    message = str(caught.value)
    assert "no_image (such as s-000/" in message
    assert ".picture .txt" in message
    assert ".jpg .jpeg .png" in message


def test_a_larger_share_of_bad_samples_than_allowed_stops_the_run(index: ShardIndex) -> None:
    order = Order(index.counts, 0, 2)  # 6 of 84 samples are bad: 7.1%
    with TrainLoader(Mixture.of(index, order, PLAIN, 50), tokenize, max_bad_fraction=0.08) as loader:
        for _ in range(40):
            next(loader)
    loader = TrainLoader(Mixture.of(index, order, PLAIN, 50), tokenize, max_bad_fraction=0.06)
    expected = r"samples cannot be used: .*decode_error .*max_bad_fraction = 0\.06"
    with loader, pytest.raises(DataError, match=expected):
        list(islice(loader, 40))


def test_a_cut_shard_gives_its_whole_samples_when_that_is_allowed(tmp_path: Path) -> None:
    paths = write_shards(tmp_path, [20, 20])
    whole = Path(paths[1]).read_bytes()
    Path(paths[1]).write_bytes(whole[: len(whole) // 2])
    index = ShardIndex.scan(paths, strict=False)
    assert 20 < index.num_samples < 40
    with TrainLoader(Mixture.of(index, Order(index.counts, 0, 2), PLAIN, index.num_samples), tokenize) as loader:
        assert sorted(next(loader).tokens[:, 0].tolist()) == list(range(index.num_samples))


# --- evaluation -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("world_size", "batch", "workers"), [(1, 10, 0), (3, 4, 0), (2, 100, 2), (3, 7, 2), (90, 1, 0)]
)
def test_an_evaluation_sees_every_good_sample_once_in_order(
    index: ShardIndex, world_size: int, batch: int, workers: int
) -> None:
    seen, dropped = [], Counter[str]()
    for rank in range(world_size):
        numbers = []
        for part in eval_samples(index, PLAIN, batch=batch, rank=rank, world_size=world_size, workers=workers):
            assert len(part.keys) <= batch
            assert len(part.images) == len(part.captions) == len(part.keys)
            assert part.images.dtype == torch.uint8
            numbers += [int(caption.split()[1]) for caption in part.captions]
            assert [int(key.split("/")[1]) for key in part.keys] == numbers[len(numbers) - len(part.keys) :]
            dropped.update(part.dropped)
        assert numbers == sorted(numbers)
        assert all(number % world_size == rank for number in numbers)
        seen += numbers
    assert sorted(seen) == [number for number in range(84) if number not in BAD]
    assert dropped == Counter(reason for reason, _ in BAD.values())


def test_an_evaluation_left_early_leaves_no_worker(index: ShardIndex) -> None:
    assert next(eval_samples(index, replace(PLAIN, caption=None), batch=2, workers=2)).captions == ["", ""]
