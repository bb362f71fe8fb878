"""Operations by CUDA programs beside those of the host: the same results, and the same refusals."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from attending import Cache, Deaf, assert_close, counted, moved, queries, some, unwritten

from warmkv.kernels.dispatch import kernels
from warmkv.kernels.errors import KernelError
from warmkv.kernels.formats import RowFormat
from warmkv.kernels.resident.cuda import CudaOperations
from warmkv.kernels.resident.host import HostOperations
from warmkv.kernels.resident.plane import Counters, ResidentPlane
from warmkv.kernels.rope.reference import Pairs, Rope

F16, Q8_0, Q5_1 = RowFormat.F16, RowFormat.Q8_0, RowFormat.Q5_1


def test_a_life_of_a_cache_leaves_the_bytes_it_leaves_on_the_host(machine: Any) -> None:
    host, cuda = HostOperations(kernels("reference")), CudaOperations(machine.launcher)
    planes = [unwritten(F16, 2, 32, 12, keys=True), unwritten(Q8_0, 2, 32, 12, keys=False)]
    theirs = [moved(machine, plane) for plane in planes]
    counters = counted(100, 96)
    mirrors = Counters(machine.put(counters.length), machine.put(counters.base))
    for count in (1, 5, 2):
        rows = [some(count * 2, 32, seed=count + side).reshape(count, 2, 32) for side in range(2)]
        for side in range(2):
            host.append(planes[side], rows[side], counters)
            cuda.append(theirs[side], machine.put(rows[side]), mirrors)
        host.advance(counters, count)
        cuda.advance(mirrors, count)
    assert machine.get(mirrors.length).tolist() == counters.length.tolist() == [108]
    rope, kept = Rope(32, 1e4, Pairs.NEOX), np.array([4, 6, 7, 11], np.int32)
    host.shift(planes[0], 5, 9, -7, rope)
    cuda.shift(theirs[0], 5, 9, -7, rope)
    for plane, their in zip(planes, theirs, strict=True):
        host.gather(plane, kept)
        cuda.gather(their, machine.put(kept), machine.put(np.full(4 * plane.row_bytes, 7, np.uint8)))
        np.testing.assert_array_equal(machine.get(their.data), plane.data)
        numbers, found = np.empty((4, 2, 32), np.float32), machine.put(np.full((4, 2, 32), np.nan, np.float32))
        host.decode(plane, 0, 4, numbers)
        cuda.decode(their, 0, 4, found)
        np.testing.assert_array_equal(machine.get(found), numbers)


def test_attention_is_that_of_the_host(machine: Any) -> None:
    cache, host = Cache.of(machine, (F16, Q8_0), (32, 32), 40, base=64), HostOperations(kernels("reference"))
    cuda = CudaOperations(machine.launcher)
    on_host = [replace(plane, data=machine.get(plane.data)) for plane in cache.planes]
    q, sinks, more = queries(3, 4, 32), np.array([0, 2, -1, 1], np.float32), {"window": 20, "softcap": 2.0}
    expected = np.empty((3, 4, 32), np.float32)
    host.attend_chunk(q, *on_host, counted(104, 64), out=expected, scale=0.02, sinks=sinks, **more)  # type: ignore[arg-type]
    assert_close(cache.attended(cuda, q, sinks=sinks, **more), expected.astype(np.float64))  # type: ignore[arg-type]


def planes() -> tuple[ResidentPlane, ResidentPlane]:
    return unwritten(F16, 2, 32, 8, keys=True), unwritten(Q5_1, 2, 64, 8, keys=False)


def test_attention_that_does_not_fit_is_refused_and_nothing_launched() -> None:
    operations, (keys, values), counters = CudaOperations(Deaf()), planes(), counted(4)
    good: dict[str, Any] = dict(
        q=np.zeros((1, 4, 32), np.float32), keys=keys, values=values, counters=counters, out=np.zeros((1, 4, 64), np.float32),
        scratch=np.zeros(operations.scratch_floats(4, 64, 8), np.float32), scale=1.0,
    )  # fmt: skip
    long = counters.length.astype(np.int64)
    for name, bad in (
        ("q", np.zeros((1, 4, 33), np.float32)), ("q", np.zeros((1, 3, 32), np.float32)), ("q", np.zeros((1, 0, 32), np.float32)),
        ("q", np.zeros((4, 32), np.float32)), ("q", np.zeros((1, 4, 32))), ("q", np.zeros((1, 4, 64), np.float32)[..., ::2]),
        ("q", None), ("out", np.zeros((1, 4, 32), np.float32)), ("out", np.zeros((2, 4, 64), np.float32)), ("out", None),
        ("scratch", None), ("scratch", np.zeros(1000)), ("scratch", np.zeros((10, 1000), np.float32)),
        ("sinks", np.zeros(3, np.float32)), ("sinks", np.zeros(4)), ("window", -1), ("softcap", -1.0),
        ("counters", Counters(long, counters.base)), ("counters", Counters(counters.length, np.zeros(2, np.int32))),
        ("keys", values), ("values", keys), ("keys", replace(keys, heads=1)), ("keys", replace(keys, rows=7)),
        ("keys", replace(keys, data=keys.data[:-1])), ("keys", replace(keys, data=keys.data.view(np.int8))),
        ("keys", replace(keys, format=Q8_0)), ("keys", replace(keys, format=RowFormat.TQ_KEY)),
        ("keys", replace(keys, format=RowFormat.TQ_VALUE)), ("keys", replace(keys, field=np.ones((2, 32), np.float32))),
        ("values", unwritten(Q5_1, 2, 64, 9, keys=False)), ("values", replace(values, size=60)),
        ("values", replace(values, rows=-1)),
    ):  # fmt: skip
        given = {**good, name: bad}
        with pytest.raises(KernelError):
            operations.attend_chunk(**given)
        if name in ("q", "out") and bad is not None and bad.ndim == 3 and len(bad) == 1:
            with pytest.raises(KernelError):
                operations.attend(**{**given, "q": given["q"][0], "out": given["out"][0]})


def test_rows_that_do_not_fit_are_refused_and_nothing_launched() -> None:
    operations, (keys, values), counters = CudaOperations(Deaf()), planes(), counted(4)
    rows, bytes_, kept = np.zeros((2, 2, 32), np.float32), np.zeros(3 * keys.row_bytes, np.uint8), np.zeros(3, np.int32)
    cases: list[Any] = [
        lambda: operations.append(keys, rows[:, :1], counters),
        lambda: operations.append(keys, rows.astype(np.float64), counters),
        lambda: operations.append(keys, rows[::2, ::-1], counters),
        lambda: operations.append(values, rows, counters),
        lambda: operations.append(replace(keys, data=keys.data[1:]), rows, counters),
        lambda: operations.append(keys, rows, Counters(counters.length, counters.base[:0])),
        lambda: operations.decode(keys, 7, 9, rows),
        lambda: operations.decode(keys, -1, 1, rows),
        lambda: operations.decode(keys, 0, 1, rows),
        lambda: operations.advance(counters, -1),
        lambda: operations.advance(counters, 1 << 31),
        lambda: operations.advance(Counters(counters.length.astype(np.uint32), counters.base), 1),
        lambda: operations.gather(keys, kept.astype(np.int64), bytes_),
        lambda: operations.gather(keys, kept, bytes_[:-1]),
        lambda: operations.gather(keys, np.zeros(9, np.int32), np.zeros(9 * keys.row_bytes, np.uint8)),
        lambda: operations.gather(keys, kept, bytes_.astype(np.int32)),
    ]
    for case in cases:
        with pytest.raises(KernelError):
            case()


def test_what_a_device_would_trap_on_is_refused_and_nothing_launched() -> None:
    """Views that begin 4 bytes too late, where rows are read 16 bytes at a time."""
    operations, (keys, values), counters = CudaOperations(Deaf()), planes(), counted(4)
    q, out = np.zeros((1, 4, 32), np.float32), np.zeros((1, 4, 64), np.float32)
    scratch = late(operations.scratch_floats(4, 64, 8))
    kept = np.zeros(2, np.int32)
    off = replace(keys, data=late(keys.data.size // 4).view(np.uint8))
    other = replace(values, data=late(values.data.size // 4).view(np.uint8))
    fielded = replace(unwritten(RowFormat.Q8_2F, 2, 32, 8, keys=True), field=late(2, 32))
    cases: list[Any] = [
        lambda: operations.append(keys, late(2, 2, 32), counters),
        lambda: operations.decode(keys, 0, 2, late(2, 2, 32)),
        lambda: operations.attend_chunk(q, keys, values, counters, out=out, scratch=scratch, scale=1.0),
        lambda: operations.merge(late(2, 4, 64), np.zeros((2, 4), np.float32), np.zeros((2, 4), np.float32), out[0]),
        lambda: operations.gather(keys, kept, late(2 * keys.row_bytes).view(np.uint8)),
        lambda: operations.append(off, np.zeros((2, 2, 32), np.float32), counters),
        lambda: operations.decode(off, 0, 2, np.zeros((2, 2, 32), np.float32)),
        lambda: operations.gather(off, kept, np.zeros(2 * keys.row_bytes, np.uint8)),
        lambda: operations.attend_chunk(q, off, values, counters, out=out, scratch=np.zeros_like(scratch), scale=1.0),
        lambda: operations.attend_chunk(q, keys, other, counters, out=out, scratch=np.zeros_like(scratch), scale=1.0),
        lambda: operations.decode(fielded, 0, 2, np.zeros((2, 2, 32), np.float32)),
    ]
    for case in cases:
        with pytest.raises(KernelError, match="no multiple of 16 bytes"):
            case()


def test_rows_of_odd_sizes_may_begin_anywhere(machine: Any) -> None:
    plane, counters = moved(machine, unwritten(F16, 1, 5, 8, keys=True)), counted(0)
    rows = some(4, 5, seed=3).reshape(4, 1, 5)
    mirrors = Counters(machine.put(counters.length), machine.put(counters.base))
    found = machine.put(np.full((3, 1, 5), np.nan, np.float32))
    operations = CudaOperations(machine.launcher)
    operations.append(plane, machine.put(rows)[1:], mirrors)
    operations.decode(plane, 1, 3, found[1:])
    np.testing.assert_array_equal(machine.get(found)[1:], rows[2:].astype(np.float16).astype(np.float32))


def late(*shape: int) -> np.ndarray:
    """float32 zeros that begin 4 bytes behind a multiple of 16."""
    count = int(np.prod(shape))
    room = np.zeros(count + 8, np.float32)
    start = (-room.ctypes.data % 16 + 4) // 4
    return room[start : start + count].reshape(shape)
