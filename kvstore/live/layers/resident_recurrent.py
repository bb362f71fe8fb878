"""A recurrent layer whose state stays on a device.

A step reads one buffer, writes the other and swaps them. Both live as long as the layer: with memory of its
own for every step, what a kernel still reads could be handed out again, and captured launches would hold
addresses that are gone. The convolution is rolled where it lies.

**Source:** memra `RecurLayer`, whose convolution is channel-major; here it is that of records, input by input.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import numpy as np

from warmkv.kernels.formats import F32
from warmkv.kvstore.live.devices.base import Device, DeviceArray
from warmkv.kvstore.live.geometry import STATE_BUFFERS
from warmkv.kvstore.live.layers.base import next_generation, where
from warmkv.kvstore.live.layers.kept import Change, KeptStates
from warmkv.kvstore.live.layers.recurrent import RecurrentState, check_recurrent, check_states, check_stays, conv_shape
from warmkv.kvstore.live.memory import LayerMemory
from warmkv.kvstore.live.plan import LayerPlan
from warmkv.schema.errors import DeviceFault, RecordError

_F32 = np.dtype(np.float32)


class ResidentRecurrentLayer:
    """Two vectors of ``plan.state_size`` float32 numbers on ``device``, of which one is the `state` and the other
    the `spare`, and the inputs of a convolution where the plan has one; zeros at first.

    Who computes a step reads `state`, writes all of `spare`, rolls `conv` where it lies, all enqueued on the
    device, and calls `step`. Memory is taken here and never again by a step; addresses never change.

    Where a device failed while what is held was written over, it is neither gone on with nor handed out until it
    was replaced, cleared or taken back to a copy: DeviceFault says so.

    **Threading:** one caller at a time."""

    def __init__(self, plan: LayerPlan, *, index: int = 0, device: Device) -> None:
        """Raises RecordError for another kind of plan, OutOfMemory with nothing left allocated."""
        check_recurrent(plan, index)
        self.plan, self.index, self.device = plan, index, device
        self.position = 0
        self.generation = next_generation()
        self._whole = True
        with ExitStack() as undo:
            made = []
            shapes: list[tuple[int, ...]] = [(plan.state_size,)] * STATE_BUFFERS
            for shape in shapes if plan.conv is None else [*shapes, conv_shape(plan)]:
                made.append(device.zeros(shape, _F32))
                undo.callback(device.free, made[-1])
            undo.pop_all()
        self._states: list[DeviceArray] = made[:STATE_BUFFERS]
        self._conv: DeviceArray | None = made[STATE_BUFFERS] if plan.conv is not None else None

    @property
    def state(self) -> DeviceArray:
        """(state_size,) float32 of the device: the state at `position`. It is `spare` after the next step."""
        return self._states[0]

    @property
    def spare(self) -> DeviceArray:
        """(state_size,) float32 of the device, of no meaning: what a step writes."""
        return self._states[1]

    @property
    def conv(self) -> DeviceArray | None:
        """(taps, channels) float32 of the device, oldest input first, at one address for good; None where the
        plan has none."""
        return self._conv

    @property
    def allocated_bytes(self) -> int:
        """What the layer has asked its device for."""
        return sum(int(array.nbytes) for array in self._arrays())

    def step(self, count: int = 1) -> None:
        """`spare` holds the state after ``count`` more positions, and `conv` its inputs: swap. Raises RecordError,
        nothing changed."""
        self._require_whole()
        if not isinstance(count, (int, np.integer)) or count < 0:
            raise RecordError(f"{where(self.plan, self.index)}: {count!r} positions, expected at least 0")
        self._swap()
        self.position += int(count)

    def update(self, state: F32, count: int = 1, *, conv: F32 | None = None) -> None:
        """A step from host memory, for who computes there: arrays as `RecurrentLayer.update` takes them. Raises
        RecordError, nothing changed, and DeviceFault."""
        check_states(self.plan, self.index, state, conv, count)
        self._require_whole()
        self._upload(state, self.spare)
        if conv is not None:
            with self._changing():
                self._upload(conv, self._conv)
        self.step(count)

    def taken(self) -> RecurrentState:
        """Host copies of state and convolution; waits for the device."""
        self._require_whole()
        conv = None if self._conv is None else np.array(self.device.download(self._conv), np.float32)
        return RecurrentState(np.array(self.device.download(self.state), np.float32), conv)

    def adopt(self, state: F32, position: int, *, conv: F32 | None = None) -> None:
        """Replace everything by a state of ``position`` positions from host memory, copied in. Raises RecordError,
        OutOfMemory, nothing changed."""
        self.prepare_adopt(state, position, conv=conv)()

    def prepare_adopt(self, state: F32, position: int, *, conv: F32 | None = None) -> Callable[[], None]:
        """Everything of `adopt` that may fail: the arrays are uploaded beside the layer's own. Calling what is
        returned moves them on the device alone, once."""
        check_states(self.plan, self.index, state, conv, position)
        with ExitStack() as undo:
            came = []
            for array in (state, conv):
                if array is not None:
                    came.append(self.device.alloc(array.shape, _F32))
                    undo.callback(self.device.free, came[-1])
                    self._upload(array, came[-1])
            free = undo.pop_all()

        def install() -> None:
            with self._changing():
                self._copy(self.spare, came[0])
                if self._conv is not None:
                    self._copy(self._conv, came[1])
            self._swap()
            self.position = int(position)
            self.generation = next_generation()
            free.close()

        return install

    def set_aside(self) -> KeptStates:
        """Copies on the device to go back to, with room for what a return puts them over. Raises OutOfMemory,
        nothing left allocated."""
        self._require_whole()
        with ExitStack() as undo:
            made = []
            for array in [self.state] if self._conv is None else [self.state, self._conv, self._conv]:
                made.append(self.device.copy(array))
                undo.callback(self.device.free, made[-1])
            undo.pop_all()
        return KeptStates(self.position, self.generation, *made)

    def set_aside_into(self, kept: KeptStates) -> None:
        """`set_aside` over earlier copies of this layer's, without asking for memory."""
        self._require_whole()
        self._copy(kept.state, self.state)
        if self._conv is not None:
            self._copy(kept.conv, self._conv)
        kept.position, kept.generation = self.position, self.generation

    def prepare_return(self, kept: KeptStates) -> Change:
        """What takes the layer back to ``kept``. The spare is written now, which nobody can tell; with the
        convolution goes a copy, so that a change of several layers can be undone."""
        self._copy(self.spare, kept.state)
        if self._conv is not None:
            self._copy(kept.undo, self._conv)
        position, state, whole, written = self.position, self.state, self._whole, False

        def apply() -> None:
            nonlocal written
            if self._conv is not None:
                self._copy(self._conv, kept.conv)
                written = True
            self._swap()
            self.position, self._whole = kept.position, True

        def undo() -> None:
            if self.state is not state:
                self._swap()
            # A copy that failed is taken to have copied nothing; one that was made has to be taken back.
            self.position, self._whole = position, whole and not written
            if self._conv is not None:
                self._copy(self._conv, kept.undo)
            self._whole = whole

        return Change(apply, undo)

    def check_truncate(self, count: int) -> None:
        check_stays(self.plan, self.index, count, self.position)

    def truncate_last(self, count: int) -> None:
        """Raises CannotRewind unless ``count`` is 0; nothing changes."""
        self.check_truncate(count)

    def take_over(self, source: ResidentRecurrentLayer) -> None:
        """Copy what ``source``, a layer of this plan on this device, holds, on the device. Raises RecordError for
        another plan or device, DeviceFault."""
        if source.plan != self.plan or source.device is not self.device:
            raise RecordError(f"{where(self.plan, self.index)}: a state of {source.device.name}, expected this plan and device")
        source._require_whole()
        with self._changing():
            self._copy(self.state, source.state)
            if self._conv is not None:
                self._copy(self._conv, source.conv)
        self.position = source.position
        self.generation = next_generation()

    def clear(self) -> None:
        """Zeros at position 0."""
        self.position = 0
        self.generation = next_generation()
        with self._changing():
            for array in self._arrays():
                self._upload(np.zeros(array.shape, _F32), array)

    def free(self) -> None:
        """Take the memory off the device's books; the layer is not to be used any more."""
        for array in self._arrays():
            self.device.free(array)

    def free_kept(self, kept: KeptStates) -> None:
        """Take copies that `set_aside` made off the device's books."""
        for array in (kept.state, kept.conv, kept.undo):
            if array is not None:
                self.device.free(array)

    def memory(self) -> LayerMemory:
        conv = 0 if self._conv is None else int(self._conv.nbytes)
        return LayerMemory(recurrent=self.allocated_bytes - conv, conv=conv)

    def _arrays(self) -> list[DeviceArray]:
        return self._states if self._conv is None else [*self._states, self._conv]

    def _require_whole(self) -> None:
        if not self._whole:
            raise DeviceFault(
                f"{where(self.plan, self.index)}: {self.device.name} failed while its state was written over; clear or restore it"
            )

    @contextmanager
    def _changing(self) -> Iterator[None]:
        """Around what writes over what is held."""
        self._whole = False
        yield
        self._whole = True

    def _swap(self) -> None:
        self._states.reverse()

    def _upload(self, host: F32, out: DeviceArray) -> None:
        self.device.upload(np.ascontiguousarray(host).reshape(-1), out.reshape(-1))

    def _copy(self, out: DeviceArray, source: DeviceArray) -> None:
        self.device.copy_into(out.reshape(-1), 0, source.reshape(-1), 0, source.size)
