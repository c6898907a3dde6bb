"""The table: value beside chance, readable as plain lines in a log."""

from __future__ import annotations

import io

import torch
from rich.console import Console

from clipscale.evaluate.ranks import Metric, Result
from clipscale.evaluate.report import show
from clipscale.evaluate.zeroshot import zeroshot

RESULTS = {
    "held_out [artist]": Result(
        (Metric("top1", 0.195, 1 / 1480), Metric("image_to_text_median_rank", 12.0, 740.5, unit="rank")),
        {"n_samples": 1480, "n_classes_seen": 3},
    ),
    "toy": Result((Metric("top1", 0.0, 0.5),), {"n_samples": 7}, {"no_label": 1000, "decode_error": 2}),
}


def write(*, terminal: bool, width: int = 100) -> str:
    out = io.StringIO()
    show(
        RESULTS, Console(file=out, force_terminal=terminal, width=width, color_system="truecolor" if terminal else None)
    )
    return out.getvalue()


def test_plain_lines_are_aligned_and_stand_alone():
    lines = write(terminal=False, width=20).splitlines()  # a log has no width: nothing may wrap
    assert lines == [
        "set                metric                     value  chance  times chance",
        "held_out [artist]  top1                       19.5%  0.068%          289x",
        "held_out [artist]  image_to_text_median_rank   12.0   740.5         61.7x",
        "toy                top1                        0.0%   50.0%          0.0x",
        "held_out [artist]: 1,480 samples, 3 classes seen",
        "toy: 7 samples; left out 1,002 samples: decode_error 2, no_label 1,000",
    ]


def test_a_terminal_gets_a_coloured_table():
    text = write(terminal=True)
    assert "\x1b[" in text
    for part in ("held_out [artist]", "19.5%", "0.068%", "289x", "61.7x", "1,480 samples"):
        assert part in text


def test_a_real_result_shows():
    out = io.StringIO()
    show({"eye": zeroshot(torch.eye(4), torch.arange(4), torch.eye(4))}, Console(file=out))
    assert "eye  top1               100.0%   25.0%          4.0x" in out.getvalue()
