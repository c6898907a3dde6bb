"""Which icon of which artist draws which emoji, and which emoji are held out. Pure: no files, no network."""

from __future__ import annotations

import hashlib
import re
import unicodedata
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

_COMPONENT, _FLAG = 2, 9  # emojibase's group numbers; regional indicators have no group at all

_PUNCTUATION = {"#": " pound ", "*": " asterisk ", "&": " and ", "\u2019": "", "'": ""}
_GENDERED = {"man", "woman", "men", "women", "person", "people"}
_GENDER_IN_HEXCODE = re.compile(r"-FE0F|-200D-264[02]")
_PERSON_IN_HEXCODE = re.compile(r"1F468|1F469|1F9D1")
_MAX_ALIAS_DEPTH = 8


@dataclass(frozen=True)
class Concept:
    """One emoji, whoever draws it.

    `kind` is its place in Unicode's order ("animal mammal"); it is one of the tags, too. `base` is shared by the
    variants of one emoji ("man cook", "woman cook", "cook").
    """

    slug: str
    label: str
    tags: tuple[str, ...]
    group: str
    kind: str
    hexcode: str
    base: str


@dataclass(frozen=True)
class Icon:
    """An svg body and its viewBox (user units); `flips` says whether it is mirrored left to right and top to bottom."""

    body: str
    left: float
    top: float
    width: float
    height: float
    flips: tuple[bool, bool] = (False, False)


@dataclass(frozen=True)
class IconSet:
    """An iconify icon set: icons by name, aliases that point to a parent, and the icons' default viewBox."""

    icons: Mapping[str, Mapping[str, Any]]
    aliases: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    defaults: Mapping[str, float] = field(default_factory=dict)
    names_by_hexcode: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def parse(cls, icons: Mapping[str, Any], chars: Mapping[str, str] | Sequence[Any]) -> IconSet:
        """From an icon package's `icons.json` and `chars.json`; the latter is an empty list in some sets."""
        defaults = {key: float(icons[key]) for key in ("left", "top", "width", "height") if key in icons}
        names = {key.upper(): name for key, name in chars.items()} if isinstance(chars, Mapping) else {}
        return cls(icons["icons"], icons.get("aliases", {}), defaults, names)

    def resolve(self, name: str) -> str | None:
        """The name of the icon that finally draws `name`, through any aliases; None where nothing does."""
        for _ in range(_MAX_ALIAS_DEPTH):
            if name in self.icons:
                return name
            if name not in self.aliases:
                return None
            name = self.aliases[name]["parent"]
        return None

    def icon(self, name: str) -> Icon:
        """The drawing of a name that resolves; a flip on the way through the aliases is kept."""
        flips = [False, False]
        entry = self.aliases.get(name, {})
        while name not in self.icons:
            entry = self.aliases[name]
            flips = [flips[0] != bool(entry.get("hFlip")), flips[1] != bool(entry.get("vFlip"))]
            name = entry["parent"]
        own = {"left": 0.0, "top": 0.0, "width": 16.0, "height": 16.0, **self.defaults, **self.icons[name]}
        return Icon(own["body"], own["left"], own["top"], own["width"], own["height"], (flips[0], flips[1]))


def slugify(label: str) -> str:
    """A label as iconify names its icons: "Woman’s hat" -> "womans-hat", "keycap: #" -> "keycap-pound"."""
    text = unicodedata.normalize("NFKD", label.lower())
    for sign, word in _PUNCTUATION.items():
        text = text.replace(sign, word)
    text = "".join(letter for letter in text if not unicodedata.combining(letter))
    return re.sub(r"[^a-z0-9]+", "-", text).strip("-")


