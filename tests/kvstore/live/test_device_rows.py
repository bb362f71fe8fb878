"""Rows in a device's memory beside rows in the host's: the same bytes, whatever is done to them, at addresses
that never change."""

from __future__ import annotations

import numpy as np
import pytest
from devices_at_hand import KINDS, at_hand, brought

from warmkv.kernels.dispatch import REFERENCE
from warmkv.kernels.formats import RowFormat
from warmkv.kernels.quant.packed import pack
from warmkv.kernels.resident.plane import TAIL_PAD, Counters
from warmkv.kernels.turboquant.rotation import Rotation
from warmkv.kernels.turboquant.turn import Turn
from warmkv.kvstore.live.devices.base import Device
from warmkv.kvstore.live.devices.host import HostDevice
from warmkv.kvstore.live.rows.device import DeviceRows
from warmkv.kvstore.live.rows.growing import GrowingRows
from warmkv.schema.errors import CapacityExceeded, OutOfMemory, RecordError

HEADS, SIZE, CAPACITY = 2, 32, 100
SIDES = [(format_, keys) for format_ in RowFormat for keys in (True, False) if format_.stores(keys=keys)]
ALL_SIDES = pytest.mark.parametrize(
    ("format_", "keys"), SIDES, ids=[f"{format_.value}-{'keys' if keys else 'values'}" for format_, keys in SIDES]
)


@pytest.fixture(params=KINDS)
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Device:
    return at_hand(request.param, monkeypatch)


def on_host(format_: RowFormat = RowFormat.Q8_0, *, keys: bool = True) -> GrowingRows:
    turn = Turn(Rotation.of(42, 3, SIZE)) if format_.rotated else None
    return GrowingRows(format_, HEADS, SIZE, keys=keys, kernels=REFERENCE, turn=turn)


