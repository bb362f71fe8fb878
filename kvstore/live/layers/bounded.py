"""A layer of a fixed ring: the last W rows with raw keys, beside learned sink rows.

Insert and attend are one step, since a row that was overwritten cannot be seen again. What is
overwritten goes into undo rows, so that a rejected draft can be taken back bit for bit.

**Source:** `swa_sink_v1` of the CMF runtime.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from warmkv.kernels import dispatch
from warmkv.kernels.dispatch import Kernels
from warmkv.kernels.formats import F32
from warmkv.kernels.ring.reference import Rotation
from warmkv.kvstore.live.layers import checks
from warmkv.kvstore.live.layers.base import check_count, next_generation, where
from warmkv.kvstore.live.memory import LayerMemory
from warmkv.kvstore.live.plan import LayerPlan
from warmkv.kvstore.live.rows.allocation import Allocate, allocate, refusals
from warmkv.schema.errors import CannotRewind, RecordError


@dataclass(frozen=True, slots=True)
class RingSnapshot:
    """``keys`` (kv_heads, W, key_size) and ``values`` (kv_heads, W, value_size) float32 as the ring has
    them, position t in slot t mod W, after ``seen`` rows. Slots no row went into are part of it."""

    keys: F32
    values: F32
    seen: int


class BoundedLayer:
    """The ring of a plan with `RingPlan`. Nothing is stored per position: all memory is taken at once.

    Keys and queries come without rotation; the kernel turns the query by the distance. Query head h
    reads KV head h // group. ``keys`` and ``values`` are the ring's own arrays, shaped as in `RingSnapshot`.

    **Threading:** one caller at a time."""

    def __init__(self, plan: LayerPlan, *, index: int = 0, kernels: Kernels | None = None, allocate: Allocate = allocate) -> None:
        """Raises RecordError for another kind of plan, OutOfMemory, BackendMissing."""
        plan.validate(index)
        if plan.ring is None:
            raise RecordError(f"{where(plan, index)}: the plan has no ring")
        self.plan = plan
        self.index = index
        self.position = 0
        self.generation = next_generation()
        self.keys = _zeros(allocate, plan.kv_heads, plan.ring.window, plan.key_size)
        self.values = _zeros(allocate, plan.kv_heads, plan.ring.window, plan.value_size)
        self._undo_keys = _zeros(allocate, plan.ring.undo_rows, plan.kv_heads, plan.key_size)
        self._undo_values = _zeros(allocate, plan.ring.undo_rows, plan.kv_heads, plan.value_size)
        self._undone = 0
        self._ring = plan.ring
        table = 2 * plan.ring.window * len(plan.ring.inv_freq) * np.dtype(np.float32).itemsize
        with refusals(table, f"{where(plan, index)}: its table of rotations"):
            self._rotation = _rotation(plan.ring.window, plan.ring.inv_freq, plan.ring.rope_scale)
        self._kernels = kernels or dispatch.kernels("auto")
        self.sink_keys: F32 | None = None
        self.sink_values: F32 | None = None

    @property
    def rows(self) -> int:
        """Rows a query sees, sinks not counted."""
        return min(self.position, self._ring.window)

    @property
    def undo_rows(self) -> int:
        """How many positions can be taken back now."""
        return self._undone

    def set_sinks(self, keys: F32, values: F32) -> None:
        """The layer's learned sink rows, (kv_heads, sinks, key_size) and (kv_heads, sinks, value_size):
        weights, kept by `clear` and in no snapshot. Copied. Raises RecordError, nothing changed."""
        name, plan = where(self.plan, self.index), self.plan
        checks.floats(keys, (plan.kv_heads, self._ring.sinks, plan.key_size), f"{name}: sink keys")
        checks.floats(values, (plan.kv_heads, self._ring.sinks, plan.value_size), f"{name}: sink values")
        self.sink_keys, self.sink_values = keys.copy(), values.copy()

    def step(self, q: F32, k: F32, v: F32) -> F32:
        """Insert the rows of one position, then attend: ``q`` (heads, key_size), ``k`` (kv_heads,
        key_size), ``v`` (kv_heads, value_size); returns (heads, value_size). Raises RecordError, nothing
        changed."""
        self._check(q, k, v, ())
        self._insert(k, v)
        return self._attend(q)

    def step_chunk(self, q: F32, k: F32, v: F32) -> F32:
        """As many steps as ``q`` (n, heads, key_size), ``k`` (n, kv_heads, key_size) and ``v`` (n, kv_heads,
        value_size) have positions; returns (n, heads, value_size). Raises RecordError, nothing changed."""
        self._check(q, k, v, (len(q) if np.ndim(q) else 0,))
        out = np.empty((len(q), self.plan.heads, self.plan.value_size), np.float32)
        for at in range(len(q)):
            self._insert(k[at], v[at])
            out[at] = self._attend(q[at])
        return out

    def snapshot(self) -> RingSnapshot:
        """The ring bit for bit, copied. Undo rows are not part of it."""
        return RingSnapshot(self.keys.copy(), self.values.copy(), self.position)

    def restore(self, snapshot: RingSnapshot) -> None:
        """Replace the ring by a snapshot's, copied in; there is nothing to undo afterwards. Raises
        RecordError, nothing changed."""
        self.prepare_restore(snapshot)()

    def prepare_restore(self, snapshot: RingSnapshot) -> Callable[[], None]:
        """Everything of `restore` that may fail; calling what is returned cannot."""
        name = where(self.plan, self.index)
        checks.floats(snapshot.keys, self.keys.shape, f"{name}: ring keys")
        checks.floats(snapshot.values, self.values.shape, f"{name}: ring values")
        if snapshot.seen < 0:
            raise RecordError(f"{name}: a ring of {snapshot.seen} rows seen, expected at least 0")

        def install() -> None:
            self.keys[:], self.values[:] = snapshot.keys, snapshot.values
            self.position, self._undone = snapshot.seen, 0
            self.generation = next_generation()

        return install

    def check_truncate(self, count: int) -> None:
        name = where(self.plan, self.index)
        check_count(name, count, self.position)
        if count > self._undone:
            raise CannotRewind(
                f"{name}: {count} positions to take back, {self._undone} undo rows are held of at most {self._ring.undo_rows}"
            )

    def truncate_last(self, count: int) -> None:
        """Take back the newest ``count`` positions: the ring is bit for bit what it was before them.
        Raises CannotRewind beyond the undo rows, and then nothing changed."""
        self.check_truncate(count)
        for _ in range(count):
            self.position -= 1
            self._undone -= 1
            slot, kept = self.position % self._ring.window, self.position % self._ring.undo_rows
            self.keys[:, slot], self.values[:, slot] = self._undo_keys[kept], self._undo_values[kept]

    def clear(self) -> None:
        """Zeros at position 0; size and sink rows stay."""
        for array in (self.keys, self.values, self._undo_keys, self._undo_values):
            array.fill(0)
        self.position, self._undone = 0, 0
        self.generation = next_generation()

    def memory(self) -> LayerMemory:
        ring = self.keys.nbytes + self.values.nbytes
        undo = self._undo_keys.nbytes + self._undo_values.nbytes
        weights = self._rotation.cos.nbytes + self._rotation.sin.nbytes
        if self.sink_keys is not None and self.sink_values is not None:
            weights += self.sink_keys.nbytes + self.sink_values.nbytes
        return LayerMemory(bounded=ring + undo, weights=weights)

    def _insert(self, k: F32, v: F32) -> None:
        slot = self.position % self._ring.window
        if self._ring.undo_rows:
            kept = self.position % self._ring.undo_rows
            self._undo_keys[kept], self._undo_values[kept] = self.keys[:, slot], self.values[:, slot]
            self._undone = min(self._undone + 1, self._ring.undo_rows)
        self.keys[:, slot], self.values[:, slot] = k, v
        self.position += 1

    def _attend(self, q: F32) -> F32:
        out = np.empty((self.plan.heads, self.plan.value_size), np.float32)
        for head in range(self.plan.kv_heads):
            mine = slice(head * self.plan.group, (head + 1) * self.plan.group)
            out[mine] = self._kernels.ring_attend(
                q[mine], self.keys[head], self.values[head], self.position, self._rotation, scale=self.plan.logit_scale,
                sink_keys=None if self.sink_keys is None else self.sink_keys[head],
                sink_values=None if self.sink_values is None else self.sink_values[head],
            )  # fmt: skip
        return out

    def _check(self, q: F32, k: F32, v: F32, lead: tuple[int, ...]) -> None:
        name, plan = where(self.plan, self.index), self.plan
        checks.floats(q, (*lead, plan.heads, plan.key_size), f"{name}: queries")
        checks.floats(k, (*lead, plan.kv_heads, plan.key_size), f"{name}: keys")
        checks.floats(v, (*lead, plan.kv_heads, plan.value_size), f"{name}: values")
        if self._ring.sinks and self.sink_keys is None:
            raise RecordError(f"{name}: its {self._ring.sinks} sink rows were never set")


def _zeros(allocate: Allocate, *shape: int) -> F32:
    array = np.asarray(allocate(shape, np.dtype(np.float32)), np.float32)
    array.fill(0)
    return array


@lru_cache(maxsize=16)
def _rotation(window: int, inv_freq: tuple[float, ...], rope_scale: float) -> Rotation:
    """One table for all layers alike."""
    return Rotation.table(window, np.asarray(inv_freq, np.float64), rope_scale)
