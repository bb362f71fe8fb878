"""Rows of all heads one token after the other, as containers keep them, and blocks of heads over them.

A token-major row holds its heads one after the other. Formats that store numbers as they are have an
array (rows, heads, size) of their dtype. q8_2f has bytes (rows, heads x (4 x groups + size)): per head
the scales, float32 little-endian, then the int8 codes; the field lies elsewhere. Rotated formats have
bytes as `turboquant.block` says; seed and estimator are told elsewhere. Blocked formats have bytes as `blocks`
says, fp8 has an array (rows, heads, size) of them. Packing copies;
viewing does not, so that rows can be attended in memory that others map too.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from warmkv.kernels.errors import KernelError
from warmkv.kernels.formats import F32, Block, RowFormat, check_block, total_rows
from warmkv.kernels.turboquant.turn import Turn

Packed = npt.NDArray[np.generic]
_SCALE = np.dtype("<f4")


def packed_shape(format_: RowFormat, heads: int, size: int, *, keys: bool) -> tuple[int, ...]:
    """Shape of one packed row: (heads, size) numbers, or (bytes,) of a quantised, blocked or rotated format."""
    return (heads * format_.row_bytes(size, keys=keys),) if _in_bytes(format_) else (heads, size)


def packed_dtype(format_: RowFormat) -> np.dtype[np.generic]:
    """Of packed rows."""
    return np.dtype("u1") if _in_bytes(format_) else format_.code_dtype


def pack(heads: Sequence[Sequence[Block]], format_: RowFormat, size: int, *, keys: bool) -> Packed:
    """The rows of ``heads`` - per head the blocks that follow one another - as one packed array of
    their bytes. Fields are not part of it. Raises KernelError for blocks that do not fit, or heads of
    different lengths."""
    counts = {total_rows(blocks) for blocks in heads}
    if len(counts) != 1:
        raise KernelError(f"heads of {sorted(counts)} rows, expected at least one head and as many rows in each")
    (count,), groups = counts, format_.groups(size, keys=keys)
    packed = np.empty((count, *packed_shape(format_, len(heads), size, keys=keys)), packed_dtype(format_))
    parts = packed.reshape(count, len(heads), format_.row_bytes(size, keys=keys)) if _in_bytes(format_) else packed
    for head, blocks in enumerate(heads):
        at = 0
        for number, block in enumerate(blocks):
            _check(block, format_, size, groups, f"head {head}, block {number}")
            span = parts[at : at + len(block), head]
            if block.scales is None:
                span[:] = block.codes
            else:
                span[:, : 4 * groups] = np.ascontiguousarray(block.scales, _SCALE).view(np.uint8)
                span[:, 4 * groups :] = block.codes.view(np.uint8)
            at += len(block)
    return packed


def view(
    packed: Packed, format_: RowFormat, heads: int, size: int, *, keys: bool, field: F32 | None = None, turn: Turn | None = None
) -> tuple[Block, ...]:  # fmt: skip
    """One block a head over packed rows, which stay where they are and decide whether it is writable.
    ``field`` (heads, size) is that of the rows, None while it is open; ``turn`` is needed just for rotated rows.

    Scales that lie at odd addresses (sizes that are no multiple of 4) are copied: nobody can add up
    floats there at speed. Raises KernelError for another shape or dtype."""
    reason = format_.refusal(size) if format_.blocked else None
    if reason is not None:
        raise KernelError(reason)
    shape, dtype = packed_shape(format_, heads, size, keys=keys), packed_dtype(format_)
    if packed.shape[1:] != shape or packed.dtype != dtype:
        raise KernelError(f"packed rows are {packed.dtype} of {packed.shape[1:]}, expected {dtype} of {shape}")
    if field is not None and (not format_.quantised or field.shape != (heads, size) or field.dtype != np.float32):
        raise KernelError(f"a field of {field.dtype} {field.shape} for {heads} heads of {size} channels in {format_.value}")
    if (turn is not None) != format_.rotated or (turn is not None and turn.size != size):
        raise KernelError(f"rows of {format_.value} with {size} channels, rotated as {turn}")
    if format_.rotated or format_.blocked:
        rows = packed.reshape(len(packed), heads, format_.row_bytes(size, keys=keys))
        return tuple(Block(format_, rows[:, head], turn=turn) for head in range(heads))
    if not format_.quantised:
        return tuple(Block(format_, packed[:, head]) for head in range(heads))
    split = 4 * format_.groups(size, keys=keys)
    parts = packed.reshape(len(packed), heads, split + size)
    return tuple(
        Block(
            format_, parts[:, head, split:].view(np.int8), _aligned(parts[:, head, :split].view(_SCALE)),
            None if field is None else field[head],
        )
        for head in range(heads)
    )  # fmt: skip


def _in_bytes(format_: RowFormat) -> bool:
    """Whether a packed row is bytes rather than numbers."""
    return format_.quantised or format_.rotated or format_.blocked


def _aligned(scales: F32) -> F32:
    return scales if scales.flags.aligned else scales.copy()


def _check(block: Block, format_: RowFormat, size: int, groups: int, where: str) -> None:
    if block.format is not format_:
        raise KernelError(f"{where}: rows of {block.format.value}, expected {format_.value}")
    check_block(block, size, where)
    if block.scales is not None and block.scales.shape[1] != groups:
        raise KernelError(f"{where}: {block.scales.shape[1]} scales a row, expected {groups}")
