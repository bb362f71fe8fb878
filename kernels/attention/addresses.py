"""Where rows lie, as compiled code is told: a line of addresses and distances for every block."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from warmkv.kernels.attention.reference import Blocks, seen
from warmkv.kernels.compiled import forms
from warmkv.kernels.formats import F32, Block, RowFormat

_FORMS = {
    RowFormat.F32: forms.F32, RowFormat.F16: forms.F16, RowFormat.BF16: forms.BF16, RowFormat.Q8_2F: forms.I8,
    RowFormat.FP8: forms.FP8, RowFormat.Q8_0: forms.Q8_0, RowFormat.Q5_1: forms.Q5_1, RowFormat.Q4_0: forms.Q4_0,
}  # fmt: skip


def table(blocks: Blocks, first: int, last: int, kept: list[npt.NDArray[np.generic]]) -> list[tuple[int, ...]]:
    """Rows [first, last) of the blocks as compiled code takes them, a line a block. The addresses are
    good as long as the blocks and ``kept`` are."""
    return [line(block, low, high, kept) for block, low, high in seen(blocks, first, last)]


def line(block: Block, low: int, high: int, kept: list[npt.NDArray[np.generic]]) -> tuple[int, ...]:
    """Rows [low, high) of a block of numbers that were not rotated, as `table` has them."""
    codes = block.codes
    apart = codes.strides[0]
    scales = scales_apart = step = field = 0
    if block.scales is not None:
        rows = _adjacent(block.scales, kept)
        scales_apart, step = rows.strides[0], 4 if rows.shape[1] > 1 else 0
        scales = rows.ctypes.data + low * scales_apart
    if block.field is not None:
        field = _adjacent(block.field, kept).ctypes.data
    return (
        codes.ctypes.data + low * apart, apart, high - low, _FORMS[block.format], scales, scales_apart, step, field,
    )  # fmt: skip


def _adjacent(array: F32, kept: list[npt.NDArray[np.generic]]) -> F32:
    """The array, or a copy of it where it isn't float32 with neighbours side by side."""
    if array.dtype == np.float32 and (array.shape[-1] < 2 or array.strides[-1] == array.itemsize):
        return array
    copied = np.ascontiguousarray(array, np.float32)
    kept.append(copied)
    return copied
