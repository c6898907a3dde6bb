"""The `--json` option that commands with numbers share."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from clipscale.errors import ConfigError

JsonFile = Annotated[Path | None, typer.Option("--json", help="Also write the numbers to this file.")]


def write_json(path: Path | None, content: object) -> None:
    """Does nothing without a path; makes the folder. Raises `ConfigError` where it cannot be written."""
    if path is None:
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    except OSError as fault:
        raise ConfigError(f"--json: {path} cannot be written: {fault.strerror}") from fault
