"""metrics.jsonl keeps each step once; the display says what there is to say."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from clipscale.train import metrics
from clipscale.train.metrics import Display, MetricsFile


def steps(path: Path) -> list[int]:
    return [json.loads(line)["step"] for line in path.read_text().splitlines()]


def test_lines_beyond_the_checkpoint_are_taken_out(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    lines = [{"step": step, "loss": 1.0} for step in range(1, 9)] + [{"step": 4, "eval": "x", "recall": 0.5}]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"step": 3, "lo')
    file = MetricsFile(path, from_step=4)
    file.write({"step": 5, "loss": 2.0})
    assert steps(path) == [1, 2, 3, 4, 4, 5]  # at once, before it is closed
    file.close()
    assert json.loads(path.read_text().splitlines()[4])["eval"] == "x"


def test_a_fresh_run_keeps_nothing(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "loss": 1.0}\nnonsense\n{"loss": 3}\n')
    MetricsFile(path, from_step=0).close()
    assert path.read_text() == ""


def record(step: int) -> dict[str, float]:
    return {"step": step, "loss": 3.21987, "samples_per_s": 12345.6, "eta_s": 7.0}


def test_without_a_terminal_a_line_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr(metrics.time, "monotonic", lambda: clock[0])
    output = io.StringIO()
    with Display(Console(file=output, width=200), total_steps=100, step=0) as display:
        for step in range(1, 101):
            clock[0] += 1.0
            display.show(record(step))
        display.say("step 100  [brackets] stay")
    lines = output.getvalue().splitlines()
    assert [line.split()[1] for line in lines[:-1]] == [f"{step}/100" for step in (*range(1, 100, 10), 100)]
    assert lines[0] == "step 1/100  loss 3.2199  12,346 samples/s  eta 7 s"
    assert lines[-1] == "step 100  [brackets] stay"


def test_on_a_terminal_a_bar() -> None:
    output = io.StringIO()
    console = Console(file=output, width=120, force_terminal=True, _environ={"TERM": "xterm"})
    with Display(console, total_steps=4, step=2) as display:
        display.show(record(3))
        display.say("above")
    text = output.getvalue()
    assert "3/4" in text
    assert "loss 3.2199  12,346 samples/s" in text
    assert "above" in text
