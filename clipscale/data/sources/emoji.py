"""The demo's data: emoji drawn by five artists, from packages of the npm registry, rendered into WebDataset shards.

The same thing drawn in several styles asks for what CLIP promises: recognise by name what a new artist draws (split
`held_out_artist`), and name what was never drawn in training at all (split `held_out_concepts`).
"""

from __future__ import annotations

import io
import random
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from clipscale.data.sources import npm
from clipscale.data.sources.emoji_join import Concept, Icon, IconSet, hold_out, join, parse_concepts
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
from clipscale.errors import DataError

Progress = Callable[[str, int, int], None]
"""Called as (what is being done, done so far, total)."""

ARTISTS = {
    "noto": npm.Package(
        "@iconify-json/noto",
        "1.2.9",
        "DQiuXENbun41ch+XPSV55H9FaWKpHTyz46YIKtSaKYD4fIDDzL1tR6H4np/T38jfrTAeI3rcKF0mqHYeZVAuaw==",
    ),
    "twemoji": npm.Package(
        "@iconify-json/twemoji",
        "1.2.5",
        "uKpuIEV0v6K5BW3Mjdyl+XKFVAbbcPxAgifKvEMtZoUZB5+YiY5zaMm2uNNCxyXzAWU9yNLlj41WU6/mvgALsw==",
    ),
    "fluent-emoji-flat": npm.Package(
        "@iconify-json/fluent-emoji-flat",
        "1.2.6",
        "RY47RgPb47fYUiyrA64sIOL0+UU02s29sXpNBbIQRBUlPlfNFTKUmZDERGuxDs/7yNGWqQYvuaSYM1M4fRXlUw==",
    ),
    "noto-v1": npm.Package(
        "@iconify-json/noto-v1",
        "1.2.5",
        "/DsVMius69Q0fRS53z7QK1TROSuar606jiIx+laXtdsYGMXpf6LtHBx6CGfoo3UHHb/XpBsw+1L1x3eyPqMuVA==",
    ),
    "emojione": npm.Package(
        "@iconify-json/emojione",
        "1.2.3",
        "T9+T3HIbJNLKKsmxYKlaYhvnHYkz/HNYTV7SHCXVZPfeUi4FqskY70YeN8yYAZT8cCv7w5vJxS4Q1m8zb9CMMg==",
    ),
}
EMOJIBASE = npm.Package(
    "emojibase-data",
    "17.0.0",
    "Yvgb5AWoHViHV/gq1qr5ZAarcBip+B27/ZLRsUJkbgAEaLlZ/fof9g882LTpmEpyhBNEC0m2SEmItljHsTygjA==",
)

HELD_OUT_ARTIST = "twemoji"
HELD_OUT_FRACTION = 0.1
NUM_SHARDS = {"train": 8, "held_out_artist": 4, "held_out_concepts": 4}
_SPLIT_SEED = 0
_KIND, _FORMAT = "emoji", 3  # raise the format when the same sources would give other shards


@dataclass(frozen=True)
class EmojiReport:
    """What lies in the folder: images per split and per artist, concepts trained and unseen, images that failed."""

    reused: bool
    splits: dict[str, int]
    artists: dict[str, int]
    num_trained_concepts: int
    num_unseen_concepts: int


@dataclass(frozen=True)
class Drawing:
    """One image to render, with everything its sample says."""

    artist: str
    concept: Concept
    icon: Icon


