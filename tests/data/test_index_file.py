"""The index on disk: what it says is what the headers say, and it notices when that is no longer so."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from clipscale.data.index import ShardIndex
from clipscale.data.index_file import NAME, build_index, counts_of, default_path, load_index
from clipscale.data.locations import expand_shards
from clipscale.data.store import LOCAL
from clipscale.errors import ConfigError, DataError

from .shard_files import members, write_shards, write_tar


def build(paths: list[str], out: Path) -> tuple[ShardIndex, int]:
    return build_index(paths, out, store=LOCAL, threads=2)


def later(path: str | Path) -> None:
    stat = Path(path).stat()
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns + 10**9))


def test_it_holds_what_a_scan_finds(tmp_path: Path) -> None:
    paths = write_shards(tmp_path, [130, 1, 64])
    built, walked = build(paths, tmp_path / NAME)
    assert built == ShardIndex.scan(paths)
    assert walked == 3
    assert default_path(paths) == tmp_path / NAME
    assert load_index(tmp_path / NAME, paths, LOCAL) == built
    assert load_index(tmp_path / NAME, paths[:0:-1], LOCAL).counts == (64, 1)  # some of them, in another order
    assert counts_of(tmp_path / NAME, [*paths, "other.tar"]) == dict(zip(paths, (130, 1, 64), strict=True))


def test_only_what_is_new_or_changed_is_walked(tmp_path: Path) -> None:
    paths = write_shards(tmp_path, [3, 3, 3])
    build(paths, tmp_path / NAME)
    assert build(paths, tmp_path / NAME)[1] == 0
    write_tar(Path(paths[1]), members(7))
    more = write_tar(tmp_path / "s-009.tar", members(8))
    index, walked = build([*paths, more], tmp_path / NAME)
    assert (index.counts, walked) == ((3, 1, 3, 1), 2)


def test_a_folder_may_move_and_a_copy_have_another_date(tmp_path: Path) -> None:
    (tmp_path / "here").mkdir()
    paths = write_shards(tmp_path / "here", [5, 6])
    build(paths, tmp_path / "here" / NAME)
    (tmp_path / "here").rename(tmp_path / "there")
    moved = expand_shards(str(tmp_path / "there"))
    assert load_index(tmp_path / "there" / NAME, moved, LOCAL).counts == (5, 6)
    later(moved[0])
    assert load_index(tmp_path / "there" / NAME, moved, LOCAL).counts == (5, 6)


def test_every_difference_is_named_at_once(tmp_path: Path) -> None:
    paths = write_shards(tmp_path, [5, 5, 5, 5])
    build(paths[:3], tmp_path / NAME)
    write_tar(Path(paths[0]), [m for i in range(9) for m in members(i)])  # another size
    data = Path(paths[1]).read_bytes()
    Path(paths[1]).write_bytes(data.replace(b"00006.png", b"x0006.png"))  # the same size, other names
    later(paths[1])
    Path(paths[2]).unlink()
    with pytest.raises(DataError) as caught:
        load_index(tmp_path / NAME, paths, LOCAL)
    for number, words in enumerate(["has changed", "has changed", "No such file", "not in the index"]):
        assert f"s-{number:03d}.tar: {words}" in str(caught.value)
    assert "clipscale data index" in str(caught.value)


def test_damaged_shards_are_named_and_the_work_is_kept(tmp_path: Path) -> None:
    paths = write_shards(tmp_path, [5, 5, 5])
    whole = Path(paths[1]).read_bytes()
    Path(paths[1]).write_bytes(whole[:3000])
    with pytest.raises(DataError, match=r"1 of 3 shards(.|\n)*s-001.tar: ends at byte"):
        build(paths, tmp_path / NAME)
    assert not (tmp_path / NAME).exists()
    Path(paths[1]).write_bytes(whole)
    assert build(paths, tmp_path / NAME)[1] == 1
    assert not (tmp_path / f"{NAME}.partial").exists()


def test_a_killed_attempt_goes_on_where_it_was(tmp_path: Path) -> None:
    """The second shard is a command that waits, so that the kill comes between two shards."""
    paths = write_shards(tmp_path, [5, 5])
    slow = f"pipe:test -e {tmp_path}/go || sleep 4; cat {paths[1]}"
    command = [sys.executable, "-c", "from clipscale.cli import main; main()", "data", "index", paths[0], slow]
    flags = ["--out", str(tmp_path / "i.jsonl"), "--threads", "1", "--cache-dir", str(tmp_path / "cache")]
    partial = tmp_path / "i.jsonl.partial"
    with subprocess.Popen([*command, *flags], stderr=subprocess.DEVNULL, start_new_session=True) as process:
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline and not (partial.exists() and partial.read_text().endswith("\n")):
            time.sleep(0.05)
        os.killpg(process.pid, signal.SIGKILL)
    with partial.open("a") as file:
        file.write('{"path": "half a li')
    (tmp_path / "go").touch()
    index, walked = build_index([paths[0], slow], tmp_path / "i.jsonl", store=LOCAL, threads=1)
    assert (index.counts, walked) == ((5, 5), 1)


def test_what_is_no_index_is_refused(tmp_path: Path) -> None:
    paths = write_shards(tmp_path, [1])
    with pytest.raises(ConfigError, match=r"no file at .*make it with `clipscale data index SHARDS --out"):
        load_index(tmp_path / "absent", paths, LOCAL)
    (tmp_path / "junk").write_text("[1]\n{}\n\x00")
    with pytest.raises(ConfigError, match="is no index"):
        load_index(tmp_path / "junk", paths, LOCAL)
    assert default_path([paths[0], str(tmp_path / "other" / "a.tar")]) is None
    with pytest.raises(ConfigError, match=r"cannot be written"):
        build(paths, tmp_path / "junk" / "i.jsonl")


# --- what others have counted -------------------------------------------------------------------------------------


def test_counts_of_img2dataset_and_sizes_json_are_compared(tmp_path: Path) -> None:
    paths = write_shards(tmp_path, [5, 5, 5, 5])
    (tmp_path / "sizes.json").write_text(json.dumps({"s-000.tar": 5, "s-001.tar": 6}))
    (tmp_path / "s-002_stats.json").write_text(json.dumps({"count": 9, "successes": 8, "failed_to_download": 1}))
    (tmp_path / "s-003_stats.json").write_text("[]")  # of another tool
    with pytest.raises(DataError) as caught:
        ShardIndex.scan(paths)
    text = str(caught.value)
    assert "2 of 4 shards" in text
    assert "s-001.tar: holds 5 samples where sizes.json says 6" in text
    assert "s-002.tar: holds 5 samples where s-002_stats.json says 8" in text


def test_a_shard_cut_between_samples_and_closed_again_shows_by_its_count(tmp_path: Path) -> None:
    """A writer that was killed and cleaned up after itself: a sound tar, with less in it."""
    shutil.rmtree(tmp_path / "x", ignore_errors=True)
    path = write_shards(tmp_path, [10])[0]
    build([path], tmp_path / NAME)
    write_shards(tmp_path, [7])
    with pytest.raises(DataError, match="has changed since it was indexed"):
        load_index(tmp_path / NAME, [path], LOCAL)
