"""LAMB and LARS under every engine against float64: the same step however the layers are cut up."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch import Tensor

from clipscale.config.optim import Lamb as LambTable
from clipscale.dist.engine import Engine
from clipscale.dist.world import World
from clipscale.optim import layerwise, segments
from clipscale.optim.groups import treatments
from clipscale.optim.lamb import Lamb
from clipscale.optim.lars import Lars
from clipscale.optim.layerwise import LayerwiseOptimizer, trust_ratios
from clipscale.optim.segments import Layout
from tests.helpers.engines import make_engine
from tests.helpers.ranks import run_ranks
from tests.optim.layers import DECAY, EPS, LR, SHAPES, STEPS, Awkward, reference

ENGINES = {
    1: ["plain", "ZeRO-0", "ZeRO-1", "ZeRO-2", "ZeRO-3", "hsdp-1"],
    2: ["plain", "ZeRO-0", "ZeRO-1", "ZeRO-2", "ZeRO-3", "hpZ-2", "hsdp-1", "hsdp-2", "ZeRO-2 host", "ZeRO-3 host"],
    3: ["plain", "ZeRO-1", "ZeRO-2", "ZeRO-3", "hsdp-3"],
    4: ["plain", "ZeRO-1", "ZeRO-2", "ZeRO-3", "hpZ-2", "hsdp-2", "hsdp-4"],
}


def make_optimizer(kind: str, model: torch.nn.Module) -> LayerwiseOptimizer:
    treated = treatments(model, LambTable(kind="lamb", lr=LR, weight_decay=DECAY), {})
    if kind == "lamb":
        return Lamb(model, treated, LR, eps=EPS)
    return Lars(model, treated, LR, trust_coefficient=0.02)


def engine_for(world: World, kind: str, name: str) -> tuple[Engine, Layout]:
    engine, _, layout = make_engine(world, name, Awkward(), lambda model: make_optimizer(kind, model))
    return engine, layout


def five_steps(world: World, kind: str, name: str) -> dict[str, Tensor]:
    """Communicates. Each step's gradient comes in two halves, as two chunks would give it."""
    engine, _ = engine_for(world, kind, name)
    for step in range(1, STEPS + 1):
        for last in (False, True):
            value, _ = engine.forward("image", torch.tensor([step, world.rank]))
            engine.backward(value.sum() / 2, last=last)
        engine.step(1.0)
    return {name: weight.clone() for name, weight in engine.weights().items()}


def all_five_steps(world: World, names: list[str]) -> dict[tuple[str, str], dict[str, Tensor]]:
    return {(kind, name): five_steps(world, kind, name) for kind in ("lamb", "lars") for name in names}


def errors(found: dict[str, Tensor], wanted: dict[str, np.ndarray]) -> dict[str, float]:
    """Relative to each layer's norm; absolute where that is zero."""
    apart = {}
    for name, weight in wanted.items():
        norm = np.linalg.norm(weight) or 1.0
        apart[name] = float(np.linalg.norm(found[name].double().numpy() - weight) / norm)
    return apart


@pytest.mark.parametrize("size", ENGINES)
def test_five_steps_are_those_of_float64(size: int) -> None:
    wanted = {kind: reference(kind, size) for kind in ("lamb", "lars")}
    for rank, everything in enumerate(run_ranks(size, all_five_steps, ENGINES[size], timeout_s=120)):
        for (kind, name), found in everything.items():
            wrong = {layer: error for layer, error in errors(found, wanted[kind]).items() if not error < 1e-6}
            assert not wrong, (kind, name, rank, wrong)


# ---- teeth ------------------------------------------------------------------------------------------------------


def _keep_to_oneself(self: Layout, values: Tensor) -> Tensor:  # noqa: ARG001
    return values


def _one_ratio_per_partition(model: Any, zero: Any, _stage: int) -> Layout:
    """What an ordinary LAMB does under ZeRO: it takes the slice that it is given for a layer."""
    layout = segments.zero_1_2(model, zero, torch.distributed.group.WORLD)
    holders = {id(segment.holder): segment.holder for segment in layout.segments}
    layer = layout.names.index("large.weight")
    pieces = tuple(segments.Segment(layer, 0, holder, 0, holder.numel()) for holder in holders.values())
    return Layout(layout.names, layout.shapes, pieces)


def _ratio_zero(weights: Tensor, updates: Tensor, *_: float) -> Tensor:
    return weights / updates.clamp(min=1e-12)


def _decay_after_the_norm(self: LayerwiseOptimizer, *arguments: Any) -> None:
    """Left out altogether: the norm, too, is another one then."""


