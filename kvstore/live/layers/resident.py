"""An attention layer whose rows stay in a device's memory: a fixed buffer, from row 0 on or as a ring.

It is an attention layer in all that can be asked of it. What differs is where memory comes from - all of it
is taken when the layer is made -, who computes, and, for a ring, that an append which would leave the buffer
first gives up rows that no query sees. As with `attention`, all that is done with such a layer is here, which
makes the module long.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace

import numpy as np

from warmkv.kernels.dispatch import Kernels
from warmkv.kernels.formats import F32, WARMUP_ROWS
from warmkv.kernels.resident.plane import Counters
from warmkv.kvstore.live.devices.base import Device, DeviceArray
from warmkv.kvstore.live.devices.workspace import Workspace
from warmkv.kvstore.live.layers import checks
from warmkv.kvstore.live.layers.attention import AttentionLayer
from warmkv.kvstore.live.layers.base import next_generation, where
from warmkv.kvstore.live.layers.device_computing import DeviceComputing, given
from warmkv.kvstore.live.layers.places import Places
from warmkv.kvstore.live.memory import LayerMemory
from warmkv.kvstore.live.plan import LayerPlan
from warmkv.kvstore.live.rings import AppendPlan, Rebase, Ring, check_count, retain_from, view_start
from warmkv.kvstore.live.rows.base import PlaneRows
from warmkv.kvstore.live.rows.device import DeviceRows
from warmkv.kvstore.live.rows.device_planes import DevicePlanes, check_storable
from warmkv.kvstore.live.rows.laid import laid
from warmkv.kvstore.live.rows.written import Part
from warmkv.schema.errors import CannotRewind, CapacityExceeded, DeviceFault, RecordError, UnsupportedError
from warmkv.schema.identity import LayerKind

Fields = tuple[F32 | None, F32 | None]


class ResidentLayer(AttentionLayer):
    """Keys and values of one layer on ``device``: ``capacity`` rows, or those of ``ring`` where there is one,
    which then has the plan's window and starts empty.

    Rows and queries are arrays of numpy, or of the device: those are the caller's to check for numbers that
    cannot be stored. Answers are arrays of the device, in ``workspace``, to be read before another layer of
    that workspace is asked. A step - append, attend - takes no memory. More rows than there is room for raise
    CapacityExceeded, nothing changed.

    Counters on the device are what the host knows after every call, see `mirrors`: of a ring the position of
    the next token, and that of the buffer's first row in ``base``, an int32 (1,) of the caller's that is this layer's to write;
    without a ring how many rows there are, and 0, so that they are right when rows were given up.

    A layer takes ``capacity`` * bytes of a token, two tail pads and a counter, and where a format has a field,
    the field. **Threading:** one caller at a time."""

    keys: DeviceRows
    values: DeviceRows
    _planes: DevicePlanes

    def __init__(
        self, plan: LayerPlan, *, index: int = 0, device: Device, workspace: Workspace, capacity: int, ring: Ring | None = None,
        base: DeviceArray | None = None, kernels: Kernels | None = None,
    ) -> None:  # fmt: skip
        """Raises RecordError, UnsupportedError for plans that devices have no part in, OutOfMemory."""
        plan.validate(index)
        _check(plan, where(plan, index), ring, base)
        super().__init__(plan, index=index, kernels=kernels)
        rows = capacity if ring is None else ring.rows
        _check_workspace(plan, self._name, workspace, device, rows)
        self.device, self.workspace, self.ring = device, workspace, ring
        self._held: list[DeviceArray] = []
        self._rows: list[DeviceRows] = []
        try:
            for like in self.empty_planes():
                self._rows.append(DeviceRows(like, rows, device))
            self._held.append(device.zeros((1,), np.int32))
            self.keys, self.values = self._rows
            counters = Counters(self._held[0], workspace.zero if base is None else base)
            self._planes = DevicePlanes(self.keys, self.values, counters, placed=ring is not None)
        except BaseException:
            self.free()
            raise
        self._computing = self._resident = DeviceComputing(plan, self._planes, workspace)

    @property
    def capacity(self) -> int:
        """Rows there is memory for."""
        return self.keys.capacity

    @property
    def allocated_bytes(self) -> int:
        """Bytes of rows, fields and the length counter, as `memory` has them."""
        return sum(plane.allocated_bytes for plane in self._rows) + sum(int(array.nbytes) for array in self._held)

    @property
    def counters(self) -> Counters:
        """The device's mirrors, for who launches on these rows."""
        return self._planes.counters

    def mirrors(self) -> tuple[int, int]:
        """What the length and the base counter say, downloaded. Waits for the device."""
        return self._planes.mirrors()

    @property
    def expected_mirrors(self) -> tuple[int, int]:
        """What they have to say."""
        return self._planes.expected

    def append(self, k: F32 | DeviceArray, v: F32 | DeviceArray) -> None:
        """Store rows of the next positions. On a ring this may give up rows no query sees; no more than fit
        beside a window can be appended at once. Raises DeviceFault, with the same rows as before, but for those of a
        ring that no query sees."""
        self.check_append(k, v)
        count = len(k)
        plan = None
        if self.ring is not None:
            plan = self._append_plan(self.ring, count)
        for plane in (self.keys, self.values):
            plane.reserve(count if plan is None else 0)
        rows = self.workspace.brought(k, "keys"), self.workspace.brought(v, "values")
        if isinstance(plan, Rebase):
            self.rebase(plan.new_base)
        self._planes.settle()
        self._store(*rows)

    def prepare_captured(self, count: int) -> None:
        """Make room for ``count`` rows that captured launches will append one after the other: they find their
        place by the counters and ask nobody. A ring gives up rows for all of them now. Raises CapacityExceeded,
        RecordError while a field is open, which only `append` fixes, DeviceFault as `append`."""
        check_count("rows", count)
        if self._planes.open:
            raise RecordError(f"{self._name}: {count} rows of captured launches while the field is open; append those before it")
        plan = None if self.ring is None else self._append_plan(self.ring, count)
        for plane in (self.keys, self.values):
            plane.reserve(count if plan is None else 0)
        if isinstance(plan, Rebase):
            self.rebase(plan.new_base)
        self._planes.settle()

    def check_captured(self, count: int) -> None:
        """Raise what `ran_captured` would, changing nothing."""
        check_count("rows", count)
        self._planes.require_whole()
        for plane in (self.keys, self.values):
            plane.reserve(count)

    def ran_captured(self, count: int) -> None:
        """Captured launches appended ``count`` rows to both planes and advanced the length counter by as many: follow
        them. Raises CapacityExceeded for more than there was room for, of which the others were not stored."""
        self.check_captured(count)
        self._planes.advanced(count)
        self._places.append(count)

    def rebase(self, new_base: int) -> None:
        """Give up a ring's rows before position ``new_base``, which moves to row 0. Raises RecordError without a
        ring or for a position that is not stored, CannotRewind for one whose row is gone. After a DeviceFault it is
        to be asked for again, with the same position, before anything else."""
        check_count("base", new_base)
        if self.ring is None or new_base > self.position:
            raise RecordError(f"{self._name}: a base of {new_base} at position {self.position} of {self.ring}")
        if new_base == self.ring.base:
            self._planes.settle()
            return
        if new_base < self.base:
            raise CannotRewind(f"{self._name}: a base of {new_base}, held are rows from {self.base} on")
        self._check_fixed(new_base)
        gone = new_base - self.base
        self._planes.keep_newest(self.rows - gone, new_base)
        self.ring = self.ring.rebased(new_base)
        self._places.trim(gone)
        self._extremes.dropped(gone)
        self.generation = next_generation()

    def check_truncate(self, count: int) -> None:
        """As `LayerState.check_truncate`; a ring goes back as far as a whole aligned window is still there."""
        self._planes.require_whole()
        super().check_truncate(count)
        back = self.position - count
        if count and self.ring is not None and not self.ring.can_rewind_to(back):
            raise CannotRewind(
                f"{self._name}: {count} positions to forget; a read at {back} starts at {view_start(back, self.plan.window)}, "
                f"the ring holds rows from {self.ring.base} on"
            )

    def truncate_last(self, count: int) -> None:
        """As `AttentionLayer.truncate_last`. Raises DeviceFault, and nothing was forgotten then."""
        before = self.position
        try:
            super().truncate_last(count)
        except DeviceFault:
            if self.position < before:
                with suppress(DeviceFault):
                    self.untruncate_last(before - self.position)
            raise

    def untruncate_last(self, count: int) -> None:
        """Take back a `truncate_last` of ``count`` positions just made: nothing was stored since, so that the rows
        are still there. Where a counter cannot be set, what the host knows is right all the same."""
        self._places.append(count)
        self._planes.untruncate(self.rows)

    def trim_window(self, slack: int = 0, align: int = 1, anchor: int | None = None) -> int:
        """As `AttentionLayer.trim_window`; a ring gives up rows by itself, when it needs their room."""
        return super().trim_window(slack, align, anchor) if self.ring is None else 0

    def prepare_adopt(
        self, keys: F32 | PlaneRows, values: F32 | PlaneRows, *, position: int, base: int, importance: F32 | None, gapless: bool
    ) -> Callable[[], None]:
        """As `AttentionLayer.prepare_adopt`, with arrays of the host; planes are copied. Of rows for a ring only
        its window is taken."""
        planes = self._makings.planes_of(keys, values)
        self._makings.mass_of(importance, len(planes[0]))
        checks.adopted_places(self._name, len(planes[0]), position, base, gapless, self.plan.window)
        start = self._start(position, base, all(plane.field is None for plane in planes))
        parts = [laid(plane, start - base) for plane in planes]
        fields = (planes[0].field, planes[1].field)
        return self.prepare_restore(parts[0], parts[1], position=position, base=start, fields=fields, gapless=gapless)

    def prepare_restore(
        self, keys: Sequence[Part], values: Sequence[Part], *, position: int, base: int, fields: Fields = (None, None),
        gapless: bool = True,
    ) -> Callable[[], None]:  # fmt: skip
        """What replaces all rows by record bytes in this layer's formats, one part after the other, mapped ones
        too: rows of `packed_shape` from position ``base`` on where they are ``gapless``. ``fields`` are those of
        keys and values where their formats have one and it is frozen. Only parts that are `Written` are converted,
        while they are uploaded.

        The bytes are uploaded now, where nobody reads; what is returned moves them, sets the counters and
        cannot fail. Rows must not be written between: RecordError, nothing changed. A ring takes its aligned window of
        them, with padding in place of rows before ``base`` that no query sees: going back to where one would is
        refused. Raises RecordError for parts that do not fit or a window that starts before ``base``,
        CapacityExceeded, OutOfMemory, DeviceFault; nothing changed."""
        count = sum(map(len, keys))
        checks.same_length(self._name, range(count), range(sum(map(len, values))))
        checks.adopted_places(self._name, count, position, base, gapless, self.plan.window)
        self._check_fields(fields)
        start = self._start(position, base, all(field is None for field in fields))
        ring = None if self.ring is None else self.ring.hydrated(position, start)
        origin, padding = (start, 0) if ring is None else (ring.base, ring.padding)
        rows = count - (start - base)
        loads = [
            plane.prepare_load(_behind(parts, start - base), field, padding)
            for plane, parts, field in zip((self.keys, self.values), (keys, values), fields, strict=True)
        ]
        load = self._planes.prepare_load(loads, origin)
        places = Places(self._name, self.plan.window, rows, position, start, gapless, rows if gapless else 0)

        def install() -> None:
            load()
            self._forget()
            self._places, self.ring = places, ring

        return install

    def prepare_grow(self, rows: int, workspace: Workspace | None = None) -> Callable[[], None]:
        """What moves the layer into memory for ``rows`` rows, at other addresses, and computes in ``workspace``
        where one is given: for more rows attention may need more of it. A ring takes its aligned window with
        it, others all rows. While it is not called both memories are there. Raises RecordError for fewer rows
        than now, OutOfMemory; nothing changed."""
        if rows < self.capacity:
            raise RecordError(f"{self._name}: growth to {rows} rows, it has {self.capacity}")
        _check_workspace(self.plan, self._name, workspace or self.workspace, self.device, rows)
        start = self._start(self.position, self.base, self._planes.open)
        ring = None if self.ring is None else replace(self.ring, rows=rows).hydrated(self.position, start)
        origin, padding = (0, 0) if ring is None else (ring.base, ring.padding)
        widen = self._planes.prepare_widen(rows, start - self.base if ring else 0, padding, origin)

        def install() -> None:
            widen()
            self.keys, self.values = self._rows = [self._planes.keys, self._planes.values]
            if ring is not None and start > self.base:
                self._extremes.dropped(start - self.base)
                self._places.trim(start - self.base)
                self.generation = next_generation()
            self.ring = ring
            if workspace is not None:
                self._planes.counters = Counters(self._held[0], self.counters.base if ring else workspace.zero)
                self.workspace = workspace
                self._resident.move_to(workspace)
            self._planes.tell()

        return install

    def take_over(self, source: ResidentLayer, start: int = 0) -> None:
        """Copy all rows of ``source``, a layer of this plan on this device - of a ring's those from position
        ``start`` on -, into this layer, which is as it was made; sinks, too. All on the device. Raises
        RecordError for another plan or device, CapacityExceeded, CannotRewind where that is less than a window,
        DeviceFault."""
        if source.plan != self.plan or source.device is not self.device or (source.ring is None) != (self.ring is None):
            raise RecordError(f"{self._name}: rows of {source._name} on {source.device.name}, expected this plan and device")
        origin = first = padding = 0
        ring = self.ring
        if ring is not None:
            first = 0 if source._planes.open else max(start, source.base) - source.base
            ring = ring.hydrated(source.position, source.base + first)
            origin, padding = ring.base, ring.padding
        self._planes.take_over(source._planes, first, padding, origin)
        self.ring, self._places = ring, replace(source._places)
        if first:
            self._places.trim(first)
        self.generation = next_generation()
        self.sinks = source.sinks

    def clear(self) -> None:
        self._restart_ring()
        super().clear()

    def release(self) -> None:
        """`clear`, and give the memory of rows back. The next append takes it again, elsewhere."""
        self._restart_ring()
        self._forget()
        self._planes.release()

    def free(self) -> None:
        """Take all that this layer has off the device's books; it is not to be used any more."""
        for plane in self._rows:
            plane.release()
            plane.freed = True
        if self._sinks is not None:
            self.sinks = None
        while self._held:
            self.device.free(self._held.pop())

    def memory(self) -> LayerMemory:
        return replace(super().memory(), attention=self.allocated_bytes)

    def _append_plan(self, ring: Ring, count: int) -> AppendPlan:
        """With the rows kept that tokens are taken back over where there is room for them, and without."""
        length, window = self.position, self.plan.window
        try:
            return ring.append_plan(length, retain_from(length, window, ring.base), count)
        except CapacityExceeded:
            pass
        try:
            return ring.append_plan(length, max(view_start(length, window), ring.base), count)
        except CapacityExceeded as exc:
            raise CapacityExceeded(f"{self._name}: {exc}") from exc

    def _start(self, position: int, base: int, unfixed: bool) -> int:
        """The first of the positions from ``base`` on that is taken: all of them while a field, ``unfixed``, is still to
        be fixed from them."""
        if self.ring is None or (unfixed and self.plan.quantised):
            return base
        return max(base, view_start(position, self.plan.window))

    def _check_fixed(self, new_base: int) -> None:
        """Raises CapacityExceeded where rows would be given up from which a field is to be fixed."""
        if self._planes.open:
            raise CapacityExceeded(
                f"{self._name}: rows before position {new_base} would have to go from {self.ring}, and the first {WARMUP_ROWS} "
                f"rows, of which there are {self.rows}, fix a field; append these first"
            )

    def check_append(self, k: F32 | DeviceArray, v: F32 | DeviceArray) -> None:
        """Raise what `append` would of the arrays themselves, changing nothing: so many layers can be asked before
        one is touched."""
        for rows, plane, size in ((k, self.keys, self.plan.key_size), (v, self.values, self.plan.value_size)):
            if isinstance(rows, np.ndarray):
                check_storable(plane, self._makings.side_of(rows, self.rows, self.position, keys=plane.keys))
            else:
                given(self.workspace, rows, (None, self.plan.kv_heads, size), plane.name)
        checks.same_length(self._name, k, v)

    def check_room(self, count: int) -> None:
        check_count("rows", count)
        self._planes.require_whole()
        plan = None if self.ring is None else self._append_plan(self.ring, count)
        if isinstance(plan, Rebase):
            self._check_fixed(plan.new_base)
        for plane in (self.keys, self.values):
            plane.check_room(count if plan is None else 0)

    def _check_fields(self, fields: Fields) -> None:
        """Both are fixed at once."""
        fixed = [field is not None for field, plane in zip(fields, self._planes.planes, strict=True) if plane.format.quantised]
        if any(fixed) and not all(fixed):
            raise RecordError(f"{self._name}: the field of one plane is frozen, that of the other is not")

    def _restart_ring(self) -> None:
        self.ring = None if self.ring is None else replace(self.ring, base=0, padding=0)


