"""Rows in a device's memory: a fixed buffer, token after token, of the very bytes records are made of.

The buffer is taken once and never moves, so that captured launches keep finding it; what moves are rows
within it. Appending quantises on the device. Everything that only host code can do - picking rows out,
fixing a field - is done on a downloaded copy by a plane of host memory with the same makings.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from warmkv.kernels.formats import F32, Block
from warmkv.kernels.quant.packed import Packed, pack, packed_dtype, packed_shape, view
from warmkv.kernels.resident.plane import TAIL_PAD, Counters, ResidentPlane
from warmkv.kvstore.live.devices.base import Device, DeviceArray
from warmkv.kvstore.live.rows.encoded import Encoded, Indices
from warmkv.kvstore.live.rows.growing import GrowingRows, readonly
from warmkv.kvstore.live.rows.written import Part, packed_of, pieces_of
from warmkv.schema.errors import CapacityExceeded, DeviceFault, RecordError

_U8 = np.dtype(np.uint8)


class DeviceRows:
    """A plane of ``capacity`` rows on ``device``, made as ``like`` is, an empty plane of host memory that is
    taken over.

    ``padding`` rows of zeros lie before row 0, where what was loaded asked for them: they are nobody's rows, and
    take room. Its buffer (capacity * row bytes + tail pad) is taken at once and keeps its address until `release`; so
    does the field of a format that has one. Who writes rows with device operations (`store`) keeps the
    counters these are told of; nothing else here looks at counters. Blocks are views where the device's
    memory is the host's; elsewhere they are of a copy, downloaded when first asked for and dropped when rows
    change. Methods that "cannot fail" may raise DeviceFault where a device breaks.

    **Threading:** as `PlaneRows`."""

    def __init__(self, like: GrowingRows, capacity: int, device: Device) -> None:
        """Raises RecordError for a capacity below 1 or a plane with rows, OutOfMemory."""
        self.format, self.heads, self.size, self.keys, self.turn = like.format, like.heads, like.size, like.keys, like.turn
        self.name = like.name
        if capacity < 1 or len(like):
            raise RecordError(f"{self.name}: {capacity} rows of a device, made like {len(like)}; expected at least 1 and none")
        self.capacity, self.device = capacity, device
        self._host = like
        self._count = self.padding = 0
        #: Whether rows are what they are said to be; not where a device failed while they were moved.
        self.whole = True
        self.freed = False
        self._downloaded: Packed | None = None
        #: The newest load whose rows wait behind these.
        self._waiting: object = None
        self._plane: ResidentPlane | None = None
        self._room_for_field: DeviceArray | None = None
        self._take_memory()

    def __len__(self) -> int:
        return self._count

    @property
    def plane(self) -> ResidentPlane:
        """What operations are told of these rows. Raises RecordError after `release`."""
        if self._plane is None:
            raise RecordError(f"{self.name}: its memory was given back")
        return self._plane

    @property
    def row_bytes(self) -> int:
        """Bytes of one token."""
        return self.heads * self.format.row_bytes(self.size, keys=self.keys)

    @property
    def frozen(self) -> bool:
        return self._host.frozen

    @property
    def field(self) -> F32 | None:
        return self._host.field

    @property
    def stored_bytes(self) -> int:
        return self._count * self.row_bytes + (0 if self.field is None else self.field.nbytes)

    @property
    def allocated_bytes(self) -> int:
        field = 0 if self._room_for_field is None else self._room_for_field.nbytes
        return (0 if self._plane is None else int(self._plane.data.nbytes)) + int(field)

    @property
    def mapped_bytes(self) -> int:
        return 0

    def check_room(self, rows: int) -> None:
        """Raises CapacityExceeded where ``rows`` more do not fit."""
        if self.padding + self._count + rows > self.capacity:
            held = self.padding + self._count
            raise CapacityExceeded(f"{self.name}: {held} rows and {rows} more, there is room for {self.capacity}")

    def reserve(self, rows: int) -> None:
        """Raises CapacityExceeded where ``rows`` more do not fit, and OutOfMemory where the memory was given
        back and is not to be had again; nothing changed."""
        self.check_room(rows)
        if self._plane is None:
            self._take_memory()

    def store(self, rows: DeviceArray, counters: Counters) -> None:
        """Quantise ``rows`` (n, heads, size), contiguous float32 of the device, into memory behind the others;
        room was reserved. ``counters`` say where that is, and are not changed. Numbers are not checked."""
        self._changed()
        self.device.operations.append(self.plane, rows, counters)
        self._count += rows.shape[0]

    def advanced(self, count: int) -> None:
        """Count ``count`` rows more, which launches of the caller's stored behind the others; room was reserved."""
        self._changed()
        self._count += count

    def encode(self, rows: F32) -> Encoded:
        return self._host.encode(rows, first=self._count)

    def write(self, encoded: Encoded) -> None:
        self._upload([packed_of(encoded, self._host)])

    def append(self, rows: F32) -> None:
        self.write(self.encode(rows))

    def packed(self, first: int = 0, last: int | None = None) -> Packed:
        """A host copy of the record bytes of rows [first, last), all from ``first`` on where that is None: rows
        of `packed_shape`. Raises RecordError for rows that are not stored."""
        self.require_whole()
        last = self._count if last is None else last
        if not 0 <= first <= last <= self._count:
            raise RecordError(f"{self.name}: rows [{first}, {last}) of {self._count}")
        if first == last or self._plane is None:
            return self._shaped(np.empty(0, _U8))
        return self._shaped(self.device.download(self._span(first, last)))

    def prepare_load(self, parts: Sequence[Part], field: F32 | None = None, padding: int = 0) -> Callable[[], None]:
        """What makes the rows of ``parts`` - record bytes, one part after the other - all the rows there are, of
        the frozen ``field`` (heads, size) where their format has one, behind ``padding``; then it cannot fail.

        They are uploaded now: behind the rows there are, or into memory of their own where that is no room.
        Rows must not change between, and of two loads that are prepared the first may be refused then: RecordError,
        nothing changed. Raises RecordError for parts of another layout, CapacityExceeded,
        OutOfMemory, DeviceFault; nothing changed."""
        rows = self._check_parts(parts)
        if padding + rows > self.capacity:
            raise CapacityExceeded(f"{self.name}: {padding + rows} rows to load, there is room for {self.capacity}")
        host = self._host.like()
        if field is not None:
            host.seed_field(field)
        self.reserve(0)
        count, first = (padding + rows) * self.row_bytes, (self.padding + self._count) * self.row_bytes
        apart = first + count > self.capacity * self.row_bytes
        target = self.device.alloc((count,), _U8) if apart else self.plane.data
        before = [np.zeros(padding * self.row_bytes, _U8)] if padding else []
        mine = object()
        if not apart:
            self._waiting = mine
        try:
            self._put([*before, *parts], target, 0 if apart else first)
            waiting = None if field is None else self._uploaded(field)
        except BaseException:
            if apart:
                self.device.free(target)
            raise

        def load() -> None:
            if not apart and self._waiting is not mine:
                raise RecordError(f"{self.name}: other rows were brought since those to be loaded")
            if apart or first:
                self.device.copy_into(self.plane.data, 0, target, 0 if apart else first, count)
            self._become(host, waiting)
            self._count, self.padding = rows, padding

        return load

    def widened(self, capacity: int, first: int = 0, padding: int = 0) -> DeviceRows:
        """A plane of ``capacity`` rows, in memory of its own, that begins with ``padding`` and a copy of the rows
        from ``first`` on, made on the device. Raises CapacityExceeded, OutOfMemory."""
        count = self._count - first
        if padding + count > capacity:
            raise CapacityExceeded(f"{self.name}: {padding + count} rows, there would be room for {capacity}")
        other = DeviceRows(self._host.like(), capacity, self.device)
        other.take_over(self, first, padding)
        return other

    def take_over(self, source: DeviceRows, first: int = 0, padding: int = 0) -> None:
        """Copy rows from ``first`` on of another plane of this device and these makings, behind ``padding`` rows, into
        this one, which is as it was made. Nothing is converted or downloaded. Raises CapacityExceeded, DeviceFault."""
        rows = len(source) - first
        self.reserve(padding + rows)
        start = (source.padding + first) * self.row_bytes
        self.device.copy_into(self.plane.data, padding * self.row_bytes, source.plane.data, start, rows * self.row_bytes)
        if source.field is not None:
            host = self._host.like()
            host.seed_field(source.field)
            self._become(host, source.plane.field)
        self._changed()
        self._count, self.padding = rows, padding

    def refielded(self, room: int = 0) -> GrowingRows:
        return self._host.collected(self._all(), None, room, refield=not self.frozen)

    def gathered(self, kept: Indices | None, room: int = 0) -> GrowingRows:
        return self._host.collected(self._all(), kept, room)

    def take(self, other: GrowingRows) -> None:
        self.prepare_take(other)()

    def prepare_take(self, other: GrowingRows) -> Callable[[], None]:
        """Everything of `take` that may fail; see `prepare_load`."""
        packed = pack([other.blocks(head) for head in range(self.heads)], self.format, self.size, keys=self.keys)
        return self.prepare_load([packed], other.field, self.padding)

    def freeze(self) -> None:
        if not self.frozen:
            self.take(self.refielded())

    def truncate(self, rows: int) -> None:
        self._changed()
        self._count = min(self._count, max(0, rows))

    def untruncate(self, rows: int) -> None:
        """Take back a `truncate` from ``rows``, nothing having been stored since. Cannot fail."""
        self._changed()
        self._count = max(self._count, min(rows, self.capacity - self.padding))

    def drop_front(self, rows: int) -> None:
        """As `PlaneRows.drop_front`; the padding goes, too."""
        rows = min(self._count, max(0, rows))
        gone = self.padding + rows
        if gone:
            self._changed()
            left = self._count - rows
            self.device.copy_into(self.plane.data, 0, self.plane.data, gone * self.row_bytes, left * self.row_bytes)
            self._count, self.padding = left, 0

    def gather(self, kept: Indices) -> None:
        self.prepare_gather(kept)()

    def prepare_gather(self, kept: Indices) -> Callable[[], None]:
        """Everything of `gather` that may fail; calling what is returned cannot. Raises OutOfMemory, RecordError
        behind padding."""
        if not len(kept):
            return lambda: self.truncate(0)
        device = self.device
        if self.padding:
            raise RecordError(f"{self.name}: rows to be picked out behind {self.padding} rows of padding")
        indices = self._uploaded(kept.astype(np.int32))
        scratch = device.alloc((len(kept) * self.row_bytes,), _U8)

        def apply() -> None:
            self._changed()
            device.operations.gather(self.plane, indices, scratch)
            self._count = len(kept)

        return apply

    def reopen(self, packed: Packed) -> None:
        """Take back a freeze: these are the rows again, and no field is fixed. Raises DeviceFault."""
        self._become(self._host.like(), None)
        self._put([packed], self.plane.data, self.padding * self.row_bytes)
        self._count = len(packed)

    def require_whole(self) -> None:
        """Raises DeviceFault unless rows are `whole`, RecordError once they were freed."""
        if self.freed:
            raise RecordError(f"{self.name}: its memory was freed, the layer is not to be used any more")
        if not self.whole:
            raise DeviceFault(
                f"{self.name}: {self.device.name} failed while rows were moved; clear or restore the layer, or move them again"
            )

    def clear(self) -> None:
        self._changed()
        self.whole = True
        self._count = self.padding = 0
        self._become(self._host.like(), None)

    def release(self) -> None:
        """`clear`, and give the memory back; it is taken again, at another address, by the next `reserve`."""
        self.clear()
        for array in (self._room_for_field, None if self._plane is None else self._plane.data):
            if array is not None:
                self.device.free(array)
        self._plane = self._room_for_field = None

    def blocks(self, head: int) -> tuple[Block, ...]:
        return (self._views()[head],)

    def _views(self) -> tuple[Block, ...]:
        return view(
            readonly(self._stored()), self.format, self.heads, self.size, keys=self.keys, field=self.field, turn=self.turn
        )

    def _stored(self) -> Packed:
        """The record bytes of all rows, to be read."""
        self.require_whole()
        if self._count and isinstance(self.plane.data, np.ndarray):
            return self._shaped(self._span(0, self._count))
        if self._downloaded is None:
            self._downloaded = self.packed()
        return self._downloaded

    def _span(self, first: int, last: int) -> DeviceArray:
        """Where rows [first, last) lie."""
        first, last = self.padding + first, self.padding + last
        return self.plane.data[first * self.row_bytes : last * self.row_bytes]

    def _shaped(self, raw: Packed) -> Packed:
        shape = packed_shape(self.format, self.heads, self.size, keys=self.keys)
        dtype = packed_dtype(self.format)
        return raw.view(dtype).reshape(raw.nbytes // self.row_bytes, *shape)

    def _all(self) -> list[tuple[Block, ...]]:
        return [(block,) for block in self._views()]

    def _check_parts(self, parts: Sequence[Part]) -> int:
        shape, dtype = packed_shape(self.format, self.heads, self.size, keys=self.keys), packed_dtype(self.format)
        for index, part in enumerate(parts):
            if part.shape[1:] != shape or part.dtype != dtype:
                found = f"{part.dtype} of {part.shape[1:]}"
                raise RecordError(f"{self.name}, part {index}: packed rows are {found}, expected {dtype} of {shape}")
        return sum(len(part) for part in parts)

    def _upload(self, parts: Sequence[Part]) -> None:
        """Behind the others."""
        self._changed()
        self._put(parts, self.plane.data, (self.padding + self._count) * self.row_bytes)
        self._count += sum(len(part) for part in parts)

    def _put(self, parts: Sequence[Part], target: DeviceArray, offset: int) -> None:
        for piece in (piece for part in parts for piece in pieces_of(part)):
            raw = np.ascontiguousarray(piece).reshape(-1).view(_U8)
            self.device.upload(raw, target, offset)
            offset += raw.size

    def _uploaded(self, host: Packed) -> DeviceArray:
        array = self.device.alloc(host.shape, host.dtype)
        try:
            self.device.upload(host, array)
        except BaseException:
            self.device.free(array)
            raise
        return array

    def _become(self, host: GrowingRows, field: DeviceArray | None) -> None:
        """Of the field of ``host``, which lies at ``field`` on the device."""
        self._changed()
        self._host = host
        if field is not None and self._room_for_field is not None:
            self.device.copy_into(self._room_for_field, 0, field, 0, field.size)
        if self._plane is not None:
            self._plane = replace(self._plane, field=None if field is None else self._room_for_field)

    def _changed(self) -> None:
        self._downloaded = None

    def _take_memory(self) -> None:
        if self.freed:
            raise RecordError(f"{self.name}: its memory was freed, the layer is not to be used any more")
        # Zeros, for kernels may read behind the last row, and what they read should at least be numbers.
        data = self.device.zeros((self.capacity * self.row_bytes + TAIL_PAD,), _U8)
        if self.format.quantised:
            try:
                self._room_for_field = self.device.alloc((self.heads, self.size), np.float32)
            except BaseException:
                self.device.free(data)
                raise
        self._plane = ResidentPlane(self.format, self.heads, self.size, self.keys, self.capacity, data, None, self.turn)
