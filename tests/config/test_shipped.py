"""The configurations that come with the package: each is valid, builds the model it names, and trains when shrunk."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from clipscale.config.load import load_config
from clipscale.config.plan import make_plan
from clipscale.config.support import unsupported
from clipscale.dist.world import World
from clipscale.model.towers import Tokenize, Towers, build_towers, load_exported, resolve_architecture
from clipscale.optim.groups import treatments
from clipscale.train.checkpoint import export
from clipscale.train.loop import train
from tests.helpers.ranks import run_ranks
from tests.helpers.runs import REPOSITORY, Outcome, Toy, outcome

# Ranks, global batch and million parameters (of the towers, as open_clip's model table has them).
SHIPPED = {
    "vit_b32_32k": (8, 32_768, 151.3),
    "vit_b16_32k": (8, 32_768, 149.6),
    "vit_l14_32k_zero2": (8, 32_768, 427.6),
    "vit_h14_hsdp": (32, 65_536, 986.1),
    "siglip_b16_32k": (8, 32_768, 149.6),
    "lit_b16_16k": (4, 16_384, 149.6),
    "clipa_l16_64k": (8, 65_536, 427.5),
    "one_gpu_16k": (1, 16_384, 151.3),
}
DEMOS = ("emoji", "toy")  # `make demo DATA=emoji|toy` runs the file of that name
CONFIGS = REPOSITORY / "configs"
SMALL = (
    "model.embed_dim=32",
    "model.vision_cfg={image_size=32, patch_size=8, width=32, layers=2, head_width=16}",
    "model.text_cfg={context_length=24, width=32, heads=2, layers=2}",
    "model.pretrained=''",
    "train.global_batch=64",
    "train.duration.steps=2",
    "data.streams=8",
    "data.workers=0",
)


def test_every_file_is_listed_here() -> None:
    assert {path.stem for path in CONFIGS.glob("*.toml")} == {*SHIPPED, *DEMOS, "tiny"}


@pytest.mark.parametrize("name", SHIPPED)
def test_it_is_the_model_and_the_batch_it_says(name: str) -> None:
    ranks, batch, millions = SHIPPED[name]
    config = load_config(CONFIGS / f"{name}.toml")
    assert unsupported(config, ranks) == []
    assert config.train.global_batch == batch
    plan = make_plan(config, ranks, num_samples=12_800_000)
    assert config.data.streams % ranks == 0
    assert plan.rank_batch * ranks == batch
    assert 0 < plan.warmup_samples < plan.total_samples / 2
    with torch.device("meta"):
        towers = Towers(resolve_architecture(config.model), config.model, config.loss)
    found = sum(weight.numel() for weight in towers.parameters()) / 1e6
    assert found == pytest.approx(millions, abs=0.1)
    treated = treatments(towers, config.optim, towers.depths())
    assert treated.keys() == {key for key, weight in towers.named_parameters() if weight.requires_grad}


@pytest.mark.parametrize("name", SHIPPED)
def test_it_opens_with_its_purpose_hardware_and_source(name: str) -> None:
    lines = (CONFIGS / f"{name}.toml").read_text().splitlines()
    comment = " ".join(line for line in lines[: lines.index("")] if line.startswith("#"))
    assert "Hardware:" in comment
    assert "Source:" in comment


def train_shrunk(world: World, toy: Toy, out: Path) -> dict[str, Outcome | None]:
    found: dict[str, Any] = {}
    for name in SHIPPED:
        path = CONFIGS / f"{name}.toml"
        group = ["engine.shard_group=2"] if load_config(path).engine.kind == "hsdp" else []
        shards = [f"data.shards='{toy.folder}/train'", f"model.token_ids='{toy.folder}/tokens.json'"]
        train(load_config(path, [*SMALL, *shards, *group]), out / name, world, Console(quiet=True))
        world.barrier("the end of a run")
        found[name] = outcome(out / name) if world.is_main else None
    return found


def test_shrunk_it_trains(toy: Toy, tmp_path: Path) -> None:
    for name, run in run_ranks(2, train_shrunk, toy, tmp_path, timeout_s=150)[0].items():
        assert len(run.curve()) == 2, name
        assert all(record["applied"] for record in run.records), name


@pytest.mark.parametrize("name", DEMOS)
def test_a_demos_model_builds_and_comes_back_from_its_export(name: str, tmp_path: Path) -> None:
    """Its data are not here, so the token table is whole."""
    config = load_config(CONFIGS / f"{name}.toml", ["model.token_ids=''"])
    towers, architecture = build_towers(config.model, config.loss)
    assert towers.trims_text
    assert set(treatments(towers, config.optim, towers.depths())) == {name for name, _ in towers.named_parameters()}
    export(tmp_path / "model", towers.state_dict(), config.model, architecture)
    loaded, _, size = load_exported(tmp_path / "model")
    images = torch.randint(0, 256, (2, 3, size, size), dtype=torch.uint8)
    tokens = Tokenize(config.model, architecture)(["badger", "badger, animal mammal"])
    with torch.no_grad():
        for tower, inputs in (("image", images), ("text", tokens)):
            torch.testing.assert_close(loaded.eval()(tower, inputs)[0], towers.eval()(tower, inputs)[0])
