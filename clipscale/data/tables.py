"""Pairs listed in a table (CSV, TSV, Parquet): a column of image files, a column of captions."""

from __future__ import annotations

import contextlib
import csv
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from clipscale.config.data import Table
from clipscale.data.decode import IMAGE_EXTENSIONS
from clipscale.data.index import Shard
from clipscale.data.store import Store
from clipscale.data.tar import Sample
from clipscale.errors import DataError

_IMAGE_COLUMNS = ("image", "filepath", "file_path", "path", "image_path", "file", "filename", "file_name")
_CAPTION_COLUMNS = ("caption", "title", "text", "captions", "alt_text")
_SEPARATORS = {",": "comma", "\t": "tab", ";": "semicolon", "|": "bar"}
_ROWS_PER_SHARD = 1024


@dataclass(frozen=True)
class Row:
    """One pair of a table: the image file, and the caption as it stands there."""

    image: Path
    caption: str


def read_table(path: Path, rule: Table) -> list[Row]:
    """All pairs of a table. Image paths count from `rule.root`, or else from the table's folder.

    Raises `DataError`: unreadable, no such column (with those that there are), rows of another length.
    """
    if path.suffix.lower() == ".parquet":
        rows = _parquet(path, rule)
    else:
        rows = _separated(path, rule)
    root = Path(rule.root).expanduser() if rule.root else path.parent
    found = [Row(root / image, caption) for image, caption in rows]
    if not found:
        raise DataError(f"{path}: holds a header and no row")
    return found


def _separated(path: Path, rule: Table) -> Iterator[tuple[str, str]]:
    separator = rule.separator or ("\t" if path.suffix.lower() == ".tsv" else ",")
    line = 0
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            reader = csv.reader(file, delimiter=separator, strict=True)
            columns = next(reader, None)
            if not columns:
                raise DataError(f"{path}: empty; wanted a first line that names the columns")
            image, caption = _columns(path, columns, rule, separator)
            for row in reader:
                line = reader.line_num
                if not row:
                    continue  # an empty line
                if len(row) != len(columns):
                    raise DataError(
                        f"{path}, line {line:,}: {len(row)} values for {len(columns)} columns; "
                        "a value that holds the separator or a line break needs quotes around it"
                    )
                yield row[image], row[caption]
    except UnicodeDecodeError as fault:
        raise DataError(f"{path}: not UTF-8 ({fault.reason} at byte {fault.start:,}); convert it first") from fault
    except csv.Error as fault:
        raise DataError(f"{path}, after line {line:,}: {fault}") from fault
    except OSError as fault:
        raise DataError(f"{path}: {fault.strerror}") from fault


def _parquet(path: Path, rule: Table) -> Iterator[tuple[str, str]]:
    try:
        import pyarrow
        import pyarrow.parquet as parquet
    except ImportError as fault:
        raise DataError(f"{path}: Parquet needs pyarrow: pip install 'clipscale[parquet]'") from fault
    try:
        file = parquet.ParquetFile(path)
        columns = file.schema_arrow.names
        chosen = [columns[column] for column in _columns(path, columns, rule, "")]
        for batch in file.iter_batches(columns=list(dict.fromkeys(chosen))):
            for image, caption in zip(*(batch.column(name).to_pylist() for name in chosen), strict=True):
                yield str(image or ""), str(caption if caption is not None else "")
    except (pyarrow.ArrowException, OSError) as fault:
        raise DataError(f"{path}: no Parquet file that can be read: {fault}") from fault


def _columns(path: Path, columns: Sequence[str], rule: Table, separator: str) -> tuple[int, int]:
    """Positions of the image and the caption column."""
    lower = [column.strip().lower() for column in columns]

    def position(name: str, usual: Sequence[str]) -> int | None:
        if name:
            return columns.index(name) if name in columns else None
        return next((lower.index(column) for column in usual if column in lower), None)

    image, caption = position(rule.image, _IMAGE_COLUMNS), position(rule.caption, _CAPTION_COLUMNS)
    faults = []
    for what, found, name in (("image", image, rule.image), ("caption", caption, rule.caption)):
        if found is None:
            faults.append(f"no column {name!r}" if name else f"no column that looks like the {what}'s")
        elif columns.count(columns[found]) > 1:
            faults.append(f"several columns {columns[found]!r}, one of which is the {what}'s")
    if image is not None and caption is not None and not faults:
        return image, caption
    better = [
        name
        for mark, name in _SEPARATORS.items()
        if mark != separator and len(columns) == 1 and mark in columns[0] and separator
    ]
    hint = f"; its separator seems to be a {better[0]}: set the separator" if better else "; name the columns"
    raise DataError(
        f"{path}: {' and '.join(faults)}; found {', '.join(map(repr, columns[:30]))}{hint} "
        "(data.table.separator, data.table.image, data.table.caption; or --separator, --image, --caption)"
    )


@dataclass(frozen=True)
class TableShard(Shard):
    """Some rows of a table, read straight from the image files."""

    rows: tuple[Row, ...] = ()
    number: int = 0

    @property
    def stem(self) -> str:
        return f"{Path(self.path).stem}-{self.number:05d}"

    def read(self, positions: range, store: Store) -> list[Sample]:  # noqa: ARG002 - files of this machine
        """A file that cannot be read gives a sample without an image."""
        return [self._sample(position) for position in positions]

    def _sample(self, position: int) -> Sample:
        row = self.rows[position]
        members = {"txt": row.caption.encode("utf-8", "surrogatepass")}
        with contextlib.suppress(OSError):
            members[image_extension(row.image)] = row.image.read_bytes()
        return Sample(f"{self.number * _ROWS_PER_SHARD + position:08d}", members)


def image_extension(path: Path) -> str:
    """The extension under which an image is stored: its own, if it is one that readers know."""
    extension = path.suffix[1:].lower()
    return extension if extension in IMAGE_EXTENSIONS else "jpg"


def table_shards(path: str, rule: Table) -> list[TableShard]:
    """A table as shards of 1,024 rows. Raises `DataError`, also where not one of the first images exists."""
    rows = read_table(Path(path), rule)
    looked_at = rows[:: max(1, len(rows) // 100)]
    if not any(row.image.is_file() for row in looked_at):
        raise DataError(
            f"{path}: of {len(looked_at)} image files looked at, none is there; the first is {looked_at[0].image}. "
            "Set data.table.root (--root) to the folder that the paths count from"
        )
    parts = [tuple(rows[start : start + _ROWS_PER_SHARD]) for start in range(0, len(rows), _ROWS_PER_SHARD)]
    return [
        TableShard(path, len(part), 0, frozenset({"txt", image_extension(part[0].image)}), rows=part, number=number)
        for number, part in enumerate(parts)
    ]
