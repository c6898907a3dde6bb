"""Groups, bounds and rates, by hand."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from clipscale.config.optim import AdamW, Muon, Rule
from clipscale.config.schema import Loss, Model, SigmoidLoss, SoftmaxLoss
from clipscale.dist.engine import Engine, PlainEngine
from clipscale.dist.world import World
from clipscale.errors import ConfigError
from clipscale.model.towers import Towers, build_towers
from clipscale.optim.groups import (
    LOG_SCALE,
    LOG_SCALE_BOUNDS,
    check_groups,
    clamp_after_step,
    parameter_groups,
    treatments,
)
from tests.helpers.ranks import run_ranks

SMALL = Model(
    embed_dim=8,
    vision_cfg={"image_size": 16, "patch_size": 8, "width": 16, "layers": 1, "head_width": 8},
    text_cfg={"context_length": 8, "vocab_size": 20, "width": 16, "heads": 2, "layers": 1},
)


def towers(loss: Loss | None = None, **options: Any) -> Towers:
    return build_towers(replace(SMALL, **options), loss or SoftmaxLoss("softmax"))[0]


def groups_of(model: nn.Module, *, lr: float = 0.1, weight_decay: float = 0.2, **recipe: Any) -> list[dict[str, Any]]:
    table = AdamW(kind="adamw", lr=lr, weight_decay=weight_decay, **recipe)
    depths = model.depths() if isinstance(model, Towers) else {}
    return parameter_groups(model, treatments(model, table, depths), lr)


@pytest.mark.parametrize("loss", [SoftmaxLoss("softmax"), SigmoidLoss("sigmoid")])
@pytest.mark.parametrize("lock", [(), ("image",), ("text",)])
def test_every_trained_parameter_is_in_exactly_one_group(loss: Loss, lock: tuple[str, ...]) -> None:
    model = towers(loss, lock=lock)
    groups = groups_of(model)
    grouped = [id(parameter) for group in groups for parameter in group["params"]]
    trained = [id(parameter) for parameter in model.parameters() if parameter.requires_grad]
    assert len(grouped) == len(set(grouped))
    assert set(grouped) == set(trained)
    assert len(trained) < len(list(model.parameters())) or not lock


def test_which_parameter_decays() -> None:
    model = towers()
    groups = {group["name"].partition(",")[0]: group for group in groups_of(model)}
    named = dict(model.named_parameters())
    names = {
        key: [name for name, parameter in named.items() if any(parameter is other for other in group["params"])]
        for key, group in groups.items()
    }
    assert names["log_scale"] == [LOG_SCALE]
    assert all(named[name].ndim >= 2 for name in names["matrices"])
    assert all(named[name].ndim == 1 for name in names["vectors"])
    assert "visual.ln_post.weight" in names["vectors"]
    assert "visual.class_embedding" in names["vectors"]
    assert "text.token_embedding.weight" in names["matrices"]
    assert "visual.proj" in names["matrices"]
    decay = {key: group["weight_decay"] for key, group in groups.items()}
    assert decay == {"matrices": 0.2, "vectors": 0.0, "log_scale": 0.0}
    assert {group["lr"] for group in groups.values()} == {group["base_lr"] for group in groups.values()} == {0.1}
    assert groups["log_scale"]["clamp"] == (0.0, math.log(100))


@pytest.mark.parametrize(
    "module", [nn.Linear(2, 2, bias=False), nn.LayerNorm(2), nn.Linear(2, 2).requires_grad_(False)]
)
def test_no_group_is_empty(module: nn.Module) -> None:
    groups = groups_of(module)
    assert all(group["params"] for group in groups)
    assert len(groups) == len({parameter.ndim for parameter in module.parameters() if parameter.requires_grad})


def log_scale_after(world: World, kind: str, start: float, gradient: float) -> tuple[float, float]:
    """Communicates. One SGD step on the log scale alone; -> (its value, whether its neighbours stayed in no bounds)."""
    model = towers(SigmoidLoss("sigmoid"))
    with torch.no_grad():
        model.logits.log_scale.fill_(start)
        model.logits.bias.fill_(-200.0)
    optimizer = torch.optim.SGD(groups_of(model, lr=1.0, weight_decay=0.5), lr=1.0)
    optimizer.register_step_post_hook(clamp_after_step)
    engine: Engine
    if kind == "plain":
        engine = PlainEngine(model, optimizer, world)
    else:
        from clipscale.dist.deepspeed_engine import DeepSpeedEngine, Zero

        engine = DeepSpeedEngine(model, optimizer, world, rank_batch=1, zero=Zero(int(kind[-1])))
    _, scalars = engine.forward("text", torch.zeros(1, 8, dtype=torch.long))
    engine.backward((scalars * torch.tensor([gradient, 0.0])).sum(), last=True)
    engine.step(1.0)
    weights = engine.weights()
    return weights[LOG_SCALE].item(), weights["logits.bias"].item()


CASES = [(4.0, -3.0), (0.5, 2.0), (1.0, 0.25), (5.0, 0.0), (4.7, 0.2)]  # start, gradient
KINDS = ["plain", "ZeRO-0", "ZeRO-1", "ZeRO-2", "ZeRO-3"]


def all_log_scales(world: World) -> dict[tuple[str, float, float], tuple[float, float]]:
    return {(kind, *case): log_scale_after(world, kind, *case) for kind in KINDS for case in CASES}


def test_the_log_scale_is_clamped_after_the_step_under_every_engine() -> None:
    low, high = LOG_SCALE_BOUNDS
    for everybodys in run_ranks(2, all_log_scales):
        for (kind, start, gradient), (found, bias) in everybodys.items():
            wanted = min(max(start - gradient, low), high)
            assert found == pytest.approx(wanted, abs=1e-6), (kind, start, gradient)
            assert bias == -200.0, kind


def test_above_the_bound_the_scale_can_come_back() -> None:
    """A clamp inside the forward would leave it without a gradient there."""
    model = nn.Module()
    model.logits = nn.Module()
    model.logits.log_scale = nn.Parameter(torch.tensor([4.7]))
    optimizer = torch.optim.SGD(groups_of(model, lr=1.0, weight_decay=0.0), lr=1.0)
    optimizer.register_step_post_hook(clamp_after_step)
    (2 * model.logits.log_scale.sum()).backward()
    optimizer.step()
    assert model.logits.log_scale.item() == pytest.approx(2.7)


# ---- rules, towers and depth ------------------------------------------------------------------------------------


def rates(model: nn.Module, **recipe: Any) -> dict[str, float]:
    """Each parameter's rate, from the groups."""
    by_id = {
        id(parameter): group["base_lr"] for group in groups_of(model, lr=1.0, **recipe) for parameter in group["params"]
    }
    return {name: by_id[id(parameter)] for name, parameter in model.named_parameters() if parameter.requires_grad}


