"""What can be computed on resident planes, by whoever computes: numpy and its compiled twins, or CUDA.

Arrays are the device's own. Nothing here allocates where an ``out`` or a scratch is given; nothing waits for
the device. Arguments are the caller's to check: operations check shapes and dtypes, not numbers.
"""

from __future__ import annotations

from typing import Any, Protocol

from warmkv.kernels.resident.plane import Counters, ResidentPlane
from warmkv.kernels.rope.reference import Rope


class RowOperations(Protocol):
    """Operations of one device."""

    name: str

    def append(self, plane: ResidentPlane, rows: Any, counters: Counters) -> None:
        """Quantise ``rows`` (n, heads, size) float32 into the physical rows from ``length - base`` on. The
        length is the one before the append, and stays: see `advance`."""
        ...

    def advance(self, counters: Counters, count: int) -> None:
        """Add ``count`` to the length, on the device."""
        ...

    def decode(self, plane: ResidentPlane, first: int, last: int, out: Any) -> None:
        """Physical rows [first, last) to ``out`` (last - first, heads, size) float32."""
        ...

    def scratch_floats(self, heads: int, value_size: int, rows: int) -> int:
        """float32 numbers of scratch that `attend` needs for ``heads`` query heads over ``rows`` rows."""
        ...

    def attend(
        self, q: Any, keys: ResidentPlane, values: ResidentPlane, counters: Counters, *, out: Any, scratch: Any, scale: float,
        window: int = 0, softcap: float = 0.0, sinks: Any | None = None,
    ) -> None:  # fmt: skip
        """Decode attention: ``q`` (heads, key size) float32 of the newest position over all rows, or the last
        ``window`` of them, to ``out`` (heads, value size). Query heads share KV heads in equal groups;
        ``sinks`` (heads,) are learned sink logits."""
        ...

    def attend_chunk(
        self, q: Any, keys: ResidentPlane, values: ResidentPlane, counters: Counters, *, out: Any, scratch: Any, scale: float,
        window: int = 0, softcap: float = 0.0, sinks: Any | None = None,
    ) -> None:  # fmt: skip
        """The same for queries (n, heads, key size) of the newest n positions, each of which sees itself and
        what came before it; ``out`` (n, heads, value size)."""
        ...

    def merge(self, outs: Any, tops: Any, totals: Any, out: Any) -> None:
        """Attention over parts as attention over their union: ``outs`` (parts, heads, size), ``tops`` and
        ``totals`` (parts, heads) as `attention.reference.Attended` has them, to ``out`` (heads, size)."""
        ...

    def shift(self, plane: ResidentPlane, first: int, last: int, delta: int, rope: Rope) -> None:
        """Turn keys of physical rows [first, last) by ``delta`` positions, where they lie. Raises KernelError
        for formats whose rows cannot be turned."""
        ...

    def gather(self, plane: ResidentPlane, kept: Any, scratch: Any) -> None:
        """Move the physical rows at ``kept`` (n,) int32, ascending, to the front of the plane; ``scratch`` is a
        uint8 device array of at least n rows."""
        ...
