"""Drawn shapes with captions, for tests and for work without a network: "a small red circle left of a blue square"."""

from __future__ import annotations

import io
import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from PIL import Image, ImageDraw

from clipscale.data.write import (
    Encode,
    ShardWriter,
    read_marker,
    refuse_occupied,
    to_json,
    whole_build,
    write_marker,
    write_token_table,
)
from clipscale.errors import ConfigError

COLOURS = {
    "red": (214, 39, 40),
    "green": (44, 160, 44),
    "blue": (31, 87, 200),
    "yellow": (240, 210, 30),
    "orange": (255, 127, 14),
    "purple": (128, 50, 168),
    "black": (20, 20, 20),
    "grey": (140, 140, 140),
}
SHAPES = ("circle", "square", "triangle", "diamond", "cross", "ring")
# Where the first object's centre lies, as fractions of the image (x, y); the second one's is its mirror image.
RELATIONS = {"left of": (0.27, 0.5), "right of": (0.73, 0.5), "above": (0.5, 0.27), "below": (0.5, 0.73)}

_SINGLES_PER_PAIR = 1 / 15  # single objects have 96 captions only: more of them would repeat inside a batch
_KIND, _FORMAT = "toy", 2  # raise the format when the same arguments would give other shards
_MIN_SIZE = 16


@dataclass(frozen=True)
class Thing:
    """One object: "a small red circle" or, when large, "a red circle"."""

    shape: str
    colour: str
    small: bool

    @property
    def phrase(self) -> str:
        words = [*(["small"] if self.small else []), self.colour, self.shape]
        return f"{'an' if words[0][0] in 'aeiou' else 'a'} {' '.join(words)}"


@dataclass(frozen=True)
class Scene:
    """One object, or two and where the first stands as seen from the second."""

    first: Thing
    relation: str = ""
    second: Thing | None = None

    @property
    def caption(self) -> str:
        return self.first.phrase if self.second is None else f"{self.first.phrase} {self.relation} {self.second.phrase}"


THINGS = tuple(itertools.starmap(Thing, itertools.product(SHAPES, COLOURS, (False, True))))
NUM_PAIRS = len(THINGS) * (len(THINGS) - 1) * len(RELATIONS)


def make_toy(
    out: Path,
    *,
    samples: int,
    shards: int,
    size: int = 32,
    seed: int = 0,
    held_out: int = 0,
    encode: Encode | None = None,
) -> None:
    """Write `samples` drawn scenes into `shards` shards (png, txt, json); equal arguments give equal bytes.

    With `held_out` > 0 the shards go to `out/train`, and one more shard of that many scenes, whose captions differ from
    each other and never occur in training, to `out/held_out`. With `encode`, `out/tokens.json` lists the token ids
    used.
    `size` is the edge of the square images in pixels. A finished build of the same arguments is left as it is.

    Raises `ConfigError` for impossible numbers and where `out` holds anything else.
    """
    _check(samples, shards, size, held_out)
    recipe = {
        "kind": _KIND,
        "format": _FORMAT,
        "samples": samples,
        "shards": shards,
        "size": size,
        "seed": seed,
        "held_out": held_out,
        "tokens": encode is not None,
    }
    marker = read_marker(out)
    if marker == recipe:
        return
    refuse_occupied(out, allow_existing=marker is not None and marker.get("kind") == _KIND)
    kept_out = {_pair(index) for index in random.Random(f"{seed}/held out").sample(range(NUM_PAIRS), held_out)}
    with whole_build(out, _KIND) as staging:
        train = staging / "train" if held_out else staging
        _write(train, _training_scenes(samples, seed, kept_out), samples, shards, size, seed)
        if held_out:
            scenes = iter(sorted(kept_out, key=lambda scene: scene.caption))
            _write(staging / "held_out", scenes, held_out, 1, size, seed + 1)
        if encode is not None:
            texts = [thing.phrase for thing in THINGS] + list(RELATIONS)
            write_token_table(staging / "tokens.json", texts, encode)
        write_marker(staging, recipe)


