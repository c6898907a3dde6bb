"""Patterns, the walk over tar headers, and the index: whatever is wrong with a shard is said before the first step."""

from __future__ import annotations

import gzip
import io
import tarfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from webdataset.tariterators import group_by_keys, tar_file_iterator

from clipscale.data.index import ShardIndex
from clipscale.data.locations import expand_shards
from clipscale.data.tar import Sample, groups, walk
from clipscale.data.tar import read_samples as read_open
from clipscale.errors import ConfigError, DataError

from .shard_files import members, picture, write_shards, write_tar


def five(folder: Path) -> bytes:
    """The bytes of a sound shard of 5 samples: two members each, every member of one header and one block."""
    return Path(write_tar(folder / "five.tar", [m for i in range(5) for m in members(i)[:2]])).read_bytes()


def placed(folder: Path, data: bytes, name: str = "bad.tar") -> str:
    path = folder / name
    path.write_bytes(data)
    return str(path)


def read_samples(path: str, positions: range) -> list[Sample]:
    with Path(path).open("rb") as file:
        return list(read_open(file, path, positions))


def fault_of(*paths: str) -> str:
    with pytest.raises(DataError) as caught:
        ShardIndex.scan(paths)
    return str(caught.value)


# --- patterns -----------------------------------------------------------------------------------------------------


def test_paths_globs_folders_and_braces(tmp_path: Path) -> None:
    paths = write_shards(tmp_path, [1] * 12)
    (tmp_path / "notes.txt").write_text("no shard")
    stem = str(tmp_path / "s-")
    assert expand_shards(paths[3]) == (paths[3],)
    assert expand_shards(f"{stem}*.tar") == tuple(paths)
    assert expand_shards(str(tmp_path)) == tuple(paths)
    assert expand_shards(f"{stem}{{009..011}}.tar") == tuple(paths[9:])
    assert expand_shards(f"{stem}00{{2..0}}.tar") == tuple(paths[2::-1])
    assert expand_shards(f"{stem}0{{0,1}}{{0..1}}.tar") == (paths[0], paths[1], paths[10], paths[11])
    assert expand_shards([paths[5], f"{stem}00[0-1].tar"]) == (paths[5], paths[0], paths[1])
    assert expand_shards(f"{stem}0{{0,1}}[1].tar") == (paths[1], paths[11])


def test_a_file_whose_name_has_braces_is_itself(tmp_path: Path) -> None:
    path = write_tar(tmp_path / "odd{1..2}[x].tar", members(0))
    assert expand_shards(path) == (path,)


def test_all_that_is_missing_is_named_at_once(tmp_path: Path) -> None:
    write_shards(tmp_path, [1, 1])
    (tmp_path / "empty").mkdir()
    patterns = [f"{tmp_path}/s-{{000..003}}.tar", f"{tmp_path}/*.tgz", f"{tmp_path}/empty"]
    with pytest.raises(DataError) as caught:
        expand_shards(patterns)
    text = str(caught.value)
    assert "s-000.tar" not in text
    for name in ("s-002.tar: nothing there (from", "s-003.tar", "*.tgz", "empty: holds no *.tar", "quotes"):
        assert name in text


def test_unbalanced_braces_are_a_configuration_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"\{0\.\.2\.tar'?: its braces do not match"):
        expand_shards([f"{tmp_path}/{{0..2.tar", f"{tmp_path}/{{0..1}}.tar"])


def test_no_pattern_and_a_shard_named_twice(tmp_path: Path) -> None:
    path = write_shards(tmp_path, [1])[0]
    with pytest.raises(DataError, match="shards are missing"):
        expand_shards([])
    with pytest.raises(DataError, match=r"more than once.*\n.*s-000\.tar"):
        expand_shards([path, str(tmp_path)])


# --- the walk -----------------------------------------------------------------------------------------------------

names = st.text(st.characters(exclude_characters="\0/", exclude_categories=["Cs"]), min_size=1, max_size=130)


