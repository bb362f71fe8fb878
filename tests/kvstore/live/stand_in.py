"""A stand-in for cupy whose stream is lazier than any GPU's: nothing happens until somebody waits.

What is enqueued runs late, so that memory reused too early is noticed; copies within device memory must not
overlap; array functions that would have to be compiled are not there. There may be several GPUs, of which
one is current; streams, events and memory are of that one. `Lazily` runs operations of numpy on its arrays,
in their turn.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np

from warmkv.kernels.resident.plane import Counters, ResidentPlane


class Stream:
    """Work in order; ``done`` pieces of it have run."""

    def __init__(self, non_blocking: bool = False) -> None:
        assert non_blocking, "the stream must not wait for the legacy one"
        self.ptr, self.device_id = 7 + len(BY_POINTER), CURRENT[-1]
        BY_POINTER[self.ptr] = self
        self.work: list[Callable[[], None] | None] = []
        self.done = 0
        self.capturing = False

    def is_capturing(self) -> bool:
        return self.capturing

    def enqueue(self, piece: Callable[[], None]) -> None:
        self.work.append(piece)

    def run(self, upto: int) -> None:
        while self.done < upto:
            piece, self.work[self.done] = self.work[self.done], None
            self.done += 1
            assert piece is not None
            piece()

    def synchronize(self) -> None:
        assert not self.capturing, "waiting spoils what is captured"
        self.run(len(self.work))

    def wait_event(self, event: Event) -> None:
        # Of what was recorded by now, however often it is recorded again.
        if event.at is not None:
            stream, upto = event.at
            self.enqueue(lambda: stream.run(upto))

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self.ptr

    def __enter__(self) -> Stream:
        assert self.device_id == CURRENT[-1], "cupy refuses a stream of another GPU than the current one"
        return self

    def __exit__(self, *error: object) -> None:
        pass


class Foreign:
    """A stream of another library on GPU ``device_index``."""

    def __init__(self, device_index: int = 0) -> None:
        self.device_index, self.stream = device_index, Stream(non_blocking=True)

    def __cuda_stream__(self) -> tuple[int, int]:
        return self.stream.__cuda_stream__()


class Event:
    def __init__(self, disable_timing: bool = False) -> None:
        self.at: tuple[Stream, int] | None = None
        self.device_id = CURRENT[-1]

    def record(self, stream: Stream) -> None:
        assert stream.device_id == self.device_id, "an event is recorded on streams of its own GPU"
        self.at = stream, len(stream.work)

    def synchronize(self) -> None:
        if self.at is not None:
            self.at[0].run(self.at[1])


class Pointer:
    """Into ``memory``, a numpy array that stands for memory of a GPU."""

    def __init__(self, memory: np.ndarray, offset: int = 0, device_id: int = 0) -> None:
        self.memory, self.offset, self.device_id = memory, offset, device_id

    @property
    def ptr(self) -> int:
        return self.memory.ctypes.data + self.offset

    def __add__(self, more: int) -> Pointer:
        return Pointer(self.memory, self.offset + more, self.device_id)

    def copy_from_host_async(self, source: int, size: int, stream: Stream) -> None:
        self._inside(size)
        assert not stream.capturing, "cupy refuses memory of the host while a stream is captured"
        stream.enqueue(lambda: _move(self.ptr, source, size))

    def copy_from_device_async(self, source: Pointer, size: int, stream: Stream) -> None:
        self._inside(size)
        source._inside(size)
        assert abs(self.ptr - source.ptr) >= size, "a device may copy overlapping bytes in any order"
        stream.enqueue(lambda: _move(self.ptr, source.ptr, size))

    def memset_async(self, value: int, size: int, stream: Stream) -> None:
        self._inside(size)
        memory, offset = self.memory, self.offset
        stream.enqueue(lambda: memory[offset : offset + size].fill(value))

    def _inside(self, size: int) -> None:
        assert 0 <= self.offset <= self.offset + size <= self.memory.size, "beyond the memory that was asked for"


class Array:
    """What is used of cupy.ndarray."""

    def __init__(self, shape: tuple[int, ...], dtype: Any, data: Pointer) -> None:
        self.dtype, self.shape, self.data = np.dtype(dtype), tuple(map(int, shape)), data
        self.ndim, self.itemsize = len(self.shape), self.dtype.itemsize
        self.size = int(np.prod(self.shape))
        self.nbytes = self.size * self.itemsize
        self.flags = SimpleNamespace(c_contiguous=True)
        self.device = SimpleNamespace(id=data.device_id)

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, rows: slice) -> Array:
        first, last, step = rows.indices(self.shape[0])
        assert step == 1
        apart = self.nbytes // self.shape[0] if self.shape[0] else 0
        return Array((max(0, last - first), *self.shape[1:]), self.dtype, self.data + first * apart)

    def reshape(self, *shape: Any) -> Array:
        shape = shape[0] if isinstance(shape[0], tuple) else shape
        return Array(np.empty(self.shape, np.bool_).reshape(shape).shape, self.dtype, self.data)

    def get(self, stream: Stream, out: np.ndarray) -> np.ndarray:
        assert out.flags.c_contiguous and (out.shape, out.dtype) == (self.shape, self.dtype)
        stream.synchronize()
        out[...] = self.seen()
        return out

    def seen(self) -> np.ndarray:
        """Its memory as numpy sees it; for what runs in its turn on the stream."""
        raw = self.data.memory[self.data.offset : self.data.offset + self.nbytes]
        return raw.view(self.dtype).reshape(self.shape)


class Pool:
    """Memory that starts as NaN. ``left`` bytes can be had at once."""

    left = 1 << 40

    def malloc(self, size: int) -> Pointer:
        if size > Pool.left:
            raise Exhausted(f"out of memory allocating {size} bytes")
        return Pointer(np.full(size, 0xFF, np.uint8), 0, CURRENT[-1])


class Exhausted(MemoryError):
    pass


class RuntimeFault(RuntimeError):
    pass


class DriverFault(RuntimeError):
    pass


#: GPUs that were made current one within the other.
CURRENT = [0]


class Device:
    def __init__(self, index: int) -> None:
        assert index >= 0
        self.id = index

    def __enter__(self) -> None:
        CURRENT.append(self.id)

    def __exit__(self, *error: object) -> None:
        CURRENT.pop()


def _copy_rows(to: int, to_pitch: int, source: int, pitch: int, width: int, count: int, kind: int, stream: int) -> None:
    assert kind == 3
    # Late, too: whoever waits is whoever asked.
    for row in range(count):
        BY_POINTER[stream].enqueue(lambda row=row: _move(to + row * to_pitch, source + row * pitch, width))


STREAMS: list[Stream] = []
BY_POINTER: dict[int, Stream] = {}


class _Streams:
    """Makes those of devices."""

    def __call__(self, non_blocking: bool = False) -> Stream:
        STREAMS.append(Stream(non_blocking))
        return STREAMS[-1]

    def from_external(self, stream: Any) -> Stream:
        version, pointer = stream.__cuda_stream__()
        assert version == 0
        return BY_POINTER[pointer]


def _move(to: int, source: int, size: int) -> None:
    ctypes.memmove(to, source, size)


def cupy(gpus: int = 1) -> Any:
    """What is imported in place of cupy."""
    runtime = SimpleNamespace(
        CUDARuntimeError=RuntimeFault, getDeviceCount=lambda: gpus, memcpy2DAsync=_copy_rows, memcpyDeviceToDevice=3
    )
    cuda = SimpleNamespace(
        runtime=runtime, driver=SimpleNamespace(CUDADriverError=DriverFault), Device=Device, Stream=_Streams(), Event=Event,
        MemoryPool=Pool, memory=SimpleNamespace(OutOfMemoryError=Exhausted), alloc_pinned_memory=lambda size: bytearray(size),
    )  # fmt: skip
    return SimpleNamespace(cuda=cuda, ndarray=Array)


class Lazily:
    """Operations of numpy arrays on those of the stand-in, each in its turn on the newest stream."""

    name = "lazily"

    def __init__(self, operations: Any) -> None:
        self._operations, self._stream = operations, STREAMS[-1] if STREAMS else None

    def scratch_floats(self, heads: int, value_size: int, rows: int) -> int:
        return 3 * heads * value_size

    def __getattr__(self, name: str) -> Callable[..., None]:
        found = getattr(self._operations, name)

        def enqueue(*arguments: Any, **named: Any) -> None:
            seen = [_seen(argument) for argument in arguments]
            seen_named = {key: _seen(argument) for key, argument in named.items()}
            STREAMS[-1].enqueue(lambda: found(*seen, **seen_named))

        return enqueue


def _seen(argument: Any) -> Any:
    if isinstance(argument, Array):
        return argument.seen()
    if isinstance(argument, Counters):
        return Counters(argument.length.seen(), argument.base.seen())
    if isinstance(argument, ResidentPlane):
        field = None if argument.field is None else argument.field.seen()
        return replace(argument, data=argument.data.seen(), field=field)
    assert not isinstance(argument, np.ndarray), "a host array among those of a device"
    return argument
