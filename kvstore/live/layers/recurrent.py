"""A layer whose whole history is one vector: linear attention, delta rules, state spaces.

Hybrids have the last inputs of a short convolution beside it. What the numbers mean is the model's
business; the layer keeps them, tells what is tentative from what is not, and says that it cannot go back.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from warmkv.kernels.formats import F32
from warmkv.kvstore.live.layers import checks
from warmkv.kvstore.live.layers.base import check_count, next_generation, where
from warmkv.kvstore.live.layers.kept import Change, KeptStates, sure
from warmkv.kvstore.live.memory import LayerMemory
from warmkv.kvstore.live.plan import LayerPlan
from warmkv.kvstore.live.rows.allocation import Allocate, allocate, refusals
from warmkv.schema.errors import CannotRewind, RecordError
from warmkv.schema.identity import LayerKind


@dataclass(frozen=True, slots=True, eq=False)
class RecurrentState:
    """Host copies of what a recurrent layer holds: ``state`` (state_size,) and ``conv`` (taps, channels),
    oldest input first, None where the plan has none; float32."""

    state: F32
    conv: F32 | None = None

    @property
    def nbytes(self) -> int:
        return self.state.nbytes + (0 if self.conv is None else self.conv.nbytes)


class RecurrentLayer:
    """A state vector of ``plan.state_size`` float32 numbers, zeros at first, the inputs of its convolution
    where the plan has one, and at most one tentative successor, the scratch: what the state would be if a
    draft were accepted.

    ``position`` counts what the state has seen, the scratch not included. Numbers are kept as they
    come, NaN included.

    **Threading:** one caller at a time."""

    def __init__(self, plan: LayerPlan, *, index: int = 0, allocate: Allocate = allocate) -> None:
        """Raises RecordError for another kind of plan, OutOfMemory."""
        check_recurrent(plan, index)
        self.plan = plan
        self.index = index
        self.position = 0
        self.generation = next_generation()
        self._allocate = allocate
        self._state, self._conv = self._zeros()
        self._scratch: tuple[F32, F32 | None] | None = None
        self._ahead = 0

    @property
    def state(self) -> F32:
        """(state_size,) float32, read-only; stays the layer's, unchanged until the next update."""
        return _frozen(self._state)

    @property
    def conv(self) -> F32 | None:
        """(taps, channels) float32, oldest input first, as `state`; None where the plan has none."""
        return None if self._conv is None else _frozen(self._conv)

    @property
    def scratch(self) -> F32 | None:
        """The tentative state, read-only; None where there is none."""
        return None if self._scratch is None else _frozen(self._scratch[0])

    def taken(self) -> RecurrentState:
        """Copies of state and convolution. Raises OutOfMemory."""
        with refusals(state_bytes_of(self.plan), f"the state of {where(self.plan, self.index)}"):
            return RecurrentState(self._state.copy(), None if self._conv is None else self._conv.copy())

    def update(self, state: F32, count: int = 1, *, conv: F32 | None = None) -> None:
        """The state after ``count`` more positions, with ``conv`` just where the plan has one; a scratch made
        beside the old one is dropped. Raises RecordError, nothing changed."""
        check_states(self.plan, self.index, state, conv, count)
        self._write(self._state, self._conv, state, conv)
        self.position += count
        self.discard()

    def speculate(self, state: F32, count: int = 1, *, conv: F32 | None = None) -> None:
        """Keep ``state`` beside the true one: what it would be after ``count`` more positions. Replaces
        an earlier scratch. Raises RecordError, OutOfMemory, nothing changed."""
        check_states(self.plan, self.index, state, conv, count)
        scratch = self._zeros() if self._scratch is None else self._scratch
        self._write(*scratch, state, conv)
        self._scratch, self._ahead = scratch, count

    def commit(self) -> None:
        """The scratch becomes the state. Raises RecordError where there is none."""
        if self._scratch is None:
            raise RecordError(f"{where(self.plan, self.index)}: nothing speculative to commit")
        self._state, self._conv = self._scratch
        self.position += self._ahead
        self.discard()

    def discard(self) -> None:
        """Forget the scratch, if there is one, and give its memory back."""
        self._scratch, self._ahead = None, 0

    def adopt(self, state: F32, position: int, *, conv: F32 | None = None) -> None:
        """Replace everything by a state of ``position`` positions from elsewhere, copied in; the scratch
        is dropped. Raises RecordError, nothing changed."""
        self.prepare_adopt(state, position, conv=conv)()

    def prepare_adopt(self, state: F32, position: int, *, conv: F32 | None = None) -> Callable[[], None]:
        """Everything of `adopt` that may fail; calling what is returned cannot."""
        check_states(self.plan, self.index, state, conv, position)

        def install() -> None:
            self._write(self._state, self._conv, state, conv)
            self.position = position
            self.generation = next_generation()
            self.discard()

        return install

    def set_aside(self) -> KeptStates:
        """Copies to go back to. Raises OutOfMemory."""
        state, conv = self._zeros()
        self._write(state, conv, self._state, self._conv)
        return KeptStates(self.position, self.generation, state, conv)

    def set_aside_into(self, kept: KeptStates) -> None:
        """`set_aside` over earlier copies of this layer's, without asking for memory."""
        self._write(kept.state, kept.conv, self._state, self._conv)
        kept.position, kept.generation = self.position, self.generation

    def prepare_return(self, kept: KeptStates) -> Change:
        """What takes the layer back to ``kept``, and the scratch away."""

        def apply() -> None:
            self._write(self._state, self._conv, kept.state, kept.conv)
            self.position = kept.position
            self.discard()

        return sure(apply)

    def check_truncate(self, count: int) -> None:
        check_stays(self.plan, self.index, count, self.position)

    def truncate_last(self, count: int) -> None:
        """Drop the scratch. Raises CannotRewind unless ``count`` is 0, and then nothing changed."""
        self.check_truncate(count)
        self.discard()

    def clear(self) -> None:
        """Zeros at position 0."""
        self._state.fill(0)
        if self._conv is not None:
            self._conv.fill(0)
        self.position = 0
        self.generation = next_generation()
        self.discard()

    def memory(self) -> LayerMemory:
        state, conv = self._state.nbytes, 0 if self._conv is None else self._conv.nbytes
        times = 1 if self._scratch is None else 2
        return LayerMemory(recurrent=times * state, conv=times * conv)

    def _zeros(self) -> tuple[F32, F32 | None]:
        shapes = [(self.plan.state_size,)] if self.plan.conv is None else [(self.plan.state_size,), conv_shape(self.plan)]
        made = [np.asarray(self._allocate(shape, np.dtype(np.float32)), np.float32) for shape in shapes]
        for array in made:
            array.fill(0)
        return made[0], made[1] if len(made) > 1 else None

    @staticmethod
    def _write(own_state: F32, own_conv: F32 | None, state: F32, conv: F32 | None) -> None:
        own_state[:] = state
        if own_conv is not None:
            own_conv[:] = conv


