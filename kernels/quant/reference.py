"""Rows into storage formats and back, written to be read beside the formulas.

q8_2f, for a row x with field c (1 everywhere until it is frozen) and each group g of channels:

    r = x / c        s_g = max(max|r_g| / 127, 1e-12)        q = clamp(round(r / s_g), -127, 127)
    x' = q * s_g * c

with halves rounded away from zero, all in float32. The field is frozen once, from what the stored
rows decode to: c = max(sqrt(mean of squares over rows), 1e-6); those rows are then written anew.

Blocks of 32 channels (q8_0, q5_1, q4_0) are in `blocks`, fp8 is in `fp8`.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from warmkv.kernels.errors import KernelError, NotFinite
from warmkv.kernels.formats import F32, KEY_GROUP, MIN_FIELD, MIN_SCALE, Block, RowFormat
from warmkv.kernels.quant import blocks, fp8
from warmkv.kernels.quant.rounding import half_away
from warmkv.kernels.turboquant import block as turned


def encode(rows: F32, format_: RowFormat, *, keys: bool, field: F32 | None = None) -> Block:
    """Store float32 rows (rows, size). The block owns its arrays.

    Quantised and blocked formats and fp8 raise NotFinite for a row with NaN or infinity, blocked ones TooLarge
    where a scale does not fit float16; fp8 turns what is too large into 448. f16 and bf16 keep NaN and infinity,
    and turn what is too large into infinity. Rows of rotated formats have encoders of their own."""
    if format_.rotated:
        raise KernelError(f"rows of {format_.value} are encoded by `turboquant` kernels")
    if rows.ndim != 2 or rows.dtype != np.float32:
        raise KernelError(f"rows are {rows.dtype} of shape {rows.shape}, expected float32 (rows, size)")
    if format_.finite_only:
        require_finite(rows)
    if not format_.quantised:
        return Block(format_, blocks.encode(rows, format_) if format_.blocked else _narrow(rows, format_))
    return _quantise(rows, format_.groups(rows.shape[1], keys=keys), field)


def decode(block: Block) -> F32:
    """The float32 rows (rows, size) a block stands for, as a copy."""
    if block.turn is not None:
        return turned.decode(block)
    if block.format.blocked:
        return blocks.decode(block.codes, block.format)
    if block.format is RowFormat.FP8:
        return fp8.decode(block.codes)
    if block.format is RowFormat.BF16:
        wide: F32 = (block.codes.astype(np.uint32) << np.uint32(16)).view(np.float32)
        return wide
    rows: F32 = block.codes.astype(np.float32)
    if block.scales is None:
        return rows
    spread = np.repeat(block.scales, block.group, axis=1)[:, : block.size]
    np.multiply(rows, spread, out=rows)
    if block.field is not None:
        np.multiply(rows, block.field, out=rows)
    return rows


def require_finite(rows: F32) -> None:
    """Raises NotFinite that names the first row with NaN or infinity."""
    bad = ~np.isfinite(rows).all(axis=1)
    if bad.any():
        row = int(np.argmax(bad))
        raise NotFinite(f"row {row} has NaN or infinity, which a quantised format cannot hold", row)


def field_of(rows: F32) -> F32:
    """The per-channel field of rows (rows, size) that are stored: their RMS."""
    with np.errstate(over="ignore"):
        total: F32 = np.add.reduce(rows * rows, axis=0, dtype=np.float32)
    if not np.isfinite(total).all():
        wide = np.sqrt(np.mean(np.square(rows, dtype=np.float64), axis=0))
        wide_field: F32 = np.maximum(wide.astype(np.float32), MIN_FIELD)
        return wide_field
    field: F32 = np.maximum(np.sqrt(total / np.float32(max(1, len(rows)))), MIN_FIELD)
    return field


def refield(block: Block) -> Block:
    """The same rows with their field frozen: decoded, and quantised once more against it."""
    if block.scales is None:
        raise KernelError(f"rows of format {block.format.value} have no field")
    rows = decode(block)
    return _quantise(rows, int(block.scales.shape[1]), field_of(rows))


def _quantise(rows: F32, groups: int, field: F32 | None) -> Block:
    count, size = rows.shape
    group = size if groups == 1 else KEY_GROUP
    residual = rows if field is None else _against(rows, field)
    codes = np.empty((count, size), np.int8)
    scales = np.empty((count, groups), np.float32)
    for index in range(groups):
        part = residual[:, index * group : (index + 1) * group]
        scale = np.maximum(np.abs(part).max(axis=1, initial=0) / np.float32(127), MIN_SCALE)
        scales[:, index] = scale
        codes[:, index * group : (index + 1) * group] = np.clip(half_away(part / scale[:, None]), -127, 127)
    return Block(RowFormat.Q8_2F, codes, scales, field)


def _against(rows: F32, field: F32) -> F32:
    with np.errstate(over="ignore"):
        residual: F32 = rows / field
    bad = ~np.isfinite(residual).all(axis=1)
    if bad.any():
        row = int(np.argmax(bad))
        raise NotFinite(f"row {row} is too large beside its field", row)
    return residual


def _narrow(rows: F32, format_: RowFormat) -> npt.NDArray[np.generic]:
    if format_ is RowFormat.BF16:
        return to_bf16(rows)
    if format_ is RowFormat.FP8:
        return fp8.encode(rows)
    with np.errstate(over="ignore"):
        return rows.astype(format_.code_dtype)


def to_bf16(rows: F32) -> npt.NDArray[np.uint16]:
    """bf16 bits of float32 numbers, to the nearest, ties to even; NaN stays NaN."""
    bits = np.ascontiguousarray(rows).view(np.uint32)
    rounded = (bits + (np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1)))) >> np.uint32(16)
    quiet = (bits >> np.uint32(16)) | np.uint32(0x40)
    return np.where(np.isnan(rows), quiet, rounded).astype(np.uint16)
