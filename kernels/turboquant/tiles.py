"""The compiled loops of the encoders: tiles of rows side by side, in the order of the reference.

A tile is flat: `LANES` numbers, one a row, for every coordinate. What happens to a row is what happens
to it in `reference`, one rounding after the other, so that both write the same bytes.

**Threading:** no interpreter lock, no state; one thread computes a call.
"""

# Compiled code has no annotations: numba finds the types.
# mypy: allow-untyped-defs, allow-untyped-calls

from __future__ import annotations

import numpy as np

from warmkv.kernels.compiled.caching import compiled
from warmkv.kernels.turboquant.reference import TINY

#: Rows encoded side by side.
LANES = 16


@compiled()
def encode_rows(rows, polar, jl, mix, scale, bounds, centroids, codes, signs, norms, rho):
    """Encode ``rows`` (count, size) float32, filling ``codes`` and, unless it has no columns, ``signs``
    (count, bytes), ``norms`` and ``rho`` (count,) float32. Lengths are not judged."""
    count, size = rows.shape
    x, spare = np.zeros(size * LANES, np.float32), np.empty(size * LANES, np.float32)
    cells = np.empty(size * LANES, np.uint32)
    length, factor = np.empty(LANES, np.float32), np.empty(LANES, np.float32)
    packed = np.empty(LANES, np.uint32)
    for begin in range(0, count, LANES):
        there = min(LANES, count - begin)
        for lane in range(there):
            row, column = rows[begin + lane], x[lane:]
            for index in range(size):
                column[index * LANES] = row[index] * polar[index]
        _lengths(x, length)
        for lane in range(LANES):
            factor[lane] = np.float32(0) if length[lane] < TINY else np.float32(1) / length[lane]
        norms[begin : begin + there] = length[:there]
        _scale(x, factor)
        _transform(x, spare, mix, scale)
        _cells(x, spare, bounds, centroids, cells)
        for lane in range(there):
            if factor[lane] == 0:
                cells[lane::LANES] = 0
        if bounds.shape[0] == 3:
            _pack_pairs(cells, packed, codes, begin, there)
        else:
            for bit in range(3):
                _pack_bit(cells, bit, packed, codes, begin, there, bit * (size // 8))
        if signs.shape[1] > 0:
            _lengths(x, length)
            for lane in range(there):
                rho[begin + lane] = length[lane] if factor[lane] != 0 else np.float32(0)
            for lane in range(LANES):
                if length[lane] <= TINY:
                    length[lane], factor[lane] = np.float32(1), np.float32(0)
            _divide(x, length, jl)
            _transform(x, spare, mix, scale)
            for index in range(x.shape[0]):
                cells[index] = np.uint32(1) if x[index] >= 0 else np.uint32(0)
            for lane in range(there):
                if factor[lane] == 0:
                    cells[lane::LANES] = 0
            _pack_bit(cells, 0, packed, signs, begin, there, 0)


@compiled()
def turn_rows(rows, before, after, mix, scale, out):
    """Fill ``out`` with ``rows`` (count, size) float32, times signs, transformed, times signs."""
    count, size = rows.shape
    x, spare = np.zeros(size * LANES, np.float32), np.empty(size * LANES, np.float32)
    for begin in range(0, count, LANES):
        there = min(LANES, count - begin)
        for lane in range(there):
            row, column = rows[begin + lane], x[lane:]
            for index in range(size):
                column[index * LANES] = row[index] * before[index]
        _transform(x, spare, mix, scale)
        for lane in range(there):
            row, column = out[begin + lane], x[lane:]
            for index in range(size):
                row[index] = column[index * LANES] * after[index]


@compiled()
def _lengths(x, length):
    length[:] = 0
    for at in range(0, x.shape[0], LANES):
        row = x[at : at + LANES]
        for lane in range(LANES):
            length[lane] += row[lane] * row[lane]
    for lane in range(LANES):
        length[lane] = np.sqrt(length[lane])


@compiled()
def _scale(x, factor):
    for at in range(0, x.shape[0], LANES):
        row = x[at : at + LANES]
        for lane in range(LANES):
            row[lane] *= factor[lane]


@compiled()
def _divide(x, divisor, signs):
    for index in range(signs.shape[0]):
        row, sign = x[index * LANES : (index + 1) * LANES], signs[index]
        for lane in range(LANES):
            row[lane] = row[lane] / divisor[lane] * sign


@compiled()
def _transform(x, spare, mix, scale):
    total, parts = x.shape[0], mix.shape[0]
    run = total // parts
    if parts > 1:
        spare[:] = 0
        for row in range(parts):
            target = spare[row * run : (row + 1) * run]
            for index in range(parts):
                source, factor = x[index * run : (index + 1) * run], mix[row, index]
                for at in range(run):
                    target[at] += factor * source[at]
        x[:] = spare
    stride = LANES
    while stride < run:
        for begin in range(0, total, 2 * stride):
            low, high = x[begin : begin + stride], x[begin + stride : begin + 2 * stride]
            for at in range(stride):
                a, b = low[at], high[at]
                low[at] = a + b
                high[at] = a - b
        stride *= 2
    for at in range(total):
        x[at] *= scale


@compiled()
def _cells(x, level, bounds, centroids, cells):
    """Codes, and in ``x`` what they leave over."""
    level[:] = centroids[0]
    cells[:] = 0
    for bound in range(bounds.shape[0]):
        edge, above, code = bounds[bound], centroids[bound + 1], np.uint32(bound + 1)
        for at in range(x.shape[0]):
            over = x[at] >= edge
            level[at] = above if over else level[at]
            cells[at] = code if over else cells[at]
    for at in range(x.shape[0]):
        x[at] -= level[at]


@compiled()
def _pack_pairs(cells, packed, codes, begin, there):
    for byte in range(codes.shape[1]):
        four = cells[4 * byte * LANES : 4 * (byte + 1) * LANES]
        for lane in range(LANES):
            low = four[lane] | four[lane + LANES] << np.uint32(2)
            packed[lane] = low | four[lane + 2 * LANES] << np.uint32(4) | four[lane + 3 * LANES] << np.uint32(6)
        for lane in range(there):
            codes[begin + lane, byte] = packed[lane]


@compiled()
def _pack_bit(cells, bit, packed, out, begin, there, first):
    for byte in range(cells.shape[0] // (8 * LANES)):
        packed[:] = 0
        for index in range(8):
            row = cells[(8 * byte + index) * LANES : (8 * byte + index + 1) * LANES]
            for lane in range(LANES):
                packed[lane] |= ((row[lane] >> np.uint32(bit)) & np.uint32(1)) << np.uint32(index)
        for lane in range(there):
            out[begin + lane, first + byte] = packed[lane]
