"""Blocks of 32 channels, each with a scale of its own, as ggml lays them out: written to be read beside
the formulas.

A row is its blocks one after the other, little-endian:

    q8_0   34 bytes   d f16   q 32 x int8
    q5_1   24 bytes   d f16   m f16   bit 4 of channel i in bit i of 4 bytes   low nibbles as below
    q4_0   18 bytes   d f16   nibbles: byte j has channel j low, channel j + 16 high

With x the 32 numbers of a block and 1/d taken as 0 where it is not finite:

    q8_0   d = max|x| / 127             q = round(x * (1/d)), halves away from zero       x' = d * q
    q5_1   m = min x, d = (max x - m) / 31   q = min(31, trunc((x - m) * (1/d) + 0.5))    x' = d * q + m
    q4_0   d = x_k / -8, the first x_k of the largest magnitude   q = min(15, trunc(x * (1/d) + 8.5))   x' = d * (q - 8)

all in float32, every product rounded before it is added to. q comes of d before d is rounded to float16,
and x' of d after. Of equal numbers the first counts, which decides the sign of a zero m.

**Source:** `gguf.quants` 0.19 and ggml's reference quantisers, whose bytes these are. Where 1/d is not
finite (d below 2^-128) they convert what is no number; the codes here are those of zeros, as d is 0 in float16.
Of zeros of both signs `gguf` takes any for m, ggml the first.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from warmkv.kernels.arrays import F32
from warmkv.kernels.errors import KernelError
from warmkv.kernels.formats import BLOCK, RowFormat
from warmkv.kernels.quant.rounding import half_away, to_half

U8 = npt.NDArray[np.uint8]
_HALF_BYTES = np.dtype("<f2")


def encode(rows: F32, format_: RowFormat) -> U8:
    """Rows (n, size) float32, all finite, as bytes (n, row bytes). Raises TooLarge for a row whose scale float16 does
    not reach, KernelError for another size or format."""
    reason = format_.refusal(rows.shape[1])
    if reason is not None or format_ not in _ENCODERS:
        raise KernelError(reason or f"rows of {format_.value} are no blocks")
    blocks = _ENCODERS[format_](rows.reshape(len(rows), rows.shape[1] // BLOCK, BLOCK))
    return blocks.reshape(len(rows), format_.columns(rows.shape[1]))


def decode(codes: npt.NDArray[np.generic], format_: RowFormat) -> F32:
    """What bytes (n, row bytes) stand for, (n, size) float32. Bytes from elsewhere may have scales that are infinite
    or NaN, and so have the numbers made of them."""
    count, width = codes.shape[0], format_.columns(BLOCK)
    blocks = np.asarray(codes, np.uint8).reshape(count, codes.shape[1] // width, width)
    with np.errstate(invalid="ignore", over="ignore"):
        rows = _DECODERS[format_](blocks)
    return rows.reshape(count, blocks.shape[1] * BLOCK)


def inverse(d: F32) -> F32:
    """1/d, and 0 where that is not finite."""
    with np.errstate(divide="ignore", over="ignore"):
        found = np.float32(1) / d
    return np.where(np.isfinite(found), found, np.float32(0))


def _encode_q8_0(x: F32) -> U8:
    d = np.abs(x).max(axis=-1, keepdims=True) / np.float32(127)
    head = _half_bytes(d)
    q = half_away(x * inverse(d))
    return np.concatenate([head, q.astype(np.int8).view(np.uint8)], axis=-1)


def _decode_q8_0(blocks: U8) -> F32:
    d, q = _halves(blocks, 1)[0], blocks[..., 2:].view(np.int8)
    return d * q.astype(np.float32)


def _encode_q5_1(x: F32) -> U8:
    m, top = (_at(x, first(x, axis=-1)) for first in (np.argmin, np.argmax))  # the first where zeros differ in sign
    with np.errstate(over="ignore"):
        d = (top - m) / np.float32(31)
    head = _half_bytes(np.concatenate([d, m], axis=-1))
    q = np.minimum(np.trunc((x - m) * inverse(d) + np.float32(0.5)), 31).astype(np.uint8)
    high = np.packbits(q >> np.uint8(4), axis=-1, bitorder="little")
    return np.concatenate([head, high, _nibbles(q & np.uint8(15))], axis=-1)


def _decode_q5_1(blocks: U8) -> F32:
    d, m = _halves(blocks, 2)
    high = np.unpackbits(blocks[..., 4:8], axis=-1, bitorder="little")
    q = _from_nibbles(blocks[..., 8:]) | (high << np.uint8(4))
    return d * q.astype(np.float32) + m


def _encode_q4_0(x: F32) -> U8:
    d = _at(x, np.argmax(np.abs(x), axis=-1)) / np.float32(-8)
    head = _half_bytes(d)
    q = np.minimum(np.trunc(x * inverse(d) + np.float32(8.5)), 15).astype(np.uint8)
    return np.concatenate([head, _nibbles(q)], axis=-1)


def _decode_q4_0(blocks: U8) -> F32:
    (d,), q = _halves(blocks, 1), _from_nibbles(blocks[..., 2:])
    return d * (q.astype(np.float32) - np.float32(8))


def _at(x: F32, place: npt.NDArray[np.intp]) -> F32:
    """One number of each block, (n, blocks, 1)."""
    return np.take_along_axis(x, place[..., None], axis=-1)


def _half_bytes(scales: F32) -> U8:
    """Scales (n, blocks, k) as float16 bytes (n, blocks, 2k)."""
    return to_half(scales).view(np.uint8)


def _halves(blocks: U8, count: int) -> list[F32]:
    """The first ``count`` float16 numbers of each block, (n, blocks, 1) float32 each."""
    return [blocks[..., 2 * at : 2 * at + 2].view(_HALF_BYTES).astype(np.float32) for at in range(count)]


def _nibbles(q: U8) -> U8:
    """Numbers below 16 of 32 channels as 16 bytes."""
    half = BLOCK // 2
    return q[..., :half] | (q[..., half:] << np.uint8(4))


def _from_nibbles(packed: U8) -> U8:
    return np.concatenate([packed & np.uint8(15), packed >> np.uint8(4)], axis=-1)


_ENCODERS: dict[RowFormat, Callable[[F32], U8]] = {
    RowFormat.Q8_0: _encode_q8_0, RowFormat.Q5_1: _encode_q5_1, RowFormat.Q4_0: _encode_q4_0,
}  # fmt: skip
_DECODERS: dict[RowFormat, Callable[[U8], F32]] = {
    RowFormat.Q8_0: _decode_q8_0, RowFormat.Q5_1: _decode_q5_1, RowFormat.Q4_0: _decode_q4_0,
}  # fmt: skip
