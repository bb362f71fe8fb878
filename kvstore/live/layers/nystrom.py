"""A layer that is exact up to a boundary and of constant size from there on.

It **collects** first: rows are kept and attended as in any layer, and queries besides. Once there are
enough rows it can be **sealed**: landmarks are made of rows and queries, the rows are given up, and
each token is one step. A seal that fails leaves nothing to go on with: the layer **refuses** until it is
cleared, so that nobody continues on half a context.

**Source:** the deferred boundary and the checked seal of the CMF runtime; formulas in `kernels.nystrom`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from warmkv.kernels import dispatch
from warmkv.kernels.dispatch import Kernels
from warmkv.kernels.formats import F32
from warmkv.kernels.nystrom.reference import Group, memory_bytes
from warmkv.kvstore.live.layers import checks
from warmkv.kvstore.live.layers.attention import AttentionLayer
from warmkv.kvstore.live.layers.base import check_count, next_generation, where
from warmkv.kvstore.live.layers.collecting import Collecting
from warmkv.kvstore.live.layers.nystrom_groups import check_groups
from warmkv.kvstore.live.memory import LayerMemory
from warmkv.kvstore.live.plan import LayerPlan
from warmkv.kvstore.live.rows.allocation import Allocate, allocate
from warmkv.kvstore.live.rows.base import PlaneRows
from warmkv.schema.errors import CannotRewind, RecordError, SealError


class NystromLayer:
    """Attention of a plan with `NystromPlan`. Keys and queries are rotated; query head h reads KV head
    h // group.

    ``groups`` is the state of each KV head once sealed, else empty; ``failure`` says why the layer refuses
    everything but to be cleared or replaced. Whoever runs the model asks `crosses` before it appends,
    splits there, and calls `seal`. Rows evicted elsewhere stay here: the state is the eviction.

    **Threading:** one caller at a time."""

    def __init__(
        self, plan: LayerPlan, *, index: int = 0, kernels: Kernels | None = None, threads: int = 1, allocate: Allocate = allocate
    ) -> None:  # fmt: skip
        """Raises RecordError for another kind of plan, BackendMissing."""
        plan.validate(index)
        if plan.nystrom is None:
            raise RecordError(f"{where(plan, index)}: the plan has no landmarks")
        self.plan = plan
        self.index = index
        self.groups: tuple[Group, ...] = ()
        self.failure: str | None = None
        self._name, self._nystrom = where(plan, index), plan.nystrom
        self._kernels = kernels or dispatch.kernels("auto")
        self._threads, self._allocate = threads, allocate
        self._generation = next_generation()
        self._steps = self._sealed_rows = 0
        self._transition = False
        self._sinks: F32 | None = None
        self._rows: Collecting | None = self._collecting(self._asked_for)

    @property
    def attention(self) -> AttentionLayer | None:
        """The rows, while collecting."""
        return None if self._rows is None else self._rows.attention

    @property
    def trace(self) -> F32:
        """The queries collected, (rows, heads, key_size) float32, read-only; none once sealed."""
        none: F32 = np.empty((0, self.plan.heads, self.plan.key_size), np.float32)
        return none if self._rows is None else self._rows.trace.rows

    @property
    def collecting(self) -> bool:
        return self._rows is not None

    @property
    def sealed(self) -> bool:
        return bool(self.groups)

    @property
    def rows(self) -> int:
        """Rows stored: none once sealed."""
        return 0 if self._rows is None else self._rows.attention.rows

    @property
    def sealed_rows(self) -> int:
        """Rows the state was made of; 0 unless sealed."""
        return self._sealed_rows

    @property
    def position(self) -> int:
        return self._sealed_rows + self._steps if self._rows is None else self._rows.attention.position

    @property
    def generation(self) -> int:
        return self._generation if self._rows is None else self._rows.attention.generation

    @property
    def pending_boundary(self) -> int | None:
        """Rows at which the layer is to be sealed; None once it is no longer collecting, and as long as
        neither the plan nor a seal that came too early has named any."""
        return None if self._rows is None else self._rows.boundary

    def crosses(self, count: int) -> bool:
        """Whether ``count`` more rows reach the pending boundary, or it has been reached: these rows are to
        be appended in two parts, with the seal between them. Never True without a boundary. Raises
        RecordError for a negative count."""
        if count < 0:
            raise RecordError(f"{self._name}: {count} rows, expected at least 0")
        return self.pending_boundary is not None and self.rows + count >= self.pending_boundary

    def append(self, k: F32, v: F32) -> None:
        """As `AttentionLayer.append`. Raises SealError after a failed seal, RecordError once sealed."""
        self._open("append").attention.append(k, v)

    def push_queries(self, q: F32) -> None:
        """Collect the queries of further positions, ``q`` (heads, key_size) or (n, heads, key_size), for a
        caller that attends elsewhere; before or after the rows are appended. Nothing happens once
        sealed. Raises SealError after a failed seal, RecordError, OutOfMemory, nothing changed."""
        if not self.sealed:
            rows = self._open("collect queries")
            rows.trace.push(rows.queries(q[None] if isinstance(q, np.ndarray) and q.ndim == 2 else q))

    def attend(self, q: F32, *, observe: bool = True) -> F32:
        """As `AttentionLayer.attend` over all rows; ``q`` is collected as the newest position's unless
        queries of it were. Raises as `append` and `push_queries`."""
        return self._open("attend").attend(q, observe)

    def attend_chunk(self, q: F32, *, observe: bool = True) -> F32:
        """As `AttentionLayer.attend_chunk`; ``q`` is collected as the newest n positions' unless queries
        of them were. Raises as `append` and `push_queries`."""
        return self._open("attend").attend_chunk(q, observe)

    def seal(self) -> bool:
        """Become a state of constant size and give the rows up. Returns whether the layer is sealed now:
        False below the boundary (that of the plan, at least `NystromPlan.floor`), which is pending from
        then on, with nothing else changed; True at once where it was sealed before.

        All is checked, and the state computed, while the rows are intact. Raises SealError where it
        cannot be done: rows and queries are gone then, and the layer refuses until `clear`. Raises
        OutOfMemory, nothing changed."""
        if self.sealed:
            return True
        rows = self._open("seal")
        if rows.attention.rows < self._nystrom.target:
            rows.boundary = self._nystrom.target
            return False
        try:
            groups = rows.groups()
        except SealError as exc:
            self._become(failure=str(exc))
            raise
        self._become(groups=groups, sealed_rows=rows.attention.position)
        self._transition = True
        return True

    def take_transition(self) -> bool:
        """True once after a seal: whoever mirrors the rows elsewhere gives its copy up then."""
        taken, self._transition = self._transition, False
        return taken

    def device_views(self) -> tuple[Group, ...] | None:
        """The states for a device to step, borrowed; None unless sealed, and where a state is exact: its
        window grows, which device kernels do not carry."""
        return None if not self.groups or any(group.exact for group in self.groups) else self.groups

    def step(self, q: F32, k: F32, v: F32) -> F32:
        """Take in the rows of one position, then attend: ``q`` (heads, key_size), ``k`` (kv_heads,
        key_size), ``v`` (kv_heads, value_size); returns (heads, value_size). Raises RecordError unless
        sealed, SealError after a failed seal, nothing changed."""
        self._check_step(q, k, v, ())
        return self._step(q, k, v)

    def step_chunk(self, q: F32, k: F32, v: F32) -> F32:
        """As many steps as ``q`` (n, heads, key_size), ``k`` and ``v`` (n, kv_heads, ...) have positions;
        returns (n, heads, value_size). Raises as `step`."""
        self._check_step(q, k, v, (len(q) if np.ndim(q) else 0,))
        out = np.empty((len(q), self.plan.heads, self.plan.value_size), np.float32)
        for at in range(len(q)):
            out[at] = self._step(q[at], k[at], v[at])
        return out

    def prepare_collecting(
        self, keys: F32 | PlaneRows, values: F32 | PlaneRows, queries: F32, *, importance: F32 | None, boundary: int | None
    ) -> Callable[[], None]:
        """Replace everything by what a collecting layer had. All that may fail is done here; calling what
        is returned cannot. Rows as for `AttentionLayer.prepare_adopt`, from position 0 on; ``queries``
        (rows, heads, key_size) are copied; ``boundary`` is the pending one. Raises RecordError,
        OutOfMemory, nothing changed."""
        if boundary is not None and boundary < self._nystrom.floor:
            raise RecordError(f"{self._name}: a boundary of {boundary}, expected at least {self._nystrom.floor}")
        fresh = self._collecting(boundary)
        fresh.trace.push(fresh.queries(queries))
        fresh.attention.adopt(keys, values, position=len(keys), base=0, importance=importance, gapless=True)
        return lambda: self._become(rows=fresh)

    def prepare_sealed(self, groups: Sequence[Group], *, position: int, sealed_rows: int) -> Callable[[], None]:
        """Replace everything by what a sealed layer had: ``groups``, made of ``sealed_rows`` rows and at
        ``position`` now, become the layer's. All that may fail is done here; calling what is returned
        cannot. Raises RecordError, nothing changed."""
        if not 1 <= sealed_rows <= position:
            raise RecordError(f"{self._name}: sealed at {sealed_rows} rows, at position {position}")
        check_groups(self.plan, self._name, groups, position)
        return lambda: self._become(groups=tuple(groups), sealed_rows=sealed_rows, steps=position - sealed_rows)

    def check_truncate(self, count: int) -> None:
        if self._rows is not None:
            self._rows.attention.check_truncate(count)
            return
        check_count(self._name, count, self.position)
        if count:
            raise CannotRewind(f"{self._name}: {count} positions to forget, expected 0: sealed at {self._sealed_rows} rows")

    def truncate_last(self, count: int) -> None:
        """Forget rows and their queries while collecting. Raises CannotRewind once sealed unless ``count``
        is 0, and then nothing changed."""
        self.check_truncate(count)
        if self._rows is not None:
            self._rows.truncate_last(count)

    def clear(self) -> None:
        """Collect anew, with the boundary of the plan; a failed seal is forgotten."""
        self._become(rows=self._collecting(self._asked_for))

    def memory(self) -> LayerMemory:
        """``constant`` is the query trace while collecting, the states once sealed."""
        if self._rows is not None:
            return self._rows.memory()
        weights = 0 if self._sinks is None else self._sinks.nbytes
        return LayerMemory(constant=sum(map(memory_bytes, self.groups)), weights=weights)

    @property
    def _asked_for(self) -> int | None:
        return self._nystrom.target if self._nystrom.boundary else None

    def _collecting(self, boundary: int | None) -> Collecting:
        return Collecting(self.plan, self.index, self._kernels, self._threads, self._allocate, boundary)

    def _become(
        self, *, rows: Collecting | None = None, groups: tuple[Group, ...] = (), failure: str | None = None,
        sealed_rows: int = 0, steps: int = 0,
    ) -> None:  # fmt: skip
        """The one change of phase: what is not named is given up, but for learned sinks, a weight of whatever rows
        there are next."""
        if self._rows is not None:
            self._sinks = self._rows.attention.sinks
        if rows is not None:
            rows.attention.sinks = self._sinks
        self._rows, self.groups, self.failure = rows, groups, failure
        self._sealed_rows, self._steps, self._transition = sealed_rows, steps, False
        self._generation = next_generation()

    def _open(self, what: str) -> Collecting:
        if self.failure is not None:
            raise SealError(f"{self.failure}; clear the layer to start anew")
        if self._rows is None:
            raise RecordError(f"{self._name}: sealed at {self._sealed_rows} rows, cannot {what}; expected step")
        return self._rows

    def _check_step(self, q: F32, k: F32, v: F32, lead: tuple[int, ...]) -> None:
        plan = self.plan
        if not self.sealed:
            self._open("step")
            raise RecordError(f"{self._name}: not sealed, cannot step; expected append and attend")
        checks.floats(q, (*lead, plan.heads, plan.key_size), f"{self._name}: queries")
        checks.floats(k, (*lead, plan.kv_heads, plan.key_size), f"{self._name}: keys")
        checks.floats(v, (*lead, plan.kv_heads, plan.value_size), f"{self._name}: values")

    def _step(self, q: F32, k: F32, v: F32) -> F32:
        out = np.empty((self.plan.heads, self.plan.value_size), np.float32)
        for head, group in enumerate(self.groups):
            mine = slice(head * self.plan.group, (head + 1) * self.plan.group)
            out[mine] = self._kernels.nystrom_step(group, q[mine], k[head], v[head])
        self._steps += 1
        return out
