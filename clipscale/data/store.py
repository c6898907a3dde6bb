"""Files that lie elsewhere (s3, gs, https, the output of a command), fetched whole into a local cache of bounded size.

A shard is fetched once, by one process of the machine, and then read like any local file; the others wait for it. The
file gets its name once it is whole, so a fetch that was cut never looks like a shard.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import re
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, TypeVar

from clipscale.errors import ConfigError, DataError

PIPE = "pipe:"
_ADDRESS = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
_STALE_S = 86_400.0  # a fetch that has not moved for a day belongs to nobody

Result = TypeVar("Result")


def is_remote(path: str) -> bool:
    """Whether `path` is an address or a command, and not a file of this machine."""
    return path.startswith(PIPE) or _ADDRESS.match(path) is not None


class Stat(NamedTuple):
    """What tells one version of a file from another. `version`: mtime in ns, or an ETag; "" where there is none."""

    num_bytes: int
    version: str


@dataclass(frozen=True)
class Store:
    """Where files come from. Pickles; all processes of a machine share one cache.

    folder: the cache. max_bytes: its bound; the files used longest ago make room. timeout_s: how long a server or a
    command may be silent. attempts: how often a fetch is tried. wait_s: before the second attempt; doubled before each
    further one.
    """

    folder: str = ""
    max_bytes: int = 2**36
    timeout_s: float = 60.0
    attempts: int = 4
    wait_s: float = 0.5

    def stat(self, path: str) -> Stat:
        """Size and version of a file. Raises `DataError`; a command has no size before it ran: (0, "")."""
        if path.startswith(PIPE):
            return Stat(0, "")
        if not is_remote(path):
            try:
                found = os.stat(path)  # noqa: PTH116
            except OSError as fault:
                raise DataError(f"{path}: {fault.strerror}") from fault
            return Stat(found.st_size, str(found.st_mtime_ns))
        info = self._patiently(path, lambda fs, place: fs.info(place))
        version = info.get("ETag") or info.get("etag") or info.get("md5Hash") or ""
        return Stat(info.get("size") or 0, str(version).strip('"'))

    def glob(self, pattern: str) -> list[str]:
        """The addresses that fit a pattern, sorted. Raises `DataError`."""
        scheme = pattern.split("://", 1)[0]
        found = self._patiently(pattern, lambda fs, place: fs.glob(place))
        return sorted(f"{scheme}://{place.split('://', 1)[-1]}" for place in found)

    def read_text(self, path: str) -> str | None:
        """A small file, None where there is none. Raises `DataError` where that cannot be told."""
        if not is_remote(path):
            with contextlib.suppress(OSError, UnicodeDecodeError):
                return Path(path).read_text(encoding="utf-8")
            return None
        try:
            return self._patiently(path, lambda fs, place: fs.cat_file(place)).decode("utf-8", "replace")
        except AbsentError:
            return None

    @contextmanager
    def open(self, path: str, num_bytes: int = 0, version: str = "") -> Iterator[BinaryIO]:
        """The file, open for reading; fetched before, if it is remote and not in the cache.

        num_bytes: its size where it is known; 0 where not. version: as of `stat`. Raises `DataError` and `OSError`.
        """
        while True:
            try:
                file = Path(self._local(path, num_bytes, version)).open("rb", buffering=0)  # noqa: SIM115
                break
            except FileNotFoundError:
                if not is_remote(path):
                    raise  # else another process has just made room
        with file:
            yield file

    def cached(self, path: str, version: str = "") -> Path:
        """Where a remote file lies once it has been fetched."""
        digest = hashlib.sha256(f"{path}\n{version}".encode()).hexdigest()[:20]
        return self._folder / f"{digest}.tar"

    @property
    def _folder(self) -> Path:
        if self.folder:
            return Path(self.folder).expanduser()
        return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "clipscale" / "shards"

    def _local(self, path: str, num_bytes: int, version: str) -> str:
        if not is_remote(path):
            return path
        target = self.cached(path, version)
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
        except OSError as fault:
            raise ConfigError(f"data.cache_dir: {self._folder} cannot be made: {fault.strerror}") from fault
        with contextlib.suppress(FileNotFoundError):
            os.utime(target)  # used now: the last to make room
            return str(target)
        with _locked(target.with_suffix(".lock")):
            if not target.exists():
                self._fetch(path, target, num_bytes)
        return str(target)

    def _fetch(self, path: str, target: Path, num_bytes: int) -> None:
        self._make_room(path, num_bytes)
        partial = target.with_suffix(".partial")
        partial.unlink(missing_ok=True)  # the command of a run that was killed may still be writing to it
        try:
            if path.startswith(PIPE):
                self._run(path.removeprefix(PIPE), partial)
            else:
                expected = num_bytes or self.stat(path).num_bytes
                self._patiently(path, lambda fs, place: _download(fs, place, partial, expected))
            found = partial.stat().st_size
            if num_bytes and found != num_bytes:
                raise DataError(
                    f"{path}: {found:,} bytes came where {num_bytes:,} were counted before: it was written to; "
                    "index it again with `clipscale data index`"
                )
            if not num_bytes:
                self._make_room(path, found)
            partial.replace(target)
        except OSError as fault:
            if fault.errno == errno.ENOSPC:
                raise DataError(f"{self._folder} is full: free some space or set data.cache_dir to another disk") from (
                    fault
                )
            raise
        finally:
            partial.unlink(missing_ok=True)

    def _make_room(self, path: str, num_bytes: int) -> None:
        """Drops the files used longest ago until `num_bytes` more fit under the bound."""
        if num_bytes > self.max_bytes:
            raise ConfigError(
                f"data.cache_bytes = {self.max_bytes:,} does not hold {path} ({num_bytes:,} bytes): raise it"
            )
        with _locked(self._folder / "room.lock"):
            files = []
            for file in self._folder.iterdir():
                with contextlib.suppress(FileNotFoundError):
                    if file.suffix in (".tar", ".partial"):
                        found = file.stat()
                        files.append((found.st_mtime, found.st_size, file))
            used = sum(size for _, size, _ in files)
            for used_at_s, size, file in sorted(files):
                movable = file.suffix == ".tar" or time.time() - used_at_s > _STALE_S
                if used + num_bytes > self.max_bytes and movable:
                    file.unlink(missing_ok=True)
                    used -= size

    def _patiently(self, path: str, work: Callable[[Any, str], Result]) -> Result:
        """`work(file system, place)`, tried again where that may help. Raises `DataError` in words."""
        fs, place = self._filesystem(path)
        for attempt in range(self.attempts):
            try:
                return work(fs, place)
            except Exception as fault:  # every file system has errors of its own
                if isinstance(fault, OSError) and fault.errno == errno.ENOSPC:
                    raise
                kind, words, lasting = _explain(fault)
                if lasting or attempt + 1 == self.attempts:
                    tried = "" if lasting else f" ({self.attempts} attempts, {self.timeout_s:g} s each)"
                    raise kind(f"{path}: {words}{tried}") from fault
                time.sleep(self.wait_s * 2**attempt)
        raise AssertionError("the last attempt returns or raises")

    def _filesystem(self, path: str) -> tuple[Any, str]:
        import fsspec

        protocol = path.split("://", 1)[0]
        try:
            fs = fsspec.filesystem(protocol, **self._options(protocol))
        except ImportError as fault:
            needs = f"{path}: {protocol}:// needs packages that are not there"
            raise ConfigError(f"{needs}: pip install 'clipscale[remote]'") from fault
        except ValueError as fault:
            raise ConfigError(f"{path}: {fault}; wanted a path, pipe:, s3://, gs:// or https://") from fault
        if hasattr(fs, "retries"):
            fs.retries = 1  # we try again ourselves
        return fs, path if protocol in ("http", "https") else path.split("://", 1)[1]

    def _options(self, protocol: str) -> dict[str, Any]:
        """Every wait of the client bounded by `timeout_s`; nothing listed or remembered from before."""
        options: dict[str, Any] = {"use_listings_cache": False}
        if protocol in ("http", "https"):
            import aiohttp

            timeout = aiohttp.ClientTimeout(total=None, sock_connect=self.timeout_s, sock_read=self.timeout_s)
            options["client_kwargs"] = {"timeout": timeout}
        elif protocol in ("gs", "gcs"):
            options["requests_timeout"] = self.timeout_s
        elif protocol in ("s3", "s3a"):
            options["config_kwargs"] = {
                "connect_timeout": self.timeout_s,
                "read_timeout": self.timeout_s,
                "retries": {"max_attempts": 0},
            }
        return options

    def _run(self, command: str, target: Path) -> None:
        """A command's output into a file. A part of a pipe that fails counts, and so does one that falls silent."""
        shell = ["bash", "-o", "pipefail", "-c"] if shutil.which("bash") else ["sh", "-c"]
        with target.open("wb") as out, tempfile.TemporaryFile() as said:
            process = subprocess.Popen([*shell, command], stdout=out, stderr=said, start_new_session=True)
            size = -1
            try:
                while process.poll() is None:
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        process.wait(self.timeout_s)
                        break
                    if size == (size := target.stat().st_size):
                        raise DataError(f"{PIPE}{command}: silent for {self.timeout_s:g} s (data.timeout_s)")
            finally:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
            if process.returncode:
                said.seek(0)
                words = said.read().decode("utf-8", "replace").strip().splitlines()
                reason = f": {words[-1]}" if words else ""
                raise DataError(f"{PIPE}{command}: ended with exit code {process.returncode}{reason}")


