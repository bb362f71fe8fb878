"""The compiled twin of rotary embedding: the reference's bits, and keys turned where they lie."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

pytest.importorskip("numba")

from warmkv.kernels.errors import KernelError, NotFinite
from warmkv.kernels.rope import fast, reference
from warmkv.kernels.rope.reference import Pairs, Rope

ROPES = [
    Rope(size, 1e4, pairs, rotary=rotary, factors=factors)
    for pairs in Pairs
    for size, rotary, factors in (
        (8, None, (1.0, 1.5, 2.0, 8.0)), (13, 8, None), (80, 48, None), (128, None, None), (5, 0, None), (32, 34 - 4, None),
    )
]  # fmt: skip


def some(rope: Rope, count: int, dtype: str = "f4") -> npt.NDArray[Any]:
    return np.random.default_rng(0).standard_normal((count, 3, rope.size)).astype(dtype)


@pytest.mark.parametrize("rope", ROPES, ids=str)
@pytest.mark.parametrize("count", [0, 1, 2, 1025])
def test_rotated_rows_have_the_bits_of_the_reference(rope: Rope, count: int) -> None:
    for scaled in (rope, Rope(rope.size, rope.base, rope.pairs, rope.rotary, rope.factors, 1.25)):
        x, positions = some(rope, count), np.arange(131000, 131000 + count)
        kept = x.copy()
        assert np.array_equal(fast.rotate(x, positions, scaled), reference.rotate(x, positions, scaled))
        assert np.array_equal(x, kept)


@pytest.mark.parametrize("rope", ROPES, ids=str)
@pytest.mark.parametrize("dtype", ["f4", "f2"])
@pytest.mark.parametrize("count", [0, 1, 1025])
def test_moved_keys_have_the_bits_of_the_reference(rope: Rope, dtype: str, count: int) -> None:
    keys = some(rope, count, dtype)
    if count:
        keys[0, 0, 0] = 1e-6  # a small number of few bits
    kept = keys.copy()
    for delta in (0, -7, 100000, np.arange(count) - 5):
        want = reference.shift(keys, delta, rope)
        assert np.array_equal(fast.shift(keys, delta, rope), want) and np.array_equal(keys, kept)
        flat = keys[:, 0].copy()
        fast.shift_in_place(flat, delta, rope)
        assert np.array_equal(flat, want[:, 0])


@pytest.mark.parametrize("rope", ROPES, ids=str)
@pytest.mark.parametrize("dtype", ["f4", "f2"])
def test_keys_are_turned_where_they_lie_and_nothing_beside_them(rope: Rope, dtype: str) -> None:
    """Some heads of token-major rows from an odd byte on, others between."""
    item = np.dtype(dtype).itemsize
    memory = np.full(1 + 41 * 3 * rope.size * item, 0x11, np.uint8)
    laid = np.ndarray((41, 3, rope.size), dtype, memory, 1)
    laid[:] = some(rope, 41, dtype)
    for part in (laid[1:40, ::2], laid[1:40, 1], laid[39:0:-1, 2:]):
        want, before = reference.shift(part.copy(), 11, rope), laid.copy()
        fast.shift_in_place(part, 11, rope)
        assert np.array_equal(part, want)
        part[...] = 0
        there = laid.copy()
        part[...] = 1
        before[(there == 0) & (laid == 1)] = there[(there == 0) & (laid == 1)] = 0
        assert np.array_equal(there, before)
        laid[:] = some(rope, 41, dtype)


@pytest.mark.parametrize("wrapped", [reference, fast], ids=["reference", "fast"])
@pytest.mark.parametrize("dtype", ["f4", "f2"])
def test_a_key_that_would_overflow_leaves_all_as_they_are(wrapped: Any, dtype: str) -> None:
    rope, largest = Rope(8, 1e4, Pairs.NEOX), np.finfo(dtype).max
    keys = some(rope, 9, dtype)
    keys[6, 1, 0] = keys[6, 1, 4] = largest
    kept = keys.copy()
    with pytest.raises(NotFinite, match="row 6 moved by -1"):
        wrapped.shift_in_place(keys, -1, rope)
    assert np.array_equal(keys, kept)
    keys[6, 1] = 0
    keys[6, 1, 0] = largest  # alone it can be turned
    want = reference.shift(keys, -1, rope)
    wrapped.shift_in_place(keys, -1, rope)
    assert np.array_equal(keys, want)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_no_number_stays_so(bad: float) -> None:
    rope = Rope(13, 1e4, Pairs.NORM, rotary=8)
    for channel in (3, 12):
        keys = some(rope, 9, "f2")
        keys[4, 2, channel] = bad
        want = reference.shift(keys, 3, rope)
        fast.shift_in_place(keys, 3, rope)
        assert np.array_equal(keys, want, equal_nan=True)


@pytest.mark.parametrize("wrapped", [reference, fast], ids=["reference", "fast"])
def test_what_does_not_fit_is_refused(wrapped: Any) -> None:
    rope = Rope(8, 1e4, Pairs.NEOX)
    keys = some(rope, 4)
    still = keys.copy()
    still.flags.writeable = False
    for match, given, delta in (
        ("float64", keys.astype(np.float64), 1), ("uint16", keys.astype(np.uint16), 1),
        (r"expected \(n, ..., 8\)", keys[..., :7], 1), ("positions", keys, np.zeros(3, np.int64)),
        ("positions", keys, np.zeros(4)), ("read-only", still, 1),
    ):  # fmt: skip
        with pytest.raises(KernelError, match=match):
            wrapped.shift_in_place(given, delta, rope)
    with pytest.raises(KernelError, match="expected float32"):
        wrapped.rotate(keys.astype(np.float64), np.arange(4), rope)
    apart = np.zeros((4, 3, 16), np.float32)[..., ::2]
    apart[...] = keys
    wrapped.shift_in_place(apart, 5, rope)
    assert np.array_equal(apart, reference.shift(keys, 5, rope))
