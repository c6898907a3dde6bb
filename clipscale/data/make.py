"""From a table of image files and captions to shards: in parallel, the same bytes each time, taken up where it stopped.

Which rows go into which shard is decided first and written down in OUT/.make; then every shard is made on its own. A
shard gets its name once it is whole. At the end come sizes.json (samples of each shard), dropped.jsonl (rows that were
left out, and why), the index that training reads, and the marker of a finished build.
"""

from __future__ import annotations

import hashlib
import io
import json
import shutil
import tarfile
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from PIL import Image

from clipscale.config.data import Table
from clipscale.data.assign import shuffled
from clipscale.data.captions import Unusable
from clipscale.data.counts import SIZES
from clipscale.data.decode import read_image
from clipscale.data.index import Report
from clipscale.data.index_file import NAME, build_index
from clipscale.data.store import LOCAL
from clipscale.data.tables import Row, image_extension, read_table
from clipscale.data.write import add_sample, read_marker, refuse_occupied, to_json, write_marker
from clipscale.errors import ConfigError, DataError

_KIND, _FORMAT = "make", 1  # raise the format when the same rows would give other shards
_WORK = ".make"
_TAR_OVERHEAD_BYTES = 3 * 1024  # headers and padding of a sample, about


@dataclass(frozen=True)
class Packing:
    """How rows become shards.

    samples_per_shard and shard_bytes: a shard ends at whichever comes first. max_side: larger images are shrunk to it
    and stored as JPEG; 0 stores every file as it is. shuffle: rows are mixed first, so that a table sorted by subject
    gives mixed shards.
    """

    samples_per_shard: int = 10_000
    shard_bytes: int = 2**30
    max_side: int = 0
    shuffle: bool = True
    seed: int = 0


@dataclass(frozen=True)
class Made:
    num_samples: int
    num_shards: int
    dropped: dict[str, int]  # reason -> rows


def make_shards(
    tables: Sequence[Path], out: Path, rule: Table, packing: Packing, *, threads: int = 4, report: Report | None = None
) -> Made:
    """Pack the pairs of some tables into `out`; go on with a build of the same that was interrupted there.

    Raises `ConfigError` where `out` holds anything else, `DataError` where a table cannot be read or no row is usable.
    """
    rows = [row for table in tables for row in read_table(table, rule)]
    identity = _identity(tables, rule, packing)
    if out.exists() and not out.is_dir():
        raise ConfigError(f"--out: {out} is a file, wanted a folder")
    marker = read_marker(out)
    if marker is not None and marker.get("identity") == identity:
        return Made(marker["samples"], marker["shards"], marker["dropped"])
    work = out / _WORK
    plan = _read_json(work / "plan.json")
    if plan is None or plan["identity"] != identity:
        if plan is not None:
            raise ConfigError(
                f"{out} holds a build of other tables or options that was begun: remove it, or choose another"
            )
        refuse_occupied(out)
        plan = {"identity": identity, "shards": _plan(rows, packing, threads)}
        work.mkdir(parents=True, exist_ok=True)
        _write(work / "plan.json", to_json(plan))
    with ThreadPoolExecutor(threads) as pool:
        shards = list(enumerate(plan["shards"]))
        made = []
        for found in pool.map(lambda item: _shard(item[0], item[1], rows, out, packing), shards):
            made.append(found)
            if report is not None:
                report("shards", len(made), len(shards))
    return _finish(out, made, identity, threads)


def _identity(tables: Sequence[Path], rule: Table, packing: Packing) -> str:
    digest = hashlib.sha256(to_json([_FORMAT, asdict(rule), asdict(packing), [str(path) for path in tables]]).encode())
    for table in tables:
        digest.update(hashlib.sha256(table.read_bytes()).digest())
    return digest.hexdigest()[:20]