def numbers(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng([seed, count]).standard_normal((count, HEADS, SIZE)).astype(np.float32)


def bytes_of(plane: GrowingRows) -> bytes:
    return pack([plane.blocks(head) for head in range(HEADS)], plane.format, SIZE, keys=plane.keys).tobytes()


class Pair:
    """The same rows on a device and on the host."""

    def __init__(self, device: Device, format_: RowFormat = RowFormat.Q8_0, *, keys: bool = True) -> None:
        self.device = device
        self.plane = DeviceRows(on_host(format_, keys=keys), CAPACITY, device)
        self.host = on_host(format_, keys=keys)
        self.counters = Counters(device.zeros((1,), np.int32), device.zeros((1,), np.int32))

    def store(self, count: int, seed: int = 0) -> None:
        rows = numbers(count, seed)
        self.plane.reserve(count)
        if count:
            self.device.set_one(self.counters.length, len(self.plane))
            self.plane.store(brought(self.device, rows), self.counters)
        self.put(rows)

    def put(self, rows: np.ndarray) -> None:
        self.host.reserve(len(rows))
        self.host.append(rows)

    def check(self) -> None:
        assert len(self.plane) == len(self.host)
        assert self.plane.packed().tobytes() == bytes_of(self.host)
        for head in range(HEADS):
            (block,), (expected,) = self.plane.blocks(head), self.host.blocks(head)
            assert block.codes.tobytes() == expected.codes.tobytes()
            assert (block.scales is None) == (expected.scales is None)
            if block.scales is not None:
                assert block.scales.tobytes() == expected.scales.tobytes()
            assert not block.codes.flags.writeable


def address(plane: DeviceRows) -> int:
    data = plane.plane.data
    return int(data.ctypes.data if isinstance(data, np.ndarray) else data.data.ptr)


# -- storing ------------------------------------------------------------------------------------


@ALL_SIDES
def test_rows_are_stored_as_on_the_host(device: Device, format_: RowFormat, keys: bool) -> None:
    pair = Pair(device, format_, keys=keys)
    pair.check()
    for count in (1, 30, 1, 1):
        pair.store(count)
        pair.check()
    assert pair.plane.row_bytes == HEADS * format_.row_bytes(SIZE, keys=keys)
    assert pair.plane.stored_bytes == 33 * pair.plane.row_bytes
    field = 4 * HEADS * SIZE if format_.quantised else 0
    assert pair.plane.allocated_bytes == CAPACITY * pair.plane.row_bytes + TAIL_PAD + field


def test_a_full_plane_refuses_one_row_more_and_keeps_its_pad(device: Device) -> None:
    pair = Pair(device)
    pair.store(CAPACITY - 1)
    pair.store(1)
    pair.check()
    with pytest.raises(CapacityExceeded, match="100 rows and 1 more, there is room for 100"):
        pair.plane.reserve(1)
    pair.plane.reserve(0)
    pair.check()
    assert device.download(pair.plane.plane.data)[-TAIL_PAD:].tolist() == [0] * TAIL_PAD


def test_addresses_stay_and_nothing_is_allocated_whatever_is_stored(device: Device) -> None:
    pair = Pair(device)
    first, allocations = address(pair.plane), device.allocations
    row = brought(device, numbers(1))
    for at in range(CAPACITY):
        device.set_one(pair.counters.length, at)
        pair.plane.store(row, pair.counters)
    pair.plane.drop_front(40)
    pair.plane.truncate(3)
    pair.plane.clear()
    assert (address(pair.plane), device.allocations - allocations) == (first, 1)


@pytest.mark.parametrize("capacity", [0, -1])
def test_a_plane_without_rows_is_none(capacity: int) -> None:
    with pytest.raises(RecordError, match=f"{capacity} rows of a device"):
        DeviceRows(on_host(), capacity, HostDevice())


# -- moving -------------------------------------------------------------------------------------


@pytest.mark.parametrize("dropped", [0, 1, 31, 32, 33, 69, 70, 71])
def test_rows_move_to_the_front(device: Device, dropped: int) -> None:
    pair = Pair(device)
    pair.store(70)
    pair.plane.drop_front(dropped)
    pair.host.drop_front(dropped)
    pair.check()
    pair.store(5, seed=1)
    pair.check()


def test_cutting_and_picking_rows_is_what_it_is_on_the_host(device: Device) -> None:
    pair = Pair(device)
    pair.store(70)
    for kept in ([0, 1, 5, 6, 7, 40, 69], [1, 3, 4], [0, 2], []):
        indices = np.asarray(kept, np.intp)
        pair.plane.gather(indices)
        pair.host.gather(indices)
        pair.check()
    pair.store(9, seed=2)
    for rows in (12, 7, -1):
        pair.plane.truncate(rows)
        pair.host.truncate(rows)
        pair.check()


def test_a_truncation_can_be_taken_back(device: Device) -> None:
    pair = Pair(device)
    pair.store(20)
    pair.plane.truncate(4)
    pair.plane.blocks(0)
    pair.plane.untruncate(20)
    pair.check()


def test_blocks_follow_what_changes(device: Device) -> None:
    """Where they are downloaded, they are so anew."""
    pair = Pair(device)
    pair.store(5)
    assert len(pair.plane.blocks(0)[0]) == 5
    pair.store(2, seed=1)
    pair.check()
    assert pair.plane.packed(5, 7).tobytes() == pair.plane.packed(5).tobytes() == pair.plane.packed().tobytes()[-2 * 68 :]


def test_blocks_of_the_host_are_views() -> None:
    pair = Pair(HostDevice())
    pair.store(5)
    assert np.shares_memory(pair.plane.blocks(1)[0].codes, pair.plane.plane.data)


@pytest.mark.parametrize(("first", "last"), [(-1, 2), (3, 2), (0, 6), (6, None)])
def test_only_rows_that_are_stored_are_handed_out(first: int, last: int | None) -> None:
    pair = Pair(HostDevice())
    pair.store(5)
    with pytest.raises(RecordError, match="of 5"):
        pair.plane.packed(first, last)


# -- what a plane of rows can do --------------------------------------------------------------------


@ALL_SIDES
def test_host_rows_are_encoded_by_the_host(device: Device, format_: RowFormat, keys: bool) -> None:
    pair = Pair(device, format_, keys=keys)
    rows = numbers(7)
    pair.plane.append(rows)
    pair.put(rows)
    pair.check()
    for copy, expected in ((pair.plane.gathered(None, 3), pair.host), (pair.plane.gathered(np.array([1, 6])), None)):
        assert expected is None or bytes_of(copy) == bytes_of(expected)
        assert copy.capacity >= len(copy)
    pair.host.gather(np.array([1, 6]))
    assert bytes_of(copy) == bytes_of(pair.host)


def test_a_field_is_fixed_in_place_and_rows_behind_are_written_against_it(device: Device) -> None:
    pair = Pair(device, RowFormat.Q8_2F)
    pair.store(64)
    first, field = address(pair.plane), pair.plane.field
    assert (pair.plane.frozen, field, pair.plane.plane.field) == (False, None, None)
    pair.plane.freeze()
    pair.host.freeze()
    assert pair.plane.frozen and address(pair.plane) == first
    assert pair.plane.field.tobytes() == pair.host.field.tobytes() == device.download(pair.plane.plane.field).tobytes()
    pair.store(8, seed=3)
    pair.check()
    pair.plane.clear()
    assert (pair.plane.frozen, pair.plane.field, pair.plane.plane.field) == (False, None, None)


def test_memory_that_was_given_back_is_taken_again(device: Device) -> None:
    pair = Pair(device, RowFormat.Q8_2F)
    books = device.allocated_bytes
    pair.store(3)
    pair.plane.release()
    assert (len(pair.plane), pair.plane.allocated_bytes) == (0, 0)
    assert len(pair.plane.blocks(0)[0]) == 0
    with pytest.raises(RecordError, match="given back"):
        _ = pair.plane.plane
    pair.host.release()
    pair.store(4)
    pair.check()
    assert device.allocated_bytes <= books + numbers(4).nbytes


# -- loading ------------------------------------------------------------------------------------


@pytest.mark.parametrize("held", [0, 60, CAPACITY])
@pytest.mark.parametrize("loaded", [0, 1, 41, CAPACITY])
@pytest.mark.parametrize("format_", [RowFormat.Q8_0, RowFormat.F32, RowFormat.Q8_2F])
def test_record_bytes_become_all_the_rows_there_are(device: Device, held: int, loaded: int, format_: RowFormat) -> None:
    pair = Pair(device, format_)
    pair.store(held)
    if format_.quantised and held:
        pair.plane.freeze()
        pair.host.freeze()
    source = on_host(format_)
    source.reserve(loaded)
    source.append(numbers(loaded, seed=5))
    if format_.quantised and loaded:
        source.freeze()
    packed = pack([source.blocks(head) for head in range(HEADS)], format_, SIZE, keys=True)
    packed.flags.writeable = False
    load = pair.plane.prepare_load([packed[:7], packed[7:]], source.field)
    pair.check()
    load()
    assert (pair.plane.packed().tobytes(), len(pair.plane)) == (packed.tobytes(), loaded)
    found = pair.plane.plane.field
    assert (None if found is None else device.download(found).tobytes()) == (
        None if source.field is None else source.field.tobytes()
    )


def test_rows_are_loaded_behind_zeros_that_are_nobodys(device: Device) -> None:
    pair = Pair(device)
    pair.store(CAPACITY)
    packed = pair.plane.packed(3, 20)
    with pytest.raises(CapacityExceeded):
        pair.plane.prepare_load([packed], padding=CAPACITY - 16)
    pair.plane.prepare_load([packed], padding=5)()
    assert (len(pair.plane), pair.plane.padding) == (17, 5)
    assert pair.plane.packed().tobytes() == packed.tobytes()
    assert not device.download(pair.plane.plane.data)[: 5 * pair.plane.row_bytes].any()
    with pytest.raises(CapacityExceeded):
        pair.plane.reserve(CAPACITY - 21)
    with pytest.raises(RecordError, match="5 rows of padding"):
        pair.plane.gather(np.array([0, 2]))
    pair.plane.drop_front(2)
    assert (len(pair.plane), pair.plane.padding) == (15, 0)
    assert pair.plane.packed().tobytes() == packed[2:].tobytes()


def test_rows_are_loaded_into_memory_that_was_given_back(device: Device) -> None:
    pair = Pair(device)
    pair.store(4)
    packed = pair.plane.packed()
    pair.plane.release()
    pair.plane.prepare_load([packed])()
    pair.check()


def test_what_does_not_fit_is_not_loaded(device: Device) -> None:
    pair = Pair(device)
    pair.store(4)
    row = pair.plane.packed(0, 1)
    with pytest.raises(CapacityExceeded, match="101 rows to load, there is room for 100"):
        pair.plane.prepare_load([row] * (CAPACITY + 1))
    for parts in ([row, row[:, :-1]], [row.view(np.int8)], [row[0]]):
        with pytest.raises(RecordError, match="packed rows are"):
            pair.plane.prepare_load(parts)
    with pytest.raises(RecordError, match="field"):
        pair.plane.prepare_load([row], np.ones((HEADS, SIZE), np.float32))
    pair.check()


def test_loads_that_are_refused_or_dropped_leave_rows_and_books_as_they_were() -> None:
    device = HostDevice()
    pair = Pair(device)
    pair.store(60)
    device.limit_bytes = device.allocated_bytes + 41 * pair.plane.row_bytes
    books = device.allocated_bytes
    row = pair.plane.packed(0, 1)
    with pytest.raises(OutOfMemory) as caught:
        pair.plane.prepare_load([row] * 42)
    assert caught.value.requested_bytes == 42 * pair.plane.row_bytes
    pair.plane.prepare_load([row] * 41)
    pair.plane.prepare_load([row] * 40)
    assert device.allocated_bytes == books
    pair.check()
    with pytest.raises(OutOfMemory):
        pair.plane.prepare_gather(np.arange(0, 60, 1, dtype=np.intp))
    pair.check()
