"""What goes wrong for people, one case each: built here, with the outcome that is right. Letters: the kind of case."""

from __future__ import annotations

import io
import random
from collections import Counter
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageFile

from clipscale.config.data import NoAugment, TextCaption
from clipscale.data.assign import Order, Resampled, check
from clipscale.data.captions import Unusable
from clipscale.data.decode import Decoder, read_image
from clipscale.data.index import Shard, ShardIndex
from clipscale.data.inspect import Wanted, inspect
from clipscale.data.loader import TrainLoader
from clipscale.data.locations import expand_shards
from clipscale.data.mixture import Mixture
from clipscale.dist.world import World
from clipscale.errors import ConfigError, DataError
from clipscale.model.towers import clip_token_ids
from tests.helpers.ranks import run_ranks

from .shard_files import PLAIN, members, picture, tokenize, write_shards, write_tar

WANTED = Wanted(TextCaption("text"), max_tokens=77, count_tokens=lambda text: len(clip_token_ids(text)))
BLOCK = 512  # of a tar


def bare(number: int) -> list[tuple[str, bytes]]:
    """An image and a caption: two members of two tar blocks each."""
    return members(number)[:2]


def found(*paths: str | Path) -> list[tuple[str, str, str]]:
    """Faults of `clipscale data check`: (name of the shard, key, what)."""
    faults = inspect([str(path) for path in paths], WANTED).faults
    return [(Path(fault.shard).name, fault.key, fault.what) for fault in faults]


def loaded(path: str, steps: int = 3, batch: int = 4, **options: Any) -> tuple[list[str], Counter[str]]:
    """Keys and drops of some steps of training on whatever the shard still has."""
    index = ShardIndex.scan([path], strict=False)
    with TrainLoader(Mixture.of(index, Order(index.counts, 0, 2), PLAIN, batch), tokenize, **options) as loader:
        batches = list(islice(loader, steps))
    assert all(len(taken.keys) == batch for taken in batches)  # full, whatever was dropped
    dropped = Counter(drop.reason for taken in batches for drop in taken.dropped.elements())
    return [key for taken in batches for key in taken.keys], dropped


# --- A: shards ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("cut", "whole"), [(BLOCK * 9 + 9, 1), (BLOCK * 10 + 99, 2), (BLOCK * 12, 2), (BLOCK * 10, 2)])
def test_a1_a_truncated_shard(tmp_path: Path, cut: int, whole: int) -> None:
    """Inside a member, inside a header, between two samples, between an image and its caption.

    The last sample before a cut inside a member is not kept: it may have had more members.
    """
    path = Path(write_tar(tmp_path / "a.tar", [member for i in range(5) for member in bare(i)]))
    path.write_bytes(path.read_bytes()[:cut])
    ((shard, key, what),) = found(path)
    assert (shard, key) == ("a.tar", "")
    assert "cut" in what
    with pytest.raises(DataError, match=r"1 of 1 shards cannot be used(.|\n)*a\.tar: .*cut"):
        ShardIndex.scan([str(path)])
    index = ShardIndex.scan([str(path)], strict=False)
    assert index.counts == (whole,)
    assert all(set(sample.members) == {"png", "txt"} for sample in index.read(0, range(whole)))


def test_a2_empty_junk_and_missing_shards(tmp_path: Path) -> None:
    sound = write_shards(tmp_path, [3])[0]
    (tmp_path / "empty.tar").write_bytes(b"")
    (tmp_path / "junk.tar").write_bytes(random.Random(0).randbytes(4096))
    (tmp_path / "page.tar").write_bytes(b"<html>503</html>" * 100)
    paths = [tmp_path / name for name in ("empty.tar", "junk.tar", "absent.tar", "page.tar")]
    faults = found(sound, *paths)
    assert [shard for shard, _, _ in faults] == [path.name for path in paths]
    with pytest.raises(DataError) as told:
        ShardIndex.scan([sound, *map(str, paths)])
    assert all(path.name in str(told.value) for path in paths)


def test_a3_concatenated_tars(tmp_path: Path) -> None:
    data = Path(write_shards(tmp_path, [5])[0]).read_bytes()
    (tmp_path / "c.tar").write_bytes(data + data)
    assert "tars were joined" in found(tmp_path / "c.tar")[0][2]


def test_a6_a_member_twice(tmp_path: Path) -> None:
    image = picture()
    names = ["0.png", "0.txt", "0.png", "1.png", "1.txt"]
    path = write_tar(tmp_path / "a.tar", [(name, image if "png" in name else b"number 0") for name in names])
    faults = found(path)
    assert ("a.tar", "", "member '0.png' comes twice") in faults
    with pytest.raises(DataError, match=r"a\.tar: member '0\.png' comes twice"):
        ShardIndex.scan([path])


