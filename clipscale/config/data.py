"""The keys of `[data]`: where pairs lie, in which shares they are mixed, how they are decoded and changed."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

from pydantic import Field

from clipscale.config.values import STRICT, Count, CountOrZero, NonNegative, Positive, Share


@dataclass(frozen=True)
class NoAugment:
    """Shortest side resized, centre cropped: what evaluation sees."""

    __pydantic_config__ = STRICT
    kind: Literal["none"]


@dataclass(frozen=True)
class CropAugment:
    """A random crop that covers `scale` of the area, resized: the usual choice for photographs."""

    __pydantic_config__ = STRICT
    kind: Literal["crop"]
    scale: tuple[Positive, Positive] = (0.9, 1.0)
    ratio: tuple[Positive, Positive] = (0.75, 1.3333)
    flip: Share = 0.0  # chance of a left-right flip; captions may say "left"


@dataclass(frozen=True)
class AffineAugment:
    """A light rotation, shift and zoom on white: for drawings, scans and other objects on a plain ground."""

    __pydantic_config__ = STRICT
    kind: Literal["affine"]
    degrees: NonNegative = 10.0
    translate: Share = 0.08  # of the side
    scale: tuple[Positive, Positive] = (0.85, 1.15)
    flip: Share = 0.0


Augment = Annotated[NoAugment | CropAugment | AffineAugment, Field(discriminator="kind")]


@dataclass(frozen=True)
class TextCaption:
    """The caption is one field of the sample: an extension (`txt`), or a key inside its JSON (`json:caption`)."""

    __pydantic_config__ = STRICT
    kind: Literal["text"]
    field: str = "txt"


@dataclass(frozen=True)
class LabelAndTagsCaption:
    """The caption is drawn anew each epoch from `label` and `tags` of the sample's JSON."""

    __pydantic_config__ = STRICT
    kind: Literal["label_and_tags"]
    label_only: Share = 0.5  # chance of the label alone
    tags_only: Share = 0.0  # chance of tags without the label
    max_tags: Count = 3


@dataclass(frozen=True)
class ChoiceCaption:
    """The caption is drawn anew each epoch from several fields, in proportion to their numbers.

    `fields = { txt = 1, "json:long" = 3 }`; a field that a sample lacks, or that is empty there, is passed over.
    """

    __pydantic_config__ = STRICT
    kind: Literal["choice"]
    fields: Annotated[dict[str, Positive], Field(min_length=1)]


Caption = Annotated[TextCaption | LabelAndTagsCaption | ChoiceCaption, Field(discriminator="kind")]


@dataclass(frozen=True)
class Table:
    """How a CSV, TSV or Parquet file of pairs is read."""

    __pydantic_config__ = STRICT
    image: str = ""  # column of image files; default: image, filepath, path, ...
    caption: str = ""  # column of captions; default: caption, title, text, ...
    separator: str = ""  # default: a comma, in .tsv a tab
    root: str = ""  # folder that image paths count from; default: the table's own

    def __post_init__(self) -> None:
        if len(self.separator) > 1:
            raise ValueError(f"found separator {self.separator!r}, wanted one character")


@dataclass(frozen=True)
class DataSource:
    """One part of a mixture: `weight` is its share of each global batch, in proportion to the others' weights."""

    __pydantic_config__ = STRICT
    name: str
    shards: str | tuple[str, ...]
    weight: Positive = 1.0
    index: str = ""
    caption: Caption | None = None  # default: data.caption


@dataclass(frozen=True)
class Data:
    """`shards`: paths, globs, folders, braces (`train-{000..127}.tar`), lists, addresses or tables, one or several."""

    __pydantic_config__ = STRICT
    shards: str | tuple[str, ...] = ()
    sources: tuple[DataSource, ...] = ()  # instead of shards: a mixture
    index: str = ""  # file of `clipscale data index`; default: the one in the shards' folder, if there is one
    sampling: Literal["auto", "exact", "resampled"] = "auto"  # auto: resampled where shards cannot be counted
    epoch: str = ""  # the source whose pass is an epoch; default: the first
    epoch_samples: CountOrZero = 0  # or so many samples; needed where shards are drawn with replacement
    cache_dir: str = ""  # for remote shards; default ~/.cache/clipscale/shards
    cache_bytes: Count = 2**36  # what is used longest ago makes room
    timeout_s: Positive = 60.0  # how long a server or a command may be silent
    workers: CountOrZero = 2  # decoding processes per rank; 0 decodes between the steps
    streams: Count = 48  # the epoch is cut into so many streams; ranks must divide it
    shuffle_block: Count = 1024  # samples held and shuffled at a time, per stream
    max_bad_fraction: Share = 0.1  # of all samples seen; more unusable ones stop the run
    max_pixels: Count = 100_000_000  # larger images are dropped unread
    draft: bool = True  # let the decoder shrink a JPEG that is far larger than needed; never in evaluation
    table: Table = Table()
    augment: Augment = field(default_factory=lambda: NoAugment("none"))
    caption: Caption = field(default_factory=lambda: TextCaption("text"))

    def __post_init__(self) -> None:
        if bool(self.shards) == bool(self.sources):
            raise ValueError(f"found {'both' if self.shards else 'neither'}, wanted either shards or sources")
        names = [source.name for source in self.sources]
        if len(set(names)) < len(names):
            raise ValueError(f"found sources named {', '.join(names)}, wanted each name once")
        if self.epoch and self.epoch not in names:
            raise ValueError(f"found epoch {self.epoch!r}, wanted one of the sources: {', '.join(names) or 'none'}")
