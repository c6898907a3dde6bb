"""The curve of `configs/tiny.toml`, as it was when it was last looked at.

A change that moves these numbers on purpose writes them anew: `pytest tests/train/test_golden.py --update-golden`. The
new file belongs into the same commit, with the reason. Processors round differently, hence the tolerance.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from clipscale.dist.world import joined
from tests.helpers.runs import Outcome, Toy, run

GOLDEN = Path(__file__).parents[1] / "golden" / "tiny.json"
TOLERANCES = {"loss": 1e-4, "grad_norm": 1e-2, "logit_scale": 1e-4, "lr": 1e-6}


@pytest.fixture(scope="module")
def found(toy: Toy, tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    evaluation = f"eval=[{{kind = 'retrieval', name = 'held_out', shards = '{toy.held_out}'}}]"
    with joined() as world:
        outcome = run(world, toy.config(evaluation), tmp_path_factory.mktemp("golden") / "run")
    assert outcome is not None
    return outcome


def test_thirty_steps_of_the_tiny_run(found: Outcome, pytestconfig: pytest.Config) -> None:
    curves = {key: found.curve(key) for key in TOLERANCES}
    if pytestconfig.getoption("update_golden"):
        rounded = {key: [float(f"{value:.7g}") for value in curve] for key, curve in curves.items()}
        GOLDEN.write_text(json.dumps(rounded, indent=1) + "\n")
    golden = json.loads(GOLDEN.read_text())
    for key, tolerance in TOLERANCES.items():
        assert len(curves[key]) == 30
        assert curves[key] == pytest.approx(golden[key], rel=tolerance), key


def test_every_step_says_all_there_is_to_know(found: Outcome) -> None:
    *steps, evaluation = found.records
    assert [record["step"] for record in steps] == list(range(1, 31))
    for record in steps:
        assert record["samples"] == 64 * record["step"]
        assert record["epoch"] == pytest.approx(record["samples"] / 512)
        assert record["samples_per_s"] == pytest.approx(64 / record["step_s"])
        assert 0 <= record["data_wait_s"] <= record["step_s"]
    assert evaluation["step"] == 30
    assert evaluation["eval"] == "held_out"
    assert found.curve()[-1] < found.curve()[0] - 0.1
