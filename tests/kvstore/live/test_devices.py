"""Devices, each by the same tests: memory and its book, uploads, copies that overlap, counters, and what is
said where a device is missing."""

from __future__ import annotations

import gc
import sys
import weakref
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import stand_in
from devices_at_hand import KINDS, at_hand, brought

from warmkv.kvstore.live.devices import cupy_device, opening
from warmkv.kvstore.live.devices.base import Device
from warmkv.kvstore.live.devices.cupy_device import CupyDevice
from warmkv.kvstore.live.devices.host import HostDevice
from warmkv.kvstore.live.devices.moves import moves
from warmkv.kvstore.live.devices.opening import open_device
from warmkv.schema.errors import DeviceFault, DeviceMissing, OutOfMemory, RecordError


@pytest.fixture(params=[kind for kind in KINDS if kind != "harness"])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Device:
    """The harness has the memory of the host."""
    return at_hand(request.param, monkeypatch)


# -- memory -------------------------------------------------------------------------------------


def test_zeros_are_zeros_and_the_book_has_every_allocation(device: Device) -> None:
    before, bytes_before = device.allocations, device.allocated_bytes
    zeros = device.zeros((3, 5), np.float32)
    other = device.alloc((7,), np.int32)
    assert device.allocations - before == 2
    assert device.allocated_bytes - bytes_before == zeros.nbytes + other.nbytes == 3 * 5 * 4 + 7 * 4
    assert (zeros.shape, other.dtype, device.owns(zeros)) == ((3, 5), np.int32, True)
    assert device.download(zeros).tolist() == np.zeros((3, 5)).tolist()


def test_memory_leaves_the_book_when_freed_and_when_forgotten(device: Device) -> None:
    before = device.allocated_bytes
    first, second = device.alloc((4,), np.uint8), device.alloc((8,), np.uint8)
    device.free(first)
    assert device.allocated_bytes - before == 8
    device.free(first)
    gone = weakref.ref(second)
    del second
    gc.collect()
    assert gone() is None and device.allocated_bytes == before


def test_a_view_keeps_memory_on_the_book_of_the_host() -> None:
    device = HostDevice()
    view = device.zeros((4, 4), np.float32)[1:]
    gc.collect()
    assert device.allocated_bytes == 64
    del view
    gc.collect()
    assert device.allocated_bytes == 0


def test_a_limit_refuses_what_is_beyond_it_and_says_how_much_that_was() -> None:
    device = HostDevice(limit_bytes=100)
    kept = device.alloc((60,), np.uint8)
    with pytest.raises(OutOfMemory, match="41 bytes") as caught:
        device.alloc((41,), np.uint8)
    assert caught.value.requested_bytes == 41 and device.allocations == 1
    assert device.alloc((40,), np.uint8).size == 40
    device.free(kept)
    assert device.alloc((60,), np.uint8).size == 60


@pytest.mark.parametrize("rows", [1 << 22, 1 << 24], ids=["of memory", "of addresses"])
def test_sizes_beyond_any_machine_are_refused_as_memory(device: Device, rows: int) -> None:
    before = device.allocated_bytes
    with pytest.raises(OutOfMemory) as caught:
        device.alloc((1 << 40, rows), np.uint8)
    assert caught.value.requested_bytes == rows << 40 and device.allocated_bytes == before


# -- uploads and downloads ----------------------------------------------------------------------


@pytest.mark.parametrize("count", [0, 1, 63, 64, 65, 128, 1000])
def test_what_is_uploaded_comes_back_with_the_rest_untouched(device: Device, count: int) -> None:
    numbers = np.random.default_rng(count).standard_normal(count).astype(np.float32)
    out = device.zeros((count + 7,), np.float32)
    device.upload(numbers, out, 3)
    numbers[...] = np.nan  # it may be reused on return
    found = device.download(out)
    expected = np.random.default_rng(count).standard_normal(count).astype(np.float32)
    assert found[3 : 3 + count].tobytes() == expected.tobytes()
    assert not found[:3].any() and not found[3 + count :].any()


def test_many_uploads_from_one_array_that_is_reused_keep_their_order(device: Device) -> None:
    out, host = device.zeros((50, 40), np.int32), np.empty(40, np.int32)
    for row in range(50):
        host[...] = row
        device.upload(host, out, row * 40)
    assert (device.download(out) == np.arange(50)[:, None]).all()


