"""Streaming Nyström attention against the formulas over the whole sequence at once, in float64."""

from __future__ import annotations

from importlib import import_module
from types import ModuleType

import numpy as np
import numpy.typing as npt
import pytest

from warmkv.kernels.errors import KernelError
from warmkv.kernels.nystrom.reference import Rectifier, deferred_boundary, memory_bytes, solver
from warmkv.kernels.testing import softmax_attention

F32, F64 = npt.NDArray[np.float32], npt.NDArray[np.float64]


@pytest.fixture(params=["reference", "fast"])
def nystrom(request: pytest.FixtureRequest) -> ModuleType:
    if request.param == "fast":
        pytest.importorskip("numba")
    return import_module(f"warmkv.kernels.nystrom.{request.param}")


def clustered(count: int, size: int, atoms: int, seed: int) -> F32:
    """Rows near a few atoms, in runs: what landmarks of segments stand for well."""
    rng = np.random.default_rng(seed)
    centres = rng.standard_normal((atoms, size))
    return (centres[np.arange(count) * atoms // count] + 0.1 * rng.standard_normal((count, size))).astype(np.float32)


def whole(
    q: F64, head: int, queries: F32, k: F64, v: F64, prompt: int, landmarks: int, window: int, sinks: int, rectifier: Rectifier
) -> F64:  # fmt: skip
    """2.1 to 2.4 in one go, without running maxima: far rows are those between sinks and window."""
    scale, rows = k.shape[1] ** -0.5, len(k)
    count = min(max(prompt // 8, 4), landmarks)
    bounds = [i * prompt // count for i in range(count + 1)]
    means = np.stack([k[a:b].mean(axis=0) for a, b in zip(bounds, bounds[1:], strict=False)])
    marks = np.stack([queries[head, a:b].astype(np.float64).mean(axis=0) for a, b in zip(bounds, bounds[1:], strict=False)])
    a = np.exp(scale * marks @ means.T)
    gram = a.T @ a
    solve = np.linalg.solve(gram + 1e-6 * np.diag(gram).mean() * np.eye(count), a.T)
    far = np.arange(sinks, rows - window)
    near = np.concatenate([np.arange(sinks), np.arange(rows - window, rows)])
    weight = np.exp(scale * marks @ k[far].T)
    u = np.exp(scale * q @ means.T) @ solve
    if rectifier is Rectifier.FM:
        u = np.maximum(u, 0)
    below, above = u @ weight.sum(axis=1), u @ (weight @ v[far])
    if below < 0:
        below, above = 0.0, np.zeros(v.shape[1])
    exact = np.exp(scale * q @ k[near].T)
    return np.asarray((exact @ v[near] + above) / max(exact.sum() + below, 1e-30))


@pytest.mark.parametrize("rectifier", list(Rectifier))
@pytest.mark.parametrize("sinks", [0, 4])
@pytest.mark.parametrize("heads", [1, 3])
def test_every_step_is_the_formula_over_the_whole_sequence(
    nystrom: ModuleType, rectifier: Rectifier, sinks: int, heads: int
) -> None:
    size, value_size, landmarks, window, prompt, total = 16, 8, 4, 16, 64, 96
    k, v = clustered(total, size, 4, 1), clustered(total, value_size, 4, 2)
    q = np.stack([clustered(total, size, 4, 10 + head) for head in range(heads)])
    group = nystrom.prefill(
        q[:, :prompt], k[:prompt], v[:prompt], landmarks=landmarks, window=window, sinks=sinks, rectifier=rectifier
    )  # fmt: skip
    assert [far.rows for far in group.far] == [prompt - sinks - window] * heads
    errors = []
    for position in range(prompt, total):
        out = nystrom.step(group, q[:, position], k[position], v[position])
        for head in range(heads):
            expected = whole(
                q[head, position].astype(np.float64), head, q, k[: position + 1].astype(np.float64),
                v[: position + 1].astype(np.float64), prompt, landmarks, window, sinks, rectifier,
            )  # fmt: skip
            errors.append(np.abs(out[head] - expected))
        assert [far.rows for far in group.far] == [position + 1 - sinks - window] * heads
    assert np.max(errors) < 1e-3 and np.mean(errors) < 1e-4


def test_heads_of_a_group_give_the_bits_of_states_of_their_own(nystrom: ModuleType) -> None:
    k, v = clustered(96, 16, 4, 1), clustered(96, 8, 4, 2)
    q = np.stack([clustered(96, 16, 4, 10 + head) for head in range(3)])
    together = nystrom.prefill(q[:, :64], k[:64], v[:64], landmarks=4, window=16, sinks=2)
    alone = [nystrom.prefill(q[head : head + 1, :64], k[:64], v[:64], landmarks=4, window=16, sinks=2) for head in range(3)]
    for position in range(64, 96):
        out = nystrom.step(together, q[:, position], k[position], v[position])
        for head, group in enumerate(alone):
            assert np.array_equal(nystrom.step(group, q[head : head + 1, position], k[position], v[position])[0], out[head])


@pytest.mark.parametrize("rows", [1, 12, 43, 44])
def test_a_prompt_too_short_stays_exact_for_good(nystrom: ModuleType, rows: int) -> None:
    window, sinks = 32, 4
    k, v, q = clustered(60, 8, 4, 1), clustered(60, 8, 4, 2), clustered(60, 8, 4, 3)
    assert rows < deferred_boundary(window, sinks) == 45
    group = nystrom.prefill(q[None, :rows], k[:rows], v[:rows], landmarks=4, window=window, sinks=sinks)
    assert group.exact
    for position in range(rows, 60):
        out = nystrom.step(group, q[None, position], k[position], v[position])
        given = (q[None, position].astype(np.float64), k[: position + 1].astype(np.float64), v[: position + 1].astype(np.float64))
        expected, _, _ = softmax_attention(*given, 8**-0.5, 0, position + 1, 0.0, None)
        np.testing.assert_allclose(out, expected, atol=1e-5)


def test_clipped_weights_stay_between_the_values_and_unclipped_ones_do_not(nystrom: ModuleType) -> None:
    rng = np.random.default_rng(5)
    prompt, total, size = 256, 320, 16
    k, q = ((3 * rng.standard_normal((total, size))).astype(np.float32) for _ in range(2))
    v = (2 * rng.random((total, 8))).astype(np.float32)
    beyond = {}
    for rectifier in Rectifier:
        group = nystrom.prefill(q[None, :prompt], k[:prompt], v[:prompt], landmarks=32, window=16, sinks=4, rectifier=rectifier)
        out = np.stack([nystrom.step(group, q[None, at], k[at], v[at])[0] for at in range(prompt, total)])
        beyond[rectifier] = max(v.min() - out.min(), out.max() - v.max())
    assert beyond[Rectifier.FM] < 1e-3 and beyond[Rectifier.AGGREGATE] > 1e-2


def test_landmarks_that_are_alike_are_solved_with_the_ridge_of_the_formula() -> None:
    rng = np.random.default_rng(1)
    keys, queries = (rng.standard_normal((8, 16)).astype(np.float32) for _ in range(2))
    keys[5], queries[6] = keys[2], queries[3]
    a = np.exp(0.25 * queries.astype(np.float64) @ keys.astype(np.float64).T)
    gram = a.T @ a
    expected = np.linalg.solve(gram + 1e-6 * np.diag(gram).mean() * np.eye(8), a.T)
    np.testing.assert_allclose(solver(queries, keys, 0.25), expected, rtol=1e-4, atol=1e-5 * np.abs(expected).max())


def test_an_estimate_with_a_negative_denominator_is_dropped(nystrom: ModuleType) -> None:
    k, v, q = clustered(96, 16, 4, 1), clustered(96, 8, 4, 2), clustered(96, 16, 4, 10)[None]
    group, near = (nystrom.prefill(q[:, :64], k[:64], v[:64], landmarks=4, window=16, sinks=2) for _ in range(2))
    group.far[0].solve = -np.abs(group.far[0].solve)
    near.far[0].solve = np.zeros_like(near.far[0].solve)
    for position in range(64, 96):
        wrong, right = (nystrom.step(state, q[:, position], k[position], v[position]) for state in (group, near))
        np.testing.assert_allclose(wrong, right, rtol=0, atol=2e-6)


def test_bytes_are_those_of_the_formula(nystrom: ModuleType) -> None:
    k, v = clustered(256, 128, 32, 1), clustered(256, 128, 32, 2)
    group = nystrom.prefill(np.stack([k, k]), k, v, landmarks=32, window=128, sinks=4)
    assert memory_bytes(group) == 151_552 + 2 * 37_120


def test_what_does_not_fit_is_refused_and_nothing_is_taken_in(nystrom: ModuleType) -> None:
    k = clustered(64, 8, 4, 1)
    for wrong in ({"landmarks": 3}, {"window": 0}, {"sinks": -1}):
        with pytest.raises(KernelError):
            nystrom.prefill(k[None], k, k, **{"landmarks": 4, "window": 8, "sinks": 2, **wrong})
    with pytest.raises(KernelError, match=r"keys of \(63, 8\)"):
        nystrom.prefill(k[None], k[:63], k, landmarks=4, window=8, sinks=2)
    group = nystrom.prefill(k[None], k, k, landmarks=4, window=8, sinks=2)
    before = group.keys.copy()
    with pytest.raises(KernelError, match=r"a key of \(7,\)"):
        nystrom.step(group, k[:1], k[0, :7], k[0])
    assert np.array_equal(before, group.keys) and group.far[0].rows == 64 - 8 - 2
