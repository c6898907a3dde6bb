"""`clipscale data ...`: fetch, draw, pack, index, check and measure data sets."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from clipscale.cli_json import JsonFile, write_json
from clipscale.errors import ConfigError, DataError

if TYPE_CHECKING:
    from rich.progress import TaskID

    from clipscale.data.store import Store

data_app = typer.Typer(help="Make data sets, index them, check them.", no_args_is_help=True)

ShardNames = Annotated[
    list[str],
    typer.Argument(help="Shards: paths, globs, folders, braces, @lists, addresses, pipe:.", metavar="SHARDS..."),
]
Threads = Annotated[int, typer.Option(help="Shards looked at side by side.", min=1)]
CacheDir = Annotated[str, typer.Option(help="Folder for remote shards. Default ~/.cache/clipscale/shards.")]
TimeoutS = Annotated[float, typer.Option(help="How long a server or a command may be silent.", min=0.1)]
CaptionField = Annotated[str, typer.Option(help="Where the caption stands: an extension, or json:KEY.")]
_THREADS = max(4, os.cpu_count() or 1)
_MAX_LISTED = 1000  # faults on the screen; --json has them all


@data_app.command("fetch")
def data_fetch(
    name: Annotated[str, typer.Argument(help="The data set: emoji.")],
    out: Annotated[Path, typer.Option(help="Folder for the shards.")],
    size: Annotated[int, typer.Option(help="Side of the images in pixels.", min=8, max=1024)] = 64,
) -> None:
    """Fetch a demonstration data set and pack it into shards. A finished one is left as it is."""
    if name != "emoji":
        raise ConfigError(f"no data set {name!r} to fetch; known: emoji")
    from clipscale.data.sources.emoji import fetch_emoji
    from clipscale.model.towers import clip_token_ids

    with progress() as report:
        found = fetch_emoji(out, encode=clip_token_ids, size=size, progress=report)
    typer.echo(f"{out}: {found}")


@data_app.command("toy")
def data_toy(
    out: Annotated[Path, typer.Option(help="Folder for the shards.")],
    samples: Annotated[int, typer.Option(help="Number of image-text pairs.")] = 2048,
    shards: Annotated[int, typer.Option(help="Number of shards.")] = 4,
    size: Annotated[int, typer.Option(help="Side of the images in pixels.")] = 32,
    seed: Annotated[int, typer.Option(help="Other seeds draw other scenes.")] = 0,
    held_out: Annotated[int, typer.Option(help="Scenes kept apart for evaluation; shards then go to OUT/train.")] = 0,
) -> None:
    """Draw shapes with captions: small, deterministic, made offline."""
    from clipscale.data.sources.toy import make_toy
    from clipscale.model.towers import clip_token_ids

    make_toy(out, samples=samples, shards=shards, size=size, seed=seed, held_out=held_out, encode=clip_token_ids)
    typer.echo(f"{out}: {samples} samples in {shards} shards")


@data_app.command("make")
def data_make(
    tables: Annotated[list[Path], typer.Argument(help="CSV, TSV or Parquet files.", metavar="TABLES...")],
    out: Annotated[Path, typer.Option(help="Folder for the shards; a build that was interrupted there goes on.")],
    image: Annotated[str, typer.Option(help="Column of image files. Default: image, filepath, path, ...")] = "",
    caption: Annotated[str, typer.Option(help="Column of captions. Default: caption, title, text, ...")] = "",
    separator: Annotated[str, typer.Option(help="Between values. Default: a comma, in .tsv a tab.")] = "",
    root: Annotated[str, typer.Option(help="Folder that image paths count from. Default: the table's.")] = "",
    samples_per_shard: Annotated[int, typer.Option(help="At most.", min=1)] = 10_000,
    shard_mb: Annotated[int, typer.Option(help="At most, in megabytes.", min=1)] = 1000,
    max_side: Annotated[int, typer.Option(help="Shrink larger images to this; 0 leaves files as they are.", min=0)] = 0,
    shuffle: Annotated[bool, typer.Option(help="Mix the rows.")] = True,
    seed: Annotated[int, typer.Option(help="Of the mixing.", min=0)] = 0,
    threads: Threads = _THREADS,
) -> None:
    """Pack a table of image files and captions into shards."""
    from clipscale.config.data import Table
    from clipscale.data.make import Packing, make_shards

    separator = {"\\t": "\t", "tab": "\t"}.get(separator, separator)
    if len(separator) > 1:
        raise ConfigError(f"--separator: found {separator!r}, wanted one character, or tab")
    packing = Packing(samples_per_shard, shard_mb * 10**6, max_side, shuffle, seed)
    with progress() as report:
        made = make_shards(tables, out, Table(image, caption, separator, root), packing, threads=threads, report=report)
    typer.echo(f"{out}: {made.num_samples:,} samples in {made.num_shards:,} shards")
    for reason, count in sorted(made.dropped.items()):
        typer.echo(f"  left out {count:,} rows: {reason} (see {out}/dropped.jsonl)")


@data_app.command("index")
def data_index(
    shards: ShardNames,
    out: Annotated[
        Path | None, typer.Option(help="The index. Default: clipscale-index.jsonl in the folder of the shards.")
    ] = None,
    threads: Threads = _THREADS,
    cache_dir: CacheDir = "",
    timeout_s: TimeoutS = 60.0,
) -> None:
    """Count what the shards hold, once; training then starts without looking at each of them.

    Run again after a change or an interruption: only what is new or has changed is walked.
    """
    from clipscale.data.index_file import build_index, default_path
    from clipscale.data.locations import expand_shards

    store = _store(cache_dir, timeout_s)
    paths = _tars(expand_shards(shards, store))
    target = out or default_path(paths)
    if target is None:
        raise ConfigError("--out is needed: these shards do not lie in one folder of this machine")
    with progress() as report:
        index, walked = build_index(paths, target, store=store, threads=threads, report=report)
    typer.echo(f"{target}: {index.summary()}; fields {' '.join(sorted(index.fields))}; {walked:,} walked")


@data_app.command("check")
def data_check(
    shards: ShardNames,
    caption: CaptionField = "txt",
    index: Annotated[
        Path | None, typer.Option(help="Compare counts with this index. Default: the one in the shards' folder.")
    ] = None,
    max_tokens: Annotated[
        int, typer.Option(help="Longest caption in CLIP's tokens, with start and end; 0: any.", min=0)
    ] = 77,
    max_pixels: Annotated[int, typer.Option(help="Largest image.", min=1)] = 100_000_000,
    decode: Annotated[bool, typer.Option(help="Decode every image.")] = True,
    json_out: JsonFile = None,
    threads: Threads = _THREADS,
    cache_dir: CacheDir = "",
    timeout_s: TimeoutS = 60.0,
) -> None:
    """Name every fault, by shard and key; exit code 3 if there is any."""
    from clipscale.config.data import TextCaption
    from clipscale.data.index_file import counts_of, default_path
    from clipscale.data.inspect import Fault, Wanted, inspect
    from clipscale.data.locations import expand_shards
    from clipscale.model.towers import clip_token_ids

    _quieten_decoders()
    store = _store(cache_dir, timeout_s)
    absent: list[str] = []
    paths = _tars(expand_shards(shards, store, absent=absent))
    usual = index or default_path(paths)
    counts = counts_of(usual, paths) if usual is not None else {}
    wanted = Wanted(
        TextCaption("text", caption), max_pixels, max_tokens, lambda text: len(clip_token_ids(text)), decode
    )
    with progress() as report:
        found = inspect(paths, wanted, counts=counts, store=store, threads=threads, report=report)
    faults = [*(Fault(name.partition(": ")[0], "", name.partition(": ")[2]) for name in absent), *found.faults]
    rows = [{"shard": fault.shard, "key": fault.key, "fault": fault.what} for fault in faults]
    write_json(json_out, {"faults": rows, **found.as_dict()})
    for fault in faults[:_MAX_LISTED]:
        typer.echo(str(fault))
    if len(faults) > _MAX_LISTED:
        typer.echo(f"... and {len(faults) - _MAX_LISTED:,} more; --json FILE has them all")
    if faults:
        where = len({fault.shard for fault in faults})
        raise DataError(f"{len(faults):,} fault(s) in {where:,} of {len(paths) + len(absent):,} shards")
    typer.echo(f"sound: {found.num_samples:,} samples in {found.num_shards:,} shards")


@data_app.command("stats")
def data_stats(
    shards: ShardNames,
    caption: CaptionField = "txt",
    json_out: JsonFile = None,
    plot: Annotated[Path | None, typer.Option(help="PNG with histograms.")] = None,
    threads: Threads = _THREADS,
    cache_dir: CacheDir = "",
    timeout_s: TimeoutS = 60.0,
) -> None:
    """Measure a data set: counts, image sizes, caption lengths, repetitions."""
    from rich.console import Console

    from clipscale.config.data import TextCaption
    from clipscale.data.inspect import Wanted, draw, inspect
    from clipscale.data.locations import expand_shards

    _quieten_decoders()
    store = _store(cache_dir, timeout_s)
    with progress() as report:
        paths = _tars(expand_shards(shards, store))
        found = inspect(paths, Wanted(TextCaption("text", caption)), store=store, threads=threads, report=report)
    numbers = found.as_dict()
    Console().print(_table(numbers))
    write_json(json_out, numbers)
    if plot is not None:
        plot.parent.mkdir(parents=True, exist_ok=True)
        draw(found, str(plot))
        typer.echo(f"picture: {plot}")


def _tars(paths: Sequence[str]) -> Sequence[str]:
    from clipscale.data.locations import is_table

    tables = [path for path in paths if is_table(path)]
    if tables:
        raise ConfigError(f"{tables[0]} is a table, wanted shards: pack it with `clipscale data make`, or train on it")
    return paths


def _table(numbers: dict[str, Any]) -> Any:
    from rich.table import Table

    table = Table(show_header=False)
    for name, value in numbers.items():
        if isinstance(value, dict):
            value = "  ".join(f"{part} {number:,.0f}" for part, number in value.items()) or "none"
        table.add_row(name.replace("_", " "), f"{value:,}" if isinstance(value, int) else value)
    return table


def _quieten_decoders() -> None:
    """Pillow warns of odd files; those that matter are counted."""
    import warnings

    warnings.filterwarnings("ignore", module="PIL")


def _store(cache_dir: str, timeout_s: float) -> Store:
    from clipscale.data.store import Store

    return Store(cache_dir, timeout_s=timeout_s)


@contextmanager
def progress() -> Iterator[Callable[[str, int, int], None]]:
    """A rich bar on standard error, as a callback (what is being done, done, total)."""
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True)) as bars:
        tasks: dict[str, TaskID] = {}

        def report(what: str, done: int, total: int) -> None:
            if what not in tasks:
                tasks[what] = bars.add_task(what, total=total)
            bars.update(tasks[what], completed=done, total=total)

        yield report
