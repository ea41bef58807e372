"""The header of a safetensors file, read with the standard library: no tensor, no torch."""

import json
import math
import stat
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from equivalence import plain
from equivalence.errors import InvalidCase

KEY = "equivalence"
_SEAL = '"digests"'
MOST_HEADER_BYTES = 16 << 20
_MOST_DIMS = 16
_MOST_DIGITS = 40
_BITS = {
    "BF16": 16,
    "BOOL": 8,
    "F16": 16,
    "F32": 32,
    "F64": 64,
    "F8_E4M3": 8,
    "F8_E5M2": 8,
    "I8": 8,
    "I16": 16,
    "I32": 32,
    "I64": 64,
    "U8": 8,
    "U16": 16,
    "U32": 32,
    "U64": 64,
}


@dataclass(frozen=True, kw_only=True)
class Entry:
    """What a header says of one tensor."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


@dataclass(frozen=True, kw_only=True)
class Header:
    """Everything before the bytes of a file.

    Attributes:
        tensors: by name.
        metadata: text by key, as safetensors keeps it.
        data: where the tensors' bytes begin in the file.
    """

    tensors: Mapping[str, Entry]
    metadata: Mapping[str, str]
    data: int


def invalid(path: Path, reason: object) -> InvalidCase:
    """The one line for a file: its path and why, escaped; a reason that names the path keeps it."""
    start = plain.line(f"{path}: ", most=4 * plain.MOST)
    text = str(reason)
    return InvalidCase(start + plain.line(text.removeprefix(f"{path}: ").removeprefix(start)))


def read(path: Path) -> Header:
    """Read and check a header against the file's size; nothing is allocated for tensors.

    Raises:
        InvalidCase: the file is truncated, foreign, or its header does not cover its bytes.
    """
    try:
        return _read(path)
    except OSError as error:
        raise invalid(path, f"cannot be read: {error.strerror}") from error
    except InvalidCase as error:
        raise invalid(path, error) from error


def parse(text: str | bytes) -> Any:  # noqa: ANN401 - untrusted JSON
    """JSON as the standard has it: no NaN, no Infinity, no key twice.

    Raises:
        InvalidCase: it is none.
    """
    try:
        return json.loads(
            text, object_pairs_hook=_unique, parse_constant=_no_constant, parse_int=_whole
        )
    except RecursionError as error:
        raise InvalidCase("not JSON that can be read: nested too deeply") from error
    except ValueError as error:
        raise InvalidCase(f"not JSON: {str(error)[:120]}") from error


def _read(path: Path) -> Header:
    # A pipe or a device would block, or never end.
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):
        kind = "a folder" if stat.S_ISDIR(status.st_mode) else "no regular file"
        raise InvalidCase(f"cannot be read: it is {kind}")
    size = status.st_size
    with path.open("rb") as file:
        start = file.read(8)
        if len(start) < 8:  # noqa: PLR2004 - the length that every safetensors file begins with
            raise InvalidCase(f"{size} bytes are too few for a safetensors file")
        length = struct.unpack("<Q", start)[0]
        if length > MOST_HEADER_BYTES:
            raise InvalidCase(
                f"no safetensors file, or one with a header of {length:,} bytes;"
                f" at most {MOST_HEADER_BYTES:,} are read"
            )
        text = file.read(length)
    if len(text) < length:
        raise InvalidCase(f"truncated: the header wants {length:,} bytes, {len(text):,} are there")
    return _parsed(text, size - 8 - length)


def _parsed(text: bytes, room: int) -> Header:
    """The header's text, checked against the bytes that follow it."""
    try:
        table = parse(text)
    except InvalidCase as error:
        raise InvalidCase(f"the header is {error}") from error
    if not isinstance(table, dict):
        raise InvalidCase("the header is not a JSON object")
    metadata = table.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(
        isinstance(value, str) for value in metadata.values()
    ):
        raise InvalidCase("__metadata__ is not a table of texts")
    tensors = {name: _entry(name, fields) for name, fields in table.items()}
    at = 0
    for name, entry in sorted(tensors.items(), key=lambda item: (item[1].begin, item[1].end)):
        if entry.begin != at:
            raise InvalidCase(f"tensor {name} begins at byte {entry.begin}, not {at}")
        at = entry.end
    if at > room:
        raise InvalidCase(f"truncated: the tensors take {at:,} bytes and {room:,} are there")
    if at < room:
        raise InvalidCase(f"{room - at:,} bytes follow the last tensor and belong to none")
    return Header(tensors=tensors, metadata=metadata, data=8 + len(text))


def _entry(name: str, fields: Any) -> Entry:  # noqa: ANN401 - untrusted JSON
    """One tensor's entry, where it is well formed."""
    try:
        dtype, shape, (begin, end) = fields["dtype"], fields["shape"], fields["data_offsets"]
        numbers = [*shape, begin, end]
        well = (
            all(type(n) is int and 0 <= n < 1 << 62 for n in numbers)
            and len(shape) <= _MOST_DIMS
            and begin <= end
            and isinstance(dtype, str)
            and len(fields) == 3  # noqa: PLR2004 - the three above
        )
    except (TypeError, ValueError, KeyError):
        well = False
    if not well:
        raise InvalidCase(f"tensor {name} has a malformed header entry")
    # A dtype that no case holds is for others to size: the file may be no case.
    if dtype in _BITS and math.prod(shape) * _BITS[dtype] // 8 != end - begin:
        raise InvalidCase(f"tensor {name} is {dtype} {shape} and has {end - begin:,} bytes")
    return Entry(dtype=dtype, shape=tuple(shape), begin=begin, end=end)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object without repeated keys."""
    table = dict(pairs)
    if len(table) != len(pairs):
        raise ValueError("a key stands twice")
    return table


def _whole(text: str) -> int:
    if len(text) > _MOST_DIGITS:
        raise ValueError(f"a number of {len(text):,} digits")
    return int(text)


def _no_constant(text: str) -> None:
    raise ValueError(f"{text} is no number")


def op_of(path: Path) -> str | None:
    """The op a case file names; None where it cannot be read.

    Raises:
        InvalidCase: the file has no readable header.
    """
    try:
        op = json.loads(read(path).metadata[KEY])["op"]
    except (KeyError, TypeError, ValueError, RecursionError):
        return None
    return op if isinstance(op, str) else None


def is_case(path: Path) -> bool:
    """Whether the file means to be a case: by its metadata key, or by a text that holds one.

    Raises:
        InvalidCase: the file has no readable header.
    """
    head = read(path)
    # One bad bit in the key must not make a case vanish from its folder.
    return KEY in head.metadata or any(_SEAL in text for text in head.metadata.values())
