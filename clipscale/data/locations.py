"""From what `data.shards` says to the shards it names: paths, globs, folders, braces, lists, addresses and commands."""

from __future__ import annotations

import glob
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from braceexpand import braceexpand

from clipscale.data.store import LOCAL, PIPE, Store, is_remote
from clipscale.errors import ConfigError, DataError

_QUOTES = "; in a shell, put quotes around a pattern"
_JOINT = re.compile(r"::(?![^\[\]]*\])")  # but not inside the address [::1]
_TABLES = (".csv", ".tsv", ".parquet")
_NO_LISTING = ("http", "https")


def is_table(path: str) -> bool:
    """Whether a path names a table of pairs and not a shard."""
    return path.lower().endswith(_TABLES)


def expand_shards(
    patterns: str | Sequence[str], store: Store = LOCAL, *, absent: list[str] | None = None
) -> tuple[str, ...]:
    """The shards that `patterns` name, in their order.

    A pattern is a path, a glob, a folder (its *.tar), braces (`{000..127}`), a list file (`@list` or a path in .txt:
    one pattern a line, seen from the list's folder), an address (s3://, gs://, https://, ...), a command
    (`pipe:cat a.tar`), or several of these joined by `::`.

    Raises `ConfigError` for braces that do not match, `DataError` for whatever is missing or named twice; either lists
    all faults. What is missing goes into the list `absent` instead, if one is given.
    """
    patterns = [patterns] if isinstance(patterns, str) else list(patterns)
    shards: list[str] = []
    misspelt, missing = [], []
    for pattern in patterns:
        for part in _parts(pattern):
            found, fault = _expand(part, store)
            shards += found
            if fault == _BRACES:
                misspelt.append(f"{part!r}: {fault}")
            elif fault:
                missing.append(fault)
    if misspelt:
        raise ConfigError("\n  ".join(["data.shards cannot be read:", *misspelt, *missing]) + _QUOTES)
    if absent is not None:
        absent += missing
    elif missing or not shards:
        raise DataError("\n  ".join([f"shards are missing (looked in {Path.cwd()}):", *missing]) + _QUOTES)
    if len(set(shards)) < len(shards):
        seen = set[str]()
        repeated = sorted({shard for shard in shards if shard in seen or seen.add(shard)})
        raise DataError("\n  ".join(["data.shards names shards more than once; name each one once:", *repeated]))
    return tuple(shards)


_BRACES = "its braces do not match"


def _parts(pattern: str) -> Iterator[str]:
    """What `::` joins, and the lines of list files."""
    if Path(pattern).exists() and not pattern.endswith(".txt"):
        yield pattern
        return
    for part in _JOINT.split(pattern):
        if part.startswith("@") or (part.endswith(".txt") and not is_remote(part)):
            yield from _lines(Path(part.removeprefix("@")).expanduser())
        else:
            yield part


def _lines(path: Path) -> Iterator[str]:
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as fault:
        raise DataError(f"the list of shards {path} cannot be read: {fault}") from fault
    lines = [line.strip() for line in text.splitlines()]
    lines = [line for line in lines if line and not line.startswith("#")]
    if not lines:
        raise DataError(f"the list of shards {path} is empty; wanted one path, pattern or address a line")
    for line in lines:
        for part in _JOINT.split(line):
            yield part if is_remote(part) or Path(part).is_absolute() else str(path.parent / part)


def _expand(pattern: str, store: Store) -> tuple[list[str], str]:
    """The shards of one pattern, and what is wrong with it ("" if nothing)."""
    local = not is_remote(pattern)
    try:
        paths = [pattern] if local and Path(pattern).exists() else list(braceexpand(pattern))
    except ValueError:  # braceexpand's UnbalancedBracesError
        if pattern.startswith(PIPE):  # a shell's own braces
            return [pattern], ""
        return [], _BRACES
    shards, faults = [], []
    for path in paths:
        found = _local(path) if local else _remote(path, store)
        shards += found
        if not found:
            origin = "" if path == pattern else f" (from {pattern!r})"
            empty = path.endswith("/") or (local and Path(path).is_dir())
            faults.append(f"{path}: {'holds no *.tar' if empty else 'nothing there'}{origin}")
    return shards, "\n  ".join(faults)


def _local(path: str) -> list[str]:
    path = str(Path(path).expanduser()) if path.startswith("~") else path
    if Path(path).is_dir():
        return sorted(str(child) for child in Path(path).glob("*.tar"))
    if Path(path).exists():
        return [path]
    return sorted(glob.glob(path, recursive=True)) if glob.has_magic(path) else []  # noqa: PTH207 - takes absolute ones


def _remote(path: str, store: Store) -> list[str]:
    if path.startswith(PIPE):
        return [path]
    listable = path.split("://", 1)[0] not in _NO_LISTING
    if path.endswith("/") and not listable:
        raise ConfigError(f"{path}: a web server cannot list a folder; name the shards, as in {path}{{000..127}}.tar")
    if path.endswith("/"):
        return store.glob(path + "*.tar")
    return store.glob(path) if listable and glob.has_magic(path) else [path]
