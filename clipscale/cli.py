"""The command line. Heavy modules are imported inside the commands, so that `--help` answers at once."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from clipscale.cli_data import data_app
from clipscale.cli_json import JsonFile, write_json
from clipscale.errors import ClipscaleError, ConfigError

if TYPE_CHECKING:
    from clipscale.config.schema import Eval

app = typer.Typer(
    help="Train CLIP models with very large, exact contrastive batches on few GPUs.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)
config_app = typer.Typer(help="Look at configuration files.", no_args_is_help=True)
eval_app = typer.Typer(help="Measure a trained model.", no_args_is_help=True)
app.add_typer(config_app, name="config")
app.add_typer(data_app, name="data")
app.add_typer(eval_app, name="eval")

ConfigFile = Annotated[Path, typer.Argument(help="TOML file: one whole experiment.", metavar="CONFIG")]
Settings = Annotated[
    list[str] | None, typer.Option("--set", help="Override one key, as in --set train.global_batch=512. Repeatable.")
]


@app.command()
def train(
    config: ConfigFile,
    out: Annotated[Path, typer.Option(help="Run folder; new or empty, unless --resume.")],
    ranks: Annotated[
        int | None, typer.Option(help="Processes to start on this machine, one per GPU. Default 1.")
    ] = None,
    settings: Settings = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the newest checkpoint in --out.")] = False,
    auto_resume: Annotated[
        bool, typer.Option("--auto-resume", help="Go on if --out holds a checkpoint, else start afresh.")
    ] = False,
) -> None:
    """Train a model. Under torchrun, srun or the deepspeed launcher, join the ranks that these started."""
    import os

    from clipscale.config.load import load_config
    from clipscale.dist.launch import STORE_VARIABLE, end_with_launcher, run_ranks, seat_from_environment

    loaded = load_config(config, settings or [])
    joining = seat_from_environment(os.environ) is not None
    if ranks is not None and ranks < 1:
        raise ConfigError(f"--ranks: found {ranks}, wanted at least 1")
    if ranks is not None and joining and STORE_VARIABLE not in os.environ:
        raise ConfigError("--ranks: a launcher has started this process already; leave --ranks out")
    if not joining and (ranks or 1) > 1:
        raise typer.Exit(run_ranks(sys.argv[1:], ranks or 1))

    end_with_launcher()
    from rich.console import Console

    from clipscale.dist.world import joined
    from clipscale.train import loop

    with joined() as world:
        console = Console(quiet=not world.is_main)
        try:
            loop.train(loaded, out, world, console, resume="auto" if auto_resume else resume)
        except ClipscaleError as error:
            if error.on_all_ranks and not world.is_main:
                raise typer.Exit(error.exit_code) from error  # the main rank says it
            raise
        console.print(
            f"done: {out}/model holds the weights, {out}/metrics.jsonl the curve",
            markup=False,
            highlight=False,
            soft_wrap=True,
        )


@config_app.command("check")
def config_check(
    config: ConfigFile,
    settings: Settings = None,
    ranks: Annotated[int | None, typer.Option(help="Also check that so many ranks can run it.", min=1)] = None,
) -> None:
    """Say whether a file is a valid experiment; name every fault. Looks at no data and no weights."""
    from clipscale.config.load import load_config

    loaded = load_config(config, settings or [])
    from clipscale.train.check import check

    check(loaded, ranks)
    typer.echo(f"{config}: valid")


@config_app.command("show")
def config_show(config: ConfigFile, settings: Settings = None) -> None:
    """Print the whole experiment as TOML, defaults included."""
    from clipscale.config.load import load_config, to_toml

    typer.echo(to_toml(load_config(config, settings or [])), nl=False)


RunFolder = Annotated[Path, typer.Argument(help="Run folder of `clipscale train`.", metavar="RUN")]
Shards = Annotated[list[str], typer.Argument(help="Shards: paths, globs, folders or braces.", metavar="SHARDS...")]
Ema = Annotated[bool, typer.Option("--ema", help="Evaluate the averaged weights (train.ema_decay).")]
Sheet = Annotated[Path | None, typer.Option(help="PNG with some images and their five best names.")]


@eval_app.command("zeroshot")
def eval_zeroshot(
    run: RunFolder,
    shards: Shards,
    label: Annotated[
        str, typer.Option(help="Where a sample's class name stands: json:KEY, or an extension.")
    ] = "json:label",
    classes: Annotated[
        Path | None, typer.Option(help="File of class names, one a line. Default: those in the data.")
    ] = None,
    templates: Annotated[str, typer.Option(help="none, simple, or a file of prompts with {} for the name.")] = "none",
    ema: Ema = False,
    sheet: Sheet = None,
    json_out: JsonFile = None,
) -> None:
    """Give every image the class whose name fits best; top-1, 5 and 10 beside chance."""
    from clipscale.config.schema import ZeroShotEval

    spec = ZeroShotEval("zeroshot", _names(shards), tuple(shards), label, templates)
    _evaluate(run, [spec], json_out, class_names=classes, sheet=sheet, ema=ema)


@eval_app.command("retrieval")
def eval_retrieval(
    run: RunFolder,
    shards: Shards,
    caption: Annotated[str, typer.Option(help="Where a sample's caption stands: an extension, or json:KEY.")] = "txt",
    ema: Ema = False,
    json_out: JsonFile = None,
) -> None:
    """Find captions by image and images by caption; recall at 1, 5 and 10 beside chance."""
    from clipscale.config.schema import RetrievalEval

    _evaluate(run, [RetrievalEval("retrieval", _names(shards), tuple(shards), caption)], json_out, ema=ema)


def _names(shards: list[str]) -> str:
    return " ".join(Path(shard).name for shard in shards)


@eval_app.command("all")
def eval_all(run: RunFolder, ema: Ema = False, sheet: Sheet = None, json_out: JsonFile = None) -> None:
    """Every [[eval]] table of the run's own configuration, in one report."""
    from clipscale.config.load import load_config

    path = run / "resolved.toml"
    if not path.is_file():
        raise ConfigError(f"{run} holds no resolved.toml: wanted a run folder of `clipscale train`")
    specs = load_config(path).eval
    if not specs:
        raise ConfigError(f"{path} has no [[eval]] table; use `clipscale eval zeroshot` or `retrieval` with shards")
    _evaluate(run, specs, json_out, sheet=sheet, ema=ema)


def _evaluate(
    run: Path,
    specs: "Sequence[Eval]",
    json_out: Path | None,
    *,
    class_names: Path | None = None,
    sheet: Path | None = None,
    ema: bool = False,
) -> None:
    """Scores and shows all `specs`; the sheet is drawn for the first zero-shot one."""
    import torch
    from rich.console import Console

    from clipscale.dist.world import World
    from clipscale.evaluate.report import show
    from clipscale.evaluate.run import evaluate, load_embedder

    embedder, size = load_embedder(run, ema=ema)
    world = World(0, 1, torch.device("cpu"))
    drawn = next((spec for spec in specs if spec.kind == "zeroshot"), None)
    results = {
        spec.name: evaluate(
            spec, embedder, size, world, class_names=class_names, sheet=sheet if spec is drawn else None
        )
        for spec in specs
    }
    show(results, Console())
    write_json(json_out, {name: result.as_dict() for name, result in results.items()})
    if sheet is not None and drawn is not None:
        typer.echo(f"picture: {sheet}")


def main() -> None:
    """The `clipscale` command: a fault is told in words and ends with its family's exit code."""
    try:
        app()
    except ClipscaleError as error:
        sys.stderr.write(f"clipscale: {error}\n")
        sys.exit(error.exit_code)
