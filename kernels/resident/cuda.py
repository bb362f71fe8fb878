"""Operations on resident planes by CUDA kernels, whoever launches them.

What can be checked without waiting for the device is checked before anything is launched; what only the
device knows, kernels keep to: rows that would lie outside of a plane are not written, and rows that are
not there are not seen. Nothing is allocated but tables of constants, when they are first needed.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from warmkv.kernels.attention.cuda import Attention
from warmkv.kernels.cuda.launch import Launcher
from warmkv.kernels.errors import KernelError
from warmkv.kernels.quant import cuda as quant
from warmkv.kernels.resident.checks import MOST, require, require_counters, require_laid, require_plane, require_rows
from warmkv.kernels.resident.plane import Counters, ResidentPlane
from warmkv.kernels.rope.cuda import Shifting
from warmkv.kernels.rope.reference import Rope
from warmkv.kernels.turboquant.cuda import Turning


class CudaOperations:
    """`RowOperations` of arrays that ``launcher`` can pass on. ``blocks`` are what rows are split for; None: what a device
    like an H200 runs side by side.

    **Threading:** one caller at a time; kernels run in the order of calls."""

    name = "cuda"

    def __init__(self, launcher: Launcher, blocks: int | None = None) -> None:
        self._launcher = launcher
        #: Rotated rows; see `Turning.refused` for rows that could not be stored.
        self.turning = Turning(launcher)
        self._attention, self._shifting = Attention(launcher, self.turning, blocks), Shifting(launcher)

    def append(self, plane: ResidentPlane, rows: Any, counters: Counters) -> None:
        """See `RowOperations.append`. Rows that do not fit behind the length are left out. Raises KernelError."""
        require_plane(plane, "plane")
        require_laid(plane, "plane")
        require(rows, (None, plane.heads, plane.size), "rows")
        require_counters(counters)
        if plane.format.rotated:
            self.turning.append(plane, rows, counters)
        else:
            quant.append(self._launcher, plane, rows, counters)

    def advance(self, counters: Counters, count: int) -> None:
        """See `RowOperations.advance`. Raises KernelError."""
        require_counters(counters)
        if not 0 <= count <= MOST:
            raise KernelError(f"an advance by {count} rows")
        quant.advance(self._launcher, counters, count)

    def decode(self, plane: ResidentPlane, first: int, last: int, out: Any) -> None:
        """See `RowOperations.decode`. Raises KernelError."""
        require_plane(plane, "plane")
        require_laid(plane, "plane")
        require_rows(plane, first, last)
        require(out, (last - first, plane.heads, plane.size), "out")
        if plane.format.rotated:
            self.turning.decode(plane, first, last, out)
        else:
            quant.decode(self._launcher, plane, first, last, out)

    def scratch_floats(self, heads: int, value_size: int, rows: int) -> int:
        """See `RowOperations.scratch_floats`. As much does for any number of queries at once."""
        return self._attention.scratch_floats(heads, value_size, rows)

    def attend(
        self, q: Any, keys: ResidentPlane, values: ResidentPlane, counters: Counters, *, out: Any, scratch: Any, scale: float,
        window: int = 0, softcap: float = 0.0, sinks: Any | None = None,
    ) -> None:  # fmt: skip
        """See `RowOperations.attend`. Raises KernelError."""
        require(q, (None, keys.size), "queries")
        require(out, (q.shape[0], values.size), "out")
        self._attention.attend(
            q[None], keys, values, counters, out=out[None], scratch=scratch, scale=scale, window=window, softcap=softcap,
            sinks=sinks,
        )  # fmt: skip

    def attend_chunk(
        self, q: Any, keys: ResidentPlane, values: ResidentPlane, counters: Counters, *, out: Any, scratch: Any, scale: float,
        window: int = 0, softcap: float = 0.0, sinks: Any | None = None,
    ) -> None:  # fmt: skip
        """See `RowOperations.attend_chunk`. Raises KernelError."""
        self._attention.attend(
            q, keys, values, counters, out=out, scratch=scratch, scale=scale, window=window, softcap=softcap, sinks=sinks,
        )  # fmt: skip

    def merge(self, outs: Any, tops: Any, totals: Any, out: Any) -> None:
        """See `RowOperations.merge`. Raises KernelError."""
        self._attention.merge(outs, tops, totals, out)

    def shift(self, plane: ResidentPlane, first: int, last: int, delta: int, rope: Rope) -> None:
        """See `RowOperations.shift`; keys of f32, f16 and bf16. Halves that grow beyond their format become
        infinite. Raises KernelError."""
        self._shifting.shift(plane, first, last, delta, rope)

    def gather(self, plane: ResidentPlane, kept: Any, scratch: Any) -> None:
        """See `RowOperations.gather`. Raises KernelError."""
        require_plane(plane, "plane")
        require_laid(plane, "plane")
        require(kept, (None,), "kept rows", np.int32)
        require(scratch, (None,), "scratch", np.uint8)
        quant.gather(self._launcher, plane, kept, scratch)
