"""What every storage of rows can do.

A plane holds keys or values of the alive KV heads of one layer. All planes of a layer have as many
rows; whoever changes more than one reserves first, so that nothing fails half-way.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt

from warmkv.kernels.formats import F32, Block, RowFormat

Indices = npt.NDArray[np.intp]


class PlaneRows(Protocol):
    """Rows of one plane. ``heads`` counts alive KV heads; they are numbered 0.. here.

    **Threading:** one caller at a time; blocks that were handed out stay readable and unchanged only
    until the next call that changes rows."""

    format: RowFormat
    heads: int
    size: int

    def __len__(self) -> int:
        """Rows stored."""
        ...

    @property
    def frozen(self) -> bool:
        """Whether the per-channel field of a format that has one is fixed; True for other formats."""
        ...

    @property
    def stored_bytes(self) -> int:
        """Bytes of the rows stored, scales and field included; capacity beyond them is not counted."""
        ...

    def reserve(self, rows: int) -> None:
        """Make room for ``rows`` more. Raises OutOfMemory with the bytes asked for, nothing changed."""
        ...

    def append(self, rows: F32) -> None:
        """Store rows (n, heads, size) float32 behind the others; room was reserved. Raises RecordError
        that names the row where a quantised format meets NaN or infinity, nothing changed."""
        ...

    def freeze(self) -> None:
        """Fix the field from the rows stored and write them anew; nothing where there is none."""
        ...

    def truncate(self, rows: int) -> None:
        """Keep the first ``rows``."""
        ...

    def drop_front(self, rows: int) -> None:
        """Forget the first ``rows``; the others keep their bytes."""
        ...

    def gather(self, kept: Indices) -> None:
        """Keep these rows, ascending. Raises OutOfMemory, nothing changed."""
        ...

    def clear(self) -> None:
        """Forget all rows and the field; memory may be kept."""
        ...

    def blocks(self, head: int) -> tuple[Block, ...]:
        """The rows of one head where they lie, in order; read-only views."""
        ...