def fetch_emoji(out: Path, *, encode: Encode, size: int = 64, progress: Progress | None = None) -> EmojiReport:
    """Fetch, render and shard the emoji into `out`; a complete build of the same sources is recognised and reused.

    Writes `train/`, `held_out_artist/` and `held_out_concepts/` (shards of png, txt, json), `tokens.json` (the sorted
    CLIP token ids that any label or tag uses, by `encode`), `LICENSES.md`, and last `source.json`. `size` is the edge
    of the square images in pixels.

    Raises `ConfigError` where `out` holds anything else, `DataError` where the packages cannot be fetched or an icon
    cannot be drawn.
    """
    packages = [*ARTISTS.values(), EMOJIBASE]
    recipe = {
        "kind": _KIND,
        "format": _FORMAT,
        "size": size,
        "packages": {package.name: package.version for package in packages},
    }
    marker = read_marker(out)
    if marker is not None and all(marker.get(key) == value for key, value in recipe.items()):
        return EmojiReport(reused=True, **marker["counts"])
    refuse_occupied(out, allow_existing=marker is not None and marker.get("kind") == _KIND)
    report = progress or (lambda _what, _done, _total: None)
    with tempfile.TemporaryDirectory(prefix="clipscale-npm-") as folder, whole_build(out, _KIND) as staging:
        report("fetching packages", 0, len(packages))
        npm.fetch(packages, Path(folder))
        report("fetching packages", len(packages), len(packages))
        concepts, sets, infos = _read_packages(Path(folder))
        splits = split_drawings(concepts, sets)
        _write_splits(staging, splits, size, report)
        texts = [text for concept in concepts for text in (concept.label, *concept.tags)]
        write_token_table(staging / "tokens.json", texts, encode)
        (staging / "LICENSES.md").write_text(licences(infos), encoding="utf-8")
        counts = _counts(splits)
        write_marker(staging, {**recipe, "counts": counts})
    return EmojiReport(reused=False, **counts)


def _read_packages(folder: Path) -> tuple[list[Concept], dict[str, IconSet], dict[str, Mapping[str, Any]]]:
    sets, infos = {}, {}
    for artist, package in ARTISTS.items():
        icons, chars, info = npm.read_json(folder / package.tarball, ["icons.json", "chars.json", "info.json"])
        sets[artist], infos[artist] = IconSet.parse(icons, chars), info
    emojis, groups = npm.read_json(folder / EMOJIBASE.tarball, ["en/data.json", "meta/groups.json"])
    return parse_concepts(emojis, groups["groups"], groups["subgroups"]), sets, infos


def split_drawings(concepts: list[Concept], sets: Mapping[str, IconSet]) -> dict[str, list[Drawing]]:
    """Sort every drawing into one split; training is shuffled by a fixed seed, the others keep emojibase's order.

    `held_out_concepts` takes all artists' drawings of the held-out concepts. Of the rest, `held_out_artist` takes what
    `HELD_OUT_ARTIST` drew and some other artist drew too, for only such a concept is trained.
    """
    joined = join(concepts, sets)
    drawn = [concept for concept in concepts if any((artist, concept.slug) in joined for artist in sets)]
    unseen = hold_out(drawn, HELD_OUT_FRACTION, _SPLIT_SEED)
    trained = {slug for artist, slug in joined if artist != HELD_OUT_ARTIST and slug not in unseen}
    splits: dict[str, list[Drawing]] = {split: [] for split in NUM_SHARDS}
    for concept in drawn:
        for artist, icons in sets.items():
            if (artist, concept.slug) not in joined:
                continue
            drawing = Drawing(artist, concept, icons.icon(joined[artist, concept.slug]))
            if concept.slug in unseen:
                splits["held_out_concepts"].append(drawing)
            elif artist != HELD_OUT_ARTIST:
                splits["train"].append(drawing)
            elif concept.slug in trained:
                splits["held_out_artist"].append(drawing)
    random.Random(_SPLIT_SEED).shuffle(splits["train"])
    return splits


