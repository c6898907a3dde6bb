"""A slow source is named."""

from __future__ import annotations

import re

import pytest

from clipscale.train.watch import Waits


@pytest.mark.parametrize(
    ("read_s", "decode_s", "cause"),
    [
        (0.9, 0.1, r"reading shards \(90% of the workers' time\).*or bring the shards nearer"),
        (0.1, 0.3, r"decoding \(75% of the workers' time\).*or store smaller images"),
    ],
)
def test_the_bottleneck_is_named_once(read_s: float, decode_s: float, cause: str) -> None:
    waits = Waits()
    for _ in range(19):
        waits.note(1.0, 0.5, read_s, decode_s)
        assert waits.warning(2) is None  # the first steps say little
    waits.note(1.0, 0.5, read_s, decode_s)
    told = waits.warning(2)
    assert told is not None
    assert told.startswith("the loader is the bottleneck: 50% of a step is waiting for data")
    assert re.search(cause, told)
    assert waits.warning(2) is None


def test_a_fast_source_is_not_blamed() -> None:
    waits = Waits()
    for _ in range(30):
        waits.note(1.0, 0.2, 5.0, 5.0)
    assert waits.warning(2) is None