def conv_shape(plan: LayerPlan) -> tuple[int, int]:
    """(taps, channels) of the convolution a recurrent plan has."""
    assert plan.conv is not None
    return plan.conv.taps, plan.conv.channels


def state_bytes_of(plan: LayerPlan) -> int:
    """Bytes of one state with its convolution."""
    return 4 * (plan.state_size + (0 if plan.conv is None else plan.conv.taps * plan.conv.channels))


def check_recurrent(plan: LayerPlan, index: int) -> None:
    """Raises RecordError for another kind of plan."""
    plan.validate(index)
    if plan.kind is not LayerKind.RECURRENT:
        raise RecordError(f"{where(plan, index)}: the plan has no state of its own")


def check_states(plan: LayerPlan, index: int, state: F32, conv: F32 | None, count: int) -> None:
    """Raises RecordError unless these host arrays are a state of ``plan`` after ``count`` positions."""
    name = where(plan, index)
    checks.floats(state, (plan.state_size,), f"{name}: state")
    if (conv is None) != (plan.conv is None):
        raise RecordError(
            f"{name}: a state {'without' if conv is None else 'with'} inputs of a convolution, the plan has {plan.conv}"
        )
    if conv is not None:
        checks.floats(conv, conv_shape(plan), f"{name}: convolution")
    if count < 0:
        raise RecordError(f"{name}: {count} positions, expected at least 0")


def check_stays(plan: LayerPlan, index: int, count: int, position: int) -> None:
    """`LayerState.check_truncate` of a state that cannot go back."""
    check_count(where(plan, index), count, position)
    if count:
        raise CannotRewind(
            f"{where(plan, index)}: a recurrent state cannot go back {count} positions, expected 0; "
            f"restore one of position {position - count}"
        )


def _frozen(vector: F32) -> F32:
    view = vector[:]
    view.flags.writeable = False
    return view