def _plan(rows: Sequence[Row], packing: Packing, threads: int) -> list[list[int]]:
    """The numbers of the rows of each shard."""

    def size(row: Row) -> int:
        try:
            return row.image.stat().st_size
        except OSError:
            return 0

    with ThreadPoolExecutor(threads) as pool:
        sizes = list(pool.map(size, rows, chunksize=1000))
    if not any(sizes):
        raise DataError(
            f"none of the {len(rows):,} image files is there; the first is {rows[0].image}. "
            "Set --root to the folder that the paths count from"
        )
    shards, num_bytes = [[]], 0
    for number in shuffled(len(rows), packing.seed) if packing.shuffle else range(len(rows)):
        added = sizes[number] + len(rows[number].caption) + _TAR_OVERHEAD_BYTES
        if shards[-1] and (len(shards[-1]) == packing.samples_per_shard or num_bytes + added > packing.shard_bytes):
            shards.append([])
            num_bytes = 0
        shards[-1].append(int(number))
        num_bytes += added
    return shards


def _shard(number: int, chosen: list[int], rows: Sequence[Row], out: Path, packing: Packing) -> dict[str, Any]:
    """Makes one shard, unless it is there; -> its name, samples and dropped rows."""
    path = out / f"shard-{number:06d}.tar"
    said = out / _WORK / f"{path.stem}.json"
    found = _read_json(said)
    if found is not None and (path.exists() or not found["samples"]):
        return found
    partial, count, dropped = path.with_suffix(".tar.partial"), 0, []
    with tarfile.open(partial, "w", format=tarfile.PAX_FORMAT) as tar:
        for row in sorted(chosen) if not packing.shuffle else chosen:
            try:
                add_sample(tar, f"{row:09d}", _members(rows[row], packing))
                count += 1
            except Unusable as fault:
                dropped.append({"row": row, "image": str(rows[row].image), "reason": fault.reason})
    found = {"name": path.name, "samples": count, "dropped": dropped}
    _write(said, to_json(found))
    if count:
        partial.replace(path)
    else:
        partial.unlink()
    return found


def _members(row: Row, packing: Packing) -> dict[str, bytes]:
    if not row.caption.strip():
        raise Unusable("empty_caption")
    try:
        data = row.image.read_bytes()
    except OSError:
        raise Unusable("no_image") from None
    if not data:
        raise Unusable("decode_error")
    extension = image_extension(row.image)
    if packing.max_side:
        image = read_image(data, 2**40)
        if max(image.size) > packing.max_side:
            image.thumbnail((packing.max_side, packing.max_side), Image.Resampling.LANCZOS)
            stream = io.BytesIO()
            image.save(stream, "JPEG", quality=95)
            data, extension = stream.getvalue(), "jpg"
    try:
        return {extension: data, "txt": row.caption.strip().encode()}
    except UnicodeEncodeError:
        raise Unusable("not_utf8") from None


def _finish(out: Path, made: Sequence[dict[str, Any]], identity: str, threads: int) -> Made:
    whole = [shard for shard in made if shard["samples"]]
    lost = [row for shard in made for row in shard["dropped"]]
    if not whole:
        raise DataError(f"not one usable pair among {len(lost):,}: {dict(Counter(row['reason'] for row in lost))}")
    _write(out / SIZES, json.dumps({shard["name"]: shard["samples"] for shard in whole}, indent=1) + "\n")
    _write(out / "dropped.jsonl", "".join(to_json(row) + "\n" for row in sorted(lost, key=lambda row: row["row"])))
    build_index([str(out / shard["name"]) for shard in whole], out / NAME, store=LOCAL, threads=threads)
    found = Made(sum(shard["samples"] for shard in whole), len(whole), dict(Counter(row["reason"] for row in lost)))
    content = {"samples": found.num_samples, "shards": found.num_shards, "dropped": found.dropped}
    write_marker(out, {"kind": _KIND, "identity": identity, **content})
    shutil.rmtree(out / _WORK)
    return found


def _write(path: Path, text: str) -> None:
    """Whole or not at all."""
    partial = path.with_name(path.name + ".partial")
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as fault:
        raise DataError(f"{path} cannot be read ({fault}); remove {path.parent.parent} and start again") from fault
