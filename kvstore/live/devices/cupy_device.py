"""A GPU's memory behind cupy, on one stream.

Of cupy only memory, streams and events are used, none of its compiled array functions: those need headers
that come with a toolkit.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

from warmkv.kernels.errors import KernelError
from warmkv.kernels.resident.operations import RowOperations
from warmkv.kvstore.live.devices.base import DeviceArray, HostArray, check_block, check_plain, check_same_dtype, check_span
from warmkv.kvstore.live.devices.books import Books
from warmkv.kvstore.live.devices.moves import moves
from warmkv.kvstore.live.devices.pinned import Pinned
from warmkv.kvstore.live.devices.streams import Order, gpu_of, taken
from warmkv.schema.errors import DeviceFault, DeviceMissing, OutOfMemory, RecordError

#: Bytes of each half of the buffer that uploads go through.
STAGE_BYTES = 4 << 20
#: Bytes of device memory through which overlapping rows are moved.
ASIDE_BYTES = 4 << 20
#: Bytes of each half of what counters are set from.
COUNTER_BYTES = 4 << 10


class CupyDevice:
    """GPU number ``index``. Memory comes from a pool of this device's own; work goes to ``stream``: None is one
    of its own, which waits for no other, else whatever has ``__cuda_stream__``, as cupy's streams and torch's do.

    Arrays that others write or read are theirs to order: on the same stream, or by `wait_for` and `let_wait`.
    Memory that nobody refers to any more is handed out anew to work on this stream; who still reads it on
    another keeps the array until then.

    ``operations`` compute (None: `CudaOperations` on the stream). What runs later than it was asked for may
    fail later, and raises DeviceFault from whatever call notices.

    **Threading:** one caller at a time."""

    def __init__(self, index: int = 0, *, operations: RowOperations | None = None, stream: Any = None) -> None:
        """Raises DeviceMissing that says what is missing, RecordError for what is no stream of this GPU,
        OutOfMemory."""
        cupy = self._cupy = _cupy(index)
        self.index = index
        self.name = f"cuda:{index}"
        self._books = Books()
        with self._asked(ASIDE_BYTES, "a stream and its buffers"), cupy.cuda.Device(index):
            self.stream = cupy.cuda.Stream(non_blocking=True) if stream is None else taken(cupy, stream, index)
            self._pool = cupy.cuda.MemoryPool()
            self._staging = Pinned(cupy, self.stream, STAGE_BYTES)
            self._counters = Pinned(cupy, self.stream, COUNTER_BYTES)
            with self.stream:
                self._aside = self._pool.malloc(ASIDE_BYTES)
            self._order = Order(cupy)
            self.operations: RowOperations = operations or self._cuda()

    @property
    def allocations(self) -> int:
        return self._books.allocations

    @property
    def allocated_bytes(self) -> int:
        return self._books.held_bytes

    def alloc(self, shape: tuple[int, ...], dtype: npt.DTypeLike) -> DeviceArray:
        wanted = prod(shape) * np.dtype(dtype).itemsize
        if wanted > sys.maxsize:
            raise OutOfMemory(f"{self.name}: {wanted} bytes for {shape}: more than any machine can address", wanted)
        with self._asked(wanted, f"{shape} of {np.dtype(dtype)}"), self._cupy.cuda.Device(self.index), self.stream:
            array = self._cupy.ndarray(shape, dtype, self._pool.malloc(wanted))
        self._books.enter(array, wanted)
        return array

    def zeros(self, shape: tuple[int, ...], dtype: npt.DTypeLike) -> DeviceArray:
        array = self.alloc(shape, dtype)
        if array.nbytes:
            with self._working("zeros"):
                array.data.memset_async(0, array.nbytes, self.stream)
        return array

    def free(self, array: DeviceArray) -> None:
        self._books.take_off(array)

    def upload(self, host: HostArray, out: DeviceArray, offset: int = 0) -> None:
        check_same_dtype("upload", host, out)
        check_span("upload", offset, host.size, out)
        check_plain("upload", out)
        raw = np.ascontiguousarray(host).reshape(-1).view(np.uint8)
        target = out.data + offset * out.itemsize
        with self._working("upload", waits=True):
            for at in range(0, raw.size, STAGE_BYTES):
                self._put(self._staging, raw[at : at + STAGE_BYTES], target + at)

    def download(self, array: DeviceArray, out: HostArray | None = None) -> HostArray:
        check_plain("download", array)
        # Told where to, cupy never hands out the device's memory itself, as it may where hosts can read that.
        out = np.empty(array.shape, array.dtype) if out is None else out
        check_same_dtype("download", array, out)
        check_plain("download to", out)
        with self._working("download", waits=True):
            array.get(stream=self.stream, out=out)
        return out

    def copy(self, array: DeviceArray) -> DeviceArray:
        copied = self.alloc(array.shape, array.dtype)
        self.copy_into(copied, 0, array, 0, array.size)
        return copied

    def copy_into(self, out: DeviceArray, offset: int, source: DeviceArray, start: int, count: int) -> None:
        check_same_dtype("copy", source, out)
        check_span("copy to", offset, count, out)
        check_span("copy from", start, count, source)
        check_plain("copy to", out)
        check_plain("copy from", source)
        size = out.itemsize
        gap = (out.data.ptr + offset * size) - (source.data.ptr + start * size)
        with self._working("copy"):
            if abs(gap) >= count * size:
                self._copy(out.data + offset * size, source.data + start * size, count * size)
                return
            # Both lie in one run of memory, counted from the source here.
            for move in moves(gap, 0, count * size, ASIDE_BYTES):
                to, found = source.data + (start * size + move.offset), source.data + (start * size + move.start)
                if move.aside:
                    self._copy(self._aside, found, move.count)
                    found = self._aside
                self._copy(to, found, move.count)

    def copy_rows(self, out: DeviceArray, row: int, column: int, source: DeviceArray) -> None:
        check_block(out, row, column, source)
        check_plain("copy to", out)
        check_plain("copy from", source)
        runtime, (count, width) = self._cupy.cuda.runtime, source.shape
        if source.size:
            to = out.data.ptr + (row * out.shape[1] + column) * out.itemsize
            pitches = out.shape[1] * out.itemsize, width * out.itemsize
            with self._working("copy of rows"):
                runtime.memcpy2DAsync(
                    to, pitches[0], source.data.ptr, pitches[1], pitches[1], count, runtime.memcpyDeviceToDevice, self.stream.ptr
                )

    def set_one(self, counter: DeviceArray, value: int) -> None:
        with self._working("setting a counter", waits=True):
            self._put(self._counters, np.array([value], np.int32).view(np.uint8), counter.data)

    def owns(self, array: object) -> bool:
        return isinstance(array, self._cupy.ndarray) and bool(array.device.id == self.index)

    def synchronize(self) -> None:
        with self._working("waiting", waits=True):
            self.stream.synchronize()

    def wait_for(self, other: Any) -> None:
        """What is asked of this device from now on begins once all that is on ``other`` by now is done: a stream,
        as for ``stream``, or a device like this one, of any GPU. Nobody waits here. Raises RecordError."""
        stream, gpu = self._stream_of(other)
        with self._working("waiting for a stream"):
            self._order.after(self.stream, taken(self._cupy, stream, gpu), gpu)

    def let_wait(self, other: Any) -> None:
        """The other way round: what is enqueued on ``other`` from now on begins once all that was asked of this
        device by now is done."""
        stream, gpu = self._stream_of(other)
        with self._working("letting a stream wait"):
            self._order.after(taken(self._cupy, stream, gpu), self.stream, self.index)

    def _stream_of(self, other: Any) -> tuple[Any, int]:
        """A stream, or that of a device, and the number of its GPU."""
        if isinstance(other, CupyDevice):
            return other.stream, other.index
        return other, gpu_of(other, self.index)

    def _put(self, pinned: Pinned, raw: npt.NDArray[np.uint8], target: Any) -> None:
        """Copy ``raw`` aside, and from there to the device."""
        staged = pinned.take(raw.size)
        staged[:] = raw
        target.copy_from_host_async(staged.ctypes.data, raw.size, self.stream)

    def _copy(self, target: Any, source: Any, count: int) -> None:
        if count:
            target.copy_from_device_async(source, count, self.stream)

    def _cuda(self) -> RowOperations:
        from warmkv.kernels.cuda.cupy_launch import CupyLauncher
        from warmkv.kernels.resident.cuda import CudaOperations

        try:
            self._cupy.cuda.nvrtc.getVersion()
        except Exception as exc:  # as with cupy itself
            raise DeviceMissing(f"{self.name} needs NVRTC, which cannot be loaded ({exc}): pip install 'warmkv[cuda]'") from exc
        try:
            return CudaOperations(CupyLauncher(self.stream, self.index))
        except KernelError as exc:
            raise DeviceFault(f"{self.name}: {exc}") from exc

    @contextmanager
    def _asked(self, wanted: int, what: str) -> Iterator[None]:
        """Turn what cupy says when memory cannot be had into OutOfMemory."""
        with self._working(what):
            try:
                yield
            except self._cupy.cuda.memory.OutOfMemoryError as exc:
                raise OutOfMemory(f"{self.name}: {wanted} bytes for {what} could not be had: {exc}", wanted) from exc

    @contextmanager
    def _working(self, what: str, *, waits: bool = False) -> Iterator[None]:
        """Turn errors of CUDA into DeviceFault, on this GPU. What ``waits`` for the device, or for memory of the
        host, has no place in a launch that is captured: that is refused before it spoils what was captured."""
        cuda = self._cupy.cuda
        try:
            with cuda.Device(self.index):
                if waits and self.stream.is_capturing():
                    raise RecordError(f"{self.name}: {what} while the stream is captured, which only launches and copies can be")
                yield
        except (cuda.runtime.CUDARuntimeError, cuda.driver.CUDADriverError) as exc:
            raise DeviceFault(f"{self.name}: {what}: {exc}") from exc


def _cupy(index: int) -> Any:
    """cupy, once it has been seen to reach GPU ``index``. Raises DeviceMissing."""
    name = f"cuda:{index}"
    try:
        import cupy
    except Exception as exc:  # a library of CUDA that does not load says so in many ways
        raise DeviceMissing(f"{name} needs cupy, which cannot be loaded ({exc}): pip install 'warmkv[cuda]'") from exc
    try:
        count = cupy.cuda.runtime.getDeviceCount()
    except cupy.cuda.runtime.CUDARuntimeError as exc:
        raise DeviceMissing(f"{name}: no GPU can be reached, is there a driver? ({exc})") from exc
    if not 0 <= index < count:
        raise DeviceMissing(f"{name}: this machine has {count} GPUs, numbered from 0")
    return cupy
