"""TOML file < `--set section.key=value` -> `Config`, with every fault named at once.

Each fault line says which key, which file or flag it came from, what was found and what was wanted.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import sys
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pydantic
import tomli_w

from clipscale.config.schema import Config
from clipscale.config.values import DURATION_UNITS, Duration
from clipscale.errors import ConfigError, listed

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # pyright: ignore[reportMissingImports]

_ADAPTER = pydantic.TypeAdapter(Config)


def load_config(path: Path, settings: Sequence[str] = ()) -> Config:
    """Reads and checks one experiment. Raises `ConfigError` that lists every fault."""
    if not path.is_file():
        raise ConfigError(f"no configuration file at {path}")
    try:
        tree = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not valid TOML: {error}") from error
    sources = {key: str(path) for key in _leaf_paths(tree)}
    faults = []
    for setting in settings:
        try:
            keys, value = _parse_setting(setting)
            _apply(tree, keys, value)
            sources[".".join(keys)] = f"--set {setting}"
            for depth in range(1, len(keys)):  # a table that only this setting made
                sources.setdefault(".".join(keys[:depth]), f"--set {setting}")
        except ConfigError as error:
            faults.append(str(error))
    _fill_default_kinds(tree)
    try:
        # JSON mode: strict about types, yet a list may become a tuple, as TOML knows lists only.
        config = _ADAPTER.validate_json(json.dumps(tree, default=str))
    except pydantic.ValidationError as error:
        faults += _describe_all(error, sources, str(path))
    else:
        if not faults:
            return config
    number = "1 fault" if len(faults) == 1 else f"{len(faults)} faults"
    raise ConfigError(listed(f"{number} in the configuration", faults))


def _fill_default_kinds(tree: dict[str, Any]) -> None:
    """`[loss] ring = true` alone means the default kind of loss."""
    for section in dataclasses.fields(Config):
        table = tree.get(section.name)
        if section.default_factory is not dataclasses.MISSING and isinstance(table, dict):
            table.setdefault("kind", section.default_factory().kind)


def to_toml(config: Config) -> str:
    """The whole configuration, defaults included, as TOML that `load_config` reads back to the same value."""
    return tomli_w.dumps(_without_none(dataclasses.asdict(config)))


def _without_none(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _without_none(item) for key, item in value.items() if item is not None}
    if isinstance(value, list | tuple):
        return [_without_none(item) for item in value]
    return value


def _leaf_paths(tree: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for key, value in tree.items():
        path = f"{prefix}{key}"
        yield path
        if isinstance(value, Mapping):
            yield from _leaf_paths(value, path + ".")


def _parse_setting(setting: str) -> tuple[list[str], Any]:
    """`train.global_batch=512` -> (["train", "global_batch"], 512). What is no TOML value is taken as text."""
    path, equals, text = setting.partition("=")
    keys = path.strip().split(".")
    if not equals or not all(keys):
        raise ConfigError(f"--set {setting}: wanted section.key=value, as in --set train.global_batch=512")
    try:
        return keys, tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return keys, text.strip()


def _apply(tree: dict[str, Any], keys: list[str], value: Any) -> None:
    """Sets one key in place. A new `kind` keeps only what the new kind shares; a new duration unit replaces the old."""
    table: Any = tree
    for depth, key in enumerate(keys[:-1]):
        if isinstance(table, list):
            raise ConfigError(f"--set {'.'.join(keys)}: {'.'.join(keys[:depth])} is a list; edit the file instead")
        table = table.setdefault(key, {})
        if not isinstance(table, dict | list):
            raise ConfigError(f"--set {'.'.join(keys)}: {'.'.join(keys[: depth + 1])} is a value, not a table")
    if isinstance(table, list):
        raise ConfigError(f"--set {'.'.join(keys)}: {'.'.join(keys[:-1])} is a list; edit the file instead")
    last = keys[-1]
    if last == "kind" and table.get("kind") != value:
        _change_kind(table, keys[:-1], value)
    if last in DURATION_UNITS and _annotation(keys[:-1]) is Duration:
        table.clear()
    table[last] = value


def _change_kind(table: dict[str, Any], keys: list[str], kind: Any) -> None:
    """Drops what the file says of the old kind: its keys mean nothing, or something else, for the new one."""
    members = {_kind_of(member): member for member in _members(_annotation(keys))}
    old, new = members.get(table.get("kind")), members.get(kind)
    if old is None or new is None:
        return
    before, after = typing.get_type_hints(old, include_extras=True), typing.get_type_hints(new, include_extras=True)
    for key in list(table):
        if key not in after or after[key] != before.get(key):
            del table[key]


def _members(annotation: Any) -> list[type]:
    """The dataclasses that an annotation may become: `Annotated[A | B, ...]` -> [A, B]."""
    if typing.get_origin(annotation) is typing.Annotated:
        annotation = typing.get_args(annotation)[0]
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return [member for part in typing.get_args(annotation) for member in _members(part)]
    if typing.get_origin(annotation) is tuple:
        return _members(typing.get_args(annotation)[0])
    return [annotation] if dataclasses.is_dataclass(annotation) and isinstance(annotation, type) else []


def _kind_of(member: type) -> str | None:
    kind = typing.get_type_hints(member).get("kind")
    return typing.get_args(kind)[0] if kind is not None else None


def _annotation(keys: Sequence[str]) -> Any:
    """The one dataclass (or union) that the schema holds at this path; None where it holds none."""
    annotation: Any = Config
    for key in keys:
        hints = [typing.get_type_hints(member, include_extras=True) for member in _members(annotation)]
        annotation = next((hint[key] for hint in hints if key in hint), None)
    members = _members(annotation)
    return members[0] if len(members) == 1 else annotation


_WANTED = {
    "int_type": "an integer",
    "int_from_float": "an integer",
    "float_type": "a number",
    "string_type": 'text in quotes ("...")',
    "bool_type": "true or false",
    "dataclass_type": "a table",
    "dict_type": "a table",
    "tuple_type": "a list",
    "too_long": "a shorter list",
}


def _describe_all(error: pydantic.ValidationError, sources: Mapping[str, str], file: str) -> list[str]:
    """A line per key. A value that fits no member of a union has one fault per member: they share the line."""
    lines: dict[str, str] = {}
    for fault in error.errors(include_url=False):
        keys = _key_path(fault["loc"], unknown=fault["type"] == "unexpected_keyword_argument")
        path = ".".join(keys)
        place = f"{path} ({_source(path, sources, file)})"
        if fault["type"] == "missing" and isinstance(fault["loc"][-1], str):
            lines[path] = f"{path} is missing in {file}"
        elif fault["type"] == "unexpected_keyword_argument":
            lines[path] = f"{place}: unknown key{_did_you_mean(keys)}"
        elif fault["type"] in ("union_tag_invalid", "union_tag_not_found"):
            kinds = ", ".join(str(_kind_of(member)) for member in _members(_annotation(keys)))
            tag = fault.get("ctx", {}).get("tag")
            found = "no kind" if tag is None else f"kind {tag!r}"
            lines[path] = f"{place}: found {found}, wanted one of {kinds}"
        elif fault["type"] == "value_error":  # our own words, from a __post_init__
            lines[path] = f"{place}: {fault['msg'].removeprefix('Value error, ')}"
        else:
            wanted = _WANTED.get(fault["type"], fault["msg"].removeprefix("Input should be "))
            if fault["type"] == "missing":  # of a list, by position
                wanted = f"at least {int(fault['loc'][-1]) + 1} values"
            if path not in lines:
                lines[path] = f"{place}: found {fault['input']!r}, wanted {wanted}"
            elif not lines[path].endswith(wanted):
                lines[path] += f" or {wanted}"
    return list(lines.values())


def _key_path(location: Sequence[int | str], unknown: bool) -> list[str]:
    """The keys among pydantic's location, which also names union members, tags and list positions."""
    keys: list[str] = []
    for position, part in enumerate(location):
        fields = _fields(keys)
        if isinstance(part, str) and (part in fields or (unknown and position == len(location) - 1)):
            keys.append(part)
    return keys


def _fields(keys: Sequence[str]) -> list[str]:
    """The keys that the schema knows below this path."""
    return [name for member in _members(_annotation(keys)) for name in typing.get_type_hints(member)]


def _source(path: str, sources: Mapping[str, str], file: str) -> str:
    """The file or flag that gave this key, or the nearest table above it."""
    while path:
        if path in sources:
            return sources[path]
        path = path.rpartition(".")[0]
    return file


def _did_you_mean(keys: Sequence[str]) -> str:
    known = _fields(keys[:-1])
    if keys[-1] in known:
        return f" here; {keys[-1]} belongs to another kind"
    close = difflib.get_close_matches(keys[-1], known, n=1, cutoff=0.6)
    if close:
        return f"; did you mean {'.'.join([*keys[:-1], close[0]])}?"
    return f"; known here: {', '.join(dict.fromkeys(known))}" if known else ""
