"""Every optimizer through a whole run: it learns, and takes the same steps under every engine that offers it."""

from __future__ import annotations

import itertools

import pytest

from clipscale.config.load import load_config
from clipscale.config.optim import Muon
from tests.helpers.ranks import run_ranks
from tests.helpers.runs import TINY, Outcome, Toy, run_variants

STEPS = ("train.duration.steps=6", "train.keep_graph_bytes=0")
RATES = {
    "adamw": "optim.lr=0.001",
    "lamb": "optim.lr=0.01",
    "lars": "optim.lr=2.0",
    "lion": "optim.lr=0.0002",
    "sgd": "optim.lr=0.02",
    "muon": "optim.lr=0.001",
}
ENGINES = {
    "plain": (),
    "ZeRO-2": ("engine.kind=deepspeed", "engine.zero_stage=2"),
    "hsdp": ("engine.kind=hsdp", "engine.shard_group=2"),
    "ZeRO-0": ("engine.kind=deepspeed", "engine.zero_stage=0"),
}
OFFERED = {kind: tuple(ENGINES)[:3] for kind in RATES} | {"muon": ("plain", "ZeRO-0")}


def variants() -> dict[str, tuple[str, ...]]:
    return {
        f"{kind}, {engine}": (*STEPS, f"optim.kind={kind}", rate, *ENGINES[engine])
        for kind, rate in RATES.items()
        if kind != "lamb"  # see test_loss_curve
        for engine in OFFERED[kind]
    }


@pytest.fixture(scope="module")
def found(toy: Toy, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Outcome]:
    return run_ranks(2, run_variants, toy, tmp_path_factory.mktemp("optimizers"), variants(), timeout_s=170)[0]


def test_each_learns_and_none_is_another(found: dict[str, Outcome]) -> None:
    plain = {name: run.curve() for name, run in found.items() if name.endswith("plain")}
    for name, curve in plain.items():
        assert min(curve[-3:]) < curve[0] - 0.01, name
    ends = sorted(curve[-1] for curve in plain.values())
    assert all(later - earlier > 1e-4 for earlier, later in itertools.pairwise(ends))


def test_the_engine_changes_nothing(found: dict[str, Outcome]) -> None:
    for name, run in found.items():
        plain = found[f"{name.partition(',')[0]}, plain"]
        # Lion takes only the sign of its momentum: a rounding near zero becomes a whole step of one weight.
        tolerance = 1e-4 if name.startswith("lion") else 1e-5
        assert run.curve() == pytest.approx(plain.curve(), rel=tolerance), name


def test_a_change_of_kind_keeps_what_both_have() -> None:
    config = load_config(TINY, ["optim.kind=muon"])
    assert config.optim == Muon(kind="muon", lr=5e-4, warmup=config.optim.warmup)
