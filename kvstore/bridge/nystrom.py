"""A Nystroem layer as one blob of bytes, in either phase.

Little-endian: a head (magic, phase, position, rows it was sealed at, pending boundary or 0, queries
traced, whether importance follows, bytes in all), then float32 arrays. Collecting: keys (rows, kv_heads,
key_size), values, queries (traced, heads, key_size), importance (rows,). Sealed, per KV head: whether it
is exact, landmarks m, rows in the window, slot of the oldest, far rows of each query head; keys and values
of the window, of the sinks, mean keys (m, key_size); per query head mean queries (m, key_size), solved
matrix (m, m), far values (m, value_size), far mass (m,), far maxima (m,). Zeros fill the last page.
"""

from __future__ import annotations

import struct
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from warmkv.kernels.formats import F32
from warmkv.kernels.nystrom.reference import Far, Group
from warmkv.kvstore.bridge.specs import PAGE_BYTES, sides_of
from warmkv.kvstore.live.layers.base import where
from warmkv.kvstore.live.layers.nystrom import NystromLayer
from warmkv.kvstore.live.plan import LayerPlan
from warmkv.schema.errors import FormatError, SealError

MAGIC = b"WNYSTR\x00\x01"
HEAD = struct.Struct("<8sIIQQQQQ")
GROUP = struct.Struct("<IIQQ")
COLLECTING, SEALED = 0, 1
Pages = npt.NDArray[np.generic]


def pages(layer: NystromLayer) -> Pages:
    """The layer's state as bytes (n, PAGE_BYTES), copied. Raises SealError after a failed seal."""
    if layer.failure is not None:
        raise SealError(f"{layer.failure}; there is nothing to save")
    body = _sealed(layer) if layer.sealed else _collecting(layer)
    mass = layer.attention is not None and layer.attention.importance is not None
    size = HEAD.size + sum(map(len, body))
    head = HEAD.pack(
        MAGIC, SEALED if layer.sealed else COLLECTING, mass, layer.position, layer.sealed_rows, layer.pending_boundary or 0,
        len(layer.trace), size,
    )  # fmt: skip
    return np.frombuffer(b"".join((head, *body, bytes(-size % PAGE_BYTES))), np.uint8).reshape(-1, PAGE_BYTES)


def prepare(layer: NystromLayer, found: Pages, position: int) -> Callable[[], None]:
    """What puts a state back into ``layer``, once everything fits and all memory is there. Raises
    FormatError, RecordError, OutOfMemory."""
    reader = _Reader(np.ascontiguousarray(found).reshape(-1).data.cast("B"), where(layer.plan, layer.index))
    phase, mass, at, sealed_rows, boundary, traced = reader.head()
    if at != position:
        raise FormatError(f"{reader.name}: a state at position {at}, expected {position}")
    if phase == SEALED:
        groups = tuple(_read_group(reader, layer.plan) for _ in range(layer.plan.kv_heads))
        reader.done()
        return layer.prepare_sealed(groups, position=position, sealed_rows=sealed_rows)
    keys, values = (reader.array(position, side.heads, side.size) for side in sides_of(layer.plan))
    trace = reader.array(traced, layer.plan.heads, layer.plan.key_size)
    importance = reader.array(position) if mass else None
    reader.done()
    return layer.prepare_collecting(keys, values, trace, importance=importance, boundary=boundary or None)


def _collecting(layer: NystromLayer) -> list[bytes]:
    attention = layer.attention
    assert attention is not None
    parts = []
    for plane in (attention.keys, attention.values):
        heads = [np.concatenate([block.codes for block in plane.blocks(head)]) for head in range(plane.heads)]
        parts.append(_bytes(np.stack(heads, axis=1)))
    parts.append(_bytes(layer.trace))
    return [*parts, _bytes(attention.importance)] if attention.importance is not None else parts


def _sealed(layer: NystromLayer) -> list[bytes]:
    parts = []
    for group in layer.groups:
        parts.append(GROUP.pack(group.exact, len(group.landmarks), group.filled, group.head))
        parts.append(struct.pack(f"<{group.heads}Q", *(far.rows for far in group.far)))
        arrays = [group.keys, group.values, group.sink_keys, group.sink_values, group.landmarks]
        for far in group.far:
            arrays += [far.landmarks, far.solve, far.values, far.mass, far.top]
        parts += map(_bytes, arrays)
    return parts


def _read_group(reader: _Reader, plan: LayerPlan) -> Group:
    """A group whose arrays are as large as its plan and counts say; `adopt_sealed` checks the rest."""
    nystrom = plan.nystrom
    assert nystrom is not None
    exact, count, filled, head = GROUP.unpack(reader.take(GROUP.size))
    far_rows = struct.unpack(f"<{plan.group}Q", reader.take(8 * plan.group))
    slots, sinks = (filled, 0) if exact else (nystrom.window, nystrom.sinks)
    sizes = (plan.key_size, plan.value_size)
    keys, values = (reader.array(slots, size) for size in sizes)
    sink_keys, sink_values = (reader.array(sinks, size) for size in sizes)
    group = Group(
        window=nystrom.window, scale=plan.logit_scale, rectifier=nystrom.rectifier, exact=bool(exact), keys=keys, values=values,
        filled=filled, head=head, sink_keys=sink_keys, sink_values=sink_values, landmarks=reader.array(count, plan.key_size),
    )  # fmt: skip
    for rows in far_rows:
        landmarks, solve, mean = (reader.array(count, size) for size in (sizes[0], count, sizes[1]))
        group.far.append(Far(landmarks, solve, mean, reader.array(count), reader.array(count), rows))
    return group


class _Reader:
    """Bytes from front to back; nothing is taken that is not there. Raises FormatError."""

    def __init__(self, data: memoryview, name: str) -> None:
        self.name = name
        self._data, self._at = data, 0

    def head(self) -> tuple[int, int, int, int, int, int]:
        magic, phase, mass, position, sealed_rows, boundary, traced, size = HEAD.unpack(self.take(HEAD.size))
        if magic != MAGIC or phase not in (COLLECTING, SEALED) or mass not in (0, 1):
            raise FormatError(f"{self.name}: a state that begins {magic!r}, phase {phase}, expected {MAGIC!r}")
        if not HEAD.size <= size <= len(self._data) < size + PAGE_BYTES or any(self._data[size:]):
            raise FormatError(f"{self.name}: a state of {size} bytes in {len(self._data)}")
        self._data = self._data[:size]
        return phase, mass, position, sealed_rows, boundary, traced

    def take(self, count: int) -> memoryview:
        if count > len(self._data) - self._at:
            raise FormatError(f"{self.name}: a state of {len(self._data)} bytes ends {count} bytes after byte {self._at}")
        self._at += count
        return self._data[self._at - count : self._at]

    def array(self, *shape: int) -> F32:
        """A copy: states are changed in place."""
        count = 4
        for size in shape:
            count *= size
        return np.frombuffer(self.take(count), "<f4").astype(np.float32).reshape(shape)

    def done(self) -> None:
        if self._at != len(self._data):
            raise FormatError(f"{self.name}: {len(self._data) - self._at} bytes behind a state")


def _bytes(array: F32) -> bytes:
    return np.ascontiguousarray(array, "<f4").tobytes()
