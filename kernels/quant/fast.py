"""`reference`, compiled: the same bits, a row at a time.

Blocks of 32 channels and fp8 are in `blocks_fast`; formats of plain numbers are one pass of numpy already, and
what freezes a field runs once in a sequence. Rows of a decode step are single ones, where numpy's calls cost
more than its work.

**Threading:** without the interpreter lock.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import types

from warmkv.kernels.compiled.caching import compiled
from warmkv.kernels.errors import KernelError, NotFinite
from warmkv.kernels.formats import F32, KEY_GROUP, MIN_SCALE, Block, RowFormat
from warmkv.kernels.quant import blocks_fast, reference
from warmkv.kernels.turboquant.block import planes_of
from warmkv.kernels.turboquant.fast import reconstruct

LARGEST, ONE, HALF, ZERO = np.float32(127), np.float32(1), np.float32(0.5), np.float32(0)
#: Of float32 bits: all but the sign, and infinity; magnitudes compare as whole numbers do.
MAGNITUDE, INFINITY = np.int32(0x7FFFFFFF), np.int32(0x7F800000)
_ROWS = types.Array(types.float32, 2, "C", readonly=True)
_CODES = types.Array(types.int8, 2, "C", readonly=True)
_FIELD = types.Array(types.float32, 1, "C", readonly=True)
#: One specialisation each: what is writable is taken as what is not.
_QUANTISE = types.int64(_ROWS, _FIELD, types.int64, types.float32[:, ::1], types.int8[:, ::1])
_DEQUANTISE = types.void(_CODES, _ROWS, _FIELD, types.int64, types.float32[:, ::1])


def encode(rows: F32, format_: RowFormat, *, keys: bool, field: F32 | None = None) -> Block:
    """See `reference.encode`."""
    if not format_.finite_only or rows.ndim != 2 or rows.dtype != np.float32:
        return reference.encode(rows, format_, keys=keys, field=field)
    if not format_.quantised:
        codes = blocks_fast.encode(rows, format_) if format_.blocked else blocks_fast.encode_fp8(rows)
        if codes is None:
            reference.require_finite(rows)
            raise AssertionError("every row is finite")
        return Block(format_, codes)
    return _encode(rows, format_.groups(rows.shape[1], keys=keys), field)


def decode(block: Block) -> F32:
    """See `reference.decode`."""
    if block.turn is not None:
        return reconstruct(planes_of(block), block.turn.rotation, gain=block.turn.kappa)
    if block.format.blocked:
        return blocks_fast.decode(block.codes, block.format)
    if block.scales is None:
        return reference.decode(block)
    out = np.empty((len(block), block.size), np.float32)
    codes, scales = np.ascontiguousarray(block.codes), np.ascontiguousarray(block.scales)
    _dequantise(codes, scales, _dense(block.field), block.group, out)
    return out


def refield(block: Block) -> Block:
    """See `reference.refield`."""
    if block.scales is None:
        raise KernelError(f"rows of format {block.format.value} have no field")
    rows = decode(block)
    return _encode(rows, int(block.scales.shape[1]), reference.field_of(rows))


def _encode(rows: F32, groups: int, field: F32 | None) -> Block:
    count, size = rows.shape
    if field is not None and field.shape != (size,):
        raise KernelError(f"a field of shape {field.shape} for rows of {size} channels")
    codes, scales = np.empty((count, size), np.int8), np.empty((count, groups), np.float32)
    bad = _quantise(np.ascontiguousarray(rows), _dense(field), size if groups == 1 else KEY_GROUP, scales, codes)
    if bad >= 0:
        reference.require_finite(rows)
        raise NotFinite(f"row {bad} is too large beside its field", int(bad))
    return Block(RowFormat.Q8_2F, codes, scales, field)


def _dense(field: F32 | None) -> F32:
    """An empty array stands for no field."""
    return _NO_FIELD if field is None else np.ascontiguousarray(field)


_NO_FIELD: F32 = np.empty(0, np.float32)


@compiled(_QUANTISE)
def _quantise(rows: Any, field: Any, group: Any, scales: Any, codes: Any) -> Any:
    """Fills ``scales`` and ``codes``; the first row that cannot be held, or -1."""
    size = rows.shape[1]
    residual = np.empty(size, np.float32)
    bits = residual.view(np.int32)
    for index in range(rows.shape[0]):
        row = rows[index]
        if field.size:
            for at in range(size):
                residual[at] = row[at] / field[at]
        else:
            for at in range(size):
                residual[at] = row[at]
        for which in range(scales.shape[1]):
            first, last = which * group, min((which + 1) * group, size)
            top = np.int32(0)
            for at in range(first, last):
                top = max(top, bits[at] & MAGNITUDE)
            if top >= INFINITY:
                return index
            scale = max(np.int32(top).view(np.float32) / LARGEST, MIN_SCALE)
            scales[index, which] = scale
            part, out = residual[first:last], codes[index, first:last]
            for at in range(part.size):
                steps = part[at] / scale
                whole = np.trunc(steps)
                whole += np.copysign(ONE if abs(steps - whole) >= HALF else ZERO, steps)
                whole = -LARGEST if whole < -LARGEST else whole
                out[at] = np.int8(np.int32(LARGEST if whole > LARGEST else whole))
    return -1


@compiled(_DEQUANTISE)
def _dequantise(codes: Any, scales: Any, field: Any, group: Any, out: Any) -> None:
    size = codes.shape[1]
    for index in range(codes.shape[0]):
        for which in range(scales.shape[1]):
            scale = scales[index, which]
            part = codes[index, which * group : (which + 1) * group]
            row = out[index, which * group : (which + 1) * group]
            for at in range(part.size):
                row[at] = np.float32(part[at]) * scale
        if field.size:
            row = out[index]
            for at in range(size):
                row[at] *= field[at]
