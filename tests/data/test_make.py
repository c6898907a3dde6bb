"""Tables: read with every odd value, packed into shards or used as they are; faults name the way out."""

from __future__ import annotations

import csv
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from PIL import Image
from webdataset.tariterators import group_by_keys, tar_file_iterator

from clipscale.config.data import Table
from clipscale.data.assign import Order
from clipscale.data.index import ShardIndex
from clipscale.data.loader import TrainLoader
from clipscale.data.locations import expand_shards
from clipscale.data.make import Packing, make_shards
from clipscale.data.mixture import Mixture
from clipscale.data.store import LOCAL
from clipscale.data.tables import read_table, table_shards
from clipscale.errors import ConfigError, DataError

from .shard_files import PLAIN, picture, tokenize

AUTO = Table()


def write_table(
    folder: Path,
    count: int,
    name: str = "pairs.csv",
    separator: str = ",",
    columns: tuple[str, str] = ("image", "caption"),
) -> Path:
    (folder / "images").mkdir(exist_ok=True)
    path = folder / name
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, delimiter=separator)
        writer.writerow(["extra", *columns])
        for number in range(count):
            (folder / "images" / f"{number}.PNG").write_bytes(picture(number % 251))
            writer.writerow(["", f"images/{number}.PNG", f"number {number}"])
    return path


def with_webdataset(folder: Path) -> dict[str, dict[str, bytes]]:
    """What webdataset reads from a folder of shards: key -> members."""
    found = {}
    for path in sorted(folder.glob("*.tar")):
        with path.open("rb") as file:
            for sample in group_by_keys({"__url__": str(path), **member} for member in tar_file_iterator(file)):
                found[sample["__key__"]] = {k: v for k, v in sample.items() if not k.startswith("__")}
    return found


# --- reading ------------------------------------------------------------------------------------------------------


def test_quotes_commas_line_breaks_and_a_byte_order_mark(tmp_path: Path) -> None:
    captions = ["a, b", 'say "a"', "two\nlines", "ünïcode ☃", "", "a\ttab"]
    path = tmp_path / "odd.csv"
    with path.open("w", newline="", encoding="utf-8-sig") as file:
        writer = csv.writer(file)
        writer.writerow(["Title", "filepath"])
        writer.writerows([caption, f"{number}.jpg"] for number, caption in enumerate(captions))
    rows = read_table(path, AUTO)
    assert [row.caption for row in rows] == captions
    assert rows[3].image == tmp_path / "3.jpg"
    assert read_table(path, Table(root="/elsewhere"))[0].image == Path("/elsewhere/0.jpg")


def test_tsv_other_separators_and_parquet_say_the_same(tmp_path: Path) -> None:
    import pyarrow
    from pyarrow import parquet

    comma = read_table(write_table(tmp_path, 9), AUTO)
    assert read_table(write_table(tmp_path, 9, "pairs.tsv", "\t"), AUTO) == comma
    assert read_table(write_table(tmp_path, 9, "semi.csv", ";", ("a", "b")), Table("a", "b", ";")) == comma
    columns = {"caption": [row.caption for row in comma], "image": [f"images/{i}.PNG" for i in range(9)]}
    parquet.write_table(pyarrow.table(columns), tmp_path / "pairs.parquet")
    assert read_table(tmp_path / "pairs.parquet", AUTO) == comma
    (tmp_path / "junk.parquet").write_bytes(b"PAR1 no")
    with pytest.raises(DataError, match=r"junk\.parquet: no Parquet file"):
        read_table(tmp_path / "junk.parquet", AUTO)
    with pytest.raises(DataError, match=r"no column 'url'; found 'caption', 'image'; name the columns"):
        read_table(tmp_path / "pairs.parquet", Table(image="url"))


