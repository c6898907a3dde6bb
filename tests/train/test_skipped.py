"""A step whose loss or gradient is not finite is left out, on all ranks, and leaves no trace."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from rich.console import Console
from torch import Tensor

from clipscale.config.schema import SoftmaxLoss
from clipscale.dist.world import World
from clipscale.errors import DivergedError
from clipscale.loss.tiles import LossGradients
from clipscale.step import Loss, StepResult, StepShape, train_step
from clipscale.train import build, loop
from tests.helpers.engines import make_engine
from tests.helpers.ranks import run_ranks
from tests.helpers.runs import Toy
from tests.train.problem import NUM_PAIRS, Case, batch, make_towers, sgd

ENGINES = ["plain", "ZeRO-0", "ZeRO-1", "ZeRO-2", "ZeRO-3", "hsdp-1", "hsdp-2"]
CASE = Case()


def softmax() -> Loss:
    return build._loss(SoftmaxLoss("softmax", init_temperature=0.2))


def poisoned(loss: Loss, what: str, rank: int) -> Loss:
    """The same loss, but on one rank something is not a number, as after an overflow in its tower."""

    def give(image: Tensor, *rest: Any) -> LossGradients:
        if what == "loss" and rank == 1:
            image = image.clone()
            image[0, 0] = torch.nan
        result = loss(image, *rest)
        if what == "gradient" and rank == 1:
            result.d_image[0, 0] = torch.inf
        return result

    return give


def adamw(model: torch.nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW(sgd(model, 0.1).param_groups)


def three_steps(world: World, name: str, what: str) -> tuple[list[StepResult], dict[str, Tensor]]:
    """Communicates. A good step, one that is poisoned on rank 1 (none if `what` is ""), a good one."""
    towers = make_towers(CASE)
    engine, _, _ = make_engine(world, name, towers, adamw, rank_batch=NUM_PAIRS // world.size, clip_norm=0.5)
    images, tokens = (rows.chunk(world.size)[world.rank] for rows in batch())
    losses = [softmax(), poisoned(softmax(), what, world.rank), softmax()] if what else [softmax()] * 2
    shape = StepShape(3, 3, keep_image_graphs=1)
    results = [train_step(engine, images, tokens, world, shape=shape, loss=loss, lr_factor=1.0) for loss in losses]
    return results, {key: weight.clone() for key, weight in engine.weights().items()}


def everything(world: World) -> dict[tuple[str, str], tuple[list[StepResult], dict[str, Tensor]]]:
    return {(name, what): three_steps(world, name, what) for name in ENGINES for what in ("", "loss", "gradient")}


def test_a_poisoned_step_leaves_no_trace_under_any_engine() -> None:
    for rank, found in enumerate(run_ranks(2, everything, timeout_s=120)):
        for (name, what), (results, weights) in found.items():
            if not what:
                continue
            good, wanted = found[name, ""]
            assert [each.applied for each in results] == [True, False, True], (name, what, rank)
            assert results[0].loss == good[0].loss
            assert results[2].loss == pytest.approx(good[1].loss, rel=1e-6), (name, what)
            assert results[2].grad_norm == pytest.approx(good[1].grad_norm, rel=1e-5), (name, what)
            for key, weight in wanted.items():
                torch.testing.assert_close(weights[key], weight, rtol=1e-5, atol=1e-6, msg=f"{name} {what} {key}")


# ---- in a run ---------------------------------------------------------------------------------------------------


def run_poisoned(world: World, toy: Toy, out: Path, bad_steps: list[int], *settings: str) -> str:
    """Communicates. A run whose loss is poisoned at some steps; -> what it died of, or nothing."""
    at = 0

    def step_with_poison(*arguments: Any, **options: Any) -> StepResult:
        nonlocal at
        at += 1
        if at in bad_steps:
            options = options | {"loss": poisoned(options["loss"], "loss", rank=1)}
        return train_step(*arguments, **options)

    with patch.object(loop, "train_step", step_with_poison):
        try:
            loop.train(toy.config(*settings), out, world, Console(quiet=True))
        except DivergedError as error:
            return str(error)
    return ""


def records_of(out: Path) -> list[dict[str, Any]]:
    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is no JSON")

    lines = (out / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line, parse_constant=refuse) for line in lines]


def test_the_schedule_follows_the_steps_that_were_applied(toy: Toy, tmp_path: Path) -> None:
    run_ranks(1, run_poisoned, toy, tmp_path / "clean", [], "train.duration.steps=8")
    run_ranks(1, run_poisoned, toy, tmp_path / "bad", [3, 4, 6], "train.duration.steps=8")
    clean, bad = records_of(tmp_path / "clean"), records_of(tmp_path / "bad")
    assert [record["applied"] for record in bad] == [True, True, False, False, True, False, True, True]
    assert [record["loss"] is None for record in bad] == [not record["applied"] for record in bad]
    rates = [record["lr"] for record in clean]
    assert [record["lr"] for record in bad] == [*rates[:3], rates[2], rates[2], rates[3], rates[3], rates[4]]
    assert [record["samples"] for record in bad] == [record["samples"] for record in clean]


def test_too_many_in_a_row_end_the_run(toy: Toy, tmp_path: Path) -> None:
    settings = ("train.duration.steps=9", "train.max_skipped=2")
    assert run_ranks(1, run_poisoned, toy, tmp_path / "luck", [2, 3, 5, 6, 8, 9], *settings) == [""]
    (said,) = run_ranks(1, run_poisoned, toy, tmp_path / "end", [4, 5, 6], *settings)
    assert "the loss was not finite for 3 steps in a row, the last being step 6" in said
    assert DivergedError.exit_code == 4
    assert [record["step"] for record in records_of(tmp_path / "end")] == list(range(1, 7))
