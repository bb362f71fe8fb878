"""Storage formats of attention rows, each once: what a row is made of and how many bytes it takes.

A plane of one KV head is a `Block`: codes of shape (rows, size), for quantised formats scales of
shape (rows, groups) and, once frozen, a per-channel field of shape (size,). Blocks are views: rows of
a head may lie far apart (token-major segments), only the channels of a row must be adjacent.
Codes of rotated formats are bytes, (rows, bytes of a row), which `turboquant.block` tells apart, those of
blocked formats bytes as `quant.blocks` lists them, those of fp8 (e4m3fn) one byte a channel.

**Source:** q8_2f is the two-field scheme of the CMF runtime: an int8 row, a scale per group of
channels, and an RMS field over all rows that takes out what channels differ by.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum

import numpy as np
import numpy.typing as npt

from warmkv.kernels.arrays import F32 as F32
from warmkv.kernels.errors import KernelError
from warmkv.kernels.turboquant.rotation import refusal as unturnable
from warmkv.kernels.turboquant.turn import Turn

#: Keys are scaled in groups of so many channels: logits feel the error of a dot product.
KEY_GROUP = 32
#: Channels of a block of the ggml formats.
BLOCK = 32
#: Rows after which the field of q8_2f is frozen.
WARMUP_ROWS = 64
MIN_SCALE = np.float32(1e-12)
MIN_FIELD = np.float32(1e-6)


class RowFormat(Enum):
    """How numbers of a row are stored. Values are the names used in plans and reports."""

    F32 = "f32"
    F16 = "f16"
    BF16 = "bf16"
    Q8_2F = "q8_2f"
    TQ_KEY = "tq_key"
    TQ_VALUE = "tq_value"
    TQ3 = "tq3"
    Q8_0 = "q8_0"
    Q5_1 = "q5_1"
    Q4_0 = "q4_0"
    FP8 = "fp8"

    @property
    def blocked(self) -> bool:
        """Whether rows are packed blocks of 32 channels, each with a scale of its own: the layouts of ggml.
        Heads have a multiple of 32 channels, so that no block straddles two."""
        return self in _BLOCK_BYTES

    @property
    def quantised(self) -> bool:
        """Whether rows are scaled numbers beside a field that is frozen once."""
        return self is RowFormat.Q8_2F

    @property
    def rotated(self) -> bool:
        """Whether rows are packed codes of rotated coordinates and their lengths, see `turboquant.planes`:
        keys of 2 + 1 bits, values of 2 bits, keys of 3 bits. Each stores one side only."""
        return self in _BITS

    @property
    def finite_only(self) -> bool:
        """Whether rows with NaN or infinity are refused. Rotated rows are told by their lengths."""
        return self.quantised or self.blocked or self is RowFormat.FP8

    def refusal(self, size: int) -> str | None:
        """Why heads of so many channels cannot be stored so; None for those that can."""
        if self.rotated:
            return unturnable(size)
        if self.blocked and (size < BLOCK or size % BLOCK):
            return f"heads of {size} channels: not a multiple of {BLOCK}, the channels of a block of {self.value}"
        return None

    def stores(self, *, keys: bool) -> bool:
        """Whether rows of that side can be stored so."""
        return _ONE_SIDED.get(self, keys) == keys

    @property
    def code_dtype(self) -> np.dtype[np.generic]:
        """Of the codes; bf16 is kept as its bits, rotated rows as bytes."""
        return _CODES[self]

    @property
    def append_stable(self) -> bool:
        """Whether rows keep their bytes whatever is appended. Those of q8_2f are written once more
        when their field is frozen."""
        return not self.quantised

    def groups(self, size: int, *, keys: bool) -> int:
        """Scales of one row of ``size`` channels: keys have one per 32 channels, values one."""
        if not self.quantised:
            return 0
        return -(-size // KEY_GROUP) if keys else 1

    def columns(self, size: int) -> int:
        """Codes of a row of ``size`` channels; bytes where the format packs them."""
        return self.row_bytes(size, keys=True) if self.rotated or self.blocked else size

    def row_bytes(self, size: int, *, keys: bool) -> int:
        """Bytes of one row of one head. Rotated rows are whole bytes for sizes divisible by 8 only."""
        if self.rotated:
            bits, norms = _BITS[self]
            return size * bits // 8 + 2 * norms
        if self.blocked:
            return -(-size // BLOCK) * _BLOCK_BYTES[self]
        return size * self.code_dtype.itemsize + 4 * self.groups(size, keys=keys)


_CODES: dict[RowFormat, np.dtype[np.generic]] = {
    RowFormat.F32: np.dtype("<f4"),
    RowFormat.F16: np.dtype("<f2"),
    RowFormat.BF16: np.dtype("<u2"),
    RowFormat.Q8_2F: np.dtype("i1"),
    RowFormat.TQ_KEY: np.dtype("u1"),
    RowFormat.TQ_VALUE: np.dtype("u1"),
    RowFormat.TQ3: np.dtype("u1"),
    RowFormat.Q8_0: np.dtype("u1"),
    RowFormat.Q5_1: np.dtype("u1"),
    RowFormat.Q4_0: np.dtype("u1"),
    RowFormat.FP8: np.dtype("u1"),
}
#: Bits of a channel and float16 numbers of a row, of rotated formats.
_BITS = {RowFormat.TQ_KEY: (3, 2), RowFormat.TQ_VALUE: (2, 1), RowFormat.TQ3: (3, 1)}
#: Bytes of a block of 32 channels.
_BLOCK_BYTES = {RowFormat.Q8_0: 34, RowFormat.Q5_1: 24, RowFormat.Q4_0: 18}
_ONE_SIDED = {RowFormat.TQ_KEY: True, RowFormat.TQ3: True, RowFormat.TQ_VALUE: False}


@dataclass(frozen=True, slots=True)
class Block:
    """Rows of one plane of one KV head, as stored. Arrays are borrowed views.

    ``codes`` (rows, size) of the format's dtype, of rotated and blocked formats (rows, bytes); ``scales`` (rows, groups)
    float32 for quantised formats, else None; ``field`` (size,) float32 once frozen, else None: every channel
    counts as 1. ``turn`` is what rotated rows were rotated by, else None."""

    format: RowFormat
    codes: npt.NDArray[np.generic]
    scales: F32 | None = None
    field: F32 | None = None
    turn: Turn | None = None

    def __len__(self) -> int:
        return int(self.codes.shape[0])

    @property
    def size(self) -> int:
        if self.format.blocked:
            return int(self.codes.shape[1]) // _BLOCK_BYTES[self.format] * BLOCK
        return int(self.codes.shape[1]) if self.turn is None else self.turn.size

    @property
    def group(self) -> int:
        """Channels that share a scale."""
        if self.scales is None or self.scales.shape[1] == 1:
            return max(1, self.size)
        return KEY_GROUP

    def rows(self, first: int, last: int) -> Block:
        """Rows [first, last), as a view."""
        scales = None if self.scales is None else self.scales[first:last]
        return replace(self, codes=self.codes[first:last], scales=scales)


def check_block(block: Block, size: int, where: str) -> None:
    """Raises KernelError unless shapes and dtypes are what the format demands."""
    codes, columns = block.codes, block.format.columns(size)
    reason = block.format.refusal(size) if block.format.blocked else None
    if reason is not None:
        raise KernelError(f"{where}: {reason}")
    if codes.ndim != 2 or codes.shape[1] != columns:
        raise KernelError(f"{where}: codes have shape {codes.shape}, expected (rows, {columns})")
    if (block.turn is None) == block.format.rotated or (block.turn is not None and block.turn.size != size):
        raise KernelError(f"{where}: rows of {block.format.value} with {size} channels, rotated as {block.turn}")
    if codes.dtype != block.format.code_dtype:
        raise KernelError(f"{where}: codes are {codes.dtype}, format {block.format.value} has {block.format.code_dtype}")
    if columns > 1 and len(block) and codes.strides[1] != codes.itemsize:
        raise KernelError(f"{where}: the channels of a row are {codes.strides[1]} bytes apart, expected {codes.itemsize}")
    if (block.scales is None) == block.format.quantised:
        raise KernelError(f"{where}: format {block.format.value} {'needs' if block.format.quantised else 'has no'} scales")
    if block.scales is not None:
        groups = {1, -(-size // KEY_GROUP)}
        if block.scales.ndim != 2 or block.scales.shape[0] != len(block) or block.scales.shape[1] not in groups:
            raise KernelError(
                f"{where}: scales have shape {block.scales.shape}, expected ({len(block)}, one of {sorted(groups)})"
            )
    if block.field is not None and (not block.format.quantised or block.field.shape != (size,)):
        raise KernelError(
            f"{where}: a field of shape {block.field.shape} beside rows of {block.format.value} with {size} channels"
        )


def total_rows(blocks: Sequence[Block]) -> int:
    return sum(len(block) for block in blocks)
