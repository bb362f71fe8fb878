"""What a Nyström layer keeps until it is sealed: rows as any layer has them, and every position's queries."""

from __future__ import annotations

import numpy as np

from warmkv.kernels.dispatch import Kernels
from warmkv.kernels.formats import F32
from warmkv.kernels.nystrom.reference import Group
from warmkv.kvstore.live.layers import checks
from warmkv.kvstore.live.layers.attention import AttentionLayer
from warmkv.kvstore.live.layers.base import where
from warmkv.kvstore.live.layers.nystrom_groups import sealed
from warmkv.kvstore.live.layers.trace import QueryTrace
from warmkv.kvstore.live.memory import LayerMemory
from warmkv.kvstore.live.plan import LayerPlan
from warmkv.kvstore.live.rows.allocation import Allocate, refusals
from warmkv.schema.errors import SealError


class Collecting:
    """``attention`` has the rows, ``trace`` the queries; ``boundary`` is the row count at which they are to
    be sealed, None as long as nobody named any.

    **Threading:** one caller at a time."""

    def __init__(
        self, plan: LayerPlan, index: int, kernels: Kernels, threads: int, allocate: Allocate, boundary: int | None
    ) -> None:
        self.attention = AttentionLayer(plan, index=index, kernels=kernels, threads=threads, allocate=allocate)
        self.trace = QueryTrace(plan.heads, plan.key_size, allocate)
        self.boundary = boundary
        self._plan, self._name, self._kernels = plan, where(plan, index), kernels

    def queries(self, q: F32) -> F32:
        """``q`` where it is float32 (n, heads, key_size). Raises RecordError."""
        return checks.floats(q, (None, self._plan.heads, self._plan.key_size), f"{self._name}: queries")

    def attend(self, q: F32, observe: bool) -> F32:
        """One position; ``q`` is kept unless the newest row has its queries."""
        missing = self._missing(1)
        out = self.attention.attend(q, observe=observe)
        if missing:
            self.trace.push(q[None])
        return out

    def attend_chunk(self, q: F32, observe: bool) -> F32:
        """The newest n positions; ``q`` is kept unless these rows have their queries."""
        missing = self._missing(len(self.queries(q)))
        out = self.attention.attend_chunk(q, observe=observe)
        if missing:
            self.trace.push(q)
        return out

    def _missing(self, count: int) -> bool:
        """Whether the newest ``count`` rows are those without queries; there is room for these then."""
        missing = len(self.trace) + count == self.attention.rows
        if missing:
            self.trace.reserve(count)
        return missing

    def truncate_last(self, count: int) -> None:
        """As `AttentionLayer.truncate_last`, queries included."""
        self.attention.truncate_last(count)
        self.trace.truncate(self.attention.rows)

    def groups(self) -> tuple[Group, ...]:
        """The states made of rows and queries; neither changes. Raises SealError that says why there are
        none, OutOfMemory."""
        attention, rows = self.attention, self.attention.rows
        if self._plan.quantised:
            raise SealError(
                f"{self._name}: rows of {self._plan.key_format.value} and {self._plan.value_format.value}, expected f32"
            )
        if len(self.trace) != rows:
            raise SealError(f"{self._name}: queries of {len(self.trace)} positions, expected {rows}")
        if attention.sinks is not None:
            raise SealError(f"{self._name}: learned sinks, which the state has no room for")
        if attention.position != rows or not attention.gapless or {len(attention.keys), len(attention.values)} != {rows}:
            raise SealError(f"{self._name}: {rows} rows at position {attention.position}, expected all rows from the start")
        copied = rows * self._plan.group * self._plan.key_size * np.dtype(np.float32).itemsize
        with refusals(copied, f"{self._name}: the seal of {rows} rows"):
            return sealed(self._plan, self._name, attention.keys, attention.values, self.trace.rows, self._kernels)

    def memory(self) -> LayerMemory:
        return self.attention.memory() + LayerMemory(constant=self.trace.allocated_bytes)
