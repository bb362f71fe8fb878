"""Decode attention by CUDA programs against one softmax in float64 over what the rows mean."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from attending import TOLERANCE, Cache, assert_close, queries
from cuda_harness import ORDERS, HostLauncher, barriers, survivors

from warmkv.kernels.attention.cuda import SPLIT_ROWS, program
from warmkv.kernels.attention.tiling import LANES, OCTET, ROWS
from warmkv.kernels.errors import KernelError
from warmkv.kernels.formats import RowFormat
from warmkv.kernels.resident.cuda import CudaOperations
from warmkv.kernels.resident.plane import Counters

F32, F16, BF16, FP8 = RowFormat.F32, RowFormat.F16, RowFormat.BF16, RowFormat.FP8
Q8_2F, Q8_0, Q5_1, Q4_0 = RowFormat.Q8_2F, RowFormat.Q8_0, RowFormat.Q5_1, RowFormat.Q4_0
#: Each format on both sides, each pair at sizes of its own.
PAIRS = [
    (F32, F16, 40, 64), (F16, BF16, 112, 80), (BF16, FP8, 64, 40), (FP8, Q8_2F, 80, 112), (Q8_2F, Q8_0, 96, 64),
    (Q8_0, Q5_1, 64, 96), (Q5_1, Q4_0, 96, 32), (Q4_0, F32, 128, 128), (Q8_2F, Q8_2F, 33, 17), (F16, FP8, 35, 3),
]  # fmt: skip


def tile_of(keys: RowFormat, key_size: int, values: RowFormat, value_size: int, group: int) -> int:
    """Rows of one step of a block."""
    _, shape = program(keys, key_size, values, value_size, group)
    return LANES // shape.across * ROWS * shape.row_warps


@pytest.mark.parametrize(("keys", "values", "key_size", "value_size"), PAIRS)
def test_any_format_of_keys_beside_any_of_values(
    machine: Any, keys: RowFormat, values: RowFormat, key_size: int, value_size: int
) -> None:
    cache, operations = Cache.of(machine, (keys, values), (key_size, value_size), 141), CudaOperations(machine.launcher)
    q = queries(1, 4, key_size)
    assert_close(cache.attended(operations, q), cache.expected(q))
    more: dict[str, Any] = dict(window=67, softcap=3.0, sinks=np.array([-1, 0, 2, 9], np.float32))
    assert_close(cache.attended(operations, q, **more), cache.expected(q, **more))


@pytest.mark.parametrize("sizes", [(32, 32), (192, 128), (256, 256), (576, 512)])
def test_heads_of_any_size(machine: Any, sizes: tuple[int, int]) -> None:
    cache, operations = Cache.of(machine, (F16, F16), sizes, 45, heads=1), CudaOperations(machine.launcher)
    q = queries(1, 3, sizes[0])
    assert_close(cache.attended(operations, q, scale=0.01), cache.expected(q, scale=0.01))


@pytest.mark.parametrize(("group", "kv_heads"), [(1, 3), (5, 2), (7, 3), (45, 1)])
def test_any_group_of_query_heads(machine: Any, group: int, kv_heads: int) -> None:
    cache, operations = Cache.of(machine, (F32, F16), (24, 40), 70, heads=kv_heads), CudaOperations(machine.launcher, 6)
    q, sinks = queries(2, group * kv_heads, 24), np.linspace(-3, 3, group * kv_heads).astype(np.float32)
    assert_close(cache.attended(operations, q, sinks=sinks), cache.expected(q, sinks=sinks))


@pytest.mark.parametrize("base", [0, 4096])
def test_lengths_around_the_edges_of_tiles_and_splits(machine: Any, base: int) -> None:
    tile = tile_of(Q8_0, 64, Q5_1, 64, 2)
    cache = Cache.of(machine, (Q8_0, Q5_1), (64, 64), 4 * tile + 1, capacity=4 * tile + 3, base=base)
    q, sinks = queries(1, 4, 64), np.array([0, 1, -9, 4], np.float32)
    edges = {0, 1, 2, ROWS, LANES, SPLIT_ROWS, *(tile * k for k in range(1, 5))}
    for blocks in (1, 6, 999):
        operations = CudaOperations(machine.launcher, blocks)
        for length in sorted({edge + by for edge in edges for by in (-1, 0, 1) if 0 <= edge + by <= 4 * tile + 1}):
            more = {} if length % 2 else {"sinks": sinks}
            assert_close(cache.attended(operations, q, length=length, **more), cache.expected(q, length=length, **more))


@pytest.mark.parametrize("base", [0, 96])
def test_windows_around_the_edges(machine: Any, base: int) -> None:
    tile = tile_of(F16, 32, F16, 32, 2)
    cache = Cache.of(machine, (F16, F16), (32, 32), 3 * tile, capacity=3 * tile + 40, base=base)
    operations, q, length = CudaOperations(machine.launcher, 4), queries(3, 4, 32), 2 * tile + 5
    for edge in (1, 2, ROWS, tile, length, base + length):
        for window in {max(1, edge - 1), edge, edge + 1}:
            found = cache.attended(operations, q, length=length, window=window)
            assert_close(found, cache.expected(q, length=length, window=window))


def test_each_query_of_a_chunk_sees_itself_and_what_came_before_it(machine: Any) -> None:
    cache, operations = Cache.of(machine, (F16, F16), (32, 32), 37, capacity=64), CudaOperations(machine.launcher)
    for tokens in (1, 2, 5, 36, 37):
        q = queries(tokens, 4, 32)
        for window in (0, 1, 6):
            assert_close(cache.attended(operations, q, window=window), cache.expected(q, window=window))
    assert cache.attended(operations, queries(0, 4, 32)).shape == (0, 4, 32)


def test_one_query_is_a_chunk_of_one(machine: Any) -> None:
    cache, operations, q = Cache.of(machine, (F16, F16), (32, 32), 90), CudaOperations(machine.launcher), queries(1, 4, 32)
    out, (keys, values) = machine.put(np.full((4, 32), np.nan, np.float32)), cache.planes
    counters = Counters(machine.put(np.array([90], np.int32)), machine.put(np.array([0], np.int32)))
    scratch = machine.put(np.full(operations.scratch_floats(4, 32, 90), np.nan, np.float32))
    operations.attend(machine.put(q[0]), keys, values, counters, out=out, scratch=scratch, scale=0.02)
    np.testing.assert_array_equal(machine.get(out), cache.attended(operations, q)[0])


def test_however_rows_are_split_and_however_small_the_scratch(machine: Any) -> None:
    cache, q = Cache.of(machine, (F16, F16), (32, 32), 300, heads=1), queries(2, 2, 32)
    expected = cache.expected(q)
    for blocks in (1, 2, 3, 7, 100000):
        assert_close(cache.attended(CudaOperations(machine.launcher, blocks), q), expected)
    part = 2 * 2 * (32 + 2)
    for scratch in (0, 1, 2 * part - 1, 2 * part, 3 * part + 5):
        assert_close(cache.attended(CudaOperations(machine.launcher), q, scratch=scratch), expected)


def test_turned_queries_are_taken_as_many_at_a_time_as_the_scratch_has_room_for(machine: Any) -> None:
    cache = Cache.of(machine, (RowFormat.TQ_KEY, RowFormat.TQ_VALUE), (32, 32), 41)
    operations, q, one = CudaOperations(machine.launcher), queries(5, 4, 32), 4 * 2 * 32
    for scratch in (one, 2 * one + 7, 4 * one, None):
        found = cache.attended(operations, q, scratch=scratch, scale=0.2, window=17)
        assert_close(found, cache.expected(q, scale=0.2, window=17))
    with pytest.raises(KernelError):
        cache.attended(operations, q, scratch=one - 1)


def test_scratch_suffices_for_every_split_that_is_worth_a_block() -> None:
    operations = CudaOperations(HostLauncher())
    for rows in (0, 1, SPLIT_ROWS, SPLIT_ROWS + 1, 10**6):
        splits = max(1, min(128, -(-rows // SPLIT_ROWS)))
        assert operations.scratch_floats(6, 40, rows) >= 6 * splits * 42


def test_rows_that_are_not_seen_may_be_anything(machine: Any) -> None:
    rng = np.random.default_rng(0)
    keys, values = (rng.standard_normal((80, 1, size)).astype(np.float32) for size in (8, 16))
    for bad in (np.nan, np.inf):
        for side in (keys, values):
            side[:20], side[70:] = bad, bad
    cache = Cache.of(machine, (F32, F32), (8, 16), 80, heads=1, keys=keys, values=values, capacity=90)
    operations, q = CudaOperations(machine.launcher), queries(2, 2, 8)
    found = cache.attended(operations, q, length=70, window=49)
    assert np.isfinite(found).all()
    assert_close(found, cache.expected(q, length=70, window=49))


def test_an_infinite_value_is_infinite_and_seen_once(machine: Any) -> None:
    values = np.random.default_rng(3).standard_normal((71, 1, 16)).astype(np.float32)
    values[-1, 0, 5] = np.inf
    cache, q = Cache.of(machine, (F32, F32), (8, 16), 71, heads=1, values=values), queries(1, 2, 8)
    found = cache.attended(CudaOperations(machine.launcher, 1), q)
    assert (found[..., 5] == np.inf).all()
    assert_close(np.delete(found, 5, axis=-1), np.delete(cache.expected(q), 5, axis=-1))


def test_rows_that_a_plane_has_no_room_for_are_not_there(machine: Any) -> None:
    cache, q = Cache.of(machine, (F16, F16), (32, 32), 70, base=96), queries(1, 4, 32)
    for blocks in (1, 99):
        operations = CudaOperations(machine.launcher, blocks)
        assert_close(cache.attended(operations, q, length=75), cache.expected(q, length=70))
        assert (cache.attended(operations, q, length=-1) == 0).all()
        assert (cache.attended(operations, q, length=200, window=20) == 0).all()


@pytest.mark.parametrize("offset", [-1e4, 1e4])
def test_logits_far_from_zero_neither_overflow_nor_vanish(machine: Any, offset: float) -> None:
    rng = np.random.default_rng(1)
    keys = rng.standard_normal((100, 1, 8)).astype(np.float32)
    keys[..., 0] = offset
    cache = Cache.of(machine, (F32, F32), (8, 16), 100, heads=1, keys=keys)
    q = queries(1, 2, 8)
    q[..., 0] = 1
    found, expected = cache.attended(CudaOperations(machine.launcher), q, scale=1.0), cache.expected(q, scale=1.0)
    assert np.isfinite(found).all()
    # A logit of 1e4 is known to its float32's last bit, half of 2^-10, before and after rows are multiplied.
    assert_close(found, expected, 4e-3)
    for sinks in (np.full(2, -1e4, np.float32), np.full(2, 1e4, np.float32), np.full(2, -np.inf, np.float32)):
        assert np.isfinite(cache.attended(CudaOperations(machine.launcher), q, scale=1.0, sinks=sinks)).all()


def test_logits_of_minus_infinity_have_no_weight(machine: Any) -> None:
    size, operations = 40, CudaOperations(machine.launcher)
    assert size // OCTET % program(F32, size, F32, 16, 2)[1].across, "some lanes of a row have no channels"
    keys = np.random.default_rng(2).standard_normal((70, 1, size)).astype(np.float32)
    keys[::2, :, -1] = -np.inf
    cache, q = Cache.of(machine, (F32, F32), (size, 16), 70, heads=1, keys=keys), np.abs(queries(1, 2, size))
    found = cache.attended(operations, q)
    cache.keys, cache.values = cache.keys[1::2], cache.values[1::2]
    assert_close(found, cache.expected(q))
    keys[:, :, -1] = -np.inf
    nothing = Cache.of(machine, (F32, F32), (size, 16), 70, heads=1, keys=keys)
    for sinks in (None, np.zeros(2, np.float32)):
        assert (nothing.attended(operations, q, sinks=sinks) == 0).all()


def test_a_sink_takes_its_share_and_nothing_seen_is_nothing(machine: Any) -> None:
    cache, q = Cache.of(machine, (F16, F16), (32, 32), 200), queries(1, 4, 32)
    for sinks in (np.full(4, 40, np.float32), np.array([0, 30, -30, 5], np.float32)):
        for blocks in (1, 99):
            operations = CudaOperations(machine.launcher, blocks)
            found, expected = cache.attended(operations, q, sinks=sinks), cache.expected(q, sinks=sinks)
            assert np.abs(found - expected).max() <= TOLERANCE * np.abs(cache.expected(q)).max()
            assert (cache.attended(operations, q, length=0, sinks=sinks) == 0).all()


def test_every_order_of_threads_gives_the_same_bits(machine: Any) -> None:
    if machine.name != "host":
        pytest.skip("a device has an order of its own")
    cache, q = Cache.of(machine, (Q8_0, Q5_1), (64, 64), 150), queries(2, 4, 64)
    found = [cache.attended(CudaOperations(HostLauncher(order, seed=seed)), q) for seed, order in enumerate(ORDERS)]
    for other in found[1:]:
        np.testing.assert_array_equal(found[0], other)


def test_no_barrier_can_be_left_out(machine: Any) -> None:
    if machine.name != "host":
        pytest.skip("races show on the host only")
    cache, q = Cache.of(machine, (F16, F16), (32, 32), 90), queries(1, 4, 32)
    expected = cache.expected(q)

    def exercise(launcher: HostLauncher) -> None:
        assert_close(cache.attended(CudaOperations(launcher), q), expected)

    assert len(barriers("attention/decode.cu")) == 2
    assert survivors("attention/decode.cu", exercise) == []
