"""The average of the weights by hand, under every engine, saved and exported."""

from __future__ import annotations

from pathlib import Path

import pytest
import safetensors.torch
import torch
from torch import Tensor, nn

from clipscale.dist.world import World
from clipscale.optim.average import WeightAverage, average_weights
from tests.helpers.engines import make_engine
from tests.helpers.ranks import run_ranks
from tests.helpers.runs import Toy, run
from tests.optim.layers import SHAPES, Awkward
from tests.optim.test_layerwise import make_optimizer

ENGINES = ["plain", "ZeRO-0", "ZeRO-1", "ZeRO-2", "ZeRO-3", "hsdp-2", "ZeRO-2 host"]
DECAY = 0.7
HSDP = ("engine.kind=hsdp", "engine.shard_group=2")


def averaged(world: World, name: str, kind: str) -> tuple[list[dict[str, Tensor]], dict[str, Tensor]]:
    """Communicates. -> the weights after each of four updates, and the average after the last."""

    def optimizer_for(model: nn.Module) -> torch.optim.Optimizer:
        optimizer = make_optimizer(kind, model)
        optimizer.register_step_post_hook(WeightAverage(DECAY))
        return optimizer

    engine, optimizer, layout = make_engine(world, name, Awkward(), optimizer_for)
    path = []
    for step in range(1, 5):
        value, _ = engine.forward("image", torch.tensor([step, world.rank]))
        engine.backward(value.sum(), last=True)
        engine.step(1.0)
        path.append({key: weight.clone() for key, weight in engine.weights().items()})
    return path, average_weights(optimizer, layout)


def all_averaged(world: World) -> dict[str, tuple[list[dict[str, Tensor]], dict[str, Tensor]]]:
    return {name: averaged(world, name, "lamb") for name in ENGINES}


def test_the_average_by_hand_under_every_engine() -> None:
    for rank, found in enumerate(run_ranks(2, all_averaged, timeout_s=120)):
        for name, (path, average) in found.items():
            assert average.keys() == SHAPES.keys()
            for layer in SHAPES:
                wanted = path[0][layer].double()
                for done, weights in enumerate(path[1:], start=1):
                    decay = min(DECAY, (1 + done) / (10 + done))
                    wanted = decay * wanted + (1 - decay) * weights[layer].double()
                torch.testing.assert_close(average[layer].double(), wanted, rtol=1e-6, atol=1e-6, msg=f"{name} {rank}")
                if layer not in ("still.weight", "logits.log_scale"):
                    assert not torch.allclose(average[layer], path[-1][layer], rtol=1e-5, atol=0)


def train_with_average(world: World, toy: Toy, out: Path, steps: int, *settings: str, resume: bool = False) -> None:
    common = (
        f"train.duration.steps={steps}",
        "optim.warmup.steps=2",
        "train.ema_decay=0.9",
        "train.save_every.steps=3",
    )
    run(world, toy.config(*common, "optim.schedule.kind=constant", *settings), out, resume=resume)


def read(out: Path, folder: str = "model-ema") -> dict[str, Tensor]:
    return safetensors.torch.load_file(out / folder / "open_clip_model.safetensors")


@pytest.mark.parametrize(
    "settings",
    [
        (),
        ("engine.kind=deepspeed", "engine.zero_stage=3"),
        ("engine.kind=hsdp", "engine.shard_group=2", "optim.kind=lamb"),
    ],
)
def test_the_average_is_exported_and_goes_on_after_a_resume(
    settings: tuple[str, ...], toy: Toy, tmp_path: Path
) -> None:
    run_ranks(2, train_with_average, toy, tmp_path / "through", 6, *settings)
    run_ranks(2, train_with_average, toy, tmp_path / "cut", 3, *settings)
    run_ranks(2, resume_with_average, toy, tmp_path / "cut", 6, *settings)
    average, weights = read(tmp_path / "through"), read(tmp_path / "through", "model")
    assert average.keys() == weights.keys()
    assert any(not torch.equal(average[name], weights[name]) for name in weights)
    for name, tensor in read(tmp_path / "cut").items():
        assert torch.equal(tensor, average[name]), name


def resume_with_average(world: World, toy: Toy, out: Path, steps: int, *settings: str) -> None:
    train_with_average(world, toy, out, steps, *settings, resume=True)
