"""Compiled Nyström attention against its reference, state for state and step for step."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import pytest

pytest.importorskip("numba")

from warmkv.kernels.nystrom import fast, reference  # noqa: E402
from warmkv.kernels.nystrom.reference import Far, Group, Rectifier  # noqa: E402
from warmkv.kernels.testing import poisoned  # noqa: E402

F32 = npt.NDArray[np.float32]


@pytest.fixture(autouse=True)
def outputs_are_poisoned() -> Iterator[None]:
    with poisoned():
        yield


def clustered(count: int, size: int, seed: int) -> F32:
    """Rows near four atoms, in runs."""
    rng = np.random.default_rng(seed)
    return (rng.standard_normal((4, size))[np.arange(count) * 4 // count] + 0.1 * rng.standard_normal((count, size))).astype("f4")


def arrays(far: Far) -> list[F32]:
    return [far.landmarks, far.solve, far.values, far.mass, far.top]


def assert_close(ours: Group, theirs: Group) -> None:
    for name in ("window", "scale", "rectifier", "exact", "filled", "head", "heads"):
        assert getattr(ours, name) == getattr(theirs, name), name
    for name in ("keys", "values", "sink_keys", "sink_values", "landmarks"):
        assert np.array_equal(getattr(ours, name), getattr(theirs, name)), name
    for one, other in zip(ours.far, theirs.far, strict=True):
        assert one.rows == other.rows
        for mine, wanted in zip(arrays(one), arrays(other), strict=True):
            assert mine.dtype == np.float32 and mine.shape == wanted.shape
            np.testing.assert_allclose(mine, wanted, rtol=1e-5, atol=1e-6 * max(1.0, float(np.abs(wanted).max(initial=0))))


@pytest.mark.parametrize("size", [1, 7, 32, 80, 128, 192])
@pytest.mark.parametrize(("rows", "window", "sinks"), [(30, 16, 5), (31, 16, 6), (64, 16, 4), (65, 1, 0), (700, 33, 2)])
@pytest.mark.parametrize("rectifier", list(Rectifier))
def test_states_and_steps_are_those_of_the_reference(
    monkeypatch: pytest.MonkeyPatch, size: int, rows: int, window: int, sinks: int, rectifier: Rectifier
) -> None:
    monkeypatch.setattr(fast, "TILE_ROWS", 13)
    total, value_size, heads = rows + 40, max(1, size - 3), 3
    k, v = clustered(total, size, 1), clustered(total, value_size, 2)
    q = np.stack([clustered(total, size, 3 + head) for head in range(heads)])
    given = {"landmarks": 8, "window": window, "sinks": sinks, "rectifier": rectifier}
    ours = fast.prefill(q[:, :rows], k[:rows], v[:rows], **given)
    theirs = reference.prefill(q[:, :rows], k[:rows], v[:rows], **given)
    assert_close(ours, theirs)
    largest = max([1.0, *(float(np.abs(far.solve).max(initial=0)) for far in theirs.far)])
    for at in range(rows, total):
        mine = fast.step(ours, q[:, at], k[at], v[at])
        wanted = reference.step(theirs, q[:, at], k[at], v[at])
        assert mine.dtype == np.float32 and mine.shape == (heads, value_size)
        # A denominator may nearly cancel: what both round apart then shows in the quotient.
        # A denominator may nearly cancel: what both round apart then shows in the quotient.
        np.testing.assert_allclose(mine, wanted, rtol=1e-3, atol=3e-6 * largest)
    assert_close(ours, theirs)


def test_both_backends_go_on_from_a_state_of_the_other() -> None:
    k, v = clustered(120, 16, 1), clustered(120, 8, 2)
    q = np.stack([clustered(120, 16, 3), clustered(120, 16, 4)])
    one = fast.prefill(q[:, :80], k[:80], v[:80], landmarks=4, window=16, sinks=2)
    other = copy.deepcopy(one)
    for at in range(80, 120):
        first, second = (fast, reference) if at % 2 else (reference, fast)
        np.testing.assert_allclose(
            first.step(one, q[:, at], k[at], v[at]), second.step(other, q[:, at], k[at], v[at]), atol=1e-4
        )  # fmt: skip
    assert_close(one, other)


def test_arrays_kept_for_a_rollback_are_never_written() -> None:
    k = clustered(90, 16, 1)
    group = fast.prefill(k[None, :64], k[:64], k[:64], landmarks=4, window=16, sinks=2)
    kept = copy.copy(group.far[0])
    before = [item.copy() for item in arrays(kept)]
    for item in arrays(kept):
        item.flags.writeable = False
    fast.step(group, k[None, 64], k[64], k[64])
    assert all(np.array_equal(item, was) for item, was in zip(arrays(kept), before, strict=True))
    assert group.far[0].rows == kept.rows + 1 and not np.array_equal(group.far[0].mass, kept.mass)


def test_large_logits_neither_overflow_nor_vanish() -> None:
    k, v = 8 * clustered(120, 16, 1), clustered(120, 8, 2)
    q = clustered(120, 16, 1)[None]
    ours = fast.prefill(q[:, :80], k[:80], v[:80], landmarks=4, window=16, sinks=2, scale=1.0)
    theirs = reference.prefill(q[:, :80], k[:80], v[:80], landmarks=4, window=16, sinks=2, scale=1.0)
    assert max(np.abs(far.top).max() for far in ours.far) > 88
    for one, other in zip(ours.far, theirs.far, strict=True):
        for mine, wanted in zip(arrays(one), arrays(other), strict=True):
            assert np.isfinite(mine).all()
            np.testing.assert_allclose(mine, wanted, rtol=1e-4, atol=1e-5 * np.abs(wanted).max())


def test_a_long_prompt_is_taken_in_without_a_matrix_of_all_its_rows() -> None:
    k = clustered(4000, 8, 1)
    group = fast.prefill(k[None], k, k, landmarks=32, window=64, sinks=4)
    far = group.far[0]
    logits = far.landmarks.astype(np.float64) @ k[4:-64].T.astype(np.float64) * group.scale
    weights = np.exp(logits - far.top[:, None])
    np.testing.assert_allclose(far.mass, weights.sum(axis=1), rtol=1e-5)
    np.testing.assert_allclose(far.values, weights @ k[4:-64], rtol=1e-5, atol=1e-3)
    assert far.rows == 4000 - 64 - 4
