"""From [data] to training: mixtures, tables, commands, indexes, what was dropped, and the pre-flight's words."""

from __future__ import annotations

import io
import json
import shutil
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from rich.console import Console

from clipscale.config.schema import Config
from clipscale.data.index import ShardIndex
from clipscale.data.index_file import NAME, build_index
from clipscale.data.locations import expand_shards
from clipscale.data.store import LOCAL, Store
from clipscale.dist.world import World, joined
from clipscale.errors import ConfigError, DataError
from clipscale.train.loop import train
from tests.data.servers import web
from tests.data.shard_files import write_tar
from tests.helpers.runs import Toy

SHORT = ("train.duration.steps=4", "train.global_batch=32", "data.streams=4", "train.write_keys=true")


@pytest.fixture(scope="module")
def alone() -> Iterator[World]:
    with joined() as world:
        yield world


def go(world: World, config: Config, out: Path) -> str:
    """A whole run; -> what it said."""
    said = Console(file=io.StringIO(), width=1000)
    train(config, out, world, said)
    assert isinstance(said.file, io.StringIO)
    return said.file.getvalue()


def keys(out: Path) -> list[list[str]]:
    return [json.loads(line)["keys"] for line in (out / "keys.jsonl").read_text().splitlines()]


def records(out: Path) -> list[dict]:
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def mixture(toy: Toy, *more: str) -> Sequence[str]:
    """Two shards and one shard of the toy data, 3 to 1."""
    train_folder = toy.folder / "train"
    first, second, third, *_ = sorted(str(path) for path in train_folder.glob("*.tar"))
    sources = f"[{{name='a', shards=['{first}', '{second}'], weight=3}}, {{name='b', shards='{third}', weight=1.0}}]"
    return (*SHORT, "data.shards=[]", f"data.sources={sources}", *more)


