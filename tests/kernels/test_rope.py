"""Rotary embedding against complex numbers in float64, and stored keys that move against fresh ones."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from warmkv.kernels.errors import KernelError, NotFinite
from warmkv.kernels.rope.reference import Pairs, Rope, llama3_factors, rotate, shift

FACTORS = (1.0, 1.5, 2.0, 8.0)
ROPES = [
    Rope(8, 1e4, Pairs.NEOX), Rope(8, 1e4, Pairs.NORM), Rope(8, 5e5, Pairs.NEOX, factors=FACTORS),
    Rope(8, 5e5, Pairs.NORM, factors=FACTORS), Rope(13, 1e4, Pairs.NEOX, rotary=8),
    Rope(13, 1e4, Pairs.NORM, rotary=8, factors=FACTORS), Rope(128, 1e6, Pairs.NEOX), Rope(5, 1e4, Pairs.NORM, rotary=0),
]  # fmt: skip


def by_complex_numbers(x: npt.NDArray[Any], positions: npt.NDArray[np.int64], rope: Rope) -> npt.NDArray[np.float64]:
    """Every pair as one complex number, turned by multiplication."""
    out = x.astype(np.float64).copy()
    r = rope.size if rope.rotary is None else rope.rotary
    for i in range(r // 2):
        a, b = (i, i + r // 2) if rope.pairs is Pairs.NEOX else (2 * i, 2 * i + 1)
        frequency = rope.base ** (-2 * i / r) / (1.0 if rope.factors is None else rope.factors[i])
        turn = np.exp(1j * positions * frequency).reshape(-1, *[1] * (x.ndim - 2))
        pair = (x[..., a].astype(np.float64) + 1j * x[..., b]) * turn
        out[..., a], out[..., b] = pair.real, pair.imag
    return out


def some(rope: Rope, count: int = 40, seed: int = 0) -> npt.NDArray[np.float32]:
    return np.random.default_rng(seed).standard_normal((count, 3, rope.size)).astype(np.float32)


@pytest.mark.parametrize("rope", ROPES, ids=str)
@pytest.mark.parametrize("start", [0, 13, 131072])
def test_rotating_is_multiplying_complex_numbers(rope: Rope, start: int) -> None:
    x = some(rope)
    positions = np.arange(start, start + len(x))
    np.testing.assert_allclose(rotate(x, positions, rope), by_complex_numbers(x, positions, rope), atol=2e-6)
    assert np.array_equal(rotate(x, np.zeros(len(x), np.int64), rope), x)


@pytest.mark.parametrize("rope", ROPES, ids=str)
@pytest.mark.parametrize(("old", "delta"), [(13, -8), (4096, -1000), (131072, -1072), (5, 7), (0, 100000)])
def test_a_moved_key_is_a_fresh_one_at_its_new_position(rope: Rope, old: int, delta: int) -> None:
    x = some(rope)
    positions = np.arange(old, old + len(x))
    moved = shift(rotate(x, positions, rope), delta, rope)
    fresh = rotate(x, positions + delta, rope)
    length = np.abs(x).max() * np.sqrt(2)
    assert np.abs(moved - fresh).max() <= length * 4e-7
    each = shift(rotate(x, positions, rope), np.full(len(x), delta), rope)
    assert np.array_equal(moved, each)


@pytest.mark.parametrize("pairs", Pairs)
def test_frequency_factors_count_for_both_layouts(pairs: Pairs) -> None:
    plain, stretched = Rope(8, 1e4, pairs), Rope(8, 1e4, pairs, factors=FACTORS)
    x = some(plain)
    assert np.abs(shift(x, 100, plain) - shift(x, 100, stretched)).max() > 0.1


def test_channels_beyond_the_rotary_ones_keep_their_bits() -> None:
    rope = Rope(13, 1e4, Pairs.NEOX, rotary=8)
    x = some(rope)
    assert np.array_equal(shift(x, -5, rope)[..., 8:], x[..., 8:])


def test_an_attention_scale_is_applied_once() -> None:
    rope = Rope(64, 1e4, Pairs.NEOX, attention_scale=1.3)
    x = some(rope)
    stored = rotate(x, np.arange(len(x)) + 50, rope)
    lengths = np.linalg.norm(stored, axis=-1) / np.linalg.norm(x, axis=-1)
    np.testing.assert_allclose(lengths, 1.3, rtol=1e-5)
    np.testing.assert_allclose(shift(stored, -50, rope), rotate(x, np.arange(len(x)), rope), atol=3e-6)


@pytest.mark.parametrize("size", [64, 128])
def test_halves_drift_as_measured(size: int) -> None:
    """Relative RMS error after 1, 4 and 16 shifts, published: 2.9e-4, 4.7e-4, 8.6e-4."""
    rope = Rope(size, 1e4, Pairs.NEOX)
    x = np.random.default_rng(1).standard_normal((400, 4, size)).astype(np.float32)
    positions = np.arange(3000, 3400)
    keys = rotate(x, positions, rope).astype(np.float16)
    expected = {1: 2.9e-4, 4: 4.7e-4, 16: 8.6e-4}
    for count in range(1, 17):
        keys = shift(keys, -37, rope)
        assert keys.dtype == np.float16
        if count in expected:
            fresh = by_complex_numbers(x, positions - 37 * count, rope)
            error = np.sqrt(((keys - fresh) ** 2).sum() / (fresh**2).sum())
            assert error == pytest.approx(expected[count], rel=0.2)


def test_halves_that_would_overflow_are_refused_and_what_was_infinite_stays() -> None:
    rope = Rope(4, 1e4, Pairs.NEOX)
    keys = np.zeros((1500, 1, 4), np.float16)
    keys[3, 0, 1] = np.inf
    assert not np.isfinite(shift(keys, 5, rope)[3]).all()
    keys[1203, 0, :] = 65504
    with pytest.raises(NotFinite, match="row 1203") as caught:
        shift(keys, -1, rope)
    assert caught.value.row == 1203 and np.all(keys[1203] == 65504)


def test_float32_keys_that_would_overflow_are_refused_and_what_was_infinite_stays() -> None:
    rope = Rope(4, 1e4, Pairs.NORM)
    keys = np.zeros((1500, 1, 4), np.float32)
    keys[3, 0, 1] = np.inf
    assert not np.isfinite(shift(keys, 5, rope)[3]).all()
    keys[1203, 0, :] = np.finfo(np.float32).max
    with pytest.raises(NotFinite, match="row 1203 moved by -1 is too large for float32"):
        shift(keys, -1, rope)


def test_numbers_of_numpy_make_the_same_rope_and_the_same_shift() -> None:
    rope = Rope(8, 10_000.0, Pairs.NEOX, factors=(1.0, 1.0, 2.0, 2.0), attention_scale=1.0)
    other = Rope(8, np.float32(10_000), Pairs.NEOX, factors=tuple(np.float32([1, 1, 2, 2])), attention_scale=1)
    assert other == rope and repr(other) == repr(rope)
    keys = np.random.default_rng(0).standard_normal((5, 2, 8), dtype=np.float32)
    np.testing.assert_array_equal(shift(keys, np.int64(-3), other), shift(keys, -3, rope))  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", [np.int8, np.uint16, np.float64])
def test_other_formats_are_refused_with_the_way_out(dtype: Any) -> None:
    with pytest.raises(KernelError, match="encode them anew"):
        shift(np.zeros((2, 8), dtype), 1, ROPES[0])


def test_llama_3_factors_are_the_published_ones() -> None:
    factors = llama3_factors(5e5, 128, factor=8, low=1, high=4, original=8192)
    assert factors[:29] == (1.0,) * 29 and factors[35:] == (8.0,) * 29
    np.testing.assert_allclose(factors[29:35], [1.207484, 1.553415, 2.026313, 2.694530, 3.684253, 5.257327], atol=1e-6)


def test_every_difference_between_two_models_is_named() -> None:
    rope = Rope(8, 1e4, Pairs.NEOX)
    assert rope.differs(replace(rope)) is None
    assert rope.differs(replace(rope, rotary=8, factors=(1.0,) * 4)) is None
    for name, other in (
        ("size", Rope(10, 1e4, Pairs.NEOX, rotary=8)), ("base", replace(rope, base=5e5)),
        ("pairs", replace(rope, pairs=Pairs.NORM)), ("turned", replace(rope, rotary=6)),
        ("divisors", replace(rope, factors=FACTORS)), ("attention_scale", replace(rope, attention_scale=1.1)),
    ):  # fmt: skip
        found = rope.differs(other)
        assert found is not None and found.startswith(name) and other.differs(rope) is not None


@pytest.mark.parametrize(
    "given",
    [
        {"size": 7}, {"rotary": 3}, {"rotary": 10}, {"rotary": -2}, {"base": 0.0}, {"base": float("nan")}, {"size": 0},
        {"factors": (1.0,) * 3}, {"factors": (1.0, 0.0, 1.0, 1.0)}, {"factors": (1.0, float("inf"), 1.0, 1.0)},
        {"attention_scale": float("inf")},
    ],
)  # fmt: skip
def test_ropes_that_cannot_be_are_refused(given: dict[str, Any]) -> None:
    with pytest.raises(KernelError):
        Rope(**{"size": 8, "base": 1e4, "pairs": Pairs.NEOX, **given})


def test_positions_and_shapes_that_do_not_fit_are_refused() -> None:
    x = some(ROPES[0], 4)
    for rows, positions in ((x, np.arange(3)), (x, np.arange(4.0)), (x[..., :7], np.arange(4)), (x[0, 0], np.arange(8))):
        with pytest.raises(KernelError):
            rotate(rows, positions, ROPES[0])  # type: ignore[arg-type]
    with pytest.raises(KernelError, match="float64"):
        rotate(x.astype(np.float64), np.arange(4), ROPES[0])  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_no_rows_are_moved_to_no_rows(dtype: Any) -> None:
    assert shift(np.zeros((0, 2, 8), dtype), -3, ROPES[0]).shape == (0, 2, 8)
