"""How many samples others say that a shard holds: `sizes.json` of a folder, img2dataset's `00000_stats.json`."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from clipscale.data.store import PIPE, Store, is_remote
from clipscale.errors import ClipscaleError

SIZES = "sizes.json"
STATS = "_stats.json"


def stated_counts(paths: Iterable[str], store: Store) -> dict[str, tuple[int, str]]:
    """path -> (samples, the name of the file that says so), for the shards of which any file says anything.

    `sizes.json` maps file names to counts; `<shard>_stats.json` beside a shard has its count as `successes`. What is no
    such file (another tool's JSON of that name) is passed over.
    """
    found: dict[str, tuple[int, str]] = {}
    sizes: dict[str, dict[str, Any]] = {}
    stats: dict[str, set[str]] = {}
    for path in paths:
        if path.startswith(PIPE):
            continue
        folder, _, name = path.rpartition("/")
        if folder not in sizes:
            sizes[folder] = _json(f"{folder}/{SIZES}" if folder else SIZES, store)
            stats[folder] = _names(folder, store)
        own = path.removesuffix(".tar") + STATS
        count, where = sizes[folder].get(name), SIZES
        if not isinstance(count, int) and own.rpartition("/")[2] in stats[folder]:
            count, where = _json(own, store).get("successes"), own.rpartition("/")[2]
        if isinstance(count, int):
            found[path] = (count, where)
    return found


def _names(folder: str, store: Store) -> set[str]:
    """Names of img2dataset's statistics in a folder; a web server cannot list them."""
    if not is_remote(folder + "/"):
        return {path.name for path in Path(folder or ".").glob(f"*{STATS}")}
    if folder.startswith(("http://", "https://")):
        return set()
    try:
        return {address.rpartition("/")[2] for address in store.glob(f"{folder}/*{STATS}")}
    except ClipscaleError:
        return set()


def _json(path: str, store: Store) -> dict[str, Any]:
    try:
        found = json.loads(store.read_text(path) or "{}")
    except (ValueError, ClipscaleError):  # what is wrong with a server is told where its shards are fetched
        return {}
    return found if isinstance(found, dict) else {}
