"""Remote shards: fetched once, whole or not at all, into a cache with a bound; every refusal in words, and no hang."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path

import pytest

from clipscale.data.assign import Order
from clipscale.data.index import ShardIndex
from clipscale.data.loader import TrainLoader
from clipscale.data.locations import expand_shards
from clipscale.data.mixture import Mixture
from clipscale.data.store import Store
from clipscale.errors import ConfigError, DataError

from .servers import Web, web
from .shard_files import PLAIN, tokenize, write_shards


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Web]:
    (tmp_path / "www").mkdir()
    write_shards(tmp_path / "www", [20, 20, 20])
    with web(tmp_path / "www") as served:
        yield served


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(str(tmp_path / "cache"), timeout_s=5.0, attempts=3, wait_s=0.02)


def shards(server: Web) -> list[str]:
    return [server.of(f"s-{number:03d}.tar") for number in range(3)]


def epochs(index: ShardIndex, count: int, workers: int = 0) -> list[list[str]]:
    mixture = Mixture.of(index, Order(index.counts, 0, 4, 5), PLAIN, 20)
    with TrainLoader(mixture, tokenize, workers=workers) as loader:
        return [[key for _ in range(3) for key in next(loader).keys] for _ in range(count)]


# --- http ---------------------------------------------------------------------------------------------------------


def test_every_shard_is_fetched_once_whatever_the_epochs_and_workers(server: Web, store: Store, tmp_path: Path) -> None:
    remote = ShardIndex.scan(expand_shards(f"{server.address}/s-{{000..002}}.tar", store), store=store)
    local = ShardIndex.scan(expand_shards(str(tmp_path / "www")))
    assert epochs(remote, 3, workers=2) == epochs(local, 3)
    assert {name: count for name, count in server.asked.items() if name.endswith(".tar")} == {
        f"s-{number:03d}.tar": 1 for number in range(3)
    }


def test_a_small_cache_makes_room_and_gives_the_same_samples(server: Web, store: Store, tmp_path: Path) -> None:
    size = (tmp_path / "www" / "s-000.tar").stat().st_size
    small = Store(store.folder, max_bytes=2 * size, timeout_s=5.0)
    index = ShardIndex.scan(shards(server), store=small, threads=1)
    local = ShardIndex.scan(expand_shards(str(tmp_path / "www")))
    assert epochs(index, 2) == epochs(local, 2)
    held = [path.stat().st_size for path in Path(store.folder).glob("*.tar")]
    assert sum(held) <= 2 * size
    assert server.asked["s-000.tar"] + server.asked["s-001.tar"] + server.asked["s-002.tar"] > 3
    with pytest.raises(ConfigError, match=r"data\.cache_bytes = 100 does not hold .*s-000\.tar"):
        ShardIndex.scan(shards(server), store=Store(str(tmp_path / "tiny"), max_bytes=100))


@pytest.mark.parametrize("mood", ["500", "cut"])
def test_a_passing_fault_is_tried_again(server: Web, store: Store, mood: str) -> None:
    server.moods["s-001.tar"] = [mood]
    assert ShardIndex.scan(shards(server), store=store).counts == (20, 20, 20)
    assert server.asked["s-001.tar"] == 2


@pytest.mark.parametrize(
    ("mood", "words", "asked"),
    [
        ("403", "access denied", 1),
        ("404", "nothing there", 1),
        ("410", "nothing there", 1),
        ("400", "refused with HTTP status 400", 1),
        ("503", "503", 3),
        ("cut", r"only .* bytes came|ClientPayloadError", 3),
    ],
)
def test_lasting_faults_are_told_of_all_shards_at_once(
    server: Web, store: Store, mood: str, words: str, asked: int
) -> None:
    server.moods |= {"s-001.tar": [mood] * 9, "s-002.tar": [mood] * 9}
    with pytest.raises(DataError, match=f"2 of 3 shards cannot be used(.|\n)*s-001.tar: .*({words})(.|\n)*s-002.tar"):
        ShardIndex.scan(shards(server), store=store)
    assert server.asked["s-001.tar"] == asked
    assert list(Path(store.folder).glob("*.partial")) == []


def test_a_silent_server_does_not_hang_the_run(server: Web, tmp_path: Path) -> None:
    server.moods["s-000.tar"] = ["silent"] * 9
    started = time.monotonic()
    with pytest.raises(DataError, match=r"s-000.tar: no answer \(2 attempts, 0.3 s each\)"):
        ShardIndex.scan(
            shards(server)[:1], store=Store(str(tmp_path / "cache"), timeout_s=0.3, attempts=2, wait_s=0.02)
        )
    assert time.monotonic() - started < 5


def test_a_server_that_is_not_there(store: Store) -> None:
    with pytest.raises(DataError, match=r"127\.0\.0\.1:9/a\.tar: .*Connect"):
        ShardIndex.scan(["http://127.0.0.1:9/a.tar"], store=store)


def test_a_shard_that_grew_after_it_was_counted_is_refused(server: Web, store: Store, tmp_path: Path) -> None:
    index = ShardIndex.scan(shards(server), store=store)
    for path in Path(store.folder).glob("*.tar"):
        path.unlink()
    write_shards(tmp_path / "www", [30])
    with pytest.raises(DataError, match=r"s-000\.tar: .* bytes came where .* were counted before"):
        index.read(0, range(5))


def test_sizes_json_spares_the_first_look(server: Web, store: Store, tmp_path: Path) -> None:
    """Counts that are stated and wrong are found out when the shard comes."""
    (tmp_path / "www" / "sizes.json").write_text('{"s-000.tar": 20, "s-001.tar": 21, "s-002.tar": 20}')
    with pytest.raises(DataError, match=r"s-001\.tar: holds 20 samples where sizes\.json says 21"):
        ShardIndex.scan(shards(server), store=store)


# --- commands -----------------------------------------------------------------------------------------------------


def test_a_command_is_run_once_and_its_failure_told(tmp_path: Path, store: Store) -> None:
    path = write_shards(tmp_path, [7])[0]
    count = tmp_path / "count"
    command = f"pipe:echo x >> {count}; cat {path}"
    index = ShardIndex.scan([command], store=store)
    assert [sample.key for sample in index.read(0, range(7))] == [f"{number:05d}" for number in range(7)]
    assert count.read_text() == "x\n"
    for bad, words in (
        (f"cat {path}.absent", r"exit code 1: .*No such file"),
        (f"cat {path}.absent | cat", r"exit code 1"),  # what a shell alone passes over
        ("exit 7", "exit code 7"),
        ("sleep 60", r"silent for 0\.2 s"),
    ):
        with pytest.raises(DataError, match=words):
            ShardIndex.scan([f"pipe:{bad}"], store=Store(store.folder, timeout_s=0.2))


# --- the cache between processes ----------------------------------------------------------------------------------


def fetch(address: str, folder: str) -> int:
    with Store(folder, timeout_s=5.0).open(address) as file:
        return os.fstat(file.fileno()).st_size


def test_processes_that_want_the_same_shard_fetch_it_once(server: Web, store: Store) -> None:
    with get_context("forkserver").Pool(3) as pool:
        sizes = pool.starmap(fetch, [(shards(server)[0], store.folder)] * 6)
    assert len(set(sizes)) == 1
    assert server.asked["s-000.tar"] == 1
    with pytest.raises(ConfigError, match=r"ftpx://h/a\.tar: .*wanted a path, pipe:, s3://"):
        fetch("ftpx://h/a.tar", store.folder)


def test_a_slow_source_shows_in_the_time_that_reading_took(tmp_path: Path, store: Store) -> None:
    path = write_shards(tmp_path, [40])[0]
    slow = ShardIndex.scan([path])
    address = f"pipe:sleep 0.4; cat {path}"
    index = ShardIndex((replace(slow.shards[0], path=address, version=""),), store)
    with TrainLoader(Mixture.of(index, Order(index.counts, 0, 1), PLAIN, 20), tokenize, workers=1) as loader:
        first, second = next(loader), next(loader)
    assert first.read_s > 0.4 > first.decode_s > 0
    assert second.read_s < 0.2
