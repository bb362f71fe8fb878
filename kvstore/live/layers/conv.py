"""A layer that keeps the last inputs of a short causal convolution, and remembers its recent states.

The buffer is all a convolution needs of the past, but it is written over with every token: counting
back does not bring it back. So the states of the last steps lie in a ring, and a rollback within it is
exact; one beyond it is refused, for a buffer of other tokens goes unnoticed.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from warmkv.kernels.formats import F32
from warmkv.kvstore.live.layers import checks
from warmkv.kvstore.live.layers.base import check_count, next_generation, where
from warmkv.kvstore.live.layers.kept import Change, KeptStates, sure
from warmkv.kvstore.live.memory import LayerMemory
from warmkv.kvstore.live.plan import LayerPlan
from warmkv.kvstore.live.rows.allocation import Allocate, allocate, refusals
from warmkv.kvstore.live.rows.growing import readonly
from warmkv.schema.errors import CannotRewind, RecordError

_NOWHERE = -1


class ConvHistory:
    """The states of the latest ``capacity`` positions a buffer of ``shape`` was recorded at, in memory taken
    once. Position 0 is always known: it is zeros.

    **Threading:** one caller at a time."""

    def __init__(self, capacity: int, shape: tuple[int, ...], *, allocate: Allocate = allocate) -> None:
        """Raises OutOfMemory."""
        self._states = np.asarray(allocate((capacity, *shape), np.dtype(np.float32)), np.float32)
        self._positions: npt.NDArray[np.int64] = np.asarray(allocate((capacity,), np.dtype(np.int64)), np.int64)
        self._next = 0
        self.clear()

    @property
    def capacity(self) -> int:
        """States there is room for."""
        return len(self._positions)

    @property
    def positions(self) -> tuple[int, ...]:
        """Positions recorded, ascending; 0 only where it was."""
        return tuple(sorted(int(position) for position in self._positions if position != _NOWHERE))

    @property
    def nbytes(self) -> int:
        return self._states.nbytes + self._positions.nbytes

    def push(self, position: int, state: F32) -> None:
        """Record a copy of ``state`` at ``position``, over the oldest where there is no room. States of this
        position and later ones are forgotten: another continuation was theirs."""
        if not self.capacity:
            return
        self._cut(position)
        self._states[self._next], self._positions[self._next] = state, position
        self._next = (self._next + 1) % self.capacity

    def has_pos(self, position: int) -> bool:
        """Whether `rollback_to` would find ``position``."""
        return position == 0 or self._slot(position) is not None

    def rollback_to(self, position: int, state: F32) -> bool:
        """Write the state at ``position`` over ``state`` and forget later ones; False, and nothing changed,
        where it is not known."""
        slot = self._slot(position)
        if position == 0:
            state.fill(0)
            self.clear()
        elif slot is None:
            return False
        else:
            state[:] = self._states[slot]
            self._cut(position + 1)
        return True

    def shift(self, keep: int, count: int) -> None:
        """Positions behind [keep, keep + count) move down by ``count``. States inside have no place any
        more, and neither has the one at its end: that of ``keep`` is the state after the tokens that stay."""
        behind = self._positions > keep + count
        inside = (self._positions > keep) & ~behind
        self._positions[behind] -= count
        self._positions[inside] = _NOWHERE

    def clear(self) -> None:
        """Forget all states; memory stays."""
        self._positions.fill(_NOWHERE)
        self._next = 0

    def _slot(self, position: int) -> int | None:
        found = np.flatnonzero(self._positions == position)
        return int(found[0]) if position > 0 and len(found) else None

    def _cut(self, position: int) -> None:
        """Forget the states from ``position`` on and write where the oldest of them was."""
        later = np.flatnonzero(self._positions >= position)
        if len(later):
            ages = (self._next - 1 - later) % self.capacity
            self._next = int(later[np.argmax(ages)])
            self._positions[later] = _NOWHERE


class ConvLayer:
    """The last ``plan.conv.taps`` inputs of a convolution, oldest first, zeros before the first token; and
    the states of the latest ``plan.conv.history`` positions.

    ``position`` counts the tokens seen. Numbers are kept as they come, NaN included.

    **Threading:** one caller at a time."""

    def __init__(self, plan: LayerPlan, *, index: int = 0, allocate: Allocate = allocate) -> None:
        """Raises RecordError for another kind of plan, OutOfMemory."""
        plan.validate(index)
        if plan.conv is None:
            raise RecordError(f"{where(plan, index)}: the plan has no convolution")
        self.plan, self.index = plan, index
        self.position = 0
        self.generation = next_generation()
        self._name = where(plan, index)
        self._shape: tuple[int, int] = (plan.conv.taps, plan.conv.channels)
        self._state = np.asarray(allocate(self._shape, np.dtype(np.float32)), np.float32)
        self._state.fill(0)
        self.history = ConvHistory(plan.conv.history, self._shape, allocate=allocate)

    @property
    def state(self) -> F32:
        """(taps, channels) float32, oldest input first, read-only; stays the layer's, unchanged until the next
        change."""
        return readonly(self._state)

    def append(self, inputs: F32) -> None:
        """The inputs (n, channels) of the next n tokens; every state on the way is recorded, as far back as
        the history reaches. Raises RecordError, OutOfMemory, nothing changed."""
        taps, channels = self._shape
        inputs = checks.floats(inputs, (None, channels), f"{self._name}: inputs")
        steps = min(len(inputs), max(1, self.history.capacity))
        with refusals(4 * (taps + steps) * channels, f"the inputs of {steps} tokens of {self._name}"):
            joined = np.concatenate([self._state, inputs[len(inputs) - min(len(inputs), taps + steps) :]])
        joined = joined[len(joined) - taps - steps :]
        for step in range(1, steps + 1):
            self.history.push(self.position + len(inputs) - steps + step, joined[step : step + taps])
        self._state[:] = joined[steps:]
        self.position += len(inputs)

    def update(self, state: F32, count: int = 1) -> None:
        """The whole buffer (taps, channels) after ``count`` more tokens, for who rolls it elsewhere; only
        that position is recorded. Raises RecordError, nothing changed."""
        self._check(state, count)
        self._state[:] = state
        self.position += int(count)
        self.history.push(self.position, self._state)

    def adopt(self, state: F32, position: int) -> None:
        """Replace everything by a state of ``position`` tokens from elsewhere, copied in. Of the history only
        that position is known then. Raises RecordError, nothing changed."""
        self.prepare_adopt(state, position)()

    def prepare_adopt(self, state: F32, position: int) -> Callable[[], None]:
        """Everything of `adopt` that may fail; calling what is returned cannot. ``state`` is not to be
        changed in between."""
        self._check(state, position)

        def install() -> None:
            self._state[:] = state
            self.position = int(position)
            self.generation = next_generation()
            self.history.clear()
            self.history.push(position, self._state)

        return install

    def set_aside(self) -> KeptStates:
        """A copy to go back to, for where the history does not reach. Raises OutOfMemory."""
        with refusals(self._state.nbytes, f"the state of {self._name}"):
            return KeptStates(self.position, self.generation, self._state.copy())

    def set_aside_into(self, kept: KeptStates) -> None:
        """`set_aside` over an earlier copy of this layer's, without asking for memory."""
        kept.state[:] = self._state
        kept.position, kept.generation = self.position, self.generation

    def prepare_return(self, kept: KeptStates) -> Change:
        """What takes the layer back to ``kept``; of the history only that position is known then."""

        def apply() -> None:
            self._state[:] = kept.state
            self.position = kept.position
            self.history.clear()
            self.history.push(self.position, self._state)

        return sure(apply)

    def check_truncate(self, count: int) -> None:
        check_count(self._name, count, self.position)
        target = self.position - count
        if count and not self.history.has_pos(target):
            known = self.history.positions
            raise CannotRewind(
                f"{self._name}: the state at position {target} is not among the {len(known)} recorded"
                f"{f', from position {known[0]} to {known[-1]}' if known else ''}"
            )

    def truncate_last(self, count: int) -> None:
        """Go back ``count`` tokens, exactly. Raises RecordError beyond the start, CannotRewind where the state
        there is not recorded; nothing changed."""
        self.check_truncate(count)
        if count:
            self.position -= int(count)  # numpy's numbers are no part of a position
            self.history.rollback_to(self.position, self._state)

    def shift(self, keep: int, count: int) -> None:
        """Tokens [keep, keep + count), all of them seen, are taken out of the count. The buffer stays: within
        as many tokens as it has taps nothing of them is left in it. Cannot fail."""
        self.position -= count
        self.history.shift(keep, count)
        self.history.push(self.position, self._state)
        self.generation = next_generation()

    def clear(self) -> None:
        """Zeros at position 0; memory stays."""
        self._state.fill(0)
        self.position = 0
        self.history.clear()
        self.generation = next_generation()

    def memory(self) -> LayerMemory:
        return LayerMemory(conv=self._state.nbytes + self.history.nbytes)

    def _check(self, state: F32, count: int) -> None:
        checks.floats(state, self._shape, f"{self._name}: state")
        if count < 0:
            raise RecordError(f"{self._name}: {count} positions, expected at least 0")
