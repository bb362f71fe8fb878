"""What every storage of rows can do.

A plane holds keys or values of the alive KV heads of one layer. All planes of a layer have as many
rows; whoever changes more than one first does everything that can fail - `PlaneRows.reserve`,
`PlaneRows.encode`, `PlaneRows.refielded`, `PlaneRows.gathered` - and then what cannot: `PlaneRows.write`
and `PlaneRows.take`.
"""

from __future__ import annotations

from typing import Protocol

from warmkv.kernels.formats import F32, Block, RowFormat
from warmkv.kernels.turboquant.turn import Turn
from warmkv.kvstore.live.rows.encoded import Encoded, Indices
from warmkv.kvstore.live.rows.growing import GrowingRows


class PlaneRows(Protocol):
    """Rows of one plane. ``heads`` counts alive KV heads; they are numbered 0.. here.

    **Threading:** one caller at a time; blocks that were handed out stay readable and unchanged only
    until the next call that changes rows."""

    format: RowFormat
    heads: int
    size: int
    keys: bool
    turn: Turn | None

    def __len__(self) -> int:
        """Rows stored."""
        ...

    @property
    def frozen(self) -> bool:
        """Whether the per-channel field of a format that has one is fixed; True for other formats."""
        ...

    @property
    def field(self) -> F32 | None:
        """The frozen field (heads, size), read-only; None while it is open or where there is none."""
        ...

    @property
    def stored_bytes(self) -> int:
        """Bytes of the rows stored, scales and field included; capacity beyond them is not counted."""
        ...

    @property
    def allocated_bytes(self) -> int:
        """Bytes this plane has allocated, capacity included."""
        ...

    @property
    def mapped_bytes(self) -> int:
        """Bytes of rows that lie in somebody else's memory."""
        ...

    def reserve(self, rows: int) -> None:
        """Make room for ``rows`` more. Raises OutOfMemory with the bytes asked for, nothing changed."""
        ...

    def encode(self, rows: F32) -> Encoded:
        """What ``rows`` (n, heads, size) float32 are stored as behind the others; changes nothing. Raises
        RecordError that names head and row where a quantised or rotated format meets what it cannot hold."""
        ...

    def write(self, encoded: Encoded) -> None:
        """Store what `encode` gave; room was reserved. Cannot fail."""
        ...

    def append(self, rows: F32) -> None:
        """`encode` and `write`."""
        ...

    def refielded(self, room: int = 0) -> GrowingRows:
        """A copy in memory of its own with the field fixed from the rows stored, these written anew, and
        room for ``room`` rows more; a plain copy where there is no field to fix. Raises OutOfMemory, nothing
        changed."""
        ...

    def gathered(self, kept: Indices | None, room: int = 0) -> GrowingRows:
        """A copy in memory of its own of the rows at ``kept``, ascending (None: all), with room for ``room``
        more. Raises OutOfMemory, nothing changed."""
        ...

    def take(self, other: GrowingRows) -> None:
        """Become ``other``, which is not to be used any more. Cannot fail."""
        ...

    def freeze(self) -> None:
        """Fix the field from the rows stored and write them anew; nothing where there is none. Raises
        OutOfMemory, nothing changed."""
        ...

    def truncate(self, rows: int) -> None:
        """Keep the first ``rows``. Cannot fail."""
        ...

    def drop_front(self, rows: int) -> None:
        """Forget the first ``rows``; the others keep their bytes. Cannot fail."""
        ...

    def gather(self, kept: Indices) -> None:
        """Keep these rows, ascending. Raises OutOfMemory, nothing changed."""
        ...

    def clear(self) -> None:
        """Forget all rows and the field; memory may be kept."""
        ...

    def release(self) -> None:
        """`clear`, and give the memory back."""
        ...

    def blocks(self, head: int) -> tuple[Block, ...]:
        """The rows of one head where they lie, in order: at least one block; read-only views."""
        ...