def test_each_tower_and_each_layer_has_its_rate() -> None:
    """One block per tower: the projection is on top, the block one below, what comes before it two below."""
    found = rates(towers(), image_lr_scale=0.5, text_lr_scale=2.0, image_layer_decay=0.1, text_layer_decay=0.5)
    assert found["visual.proj"] == found["visual.ln_post.weight"] == 0.5
    assert found["visual.transformer.resblocks.0.attn.in_proj_weight"] == pytest.approx(0.05)
    assert found["visual.conv1.weight"] == found["visual.class_embedding"] == pytest.approx(0.005)
    assert found["visual.positional_embedding"] == found["visual.ln_pre.bias"] == pytest.approx(0.005)
    assert found["text.text_projection"] == found["text.ln_final.weight"] == 2.0
    assert found["text.transformer.resblocks.0.mlp.c_fc.weight"] == 1.0
    assert found["text.token_embedding.weight"] == found["text.positional_embedding"] == 0.5
    assert found[LOG_SCALE] == 1.0


def test_vectors_may_have_a_rate_of_their_own() -> None:
    found = rates(towers(), vector_lr_scale=0.01, image_lr_scale=0.5)
    assert found["visual.conv1.weight"] == 0.5
    assert found["visual.class_embedding"] == found["visual.ln_post.bias"] == pytest.approx(0.005)
    assert found[LOG_SCALE] == found["text.ln_final.weight"] == pytest.approx(0.01)