def _check(samples: int, shards: int, size: int, held_out: int) -> None:
    if shards < 1 or samples < shards:
        raise ConfigError(f"{samples} samples cannot fill {shards} shards; every shard holds at least one sample")
    if size < _MIN_SIZE:
        raise ConfigError(f"size is {size} pixels; shapes are told apart from {_MIN_SIZE} pixels on")
    if not 0 <= held_out <= NUM_PAIRS // 2:
        raise ConfigError(f"held_out is {held_out}; it lies between 0 and {NUM_PAIRS // 2}, half of all captions")


def _pair(index: int) -> Scene:
    """The pairs of unlike objects, numbered from 0 to NUM_PAIRS - 1."""
    index, relation = divmod(index, len(RELATIONS))
    first, second = divmod(index, len(THINGS) - 1)
    return Scene(THINGS[first], list(RELATIONS)[relation], THINGS[second + (second >= first)])


def _training_scenes(samples: int, seed: int, kept_out: set[Scene]) -> Iterator[Scene]:
    rng = random.Random(f"{seed}/train")
    for _ in range(samples):
        scene = _random_scene(rng)
        while scene in kept_out:
            scene = _random_scene(rng)
        yield scene


def _random_scene(rng: random.Random) -> Scene:
    if rng.random() < _SINGLES_PER_PAIR:
        return Scene(rng.choice(THINGS))
    return _pair(rng.randrange(NUM_PAIRS))


def _write(out: Path, scenes: Iterator[Scene], samples: int, shards: int, size: int, seed: int) -> None:
    # allow_existing: without a held-out part the shards lie beside the marker, in a folder made for them.
    with ShardWriter(out, -(-samples // shards), allow_existing=True) as writer:
        for index, scene in enumerate(scenes):
            facts = {"caption": scene.caption, "label": scene.caption, "tags": [], "concept": scene.caption}
            png = draw(scene, size, random.Random(f"{seed}/{index}"))
            members = {"png": png, "txt": scene.caption.encode(), "json": to_json(facts).encode()}
            writer.write(f"{index:08d}", members)


def draw(scene: Scene, size: int, rng: random.Random) -> bytes:
    """The scene as a square RGB PNG of `size` pixels on white; `rng` shifts every object by a few pixels."""
    image = Image.new("RGB", (size, size), (255, 255, 255))
    pen = ImageDraw.Draw(image)
    if scene.second is None:
        _draw_thing(pen, scene.first, (0.5, 0.5), size, rng)
    else:
        x, y = RELATIONS[scene.relation]
        _draw_thing(pen, scene.first, (x, y), size, rng)
        _draw_thing(pen, scene.second, (1 - x, 1 - y), size, rng)
    packed = io.BytesIO()
    image.save(packed, "PNG")
    return packed.getvalue()


def _draw_thing(
    pen: ImageDraw.ImageDraw, thing: Thing, centre: tuple[float, float], size: int, rng: random.Random
) -> None:
    x, y = (size * (c + rng.uniform(-0.04, 0.04)) for c in centre)
    r = size * (0.1 if thing.small else 0.19)
    box = (x - r, y - r, x + r, y + r)
    colour = COLOURS[thing.colour]
    match thing.shape:
        case "circle":
            pen.ellipse(box, fill=colour)
        case "square":
            pen.rectangle(box, fill=colour)
        case "triangle":
            pen.polygon([(x, y - r), (x + r, y + r), (x - r, y + r)], fill=colour)
        case "diamond":
            pen.polygon([(x, y - r), (x + r, y), (x, y + r), (x - r, y)], fill=colour)
        case "cross":
            pen.rectangle((x - r, y - r / 3, x + r, y + r / 3), fill=colour)
            pen.rectangle((x - r / 3, y - r, x + r / 3, y + r), fill=colour)
        case "ring":
            pen.ellipse(box, outline=colour, width=max(1, round(r / 2.5)))
        case _:
            raise AssertionError(thing.shape)