@pytest.mark.parametrize(
    ("text", "rule", "words"),
    [
        ("filepath\ttitle\na.jpg\tx\n", AUTO, r"found 'filepath\\ttitle'; its separator seems to be a tab"),
        ("filepath;title\na.jpg;x\n", AUTO, "seems to be a semicolon"),
        ("url,words\n1,2\n", AUTO, "image's and .*caption's; found 'url', 'words'; name the columns"),
        ("image,words\n1,2\n", Table(caption="word"), "no column 'word'; found 'image', 'words'"),
        ("image,,text,image,\n1,,2,3,\n", Table(), "several columns 'image', one of which is the image's; found"),
        ("image,caption\na.jpg,b,c\n", AUTO, "line 2: 3 values for 2 columns; a value that holds"),
        ('image,caption\na.jpg,"b\n', AUTO, "after line .*: unexpected end of data"),
        ("", AUTO, "empty; wanted a first line"),
        ("image,caption\n", AUTO, "holds a header and no row"),
        ("image,caption\ncaf\udce9.jpg,x\n", AUTO, "not UTF-8"),
    ],
)
def test_faults_of_tables(tmp_path: Path, text: str, rule: Table, words: str) -> None:
    path = tmp_path / "bad.csv"
    path.write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(DataError, match=rf"bad\.csv.*{words}"):
        read_table(path, rule)


# --- straight through ---------------------------------------------------------------------------------------------


def test_a_table_is_a_source_like_any_other(tmp_path: Path) -> None:
    path = write_table(tmp_path, 1500)
    index = ShardIndex(tuple(table_shards(str(path), AUTO)), LOCAL)
    assert index.counts == (1024, 476)
    mixture = Mixture.of(index, Order(index.counts, 0, 4, 50), PLAIN, 100)
    with TrainLoader(mixture, tokenize, workers=1) as loader:
        numbers = [number for _ in range(15) for number in next(loader).tokens[:, 0].tolist()]
    assert sorted(numbers) == list(range(1500))
    (tmp_path / "images" / "7.PNG").unlink()
    assert set(index.read(0, range(7, 8))[0].members) == {"txt"}  # dropped and counted as no_image
    with pytest.raises(DataError, match=r"none is there; the first is /nowhere/images/0\.PNG.*data\.table\.root"):
        table_shards(str(path), Table(root="/nowhere"))


# --- packing ------------------------------------------------------------------------------------------------------


def test_every_pair_is_packed_once_whatever_the_threads(tmp_path: Path) -> None:
    path = write_table(tmp_path, 100)
    packing = Packing(samples_per_shard=30)
    one = make_shards([path], tmp_path / "one", AUTO, packing, threads=1)
    four = make_shards([path], tmp_path / "four", AUTO, packing, threads=4)
    assert (one.num_samples, one.num_shards, one.dropped) == (100, 4, {})
    assert four == one
    for shard in sorted((tmp_path / "one").iterdir()):
        if shard.suffix == ".tar":
            assert shard.read_bytes() == (tmp_path / "four" / shard.name).read_bytes()
    found = with_webdataset(tmp_path / "one")
    assert sorted(found) == [f"{number:09d}" for number in range(100)]
    assert all(
        found[f"{number:09d}"] == {"png": picture(number), "txt": f"number {number}".encode()} for number in range(100)
    )
    assert list(found) != sorted(found)  # mixed
    ordered = make_shards([path], tmp_path / "ordered", AUTO, Packing(30, shuffle=False))
    assert ordered.num_shards == 4
    assert list(with_webdataset(tmp_path / "ordered")) == sorted(found)
    index = ShardIndex.scan(expand_shards(str(tmp_path / "one")))
    assert json.loads((tmp_path / "one" / "sizes.json").read_text()) == {
        Path(shard.path).name: shard.num_samples for shard in index.shards
    }


def test_shards_are_bounded_in_bytes(tmp_path: Path) -> None:
    path = write_table(tmp_path, 60)
    made = make_shards([path], tmp_path / "out", AUTO, Packing(shard_bytes=30_000))
    sizes = [shard.stat().st_size for shard in (tmp_path / "out").glob("*.tar")]
    assert len(sizes) == made.num_shards > 5
    assert max(sizes) <= 30_000 + 10_240  # a tar is padded to whole records