def test_mapped_and_strided_memory_is_uploaded_as_it_reads(device: Device, tmp_path) -> None:
    path = tmp_path / "segment"
    path.write_bytes(bytes(range(256)) * 9)
    mapped = np.memmap(path, np.uint8, "r")
    out = device.zeros((2304,), np.uint8)
    device.upload(mapped, out)
    assert device.download(out).tobytes() == path.read_bytes()
    device.upload(mapped.reshape(9, 256)[:, ::2], out, 100)
    assert device.download(out)[100 : 100 + 9 * 128].tobytes() == mapped.reshape(9, 256)[:, ::2].tobytes()


def test_an_upload_that_does_not_fit_copies_nothing(device: Device) -> None:
    out = device.zeros((8,), np.float32)
    for host, offset in ((np.ones(8, np.float32), 1), (np.ones(1, np.float32), -1), (np.ones(2, np.float64), 0)):
        with pytest.raises(RecordError):
            device.upload(host, out, offset)
    assert not device.download(out).any()


def test_downloads_are_copies_also_into_an_array_that_is_given(device: Device) -> None:
    array = brought(device, np.arange(12, dtype=np.int32).reshape(3, 4))
    found, out = device.download(array), np.empty((3, 4), np.int32)
    found[...] = -1
    assert device.download(array, out) is out
    assert out.tolist() == np.arange(12).reshape(3, 4).tolist()
    with pytest.raises(RecordError, match="int32 into an array of float32"):
        device.download(array, np.empty((3, 4), np.float32))


def test_a_download_into_an_array_with_gaps_is_refused_by_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    device = at_hand("stand-in", monkeypatch)
    with pytest.raises(RecordError, match="with gaps"):
        device.download(device.zeros((3, 4), np.int32), np.empty((3, 8), np.int32)[:, ::2])


# -- copies -------------------------------------------------------------------------------------


def test_a_copy_is_in_memory_of_its_own(device: Device) -> None:
    array = brought(device, np.arange(6, dtype=np.float32))
    copied = device.copy(array)
    device.upload(np.zeros(6, np.float32), array)
    assert device.download(copied).tolist() == list(range(6))


@pytest.mark.parametrize(
    ("offset", "start", "count"),
    [(0, 0, 9), (0, 1, 999), (1, 0, 999), (0, 30, 900), (30, 0, 900), (0, 48, 700), (47, 0, 700), (49, 0, 700),
     (0, 500, 500), (0, 499, 501), (500, 0, 500), (3, 3, 40), (0, 0, 0), (1000, 0, 0), (10, 20, 1)],
)  # fmt: skip
def test_overlapping_copies_read_before_they_write(device: Device, offset: int, start: int, count: int) -> None:
    numbers = np.arange(1000, dtype=np.int32)
    array = brought(device, numbers)
    allocations = device.allocations
    device.copy_into(array, offset, array, start, count)
    expected = numbers.tolist()
    expected[offset : offset + count] = numbers.tolist()[start : start + count]
    assert device.download(array).tolist() == expected
    assert device.allocations == allocations


def test_copies_beyond_an_array_or_of_another_dtype_are_refused_whole(device: Device) -> None:
    array, other = device.zeros((8,), np.int32), brought(device, np.ones(8, np.int32))
    for offset, start, count in ((1, 0, 8), (0, 1, 8), (-1, 0, 2), (0, -1, 2), (0, 0, -1)):
        with pytest.raises(RecordError, match="elements"):
            device.copy_into(array, offset, other, start, count)
    with pytest.raises(RecordError, match="float32 into an array of int32"):
        device.copy_into(array, 0, device.zeros((8,), np.float32), 0, 8)
    assert not device.download(array).any()


def test_arrays_with_gaps_are_refused_whole() -> None:
    device = HostDevice()
    gaps, plain = device.zeros((32,), np.float32), device.zeros((16,), np.float32)
    for act in (
        lambda: device.upload(np.ones(16, np.float32), gaps[::2]), lambda: device.copy_into(gaps[::2], 0, plain, 0, 16),
        lambda: device.copy_into(plain, 0, gaps[::2], 0, 16),
    ):  # fmt: skip
        with pytest.raises(RecordError, match="with gaps"):
            act()
    assert not device.download(gaps).any() and not device.download(plain).any()


def test_rows_are_copied_into_columns(device: Device) -> None:
    out = device.zeros((6, 10), np.float32)
    rows = np.arange(1, 13, dtype=np.float32).reshape(3, 4)
    device.copy_rows(out, 2, 5, brought(device, rows))
    expected = np.zeros((6, 10), np.float32)
    expected[2:5, 5:9] = rows
    assert device.download(out).tolist() == expected.tolist()
    for row, column in ((4, 0), (0, 7), (-1, 0), (0, -1)):
        with pytest.raises(RecordError, match="copy of rows"):
            device.copy_rows(out, row, column, brought(device, rows))
    assert device.download(out).tolist() == expected.tolist()


