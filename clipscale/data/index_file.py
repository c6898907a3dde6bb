"""The index on disk: made once by `clipscale data index`, read at every start instead of walking all the headers again.

One JSON object a line: a head, then a shard each. Shards under the index's own folder are named from there, so that
the folder may move. While it is made, the lines gather in `<index>.partial`, whose shards a second attempt keeps.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

from clipscale.data.counts import stated_counts
from clipscale.data.index import Report, Shard, ShardIndex, scan_shard
from clipscale.data.store import PIPE, Stat, Store, is_remote
from clipscale.errors import ConfigError, DataError

NAME = "clipscale-index.jsonl"
_HEAD = {"clipscale_index": 1}
_SAMPLED = 8  # remote shards looked at before a start: one question to a server each
_MAX_LISTED = 10


def default_path(paths: Sequence[str]) -> Path | None:
    """Where the index of these shards lies unless told otherwise: in the folder that holds them all, None if none."""
    if any(is_remote(path) for path in paths):
        return None
    folders = {os.path.dirname(path) for path in paths}  # noqa: PTH120 - cheap, for a hundred thousand paths
    return Path(folders.pop()) / NAME if len(folders) == 1 else None


def build_index(
    paths: Sequence[str], out: Path, *, store: Store, threads: int, report: Report | None = None
) -> tuple[ShardIndex, int]:
    """Walk the headers of all shards into `out`; shards that an earlier index describes as they are now are kept.

    -> the index, and how many shards were walked. Raises `DataError` with every fault of every shard: nothing is
    written then, but what was walked is kept for the next attempt.
    """
    partial = out.with_name(out.name + ".partial")
    known = {**_read(out), **_read(partial)}
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        partial.touch()
    except OSError as fault:
        raise ConfigError(f"--out: {out} cannot be written: {fault.strerror}") from fault

    def current(path: str) -> Shard | None:
        if path.startswith(PIPE):  # nothing tells whether a command would give the same again
            store.cached(path).unlink(missing_ok=True)
            return None
        found = _find(known, path)
        return found if found and not found.faults and _unchanged(found, store, exact=True) else None

    with ThreadPoolExecutor(threads) as pool:
        kept = dict(zip(paths, pool.map(current, paths), strict=True))
        missing = [path for path in paths if kept[path] is None]
        stated = stated_counts(missing, store)
        with partial.open("w", encoding="utf-8") as file:
            known_first = chain(list(filter(None, kept.values())), _scanned(pool, missing, store, stated))
            for lines, shard in enumerate(known_first, 1):
                kept[shard.path] = shard
                file.write(_line(shard, out.parent))
                file.flush()  # what a killed run had done is kept
                if report is not None:
                    report("headers", lines, len(paths))
    index = ShardIndex(tuple(shard for shard in kept.values() if shard), store)
    index.refuse_faults()
    whole = json.dumps(_HEAD) + "\n" + "".join(_line(shard, out.parent) for shard in index.shards)
    partial.write_text(whole, encoding="utf-8")
    partial.replace(out)
    return index, len(missing)


def _scanned(
    pool: ThreadPoolExecutor, paths: list[str], store: Store, stated: Mapping[str, tuple[int, str]]
) -> Iterator[Shard]:
    return pool.map(lambda path: scan_shard(path, store, stated), paths)


def load_index(path: Path, paths: Sequence[str], store: Store, *, threads: int = 16) -> ShardIndex:
    """The shards `paths` by the index at `path`, each compared with its file: size and time, else its headers.

    Of remote shards a few are compared. Raises `DataError` for shards that are not in it or have changed.
    """
    if not path.is_file():
        raise ConfigError(f"data.index: no file at {path}; make it with `clipscale data index SHARDS --out {path}`")
    known = _read(path)
    if not known:
        raise ConfigError(f"data.index: {path} is no index; make one with `clipscale data index SHARDS --out {path}`")
    found = {shard: entry for shard in paths if (entry := _find(known, shard)) is not None}
    faults = [f"{shard}: not in the index" for shard in paths if shard not in found]
    remote = [shard for shard in found if is_remote(shard)]
    compared = [shard for shard in found if not is_remote(shard)] + remote[:: max(1, len(remote) // _SAMPLED)]
    with ThreadPoolExecutor(threads) as pool:
        differences = pool.map(lambda shard: _difference(found[shard], store), compared)
        faults += [f"{shard}: {fault}" for shard, fault in zip(compared, differences, strict=True) if fault]
    if faults:
        more = [f"... and {len(faults) - _MAX_LISTED:,} more"] if len(faults) > _MAX_LISTED else []
        again = f"run `clipscale data index` again with --out {path} (only what has changed is walked)"
        raise DataError("\n  ".join([f"{path} no longer describes the shards; {again}:", *faults[:_MAX_LISTED], *more]))
    return ShardIndex(tuple(found.values()), store)


def counted(
    paths: Sequence[str], store: Store, *, named: str = "", report: Report | None = None
) -> tuple[ShardIndex, str]:
    """The index of these shards, and where it comes from: the file `named`, the one in their folder, their headers.

    Raises `ConfigError` and `DataError` as `load_index` and `ShardIndex.scan`.
    """
    usual = default_path(paths)
    if named or (usual is not None and usual.is_file()):
        path = Path(named).expanduser() if named else usual
        assert path is not None
        return load_index(path, paths, store), f"counted by {path}"
    return ShardIndex.scan(paths, store=store, report=report), "counted by their headers"


def counts_of(path: Path, paths: Sequence[str]) -> dict[str, int]:
    """How many samples the index at `path` says that these shards hold; nothing where there is no index."""
    known = _read(path)
    return {shard: found.num_samples for shard in paths if (found := _find(known, shard)) is not None}


def _difference(shard: Shard, store: Store) -> str:
    """How a shard's file differs from what the index says; "" if it does not."""
    try:
        if _unchanged(shard, store, exact=False):
            return ""
    except DataError as fault:
        return str(fault).removeprefix(f"{shard.path}: ")
    return "has changed since it was indexed"


