"""What a run did with its samples: which were left out and why, and, if asked, which it trained on."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from clipscale.data.streams import Drop
from clipscale.dist.world import World
from clipscale.train.metrics import keep_steps

_MAX_SHARDS = 5  # named per reason on the screen; the metrics have them all


def gather_drops(dropped: Counter[Drop], world: World) -> Counter[Drop]:
    """Communicates. What all ranks left out."""
    return sum(map(Counter, world.gather_objects(dict(dropped))), Counter())


def to_saved(dropped: Counter[Drop]) -> list[list[Any]]:
    """For a checkpoint; `from_saved` reads it back."""
    return [[*drop, count] for drop, count in sorted(dropped.items())]


def from_saved(rows: list[list[Any]]) -> Counter[Drop]:
    return Counter({Drop(*names): count for *names, count in rows})


def as_record(dropped: Counter[Drop]) -> dict[str, dict[str, int]]:
    """reason -> shard -> samples; shards of a mixture as `source:shard`."""
    record: dict[str, dict[str, int]] = {}
    for drop, count in sorted(dropped.items()):
        record.setdefault(drop.reason, {})[f"{drop.source}:{drop.shard}" if drop.source else drop.shard] = count
    return record


def lines(dropped: Counter[Drop]) -> Iterable[str]:
    """For the screen: a line for each reason, with the shards that have the most."""
    for reason, shards in as_record(dropped).items():
        worst = sorted(shards.items(), key=lambda item: (-item[1], item[0]))
        named = ", ".join(f"{shard} {count:,}" for shard, count in worst[:_MAX_SHARDS])
        more = f", {len(worst) - _MAX_SHARDS:,} more" if len(worst) > _MAX_SHARDS else ""
        yield f"dropped {sum(shards.values()):,} samples: {reason} (shards: {named}{more})"


class KeysFile:
    """`keys.jsonl`: the keys of every step's global batch, sorted. Does nothing unless `wanted`."""

    def __init__(self, path: Path, world: World, *, wanted: bool, from_step: int) -> None:
        self._world, self._wanted, self._file = world, wanted, None
        if wanted and world.is_main:
            keep_steps(path, from_step)
            self._file = path.open("a")

    def note(self, step: int, keys: list[str]) -> None:
        """Communicates."""
        if not self._wanted:
            return
        everybodys: list[list[str]] = self._world.gather_objects(keys)
        if self._file is not None:
            record: dict[str, Any] = {"step": step, "keys": sorted(key for theirs in everybodys for key in theirs)}
            self._file.write(json.dumps(record) + "\n")
            self._file.flush()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
