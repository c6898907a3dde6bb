"""Groups, bounds and rates, by hand."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from clipscale.config.schema import Loss, Model, SigmoidLoss, SoftmaxLoss
from clipscale.dist.engine import Engine, PlainEngine
from clipscale.dist.world import World
from clipscale.model.towers import Towers, build_towers
from clipscale.optim.groups import LOG_SCALE, LOG_SCALE_BOUNDS, clamp_after_step, parameter_groups
from tests.helpers.ranks import run_ranks

SMALL = Model(
    embed_dim=8,
    vision_cfg={"image_size": 16, "patch_size": 8, "width": 16, "layers": 1, "head_width": 8},
    text_cfg={"context_length": 8, "vocab_size": 20, "width": 16, "heads": 2, "layers": 1},
)


def towers(loss: Loss | None = None, **options: Any) -> Towers:
    return build_towers(replace(SMALL, **options), loss or SoftmaxLoss("softmax"))[0]


@pytest.mark.parametrize("loss", [SoftmaxLoss("softmax"), SigmoidLoss("sigmoid")])
@pytest.mark.parametrize("lock", [(), ("image",), ("text",)])
def test_every_trained_parameter_is_in_exactly_one_group(loss: Loss, lock: tuple[str, ...]) -> None:
    model = towers(loss, lock=lock)
    groups = parameter_groups(model, lr=0.1, weight_decay=0.2)
    grouped = [id(parameter) for group in groups for parameter in group["params"]]
    trained = [id(parameter) for parameter in model.parameters() if parameter.requires_grad]
    assert len(grouped) == len(set(grouped))
    assert set(grouped) == set(trained)
    assert len(trained) < len(list(model.parameters())) or not lock


def test_which_parameter_decays() -> None:
    model = towers()
    groups = {group["name"]: group for group in parameter_groups(model, lr=0.1, weight_decay=0.2)}
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
    groups = parameter_groups(module, lr=1.0, weight_decay=0.1)
    assert all(group["params"] for group in groups)
    assert len(groups) == len({parameter.ndim for parameter in module.parameters() if parameter.requires_grad})


def log_scale_after(world: World, kind: str, start: float, gradient: float) -> tuple[float, float]:
    """Communicates. One SGD step on the log scale alone; -> (its value, whether its neighbours stayed in no bounds)."""
    model = towers(SigmoidLoss("sigmoid"))
    with torch.no_grad():
        model.logits.log_scale.fill_(start)
        model.logits.bias.fill_(-200.0)
    optimizer = torch.optim.SGD(parameter_groups(model, lr=1.0, weight_decay=0.5), lr=1.0)
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
    optimizer = torch.optim.SGD(parameter_groups(model, lr=1.0, weight_decay=0.0), lr=1.0)
    optimizer.register_step_post_hook(clamp_after_step)
    (2 * model.logits.log_scale.sum()).backward()
    optimizer.step()
    assert model.logits.log_scale.item() == pytest.approx(2.7)