def test_what_is_left_out_is_counted_and_listed(tmp_path: Path) -> None:
    path = write_table(tmp_path, 20)
    (tmp_path / "images" / "3.PNG").unlink()
    (tmp_path / "images" / "5.PNG").write_bytes(b"")
    path.write_text(path.read_text().replace("number 7\n", " \n"))
    made = make_shards([path], tmp_path / "out", AUTO, Packing())
    assert made.num_samples == 17
    assert made.dropped == {"no_image": 1, "decode_error": 1, "empty_caption": 1}
    lost = [json.loads(line) for line in (tmp_path / "out" / "dropped.jsonl").read_text().splitlines()]
    assert [(row["row"], row["reason"]) for row in lost] == [(3, "no_image"), (5, "decode_error"), (7, "empty_caption")]
    assert lost[0]["image"].endswith("images/3.PNG")


def test_large_images_are_shrunk_when_asked(tmp_path: Path) -> None:
    path = write_table(tmp_path, 3)
    (tmp_path / "images" / "1.PNG").write_bytes(picture(9, (400, 200)))
    make_shards([path], tmp_path / "out", AUTO, Packing(max_side=100))
    found = with_webdataset(tmp_path / "out")
    assert {key: set(members) for key, members in found.items()} == {
        "000000000": {"png", "txt"},
        "000000001": {"jpg", "txt"},
        "000000002": {"png", "txt"},
    }
    (tmp_path / "small.jpg").write_bytes(found["000000001"]["jpg"])
    with Image.open(tmp_path / "small.jpg") as image:
        assert image.size == (100, 50)


def test_nothing_is_written_over(tmp_path: Path) -> None:
    path = write_table(tmp_path, 5)
    make_shards([path], tmp_path / "out", AUTO, Packing())
    before = {file.name: file.stat().st_mtime_ns for file in (tmp_path / "out").iterdir()}
    assert make_shards([path], tmp_path / "out", AUTO, Packing()).num_samples == 5  # finished already
    for packing in (Packing(seed=1), Packing(samples_per_shard=2)):
        with pytest.raises(ConfigError, match="is not empty"):
            make_shards([path], tmp_path / "out", AUTO, packing)
    assert before == {file.name: file.stat().st_mtime_ns for file in (tmp_path / "out").iterdir()}
    with pytest.raises(DataError, match=r"none of the 5 image files is there.*--root"):
        make_shards([path], tmp_path / "new", Table(root="/nowhere"), Packing())
    assert not (tmp_path / "new").exists()


def test_a_killed_build_goes_on_and_ends_with_the_same_bytes(tmp_path: Path) -> None:
    path = write_table(tmp_path, 2000)
    make_shards([path], tmp_path / "whole", AUTO, Packing(samples_per_shard=50))
    out = tmp_path / "out"
    command = [sys.executable, "-c", "from clipscale.cli import main; main()", "data", "make", str(path)]
    flags = ["--out", str(out), "--samples-per-shard", "50", "--threads", "1"]
    with subprocess.Popen([*command, *flags], stderr=subprocess.DEVNULL, start_new_session=True) as process:
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline and len(list(out.glob("*.tar"))) < 3:
            time.sleep(0.002)
        os.killpg(process.pid, signal.SIGKILL)
    done = {file: file.stat().st_mtime_ns for file in out.glob("*.tar")}
    assert 3 <= len(done) < 40
    with pytest.raises(ConfigError, match="other tables or options that was begun"):
        make_shards([path], out, AUTO, Packing(samples_per_shard=60))
    packing = Packing(samples_per_shard=50, shard_bytes=10**9)
    make_shards([path], out, AUTO, packing)
    assert {file: file.stat().st_mtime_ns for file in done} == done  # not made again
    for shard in (tmp_path / "whole").glob("*.tar"):
        assert shard.read_bytes() == (out / shard.name).read_bytes()
    assert sorted(file.suffix for file in out.iterdir() if file.suffix != ".tar") == [
        ".json",
        ".json",
        ".jsonl",
        ".jsonl",
    ]