def _write_splits(out: Path, splits: Mapping[str, list[Drawing]], size: int, report: Progress) -> None:
    total = sum(map(len, splits.values()))
    done = 0
    for split, drawings in splits.items():
        with ShardWriter(out / split, max(1, -(-len(drawings) // NUM_SHARDS[split]))) as writer:
            for drawing in drawings:
                writer.write(f"{drawing.artist}-{drawing.concept.slug}", _members(drawing, size))
                done += 1
                report("rendering", done, total)


def _members(drawing: Drawing, size: int) -> dict[str, bytes]:
    concept = drawing.concept
    facts = {
        "label": concept.label,
        "tags": list(concept.tags),
        "group": concept.group,
        "kind": concept.kind,
        "described": f"{concept.label}, {concept.kind}",  # a name with its category, as in CLIP's prompts for pets
        "artist": drawing.artist,
        "concept": concept.slug,
        "hexcode": concept.hexcode,
    }
    try:
        png = render(drawing.icon, size)
    except ValueError as fault:
        raise DataError(
            f"{drawing.artist}'s {concept.slug} cannot be drawn: {fault}; is resvg_py up to date?"
        ) from fault
    return {"png": png, "txt": concept.label.encode(), "json": to_json(facts).encode()}


def render(icon: Icon, size: int) -> bytes:
    """Draw an icon as a square RGB PNG of `size` pixels, centred, keeping its aspect, on white."""
    try:
        import resvg_py
    except ImportError as fault:
        raise DataError("drawing emoji needs the package resvg_py: pip install 'clipscale[demo]'") from fault
    from PIL import Image

    png = resvg_py.svg_to_bytes(
        svg_string=to_svg(icon), width=size, height=size, background="#ffffff", skip_system_fonts=True
    )
    # resvg writes an alpha channel that is opaque throughout: a quarter of the bytes to decode in every epoch.
    with Image.open(io.BytesIO(png)) as image:
        plain = image.convert("RGB")
    packed = io.BytesIO()
    plain.save(packed, "PNG")
    return packed.getvalue()


def to_svg(icon: Icon) -> str:
    """A whole svg with a square viewBox around the icon's own, which is centred in it."""
    edge = max(icon.width, icon.height)
    left, top = icon.left - (edge - icon.width) / 2, icon.top - (edge - icon.height) / 2
    body = icon.body
    if any(icon.flips):
        scales = [-1 if flip else 1 for flip in icon.flips]
        moves = [
            2 * start + length if flip else 0
            for flip, start, length in zip(icon.flips, (left, top), (edge, edge), strict=True)
        ]
        body = f'<g transform="translate({moves[0]:g} {moves[1]:g}) scale({scales[0]} {scales[1]})">{body}</g>'
    return (
        '<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" '
        f'viewBox="{left:g} {top:g} {edge:g} {edge:g}">{body}</svg>'
    )


def licences(infos: Mapping[str, Mapping[str, Any]]) -> str:
    """The attributions that the artists' licences ask for, as Markdown."""
    lines = [
        "# Sources, authors and licences of these images",
        "",
        "The images were rendered from vector drawings, unchanged but for their size and a white background.",
        "",
    ]
    for artist, info in infos.items():
        package, author, licence = ARTISTS[artist], info["author"], info["license"]
        lines.append(
            f"- **{info['name']}** (`{package.name}` {package.version}): by {author['name']}, {author['url']}; "
            f"{licence['title']}, {licence['url']}"
        )
    lines.append(
        f"- **Labels, tags and groups** (`{EMOJIBASE.name}` {EMOJIBASE.version}): "
        "copyright (c) 2017-2019 Miles Johnson; MIT"
    )
    return "\n".join(lines) + "\n"


def _counts(splits: Mapping[str, list[Drawing]]) -> dict[str, Any]:
    everything = [drawing for drawings in splits.values() for drawing in drawings]
    return {
        "splits": {split: len(drawings) for split, drawings in splits.items()},
        "artists": dict(Counter(drawing.artist for drawing in everything)),
        "num_trained_concepts": len({drawing.concept.slug for drawing in splits["train"]}),
        "num_unseen_concepts": len({drawing.concept.slug for drawing in splits["held_out_concepts"]}),
    }
