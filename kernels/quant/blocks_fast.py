"""`blocks` and the encoder of `fp8`, compiled: the same bits, a block at a time.

Scales are left in float32 by the loops: numpy makes float16 of them, and says which it cannot hold.

**Threading:** without the interpreter lock.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
from numba import types

from warmkv.kernels.arrays import F32
from warmkv.kernels.compiled.caching import compiled
from warmkv.kernels.errors import KernelError
from warmkv.kernels.formats import BLOCK, RowFormat
from warmkv.kernels.quant.blocks import U8
from warmkv.kernels.quant.rounding import to_half

ZERO, HALF, ONE = np.float32(0), np.float32(0.5), np.float32(1)
LARGEST_BYTE, LARGEST_FIVE, LOWEST_NIBBLE = np.float32(127), np.float32(31), np.float32(-8)
NIBBLE_MIDDLE, MIDDLE = np.float32(8.5), np.float32(8)
#: Of float32 bits: all but the sign, and infinity; magnitudes compare as whole numbers do.
MAGNITUDE, INFINITY = np.int32(0x7FFFFFFF), np.int32(0x7F800000)
#: Of fp8: float32 bits of 448 and of 2^-6, from where on there is full precision.
FP8_LARGEST, FP8_NORMAL = np.int32(0x43E00000), np.int32(0x3C800000)
#: Added to a number below 2^-6 it leaves multiples of 2^-9, and their count in the low bits.
FP8_LIFT = np.float32(2.0**14)
FP8_LIFT_BITS = np.int32(0x46800000)
_F16 = np.dtype("<f2")
_ROWS = types.Array(types.float32, 3, "C", readonly=True)
_BYTES = types.Array(types.uint8, 3, "C", readonly=True)
_SIGNED = types.Array(types.int8, 3, "C", readonly=True)
#: Blocks, scales (rows, blocks, numbers of a block) and bytes: the first row that is not finite, or -1.
_ENCODE = types.int64(_ROWS, types.float32[:, :, ::1], types.uint8[:, :, ::1])
_ENCODE_SIGNED = types.int64(_ROWS, types.float32[:, :, ::1], types.int8[:, :, ::1])
_DECODE = types.void(_BYTES, _ROWS, types.float32[:, :, ::1])
_DECODE_SIGNED = types.void(_SIGNED, _ROWS, types.float32[:, :, ::1])


def encode(rows: F32, format_: RowFormat) -> U8 | None:
    """See `blocks.encode`. None where a row is not finite."""
    reason = format_.refusal(rows.shape[1])
    if reason is not None or format_ not in _FORMATS:
        raise KernelError(reason or f"rows of {format_.value} are no blocks")
    write, _, scales_each, dtype = _FORMATS[format_]
    count, width = len(rows), format_.columns(BLOCK)
    blocks = _dense(rows).reshape(count, rows.shape[1] // BLOCK, BLOCK)
    scales = np.empty((*blocks.shape[:2], scales_each), np.float32)
    packed = np.empty((*blocks.shape[:2], width), np.uint8)
    if write(blocks, scales, packed.view(dtype)) >= 0:
        return None
    packed[..., : 2 * scales_each].view(_F16)[:] = to_half(scales)
    return packed.reshape(count, format_.columns(rows.shape[1]))


def decode(codes: npt.NDArray[np.generic], format_: RowFormat) -> F32:
    """See `blocks.decode`."""
    _, read, scales_each, dtype = _FORMATS[format_]
    count, width = codes.shape[0], format_.columns(BLOCK)
    blocks = np.ascontiguousarray(codes).view(dtype).reshape(count, codes.shape[1] // width, width)
    scales = np.ascontiguousarray(blocks[..., : 2 * scales_each]).view(_F16).astype(np.float32)
    out = np.empty((*blocks.shape[:2], BLOCK), np.float32)
    read(blocks, scales, out)
    return out.reshape(count, blocks.shape[1] * BLOCK)


def encode_fp8(rows: F32) -> U8 | None:
    """See `fp8.encode`, of rows (n, size). None where a row is not finite."""
    codes = np.empty(rows.shape, np.uint8)
    return None if _to_fp8(_dense(rows).reshape(-1), codes.reshape(-1)) else codes


def _dense(rows: F32) -> F32:
    """The rows where compiled code can read them."""
    return np.require(rows, requirements=["C", "A"])


@compiled()
def _top(x: Any) -> Any:
    """The bits of the largest magnitude."""
    bits, top = x.view(np.int32), np.int32(0)
    for at in range(BLOCK):
        top = max(top, bits[at] & MAGNITUDE)
    return top


@compiled()
def _inverse(d: Any) -> Any:
    """See `blocks.inverse`."""
    found = ONE / d
    return found if np.isfinite(found) else ZERO


@compiled(_ENCODE_SIGNED)
def _to_q8_0(rows: Any, scales: Any, packed: Any) -> Any:
    for index in range(rows.shape[0]):
        for which in range(rows.shape[1]):
            x = rows[index, which]
            top = _top(x)
            if top >= INFINITY:
                return index
            d = np.int32(top).view(np.float32) / LARGEST_BYTE
            scales[index, which, 0] = d
            factor, out = _inverse(d), packed[index, which, 2:]
            for at in range(BLOCK):
                steps = x[at] * factor
                whole = np.trunc(steps)
                whole += np.copysign(ONE if abs(steps - whole) >= HALF else ZERO, steps)
                out[at] = np.int8(np.int32(whole))
    return -1


@compiled(_ENCODE)
def _to_q5_1(rows: Any, scales: Any, packed: Any) -> Any:
    q = np.empty(BLOCK, np.uint8)
    for index in range(rows.shape[0]):
        for which in range(rows.shape[1]):
            x = rows[index, which]
            if _top(x) >= INFINITY:
                return index
            low = high = x[0]
            for at in range(1, BLOCK):
                low = x[at] if x[at] < low else low
                high = x[at] if x[at] > high else high
            d = (high - low) / LARGEST_FIVE
            scales[index, which, 0], scales[index, which, 1] = d, low
            if not np.isfinite(d):
                continue
            factor = _inverse(d)
            for at in range(BLOCK):
                q[at] = np.uint8(np.int32(min(np.trunc((x[at] - low) * factor + HALF), LARGEST_FIVE)))
            out = packed[index, which]
            for at in range(4):
                bits = np.int32(0)
                for bit in range(8):
                    bits |= np.int32(q[8 * at + bit] >> 4) << bit
                out[4 + at] = np.uint8(bits)
            for at in range(16):
                out[8 + at] = np.uint8((q[at] & 15) | ((q[at + 16] & 15) << 4))
    return -1


@compiled(_ENCODE)
def _to_q4_0(rows: Any, scales: Any, packed: Any) -> Any:
    q = np.empty(BLOCK, np.uint8)
    for index in range(rows.shape[0]):
        for which in range(rows.shape[1]):
            x = rows[index, which]
            top = _top(x)
            if top >= INFINITY:
                return index
            first = 0
            while abs(x[first]) != np.int32(top).view(np.float32):
                first += 1
            d = x[first] / LOWEST_NIBBLE
            scales[index, which, 0] = d
            factor, out = _inverse(d), packed[index, which]
            for at in range(BLOCK):
                q[at] = np.uint8(np.int32(min(np.trunc(x[at] * factor + NIBBLE_MIDDLE), np.float32(15))))
            for at in range(16):
                out[2 + at] = np.uint8(q[at] | (q[at + 16] << 4))
    return -1


@compiled(_DECODE_SIGNED)
def _from_q8_0(blocks: Any, scales: Any, out: Any) -> None:
    for index in range(blocks.shape[0]):
        for which in range(blocks.shape[1]):
            d, q, row = scales[index, which, 0], blocks[index, which, 2:], out[index, which]
            for at in range(BLOCK):
                row[at] = d * np.float32(q[at])


@compiled(_DECODE)
def _from_q5_1(blocks: Any, scales: Any, out: Any) -> None:
    for index in range(blocks.shape[0]):
        for which in range(blocks.shape[1]):
            block, row = blocks[index, which], out[index, which]
            d, m = scales[index, which, 0], scales[index, which, 1]
            for at in range(16):
                low = (block[8 + at] & 15) | (((block[4 + (at >> 3)] >> (at & 7)) & 1) << 4)
                high = (block[8 + at] >> 4) | (((block[6 + (at >> 3)] >> (at & 7)) & 1) << 4)
                row[at] = d * np.float32(low) + m
                row[at + 16] = d * np.float32(high) + m


@compiled(_DECODE)
def _from_q4_0(blocks: Any, scales: Any, out: Any) -> None:
    for index in range(blocks.shape[0]):
        for which in range(blocks.shape[1]):
            d, q, row = scales[index, which, 0], blocks[index, which, 2:], out[index, which]
            for at in range(16):
                row[at] = d * (np.float32(q[at] & 15) - MIDDLE)
                row[at + 16] = d * (np.float32(q[at] >> 4) - MIDDLE)


@compiled(types.boolean(types.Array(types.float32, 1, "C", readonly=True), types.uint8[::1]))
def _to_fp8(x: Any, out: Any) -> Any:
    """Whether a number is not finite."""
    bits, top = x.view(np.int32), np.int32(0)
    lifted = np.empty(1, np.float32)
    lifted_bits = lifted.view(np.int32)
    for at in range(x.size):
        magnitude = bits[at] & MAGNITUDE
        top = max(top, magnitude)
        magnitude = min(magnitude, FP8_LARGEST)
        if magnitude >= FP8_NORMAL:
            even = (magnitude >> 20) & 1
            code = ((magnitude + 0x7FFFF + even) >> 20) - 960  # the exponents' biases are 120 apart
        else:
            lifted[0] = np.int32(magnitude).view(np.float32) + FP8_LIFT
            code = lifted_bits[0] - FP8_LIFT_BITS
        out[at] = np.uint8(code | ((bits[at] >> 24) & 0x80))
    return top >= INFINITY


#: Encoder, decoder, scales of a block, and what the loops take its bytes for.
_FORMATS: dict[RowFormat, tuple[Callable[..., Any], Callable[..., None], int, type[np.integer[Any]]]] = {
    RowFormat.Q8_0: (_to_q8_0, _from_q8_0, 1, np.int8),
    RowFormat.Q5_1: (_to_q5_1, _from_q5_1, 2, np.uint8),
    RowFormat.Q4_0: (_to_q4_0, _from_q4_0, 1, np.uint8),
}