@settings(derandomize=True, deadline=None, max_examples=60)
@given(
    st.lists(st.tuples(st.lists(names, min_size=1, max_size=3).map("/".join), st.integers(0, 1500)), max_size=8),
    st.sampled_from([tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT]),
)
def test_the_walk_finds_what_tarfile_finds(
    tmp_path_factory: pytest.TempPathFactory, entries: list[tuple[str, int]], tar_format: int
) -> None:
    path = tmp_path_factory.mktemp("walk") / "any.tar"
    try:
        write_tar(path, [(name, bytes(size)) for name, size in entries], tar_format)
    except ValueError:  # ustar cannot hold every name
        return
    with tarfile.open(path) as tar, path.open("rb") as file:
        expected = [(info.name, info.offset, info.offset_data, info.size) for info in tar if info.isreg()]
        assert [tuple(member) for member in walk(file.fileno())] == expected


def test_links_folders_and_metadata_are_no_members(tmp_path: Path) -> None:
    path = tmp_path / "mixed.tar"
    with tarfile.open(path, "w") as tar:
        for name, kind in (("a", tarfile.DIRTYPE), ("a/1.lnk", tarfile.SYMTYPE), ("a/1.hard", tarfile.LNKTYPE)):
            info = tarfile.TarInfo(name)
            info.type, info.linkname = kind, "a/1.txt"
            tar.addfile(info)
        for name in ("__meta__/x.txt", "a/1.txt", ".hidden", "a/no_extension", "a/1.seg.PNG", "b/1.txt"):
            info = tarfile.TarInfo(name)
            info.size = 3
            tar.addfile(info, io.BytesIO(b"abc"))
    found = list(read_samples(str(path), range(2)))
    assert [(sample.key, sample.members) for sample in found] == [
        ("a/1", {"txt": b"abc", "seg.png": b"abc"}),
        ("b/1", {"txt": b"abc"}),
    ]


def test_samples_are_those_of_webdataset(tmp_path: Path) -> None:
    odd = [("x.JPG", b"1"), ("x.TXT", b"2"), ("d/x.jpeg", b"3"), ("d/x.a.b", b"4"), ("__m__", b"5"), ("y.json", b"6")]
    path = write_tar(tmp_path / "odd.tar", [*members(0), *odd, *members(1)])
    with Path(path).open("rb") as file:
        theirs = list(group_by_keys({"__url__": path, **member} for member in tar_file_iterator(file)))
    expected = [(s["__key__"], {name: data for name, data in s.items() if not name.startswith("__")}) for s in theirs]
    assert [tuple(sample) for sample in read_samples(path, range(5))] == expected


def test_sparse_and_packed_files_are_refused_with_the_way_out(tmp_path: Path) -> None:
    packed = placed(tmp_path, gzip.compress(five(tmp_path)), "packed.tar")
    assert "gzip-compressed: unpack it" in fault_of(packed)
    data = bytearray(five(tmp_path))
    data[156:157] = b"S"
    data[148:156] = b"%06o\0 " % (sum(data[:148]) + 8 * 32 + sum(data[156:512]))
    assert "sparse" in fault_of(placed(tmp_path, bytes(data)))


# --- the index ----------------------------------------------------------------------------------------------------


def test_the_index_counts_samples_fields_and_bytes(tmp_path: Path) -> None:
    paths = write_shards(tmp_path, [130, 1, 64])
    index = ShardIndex.scan(paths)
    assert index.counts == (130, 1, 64)
    assert index.fields == {"png", "txt", "json"}
    assert [shard.num_bytes for shard in index.shards] == [Path(path).stat().st_size for path in paths]
    assert f"3 shards ({paths[0]} .. {paths[2]}): 195 samples" in index.summary()


