"""The compiled loops of `fast`: rows by address, float32 or halves, turned in place.

Of pairs that lie side by side every channel is

    x cos theta + x' s sin theta        x' the other channel of its pair, s = -1 for the first and +1 for the second

so that no pair has to be taken apart; products and sums are rounded one by one, as in the reference.

**Threading:** no interpreter lock, no state; one thread computes a call.
"""

from __future__ import annotations

# mypy: disable-error-code="no-untyped-def, no-untyped-call, misc, untyped-decorator, call-arg, var-annotated"
import numpy as np
from numba import njit

from warmkv.kernels.compiled import lanes as words
from warmkv.kernels.compiled.caching import compiled
from warmkv.kernels.compiled.vectors import WIDTH

#: Functions that are compiled with what calls them, once.
part = njit(inline="always")


@part
def _read(item, address, count):
    if item == 2:
        return words.load_halves(address, min(count, WIDTH))
    return words.load(address) if count >= WIDTH else words.load_part(address, count)


@part
def _write(item, address, lanes, count):
    if item == 2:
        words.store_halves(address, lanes, min(count, WIDTH))
    elif count >= WIDTH:
        words.store(address, lanes)
    else:
        words.store_part(address, lanes, count)


@compiled()
def largest(rows, row_apart, head_apart, count, heads, item, channels):
    """The largest magnitude in the first ``channels`` of all rows; NaN where one is NaN."""
    zero = words.splat(np.float32(0))
    found = zero
    for row in range(count):
        for head in range(heads):
            address = rows + row * row_apart + head * head_apart
            for channel in range(0, channels, WIDTH):
                x = _read(item, address + item * channel, channels - channel)
                found = words.maximum(found, words.maximum(x, words.sub(zero, x)))
    top = words.lane(found, 0)
    for index in range(1, WIDTH):
        value = words.lane(found, index)
        if not value <= top:
            top = value
    return top


@compiled()
def turn(rows, row_apart, head_apart, count, heads, item, adjacent, channels, cos, sin, apart):
    """Turn rows in place: ``channels`` side by side, or so many pairs a half apart. Angles of a row are ``apart``
    bytes behind those of the one before."""
    for row in range(count):
        for head in range(heads):
            address = rows + row * row_apart + head * head_apart
            for channel in range(0, channels, WIDTH):
                left = channels - channel
                c, s = words.load(cos + row * apart + 4 * channel), words.load(sin + row * apart + 4 * channel)
                here = address + item * channel
                a = _read(item, here, left)
                if adjacent:
                    _write(item, here, words.add(words.mul(a, c), words.mul(words.swap(a), s)), left)
                else:
                    there = here + item * channels
                    b = _read(item, there, left)
                    _write(item, here, words.sub(words.mul(a, c), words.mul(b, s)), left)
                    _write(item, there, words.add(words.mul(a, s), words.mul(b, c)), left)
