"""What does not go together is refused at the start, in words, before any data is read."""

from __future__ import annotations

import pytest

from clipscale.config.load import load_config
from clipscale.config.support import unsupported
from tests.helpers.runs import TINY

DEEPSPEED, ZERO_3 = "engine.kind=deepspeed", "engine.zero_stage=3"
HSDP = ("engine.kind=hsdp", "engine.shard_group=2")


@pytest.mark.parametrize(
    ("ranks", "settings", "said"),
    [
        (4, (DEEPSPEED, "engine.hpz_group=2"), "engine.hpz_group: found ZeRO-1, whose weights are whole on every rank"),
        (
            4,
            (DEEPSPEED, ZERO_3, "engine.hpz_group=3"),
            "engine.hpz_group: 3 does not divide the 4 ranks",
        ),
        (1, (DEEPSPEED, "engine.zero_stage=0", "engine.offload_optimizer=true"), "ZeRO-0 shards nothing"),
        (1, (DEEPSPEED, "engine.zero_stage=2", "engine.offload_parameters=true"), "found ZeRO-2, wanted 3"),
        (6, ("engine.kind=hsdp", "engine.shard_group=4"), "does not divide the 6 ranks; wanted one of 1, 2, 3, 6"),
        (2, (*HSDP, "model.compile=true"), "set model.compile = false"),
        (
            2,
            (*HSDP, "optim.kind=muon"),
            "'muon': it orthogonalises whole matrices",
        ),
        (2, (DEEPSPEED, "optim.kind=muon"), "use engine.kind = 'plain' (or ZeRO-0), or optim.kind = 'lamb'"),
    ],
)
def test_each_contradiction_has_its_reason_and_a_way_out(ranks: int, settings: tuple[str, ...], said: str) -> None:
    faults = unsupported(load_config(TINY, settings), ranks)
    assert len(faults) == 1
    assert said in faults[0]


@pytest.mark.parametrize(
    ("ranks", "settings"),
    [
        (1, ()),
        (4, (DEEPSPEED, ZERO_3, "engine.hpz_group=2", "engine.offload_optimizer=true")),
        (4, (*HSDP, "optim.kind=lamb")),
        (4, (DEEPSPEED, "engine.zero_stage=0", "optim.kind=muon")),
        (2, (DEEPSPEED, "engine.zero_stage=2", "optim.kind=lars", "train.precision=fp16")),
    ],
)
def test_what_goes_together(ranks: int, settings: tuple[str, ...]) -> None:
    assert unsupported(load_config(TINY, settings), ranks) == []
