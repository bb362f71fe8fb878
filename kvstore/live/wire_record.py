"""The layer wire "CMFS" version 2: one record of one layer, from bytes and to bytes. Pure.

All numbers little-endian. Header, 32 bytes: ``"CMFS" | u32 2 | u64 identity | u32 layer | u8 kind |
u8 half | u16 0 | u64 position``, then what the kind says:

=========  ====================================================================================
FULL       u32 half, rows, heads, size, S, I | f32 state[S] | f32 importance[I] | for each head:
           u32 n, n key numbers, u32 n, n value numbers (n = rows x size, or 0 for a dead head)
LINEAR     u32 heads, size, S | f32 state[S]
BOUNDED    u32 heads, size, window, length, head | key ring | value ring (heads, window, size)
FULL_TAIL  u64 base, then as FULL
=========  ====================================================================================

Numbers of keys, values and rings are f32, or f16 where ``half`` is 1; state and importance are always
f32. The unversioned wire of older peers is the body of FULL alone. Position is that of the next token:
``base + rows`` where rows are kept. A record is read whole or refused, and everything it claims is
compared with the `Fit` of the layer it is for before anything is made of it.

**Source:** `export_wire` and `import_wire` of the CMF runtime's cache, which also take what no writer
sends: halves that disagree, flags beyond 1, heads of another length than the rows. Those are refused here.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
import numpy.typing as npt

from warmkv.kernels.formats import F32
from warmkv.schema.errors import FormatError

MAGIC = b"CMFS"
VERSION = 2
HEADER = struct.Struct("<4sIQIBBHQ")
#: No sequence is longer; it keeps sums of positions far from the end of 64 bits.
MAX_POSITION = 1 << 48
#: Of one head's keys or values: their count has 32 bits.
MAX_NUMBERS = (1 << 32) - 1


class WireKind(IntEnum):
    """Which body follows the header."""

    FULL = 0
    LINEAR = 1
    BOUNDED = 2
    FULL_TAIL = 3


@dataclass(frozen=True, slots=True)
class Fit:
    """What a layer can take: its operator, place and geometry. ``kind`` is FULL for layers of rows,
    whether the record is a tail or not; ``untagged`` allows the unversioned body."""

    kind: WireKind
    heads: int
    size: int
    identity: int = 0
    layer: int = 0
    alive: tuple[bool, ...] = ()
    state_size: int = 0
    window: int = 0
    untagged: bool = True

    def is_alive(self, head: int) -> bool:
        return not self.alive or self.alive[head]


@dataclass(frozen=True, slots=True)
class WireRecord:
    """One layer as the wire tells it. ``keys`` and ``values`` hold for each KV head float32 (rows, size),
    no row for dead heads; for BOUNDED (window, size), slots as they lie. Arrays of a parsed record may
    be read-only views of its bytes."""

    kind: WireKind
    heads: int
    size: int
    position: int
    identity: int = 0
    layer: int = 0
    half: bool = False
    rows: int = 0
    base: int = 0
    keys: tuple[F32, ...] = ()
    values: tuple[F32, ...] = ()
    importance: F32 | None = None
    state: F32 | None = None
    window: int = 0


def write(record: WireRecord, *, versioned: bool = True) -> bytes:
    """The bytes of ``record``; without its header, for older peers, unless ``versioned``."""
    parts: list[bytes] = []
    if versioned:
        head = (MAGIC, VERSION, record.identity, record.layer, record.kind, record.half, 0, record.position)
        parts.append(HEADER.pack(*head))
    if record.kind is WireKind.FULL_TAIL:
        parts.append(struct.pack("<Q", record.base))
    if record.kind is WireKind.LINEAR:
        parts += [_u32(record.heads, record.size, _count(record.state)), _wide(record.state)]
    elif record.kind is WireKind.BOUNDED:
        length, head_slot = min(record.position, record.window), record.position % record.window
        parts.append(_u32(record.heads, record.size, record.window, length, head_slot))
        parts += [_numbers(ring, record.half) for ring in (*record.keys, *record.values)]
    else:
        counts = (_count(record.state), _count(record.importance))
        parts.append(_u32(record.half, record.rows, record.heads, record.size, *counts))
        parts += [_wide(record.state), _wide(record.importance)]
        for keys, values in zip(record.keys, record.values, strict=True):
            for plane in (keys, values):
                parts += [_u32(plane.size), _numbers(plane, record.half)]
    return b"".join(parts)


def parse(data: bytes | memoryview, fit: Fit) -> WireRecord:
    """The record in ``data``, which fits the layer and ends where the bytes end.

    Raises FormatError that says what was found, what was expected and at which byte."""
    reader = _Reader(memoryview(data).cast("B"))
    if bytes(reader.data[:4]) != MAGIC:
        return _legacy(reader, fit)
    _, version, identity, layer, kind, half, reserved, position = HEADER.unpack(reader.take(HEADER.size, "header"))
    if version != VERSION:
        raise FormatError(f"layer wire of version {version}, expected {VERSION}")
    if identity != fit.identity:
        raise FormatError(f"layer wire of operator identity {identity:016x}, this layer's is {fit.identity:016x}")
    if layer != fit.layer:
        raise FormatError(f"layer wire of layer {layer}, this is layer {fit.layer}")
    if kind != fit.kind and (kind, fit.kind) != (WireKind.FULL_TAIL, WireKind.FULL):
        raise FormatError(f"layer wire of kind {kind} does not match this layer's {fit.kind.name} ({fit.kind.value})")
    if half > 1 or reserved:
        raise FormatError(f"layer wire with half flag {half} and reserved bytes {reserved:#06x}, expected 0 or 1 and 0")
    if position > MAX_POSITION:
        raise FormatError(f"layer wire at position {position}, expected at most {MAX_POSITION}")
    if kind == WireKind.LINEAR:
        record = _linear(reader, fit, bool(half), position)
    elif kind == WireKind.BOUNDED:
        record = _bounded(reader, fit, bool(half), position)
    else:
        base = int(struct.unpack("<Q", reader.take(8, "base"))[0]) if kind == WireKind.FULL_TAIL else 0
        if kind == WireKind.FULL_TAIL and base == 0:
            raise FormatError("layer wire of a tail whose base is 0, expected the kind of a whole layer")
        record = _full(reader, fit, bool(half), base, position)
    reader.end()
    return record


class _Reader:
    """A cursor that knows how much is left."""

    def __init__(self, data: memoryview) -> None:
        self.data, self.at = data, 0

    def take(self, count: int, what: str) -> memoryview:
        left = len(self.data) - self.at
        if count > left:
            raise FormatError(f"layer wire cut short: {count} bytes of {what} at byte {self.at}, {left} left")
        self.at += count
        return self.data[self.at - count : self.at]

    def u32(self, count: int, what: str) -> tuple[int, ...]:
        return struct.unpack(f"<{count}I", self.take(4 * count, what))

    def wide(self, count: int, what: str) -> F32:
        return np.frombuffer(self.take(4 * count, what), "<f4").astype(np.float32, copy=False)

    def numbers(self, shape: tuple[int, int], half: bool, what: str) -> F32:
        raw = self.take(shape[0] * shape[1] * (2 if half else 4), what)
        return np.frombuffer(raw, "<f2" if half else "<f4").astype(np.float32, copy=False).reshape(shape)

    def end(self) -> None:
        if self.at != len(self.data):
            raise FormatError(f"{len(self.data) - self.at} bytes after the layer wire's record, which ends at byte {self.at}")


def _legacy(reader: _Reader, fit: Fit) -> WireRecord:
    if not fit.untagged:
        raise FormatError("an unversioned layer wire carries no operator identity, this layer takes only version 2")
    if fit.kind is WireKind.BOUNDED:
        raise FormatError("an unversioned layer wire has no ring, this layer takes only version 2")
    record = _full(reader, fit, None, 0, None)
    reader.end()
    return record


def _full(reader: _Reader, fit: Fit, half: bool | None, base: int, position: int | None) -> WireRecord:
    """The body of rows. None for ``half`` and ``position`` where no header says them."""
    narrow, rows, heads, size, states, masses = reader.u32(6, "body header")
    _geometry(fit, heads, size)
    if narrow > 1 or (half is not None and narrow != half):
        raise FormatError(f"layer wire whose body has half flag {narrow}, expected {'0 or 1' if half is None else int(half)}")
    if position is not None and base + rows != position:
        raise FormatError(f"layer wire of {rows} rows from {base}, its header says position {position}")
    state = _state(reader, fit, states, rows)
    linear = fit.kind is WireKind.LINEAR
    if masses != (0 if linear else rows) and masses != 0:
        raise FormatError(f"layer wire with importance of {masses} rows, expected 0 or {0 if linear else rows}")
    importance = reader.wide(masses, "importance")
    planes: list[F32] = []
    for number in range(2 * heads):
        head, what = number // 2, f"{'values' if number % 2 else 'keys'} of head {number // 2}"
        expected = rows if fit.is_alive(head) and not linear else 0
        (found,) = reader.u32(1, what)
        if found != expected * size:
            raise FormatError(f"layer wire with {found} numbers of {what}, expected {expected * size}")
        planes.append(reader.numbers((expected, size), bool(narrow), what))
    kind = fit.kind if linear else WireKind.FULL_TAIL if base else WireKind.FULL
    return WireRecord(
        kind, heads, size, base + rows, fit.identity, fit.layer, bool(narrow), 0 if linear else rows, base,
        tuple(planes[::2]), tuple(planes[1::2]), importance, state,
    )  # fmt: skip


def _linear(reader: _Reader, fit: Fit, half: bool, position: int) -> WireRecord:
    heads, size, states = reader.u32(3, "body header")
    _geometry(fit, heads, size)
    state = _state(reader, fit, states, position)
    return WireRecord(WireKind.LINEAR, heads, size, position, fit.identity, fit.layer, half, state=state)


def _bounded(reader: _Reader, fit: Fit, half: bool, position: int) -> WireRecord:
    heads, size, window, length, slot = reader.u32(5, "body header")
    _geometry(fit, heads, size)
    if window != fit.window:
        raise FormatError(f"layer wire of a ring of {window} rows, this layer's has {fit.window}")
    if (length, slot) != (min(position, window), position % window):
        raise FormatError(
            f"layer wire of a ring with {length} rows and head {slot} at position {position}, "
            f"expected {min(position, window)} and {position % window}"
        )
    rings = [reader.numbers((window, size), half, f"{what} ring") for what in ("key", "value") for _ in range(heads)]
    return WireRecord(
        WireKind.BOUNDED, heads, size, position, fit.identity, fit.layer, half,
        keys=tuple(rings[:heads]), values=tuple(rings[heads:]), window=window,
    )  # fmt: skip


def _state(reader: _Reader, fit: Fit, count: int, position: int) -> F32:
    """The recurrent vector. A layer that has seen nothing may send none."""
    if count != fit.state_size and not (count == 0 and position == 0):
        raise FormatError(f"layer wire with a recurrent state of {count} numbers, this layer's has {fit.state_size}")
    return reader.wide(count, "recurrent state")


def _geometry(fit: Fit, heads: int, size: int) -> None:
    if (heads, size) != (fit.heads, fit.size):
        raise FormatError(f"layer wire of {heads}x{size} numbers a position, this layer has {fit.heads}x{fit.size}")


def _count(vector: F32 | None) -> int:
    return 0 if vector is None else vector.size


def _u32(*numbers: int) -> bytes:
    return struct.pack(f"<{len(numbers)}I", *numbers)


def _wide(vector: F32 | None) -> bytes:
    return b"" if vector is None else vector.astype("<f4", copy=False).tobytes()


def _numbers(plane: npt.NDArray[np.float32], half: bool) -> bytes:
    return plane.astype("<f2" if half else "<f4", copy=False).tobytes()
