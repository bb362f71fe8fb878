"""The queries of a prompt, kept until landmarks are made of them."""

from __future__ import annotations

import numpy as np

from warmkv.kernels.formats import F32
from warmkv.kvstore.live.rows.allocation import Allocate, grown


class QueryTrace:
    """Queries (rows, heads, size) float32, one a position, in memory that grows by half.

    **Threading:** one caller at a time."""

    def __init__(self, heads: int, size: int, allocate: Allocate) -> None:
        self._allocate = allocate
        self._rows: F32 = np.empty((0, heads, size), np.float32)
        self._count = 0

    def __len__(self) -> int:
        return self._count

    @property
    def rows(self) -> F32:
        """(rows, heads, size), read-only, unchanged until the next call that changes rows."""
        view = self._rows[: self._count]
        view.flags.writeable = False
        return view

    @property
    def allocated_bytes(self) -> int:
        return self._rows.nbytes

    def push(self, queries: F32) -> None:
        """Keep a copy of ``queries`` (n, heads, size) behind the others. Raises OutOfMemory, nothing changed."""
        self.reserve(len(queries))
        self._rows[self._count : self._count + len(queries)] = queries
        self._count += len(queries)

    def reserve(self, rows: int) -> None:
        """Make room for ``rows`` more. Raises OutOfMemory, nothing changed."""
        needed = self._count + rows
        if needed > len(self._rows):
            shape = (grown(len(self._rows), needed), *self._rows.shape[1:])
            wider = np.asarray(self._allocate(shape, np.dtype(np.float32)), np.float32)
            wider[: self._count] = self._rows[: self._count]
            self._rows = wider

    def truncate(self, rows: int) -> None:
        """Keep the first ``rows``."""
        self._count = min(self._count, rows)
