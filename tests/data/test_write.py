"""Shards whose bytes depend on their samples alone, and builds that are whole or absent."""

from __future__ import annotations

import json
import tarfile
from pathlib import Path

import pytest

from clipscale.data.write import MARKER, ShardWriter, whole_build, write_marker, write_token_table
from clipscale.errors import ConfigError, DataError


def _write(out: Path, num_samples: int, samples_per_shard: int) -> list[int]:
    with ShardWriter(out, samples_per_shard) as writer:
        for index in range(num_samples):
            writer.write(f"{index:04d}", {"txt": b"caption %d" % index, "png": b"\x89PNG"})
    return writer.counts


def test_shards_are_filled_in_order_and_the_last_takes_the_rest(tmp_path: Path) -> None:
    assert _write(tmp_path / "out", 7, 3) == [3, 3, 1]
    shards = sorted((tmp_path / "out").iterdir())
    assert [shard.name for shard in shards] == ["shard-000000.tar", "shard-000001.tar", "shard-000002.tar"]
    with tarfile.open(shards[1]) as tar:
        assert tar.getnames() == ["0003.png", "0003.txt", "0004.png", "0004.txt", "0005.png", "0005.txt"]
        handle = tar.extractfile("0004.txt")
        assert handle is not None
        assert handle.read() == b"caption 4"
        assert {(member.mtime, member.uid, member.gid, member.uname) for member in tar} == {(0, 0, 0, "")}


def test_the_same_samples_give_the_same_bytes(tmp_path: Path) -> None:
    for name in ("first", "second"):
        _write(tmp_path / name, 5, 2)
    first, second = (
        [shard.read_bytes() for shard in sorted((tmp_path / name).iterdir())] for name in ("first", "second")
    )
    assert first == second


def test_an_interrupted_build_leaves_whole_shards_only(tmp_path: Path) -> None:
    def build() -> None:
        with ShardWriter(tmp_path, 2) as writer:
            for index in range(3):
                writer.write(str(index), {"txt": b"x"})
            assert (tmp_path / "shard-000001.tar.partial").exists()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build()
    assert [path.name for path in tmp_path.iterdir()] == ["shard-000000.tar"]


def test_an_occupied_folder_is_refused_unless_told(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ConfigError, match="is not empty"):
        ShardWriter(tmp_path, 2)
    with pytest.raises(ConfigError, match=r"notes\.txt is a file"):
        ShardWriter(tmp_path / "notes.txt", 2)
    with ShardWriter(tmp_path, 2, "more", allow_existing=True) as writer:
        writer.write("a", {"txt": b"x"})
    assert (tmp_path / "more-000000.tar").exists()


@pytest.mark.parametrize("key", ["", "a.b", "a/b", "same"])
def test_keys_that_readers_would_cut_or_merge_are_refused(tmp_path: Path, key: str) -> None:
    with ShardWriter(tmp_path, 9) as writer:
        writer.write("same", {"txt": b"x"})
        with pytest.raises(DataError, match="cannot be stored"):
            writer.write(key, {"txt": b"y"})


def test_a_shard_holds_at_least_one_sample(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="samples_per_shard is 0"):
        ShardWriter(tmp_path, 0)


def test_a_whole_build_takes_its_place_at_the_end_and_replaces_its_own_kind(tmp_path: Path) -> None:
    out = tmp_path / "data"
    for version in (1, 2):
        with whole_build(out, "demo") as staging:
            assert not (out / f"v{version}").exists()
            (staging / f"v{version}").write_text("")
            write_marker(staging, {"kind": "demo"})
        assert sorted(path.name for path in out.iterdir()) == [MARKER, f"v{version}"]
    with pytest.raises(ConfigError, match="is not empty"), whole_build(out, "other"):
        pass


def test_a_failed_build_leaves_nothing_and_keeps_the_old(tmp_path: Path) -> None:
    out = tmp_path / "data"
    (tmp_path / "data.partial").mkdir()
    (tmp_path / "data.partial" / "left over").write_text("from a build that was killed")

    def build() -> None:
        with whole_build(out, "demo") as staging:
            assert list(staging.iterdir()) == []
            raise RuntimeError

    with pytest.raises(RuntimeError):
        build()
    assert list(tmp_path.iterdir()) == []


def test_a_damaged_marker_is_named(tmp_path: Path) -> None:
    (tmp_path / MARKER).write_text("{")
    with pytest.raises(DataError, match=r"source\.json cannot be read"), whole_build(tmp_path, "demo"):
        pass


def test_the_token_table_is_sorted_and_keeps_the_special_tokens(tmp_path: Path) -> None:
    write_token_table(tmp_path / "tokens.json", ["zeta", "zeta"], lambda text: [1000 + len(text)])
    ids = json.loads((tmp_path / "tokens.json").read_text())
    assert ids == sorted(set(ids))
    assert {0, 1004, 49406, 49407} <= set(ids)
    assert ids[-1] == 49407
