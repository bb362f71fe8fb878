"""The planes of a resident layer, and the counters on the device that say how many rows they have.

The counters are changed where the counts are, so that neither can be told without the other: whoever reads
them on the device reads what the host knows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np

from warmkv.kernels.errors import KernelError, NotFinite
from warmkv.kernels.formats import F32
from warmkv.kernels.resident.plane import Counters
from warmkv.kvstore.live.devices.base import DeviceArray
from warmkv.kvstore.live.rows.base import PlaneRows
from warmkv.kvstore.live.rows.device import DeviceRows
from warmkv.kvstore.live.rows.encoded import Indices
from warmkv.kvstore.live.rows.planes import Planes
from warmkv.schema.errors import DeviceFault, RecordError

#: Scales and fields of numbers up to here fit every format.
_SURELY_FITS = np.float32(65504)


class DevicePlanes(Planes):
    """Keys and values of a device. Rows that are appended are its arrays.

    ``counters`` are theirs to change: the length counter says ``origin`` + padding + rows. The first row of the
    buffer stands for position ``origin`` and the base counter says so where they are ``placed``; else both
    start from 0, whatever positions rows stand for, and the base counter is never written.

    Counters that a fault kept from being written are written before the next use. Where a device failed while rows
    of both planes were moved or replaced, neither answers, is saved or appended to until they were cleared or replaced,
    or the move was asked for again (`keep_newest`): DeviceFault says so.

    **Threading:** as `PlaneRows`."""

    def __init__(self, keys: DeviceRows, values: DeviceRows, counters: Counters, *, placed: bool) -> None:
        super().__init__((keys, values))
        self.keys, self.values, self.counters, self.placed = keys, values, counters, placed
        self.device = keys.device
        self.origin = 0
        #: How often bytes were written: what waits behind the rows is still there while this is the same.
        self._writes = 0
        self._told = False
        self.tell()

    @property
    def expected(self) -> tuple[int, int]:
        """What the length and the base counter have to say."""
        return self.length_at(len(self)), self.origin

    def length_at(self, rows: int) -> int:
        """What the length counter says of so many rows."""
        return self.origin + self.keys.padding + rows

    def mirrors(self) -> tuple[int, int]:
        """What they say, downloaded."""
        length, base = (self.device.download(counter) for counter in (self.counters.length, self.counters.base))
        return int(length[0]), int(base[0])

    def tell(self) -> None:
        """Write both counters."""
        self._told = False
        length, base = self.expected
        self.device.set_one(self.counters.length, length)
        if self.placed:
            self.device.set_one(self.counters.base, base)
        self._told = True

    def settle(self) -> None:
        """What comes before rows are used: see the class. Raises DeviceFault."""
        self.require_whole()
        if not self._told:
            self.tell()

    def require_whole(self) -> None:
        """Raises DeviceFault where a device failed while rows were moved."""
        for plane in (self.keys, self.values):
            plane.require_whole()

    @contextmanager
    def seen_to(self, rows: int) -> Iterator[None]:
        """With the length counter at so many of the rows."""
        self._told = False
        try:
            self.device.set_one(self.counters.length, self.length_at(rows))
            yield
        finally:
            self.tell()

    def prepare_keep(self, kept: Indices) -> Callable[[], None]:
        if len(kept) == 0 or kept[-1] - kept[0] + 1 == len(kept):
            return super().prepare_keep(kept)
        gathers = [plane.prepare_gather(kept) for plane in (self.keys, self.values)]

        def apply() -> None:
            self.require_whole()
            with self._moving(), faults(self.keys.name):
                for gather in gathers:
                    gather()
                self.tell()

        return apply

    def prepare_load(self, loads: Sequence[Callable[[], None]], origin: int) -> Callable[[], None]:
        """What does ``loads``, one of each plane, and lets the buffer begin at position ``origin`` where rows are
        placed. What is returned raises RecordError, nothing changed, where anything was written since."""
        writes = self._writes

        def apply() -> None:
            if self._writes != writes:
                raise RecordError(f"{self.keys.name}: rows were written since those to be loaded were brought")
            with self._moving():
                for load in loads:
                    load()
                self.origin = origin if self.placed else 0
                self.tell()

        return apply

    def prepare_widen(self, capacity: int, first: int, padding: int, origin: int) -> Callable[[], None]:
        """What moves the rows from ``first`` on into planes of ``capacity`` rows, see `DeviceRows.widened`, that
        begin at position ``origin`` where rows are placed; these are made now, and counters are the caller's to `tell`
        then. Raises CapacityExceeded, OutOfMemory."""
        self.require_whole()
        made: list[DeviceRows] = []
        try:
            for plane in (self.keys, self.values):
                made.append(plane.widened(capacity, first, padding))
        except BaseException:
            for plane in made:
                plane.release()
            raise

        def apply() -> None:
            before = self.keys, self.values
            self.keys, self.values = made
            self.planes = (self.keys, self.values)
            self.origin = origin if self.placed else 0
            self._told = False
            for plane in before:
                plane.release()

        return apply

    def advanced(self, count: int) -> None:
        """Count ``count`` rows more, which launches of the caller's stored and told the length counter of."""
        self._writes += 1
        for plane in (self.keys, self.values):
            plane.advanced(count)

    def truncate(self, rows: int) -> None:
        super().truncate(rows)
        self._tell_length()

    def untruncate(self, rows: int) -> None:
        """Take back a `truncate` from ``rows``, nothing having been stored since."""
        for plane in (self.keys, self.values):
            plane.untruncate(rows)
        self._tell_length()

    def keep_newest(self, rows: int, origin: int) -> None:
        """Give up all but the newest ``rows``, of which the first stands for position ``origin`` and moves to row 0.
        After a fault it may be asked for again, with the same rows, and goes on where it stopped."""
        with self._moving():
            for plane in (self.keys, self.values):
                plane.drop_front(len(plane) - rows)
            self.origin = origin if self.placed else 0
            self.tell()

    def take_over(self, source: DevicePlanes, first: int, padding: int, origin: int) -> None:
        """See `DeviceRows.take_over`; row 0 stands for ``origin`` where rows are placed."""
        source.require_whole()
        with self._moving():
            self.keys.take_over(source.keys, first, padding)
            self.values.take_over(source.values, first, padding)
            self.origin = origin if self.placed else 0
            self.tell()

    def drop_front(self, rows: int) -> None:
        gone = min(len(self), max(0, rows))
        self._cut(gone, len(self) - gone)

    def clear(self) -> None:
        self._told = False
        super().clear()
        self.origin = 0
        self.tell()

    def release(self) -> None:
        self._told = False
        super().release()
        self.origin = 0
        self.tell()

    def _cut(self, first: int, count: int) -> None:
        self.require_whole()
        gone = self.keys.padding + first
        with self._moving():
            for plane in (self.keys, self.values):
                plane.truncate(first + count)
                plane.drop_front(first)
            if self.placed:
                self.origin += gone
            self.tell()

    def _write(self, rows: Sequence[DeviceArray]) -> None:
        count = rows[0].shape[0]
        if not count:
            return
        self.settle()
        self._writes += 1
        with faults(self.keys.name):
            self._told = False
            for plane, part in zip((self.keys, self.values), rows, strict=True):
                plane.store(part, self.counters)
            self.device.operations.advance(self.counters, count)
            self._told = True

    def _freeze_and_write(self, rows: Sequence[DeviceArray]) -> None:
        self.settle()
        loads, before = [], []
        for plane, part in zip((self.keys, self.values), rows, strict=True):
            if plane.format.quantised:
                copy = plane.refielded()
                # Once in a conversation, so that no field is fixed that the rows behind it do not fit.
                check_storable(copy, self.device.download(part))
                loads.append(plane.prepare_take(copy))
                before.append((plane, plane.packed()))
        try:
            with self._moving():
                for load in loads:
                    load()
            self._write(rows)
        except BaseException:
            # A field that stays behind would not be that of the rows that come instead.
            with self._moving():
                for plane, packed in before:
                    plane.reopen(packed)
            raise

    def _tell_length(self) -> None:
        """Write the length counter, where the other one is right."""
        if not self._told:
            self.tell()
            return
        self._told = False
        self.device.set_one(self.counters.length, self.expected[0])
        self._told = True

    @contextmanager
    def _moving(self) -> Iterator[None]:
        """Around what changes rows of both planes. Raises DeviceFault where they have different ones in the end."""
        self._writes += 1
        for plane in (self.keys, self.values):
            plane.whole = False
        yield
        if (len(self.keys), self.keys.padding) != (len(self.values), self.values.padding):
            raise DeviceFault(f"{self.keys.name}: {len(self.keys)} rows, {self.values.name}: {len(self.values)}")
        for plane in (self.keys, self.values):
            plane.whole = True


@contextmanager
def faults(what: str) -> Iterator[None]:
    """Turn errors of operations into RecordError for rows that were refused, and DeviceFault."""
    try:
        yield
    except NotFinite as exc:
        raise RecordError(f"{what}: {exc}") from exc
    except KernelError as exc:
        raise DeviceFault(f"{what}: {exc}") from exc


def check_storable(plane: PlaneRows, rows: F32) -> None:
    """Raises RecordError for finite ``rows`` (n, heads, size) that the plane's format cannot hold. Only rows with
    numbers so large that this may be are encoded to know."""
    if np.abs(rows).max(initial=0) > _SURELY_FITS:
        plane.encode(rows)
