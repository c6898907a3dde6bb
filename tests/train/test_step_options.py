"""What may be switched on around the step: dropout of every kind, torch.compile, bf16; and what a step sends."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from clipscale.config.schema import Model, SoftmaxLoss
from clipscale.dist.engine import PlainEngine
from clipscale.dist.world import World
from clipscale.errors import DivergedError
from clipscale.model.towers import Towers, build_towers
from clipscale.step import StepResult, StepShape, train_step
from clipscale.train import build
from tests.helpers.engines import make_engine
from tests.helpers.ranks import run_ranks
from tests.train.problem import NUM_PAIRS, batch, sgd

ALONE = World(0, 1, torch.device("cpu"))
LOSS = SoftmaxLoss("softmax")
TEXT = {"context_length": 12, "vocab_size": 50, "width": 16, "heads": 2, "layers": 2}
VISION = {"image_size": 16, "patch_size": 4, "width": 16, "layers": 2, "head_width": 8}
# A timm tower with stochastic depth and dropout before its head.
DROPPING = {
    "image_size": 16,
    "timm_model_name": "test_vit",
    "timm_kwargs": {"img_size": 16, "patch_size": 4, "init_values": None},
    "timm_drop": 0.3,
    "timm_drop_path": 0.4,
}


def make(vision: dict[str, Any], *, half: torch.dtype | None = None, **options: Any) -> Towers:
    torch.manual_seed(3)
    model = Model(embed_dim=8, vision_cfg=vision, text_cfg=TEXT, **options)
    return build_towers(model, LOSS, half=half)[0]


def one_step(towers: Towers, shape: StepShape, world: World = ALONE) -> tuple[StepResult, dict[str, Tensor]]:
    """-> the result, and what SGD at a rate of 1 subtracted."""
    optimizer = sgd(towers, 1.0)
    engine = PlainEngine(towers, optimizer, world, sparse_rows=not shape.always_graph)
    before = {name: parameter.detach().clone() for name, parameter in towers.named_parameters()}
    images, tokens = (rows.chunk(world.size)[world.rank] for rows in batch())
    torch.manual_seed(7)
    result = train_step(engine, images, tokens, world, shape=shape, loss=build._loss(LOSS), lr_factor=1.0)
    return result, {name: before[name] - parameter.detach() for name, parameter in towers.named_parameters()}


@pytest.mark.parametrize("chunk", [1, 5, NUM_PAIRS])
def test_stochastic_depth_and_dropout_are_replayed(chunk: int) -> None:
    """Against graphs that were never left: one pass, one draw of random numbers."""
    uncached = StepShape(chunk, 3, keep_image_graphs=NUM_PAIRS, keep_text_graphs=NUM_PAIRS)
    wanted, wanted_updates = one_step(make(DROPPING), uncached)
    found, found_updates = one_step(make(DROPPING), StepShape(chunk, 3, check_replay=True))
    assert found.loss == wanted.loss
    for name, update in wanted_updates.items():
        torch.testing.assert_close(found_updates[name], update, rtol=1e-4, atol=1e-5, msg=f"{name} differs")


def test_teeth_that_tower_does_draw_random_numbers() -> None:
    towers = make(DROPPING)
    images = batch()[0]
    assert not torch.equal(towers("image", images)[0], towers("image", images)[0])


def test_a_tower_with_random_numbers_of_its_own_is_found_out() -> None:
    towers = make(VISION)
    own = torch.Generator().manual_seed(1)
    towers.visual.register_forward_hook(lambda _module, _inputs, out: out + torch.randn(out.shape, generator=own))
    with pytest.raises(DivergedError, match="image tower gave other features in its replay"):
        one_step(towers, StepShape(5, 5, check_replay=True))


def test_compiled_towers_take_the_same_step() -> None:
    """By the backend that traces and differentiates as the usual one does, without its minutes of compiling C++."""
    compile_quickly: Callable[..., None] = partial(nn.Module.compile, backend="aot_eager")
    wanted, wanted_updates = one_step(make(VISION), StepShape(8, NUM_PAIRS))
    with patch.object(nn.Module, "compile", lambda module, **options: compile_quickly(module, **options)):
        found, found_updates = one_step(make(VISION, compile=True), StepShape(8, NUM_PAIRS, always_graph=True))
        one_step(
            make(VISION | {"patch_dropout": 0.5}, compile=True),
            StepShape(8, NUM_PAIRS, always_graph=True, check_replay=True),
        )
    assert found.loss == pytest.approx(wanted.loss, rel=1e-5)
    for name, update in wanted_updates.items():
        torch.testing.assert_close(found_updates[name], update, rtol=1e-3, atol=1e-4, msg=f"{name} differs")


def test_bf16_towers_give_fp32_features_and_nearly_the_same_loss() -> None:
    towers = make(VISION, half=torch.bfloat16)
    assert towers("image", batch()[0])[0].dtype == torch.float32
    found, updates = one_step(towers, StepShape(5, 3, check_replay=True))
    wanted, _ = one_step(make(VISION), StepShape(5, 3))
    assert found.loss != wanted.loss
    assert found.loss == pytest.approx(wanted.loss, rel=0.05)
    assert {update.dtype for update in updates.values()} == {torch.float32}


def steps_until_applied(world: World, name: str, half: torch.dtype | None) -> dict[str, Any]:
    """Communicates. Steps of SGD at 1e-3 with the norm clipped to 1, until one is applied."""
    towers = make(VISION, half=half)
    engine, _, _ = make_engine(
        world,
        name,
        towers,
        lambda model: sgd(model, 1e-3),
        rank_batch=NUM_PAIRS // world.size,
        clip_norm=1.0,
        loss_scaling=half == torch.float16,
    )
    before = {key: weight.clone() for key, weight in engine.weights().items()}
    images, tokens = (rows.chunk(world.size)[world.rank] for rows in batch())
    shape, loss = StepShape(5, 3), build._loss(LOSS)
    skipped = 0
    while skipped < 30:
        result = train_step(engine, images, tokens, world, shape=shape, loss=loss, lr_factor=1.0)
        after = engine.weights()
        if result.applied:
            break
        assert all(torch.equal(before[key], after[key]) for key in before)
        skipped += 1
    moved = torch.stack([(after[key] - before[key]).norm() for key in before]).norm().item()
    return {"loss": result.loss, "grad_norm": result.grad_norm, "moved": moved, "skipped": skipped}


def both_halves(world: World) -> dict[tuple[str, str], dict[str, Any]]:
    halves = {"fp32": None, "fp16": torch.float16, "bf16": torch.bfloat16}
    names = ("plain", "ZeRO-0", "ZeRO-1", "ZeRO-2", "ZeRO-3", "hsdp-2")
    return {(name, key): steps_until_applied(world, name, half) for name in names for key, half in halves.items()}


def test_half_precision_follows_fp32_under_every_engine() -> None:
    """The first factors overflow fp16: these steps leave the weights alone, and the factor halves."""
    for found in run_ranks(2, both_halves, timeout_s=120):
        for (name, precision), measured in found.items():
            wanted = found[name, "fp32"]
            assert measured["loss"] == pytest.approx(wanted["loss"], rel=1e-2), (name, precision)
            assert measured["grad_norm"] == pytest.approx(wanted["grad_norm"], rel=0.05), (name, precision)  # unscaled
            assert measured["moved"] == pytest.approx(1e-3, rel=1e-3), (name, precision)  # rate times the clipped norm
            assert (measured["skipped"] > 0) == (precision == "fp16"), (name, precision)


class Traffic(TorchDispatchMode):
    """Counts collectives by name and by the elements they carry."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[tuple[str, int]] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        if func.namespace == "c10d":
            tensors = args[0] if isinstance(args[0], list | tuple) else [args[0]]
            self.seen[func.overloadpacket.__name__.strip("_"), sum(tensor.numel() for tensor in tensors)] += 1
        return func(*args, **(kwargs or {}))


def count_traffic(world: World, shape: StepShape) -> Counter[tuple[str, int]]:
    with Traffic() as traffic:
        one_step(make(VISION), shape, world)
    return traffic.seen


def test_a_step_gathers_features_once_and_reduces_gradients_once() -> None:
    towers = make(VISION)
    weights = sum(parameter.numel() for parameter in towers.parameters())
    features = NUM_PAIRS * 8  # of one tower, over all ranks
    for seen in run_ranks(2, count_traffic, StepShape(2, 3)):
        gathers = {size: count for (name, size), count in seen.items() if "gather" in name}
        reductions = {size: count for (name, size), count in seen.items() if "reduce" in name}
        assert gathers.pop(features) == 2  # one a tower
        assert reductions.pop(weights) == 1  # four chunks of images and three of captions
        assert max(*gathers, *reductions) <= 2 * NUM_PAIRS  # log-sums and a few scalars
