"""The layer wire assembled by hand, field by field: what `wire_record` is compared with."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence

FULL, LINEAR, BOUNDED, TAIL = range(4)


def header(
    kind: int, position: int, *, half: int = 0, identity: int = 0, layer: int = 0, magic: bytes = b"CMFS", version: int = 2,
    reserved: int = 0,
) -> bytes:  # fmt: skip
    return (
        magic
        + struct.pack("<I", version)
        + struct.pack("<Q", identity)
        + struct.pack("<I", layer)
        + bytes([kind, half])
        + struct.pack("<H", reserved)
        + struct.pack("<Q", position)
    )


def u32(*numbers: int) -> bytes:
    return b"".join(struct.pack("<I", number) for number in numbers)


def floats(numbers: Iterable[float], half: int = 0) -> bytes:
    return b"".join(struct.pack("<e" if half else "<f", number) for number in numbers)


def full_body(
    rows: int, size: int, planes: Sequence[Sequence[float]], *, half: int = 0, state: Sequence[float] = (),
    importance: Sequence[float] | None = None,
) -> bytes:  # fmt: skip
    """``planes``: keys of head 0, values of head 0, keys of head 1 and so on."""
    mass = [0.0] * rows if importance is None else importance
    made = u32(half, rows, len(planes) // 2, size, len(state), len(mass)) + floats(state) + floats(mass)
    for plane in planes:
        made += u32(len(plane)) + floats(plane, half)
    return made


def linear_body(heads: int, size: int, state: Sequence[float]) -> bytes:
    return u32(heads, size, len(state)) + floats(state)


def bounded_body(heads: int, size: int, window: int, position: int, rings: Sequence[float], half: int = 0) -> bytes:
    """``rings``: the key ring, then the value ring."""
    return u32(heads, size, window, min(position, window), position % window) + floats(rings, half)
