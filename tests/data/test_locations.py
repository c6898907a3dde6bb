"""Lists, joints, addresses and commands; paths, globs and braces stand in test_tar."""

from __future__ import annotations

from pathlib import Path

import pytest

from clipscale.data.locations import expand_shards
from clipscale.errors import ConfigError, DataError

from .shard_files import write_shards


def test_joined_patterns_and_list_files(tmp_path: Path) -> None:
    paths = write_shards(tmp_path, [1] * 4)
    assert expand_shards(f"{paths[2]}::{tmp_path}/s-00[01].tar") == (paths[2], paths[0], paths[1])
    (tmp_path / "list.txt").write_text(f"# of two\ns-001.tar\n\n{tmp_path}/s-{{002..003}}.tar\n", encoding="utf-8-sig")
    assert expand_shards(str(tmp_path / "list.txt")) == tuple(paths[1:])
    (tmp_path / "list").write_text("s-000.tar::s-002.tar")
    assert expand_shards(f"@{tmp_path}/list") == (paths[0], paths[2])
    assert expand_shards([f"@{tmp_path}/list", paths[3]]) == (paths[0], paths[2], paths[3])


def test_faults_of_list_files(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"list of shards .*absent cannot be read"):
        expand_shards(f"@{tmp_path}/absent")
    (tmp_path / "empty.txt").write_text("# nothing\n")
    with pytest.raises(DataError, match=r"empty\.txt is empty"):
        expand_shards(str(tmp_path / "empty.txt"))
    (tmp_path / "binary.txt").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(DataError, match=r"binary\.txt cannot be read"):
        expand_shards(str(tmp_path / "binary.txt"))
    (tmp_path / "gone.txt").write_text("a.tar\nb.tar\n")
    with pytest.raises(DataError, match=r"a\.tar: nothing there\n.*b\.tar: nothing there"):
        expand_shards(str(tmp_path / "gone.txt"))


def test_addresses_and_commands_are_taken_as_they_are() -> None:
    assert expand_shards("https://host/a-{0..1}.tar?sig=x*y::http://[::1]:80/b.tar") == (
        "https://host/a-0.tar?sig=x*y",
        "https://host/a-1.tar?sig=x*y",
        "http://[::1]:80/b.tar",
    )
    assert expand_shards("pipe:cat {0..1}.tar") == ("pipe:cat 0.tar", "pipe:cat 1.tar")
    assert expand_shards("pipe:awk '{print' x") == ("pipe:awk '{print' x",)
    with pytest.raises(ConfigError, match="cannot list a folder"):
        expand_shards("https://host/folder/")


def test_what_is_missing_can_be_gathered_instead(tmp_path: Path) -> None:
    path = write_shards(tmp_path, [1])[0]
    absent: list[str] = []
    assert expand_shards([f"{tmp_path}/x.tar", path, f"{tmp_path}/y.tar"], absent=absent) == (path,)
    assert [line.partition(":")[0] for line in absent] == [f"{tmp_path}/x.tar", f"{tmp_path}/y.tar"]