def test_the_first_rule_that_fits_counts() -> None:
    model = towers()
    rules = (
        Rule("visual.conv1.*", lr_scale=0.1),
        Rule("visual.*", lr_scale=0.5, weight_decay=0.7),
        Rule("*.bias", weight_decay=0.3),
    )
    found = treatments(model, AdamW(kind="adamw", lr=1, rules=rules), {})
    assert (found["visual.conv1.weight"].lr_scale, found["visual.conv1.weight"].weight_decay) == (0.1, 0.2)
    assert (found["visual.ln_post.bias"].lr_scale, found["visual.ln_post.bias"].weight_decay) == (0.5, 0.7)
    assert (found["text.ln_final.bias"].lr_scale, found["text.ln_final.bias"].weight_decay) == (1.0, 0.3)
    assert (found["text.ln_final.weight"].lr_scale, found["text.ln_final.weight"].weight_decay) == (1.0, 0.0)


@pytest.mark.parametrize(
    ("rules", "said"),
    [
        ((Rule("vision.*"),), "'vision.*' fits no parameter; names look like "),
        ((Rule("text.*"),), "'text.*' fits only locked parameters"),
        ((Rule("visual.*"), Rule("visual.proj")), "'visual.proj' comes too late: 'visual.*' above takes all it fits"),
    ],
)
def test_a_rule_that_changes_nothing_is_an_error(rules: tuple[Rule, ...], said: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(said)):
        treatments(towers(lock=("text",)), AdamW(kind="adamw", lr=1, rules=rules), {})


def test_left_over_and_doubled_parameters_are_named() -> None:
    model = nn.Linear(2, 2)
    groups = [
        {"name": "a", "params": [model.weight]},
        {"name": "b", "params": [model.weight]},
        {"name": "c", "params": []},
    ]
    with pytest.raises(ConfigError) as caught:
        check_groups(model, groups)
    for said in ("weight is in 2 groups", "bias is in 0 groups", "group 'c' is empty"):
        assert said in str(caught.value)


def test_muon_leaves_tables_to_adamw() -> None:
    found = treatments(towers(), Muon(kind="muon", lr=1), {})
    by_adamw = {name for name, treatment in found.items() if treatment.kind == "matrices" and not treatment.adapt}
    assert by_adamw == {"text.token_embedding.weight", "text.positional_embedding", "visual.positional_embedding"}


TIMM = {"timm_model_name": "vit_tiny_patch16_224", "image_size": 32}


def test_a_timm_trunk_knows_its_layers() -> None:
    model = towers(vision_cfg=TIMM)
    depths = {name: above for name, (tower, above) in model.depths().items() if tower == "image"}
    assert depths["visual.trunk.patch_embed.proj.weight"] == depths["visual.trunk.pos_embed"] == max(depths.values())
    blocks = [depths[f"visual.trunk.blocks.{block}.mlp.fc1.weight"] for block in range(12)]
    assert blocks == list(range(blocks[0], blocks[0] - 12, -1))
    assert depths["visual.head.proj.weight"] == 0
    assert len(depths) == len(list(model.visual.named_parameters()))


@pytest.mark.parametrize(
    ("layers", "trained"),
    [
        (0, set()),
        (1, {"visual.proj", "visual.ln_post.weight", "visual.ln_post.bias"}),
    ],
)
def test_the_top_of_a_locked_tower_may_be_trained(layers: int, trained: set[str]) -> None:
    model = towers(lock=("image",), unlock_image_layers=layers)
    found = {name for name, weight in model.named_parameters() if weight.requires_grad and name.startswith("visual.")}
    assert found == trained
    assert model.is_trained("image") == bool(trained)
    assert all(weight.requires_grad for weight in model.text.parameters())


def test_with_its_block_unlocked_only_the_bottom_stays() -> None:
    model = towers(lock=("image",), unlock_image_layers=2)
    kept = {name for name, weight in model.named_parameters() if not weight.requires_grad}
    assert kept == {
        "visual.class_embedding",
        "visual.positional_embedding",
        "visual.conv1.weight",
        "visual.ln_pre.weight",
        "visual.ln_pre.bias",
    }


def test_unlocking_the_whole_tower_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"model\.unlock_image_layers: found 99, wanted fewer than .* \d+ layers"):
        towers(lock=("image",), unlock_image_layers=99)


def test_unlocking_what_is_not_locked_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"model\.unlock_text_layers: the text tower is not in model\.lock"):
        towers(lock=("image",), unlock_text_layers=1)
