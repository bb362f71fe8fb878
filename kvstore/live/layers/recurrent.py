"""A layer whose whole history is one vector: linear attention, delta rules, state spaces.

What the numbers mean is the model's business; the layer keeps them, tells what is tentative from what
is not, and says that it cannot go back.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from warmkv.kernels.formats import F32
from warmkv.kvstore.live.layers import checks
from warmkv.kvstore.live.layers.base import check_count, next_generation, where
from warmkv.kvstore.live.memory import LayerMemory
from warmkv.kvstore.live.plan import LayerPlan
from warmkv.kvstore.live.rows.allocation import Allocate, allocate
from warmkv.schema.errors import CannotRewind, RecordError
from warmkv.schema.identity import LayerKind


class RecurrentLayer:
    """A state vector of ``plan.state_size`` float32 numbers, zeros at first, and at most one tentative
    successor, the scratch: what the state would be if a draft were accepted.

    ``position`` counts what the state has seen, the scratch not included. Numbers are kept as they
    come, NaN included.

    **Threading:** one caller at a time."""

    def __init__(self, plan: LayerPlan, *, index: int = 0, allocate: Allocate = allocate) -> None:
        """Raises RecordError for another kind of plan, OutOfMemory."""
        plan.validate(index)
        if plan.kind is not LayerKind.RECURRENT:
            raise RecordError(f"{where(plan, index)}: the plan has no state of its own")
        self.plan = plan
        self.index = index
        self.position = 0
        self.generation = next_generation()
        self._allocate = allocate
        self._state = self._vector()
        self._state.fill(0)
        self._scratch: F32 | None = None
        self._ahead = 0

    @property
    def state(self) -> F32:
        """(state_size,) float32, read-only; stays the layer's, unchanged until the next update."""
        return _frozen(self._state)

    @property
    def scratch(self) -> F32 | None:
        """The tentative state, read-only; None where there is none."""
        return None if self._scratch is None else _frozen(self._scratch)

    def update(self, state: F32, count: int = 1) -> None:
        """The state after ``count`` more positions; a scratch made beside the old one is dropped.
        Raises RecordError, nothing changed."""
        self._check(state, count)
        self._state[:] = state
        self.position += count
        self.discard()

    def speculate(self, state: F32, count: int = 1) -> None:
        """Keep ``state`` beside the true one: what it would be after ``count`` more positions. Replaces
        an earlier scratch. Raises RecordError, OutOfMemory, nothing changed."""
        self._check(state, count)
        scratch = self._vector() if self._scratch is None else self._scratch
        scratch[:] = state
        self._scratch, self._ahead = scratch, count

    def commit(self) -> None:
        """The scratch becomes the state. Raises RecordError where there is none."""
        if self._scratch is None:
            raise RecordError(f"{where(self.plan, self.index)}: nothing speculative to commit")
        self._state = self._scratch
        self.position += self._ahead
        self.discard()

    def discard(self) -> None:
        """Forget the scratch, if there is one, and give its memory back."""
        self._scratch, self._ahead = None, 0

    def adopt(self, state: F32, position: int) -> None:
        """Replace everything by a state of ``position`` positions from elsewhere, copied in; the scratch
        is dropped. Raises RecordError, nothing changed."""
        self.prepare_adopt(state, position)()

    def prepare_adopt(self, state: F32, position: int) -> Callable[[], None]:
        """Everything of `adopt` that may fail; calling what is returned cannot."""
        self._check(state, position)

        def install() -> None:
            self._state[:] = state
            self.position = position
            self.generation = next_generation()
            self.discard()

        return install

    def check_truncate(self, count: int) -> None:
        check_count(where(self.plan, self.index), count, self.position)
        if count:
            raise CannotRewind(
                f"{where(self.plan, self.index)}: a recurrent state cannot go back {count} positions, expected 0; "
                f"restore one of position {self.position - count}"
            )

    def truncate_last(self, count: int) -> None:
        """Drop the scratch. Raises CannotRewind unless ``count`` is 0, and then nothing changed."""
        self.check_truncate(count)
        self.discard()

    def clear(self) -> None:
        """Zeros at position 0."""
        self._state.fill(0)
        self.position = 0
        self.generation = next_generation()
        self.discard()

    def memory(self) -> LayerMemory:
        scratch = 0 if self._scratch is None else self._scratch.nbytes
        return LayerMemory(recurrent=self._state.nbytes + scratch)

    def _vector(self) -> F32:
        return np.asarray(self._allocate((self.plan.state_size,), np.dtype(np.float32)), np.float32)

    def _check(self, state: F32, count: int) -> None:
        name = where(self.plan, self.index)
        checks.floats(state, (self.plan.state_size,), f"{name}: state")
        if count < 0:
            raise RecordError(f"{name}: {count} positions, expected at least 0")


def _frozen(vector: F32) -> F32:
    view = vector[:]
    view.flags.writeable = False
    return view
