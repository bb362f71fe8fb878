"""What sources call storage formats: the numbers of `schema.identity.PlaneFormat`, which kernels may not import."""

from __future__ import annotations

from warmkv.kernels.formats import RowFormat

FORMAT_NUMBERS: dict[RowFormat, int] = {
    RowFormat.F32: 1, RowFormat.F16: 2, RowFormat.BF16: 3, RowFormat.Q8_2F: 5, RowFormat.Q8_0: 6, RowFormat.Q5_1: 7,
    RowFormat.Q4_0: 8, RowFormat.FP8: 9, RowFormat.TQ_KEY: 13, RowFormat.TQ_VALUE: 14, RowFormat.TQ3: 15,
}  # fmt: skip
