"""From a tar file to samples.

A sample is the run of neighbouring members that share a key: the file name up to the first dot of its last part, in
WebDataset's convention; what follows the dot, in lower case, is the member's extension.

We walk the tar headers ourselves. WebDataset's reader takes a tar from its front and reads every byte, so it can
neither start at a sample nor count samples without loading them; and like `tarfile` it takes a file that was cut
between two members, or inside a header, for a whole one. The walk below is the only one: what the index counts is what
is read.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from typing import BinaryIO, NamedTuple

from clipscale.errors import DataError

_BLOCK = 512
_ZEROS = bytes(_BLOCK)
# Types of header.
_REGULAR = b"0\x007"  # a regular file, its old spelling, a contiguous one
_ABOUT_NEXT = b"LKxg"  # its data tells of the next header: GNU long name, long link; pax attributes of it, of all
_DATALESS = b"12345"  # links, devices, folders: no data follows, whatever the size says
_META = re.compile(r"__[^/]*__($|/)")
_KEY_AND_EXTENSION = re.compile(r"((?:.*/|)[^.]+)[.]([^/]*)", re.DOTALL)


class TarError(DataError):
    """A tar file is cut, is no tar file, or holds more than one. The message does not name the file."""


class Member(NamedTuple):
    """One regular file inside a tar. Offsets and size in bytes."""

    name: str
    header: int  # where its first header begins: the walk can be taken up again here
    data: int
    size: int


class Group(NamedTuple):
    """One sample inside a tar: where its members lie, not what they hold."""

    key: str
    header: int
    members: dict[str, Member]  # by extension
    repeated: list[str]  # names of members whose extension the sample already had; they are left out


class Sample(NamedTuple):
    """One sample as it was stored: extension -> bytes."""

    key: str
    members: dict[str, bytes]


def read_samples(file: BinaryIO, path: str, positions: range, header: int = 0, passed: int = 0) -> Iterator[Sample]:
    """The samples at rising `positions` of a shard, with their members' bytes. `path` is for messages.

    `header` is the byte offset of sample number `passed`, none later than the first position: the walk begins there.
    Raises `DataError` where the shard no longer holds them.
    """
    count = passed
    try:
        for group in groups(file.fileno(), header):
            if count in positions:
                yield _load(file.fileno(), group)
            count += 1
            if count >= positions.stop:
                return
    except (OSError, TarError) as fault:
        raise DataError(f"{path}: cannot be read after {count:,} samples: {fault}") from fault
    raise DataError(
        f"{path}: holds {count:,} samples where at least {positions.stop:,} were counted before; was it written to?"
    )


def read_block(file: BinaryIO, path: str, start: int, length: int) -> list[Sample]:
    """The samples [start, start + length) of a shard, as far as it has them. Raises `DataError` for a damaged one."""
    samples = []
    try:
        for count, group in enumerate(groups(file.fileno())):
            if count >= start:
                samples.append(_load(file.fileno(), group))
            if len(samples) == length:
                break
    except (OSError, TarError) as fault:
        raise DataError(f"{path}: cannot be read after {start + len(samples):,} samples: {fault}") from fault
    return samples


def _load(file: int, group: Group) -> Sample:
    members = {}
    for extension, member in group.members.items():
        members[extension] = os.pread(file, member.size, member.data)
        if len(members[extension]) < member.size:
            raise TarError(f"cut inside member {member.name!r} while it was read")
    return Sample(group.key, members)


def groups(file: int, header: int = 0) -> Iterator[Group]:
    """The samples of an open tar (a descriptor) in order, by its headers alone, from the one that begins at `header`.

    Raises `TarError` as `walk`; a sample that the end of a cut file may have halved is not among those given before.
    """
    current: Group | None = None
    for member in walk(file, header):
        match = _KEY_AND_EXTENSION.fullmatch(member.name)
        if match is None or _META.match(member.name):
            continue
        key, extension = match[1], match[2].lower()
        if current is None or key != current.key:
            if current is not None:
                yield current
            current = Group(key, member.header, {}, [])
        if extension in current.members:
            current.repeated.append(member.name)
        else:
            current.members[extension] = member
    if current is not None:
        yield current


def walk(file: int, offset: int = 0) -> Iterator[Member]:
    """The regular files of an open tar (ustar, GNU or pax), from the header at byte `offset` to its end marker.

    Data is never read. Raises `TarError` for what is no header, for a file that ends without an end marker, and for
    data behind it: a tar that was cut or joined, which other readers pass over in silence.
    """
    end = os.fstat(file).st_size
    first, attributes = offset, dict[str, str]()
    while True:
        block = os.pread(file, _BLOCK, offset)
        if block == _ZEROS:
            return _expect_zeros(file, offset)
        size = _data_size(block, offset)
        kind, data = block[156:157], offset + _BLOCK
        if kind in _ABOUT_NEXT:
            attributes |= _attributes(kind, os.pread(file, size, data))
            offset = data + _padded(size)
            continue
        size = int(attributes.get("size", size))
        name = attributes.get("path") or _name(block)
        if data + size > end:
            raise TarError(f"cut inside member {name!r} (bytes {data:,} to {data + size:,} of a file of {end:,})")
        if kind == b"S" or any(attribute.startswith("GNU.sparse") for attribute in attributes):
            raise TarError(f"member {name!r} is a sparse file; store it with all its bytes")
        if kind in _REGULAR and not name.endswith("/"):
            yield Member(name, first, data, size)
        elif kind in _DATALESS:
            size = 0
        offset = first = data + _padded(size)
        attributes = {}


def _padded(size: int) -> int:
    return -(-size // _BLOCK) * _BLOCK


def _data_size(block: bytes, offset: int) -> int:
    """The size in a header, once its checksum has shown it to be one."""
    if not block:
        raise TarError(f"ends at byte {offset:,} without an end marker: it was cut, or is still being written")
    if block[:2] == b"\x1f\x8b":
        raise TarError("gzip-compressed: unpack it, a packed tar can only be read from its front")
    if len(block) < _BLOCK:
        raise TarError(f"cut inside a header, at byte {offset + len(block):,}")
    try:
        # The checksum counts its own eight bytes as blanks.
        if int(block[148:156].strip(b"\0 "), 8) != sum(block) - sum(block[148:156]) + 8 * 32:
            raise ValueError
        if block[124] & 0x80:  # too large for octal digits: base 256
            return int.from_bytes(block[125:136], "big")
        return int(block[124:136].strip(b"\0 ") or b"0", 8)
    except ValueError:
        raise TarError(f"no tar header at byte {offset:,}") from None


def _name(block: bytes) -> str:
    name = block[:100].split(b"\0", 1)[0]
    if block[257:263] == b"ustar\0":  # GNU keeps other things in the prefix's place
        prefix = block[345:500].split(b"\0", 1)[0]
        name = prefix + b"/" + name if prefix else name
    return name.decode("utf-8", "surrogateescape")


def _attributes(kind: bytes, data: bytes) -> dict[str, str]:
    """What a header of a kind in `_ABOUT_NEXT` says of the next one."""
    if kind == b"L":
        return {"path": data.split(b"\0", 1)[0].decode("utf-8", "surrogateescape")}
    attributes = {}
    while kind == b"x" and data.strip(b"\0"):
        record = re.match(rb"(\d+) ([^=]+)=", data)  # "<length of the record> <key>=<value>\n"
        if record is None or int(record[1]) <= record.end():
            raise TarError("damaged: a pax header that cannot be read")
        value = data[record.end() : int(record[1]) - 1]
        attributes[record[2].decode("utf-8", "surrogateescape")] = value.decode("utf-8", "surrogateescape")
        data = data[int(record[1]) :]
    return attributes


def _expect_zeros(file: int, offset: int) -> None:
    while chunk := os.pread(file, 1 << 16, offset):
        if chunk.strip(b"\0"):
            raise TarError("more data follows its end marker: tars were joined; unpack them and pack them into one")
        offset += len(chunk)
