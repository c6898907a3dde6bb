"""Toy scenes: the same bytes every time, and pictures that show what their captions say."""

from __future__ import annotations

import hashlib
import io
import json
import random
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from clipscale.data.sources.toy import COLOURS, RELATIONS, SHAPES, Scene, Thing, draw, make_toy
from clipscale.errors import ConfigError


def _digests(folder: Path) -> dict[str, str]:
    files = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def _samples(folder: Path) -> list[dict[str, Any]]:
    samples: dict[str, dict[str, Any]] = {}
    for shard in sorted(folder.glob("*.tar")):
        with tarfile.open(shard) as tar:
            for member in tar:
                key, _, extension = member.name.partition(".")
                handle = tar.extractfile(member)
                assert handle is not None
                samples.setdefault(key, {})[extension] = handle.read()
    return list(samples.values())


def _nearness(png: bytes, colour: str) -> np.ndarray[Any, Any]:
    """True where a pixel has this colour, [height, width]."""
    pixels = np.asarray(Image.open(io.BytesIO(png)), dtype=int)
    return np.abs(pixels - np.array(COLOURS[colour])).sum(-1) == 0


def test_two_builds_are_equal_to_the_byte_and_the_seed_matters(tmp_path: Path) -> None:
    for name, seed in (("a", 3), ("b", 3), ("c", 4)):
        make_toy(tmp_path / name, samples=40, shards=3, seed=seed, held_out=5)
    assert _digests(tmp_path / "a") == _digests(tmp_path / "b")
    assert _digests(tmp_path / "a") != _digests(tmp_path / "c")
    assert [path.name for path in sorted((tmp_path / "a" / "train").iterdir())] == [
        f"shard-00000{i}.tar" for i in range(3)
    ]


def test_every_sample_has_picture_caption_and_facts(tmp_path: Path) -> None:
    make_toy(tmp_path / "toy", samples=200, shards=2, size=24)
    samples = _samples(tmp_path / "toy")
    assert len(samples) == 200
    for sample in samples:
        facts = json.loads(sample["json"])
        assert facts["caption"] == facts["concept"] == sample["txt"].decode()
        image = Image.open(io.BytesIO(sample["png"]))
        assert (image.size, image.mode) == ((24, 24), "RGB")
    assert len({sample["txt"] for sample in samples}) > 180


def test_held_out_captions_are_distinct_and_never_trained(tmp_path: Path) -> None:
    make_toy(tmp_path / "toy", samples=300, shards=1, held_out=60)
    trained = {sample["txt"] for sample in _samples(tmp_path / "toy" / "train")}
    unseen = [sample["txt"] for sample in _samples(tmp_path / "toy" / "held_out")]
    assert len(set(unseen)) == len(unseen) == 60
    assert not trained & set(unseen)


def test_captions_read_like_english() -> None:
    scene = Scene(Thing("circle", "red", small=True), "left of", Thing("square", "blue", small=False))
    assert scene.caption == "a small red circle left of a blue square"
    assert Scene(Thing("ring", "orange", small=False)).caption == "an orange ring"


@pytest.mark.parametrize("relation", list(RELATIONS))
@pytest.mark.parametrize("shape", SHAPES)
def test_the_picture_shows_each_colour_on_the_side_that_the_caption_says(relation: str, shape: str) -> None:
    for seed in range(4):
        scene = Scene(Thing(shape, "red", small=True), relation, Thing(shape, "blue", small=False))
        png = draw(scene, 32, random.Random(seed))
        red, blue = (np.argwhere(_nearness(png, colour)) for colour in ("red", "blue"))  # rows of (y, x)
        assert 0 < len(red) < len(blue)
        down, right = red.mean(0) - blue.mean(0)
        assert {"left of": -right, "right of": right, "above": -down, "below": down}[relation] > 8


def test_a_finished_build_is_reused_and_other_arguments_replace_it(tmp_path: Path) -> None:
    out = tmp_path / "toy"
    make_toy(out, samples=4, shards=1)
    before = (out / "shard-000000.tar").stat().st_mtime_ns
    make_toy(out, samples=4, shards=1)
    assert (out / "shard-000000.tar").stat().st_mtime_ns == before
    make_toy(out, samples=6, shards=2)
    assert len(_samples(out)) == 6


def test_somebody_elses_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("mine")
    with pytest.raises(ConfigError, match="is not empty"):
        make_toy(tmp_path, samples=4, shards=1)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]


def test_token_ids_cover_every_word(tmp_path: Path) -> None:
    words: list[str] = []

    def encode(text: str) -> list[int]:
        words.extend(text.split())
        return [7]

    make_toy(tmp_path / "toy", samples=4, shards=1, encode=encode)
    assert {*COLOURS, *SHAPES, "small", "left", "of", "above", "an"} <= set(words)
    assert json.loads((tmp_path / "toy" / "tokens.json").read_text()) == [0, 7, 49406, 49407]


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        ({"samples": 0, "shards": 1}, "0 samples cannot fill 1 shards"),
        ({"samples": 3, "shards": 4}, "3 samples cannot fill 4 shards"),
        ({"samples": 3, "shards": 0}, "cannot fill 0 shards"),
        ({"samples": 3, "shards": 1, "size": 8}, "size is 8 pixels"),
        ({"samples": 3, "shards": 1, "held_out": -1}, "held_out is -1"),
        ({"samples": 3, "shards": 1, "held_out": 10**6}, "held_out is 1000000"),
    ],
)
def test_impossible_numbers_are_refused_before_anything_is_written(
    tmp_path: Path, request_: dict[str, int], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        make_toy(tmp_path / "toy", **request_)
    assert not (tmp_path / "toy").exists()
