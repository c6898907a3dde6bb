"""Write WebDataset shards whose bytes depend on their samples alone, and build whole folders of them all or nothing."""

from __future__ import annotations

import io
import json
import shutil
import tarfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

from clipscale.errors import ConfigError, DataError

Encode = Callable[[str], list[int]]
"""Text -> token ids, without start and end tokens and without padding."""

MARKER = "source.json"
"""Written last into a finished build: what it was built from. A folder without it is no finished build."""

# CLIP's byte-pair vocabulary: padding, start of text, end of text. Every token table keeps them.
_SPECIAL_TOKENS = (0, 49406, 49407)
_PROMPT_WORDS = "a photo of the picture, an emoji"


class ShardWriter:
    """Write samples into `<out>/<prefix>-000000.tar`, `-000001.tar`, ... of `samples_per_shard` samples each.

    The same samples give the same bytes: times and owners are zero, members are sorted by extension. A shard gets its
    name once it is whole, so an interrupted build leaves no half shard; leaving the `with` block by an exception drops
    the shard begun. Attribute `counts`: samples of each finished shard, in order.

    Raises `ConfigError` where `out` already holds something, unless `allow_existing`.
    """

    def __init__(
        self, out: Path, samples_per_shard: int, prefix: str = "shard", *, allow_existing: bool = False
    ) -> None:
        if samples_per_shard < 1:
            raise ConfigError(f"samples_per_shard is {samples_per_shard}; a shard holds at least one sample")
        refuse_occupied(out, allow_existing=allow_existing)
        out.mkdir(parents=True, exist_ok=True)
        self.counts: list[int] = []
        self._out, self._prefix, self._samples_per_shard = out, prefix, samples_per_shard
        self._tar: tarfile.TarFile | None = None
        self._num_open = 0
        self._last_key = ""

    def __enter__(self) -> ShardWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, _fault: object, _trace: TracebackType | None) -> None:
        if kind is None:
            self._finish()
        elif self._tar is not None:
            self._tar.close()
            self._temporary.unlink(missing_ok=True)

    def write(self, key: str, members: Mapping[str, bytes]) -> None:
        """Append one sample; `members` maps an extension ("png", "txt") to its bytes.

        Raises `DataError` for a key that readers would cut or merge: empty, with a dot or a slash, or equal to the key
        before it.
        """
        if not key or "." in key or "/" in key or key == self._last_key:
            raise DataError(
                f"sample key {key!r} cannot be stored: keys are not empty, hold no '.' and no '/', "
                f"and differ from the key before (which was {self._last_key!r}); rename the sample"
            )
        if self._tar is None:
            self._tar = tarfile.open(self._temporary, "w", format=tarfile.PAX_FORMAT)  # noqa: SIM115
        add_sample(self._tar, key, members)
        self._last_key = key
        self._num_open += 1
        if self._num_open == self._samples_per_shard:
            self._finish()

    @property
    def _path(self) -> Path:
        return self._out / f"{self._prefix}-{len(self.counts):06d}.tar"

    @property
    def _temporary(self) -> Path:
        return self._path.with_suffix(".tar.partial")

    def _finish(self) -> None:
        if self._tar is None:
            return
        self._tar.close()
        self._temporary.replace(self._path)
        self.counts.append(self._num_open)
        self._tar, self._num_open = None, 0


def add_sample(tar: tarfile.TarFile, key: str, members: Mapping[str, bytes]) -> None:
    """Append one sample, its members sorted by extension; its bytes depend on nothing else."""
    for extension in sorted(members):
        info = tarfile.TarInfo(f"{key}.{extension}")  # its defaults: mtime 0, uid 0, gid 0, mode 0o644
        info.size = len(members[extension])
        tar.addfile(info, io.BytesIO(members[extension]))


def refuse_occupied(out: Path, *, allow_existing: bool = False) -> None:
    """Raise `ConfigError` where `out` is a file, or a folder that holds something (unless `allow_existing`)."""
    if out.exists() and not out.is_dir():
        raise ConfigError(f"{out} is a file; shards are written into a folder: choose another path")
    if not allow_existing and out.is_dir() and any(out.iterdir()):
        raise ConfigError(f"{out} is not empty; choose another folder or remove what it holds")


def read_marker(out: Path) -> dict[str, Any] | None:
    """What a finished build in `out` was built from; None where there is no finished build."""
    try:
        return json.loads((out / MARKER).read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError) as fault:
        raise DataError(f"{out / MARKER} cannot be read ({fault}); remove {out} and build it again") from fault


@contextmanager
def whole_build(out: Path, kind: str) -> Iterator[Path]:
    """Yield a fresh folder beside `out` that takes its place once the block ends well.

    The block ends by writing the marker with `write_marker`. What an interrupted build left is thrown away. An earlier
    build of the same `kind` is replaced; anything else in `out` raises `ConfigError`.
    """
    marker = read_marker(out)
    ours = marker is not None and marker.get("kind") == kind
    refuse_occupied(out, allow_existing=ours)
    staging = out.with_name(out.name + ".partial")
    if staging.exists():
        shutil.rmtree(staging)
    staging.mkdir(parents=True)
    try:
        yield staging
    except BaseException:
        shutil.rmtree(staging, ignore_errors=True)
        raise
    assert read_marker(staging) is not None, "a build ends with its marker"
    if out.exists():
        shutil.rmtree(out)
    staging.replace(out)


def write_marker(folder: Path, content: Mapping[str, Any]) -> None:
    """Declare the build in `folder` finished. `content` holds at least `kind`."""
    (folder / MARKER).write_text(to_json(content) + "\n", encoding="utf-8")


def to_json(value: object) -> str:
    """JSON with sorted keys, so that equal values give equal bytes."""
    return json.dumps(value, ensure_ascii=False, sort_keys=True)


def write_token_table(path: Path, texts: Iterable[str], encode: Encode) -> None:
    """Write the sorted ids of every token that the texts, prompts, start, end and padding need, as a JSON list."""
    ids: set[int] = set(_SPECIAL_TOKENS)
    for text in {*texts, *_PROMPT_WORDS.split(), _PROMPT_WORDS}:
        ids.update(encode(text))
        ids.update(encode(f"{text},"))  # in a list of tags: ")" and "," merge into one token
    path.write_text(json.dumps(sorted(ids)) + "\n", encoding="utf-8")
