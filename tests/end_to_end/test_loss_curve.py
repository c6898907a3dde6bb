"""The promise of the whole: the loss curve depends on the global batch and nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.helpers.ranks import run_ranks
from tests.helpers.runs import Outcome, Toy, run_variants

STEPS = "train.duration.steps=10"
CHUNKS = {
    f"image chunk {image}, text chunk {text}": (f"train.image_chunk={image}", f"train.text_chunk={text}")
    for image, text in (("7", "5"), ("16", "32"), ('"whole"', '"whole"'), ("64", "1"))
}
STAGES = {
    f"ZeRO-{stage}": ("engine.kind=deepspeed", f"engine.zero_stage={stage}", "train.image_chunk=7")
    for stage in range(4)
}
VARIANTS = {1: CHUNKS | STAGES, 2: CHUNKS | STAGES | {"workers": ("data.workers=3",)}}
VARIANTS[4] = {name: VARIANTS[2][name] for name in ("image chunk 7, text chunk 5", "ZeRO-2", "ZeRO-3")}


@pytest.fixture(scope="module")
def reference(toy: Toy, tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """One rank, plain, nothing cut."""
    settings = (STEPS, "train.image_chunk='whole'", "train.text_chunk='whole'")
    return run_ranks(1, run_variants, toy, tmp_path_factory.mktemp("reference"), {"reference": settings})[0]["reference"]


def assert_same_run(found: Outcome, wanted: Outcome) -> None:
    assert len(found.curve()) == len(wanted.curve()) == 10
    assert found.curve() == pytest.approx(wanted.curve(), rel=1e-5)
    assert found.curve("logit_scale") == pytest.approx(wanted.curve("logit_scale"), rel=1e-5)
    assert found.curve("lr") == wanted.curve("lr")
    # Adam hides a common factor of the gradients; their norm does not.
    assert found.curve("grad_norm") == pytest.approx(wanted.curve("grad_norm"), rel=1e-4)
    assert found.weights.keys() == wanted.weights.keys()
    for name, weight in wanted.weights.items():
        torch.testing.assert_close(found.weights[name], weight, rtol=1e-3, atol=1e-5, msg=lambda m: f"{name}: {m}")  # noqa: B023


@pytest.mark.parametrize("size", VARIANTS)
def test_same_curve(size: int, toy: Toy, reference: Outcome, tmp_path: Path) -> None:
    settings = {name: (STEPS, *variant) for name, variant in VARIANTS[size].items()}
    outcomes = run_ranks(size, run_variants, toy, tmp_path, settings, timeout_s=150)[0]
    for name, found in outcomes.items():
        try:
            assert_same_run(found, reference)
        except AssertionError as error:
            raise AssertionError(f"{size} ranks, {name}: {error}") from error


def test_the_curve_moves(reference: Outcome) -> None:
    assert reference.curve()[0] > 3.5
    assert min(reference.curve()[-3:]) < reference.curve()[0] - 0.02