@pytest.mark.parametrize("extension", ["jpeg", "JPG", "webp", "PNG", "JPEG", "tif"])
def test_a9_other_extensions(tmp_path: Path, extension: str) -> None:
    kind = {"jpg": "JPEG", "tif": "TIFF"}.get(extension.lower(), extension.upper())
    path = write_tar(
        tmp_path / "a.tar",
        [
            member
            for i in range(4)
            for member in ((f"{i}.{extension}", picture(i, kind=kind)), (f"{i}.TXT", b"number %d" % i))
        ],
    )
    assert found(path) == []
    assert len(set(loaded(path)[0])) == 4


@pytest.mark.parametrize("drawn", [False, True])
def test_a9_nothing_usable_ends_instead_of_hanging(tmp_path: Path, drawn: bool) -> None:
    path = write_tar(tmp_path / "a.tar", [(f"{i}.{end}", b"x") for i in range(8) for end in ("avi", "txt")])
    if drawn:
        mixture = Mixture.of(ShardIndex((Shard(path, 0, 0),)), Resampled(1, 0, 2, 8), PLAIN, 4)
    else:
        index = ShardIndex.scan([path])
        mixture = Mixture.of(index, Order(index.counts, 0, 2), PLAIN, 4)
    with TrainLoader(mixture, tokenize) as loader, pytest.raises(DataError, match=r"no_image \(such as a/\d\).*\.jpg"):
        next(loader)


def test_a11_a_caption_without_an_image(tmp_path: Path) -> None:
    extra = [("9.json", b"{}"), ("9.txt", b"number 9")]
    path = write_tar(tmp_path / "a.tar", [*(member for i in range(8) for member in members(i)), *extra])
    keys, dropped = loaded(path)
    assert set(dropped) == {"no_image"}
    assert "a/9" not in keys
    assert found(path) == [("a.tar", "9", "no_image")]


def test_a14_braces(tmp_path: Path) -> None:
    paths = write_shards(tmp_path, [1] * 3)
    stem = f"{tmp_path}/s-00"
    assert expand_shards(f"{stem}{{2..0}}.tar") == tuple(paths[::-1])
    with pytest.raises(ConfigError, match=r"braces do not match(.|\n)*quotes"):
        expand_shards(f"{stem}{{0..2.tar")
    with pytest.raises(DataError, match=r"s-09\.tar: nothing there(.|\n)*s-11\.tar: nothing there(.|\n)*quotes"):
        expand_shards(f"{tmp_path}/s-{{09..11}}.tar")  # 09, 10, 11, and not 9
    assert f"3 shards ({paths[0]} .. {paths[2]}): 3 samples" in ShardIndex.scan(paths).summary()


# --- B: splitting, epochs, seeds, resume ----------------------------------------------------------------------------


def keys_of(world: World, paths: list[str], batch: int, steps: int) -> list[list[str]]:
    index = ShardIndex.scan(paths)
    mixture = Mixture.of(index, Order(index.counts, 0, 4, 8), PLAIN, batch)
    with TrainLoader(mixture, tokenize, rank=world.rank, world_size=world.size, workers=2) as loader:
        keys = [taken.keys for taken in islice(loader, steps)]
    world.barrier("the last step", 20.0)
    return keys


def test_b1_b2_b15_few_and_uneven_shards_on_two_ranks(tmp_path: Path) -> None:
    """One shard for two ranks of two workers; then 5, 5 and 50 samples: equal steps, disjoint, nothing left out."""
    for name, counts in (("one", [60]), ("uneven", [5, 5, 50])):
        (tmp_path / name).mkdir()
        ranks = run_ranks(2, keys_of, write_shards(tmp_path / name, counts), 12, 5, timeout_s=30)
        assert [len(keys) for keys in ranks] == [5, 5]
        assert len({key for keys in ranks for step in keys for key in step}) == 60


def test_b3_lengths_are_not_guessed() -> None:
    (fault,) = check((40,), streams=4, global_batch=64, world_size=1)
    assert "40 samples in 1 shards do not fill one global batch of 64" in fault


@pytest.mark.parametrize("workers", [0, 1, 4])
def test_b4_an_epoch_is_as_long_for_any_number_of_workers(tmp_path: Path, workers: int) -> None:
    index = ShardIndex.scan(write_shards(tmp_path, [64]))
    mixture = Mixture.of(index, Order(index.counts, 0, 4), PLAIN, 8)
    with TrainLoader(mixture, tokenize, workers=workers) as loader:
        batches = list(islice(loader, 8))
    assert len({key for taken in batches for key in taken.keys}) == 64
    assert batches[-1].epoch == 1.0


def test_b6_shards_come_in_another_order_each_epoch_and_in_the_same_each_run(tmp_path: Path) -> None:
    index = ShardIndex.scan(write_shards(tmp_path, [2] * 8))

    def shard_orders(seed: int, workers: int) -> list[list[str]]:
        mixture = Mixture.of(index, Order(index.counts, seed, 2, 2), PLAIN, 16)
        with TrainLoader(mixture, tokenize, workers=workers) as loader:
            return [[key.split("/")[0] for key in taken.keys] for taken in islice(loader, 3)]

    first = shard_orders(0, 2)
    assert first == shard_orders(0, 2) == shard_orders(0, 0)
    assert first[0] != first[1] != first[2]
    assert shard_orders(1, 0) != first


