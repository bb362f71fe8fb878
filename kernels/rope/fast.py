"""Rotary embedding, compiled: the twin of `reference`, with its signatures and its bits.

Angles are the reference's own. Keys are turned where they lie, rows and heads of any distance, sixteen
channels at a time: see `compiled`.

**Threading:** without the interpreter lock, no state; one thread computes a call.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from warmkv.kernels.compiled.vectors import WIDTH
from warmkv.kernels.formats import F32
from warmkv.kernels.rope import compiled, reference
from warmkv.kernels.rope.reference import Pairs, Rope, deltas_of, sines

#: Rows whose angles are held at once.
_CHUNK = 1024
#: What both channels of a pair may be so that no turn makes one of them infinite: the largest number over the root of 2.
_SAFE = {2: np.float32(46300), 4: np.float32(2.4e38)}


def rotate(rows: F32, positions: npt.NDArray[np.integer[Any]], rope: Rope) -> F32:
    """See `reference.rotate`."""
    if not _readable(rows) or rows.dtype != np.float32 or positions.shape != rows.shape[:1] or rows.shape[-1] != rope.size:
        return reference.rotate(rows, positions, rope)
    turned: F32 = rows.copy()
    _turn(turned, positions, rope)
    if rope.attention_scale != 1.0:
        turned *= np.float32(rope.attention_scale)
    return turned


def shift(keys: npt.NDArray[Any], delta: int | npt.NDArray[np.integer[Any]], rope: Rope) -> npt.NDArray[Any]:
    """See `reference.shift`."""
    deltas_of(keys, delta, rope)
    moved: npt.NDArray[Any] = np.array(keys, order="C")
    shift_in_place(moved, delta, rope)
    return moved


def shift_in_place(keys: npt.NDArray[Any], delta: int | npt.NDArray[np.integer[Any]], rope: Rope) -> None:
    """See `reference.shift_in_place`. Keys so large that they may overflow, and those with NaN or infinity, are
    left to it."""
    deltas = deltas_of(keys, delta, rope)
    if not (_readable(keys) and keys.flags.writeable and _largest(keys, rope) <= _SAFE[keys.itemsize]):
        reference.shift_in_place(keys, delta, rope)
        return
    _turn(keys, deltas if isinstance(delta, np.ndarray) else deltas[:1], rope)


def _readable(rows: npt.NDArray[Any]) -> bool:
    """Whether the channels of a row are side by side, and nothing but heads is between rows."""
    return 2 <= rows.ndim <= 3 and (rows.shape[-1] < 2 or rows.strides[-1] == rows.itemsize)


def _places(rows: npt.NDArray[Any]) -> tuple[int, int, int, int, int]:
    """Address, distance of rows, of heads, and how many there are of each."""
    heads = rows.shape[1] if rows.ndim == 3 else 1
    return rows.ctypes.data, rows.strides[0], rows.strides[1] if rows.ndim == 3 else 0, len(rows), heads


def _largest(keys: npt.NDArray[Any], rope: Rope) -> np.float32:
    return np.float32(compiled.largest(*_places(keys), keys.itemsize, rope.turned))


def _turn(rows: npt.NDArray[Any], positions: npt.NDArray[Any], rope: Rope) -> None:
    """In place, by one angle a pair for all rows where there is one position only."""
    for first in range(0, len(rows), _CHUNK if len(positions) > 1 else max(1, len(rows))):
        part = rows[first : first + _CHUNK] if len(positions) > 1 else rows
        cos, sin = sines(positions[first : first + len(part)] if len(positions) > 1 else positions, rope)
        if rope.pairs is Pairs.NORM:
            cos, sin = np.repeat(cos, 2, axis=1), np.stack([-sin, sin], axis=-1).reshape(len(sin), -1)
        cos, sin = _padded(cos), _padded(sin)
        apart = cos.strides[0] if len(cos) > 1 else 0
        channels = rope.turned if rope.pairs is Pairs.NORM else rope.turned // 2
        compiled.turn(*_places(part), part.itemsize, rope.pairs is Pairs.NORM, channels, cos.ctypes.data, sin.ctypes.data, apart)


def _padded(table: F32) -> F32:
    """With as many columns as whole words read."""
    wide = np.zeros((len(table), -(-table.shape[1] // WIDTH) * WIDTH), np.float32)
    wide[:, : table.shape[1]] = table
    return wide