@settings(derandomize=True, deadline=None, max_examples=40)
@given(st.data())
def test_any_range_is_read_from_the_nearest_mark(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    folder = tmp_path_factory.getbasetemp() / "ranges"
    if not folder.exists():
        folder.mkdir()
        write_shards(folder, [130, 1, 64])
    index = ShardIndex.scan(expand_shards(str(folder)))
    numbers = range(data.draw(st.integers(0, 195)), data.draw(st.integers(0, 195)), data.draw(st.integers(1, 70)))
    read = [sample for shard, positions in index.pieces(numbers) for sample in index.read(shard, positions)]
    assert [int(sample.key) for sample in read] == list(numbers)
    assert [sample.members["txt"] for sample in read] == [b"number %d" % number for number in numbers]


@pytest.mark.parametrize(
    ("size", "message"),
    [
        (512 * 3 + 4, "cut inside member '00000.txt'"),
        (512 * 4 + 100, "cut inside a header, at byte 2,148"),
        (512 * 4, "ends at byte 2,048 without an end marker"),
        (512 * 6, "ends at byte 3,072 without an end marker"),  # between an image and its caption
    ],
)
def test_a_cut_shard_is_found_wherever_it_was_cut(tmp_path: Path, size: int, message: str) -> None:
    bad = placed(tmp_path, five(tmp_path)[:size])
    assert f"bad.tar: {message}" in fault_of(bad)
    kept = ShardIndex.scan([bad], strict=False)
    assert (kept.counts, len(kept.faults)) == ((size // (512 * 5),), 1)
    if kept.num_samples:
        assert all(set(sample.members) == {"png", "txt"} for sample in kept.read(0, range(kept.num_samples)))


def test_a_half_sample_at_the_cut_is_not_kept(tmp_path: Path) -> None:
    kept = ShardIndex.scan([placed(tmp_path, five(tmp_path)[: 512 * 10])], strict=False)
    assert kept.counts == (2,)  # 00002 has its image only
    assert "2 whole samples before" in kept.faults[0]


def test_joined_tars_are_found(tmp_path: Path) -> None:
    data = five(tmp_path)
    assert "tars were joined" in fault_of(placed(tmp_path, data + data))


def test_every_bad_shard_is_named_at_once(tmp_path: Path) -> None:
    good = write_shards(tmp_path, [3])[0]
    junk = bytes(range(256)) * 16
    bad = [placed(tmp_path, b"", "empty.tar"), placed(tmp_path, junk, "junk.tar"), str(tmp_path / "absent.tar")]
    hollow = write_tar(tmp_path / "hollow.tar", [])
    text = fault_of(good, *bad, hollow)
    assert "4 of 5 shards" in text
    assert good not in text
    for message in ("empty.tar: the file is empty", "junk.tar: no tar header at byte 0", "absent.tar: No such file"):
        assert message in text
    assert "hollow.tar: holds no sample" in text
    assert ShardIndex.scan([good, *bad], strict=False).counts == (3, 0, 0, 0)


def test_a_long_list_of_bad_shards_is_shortened(tmp_path: Path) -> None:
    text = fault_of(*(placed(tmp_path, b"", f"{i}.tar") for i in range(30)))
    assert "30 of 30 shards" in text
    assert "... and 10 more" in text


def test_repeated_members_and_scattered_keys_are_found(tmp_path: Path) -> None:
    image = picture()
    twice = write_tar(tmp_path / "twice.tar", [("0.png", image), ("0.txt", b"a"), ("0.PNG", b""), ("1.txt", b"b")])
    apart = write_tar(tmp_path / "apart.tar", [("0.png", image), ("1.png", image), ("0.txt", b"a"), ("1.txt", b"b")])
    text = fault_of(twice, apart)
    assert "twice.tar: member '0.PNG' comes twice" in text
    assert "apart.tar: key '0' comes again, apart from its first place" in text
    kept = ShardIndex.scan([twice], strict=False)
    assert kept.read(0, range(2))[0].members == {"png": image, "txt": b"a"}  # the first one counts


def test_a_shard_that_changes_after_the_scan_is_an_error(tmp_path: Path) -> None:
    path = Path(write_shards(tmp_path, [5])[0])
    index = ShardIndex.scan([str(path)])
    write_shards(tmp_path, [3])
    with pytest.raises(DataError, match=r"s-000.tar: holds 3 samples where at least 5"):
        index.read(0, range(5))
    path.write_bytes(path.read_bytes()[: 512 * 3])
    with pytest.raises(DataError, match=r"s-000.tar: cannot be read after 0 samples"):
        index.read(0, range(5))
    path.unlink()
    with pytest.raises(DataError, match="No such file"):
        index.read(0, range(5))


def test_groups_hold_where_they_begin(tmp_path: Path) -> None:
    with Path(write_shards(tmp_path, [4])[0]).open("rb") as file:
        whole = list(groups(file.fileno()))
        assert list(groups(file.fileno(), whole[2].header)) == whole[2:]
