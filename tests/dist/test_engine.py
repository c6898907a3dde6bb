"""The plain engine by value: what it averages, clips, updates and stores. The others are compared with it elsewhere."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from clipscale.dist.engine import PlainEngine, set_rates
from clipscale.dist.world import World
from clipscale.errors import ConfigError
from tests.helpers.ranks import run_ranks

ALONE = World(0, 1, torch.device("cpu"))


class Pair(nn.Module):
    """Two "towers", a frozen part, and a parameter of another dtype."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.image, self.text = nn.Linear(3, 2), nn.Linear(4, 2)
        self.frozen = nn.Linear(2, 2).requires_grad_(False)
        self.factor = nn.Parameter(torch.tensor([1.5], dtype=torch.float64))

    def forward(self, tower: str, inputs: Tensor) -> tuple[Tensor, Tensor]:
        features = self.image(inputs) if tower == "image" else self.text(inputs)
        return self.frozen(features).sin(), self.factor * 1.0


def inputs(tower: str, rank: int, call: int) -> Tensor:
    generator = torch.Generator().manual_seed(10 * rank + call)
    return torch.randn(5, 3 if tower == "image" else 4, generator=generator)


CALLS = (("text", 0), ("text", 1), ("image", 2), ("image", 3))


def make_engine(
    world: World = ALONE, clip_norm: float = 0.0, kind: Any = torch.optim.SGD, **options: Any
) -> PlainEngine:
    model = Pair()
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [{"params": parameters, "lr": 1.0, "base_lr": 1.0}]
    return PlainEngine(model, kind(groups, **options), world, clip_norm=clip_norm)


def send_backward(engine: PlainEngine, rank: int, *, boundary: bool = True) -> None:
    for tower, call in CALLS:
        features, factor = engine.forward(tower, inputs(tower, rank, call))  # pyright: ignore[reportArgumentType]
        last = boundary and (tower, call) == CALLS[-1]
        engine.backward(features.square().sum() * factor.sum(), last=last)


def oracle(num_ranks: int) -> dict[str, Tensor]:
    """The mean over ranks of the sum over calls, by one plain backward each."""
    total: dict[str, Tensor] = {}
    for rank in range(num_ranks):
        model = Pair()
        outputs = [model(tower, inputs(tower, rank, call)) for tower, call in CALLS]
        sum(features.square().sum() * factor.sum() for features, factor in outputs).backward()
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                total[name] = total.get(name, 0) + parameter.grad / num_ranks
    return total


def gradients(engine: PlainEngine) -> dict[str, Tensor]:
    named = engine.model.named_parameters()
    return {name: parameter.grad.clone() for name, parameter in named if parameter.grad is not None}


def assert_near(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-6, msg=f"{name} differs")


def average(world: World) -> dict[str, Any]:
    engine = make_engine(world)
    send_backward(engine, world.rank, boundary=False)
    before = gradients(engine)
    for buffer in engine._buffers:
        buffer.zero_()
    send_backward(engine, world.rank)
    averaged = gradients(engine)
    norm = engine.step(0.0)
    send_backward(engine, world.rank)
    return {"before": before, "averaged": averaged, "norm": norm, "again": gradients(engine)}


def test_the_last_backward_makes_each_gradient_the_mean_over_ranks() -> None:
    everybodys = run_ranks(3, average)
    wanted = oracle(3)
    assert "frozen.weight" not in wanted
    for rank, found in enumerate(everybodys):
        assert_near(found["averaged"], wanted)
        assert found["norm"] == pytest.approx(norm_of(wanted), rel=1e-5)
        assert_near(found["again"], wanted)  # the step has cleared the gradients
        with pytest.raises(AssertionError):
            assert_near(found["before"], wanted)
        assert all(torch.equal(found["averaged"][name], everybodys[0]["averaged"][name]) for name in wanted), rank


def norm_of(gradients: dict[str, Tensor]) -> float:
    return torch.stack([gradient.double().norm() for gradient in gradients.values()]).norm().item()


@pytest.mark.parametrize("share", [0.1, 0.999, 1.001, 10.0])
def test_clipping_by_value(share: float) -> None:
    """SGD of rate 1 subtracts the gradient: whole where its norm is in bounds, else scaled down to the bound."""
    wanted = oracle(1)
    bound = share * norm_of(wanted)
    engine = make_engine(clip_norm=bound)
    before = {name: parameter.detach().clone() for name, parameter in engine.model.named_parameters()}
    send_backward(engine, 0)
    assert engine.step(1.0) == pytest.approx(norm_of(wanted), rel=1e-5)  # before clipping
    for name, parameter in engine.model.named_parameters():
        subtracted = before[name] - parameter.detach()
        expected = wanted[name] * min(1.0, share) if name in wanted else torch.zeros_like(subtracted)
        torch.testing.assert_close(subtracted, expected, rtol=1e-4, atol=1e-5, msg=f"{name} differs")


def test_no_bound_means_no_clipping() -> None:
    engine = make_engine()
    with torch.no_grad():
        engine.model.factor.fill_(1e6)
    before = engine.model.image.weight.detach().clone()
    send_backward(engine, 0)
    gradient = gradients(engine)["image.weight"]
    assert engine.step(1.0) > 1e5
    assert torch.equal(engine.model.image.weight, before - gradient)


def test_each_group_keeps_its_share_of_the_rate() -> None:
    model = nn.Linear(2, 2)
    groups = [{"params": [model.weight], "base_lr": 0.5}, {"params": [model.bias], "base_lr": 0.1}]
    optimizer = torch.optim.SGD(groups, lr=7.0)
    set_rates(optimizer, 0.25)
    assert [group["lr"] for group in optimizer.param_groups] == [0.125, 0.025]


def five_steps(engine: PlainEngine, first: int) -> None:
    for step in range(first, first + 5):
        send_backward(engine, rank=step)
        engine.step(0.01 * (step + 1))


def test_five_steps_and_five_more_after_loading_are_ten(tmp_path: Path) -> None:
    through = make_engine(kind=torch.optim.AdamW, weight_decay=0.1)
    five_steps(through, 0)
    through.save(tmp_path)
    five_steps(through, 5)
    resumed = make_engine(kind=torch.optim.AdamW, weight_decay=0.1)
    five_steps(resumed, 100)  # whatever it held before
    resumed.load(tmp_path)
    five_steps(resumed, 5)
    for name, weight in through.weights().items():
        assert torch.equal(resumed.weights()[name], weight), name
    states = zip(through._optimizer.state.values(), resumed._optimizer.state.values(), strict=True)
    for mine, theirs in states:
        assert all(torch.equal(mine[name], theirs[name]) for name in mine)


def test_files_hold_nothing_but_tensors_and_plain_values(tmp_path: Path) -> None:
    engine = make_engine(kind=torch.optim.AdamW)
    five_steps(engine, 0)
    engine.save(tmp_path)
    saved = torch.load(tmp_path / "plain.pt", weights_only=True)
    assert set(saved) == {"model", "optimizer", "scale"}


def test_a_checkpoint_of_another_engine_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="was not written by engine.kind = 'plain'"):
        make_engine().load(tmp_path)
