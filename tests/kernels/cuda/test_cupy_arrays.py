"""Operations told of cupy's own arrays, laid over memory of the host: what they ask of arrays, cupy's have."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import pytest
from attending import Cache, counted, moved, queries, some, unwritten
from cuda_harness import HostLauncher, aligned
from cuda_machines import Machine

from warmkv.kernels.cuda.launch import Program
from warmkv.kernels.formats import RowFormat
from warmkv.kernels.resident.cuda import CudaOperations
from warmkv.kernels.resident.plane import Counters
from warmkv.kernels.rope.reference import Pairs, Rope

cupy = pytest.importorskip("cupy")
#: What cupy passes by value, as wide as it is.
SCALARS = (np.int32, np.int64, np.uint64, np.float32)


class Launcher:
    """Runs on the host; nothing but arrays of cupy is an array here."""

    def __init__(self) -> None:
        self.inner = HostLauncher()

    def launch(
        self, program: Program, kernel: str, grid: tuple[int, int, int], block: int, arguments: tuple[Any, ...], *,
        shared: int = 0,
    ) -> None:  # fmt: skip
        seen = [_seen(argument) if isinstance(argument, cupy.ndarray) else argument for argument in arguments]
        for argument in arguments:
            assert argument is None or isinstance(argument, cupy.ndarray) or type(argument) in SCALARS
        self.inner.launch(program, kernel, grid, block, tuple(seen), shared=shared)

    def constant(self, values: Any) -> Any:
        return _laid(values)


def _laid(array: Any) -> Any:
    array = aligned(array)
    memory = cupy.cuda.UnownedMemory(array.ctypes.data, array.nbytes, array, 0)
    return cupy.ndarray(array.shape, array.dtype, cupy.cuda.MemoryPointer(memory, 0))


def _seen(array: Any) -> Any:
    assert array.flags.c_contiguous
    raw = (ctypes.c_uint8 * array.nbytes).from_address(array.data.ptr)
    return np.frombuffer(raw, np.uint8).view(array.dtype).reshape(array.shape)


SIDES = (
    (RowFormat.F16, RowFormat.F32), (RowFormat.Q8_0, RowFormat.Q5_1), (RowFormat.BF16, RowFormat.Q4_0),
    (RowFormat.Q8_2F, RowFormat.Q8_2F), (RowFormat.TQ_KEY, RowFormat.TQ_VALUE), (RowFormat.TQ3, RowFormat.FP8),
)  # fmt: skip


@pytest.mark.parametrize("formats", SIDES, ids=lambda formats: f"{formats[0].value}-{formats[1].value}")
def test_every_operation_takes_arrays_of_cupy(formats: tuple[RowFormat, RowFormat]) -> None:
    host = _life(Machine("host", HostLauncher(), aligned, np.array), formats)
    theirs = _life(Machine("host", Launcher(), _laid, lambda array: _seen(array).copy()), formats)
    assert len(host) == len(theirs) == 8
    for mine, other in zip(host, theirs, strict=True):
        np.testing.assert_array_equal(mine, other)


def _life(machine: Machine, formats: tuple[RowFormat, RowFormat]) -> list[Any]:
    """All that can be seen of a cache while every operation is asked for."""
    operations, put, found = CudaOperations(machine.launcher), machine.put, []
    counters = Counters(*(put(counter) for counter in (counted(0).length, counted(0).base)))
    for side, format_ in enumerate(formats):
        plane = moved(machine, unwritten(format_, 2, 32, 12, keys=side == 0))
        operations.append(plane, put(some(12, 32, seed=side).reshape(6, 2, 32))[1:5], counters)
        out = put(np.full((6, 2, 32), np.nan, np.float32))
        operations.decode(plane, 0, 4, out[2:])
        if format_ in (RowFormat.F16, RowFormat.BF16):
            operations.shift(plane, 1, 3, 5, Rope(32, 1e4, Pairs.NEOX))
        operations.gather(plane, put(np.array([1, 3], np.int32)), put(np.zeros(3 * plane.row_bytes, np.uint8)))
        found += [machine.get(out)[2:], machine.get(plane.data)]
    operations.advance(counters, 4)
    cache = Cache.of(machine, formats, (32, 32), 40)
    for count in (1, 3):
        found.append(cache.attended(operations, queries(count, 4, 32), sinks=np.array([0, 2, -1, 1], np.float32), window=30))
    parts, out = put(some(24, 32, seed=5).reshape(3, 8, 32)), put(np.full((8, 32), np.nan, np.float32))
    operations.merge(parts, put(some(3, 8, seed=6)), put(np.abs(some(3, 8, seed=7))), out)
    return [*found, machine.get(counters.length), machine.get(out)]
