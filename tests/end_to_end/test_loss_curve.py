"""The promise of the whole: the loss curve depends on the global batch and nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.helpers.ranks import run_ranks
from tests.helpers.runs import Outcome, Toy, run_variants

STEPS = 10
COMMON = (f"train.duration.steps={STEPS}", "train.keep_graph_bytes=0")
WHOLE = ("train.image_chunk=whole", "train.text_chunk=whole")
CHUNKS = {
    "whole": WHOLE,
    "chunks 7 and 5": ("train.image_chunk=7", "train.text_chunk=5"),
    "chunks 16 and 32": ("train.image_chunk=16", "train.text_chunk=32"),
}
STAGES = {
    f"ZeRO-{stage}": ("engine.kind=deepspeed", f"engine.zero_stage={stage}", "train.image_chunk=16")
    for stage in range(4)
}
KEEPING = {
    "graphs kept, loader workers": (
        *CHUNKS["chunks 7 and 5"],
        "train.keep_graph_bytes=100_000_000",
        "data.workers=2",
    ),
    # The one that keeps none runs on one rank.
    "ZeRO-3": (*STAGES["ZeRO-3"], "train.keep_graph_bytes=100_000_000"),
}
VARIANTS = {
    1: CHUNKS | STAGES,
    2: CHUNKS | STAGES | KEEPING,
    4: {"chunks 7 and 5": CHUNKS["chunks 7 and 5"], "ZeRO-2": STAGES["ZeRO-2"]},  # the others below, with LAMB
}
# Layer-wise steps: every engine with two ways to cut a batch.
SHALLOW = ("model.vision_cfg.layers=1", "model.text_cfg.layers=1")  # every layer costs ZeRO-3 messages between ranks
LAMB = (*SHALLOW, "train.duration.steps=20", "train.keep_graph_bytes=0", "optim.kind=lamb", "optim.lr=0.005")
SHARD_GROUP = {1: 1, 2: 2, 4: 2}  # of hsdp: alone, one group, two groups of two


@pytest.fixture(scope="module")
def alone(toy: Toy, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Outcome]:
    """One rank. Its "whole" is what all others are compared with: the plain engine, and nothing cut."""
    return outcomes(1, toy, tmp_path_factory.mktemp("alone"))


def outcomes(size: int, toy: Toy, folder: Path) -> dict[str, Outcome]:
    evaluation = f"eval=[{{kind = 'retrieval', name = 'held_out', shards = '{toy.held_out}'}}]"
    settings = {name: (*COMMON, evaluation, *variant) for name, variant in VARIANTS[size].items()}
    return run_ranks(size, run_variants, toy, folder, settings, timeout_s=150)[0]


def assert_same_run(found: Outcome, wanted: Outcome) -> None:
    assert len(found.curve()) == len(wanted.curve()) == STEPS
    assert found.curve("lr") == wanted.curve("lr")
    assert found.curve() == pytest.approx(wanted.curve(), rel=1e-5)
    assert found.curve("logit_scale") == pytest.approx(wanted.curve("logit_scale"), rel=1e-5)
    # Adam hides a common factor of the gradients; their norm does not.
    assert found.curve("grad_norm") == pytest.approx(wanted.curve("grad_norm"), rel=1e-4)
    # Sharded weights answer on all ranks together. A rounding may swap two of the 64 captions.
    (evaluated,), (evaluation,) = found.evaluations, wanted.evaluations
    assert evaluated.pop("eval") == evaluation.pop("eval") == "held_out"
    assert evaluated == pytest.approx(evaluation, abs=0.04)
    assert found.weights.keys() == wanted.weights.keys()
    for name, weight in wanted.weights.items():
        torch.testing.assert_close(found.weights[name], weight, rtol=1e-3, atol=1e-5, msg=f"{name} differs")


@pytest.mark.parametrize("size", VARIANTS)
def test_same_curve(size: int, toy: Toy, alone: dict[str, Outcome], tmp_path: Path) -> None:
    for name, found in (alone if size == 1 else outcomes(size, toy, tmp_path)).items():
        try:
            assert_same_run(found, alone["whole"])
        except AssertionError as error:
            raise AssertionError(f"{size} ranks, {name}: {error}") from error


def test_the_curve_moves(alone: dict[str, Outcome]) -> None:
    curve = alone["whole"].curve()
    assert curve[0] > 3.5
    assert min(curve[-3:]) < curve[0] - 0.02


def test_teeth_another_batch_gives_another_curve(toy: Toy, alone: dict[str, Outcome], tmp_path: Path) -> None:
    settings = {"other": (*COMMON, *WHOLE, "run.seed=1")}
    other = run_ranks(1, run_variants, toy, tmp_path, settings)[0]["other"]
    assert other.curve() != pytest.approx(alone["whole"].curve(), rel=1e-3)
    assert other.curve() == pytest.approx(alone["whole"].curve(), rel=0.1)


# ---- LAMB -------------------------------------------------------------------------------------------------------


def lamb_variants(size: int) -> dict[str, tuple[str, ...]]:
    hsdp = ("engine.kind=hsdp", f"engine.shard_group={SHARD_GROUP[size]}")
    engines = {"plain": ()} | {name: settings[:2] for name, settings in STAGES.items()} | {"hsdp": hsdp}
    rows = 64 // size
    ragged = (f"train.image_chunk={rows // 3 + 1}", f"train.text_chunk={rows // 2 + 1}")
    cuts = {"whole": WHOLE, "ragged": ragged}
    variants = {f"{name}, {cut}": (*LAMB, *settings, *cuts[cut]) for name, settings in engines.items() for cut in cuts}
    if size == 2:
        return variants
    # One rank shards nothing, and four take long: each engine once, and both cuts of the batch twice.
    once = ("ZeRO-0, whole", "ZeRO-1, ragged", "ZeRO-2, whole", "ZeRO-3, whole")
    return {name: settings for name, settings in variants.items() if name not in once}


@pytest.fixture(scope="module")
def lamb_alone(toy: Toy, tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """One rank, nothing cut."""
    settings = {"whole": (*LAMB, *WHOLE)}
    return run_ranks(1, run_variants, toy, tmp_path_factory.mktemp("lamb"), settings)[0]["whole"]


@pytest.mark.parametrize("size", SHARD_GROUP)
def test_lamb_takes_the_same_steps_however_its_layers_are_cut(
    size: int, toy: Toy, lamb_alone: Outcome, tmp_path: Path
) -> None:
    found = run_ranks(size, run_variants, toy, tmp_path, lamb_variants(size), timeout_s=170)[0]
    curve = lamb_alone.curve()
    assert len(curve) == 20
    assert min(curve[-3:]) < curve[0] - 0.05
    for name, run in found.items():
        assert run.curve() == pytest.approx(curve, rel=1e-5), name
        assert run.curve("grad_norm") == pytest.approx(lamb_alone.curve("grad_norm"), rel=1e-4), name
