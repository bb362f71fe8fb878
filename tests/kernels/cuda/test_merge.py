"""Merging of attention over parts by a CUDA program, against a softmax over all of them in float64."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from attending import F32, F64, Deaf, assert_close
from cuda_harness import HostLauncher, barriers, survivors

from warmkv.kernels.errors import KernelError
from warmkv.kernels.resident.cuda import CudaOperations

#: What a part that saw nothing says.
NOTHING = -np.inf


def parts_of(parts: int, heads: int, size: int, offset: float = 0.0, seed: int = 0) -> tuple[F32, F32, F32]:
    rng = np.random.default_rng(seed)
    shapes = (parts, heads, size), (parts, heads), (parts, heads)
    outs, tops, totals = (rng.standard_normal(shape).astype(np.float32) for shape in shapes)
    return outs, (3 * tops + np.float32(offset)).astype(np.float32), np.exp(totals)


def merged(machine: Any, outs: F32, tops: F32, totals: F32) -> F32:
    out = machine.put(np.full(outs.shape[1:], np.nan, np.float32))
    CudaOperations(machine.launcher).merge(machine.put(outs), machine.put(tops), machine.put(totals), out)
    found: F32 = machine.get(out)
    return found


def expected(outs: F32, tops: F32, totals: F32) -> F64:
    """sum of w_i out_i with w_i = total_i e^top_i over the sum of them; 0 where nobody saw anything."""
    tops, totals = tops.astype(np.float64), totals.astype(np.float64)
    highest = tops.max(axis=0)
    weights = totals * np.exp(tops - np.where(np.isneginf(highest), 0, highest))
    whole = weights.sum(axis=0)
    shares = weights / np.where(whole == 0, 1, whole)
    return np.asarray((shares[..., None] * np.where(weights[..., None] > 0, outs, 0)).sum(axis=0))


@pytest.mark.parametrize(
    ("parts", "heads", "size"), [(1, 1, 1), (2, 3, 31), (9, 2, 128), (130, 5, 129), (300, 1, 8), (3, 2, 260), (5, 2, 1100)]
)
@pytest.mark.parametrize("offset", [0.0, -1e4, 1e4])
def test_parts_count_as_much_as_they_saw(machine: Any, parts: int, heads: int, size: int, offset: float) -> None:
    given = parts_of(parts, heads, size, offset)
    # Tops near 1e4 are read as they were rounded: what is left are exponentials and sums.
    assert_close(merged(machine, *given), expected(*given), 2e-6)


def test_parts_that_saw_nothing_change_nothing_whatever_they_hold(machine: Any) -> None:
    outs, tops, totals = parts_of(5, 3, 31)
    tops[1], totals[1], outs[1] = NOTHING, 0, np.nan
    tops[4, 2], totals[4, 2], outs[4, 2] = NOTHING, 0, np.inf
    np.testing.assert_array_equal(
        merged(machine, outs, tops, totals)[:2], merged(machine, *(x[[0, 2, 3, 4]] for x in (outs, tops, totals)))[:2]
    )
    assert_close(merged(machine, outs, tops, totals), expected(outs, tops, totals), 2e-6)
    tops[:], totals[:] = NOTHING, 0
    assert (merged(machine, outs, tops, totals) == 0).all()


def test_one_part_is_itself_and_a_lower_one_fades(machine: Any) -> None:
    outs, tops, totals = parts_of(2, 3, 31)
    tops[1] = tops[0] - 200
    totals[:] = 1
    np.testing.assert_array_equal(merged(machine, outs, tops, totals), outs[0])


def test_no_barrier_can_be_left_out(machine: Any) -> None:
    if machine.name != "host":
        pytest.skip("races show on the host only")
    given = parts_of(9, 2, 128)

    def exercise(launcher: HostLauncher) -> None:
        assert_close(merged(replace(machine, launcher=launcher), *given), expected(*given), 2e-6)

    assert len(barriers("attention/merge.cu")) == 2
    assert survivors("attention/merge.cu", exercise) == []


def test_what_does_not_fit_is_refused_and_nothing_launched() -> None:
    operations, (outs, tops, totals) = CudaOperations(Deaf()), parts_of(2, 3, 4)
    out = np.zeros((3, 4), np.float32)
    for bad in (
        (outs[0], tops, totals, out), (outs, tops[:, :2], totals, out), (outs, tops, totals[:1], out),
        (outs, tops, totals, out.T), (outs, tops, totals, out[:, :3]), (outs.astype(np.float64), tops, totals, out),
        (outs[:0], tops[:0], totals[:0], out), (outs[:, :, ::-1], tops, totals, out),
    ):  # fmt: skip
        with pytest.raises(KernelError):
            operations.merge(*bad)