def test_counters_are_set_in_order_and_without_memory(device: Device) -> None:
    counter, seen = device.zeros((1,), np.int32), device.zeros((300,), np.int32)
    allocations = device.allocations
    for value in range(300):
        device.set_one(counter, value * 7 - 1000)
        device.copy_into(seen, value, counter, 0, 1)
    assert device.download(seen).tolist() == [value * 7 - 1000 for value in range(300)]
    assert device.allocations == allocations
    device.synchronize()


# -- how overlapping copies are cut -------------------------------------------------------------


@pytest.mark.parametrize("room", [1, 2, 5, 8, 100])
def test_pieces_never_overlap_what_they_are_copied_to(room: int) -> None:
    for offset in range(12):
        for start in range(12):
            for count in (0, 1, 2, 7, 12):
                memory, scratch = list(range(30)), [-1] * room
                expected = memory.copy()
                expected[offset : offset + count] = memory[start : start + count]
                for move in moves(offset, start, count, room):
                    piece = memory[move.start : move.start + move.count]
                    assert len(piece) == move.count
                    if move.aside:
                        assert move.count <= room
                        scratch[: move.count] = piece
                    else:
                        assert abs(move.offset - move.start) >= move.count
                    memory[move.offset : move.offset + move.count] = piece
                assert memory == expected


def test_a_short_gap_does_not_cost_a_copy_for_each_row() -> None:
    assert len(list(moves(0, 1, 10_000, 1000))) == 10
    assert len(list(moves(0, 5000, 10_000, 1000))) == 2
    assert len(list(moves(0, 10_000, 10_000, 1000))) == 1


# -- streams of others --------------------------------------------------------------------------


def test_work_goes_to_the_stream_that_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    device, other = streams_at_hand(monkeypatch)
    given = CupyDevice(operations=device.operations, stream=other)
    array = brought(given, np.arange(5, dtype=np.int32))
    assert len(other.stream.work) == 1 and device.stream.work == []
    assert given.download(array).tolist() == list(range(5))


def test_what_another_stream_writes_is_waited_for_where_that_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    device, other = streams_at_hand(monkeypatch)
    array, copied = device.zeros((2,), np.int32), device.zeros((2,), np.int32)
    other.stream.enqueue(lambda: array.seen().fill(3))
    device.copy_into(copied, 0, array, 0, 1)
    device.wait_for(other)
    other.stream.enqueue(lambda: array.seen().fill(4))
    device.copy_into(copied, 1, array, 0, 1)
    # Nobody has waited on the host; what was enqueued there afterwards is not waited for.
    assert other.stream.done == 0
    assert device.download(copied).tolist() == [0, 3]


def test_another_stream_waits_for_a_device_where_that_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    device, other = streams_at_hand(monkeypatch)
    array, found = brought(device, np.arange(3, dtype=np.int32)), []
    other.stream.enqueue(lambda: found.append(array.seen().tolist()))
    device.let_wait(other)
    device.set_one(array[:1], 9)
    other.stream.enqueue(lambda: found.append(array.seen().tolist()))
    other.stream.synchronize()
    assert found == [[-1] * 3, [0, 1, 2]]


def test_devices_wait_for_one_another_again_and_again(monkeypatch: pytest.MonkeyPatch) -> None:
    device, _ = streams_at_hand(monkeypatch)
    second = CupyDevice(operations=device.operations)
    counter, seen = device.zeros((1,), np.int32), second.zeros((20,), np.int32)
    for value in range(20):
        device.set_one(counter, value)
        second.wait_for(device)
        second.copy_into(seen, value, counter, 0, 1)
        device.wait_for(second)
    assert second.download(seen).tolist() == list(range(20))


