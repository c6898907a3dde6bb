"""What a run tells: `metrics.jsonl`, one JSON object per step or evaluation, and a display for whoever watches."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from clipscale.config.schema import Eval

_PLAIN_EVERY_S = 10.0  # between two lines where the output is no terminal


class MetricsFile:
    """Appends to `metrics.jsonl`; every line is on disk (or in the system's hands) before the next step begins."""

    def __init__(self, path: Path, *, from_step: int) -> None:
        """Lines after step `from_step`, left by a run that went on beyond its last checkpoint, are taken out."""
        keep_steps(path, from_step)
        self._file = path.open("a")

    def write(self, record: Mapping[str, Any]) -> None:
        self._file.write(json.dumps(record) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def keep_steps(path: Path, last_step: int) -> None:
    """Take later lines, left by a run that went on beyond its last checkpoint, out of a file of lines with steps."""
    if path.exists():
        kept = [line for line in path.read_text().splitlines() if _step_of(line) <= last_step]
        path.write_text("".join(f"{line}\n" for line in kept))


def _step_of(line: str) -> float:
    """A line cut short by a crash counts as later than everything."""
    try:
        return json.loads(line)["step"]
    except (json.JSONDecodeError, KeyError):
        return float("inf")


def is_evaluated(path: Path, step: int, specs: Sequence[Eval]) -> bool:
    """Whether the file holds every evaluation after this step."""
    if not path.exists():
        return not specs
    records = [json.loads(line) for line in path.read_text().splitlines() if _step_of(line) == step]
    return {spec.name for spec in specs} <= {record.get("eval") for record in records}


class Display:
    """A progress bar on a terminal, a plain line now and then elsewhere."""

    def __init__(self, console: Console, *, total_steps: int, step: int) -> None:
        self._console = console
        self._total = total_steps
        self._next_line = 0.0
        self._progress = Progress(
            TextColumn("[bold]step"),
            MofNCompleteColumn(),
            BarColumn(),
            TextColumn("{task.fields[note]}"),
            TimeElapsedColumn(),
            TextColumn("eta"),
            TimeRemainingColumn(),
            console=console,
            disable=not console.is_terminal,
        )
        self._task = self._progress.add_task("train", total=total_steps, completed=step, note="")

    def __enter__(self) -> Display:
        self._progress.start()
        return self

    def __exit__(self, _kind: type[BaseException] | None, _fault: object, _trace: TracebackType | None) -> None:
        self._progress.stop()

    def show(self, record: Mapping[str, Any]) -> None:
        """One step's record."""
        loss = "not finite" if record["loss"] is None else f"{record['loss']:.4f}"
        note = f"loss {loss}  {record['samples_per_s']:,.0f} samples/s"
        self._progress.update(self._task, completed=record["step"], note=note)
        now = time.monotonic()
        if not self._console.is_terminal and (now >= self._next_line or record["step"] == self._total):
            self._next_line = now + _PLAIN_EVERY_S
            self.say(f"step {record['step']}/{self._total}  {note}  eta {record['eta_s']:,.0f} s")

    def say(self, line: str) -> None:
        """A line above the bar."""
        self._console.print(line, highlight=False, markup=False, soft_wrap=True)
