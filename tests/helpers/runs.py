"""Whole small runs for tests: toy shards, `configs/tiny.toml` on them, many variants on the same ranks."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
from rich.console import Console
from torch import Tensor

from clipscale.config.load import load_config
from clipscale.config.schema import Config
from clipscale.data.sources.toy import make_toy
from clipscale.dist.world import World
from clipscale.model.towers import clip_token_ids
from clipscale.train.checkpoint import Resume
from clipscale.train.loop import train

REPOSITORY = Path(__file__).parents[2]
TINY = REPOSITORY / "configs" / "tiny.toml"


@dataclass(frozen=True)
class Toy:
    """Toy shards on the disk. `settings` point a configuration at them."""

    folder: Path

    @property
    def settings(self) -> tuple[str, ...]:
        return (f'data.shards="{self.folder}/train"', f'model.token_ids="{self.folder}/tokens.json"')

    @property
    def held_out(self) -> Path:
        return self.folder / "held_out"

    def config(self, *settings: str) -> Config:
        """`configs/tiny.toml` on these shards, without evaluation, decoding between the steps."""
        return load_config(TINY, [*self.settings, "data.workers=0", "eval=[]", *settings])


def make_toy_shards(folder: Path) -> Toy:
    make_toy(folder / "toy", samples=512, shards=4, held_out=64, encode=clip_token_ids)
    return Toy(folder / "toy")


@dataclass(frozen=True)
class Outcome:
    """What a run leaves behind: one record per step, and the exported weights."""

    records: list[dict[str, Any]]
    weights: dict[str, Tensor]

    def curve(self, key: str = "loss") -> list[float]:
        return [record[key] for record in self.records if "loss" in record]

    @property
    def evaluations(self) -> list[dict[str, Any]]:
        return [dict(record) for record in self.records if "eval" in record]


def outcome(out: Path) -> Outcome:
    records = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return Outcome(records, safetensors.torch.load_file(out / "model" / "open_clip_model.safetensors"))


def run(world: World, config: Config, out: Path, *, resume: Resume = False) -> Outcome | None:
    """Communicates. Trains into `out`; the outcome on the main rank."""
    train(config, out, world, Console(quiet=True), resume=resume)
    world.barrier("the end of a run")
    return outcome(out) if world.is_main else None


def run_variants(
    world: World, toy: Toy, root: Path, variants: Mapping[str, Sequence[str]]
) -> dict[str, Outcome | None]:
    """Communicates. One run per variant, a variant being a name and its settings."""
    return {name: run(world, toy.config(*settings), root / name) for name, settings in variants.items()}
