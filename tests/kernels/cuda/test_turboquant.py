"""Rotated rows written and read by CUDA programs: the reference's bytes and numbers, and an oracle in float64."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from cuda_harness import ORDERS, HostLauncher, barriers, survivors
from turned_rows import LEVELS, UNWRITTEN, Oracle, bits, counters_of, nothing, plane_of, rows_of, some, turn_of

from warmkv.kernels.errors import KernelError
from warmkv.kernels.formats import Block, RowFormat
from warmkv.kernels.resident.plane import TAIL_PAD
from warmkv.kernels.turboquant import block, reference
from warmkv.kernels.turboquant.cuda import MAX_SIZE, Turning
from warmkv.kernels.turboquant.reference import Estimator

KEY, VALUE, TQ3 = RowFormat.TQ_KEY, RowFormat.TQ_VALUE, RowFormat.TQ3
#: Powers of two, sizes with an odd factor and runs above and below a warp, less than a warp, several slots.
CASES = [
    (KEY, 8), (KEY, 40), (KEY, 64), (KEY, 96), (KEY, 192), (KEY, 256), (VALUE, 32), (VALUE, 72), (VALUE, 128),
    (TQ3, 64), (TQ3, 80),
]  # fmt: skip
#: Keys and values of the row k_i = (i + 1) / 100 with seed 42 in layer 0, published as blobs.
GOLDEN = {
    (KEY, 64): "6a6dd229e20558d485916f9d19aba53bad01b52170b6bda8fb415b35",
    (VALUE, 64): "6a6dd229e20558d485916f9d19aba53bfb41",
    (KEY, 128): "3534d325c59ae2e594e6298522890b799e9e68a976141c895a419badcdb7f017e22739e3b0ccc12bd2f317f31e23f0a634483235",
    (VALUE, 128): "3534d325c59ae2e594e6298522890b799e9e68a976141c895a419badcdb7f0173448",
}


@pytest.fixture(params=ORDERS)
def ordered(machine: Any, request: pytest.FixtureRequest) -> Any:
    """The host in every order; a device has one of its own."""
    if machine.name == "host":
        return replace(machine, launcher=HostLauncher(request.param, seed=7))
    if request.param != ORDERS[0]:
        pytest.skip("a device runs threads as it likes")
    return machine


@pytest.mark.parametrize(("format_", "size"), CASES)
def test_appended_bytes_are_the_reference_s_and_nothing_else_is_touched(ordered: Any, format_: RowFormat, size: int) -> None:
    machine, turn = ordered, turn_of(size, seed=size, layer=3)
    x = some(11, 3, size, seed=size)
    x[0, 1], x[1, 2] = 0, x[1, 2] * np.float32(1e-14)
    x[2, 0] *= np.float32(1e-6)
    x[3] *= np.float32(60000) / np.linalg.norm(x[3], axis=-1, keepdims=True)
    # Coordinates that are exactly 0, which is a bound.
    x[4, :, 1], x[4, :, 2:] = x[4, :, 0], 0
    plane, turning = plane_of(machine, format_, 17, 3, turn), Turning(machine.launcher)
    turning.append(plane, machine.put(x), counters_of(machine, 107, 104))
    rows = rows_of(machine, plane)
    np.testing.assert_array_equal(rows[3:14], block.encode(reference, x, format_, turn))
    assert not rows[3, 1].any() and not rows[4, 2].any()
    assert (rows[:3] == UNWRITTEN).all() and (rows[14:] == UNWRITTEN).all()
    assert (machine.get(plane.data)[-TAIL_PAD:] == UNWRITTEN).all()
    assert machine.get(turning.refused)[0] == 0


@pytest.mark.parametrize(("format_", "size"), CASES)
@pytest.mark.parametrize("estimator", Estimator)
def test_decoded_rows_are_the_reference_s_numbers(machine: Any, format_: RowFormat, size: int, estimator: Estimator) -> None:
    turn = turn_of(size, layer=1, estimator=estimator)
    x = some(9, 2, size, seed=1)
    x[4, 1] = 0
    plane, turning = plane_of(machine, format_, 9, 2, turn), Turning(machine.launcher)
    turning.append(plane, machine.put(x), counters_of(machine, 0))
    expected = np.stack([block.decode(Block(format_, rows_of(machine, plane)[:, head], turn=turn)) for head in range(2)], axis=1)
    for first, last in ((0, 9), (3, 8), (8, 9), (2, 2)):
        out = nothing(machine, last - first, 2, size)
        turning.decode(plane, first, last, out)
        np.testing.assert_array_equal(machine.get(out), expected[first:last])


@pytest.mark.parametrize("size", LEVELS)
@pytest.mark.parametrize(("seed", "layer"), [(0, 0), (42, 5), (2**64 - 1, 79)])
def test_codes_signs_and_lengths_are_those_of_dense_products_in_float64(machine: Any, size: int, seed: int, layer: int) -> None:
    turn = turn_of(size, seed=seed, layer=layer)
    x = some(20, 2, size, seed=layer)
    plane = plane_of(machine, KEY, 20, 2, turn)
    Turning(machine.launcher).append(plane, machine.put(x), counters_of(machine, 0))
    rows, oracle = rows_of(machine, plane), Oracle.of(x, turn.rotation)
    codes = bits(rows[..., : size // 4], 2)
    assert oracle.sure.mean() > 0.99
    np.testing.assert_array_equal(codes[oracle.sure], oracle.codes[oracle.sure])
    clear = (codes == oracle.codes).all(axis=-1)[..., None] & (np.abs(oracle.flat) > 1e-5)
    assert clear.mean() > 0.9
    np.testing.assert_array_equal(bits(rows[..., size // 4 : size * 3 // 8], 1)[clear], (oracle.flat >= 0)[clear])
    lengths = np.ascontiguousarray(rows[..., size * 3 // 8 :]).view("<f2")
    np.testing.assert_allclose(lengths[..., 0], oracle.norms, rtol=2**-11 + 1e-6)
    np.testing.assert_allclose(lengths[..., 1], oracle.rho, rtol=2**-11 + 1e-4)


@pytest.mark.parametrize(("format_", "size"), GOLDEN)
def test_rows_are_the_published_bytes(machine: Any, format_: RowFormat, size: int) -> None:
    row = (np.arange(1, size + 1, dtype=np.float32) * np.float32(0.01)).reshape(1, 1, size)
    plane = plane_of(machine, format_, 1, 1, turn_of(size))
    Turning(machine.launcher).append(plane, machine.put(row), counters_of(machine, 0))
    assert rows_of(machine, plane).tobytes().hex() == GOLDEN[format_, size]


@pytest.mark.parametrize("format_", [KEY, VALUE, TQ3])
@pytest.mark.parametrize("value", [np.nan, np.inf, 1e30, 65520.0])
def test_a_row_without_a_length_becomes_zeros_and_is_counted(machine: Any, format_: RowFormat, value: float) -> None:
    turn = turn_of(64)
    x = some(5, 2, 64)
    x[3, 1], x[3, 1, 7], x[4, 0] = 0, value, x[4, 0] * np.float32(1e9)
    plane, turning = plane_of(machine, format_, 5, 2, turn), Turning(machine.launcher)
    turning.append(plane, machine.put(x), counters_of(machine, 0))
    assert machine.get(turning.refused)[0] == 2
    x[3, 1] = x[4, 0] = 0
    np.testing.assert_array_equal(rows_of(machine, plane), block.encode(reference, x, format_, turn))


def test_the_longest_row_that_float16_holds_is_kept(machine: Any) -> None:
    x = np.zeros((1, 1, 64), np.float32)
    x[0, 0, 5] = np.nextafter(np.float32(65520), np.float32(0))
    plane, turning = plane_of(machine, VALUE, 1, 1, turn_of(64)), Turning(machine.launcher)
    turning.append(plane, machine.put(x), counters_of(machine, 0))
    assert machine.get(turning.refused)[0] == 0 and rows_of(machine, plane)[0, 0, -2:].view("<f2")[0] == 65504


@pytest.mark.parametrize("length", [6, 7, 8, 20, -1, -3])
def test_rows_beyond_a_plane_are_left_out(machine: Any, length: int) -> None:
    turn = turn_of(64)
    x = some(3, 2, 64)
    plane = plane_of(machine, VALUE, 8, 2, turn)
    Turning(machine.launcher).append(plane, machine.put(x), counters_of(machine, length))
    expected = np.full((8, 2, 18), UNWRITTEN, np.uint8)
    fitting = [index for index in range(3) if 0 <= length + index < 8]
    expected[[length + index for index in fitting]] = block.encode(reference, x, VALUE, turn)[fitting]
    np.testing.assert_array_equal(rows_of(machine, plane), expected)


@pytest.mark.parametrize(("format_", "size"), [(KEY, 96), (VALUE, 72)])
@pytest.mark.parametrize("blocks", [1, 2])
def test_few_blocks_do_what_many_do(machine: Any, format_: RowFormat, size: int, blocks: int) -> None:
    turn, x = turn_of(size), some(7, 3, size)
    planes, decoded, turned = [], [], []
    for turning in (Turning(machine.launcher), Turning(machine.launcher, blocks)):
        plane, out, sums = plane_of(machine, format_, 7, 3, turn), nothing(machine, 7, 3, size), machine.put(x)
        turning.append(plane, machine.put(x), counters_of(machine, 0))
        turning.decode(plane, 0, 7, out)
        queries = nothing(machine, 21 * 2 * size)
        turning.queries(sums, KEY, turn, queries)
        turning.values(sums, turn)
        planes.append(rows_of(machine, plane))
        decoded.append(machine.get(out))
        turned.append(np.concatenate([machine.get(queries), machine.get(sums).ravel()]))
    for many, few in (planes, decoded, turned):
        assert np.isfinite(many).all()
        np.testing.assert_array_equal(few, many)


def test_a_rotation_is_uploaded_once_and_stays_where_it_is(machine: Any) -> None:
    turning = Turning(machine.launcher)
    tables = [turning.table(turn_of(64, layer=layer).rotation) for layer in (0, 1, 0, 1)]
    assert tables[0] is tables[2] and tables[1] is tables[3]
    assert not np.array_equal(machine.get(tables[0]), machine.get(tables[1]))


def test_no_barrier_can_be_left_out(machine: Any) -> None:
    if machine.name != "host":
        pytest.skip("a device does not say what its threads ran into")
    x, turn = some(5, 1, 96), turn_of(96)
    expected = block.encode(reference, x, KEY, turn)

    def exercise(launcher: HostLauncher) -> None:
        edited = replace(machine, launcher=launcher)
        plane = plane_of(edited, KEY, 5, 1, turn)
        Turning(launcher).append(plane, machine.put(x), counters_of(edited, 0))
        np.testing.assert_array_equal(rows_of(edited, plane), expected)

    exercise(HostLauncher())
    assert barriers("turboquant/rotate.cu") and survivors("turboquant/rotate.cu", exercise) == []


def test_misfits_are_refused_before_anything_is_launched(machine: Any) -> None:
    turn = turn_of(64)
    turning, counters = Turning(machine.launcher), counters_of(machine, 0)
    plane = plane_of(machine, KEY, 4, 2, turn)
    with pytest.raises(KernelError, match=r"rows: float32 \(1, 3, 64\), expected float32 \(n, 2, 64\)"):
        turning.append(plane, some(1, 3, 64), counters)
    with pytest.raises(KernelError, match="float64"):
        turning.append(plane, some(1, 2, 64).astype(np.float64), counters)
    with pytest.raises(KernelError, match=r"rows \[2, 5\) of a plane of 4"):
        turning.decode(plane, 2, 5, np.empty((3, 2, 64), np.float32))
    with pytest.raises(KernelError, match="out: float32"):
        turning.decode(plane, 2, 4, np.empty((1, 2, 64), np.float32))
    with pytest.raises(KernelError, match="rotated as"):
        turning.append(plane_of(machine, RowFormat.F32, 4, 2, turn), some(1, 2, 64), counters)
    wide = MAX_SIZE + 8
    for refused in (
        lambda: turning.append(plane_of(machine, KEY, 1, 1, turn_of(wide)), some(1, 1, wide), counters),
        lambda: turning.queries(some(1, 1, wide), KEY, turn_of(wide), np.empty(2 * wide, np.float32)),
        lambda: turning.values(some(1, 1, wide), turn_of(wide)),
    ):
        with pytest.raises(KernelError, match=f"expected at most {MAX_SIZE}"):
            refused()
    with pytest.raises(KernelError, match=r"float32 \(255,\) for 2 queries of 128 numbers"):
        turning.queries(some(1, 2, 64), KEY, turn, np.empty(255, np.float32))
    with pytest.raises(KernelError, match=r"expected contiguous float32 \(..., 64\)"):
        turning.values(some(1, 2, 32), turn)
    turning.append(plane, some(0, 2, 64), counters)
    if machine.name == "host":
        assert machine.launcher.launches == 0
    assert (machine.get(plane.data) == UNWRITTEN).all()


def test_the_largest_head_size_works(machine: Any) -> None:
    turn = turn_of(MAX_SIZE)
    x = some(2, 1, MAX_SIZE)
    plane = plane_of(machine, KEY, 2, 1, turn)
    Turning(machine.launcher).append(plane, machine.put(x), counters_of(machine, 0))
    np.testing.assert_array_equal(rows_of(machine, plane), block.encode(reference, x, KEY, turn))