def test_all_that_is_of_a_gpu_is_made_while_it_is_current(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", stand_in.cupy(gpus=2))
    first, second = (CupyDevice(index, operations=stand_in.Lazily(None)) for index in range(2))
    counter, seen = first.zeros((1,), np.int32), second.zeros((2,), np.int32)
    assert (first.owns(counter), first.owns(seen), second.owns(counter), second.owns(seen)) == (True, False, False, True)
    assert [device.stream.device_id for device in (first, second)] == [0, 1] and stand_in.CURRENT == [0]
    for value in range(2):
        first.set_one(counter, value + 5)
        second.wait_for(first)
        second.copy_into(seen, value, counter, 0, 1)
        second.let_wait(first)
    many = np.arange(5000, dtype=np.int32)
    assert second.download(brought(second, many)).tolist() == many.tolist()
    assert second.download(seen).tolist() == [5, 6] and stand_in.CURRENT == [0]


def test_what_is_no_stream_of_this_gpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    device, _ = streams_at_hand(monkeypatch)
    for stream in (7, "default", object()):
        for refused in (device.wait_for, device.let_wait, lambda stream: CupyDevice(stream=stream)):
            with pytest.raises(RecordError, match="is no stream"):
                refused(stream)
    with pytest.raises(RecordError, match="a stream of GPU 1 for work on GPU 0"):
        CupyDevice(operations=device.operations, stream=stand_in.Foreign(1))
    assert device.stream.work == []


def streams_at_hand(monkeypatch: pytest.MonkeyPatch) -> tuple[CupyDevice, stand_in.Foreign]:
    device = at_hand("stand-in", monkeypatch)
    assert isinstance(device, CupyDevice)
    return device, stand_in.Foreign()


# -- faults -------------------------------------------------------------------------------------


def test_what_cupy_says_becomes_an_error_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    device = at_hand("stand-in", monkeypatch)
    monkeypatch.setattr(stand_in.Pool, "left", 63)
    with pytest.raises(OutOfMemory, match="64 bytes") as caught:
        device.zeros((64,), np.uint8)
    assert caught.value.requested_bytes == 64 and device.allocations == 0
    array = device.zeros((63,), np.uint8)

    def failing(*arguments: object) -> None:
        raise stand_in.RuntimeFault("an illegal address")

    monkeypatch.setattr(stand_in.Pointer, "copy_from_host_async", failing)
    with pytest.raises(DeviceFault, match="cuda:0: upload: an illegal address"):
        device.upload(np.zeros(63, np.uint8), array)


def test_what_waits_is_refused_while_launches_are_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    device, _ = streams_at_hand(monkeypatch)
    array, other = device.zeros((4,), np.int32), device.zeros((4,), np.int32)
    device.stream.capturing = True
    refused = (
        lambda: device.upload(np.ones(4, np.int32), array), lambda: device.set_one(array[:1], 1),
        lambda: device.download(array), device.synchronize,
    )  # fmt: skip
    for ask in refused:
        with pytest.raises(RecordError, match="cuda:0: .* while the stream is captured"):
            ask()
    device.copy_into(array, 0, other, 0, 4)
    device.stream.capturing = False
    device.set_one(array[:1], 5)
    assert device.download(array).tolist() == [5, 0, 0, 0]


# -- opening ------------------------------------------------------------------------------------


def test_the_host_is_opened_by_its_name() -> None:
    device = open_device("cpu")
    assert isinstance(device, HostDevice) and device.name == "cpu"
    assert open_device("cpu") is not device


@pytest.mark.parametrize("name", ["", "gpu", "cuda:", "cuda:-1", "cuda:x", "CUDA", "cuda:0 ", "cpu:0", "cuda:99999", None, 0])
def test_names_that_mean_nothing_are_refused(name: Any) -> None:
    with pytest.raises(DeviceMissing, match="no device is called"):
        open_device(name)


def test_a_missing_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(DeviceMissing, match=r"cuda:0 needs cupy.*pip install 'warmkv\[cuda\]'"):
        open_device("cuda")


def test_a_missing_driver_is_told_from_a_missing_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    library = stand_in.cupy()

    def no_driver() -> int:
        raise stand_in.RuntimeFault("cudaErrorInsufficientDriver")

    monkeypatch.setitem(sys.modules, "cupy", library)
    with pytest.raises(DeviceMissing, match="cuda:1: this machine has 1 GPUs"):
        open_device("cuda:1")
    library.cuda.runtime.getDeviceCount = no_driver
    with pytest.raises(DeviceMissing, match="is there a driver.*cudaErrorInsufficientDriver"):
        open_device("cuda:0")


def test_a_missing_compiler_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_library() -> tuple[int, int]:
        raise RuntimeError("libnvrtc.so.13: cannot open shared object file")

    library = stand_in.cupy()
    library.cuda.nvrtc = SimpleNamespace(getVersion=no_library)
    monkeypatch.setitem(sys.modules, "cupy", library)
    with pytest.raises(DeviceMissing, match="cuda:0 needs NVRTC.*libnvrtc.so.13"):
        open_device("cuda")


def test_cupy_is_not_loaded_for_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(index: int) -> object:
        raise AssertionError("cupy was asked for")

    monkeypatch.setattr(cupy_device, "_cupy", refused)
    assert opening.open_device("cpu").name == "cpu"