def _check(plan: LayerPlan, name: str, ring: Ring | None, base: DeviceArray | None) -> None:
    if plan.kind not in (LayerKind.FULL, LayerKind.SLIDING):
        raise UnsupportedError(f"{name}: rows on a device, expected FULL or SLIDING")
    if plan.importance:
        raise UnsupportedError(f"{name}: importance is not counted on devices, the plan asks for it")
    if len(plan.alive_heads) < plan.kv_heads:
        raise UnsupportedError(f"{name}: dead KV heads, on devices all have to be alive")
    if (ring is None) != (base is None):
        raise RecordError(f"{name}: {ring} with a base counter {'missing' if base is None else 'given'}, expected both or none")
    if ring is not None and (ring.window != plan.window or ring.valid_from):
        raise RecordError(f"{name}: {ring}, expected an empty one for a window of {plan.window}")


def _check_workspace(plan: LayerPlan, name: str, workspace: Workspace, device: Device, rows: int) -> None:
    if workspace.device is not device:
        raise RecordError(f"{name}: on {device.name}, its workspace on {workspace.device.name}")
    scratch = device.operations.scratch_floats(plan.heads, plan.value_size, rows)
    answers = plan.heads * plan.value_size
    if workspace.needs.scratch < scratch or workspace.needs.answers < answers:
        raise RecordError(f"{name}: {workspace.needs}, expected scratch of {scratch} and answers of {answers} numbers")


def _behind(parts: Sequence[Part], skipped: int) -> list[Part]:
    """All but the first ``skipped`` rows, as views."""
    found: list[Part] = []
    for part in parts:
        found.append(part[min(skipped, len(part)) :])
        skipped -= min(skipped, len(part))
    return found
