"""Bounded attention against rotating queries and keys by absolute positions, in float64."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module

import numpy as np
import numpy.typing as npt
import pytest

from warmkv.kernels.errors import KernelError
from warmkv.kernels.ring.reference import Rotation
from warmkv.kernels.testing import rows

F64 = npt.NDArray[np.float64]


Attend = Callable[..., npt.NDArray[np.float32]]


@pytest.fixture(params=["reference", "fast"])
def attend(request: pytest.FixtureRequest) -> Attend:
    if request.param == "fast":
        pytest.importorskip("numba")
    found: Attend = import_module(f"warmkv.kernels.ring.{request.param}").attend
    return found


def rotated(x: F64, position: int, inv_freq: F64) -> F64:
    half = len(inv_freq)
    angles = position * inv_freq
    low, high = x[..., :half], x[..., half : 2 * half]
    turned = [low * np.cos(angles) - high * np.sin(angles), low * np.sin(angles) + high * np.cos(angles), x[..., 2 * half :]]
    return np.concatenate(turned, axis=-1)


@pytest.mark.parametrize("seen", [0, 1, 7, 8, 9, 15, 16, 100])
@pytest.mark.parametrize("sinks", [0, 1, 3])
@pytest.mark.parametrize("rope_scale", [1.0, 1.3])
@pytest.mark.parametrize(("size", "half"), [(8, 4), (7, 2), (1, 0)])
def test_distances_stand_for_absolute_positions(
    attend: Attend, seen: int, sinks: int, rope_scale: float, size: int, half: int
) -> None:
    window, heads, value_size = 8, 3, 5
    inv_freq = 1.0 / 10.0 ** (np.arange(half) / max(1, half))
    k, v, q = rows(seen, size, 1), rows(seen, value_size, 2), rows(heads, size, 3, 0.3)
    sink_k, sink_v = rows(sinks, size, 4), rows(sinks, value_size, 5)
    ring_k, ring_v = np.full((window, size), np.nan, np.float32), np.full((window, value_size), np.nan, np.float32)
    for position in range(seen):
        ring_k[position % window], ring_v[position % window] = k[position], v[position]
    rotation = Rotation.table(window, inv_freq, rope_scale)
    out = attend(q, ring_k, ring_v, seen, rotation, scale=0.4, sink_keys=sink_k, sink_values=sink_v)
    visible = range(max(0, seen - window), seen)
    turned_q = rotated(q.astype(np.float64), seen - 1, inv_freq)
    logits = [q.astype(np.float64) @ key * 0.4 for key in sink_k]
    for position in visible:
        turned_k = rotated(k[position].astype(np.float64), position, inv_freq)
        factor = rope_scale**2
        rotary = turned_q[:, : 2 * half] @ turned_k[: 2 * half] * factor + turned_q[:, 2 * half :] @ turned_k[2 * half :]
        logits.append(rotary * 0.4)
    if not logits:
        assert not out.any()
        return
    columns = np.stack(logits, axis=1)
    weights = np.exp(columns - columns.max(axis=1, keepdims=True))
    weights /= weights.sum(axis=1, keepdims=True)
    expected = weights @ np.concatenate([sink_v, v[max(0, seen - window) : seen]]).astype(np.float64)
    np.testing.assert_allclose(out, expected, rtol=0, atol=3e-5)


def test_what_does_not_fit_is_refused(attend: Attend) -> None:
    ring, rotation = np.zeros((8, 4), np.float32), Rotation.table(8, np.ones(2))
    with pytest.raises(KernelError, match="queries of 6"):
        attend(np.zeros((1, 6), np.float32), ring, ring, 1, rotation, scale=1.0)
    with pytest.raises(KernelError, match="rotation"):
        attend(np.zeros((1, 4), np.float32), ring, ring, 1, Rotation.table(7, np.ones(2)), scale=1.0)
    with pytest.raises(KernelError, match="sinks"):
        attend(np.zeros((1, 4), np.float32), ring, ring, 1, rotation, scale=1.0, sink_keys=np.zeros((2, 3), np.float32),
               sink_values=np.zeros((2, 4), np.float32))  # fmt: skip
    with pytest.raises(KernelError, match="keys and values"):
        attend(np.zeros((1, 4), np.float32), ring, ring, 1, rotation, scale=1.0, sink_keys=ring)
    with pytest.raises(KernelError, match="0 distances"):
        Rotation.table(0, np.ones(2))
