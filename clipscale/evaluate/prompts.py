"""From class names to class features: prompt templates, the names themselves, and the mean over templates."""

from __future__ import annotations

from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from jaxtyping import Float32, Int64, UInt8
from torch import Tensor

from clipscale.errors import ConfigError, DataError

TEMPLATE_SETS: dict[str, tuple[str, ...]] = {
    "none": ("{}",),
    "simple": ("{}", "a picture of {}", "an image showing {}", "this is {}", "{}, seen up close"),
}


@runtime_checkable  # executed type checks ask isinstance
class Embedder(Protocol):
    """What an evaluation needs of a trained model: features of unit length, whatever precision the towers run in."""

    def embed_images(self, images: UInt8[Tensor, "n 3 h w"]) -> Float32[Tensor, "n d"]: ...

    def embed_texts(self, texts: list[str]) -> Float32[Tensor, "n d"]: ...


def load_templates(source: str) -> tuple[str, ...]:
    """The templates of a named set, or of a UTF-8 file with one per line (blank lines are skipped).

    Raises ConfigError for a source that is neither, and for a line that does not hold `{}` exactly once.
    """
    if source in TEMPLATE_SETS:
        return TEMPLATE_SETS[source]
    if not Path(source).is_file():
        raise ConfigError(
            f"prompt templates {source!r}: neither a set ({', '.join(TEMPLATE_SETS)}) nor a file"
            f"{_did_you_mean(source, TEMPLATE_SETS)}"
        )
    lines = _numbered_lines(Path(source), "template")
    for number, line in lines:
        if line.count("{}") != 1:
            raise ConfigError(
                f"{source}, line {number}: {line!r} holds {{}} {line.count('{}')} times, where the class name goes "
                "exactly once, as in 'a photo of {}'"
            )
    return tuple(line for _, line in lines)


def load_class_names(path: Path) -> tuple[str, ...]:
    """The class names of a UTF-8 file, one per line, in its order. Raises ConfigError for a name that comes twice."""
    first_seen: dict[str, int] = {}
    for number, name in _numbered_lines(path, "class name"):
        if name in first_seen:
            raise ConfigError(
                f"{path}, line {number}: the class name {name!r} stands in line {first_seen[name]} already"
            )
        first_seen[name] = number
    return tuple(first_seen)


def collect_classes(
    labels: Sequence[str], names: Sequence[str] | None = None
) -> tuple[tuple[str, ...], Int64[Tensor, "n"]]:
    """The class names, and the index of each label among them. Without `names`: the distinct labels, sorted.

    Raises DataError without any label, ConfigError for labels that are not among the given names.
    """
    if not labels:
        raise DataError("no sample has a label, so there are no classes to choose from. Check the shards.")
    chosen = tuple(sorted(set(labels)) if names is None else names)
    position = {name: index for index, name in enumerate(chosen)}
    unknown = sorted(set(labels) - position.keys())
    if unknown:
        shown = "; ".join(f"{label!r}{_did_you_mean(label, chosen)}" for label in unknown[:3])
        rest = f"; and {len(unknown) - 3} more" if len(unknown) > 3 else ""
        raise ConfigError(
            f"{len(unknown)} labels of the data are not among the {len(chosen)} class names: {shown}{rest}"
        )
    return chosen, torch.tensor([position[label] for label in labels])


def embed_classes(
    embedder: Embedder, names: Sequence[str], templates: Sequence[str], *, text_chunk: int = 256
) -> Float32[Tensor, "c d"]:
    """One unit feature per class: the normalised mean of its normalised prompt features (Radford et al. 2021, 3.1.4).

    At most `text_chunk` prompts (at least one class) are embedded at a time.
    """
    num_templates = len(templates)
    class_chunk = max(1, text_chunk // num_templates)
    parts = []
    for start in range(0, len(names), class_chunk):
        # str.format would trip over braces in a name or elsewhere in a template.
        prompts = [
            template.replace("{}", name) for name in names[start : start + class_chunk] for template in templates
        ]
        features = F.normalize(embedder.embed_texts(prompts).float(), dim=1)
        means = features.unflatten(0, (-1, num_templates)).mean(dim=1)  # [classes * templates, d] -> [classes, d]
        parts.append(F.normalize(means, dim=1))
    return torch.cat(parts)


def _numbered_lines(path: Path, what: str) -> list[tuple[int, str]]:
    """The lines that are not blank, stripped, with their numbers from 1."""
    try:
        text = path.read_text(encoding="utf-8-sig")  # editors on Windows put a BOM before the first name
    except OSError as error:
        raise ConfigError(f"cannot read the {what} file {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8 text (byte {error.start}): save the {what} file as UTF-8") from error
    lines = [(number, line.strip()) for number, line in enumerate(text.split("\n"), start=1) if line.strip()]
    if not lines:
        raise ConfigError(f"{path} is empty: it should hold one {what} per line")
    return lines


def _did_you_mean(word: str, known: Sequence[str] | dict[str, tuple[str, ...]]) -> str:
    close = get_close_matches(word, list(known), n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""