class AbsentError(DataError):
    """There is no such file."""


LOCAL = Store()
"""For files of this machine."""


def _download(fs: Any, place: str, target: Path, num_bytes: int) -> None:
    fs.get_file(place, str(target))
    if (found := target.stat().st_size) < num_bytes:
        raise EOFError(f"only {found:,} of {num_bytes:,} bytes came")


def _explain(fault: BaseException) -> tuple[type[DataError], str, bool]:
    """The class of error, its words, and whether it is useless to try again."""
    cause = fault.__cause__
    if isinstance(fault, FileNotFoundError) and cause is not None and type(cause).__module__.startswith("aiohttp"):
        fault = cause  # fsspec says "not found" of a web server that does not even answer
    status = getattr(fault, "status", None)
    name = type(fault).__name__
    if isinstance(fault, FileNotFoundError) or status in (404, 410):
        return AbsentError, "nothing there", True
    if isinstance(fault, PermissionError) or status in (401, 403) or "Credentials" in name or "Token" in name:
        return DataError, f"access denied ({fault or name}): check the credentials and what they may read", True
    if status is not None and 400 <= status < 500 and status not in (408, 429):
        return DataError, f"refused with HTTP status {status}", True
    if isinstance(fault, TimeoutError) or "Timeout" in name:
        return DataError, "no answer", False
    return DataError, f"{name}: {fault}" if str(fault) else name, False


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Holds a lock among all processes of the machine; it falls open when its holder dies."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