def test_each_batch_holds_each_sources_share(alone: World, toy: Toy, tmp_path: Path) -> None:
    said = go(alone, toy.config(*mixture(toy, "data.epoch='b'")), tmp_path / "run")
    assert "24 of 32 rows of each batch (75.00%; asked 75.00%)" in said
    stems = [path.stem for path in sorted((toy.folder / "train").glob("*.tar"))]
    for step in keys(tmp_path / "run"):
        shares = Counter(key.split("/")[0] == stems[2] for key in step)
        assert shares == {False: 24, True: 8}
    steps = [record for record in records(tmp_path / "run") if "loss" in record]
    assert [record["source_samples"] for record in steps] == [{"a": 24 * n, "b": 8 * n} for n in (1, 2, 3, 4)]
    assert steps[-1]["epoch"] == pytest.approx(4 * 8 / 128)  # of source b's 128 samples
    go(alone, toy.config(*mixture(toy, "data.epoch_samples=64")), tmp_path / "counted")
    assert [record["epoch"] for record in records(tmp_path / "counted") if "loss" in record] == [0.5, 1.0, 1.5, 2.0]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (["data.sources=[{name='a', shards='x'}]"], "found both, wanted either shards or sources"),
        (["data.shards=[]"], "found neither, wanted either shards or sources"),
        (["data.shards=[]", "data.sources=[{name='a', shards='x'}, {name='a', shards='y'}]"], "each name once"),
        (["data.epoch='c'"], "found epoch 'c', wanted one of the sources"),
        (["data.table.separator='ab'"], "wanted one character"),
        (["data.caption={kind='choice', fields={}}"], "data.caption"),
        (["data.caption={kind='choice', fields={txt=0}}"], "data.caption"),
    ],
)
def test_faults_of_the_configuration(toy: Toy, settings: list[str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        toy.config(*settings)


def test_faults_of_all_sources_are_told_at_once(alone: World, toy: Toy, tmp_path: Path) -> None:
    sources = "[{name='a', shards='/no/a.tar'}, {name='b', shards='/no/b.tar'}]"
    with pytest.raises(DataError, match=r"/no/a\.tar: nothing there(.|\n)*/no/b\.tar: nothing there"):
        go(alone, toy.config(*SHORT, "data.shards=[]", f"data.sources={sources}"), tmp_path / "run")
    with pytest.raises(ConfigError, match=r"data source 'b': its weight 1 is less than a share of 32 can be"):
        go(alone, toy.config(*mixture(toy, "data.streams=32")), tmp_path / "run")


def test_an_index_in_the_folder_is_used_and_gives_the_same_run(alone: World, toy: Toy, tmp_path: Path) -> None:
    for name in ("with", "without"):
        shutil.copytree(toy.folder / "train", tmp_path / name)
    paths = expand_shards(str(tmp_path / "with"))
    build_index(paths, tmp_path / "with" / NAME, store=LOCAL, threads=2)
    said = {
        name: go(alone, toy.config(*SHORT, f"data.shards='{tmp_path / name}'"), tmp_path / f"run-{name}")
        for name in ("with", "without")
    }
    assert f"counted by {tmp_path}/with/{NAME}" in said["with"]
    assert "counted by their headers" in said["without"]
    assert keys(tmp_path / "run-with") == keys(tmp_path / "run-without")
    Path(paths[0]).write_bytes(Path(paths[1]).read_bytes() + bytes(10240))
    with pytest.raises(DataError, match="no longer describes the shards"):
        go(alone, toy.config(*SHORT, f"data.shards='{tmp_path}/with'"), tmp_path / "run-stale")


def test_a_command_is_drawn_from_without_an_index_and_exact_with_one(alone: World, toy: Toy, tmp_path: Path) -> None:
    commands = [f"pipe:cat {path}" for path in sorted((toy.folder / "train").glob("*.tar"))]
    piped = (*SHORT, f"data.shards={json.dumps(commands)}", f"data.cache_dir='{tmp_path}/cache'")
    with pytest.raises(ConfigError, match=r"data\.epoch_samples is missing: shards drawn with replacement"):
        go(alone, toy.config(*piped), tmp_path / "run")
    with pytest.raises(ConfigError, match=r"'exact': what a command \(pipe:\) will give cannot be counted"):
        go(alone, toy.config(*piped, "data.sampling='exact'"), tmp_path / "run")
    said = go(alone, toy.config(*piped, "data.epoch_samples=64"), tmp_path / "drawn")
    assert "drawn with replacement, as a pipe: cannot be counted beforehand" in said
    build_index(commands, tmp_path / "index.jsonl", store=Store(str(tmp_path / "cache")), threads=2)
    go(alone, toy.config(*piped, f"data.index='{tmp_path}/index.jsonl'"), tmp_path / "exact")
    go(alone, toy.config(*SHORT), tmp_path / "local")
    numbers = [
        [sorted(key.split("/")[1] for key in step) for step in keys(tmp_path / run)] for run in ("exact", "local")
    ]
    assert numbers[0] == numbers[1]


def toy_store(tmp_path: Path):
    from clipscale.data.store import Store

    return Store(str(tmp_path / "cache"))


def test_remote_shards_counted_by_sizes_json_train_like_local_ones(alone: World, toy: Toy, tmp_path: Path) -> None:
    shutil.copytree(toy.folder / "train", tmp_path / "www")
    index = ShardIndex.scan(expand_shards(str(tmp_path / "www")))
    sizes = {Path(shard.path).name: shard.num_samples for shard in index.shards}
    (tmp_path / "www" / "sizes.json").write_text(json.dumps(sizes))
    with web(tmp_path / "www") as server:
        addresses = json.dumps([server.of(name) for name in sizes])
        remote = (*SHORT, f"data.shards={addresses}", f"data.cache_dir='{tmp_path}/cache'")
        said = go(alone, toy.config(*remote), tmp_path / "remote")
        assert "counted by sizes.json" in said
        asked = {name: server.asked[name] for name in sizes}
    go(alone, toy.config(*SHORT), tmp_path / "local")
    assert keys(tmp_path / "remote") == keys(tmp_path / "local")
    assert max(asked.values()) == 1


def test_a_table_trains_as_it_is(alone: World, toy: Toy, tmp_path: Path) -> None:
    index = ShardIndex.scan(expand_shards(str(toy.folder / "train")))
    lines = ["title,filepath"]
    for number, sample in enumerate(index.read(0, range(64))):
        (tmp_path / f"{number}.png").write_bytes(sample.members["png"])
        lines.append(f'"{sample.members["txt"].decode()}",{number}.png')
    (tmp_path / "pairs.csv").write_text("\n".join(lines))
    said = go(alone, toy.config(*SHORT, f"data.shards='{tmp_path}/pairs.csv'"), tmp_path / "run")
    assert "rows of the table" in said
    assert len({key for step in keys(tmp_path / "run")[:2] for key in step}) == 64


def test_what_is_dropped_is_told_by_reason_and_shard(alone: World, toy: Toy, tmp_path: Path) -> None:
    index = ShardIndex.scan(expand_shards(str(toy.folder / "train")))
    sound = [(f"{s.key}.{name}", data) for s in index.read(0, range(60)) for name, data in s.members.items()]
    bad = [("x1.png", b"junk"), ("x1.txt", b"a"), ("x2.txt", b"b"), ("x3.png", b"junk"), ("x3.txt", b"c")]
    write_tar(tmp_path / "a.tar", [*sound, *bad])
    write_tar(tmp_path / "b.tar", [*((f"y{name}", data) for name, data in sound[:90]), *bad[:2]])
    config = toy.config(*SHORT, f"data.shards='{tmp_path}'", "train.duration.steps=8")
    said = go(alone, config, tmp_path / "run")
    (told,) = [record["dropped"] for record in records(tmp_path / "run") if "dropped" in record]
    assert told.keys() == {"decode_error", "no_image"}
    assert told["decode_error"].keys() == {"a", "b"}
    assert told["no_image"].keys() == {"a"}
    total = sum(told["decode_error"].values())
    assert f"dropped {total:,} samples: decode_error (shards: a {told['decode_error']['a']}" in said
    halves = tmp_path / "halves"  # what was dropped before an interruption counts as well
    for steps, resume in ((4, False), (8, True)):
        half = toy.config(*SHORT, f"data.shards='{tmp_path}/*.tar'", f"train.duration.steps={steps}")
        train(half, halves, alone, Console(quiet=True), resume=resume)
    assert [record["dropped"] for record in records(halves) if "dropped" in record][-1] == told


def test_the_preflight_says_streams_workers_passes_and_the_cache(alone: World, toy: Toy, tmp_path: Path) -> None:
    said = go(alone, toy.config(*SHORT), tmp_path / "run")
    assert "4 streams over 1 rank(s) with 0 worker(s) each; an epoch is 512 samples, 16.0 steps" in said
    assert "the training ends before a whole pass: 75% of the samples will not be used" in said
