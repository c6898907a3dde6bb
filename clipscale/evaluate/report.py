"""Results as a table: every metric beside chance."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from clipscale.evaluate.ranks import Metric, Result, as_text

HEADER = ("set", "metric", "value", "chance", "times chance")


def show(results: Mapping[str, Result], console: Console) -> None:
    """Write the results, by name of the set: a table on a terminal, plain aligned lines (for logs) anywhere else."""
    if console.is_terminal:
        console.print(table(results))
    else:
        console.print(plain(results), markup=False, highlight=False, soft_wrap=True)


def table(results: Mapping[str, Result]) -> Table:
    """One row per set and metric, and the size of each set below."""
    grid = Table(box=box.SIMPLE_HEAD, caption=Text(_sizes(results)), caption_justify="left")
    for column in HEADER:
        grid.add_column(column, justify="left" if column in ("set", "metric") else "right", no_wrap=column != "set")
    for name, result in results.items():
        for index, row in enumerate(_rows(name, result)):
            last = index == len(result.metrics) - 1
            cells = ("" if index else row[0], *row[1:])
            styles = ("bold", "", "bold", "dim", "green" if result.metrics[index].times_chance > 1 else "red")
            grid.add_row(*map(Text, cells, styles), end_section=last)
    return grid


def plain(results: Mapping[str, Result]) -> str:
    """The same as aligned text, the set named in every line so that a line can be searched for and stands alone."""
    rows = [HEADER, *(row for name, result in results.items() for row in _rows(name, result))]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = (
        "  ".join(cell.ljust(width) if at < 2 else cell.rjust(width) for at, (cell, width) in enumerate(pairs))
        for pairs in (tuple(zip(row, widths, strict=True)) for row in rows)
    )
    return "\n".join([*lines, _sizes(results)])


def _rows(name: str, result: Result) -> Iterator[tuple[str, str, str, str, str]]:
    for metric in result.metrics:
        yield name, metric.name, _value(metric, metric.value), _value(metric, metric.chance), _times(metric)


def _value(metric: Metric, value: float) -> str:
    if metric.unit == "rank":
        return f"{value:,.1f}"
    percent = 100 * value
    return f"{percent:.1f}%" if percent >= 1 or percent == 0 else f"{percent:.2g}%"


def _times(metric: Metric) -> str:
    times = metric.times_chance
    return f"{times:,.0f}x" if times >= 100 else f"{times:.1f}x"


def _sizes(results: Mapping[str, Result]) -> str:
    lines = []
    for name, result in results.items():
        sizes = [f"{size:,} {what.removeprefix('n_').replace('_', ' ')}" for what, size in result.sizes.items()]
        left_out = (
            f"; left out {sum(result.dropped.values()):,} samples: {as_text(result.dropped)}" if result.dropped else ""
        )
        lines.append(f"{name}: {', '.join(sizes)}" + left_out)
    return "\n".join(lines)