def parse_concepts(
    emojibase: Iterable[Mapping[str, Any]], groups: Mapping[str, str], subgroups: Mapping[str, str]
) -> list[Concept]:
    """Every emoji but flags, components and regional indicators, in emojibase's order; skin tones are left out.

    Tones are left out because their labels differ from the base emoji's by the tone alone: five near copies of each
    person would crowd the batch and the list of names.
    """
    kept = [entry for entry in emojibase if entry.get("group") not in (None, _COMPONENT, _FLAG)]
    bases = _bases(kept)
    concepts: dict[str, Concept] = {}
    for entry, base in zip(kept, bases, strict=True):
        slug = slugify(entry["label"])
        group, kind = groups[str(entry["group"])], subgroups[str(entry["subgroup"])].replace("-", " ")
        tags = tuple(dict.fromkeys([*entry.get("tags", ()), kind]))
        concepts.setdefault(slug, Concept(slug, entry["label"], tags, group, kind, entry["hexcode"], base))
    return list(concepts.values())


def _bases(entries: Sequence[Mapping[str, Any]]) -> list[str]:
    """One name per entry, equal for entries whose labels or code points differ by gender alone."""
    keys = [(_base_label(entry["label"]), _base_hexcode(entry["hexcode"])) for entry in entries]
    parent: dict[str, str] = {}

    def root(key: str) -> str:
        while parent.setdefault(key, key) != key:
            key = parent[key]
        return key

    for label_key, hexcode_key in keys:
        parent[root(hexcode_key)] = root(label_key)
    return [root(label_key) for label_key, _ in keys]


def _base_label(label: str) -> str:
    head, _, tail = label.partition(":")
    words = [word for word in slugify(head).split("-") if word not in _GENDERED]
    return "-".join(words) or slugify(tail) or slugify(head)


def _base_hexcode(hexcode: str) -> str:
    return _PERSON_IN_HEXCODE.sub("1F9D1", _GENDER_IN_HEXCODE.sub("", hexcode))


def join(concepts: Sequence[Concept], sets: Mapping[str, IconSet]) -> dict[tuple[str, str], str]:
    """(artist, concept slug) -> icon name, at most one each, no icon of an artist used twice.

    An icon is found by the concept's slug; else by a synonym, which is a name that any set's aliases or code points tie
    to the concept, as long as it is not another concept's own slug. So a set that still says "robot-face" is read.
    """
    synonyms = _synonyms(concepts, sets)
    joined: dict[tuple[str, str], str] = {}
    for artist, icons in sets.items():
        used: set[str | None] = set()
        # Exact names first, so that a synonym never takes the icon of the concept it is named after.
        for names_of in (lambda concept: [concept.slug], lambda concept: synonyms[concept.slug]):
            for concept in concepts:
                if (artist, concept.slug) in joined:
                    continue
                name = next((n for n in names_of(concept) if icons.resolve(n) not in {None, *used}), None)
                if name is not None:
                    joined[artist, concept.slug] = name
                    used.add(icons.resolve(name))
    return joined


def _synonyms(concepts: Sequence[Concept], sets: Mapping[str, IconSet]) -> dict[str, list[str]]:
    names: dict[str, set[str]] = defaultdict(set)
    for icons in sets.values():
        same_icon: dict[str | None, set[str]] = defaultdict(set)
        for name in (*icons.icons, *icons.aliases):
            same_icon[icons.resolve(name)].add(name)
        for concept in concepts:
            listed = icons.names_by_hexcode.get(concept.hexcode, concept.slug)
            for name in (concept.slug, listed):
                names[concept.slug] |= same_icon.get(icons.resolve(name), set()) if icons.resolve(name) else set()
    slugs = {concept.slug for concept in concepts}
    return {concept.slug: sorted(names[concept.slug] - slugs) for concept in concepts}


def hold_out(concepts: Iterable[Concept], fraction: float, seed: int) -> set[str]:
    """Slugs of about `fraction` of the concepts, never part of a base: all of its concepts are held out, or none."""
    by_base: dict[str, list[str]] = defaultdict(list)
    num_concepts = 0
    for concept in concepts:
        by_base[concept.base].append(concept.slug)
        num_concepts += 1
    wanted = round(fraction * num_concepts)
    held: set[str] = set()
    # Ordered by a hash of the name: a new emoji in a later version leaves the fate of the others as it was.
    for base in sorted(by_base, key=lambda name: hashlib.sha256(f"{seed}/{name}".encode()).digest()):
        if len(held) + len(by_base[base]) <= wanted:
            held.update(by_base[base])
    return held
