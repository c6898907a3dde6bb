"""Shards built at test time with the standard library, so that no reader is tested with its own writer."""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from clipscale.config.data import NoAugment, TextCaption
from clipscale.data.decode import Decoder

PLAIN = Decoder(4, NoAugment("none"), TextCaption("text"))


def write_tar(path: Path, members: Iterable[tuple[str, bytes]], tar_format: int = tarfile.PAX_FORMAT) -> str:
    with tarfile.open(path, "w", format=tar_format) as tar:
        for name, data in members:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return str(path)


def picture(value: int = 0, size: tuple[int, int] = (4, 4), kind: str = "PNG", mode: str = "RGB", **options) -> bytes:
    """A flat image; value 0..255 in every channel."""
    stream = io.BytesIO()
    Image.new(mode, size, value if mode in "LP" else (value,) * len(mode)).save(stream, kind, **options)
    return stream.getvalue()


def pixels(array: np.ndarray, kind: str = "PNG", **options) -> bytes:
    stream = io.BytesIO()
    Image.fromarray(array).save(stream, kind, **options)
    return stream.getvalue()


def members(number: int) -> list[tuple[str, bytes]]:
    """A sound sample: its caption and its pixels tell its number."""
    meta = json.dumps({"label": f"label {number}", "tags": ["a", "b"]}).encode()
    return [
        (f"{number:05d}.png", picture(number % 251)),
        (f"{number:05d}.txt", f"number {number}".encode()),
        (f"{number:05d}.json", meta),
    ]


def write_shards(
    folder: Path, counts: Sequence[int], change: Callable[[int], list[tuple[str, bytes]]] = members
) -> list[str]:
    """Shards of `counts` samples, numbered through; `change` gives the members of sample i."""
    paths, number = [], 0
    for shard, count in enumerate(counts):
        names = [member for i in range(number, number + count) for member in change(i)]
        paths.append(write_tar(folder / f"s-{shard:03d}.tar", names))
        number += count
    return paths


def tokenize(captions: list[str]) -> torch.Tensor:
    """The last number in the caption, and its length."""
    return torch.tensor([[int(caption.split()[-1]), len(caption)] for caption in captions])


def tokenize_or_fail(captions: list[str]) -> torch.Tensor:
    if any(caption == "number 13" for caption in captions):
        raise ZeroDivisionError("thirteen")
    return tokenize(captions)
