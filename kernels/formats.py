"""Storage formats of attention rows, each once: what a row is made of and how many bytes it takes.

A plane of one KV head is a `Block`: codes of shape (rows, size), for quantised formats scales of
shape (rows, groups) and, once frozen, a per-channel field of shape (size,). Blocks are views: rows of
a head may lie far apart (token-major segments), only the channels of a row must be adjacent.

**Source:** q8_2f is the two-field scheme of the CMF runtime: an int8 row, a scale per group of
channels, and an RMS field over all rows that takes out what channels differ by.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum

import numpy as np
import numpy.typing as npt

from warmkv.kernels.errors import KernelError

F32 = npt.NDArray[np.float32]
#: Keys are scaled in groups of so many channels: logits feel the error of a dot product.
KEY_GROUP = 32
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

    @property
    def quantised(self) -> bool:
        return self is RowFormat.Q8_2F

    @property
    def code_dtype(self) -> np.dtype[np.generic]:
        """Of the codes; bf16 is kept as its bits."""
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

    def row_bytes(self, size: int, *, keys: bool) -> int:
        """Bytes of one row of one head."""
        return size * self.code_dtype.itemsize + 4 * self.groups(size, keys=keys)


_CODES: dict[RowFormat, np.dtype[np.generic]] = {
    RowFormat.F32: np.dtype("<f4"),
    RowFormat.F16: np.dtype("<f2"),
    RowFormat.BF16: np.dtype("<u2"),
    RowFormat.Q8_2F: np.dtype("i1"),
}


@dataclass(frozen=True, slots=True)
class Block:
    """Rows of one plane of one KV head, as stored. Arrays are borrowed views.

    ``codes`` (rows, size) of the format's dtype; ``scales`` (rows, groups) float32 for quantised
    formats, else None; ``field`` (size,) float32 once frozen, else None: every channel counts as 1."""

    format: RowFormat
    codes: npt.NDArray[np.generic]
    scales: F32 | None = None
    field: F32 | None = None

    def __len__(self) -> int:
        return int(self.codes.shape[0])

    @property
    def size(self) -> int:
        return int(self.codes.shape[1])

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
    codes = block.codes
    if codes.ndim != 2 or codes.shape[1] != size:
        raise KernelError(f"{where}: codes have shape {codes.shape}, expected (rows, {size})")
    if codes.dtype != block.format.code_dtype:
        raise KernelError(f"{where}: codes are {codes.dtype}, format {block.format.value} has {block.format.code_dtype}")
    if size > 1 and len(block) and codes.strides[1] != codes.itemsize:
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