def _unchanged(shard: Shard, store: Store, *, exact: bool) -> bool:
    """Whether the file is still the one that was walked. Unless `exact`, a copy of another date will do."""
    stat = store.stat(shard.path)
    if stat == Stat(shard.num_bytes, shard.version) or stat == Stat(0, ""):  # a command: nothing to compare with
        return True
    if exact or stat.num_bytes != shard.num_bytes or is_remote(shard.path):
        return False
    return scan_shard(shard.path, store).checksum == shard.checksum


def _line(shard: Shard, folder: Path) -> str:
    path = shard.path
    if not is_remote(path):
        absolute = os.path.abspath(path)  # noqa: PTH100 - not resolved: a link may be there so that data can move
        inside = os.path.commonpath([absolute, os.path.abspath(folder)]) == os.path.abspath(folder)  # noqa: PTH100
        path = os.path.relpath(absolute, folder) if inside else absolute
    entry: dict[str, Any] = {
        "path": path,
        "samples": shard.num_samples,
        "bytes": shard.num_bytes,
        "version": shard.version,
        "fields": sorted(shard.fields),
        "checksum": shard.checksum,
        "marks": shard.marks,
    }
    return json.dumps(entry | ({"faults": shard.faults} if shard.faults else {})) + "\n"


def _find(known: Mapping[str, Shard], path: str) -> Shard | None:
    """The shard at `path`, named as it was asked for."""
    found = known.get(_name(path))
    return None if found is None else replace(found, path=path)


def _name(path: str) -> str:
    """What a shard is known under: its address or absolute path."""
    return path if is_remote(path) else os.path.abspath(path)  # noqa: PTH100


def _read(path: Path) -> dict[str, Shard]:
    """The shards of an index, or of one that was begun; a line that a killed run left half is passed over."""
    found: dict[str, Shard] = {}
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError):
        return {}
    for line in lines:
        try:
            entry = json.loads(line)
            name = entry["path"]
            name = name if is_remote(name) else _name(str(path.parent / name))
            found[name] = Shard(
                name,
                entry["samples"],
                entry["bytes"],
                frozenset(entry["fields"]),
                tuple(entry["marks"]),
                tuple(entry.get("faults", ())),
                entry["version"],
                entry["checksum"],
            )
        except (ValueError, KeyError, TypeError):
            continue  # then this shard is walked again
    return found