def test_b7_no_two_streams_draw_alike() -> None:
    order = Resampled(100, 42, 4, 1000)
    assert len({tuple(order.shard(stream, draw) for draw in range(3)) for stream in range(4)}) == 4


@pytest.mark.parametrize("stop", [5, 10])  # in the middle, and on the last step of an epoch (b12)
def test_b10_b12_a_resumed_run_goes_on_and_skips_nothing(tmp_path: Path, stop: int) -> None:
    index = ShardIndex.scan(write_shards(tmp_path, [4] * 20))
    mixture = Mixture.of(index, Order(index.counts, 0, 4, 8), PLAIN, 8)

    def steps(count: int, **start: Any) -> tuple[list[list[str]], dict[int, int]]:
        with TrainLoader(mixture, tokenize, **start) as loader:
            batches = list(islice(loader, count))
        return [taken.keys for taken in batches], batches[-1].cursors

    whole, _ = steps(20)
    head, cursors = steps(stop)
    tail, _ = steps(20 - stop, cursors=cursors, start_step=stop)
    assert head + tail == whole
    assert tail[:5] != head[:5]
    assert sorted(key for step in whole[10:] for key in step) == sorted(key for step in whole[:10] for key in step)


# --- C: images ------------------------------------------------------------------------------------------------------


def test_c1_undecodable_images(tmp_path: Path) -> None:
    half = picture(kind="JPEG", size=(64, 64))
    bad = {"90": b"", "91": b"<html>404</html>", "92": half[: len(half) // 2]}
    broken = [member for key, data in bad.items() for member in ((f"{key}.jpg", data), (f"{key}.txt", b"number 1"))]
    path = write_tar(tmp_path / "a.tar", [*(member for i in range(9) for member in bare(i)), *broken])
    assert found(path) == [("a.tar", key, "decode_error") for key in bad]
    keys, dropped = loaded(path, steps=6)
    assert dropped["decode_error"] >= 3
    assert not {key.split("/")[1] for key in keys} & set(bad)
    many = write_tar(tmp_path / "b.tar", [member for i in range(3000) for member in (bare(i) if i % 3 else broken[:2])])
    with pytest.raises(DataError, match=r"samples cannot be used.*decode_error.*data\.max_bad_fraction = 0\.1"):
        loaded(many, steps=400, max_bad_fraction=0.1)


def test_c2_truncated_images_are_not_painted_grey() -> None:
    assert ImageFile.LOAD_TRUNCATED_IMAGES is False


def test_c3_decompression_bombs() -> None:
    stream = io.BytesIO()
    Image.new("1", (20_000, 20_000)).save(stream, "PNG")
    with pytest.raises(Unusable, match="too_large"):
        read_image(stream.getvalue(), 10**8)
    assert Image.MAX_IMAGE_PIXELS is not None


@pytest.mark.parametrize("mode", ["RGBA", "LA", "P"])
def test_c5_transparency_shows_white(mode: str) -> None:
    stream = io.BytesIO()
    if mode == "P":
        image = Image.new("P", (4, 4), 0)
        image.putpalette([200, 0, 0, 0, 0, 0])
        image.save(stream, "PNG", transparency=0)
    else:
        Image.new("RGBA", (4, 4), (200, 0, 0, 0)).convert(mode).save(stream, "PNG")
    assert (np.asarray(read_image(stream.getvalue(), 10**8)) == 255).all()


@pytest.mark.filterwarnings("ignore:Corrupt EXIF")
def test_c7_orientation() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    assert read_image(picture(size=(8, 4), kind="JPEG", exif=exif.tobytes()), 10**8).size == (4, 8)
    assert read_image(picture(size=(8, 4), kind="JPEG", exif=b"Exif\0\0MM\0*junk"), 10**8).size == (8, 4)


# --- D: captions ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("caption", "fault"),
    [
        (b"", "empty_caption"),
        (b" \n\t ", "empty_caption"),
        (b"caf\xe9", "not_utf8"),
        (b"it\x92s", "not_utf8"),
        ("number 1".encode("utf-16"), "not_utf8"),
        (b"word " * 300, "caption_too_long (302 tokens of 77)"),
        (b"number 1", ""),
        (b"\xef\xbb\xbfnumber 1", ""),
        (b"word " * 75, ""),
    ],
)
def test_d1_d2_d4_captions(tmp_path: Path, caption: bytes, fault: str) -> None:
    path = write_tar(tmp_path / "a.tar", [("0.png", picture()), ("0.txt", caption)])
    assert found(path) == ([("a.tar", "0", fault)] if fault else [])
    decoder = Decoder(4, NoAugment("none"), TextCaption("text"))
    sample = {"png": picture(), "txt": caption}
    if fault and "long" not in fault:
        with pytest.raises(Unusable, match=fault):
            decoder(sample)
    else:
        assert decoder(sample)[1] == caption.decode("utf-8-sig").strip()
