"""The caption of a sample, from its text or JSON members. A sample without a usable one raises `Unusable`."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

import numpy as np

from clipscale.config.schema import Caption, LabelAndTagsCaption


class Unusable(Exception):  # noqa: N818 - not a fault of the run: the sample is dropped and counted under `reason`
    """This sample cannot be trained on. `reason` is one of a few words, such as "no_image"."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


def read_caption(members: Mapping[str, bytes], rule: Caption, rng: np.random.Generator) -> str:
    """The sample's caption by `rule`, stripped of blanks around it; random choices come from `rng`.

    Raises `Unusable`: no_caption (the field is absent or no text), empty_caption, not_utf8, bad_json.
    """
    if rule.kind == "label_and_tags":
        caption = _label_and_tags(read_json(members), rule, rng)
    else:
        field, _, key = rule.field.partition(":")
        caption = read_json(members, field).get(key) if key else _text(members, field)
    if not isinstance(caption, str):
        raise Unusable("no_caption")
    if not caption.strip():
        raise Unusable("empty_caption")
    if any("\ud800" <= letter <= "\udfff" for letter in caption):  # JSON can escape half of a character
        raise Unusable("not_utf8")
    return caption.strip()


def concept_id(members: Mapping[str, bytes], field: str) -> int:
    """A number for the text in `field` (`json:concept`, or an extension); equal texts have equal numbers everywhere.

    Raises `Unusable`: no_concept, not_utf8, bad_json.
    """
    extension, _, key = field.partition(":")
    text = read_json(members, extension).get(key) if key else _text(members, extension)
    if not isinstance(text, str):
        raise Unusable("no_concept")
    # 63 bits of a hash: among 10^6 concepts the odds of two sharing a number are 1 in 10^7.
    return (
        int.from_bytes(hashlib.blake2b(text.strip().encode("utf-8", "surrogatepass"), digest_size=8).digest(), "big")
        >> 1
    )


def read_json(members: Mapping[str, bytes], field: str = "json") -> dict[str, Any]:
    """The object in a JSON member, {} where there is no such member. Raises `Unusable`: not_utf8, bad_json."""
    text = _text(members, field)
    try:
        found = json.loads(text) if text is not None else {}
    except ValueError:
        raise Unusable("bad_json") from None
    if not isinstance(found, dict):
        raise Unusable("bad_json")
    return found


def _text(members: Mapping[str, bytes], field: str) -> str | None:
    data = members.get(field.lower())
    try:
        return None if data is None else data.decode("utf-8-sig")  # drops a byte order mark
    except UnicodeDecodeError:
        raise Unusable("not_utf8") from None


def _label_and_tags(found: dict[str, Any], rule: LabelAndTagsCaption, rng: np.random.Generator) -> str | None:
    """The label alone, or with one to `max_tags` of the tags behind it, or these tags alone."""
    label = found.get("label")
    tags = [tag for tag in found.get("tags") or [] if isinstance(tag, str) and tag.strip()]
    kind, amount = rng.random(2)
    if not isinstance(label, str) or not tags or kind < rule.label_only:
        return label
    chosen = rng.random(len(tags)).argsort()[: 1 + int(amount * min(rule.max_tags, len(tags)))]
    words = [tags[index] for index in chosen]
    return ", ".join(words if kind < rule.label_only + rule.tags_only else [label, *words])
