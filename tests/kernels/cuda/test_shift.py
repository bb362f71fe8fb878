"""Keys turned where they lie, by a CUDA program, against `rope.reference.shift` and dense rotations in float64."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
from attending import UNWRITTEN, Deaf

from warmkv.kernels.errors import KernelError
from warmkv.kernels.formats import RowFormat
from warmkv.kernels.resident.cuda import CudaOperations
from warmkv.kernels.resident.plane import TAIL_PAD, ResidentPlane
from warmkv.kernels.rope.cuda import TABLES
from warmkv.kernels.rope.reference import Pairs, Rope, shift

DTYPES = {RowFormat.F32: np.float32, RowFormat.F16: np.float16, RowFormat.BF16: ml_dtypes.bfloat16}
#: The last place of a number of 1.
UNIT = {RowFormat.F32: 2.0**-23, RowFormat.F16: 2.0**-10, RowFormat.BF16: 2.0**-7}


def ropes(size: int) -> list[Rope]:
    factors = tuple(np.linspace(1, 8, size // 2).tolist())
    return [
        Rope(size, 1e4, Pairs.NEOX), Rope(size, 5e5, Pairs.NORM, factors=factors), Rope(size, 1e4, Pairs.NEOX, rotary=size // 2),
        Rope(size, 1e6, Pairs.NORM, rotary=size // 4 * 2, attention_scale=1.3), Rope(size, 1e4, Pairs.NORM, rotary=0),
    ]  # fmt: skip


def keys_of(format_: RowFormat, rows: int, heads: int, size: int) -> npt.NDArray[Any]:
    return np.random.default_rng(size).standard_normal((rows, heads, size)).astype(DTYPES[format_])


def plane_of(machine: Any, format_: RowFormat, keys: npt.NDArray[Any], side: bool = True) -> ResidentPlane:
    data = np.concatenate([np.ascontiguousarray(keys).view(np.uint8).ravel(), np.full(TAIL_PAD, UNWRITTEN, np.uint8)])
    return ResidentPlane(format_, keys.shape[1], keys.shape[2], side, len(keys), machine.put(data))


def read(machine: Any, plane: ResidentPlane) -> npt.NDArray[Any]:
    data = machine.get(plane.data)
    assert (data[-TAIL_PAD:] == UNWRITTEN).all()
    found: npt.NDArray[Any] = data[:-TAIL_PAD].view(DTYPES[plane.format]).reshape(plane.rows, plane.heads, plane.size)
    return found


def turned(keys: npt.NDArray[Any], delta: int, rope: Rope) -> npt.NDArray[np.float64]:
    """In complex numbers."""
    out, half = keys.astype(np.float64), rope.turned // 2
    pairs = [(i, i + half) if rope.pairs is Pairs.NEOX else (2 * i, 2 * i + 1) for i in range(half)]
    for index, (a, b) in enumerate(pairs):
        angle = delta * rope.base ** (-2 * index / rope.turned) / rope.divisors[index]
        number = (keys[..., a].astype(np.float64) + 1j * keys[..., b].astype(np.float64)) * np.exp(1j * angle)
        out[..., a], out[..., b] = number.real, number.imag
    return out


@pytest.mark.parametrize("format_", [RowFormat.F32, RowFormat.F16, RowFormat.BF16])
@pytest.mark.parametrize(("size", "which"), [(40, 0), (32, 1), (96, 2), (36, 3), (32, 4)])
def test_keys_turn_and_their_neighbours_stay(machine: Any, format_: RowFormat, size: int, which: int) -> None:
    rope, keys = ropes(size)[which], keys_of(format_, 9, 3, size)
    for first, last, delta in ((0, 9, 5), (2, 7, -3), (8, 9, 100_000), (4, 4, 1), (0, 9, 0)):
        plane = plane_of(machine, format_, keys)
        CudaOperations(machine.launcher).shift(plane, first, last, delta, rope)
        found, expected = read(machine, plane), turned(keys[first:last], delta, rope)
        np.testing.assert_array_equal(found[:first], keys[:first])
        np.testing.assert_array_equal(found[last:], keys[last:])
        np.testing.assert_array_equal(found[..., rope.turned :], keys[..., rope.turned :])
        off = np.abs(found[first:last].astype(np.float64) - expected).max(initial=0)
        assert off <= UNIT[format_] * 2 * np.abs(keys).max()
        if format_ is RowFormat.BF16:
            wide = shift(keys[first:last].astype(np.float32), delta, rope)
            np.testing.assert_array_equal(found[first:last], wide.astype(ml_dtypes.bfloat16))
        else:
            np.testing.assert_array_equal(found[first:last], shift(keys[first:last], delta, rope))


def test_tables_are_made_once_and_few_are_kept(machine: Any) -> None:
    rope, plane = ropes(32)[1], plane_of(machine, RowFormat.F32, keys_of(RowFormat.F32, 2, 1, 32))
    launcher = _Counting(machine.launcher)
    operations = CudaOperations(launcher)
    launcher.constants = 0
    for delta in [1, 1, 1, *range(2, TABLES + 1), 1]:
        operations.shift(plane, 0, 2, delta, rope)
    assert launcher.constants == TABLES
    operations.shift(plane, 0, 2, TABLES + 1, rope)
    operations.shift(plane, 0, 2, 1, rope)
    assert launcher.constants == TABLES + 2


def test_what_cannot_be_turned_is_refused_and_nothing_launched(machine: Any) -> None:
    rope, keys = ropes(32)[0], keys_of(RowFormat.F32, 4, 1, 32)
    operations = CudaOperations(Deaf())
    good = plane_of(machine, RowFormat.F32, keys)
    short = ResidentPlane(RowFormat.F32, 1, 32, True, 4, good.data[:-1])
    codes = ResidentPlane(RowFormat.Q8_0, 1, 32, True, 1, machine.put(np.zeros(34 + TAIL_PAD, np.uint8)))
    for plane, first, last, turn in (
        (codes, 0, 1, rope), (plane_of(machine, RowFormat.F32, keys, side=False), 0, 1, rope), (good, 0, 5, rope),
        (good, -1, 2, rope), (good, 3, 2, rope), (good, 0, 1, Rope(64, 1e4, Pairs.NEOX)), (short, 0, 1, rope),
    ):  # fmt: skip
        with pytest.raises(KernelError):
            operations.shift(plane, first, last, 1, turn)


class _Counting:
    """A launcher that counts what it uploads."""

    def __init__(self, launcher: Any) -> None:
        self.launcher, self.constants = launcher, 0

    def launch(self, *arguments: Any, **more: Any) -> None:
        self.launcher.launch(*arguments, **more)

    def constant(self, values: Any) -> Any:
        self.constants += 1
        return self.launcher.constant(values)
