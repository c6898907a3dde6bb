"""The caption of a sample, from its text or JSON members. A sample without a usable one raises `Unusable`."""

from __future__ import annotations

import hashlib
import json
from bisect import bisect_right
from collections.abc import Mapping
from itertools import accumulate
from typing import Any

import numpy as np

from clipscale.config.data import Caption, ChoiceCaption, LabelAndTagsCaption


class Unusable(Exception):  # noqa: N818 - not a fault of the run: the sample is dropped and counted under `reason`
    """This sample cannot be trained on. `reason` is one of a few words, such as "no_image"."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


def read_caption(members: Mapping[str, bytes], rule: Caption, rng: np.random.Generator) -> str:
    """The sample's caption by `rule`, stripped of blanks around it; random choices come from `rng`.

    Where a JSON field holds a list, one of its texts is drawn. Raises `Unusable`: no_caption (the field is absent or
    no text), empty_caption, not_utf8, bad_json.
    """
    if rule.kind == "choice":
        return _choice(members, rule, rng)
    if rule.kind == "label_and_tags":
        return _checked(_label_and_tags(read_json(members), rule, rng))
    return _checked(_one(_value(members, rule.field), rng))


def _value(members: Mapping[str, bytes], field: str) -> Any:
    """What stands in `field`: an extension, or `json:key`; None where nothing does."""
    extension, _, key = field.partition(":")
    return read_json(members, extension).get(key) if key else _text(members, extension)


def _one(value: Any, rng: np.random.Generator) -> Any:
    texts = [text for text in value if isinstance(text, str) and text.strip()] if isinstance(value, list) else []
    return texts[int(rng.random() * len(texts))] if texts else value


def _checked(caption: Any) -> str:
    if not isinstance(caption, str):
        raise Unusable("no_caption")
    if not caption.strip():
        raise Unusable("empty_caption")
    if any("\ud800" <= letter <= "\udfff" for letter in caption):  # JSON can escape half of a character
        raise Unusable("not_utf8")
    return caption.strip()


def _choice(members: Mapping[str, bytes], rule: ChoiceCaption, rng: np.random.Generator) -> str:
    """One of the fields that hold a caption, in proportion to their numbers."""
    found, fault = dict[str, str](), Unusable("no_caption")
    for field in rule.fields:
        try:
            found[field] = _checked(_one(_value(members, field), rng))
        except Unusable as missing:
            fault = missing
    if not found:
        raise fault
    ends = list(accumulate(rule.fields[field] for field in found))
    return list(found.values())[min(bisect_right(ends, rng.random() * ends[-1]), len(ends) - 1)]


def concept_id(members: Mapping[str, bytes], field: str) -> int:
    """A number for the text in `field` (`json:concept`, or an extension); equal texts have equal numbers everywhere.

    Raises `Unusable`: no_concept, not_utf8, bad_json.
    """
    text = _value(members, field)
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
