"""A layer whose rows are attended: full attention, sliding windows, and the rows a Nyström layer collects.

All that is done with such a layer is here, which makes the module long; what it is made of is elsewhere:
`rows` stores, `makings` checks and creates planes, `computing` answers, `places` counts positions, `extremes` scans.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from warmkv.kernels.dispatch import Kernels
from warmkv.kernels.dispatch import kernels as kernels_of
from warmkv.kernels.formats import F32
from warmkv.kvstore.live.layers import checks
from warmkv.kvstore.live.layers.base import next_generation, where
from warmkv.kvstore.live.layers.computing import Computing, HostComputing
from warmkv.kvstore.live.layers.extremes import AbsMax
from warmkv.kvstore.live.layers.makings import Makings
from warmkv.kvstore.live.layers.places import Places
from warmkv.kvstore.live.memory import LayerMemory
from warmkv.kvstore.live.plan import LayerPlan
from warmkv.kvstore.live.rows.allocation import Allocate, allocate
from warmkv.kvstore.live.rows.base import PlaneRows
from warmkv.kvstore.live.rows.growing import GrowingRows
from warmkv.kvstore.live.rows.planes import Planes
from warmkv.schema.errors import RecordError
from warmkv.schema.identity import LayerKind

_KINDS = frozenset({LayerKind.FULL, LayerKind.SLIDING, LayerKind.NYSTROM})


class AttentionLayer:
    """Keys and values of one layer, row by row, and attention over them.

    ``keys`` and ``values`` hold the alive KV heads; a dead KV head stores nothing and the outputs of its
    query heads are zeros. ``kernels`` compute (None: the best there are) on up to ``threads`` threads.
    ``rows`` are planes to start from, taken over, standing for positions from 0 on. ``allocate`` is asked
    for all memory that lasts.

    What is handed over is float32: keys (n, kv_heads, key_size), values (n, kv_heads, value_size), queries
    (heads, key_size). Arrays of another shape or dtype raise RecordError, as do NaN and infinity where a
    format has no room for them; memory that cannot be had raises OutOfMemory. In either case, here and in
    every method, nothing has changed.

    **Threading:** one caller at a time."""

    def __init__(
        self, plan: LayerPlan, *, index: int = 0, kernels: Kernels | None = None, threads: int = 1,
        rows: tuple[PlaneRows, PlaneRows] | None = None, allocate: Allocate = allocate,
    ) -> None:  # fmt: skip
        plan.validate(index)
        if plan.kind not in _KINDS:
            raise RecordError(f"{where(plan, index)}: expected one of {', '.join(sorted(kind.name for kind in _KINDS))}")
        if threads < 1:
            raise RecordError(f"{where(plan, index)}: {threads} threads, expected at least 1")
        self.plan, self.index, self.threads = plan, index, threads
        self.kernels = kernels or kernels_of("auto")
        self.allocate = allocate
        self._makings = Makings(plan, index, self.kernels, allocate)
        self._name = self._makings.name
        self._sinks: F32 | None = None
        self._computing: Computing = HostComputing(plan, self.kernels, threads)
        self._places = Places(self._name, plan.window)
        self._extremes = AbsMax(2)
        self.generation = next_generation()
        self._install(*self.empty_planes(), self._makings.empty_mass())
        if rows is not None:
            count = len(rows[0])
            mass = np.zeros(count, np.float32) if plan.importance else None
            self.adopt(*rows, position=count, base=0, importance=mass, gapless=True)

    @property
    def rows(self) -> int:
        """Rows stored."""
        return self._places.rows

    @property
    def position(self) -> int:
        return self._places.position

    @property
    def base(self) -> int:
        """Position of the oldest row while rows are gapless; 0 otherwise."""
        return self._places.base

    @property
    def gapless(self) -> bool:
        """Whether rows stand for the positions [base, position)."""
        return self._places.gapless

    @property
    def importance(self) -> F32 | None:
        """(rows,) float32, the attention every row has had, a view to be read until rows change; None where
        the plan does not count it."""
        return None if self._mass is None else np.asarray(self._mass.writable(0)[:, 0], np.float32)

    @property
    def sinks(self) -> F32 | None:
        """(heads,) float32 learned sink logits: a weight, kept by `clear`."""
        return self._sinks

    @sinks.setter
    def sinks(self, sinks: F32 | None) -> None:
        if sinks is not None:
            sinks = checks.floats(sinks, (self.plan.heads,), f"{self._name}: sinks").copy()
            if np.isnan(sinks).any() or np.isposinf(sinks).any():
                raise RecordError(f"{self._name}: sinks with NaN or infinity")
            sinks.flags.writeable = False
        self._computing.weigh(sinks)
        self._sinks = sinks

    def empty_planes(self) -> tuple[GrowingRows, GrowingRows]:
        """Keys and values without rows, as this layer stores them; for `adopt`."""
        return self._makings.empty_planes()

    def append(self, k: F32, v: F32) -> None:
        """Store rows of the next positions. What is handed in for dead KV heads is not looked at."""
        keys, values = self._makings.rows_of(k, v, self.rows, self.position)
        self._store(keys, values)

    def check_room(self, count: int) -> None:
        """Raise CapacityExceeded where ``count`` rows more do not fit memory of a fixed size, changing nothing; memory
        of the host grows."""

    def attend(self, q: F32, *, upto: int | None = None, observe: bool = True) -> F32:
        """The answers (heads, value_size) to queries of one position over the first ``upto`` rows (None:
        all), of these the last ``window`` where the plan has one. ``observe``: what every row was attended
        with is added to `importance`. Raises RecordError where the window reaches rows that were given up."""
        q = self._computing.queries(q, (self.plan.heads, self.plan.key_size), f"{self._name}: queries")
        last = self.rows if upto is None else upto
        if not isinstance(last, (int, np.integer)) or not 0 <= last <= self.rows:
            raise RecordError(f"{self._name}: attention up to row {last!r}, {self.rows} rows are stored")
        first = self._first(last)
        if not last:
            return self._computing.nothing(self.plan.heads, self.plan.value_size)
        return self._computing.one(q, self.keys, self.values, first, last, self.importance if observe else None)

    def attend_chunk(self, q: F32, *, observe: bool = True) -> F32:
        """The answers (n, heads, value_size) to queries (n, heads, key_size) of the newest n rows, each of
        which sees itself and what came before it."""
        q = self._computing.queries(q, (None, self.plan.heads, self.plan.key_size), f"{self._name}: queries")
        if len(q) > self.rows:
            raise RecordError(f"{self._name}: queries of {len(q)} positions, {self.rows} rows are stored")
        if not len(q):
            return self._computing.nothing(0, self.plan.heads, self.plan.value_size)
        self._first(self.rows - len(q) + 1)
        return self._computing.chunk(q, self.keys, self.values, self.importance if observe else None)

    def attend_head(self, q: F32, head: int) -> tuple[F32, F32]:
        """One query (key_size,) of query head ``head``: its answer (value_size,) and the probability of every
        row (rows,), zeros beyond the window and for a dead KV head. Nothing is observed."""
        plan = self.plan
        q = checks.floats(q, (plan.key_size,), f"{self._name}: query")
        if not 0 <= head < plan.heads:
            raise RecordError(f"{self._name}: query head {head}, expected 0 to {plan.heads - 1}")
        first = self._first(self.rows)
        probabilities = np.zeros(self.rows, np.float32)
        if not self.rows or head // plan.group not in plan.alive_heads:
            return np.zeros(plan.value_size, np.float32), probabilities
        plane_head = plan.alive_heads.index(head // plan.group)
        done = self.kernels.attend(
            np.ascontiguousarray(q[None]), self.keys.blocks(plane_head), self.values.blocks(plane_head), scale=plan.logit_scale,
            first=first, softcap=plan.softcap, importance=probabilities,
            sinks=None if self._sinks is None else self._sinks[head : head + 1],
        )  # fmt: skip
        return done.out[0], probabilities

    def observe_queries(self, q: F32) -> None:
        """Add what queries (n, heads, key_size) of the newest n rows attend to, for who computed the answers
        elsewhere. Raises RecordError where importance is not counted."""
        self._counted()
        self.attend_chunk(q)

    def accumulate(self, importance: F32) -> None:
        """Add (rows,) float32 to the attention rows have had. Raises RecordError where it is not counted."""
        mass = self._counted()
        mass += checks.floats(importance, (self.rows,), f"{self._name}: importance")

    def check_truncate(self, count: int) -> None:
        self._places.check_truncate(count)

    def truncate_last(self, count: int) -> None:
        """Forget the newest ``count`` positions. Raises RecordError beyond the start, CannotRewind where the
        shorter sequence would see rows that were given up."""
        self.check_truncate(count)
        self._places.truncate(count)
        self._planes.truncate(self.rows)
        self._extremes.changed(self.rows)

    def trim_window(self, slack: int = 0, align: int = 1, anchor: int | None = None) -> int:
        """Give up rows no query can see any more, once more than two windows are stored; see
        `Places.trimmed`. ``slack`` rows beyond the window can be taken back by `truncate_last`, and whole
        answers back to ``anchor`` - slack.

        Returns how many were given up: none without a window, or while a field is not frozen, which is
        fixed from all rows."""
        count = self._places.trimmed(slack, align, anchor)
        if not count or self._planes.open:
            return 0
        self._planes.drop_front(count)
        self._places.trim(count)
        self._extremes.dropped(count)
        self.generation = next_generation()
        return count

    def keep(self, kept: Sequence[int] | npt.NDArray[np.integer]) -> None:
        """Give up all rows but those at ``kept``, ascending; the next position stays. Raises RecordError for
        other indices and on a layer with a window, whose rows must stay consecutive."""
        self.prepare_keep(kept)()

    def prepare_keep(self, kept: Sequence[int] | npt.NDArray[np.integer]) -> Callable[[], None]:
        """Everything of `keep` that may fail; calling what is returned cannot."""
        indices = checks.indices(kept, self.rows, self._name)
        if self.plan.window:
            raise RecordError(f"{self._name}: rows of a sliding window are trimmed, not chosen")
        if len(indices) == self.rows:
            return lambda: None
        keep_planes = self._planes.prepare_keep(indices)

        def apply() -> None:
            keep_planes()
            self._places.keep(indices)
            self._extremes.changed(0)
            self.generation = next_generation()

        return apply

    def clear(self) -> None:
        """Forget the conversation; sinks stay, memory may be kept."""
        self._forget()
        self._planes.clear()

    def release(self) -> None:
        """`clear`, and give the memory back."""
        self._planes.release()
        self._forget()

    def abs_max(self) -> tuple[float, float]:
        """The largest magnitude of keys and of values of alive heads, as they were stored; infinity once a
        row had infinity or NaN. Rows a trim gave up may still count."""
        top_key, top_value = self._extremes.scan((self.keys, self.values))
        return top_key, top_value

    def abs_max_after(self, start: int, upto: int, top_key: float, top_value: float) -> tuple[float, float]:
        """`abs_max` for who knows the maxima of rows [start, upto): not scanned where they are the newest."""
        key, value = self._extremes.after((self.keys, self.values), start, upto, (top_key, top_value))
        return key, value

    def memory(self) -> LayerMemory:
        planes = (self.keys, self.values)
        mapped = sum(plane.mapped_bytes for plane in planes)
        rotations = {plane.turn.rotation for plane in planes if plane.turn is not None}
        return LayerMemory(
            attention=sum(plane.allocated_bytes for plane in planes),
            importance=0 if self._mass is None else self._mass.allocated_bytes,
            stored=sum(plane.stored_bytes for plane in planes) - mapped,
            mapped=mapped,
            weights=(0 if self._sinks is None else self._sinks.nbytes) + sum(rotation.nbytes for rotation in rotations),
        )

    def adopt(
        self, keys: F32 | PlaneRows, values: F32 | PlaneRows, *, position: int, base: int, importance: F32 | None, gapless: bool
    ) -> None:
        """Replace all rows at once; see `prepare_adopt`."""
        self.prepare_adopt(keys, values, position=position, base=base, importance=importance, gapless=gapless)()

    def prepare_adopt(
        self, keys: F32 | PlaneRows, values: F32 | PlaneRows, *, position: int, base: int, importance: F32 | None, gapless: bool
    ) -> Callable[[], None]:
        """Everything of `adopt` that may fail; calling what is returned cannot.

        ``keys`` and ``values`` are planes of this layer's formats, taken over, or float32 rows (n, alive
        heads, size), stored as if they were appended. ``position`` is that of the next token, ``base`` that
        of the first row where they are ``gapless`` and 0 where not. ``importance`` (rows,) float32 is
        needed just where the plan counts it."""
        planes = self._makings.planes_of(keys, values)
        rows = len(planes[0])
        checks.adopted_places(self._name, rows, position, base, gapless, self.plan.window)
        mass = self._makings.mass_of(importance, rows)
        places = Places(self._name, self.plan.window, rows, position, base, gapless, rows if gapless else 0)

        def install() -> None:
            self._forget()
            self._places = places
            self._install(*planes, mass)

        return install

    def _install(self, keys: PlaneRows, values: PlaneRows, mass: GrowingRows | None) -> None:
        self.keys, self.values, self._mass = keys, values, mass
        self._planes = Planes((keys, values) if mass is None else (keys, values, mass))

    def _store(self, keys: F32, values: F32) -> None:
        """Behind the others, all checks made."""
        rows = [keys, values]
        if self._mass is not None:
            rows.append(np.zeros((len(keys), 1, 1), np.float32))
        if self._planes.append(rows):
            # Old rows were written anew: whoever mirrors them cannot tell from their count.
            self._extremes.changed(0)
            self.generation = next_generation()
        self._places.append(len(keys))

    def _forget(self) -> None:
        self._places.reset()
        self._extremes.changed(0)
        self.generation = next_generation()

    def _first(self, last: int) -> int:
        """The first row that a query sees whose own row is ``last`` - 1."""
        first = last - self.plan.window if self.plan.window else 0
        if first < 0 and self.base:
            raise RecordError(f"{self._name}: a window of {self.plan.window} up to row {last}, rows before row 0 were given up")
        return max(0, first)

    def _counted(self) -> F32:
        mass = self.importance
        if mass is None:
            raise RecordError(f"{self._name}: importance is not counted, the plan says so")
        return mass
