"""Canonical bytes: one value, one spelling, on every machine and in every version.

Fingerprints and ids are digests of these bytes, so two spellings of one value would be a
false miss and one spelling of two values a false hit. Every item is a type byte, a
little-endian u32 length and its body; a list's body is its items one after another. Text is
UTF-8 as given (never normalised), integers are signed 64-bit, floats are IEEE 754 doubles
with -0.0 written as 0.0; NaN and infinities are refused.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from typing import Union

from warmkv.schema.errors import FormatError

Value = Union[bool, int, float, str, bytes, Sequence["Value"]]

_HEAD = struct.Struct("<BI")
_BOOL, _INT, _FLOAT, _TEXT, _BYTES, _LIST = range(1, 7)
MAX_DEPTH = 16


def encode(value: Value) -> bytes:
    """Canonical bytes of ``value``. Raises FormatError for a value they cannot spell."""
    return _encode(value, 0)


def _encode(value: Value, depth: int) -> bytes:
    if depth > MAX_DEPTH:
        raise FormatError(f"canonical value nested deeper than {MAX_DEPTH}")
    if isinstance(value, bool):
        return _HEAD.pack(_BOOL, 1) + (b"\1" if value else b"\0")
    if isinstance(value, int):
        if not -(2**63) <= value < 2**63:
            raise FormatError(f"integer {value} does not fit 64 bits")
        return _HEAD.pack(_INT, 8) + struct.pack("<q", value)
    if isinstance(value, float):
        if not math.isfinite(value):
            raise FormatError(f"float {value} has no canonical form")
        return _HEAD.pack(_FLOAT, 8) + struct.pack("<d", value + 0.0)
    if isinstance(value, str):
        try:
            body = value.encode("utf-8")
        except UnicodeEncodeError as exc:
            raise FormatError(f"text {value!r} has no UTF-8 spelling") from exc
        return _HEAD.pack(_TEXT, len(body)) + body
    if isinstance(value, (bytes, bytearray, memoryview)):
        body = bytes(value)
        return _HEAD.pack(_BYTES, len(body)) + body
    if isinstance(value, Sequence):
        body = b"".join(_encode(item, depth + 1) for item in value)
        return _HEAD.pack(_LIST, len(body)) + body
    raise FormatError(f"{type(value).__name__} has no canonical form")


def decode(data: bytes) -> Value:
    """The value behind canonical bytes; lists come back as tuples. Anything else than exactly
    one well-formed value raises FormatError."""
    value, used = _decode(data, 0, len(data), 0)
    if used != len(data):
        raise FormatError(f"{len(data) - used} bytes after the canonical value")
    return value


def _decode(data: bytes, at: int, end: int, depth: int) -> tuple[Value, int]:
    if depth > MAX_DEPTH:
        raise FormatError(f"canonical value nested deeper than {MAX_DEPTH}")
    if end - at < _HEAD.size:
        raise FormatError(f"canonical value cut short at byte {at}")
    kind, length = _HEAD.unpack_from(data, at)
    at += _HEAD.size
    if length > end - at:
        raise FormatError(f"canonical value at byte {at} claims {length} bytes, {end - at} remain")
    stop = at + length
    body = data[at:stop]
    if kind == _LIST:
        items: list[Value] = []
        while at < stop:
            item, at = _decode(data, at, stop, depth + 1)
            items.append(item)
        return tuple(items), stop
    return _scalar(kind, body, at), stop


def _scalar(kind: int, body: bytes, at: int) -> Value:
    if kind == _BYTES:
        return body
    if kind == _TEXT:
        try:
            return body.decode("utf-8")
        except UnicodeDecodeError as exc:
            raise FormatError(f"text at byte {at} is not UTF-8") from exc
    if kind == _BOOL and body in (b"\0", b"\1"):
        return body == b"\1"
    if kind == _INT and len(body) == 8:
        return int(struct.unpack("<q", body)[0])
    if kind == _FLOAT and len(body) == 8:
        number = float(struct.unpack("<d", body)[0])
        if math.isfinite(number) and struct.pack("<d", number + 0.0) == body:
            return number
    raise FormatError(f"canonical type {kind} with {len(body)} bytes at byte {at} is not a value")