PLANTS: dict[str, tuple[str, Any, str, Any]] = {
    "norms not summed over ranks, ZeRO-1": ("ZeRO-1", Layout, "sum_over_ranks", _keep_to_oneself),
    "norms not summed over ranks, ZeRO-3": ("ZeRO-3", Layout, "sum_over_ranks", _keep_to_oneself),
    "norms not summed over ranks, hsdp": ("hsdp-2", Layout, "sum_over_ranks", _keep_to_oneself),
    "one ratio per partition": ("ZeRO-2", segments, "of_zero", _one_ratio_per_partition),
    "zero layers cannot move": ("plain", layerwise, "trust_ratios", _ratio_zero),
    "decay not part of the update": ("plain", LayerwiseOptimizer, "_decay", _decay_after_the_norm),
}


def with_plant(world: World, plant: str) -> dict[str, Tensor]:
    name, owner, attribute, fault = PLANTS[plant]
    with patch.object(owner, attribute, fault):
        return five_steps(world, "lamb", name)


@pytest.mark.parametrize("plant", PLANTS)
def test_teeth(plant: str) -> None:
    found = run_ranks(2, with_plant, plant)[0]
    worst = max(error if np.isfinite(error) else 1.0 for error in errors(found, reference("lamb", 2)).values())
    assert worst > 1e-4


# ---- pieces -----------------------------------------------------------------------------------------------------


def test_trust_ratios_by_hand() -> None:
    weights, updates = torch.tensor([3.0, 0.0, 2.0, 0.0, 9.0]), torch.tensor([1.5, 4.0, 0.0, 0.0, 0.5])
    assert trust_ratios(weights, updates, 1.0, 0.0).tolist() == [2.0, 1.0, 1.0, 1.0, 18.0]
    assert trust_ratios(weights, updates, 0.5, 0.0).tolist() == [1.0, 1.0, 1.0, 1.0, 9.0]
    assert trust_ratios(weights, updates, 1.0, 10.0).tolist() == [2.0, 1.0, 1.0, 1.0, 10.0]


def layouts(world: World, name: str) -> dict[str, Any]:
    """Communicates. Where this rank holds what, and the whole layers put together from all ranks' pieces."""
    _, layout = engine_for(world, "lamb", name)
    covered: dict[str, list[tuple[int, int]]] = {}
    for segment in layout.segments:
        covered.setdefault(layout.names[segment.layer], []).append((segment.offset, segment.length))
    return {"covered": covered, "whole": layout.whole(lambda holder: holder.detach())}


@pytest.mark.parametrize("name", ["plain", "ZeRO-1", "ZeRO-2", "ZeRO-3", "hpZ-2", "hsdp-2"])
def test_every_element_of_every_layer_has_one_place(name: str) -> None:
    everybodys = run_ranks(2, layouts, name)
    weights = dict(Awkward().named_parameters())
    copies = 2 if name == "plain" else 1
    for layer, shape in SHAPES.items():
        elements = [
            element
            for each in everybodys
            for offset, length in each["covered"].get(layer, [])
            for element in range(offset, offset + length)
        ]
        assert sorted(elements) == sorted(list(range(shape.numel())) * copies), layer
        for each in everybodys:
            assert torch.equal(each["whole"][layer], weights[layer].detach()), layer
    if copies == 1:  # the cases that this is about
        assert sum("large.weight" in each["covered"] for each in everybodys) == 2 or name.startswith("ZeRO-1")


def counted_sums(world: World, name: str) -> int:
    """Communicates. How often the optimizer's step asks the other ranks."""
    engine, _ = engine_for(world, "lamb", name)
    calls = 0
    summed = Layout.sum_over_ranks

    def count(self: Layout, values: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return summed(self, values)

    value, _ = engine.forward("image", torch.tensor([1, world.rank]))
    engine.backward(value.sum(), last=True)
    with patch.object(Layout, "sum_over_ranks", count):
        engine.step(1.0)
    return calls


@pytest.mark.parametrize("name", ["ZeRO-2", "ZeRO-3", "hsdp-2"])
def test_one_sum_a_step(name: str) -> None:
    assert run_ranks(2, counted_sums, name) == [1, 1]


def test_the_whole_library_s_lamb_agrees_where_nothing_is_cut() -> None:
    """timm's LAMB, on matrices alone, with its own clipping switched off."""
    import timm.optim

    torch.manual_seed(0)
    mine, theirs = (torch.nn.Linear(6, 4, bias=False) for _ in range(2))
    theirs.load_state_dict(mine.state_dict())
    table = LambTable(kind="lamb", lr=LR, weight_decay=DECAY)
    ours = Lamb(mine, treatments(mine, table, {}), LR, eps=EPS)
    reference_lamb = timm.optim.Lamb(
        theirs.parameters(), lr=LR, betas=(0.9, 0.999), eps=EPS, weight_decay=DECAY, max_grad_norm=None
    )
    for step in range(5):
        gradient = torch.randn(4, 6, generator=torch.Generator().manual_seed(step))
        for model, optimizer in ((mine, ours), (theirs, reference_lamb)):
            model.weight.grad = gradient.clone()
            optimizer.step()
    torch.testing.assert_close(mine.weight, theirs.weight, rtol=1e-6, atol=1e-7)
