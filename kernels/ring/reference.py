"""Bounded attention, written to be read beside the formulas.

A ring of W rows per KV head holds raw keys, without any rotation, and values. Position t lies in slot
t mod W. A query at the newest position sees learned sink rows and the rows of the ring:

    sink s:       l = scale * <q, ks_s>
    distance D:   l = scale * <R(D) q, k>      R(D): rotation by D positions

with one softmax over both. Rotating the query by the distance is rotating both by their positions,
since R(t) q . R(j) k = R(t - j) q . k; so nothing depends on absolute positions, and a ring never grows.

**Source:** `swa_sink_v1` of the CMF runtime; rotary embedding: Su et al., arXiv 2104.09864; the attention
factor of YaRN multiplies both sides, hence its square: Peng et al., arXiv 2309.00071.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from warmkv.kernels.errors import KernelError
from warmkv.kernels.formats import F32


@dataclass(frozen=True, slots=True)
class Rotation:
    """``cos`` and ``sin`` (W, half) float32 for distances 0..W-1: of channel pairs (i, i + half);
    channels from 2 x half on are not rotated."""

    cos: F32
    sin: F32

    @classmethod
    def table(cls, window: int, inv_freq: npt.NDArray[np.float64], rope_scale: float = 1.0) -> Rotation:
        """Angles are taken in float64. Raises KernelError."""
        if window < 1 or inv_freq.ndim != 1:
            raise KernelError(f"a rotation table of {window} distances with frequencies of shape {inv_freq.shape}")
        angles = np.arange(window, dtype=np.float64)[:, None] * inv_freq.astype(np.float64)
        factor = float(rope_scale) ** 2
        return cls((np.cos(angles) * factor).astype(np.float32), (np.sin(angles) * factor).astype(np.float32))

    def turned(self, q: F32, distance: int) -> F32:
        """``q`` (heads, size) rotated by so many positions."""
        half = self.cos.shape[1]
        low, high = q[:, :half], q[:, half : 2 * half]
        cos, sin = self.cos[distance], self.sin[distance]
        return np.concatenate([low * cos - high * sin, low * sin + high * cos, q[:, 2 * half :]], axis=1)


@np.errstate(invalid="ignore", over="ignore")
def attend(
    q: F32, ring_keys: F32, ring_values: F32, seen: int, rotation: Rotation, *, scale: float,
    sink_keys: F32 | None = None, sink_values: F32 | None = None,
) -> F32:  # fmt: skip
    """Outputs (heads, value size) of the query heads ``q`` (heads, key size) of one KV head, after
    ``seen`` rows went into its ring (W, size). ``sink_keys`` and ``sink_values`` are (S, size).

    Raises KernelError."""
    window, half = ring_keys.shape[0], rotation.cos.shape[1]
    check(q, ring_keys, ring_values, seen, rotation, sink_keys, sink_values)
    logits, rows = [], []
    if sink_keys is not None and sink_values is not None:
        logits += [(q * key).sum(axis=1) * np.float32(scale) for key in sink_keys]
        rows += list(sink_values)
    for distance in range(min(seen, window)):
        slot = (seen - 1 - distance) % window
        turned = rotation.turned(q, distance) if half else q
        logits.append((turned * ring_keys[slot]).sum(axis=1) * np.float32(scale))
        rows.append(ring_values[slot])
    if not rows:
        return np.zeros((q.shape[0], ring_values.shape[1]), np.float32)
    columns = np.stack(logits, axis=1)
    weights = np.exp(columns - columns.max(axis=1, keepdims=True))
    weights = weights / weights.sum(axis=1, keepdims=True, dtype=np.float64)
    out: F32 = (weights @ np.stack(rows)).astype(np.float32)
    return out


def check(
    q: F32, ring_keys: F32, ring_values: F32, seen: int, rotation: Rotation, sink_keys: F32 | None, sink_values: F32 | None
) -> None:  # fmt: skip
    """Raises KernelError unless the arguments of `attend` fit each other."""
    size, window = q.shape[1], ring_keys.shape[0]
    if ring_keys.shape != (window, size) or ring_values.shape[0] != window or window < 1:
        raise KernelError(f"a ring of {ring_keys.shape} keys and {ring_values.shape} values for queries of {size} channels")
    if seen < 0:
        raise KernelError(f"{seen} rows seen")
    if rotation.cos.shape[0] < window or 2 * rotation.cos.shape[1] > size:
        raise KernelError(f"a rotation of {rotation.cos.shape} for a ring of {window} rows of {size} channels")
    if (sink_keys is None) != (sink_values is None):
        raise KernelError("sink rows need keys and values")
    if sink_keys is not None and sink_values is not None:
        if sink_keys.shape[1:] != (size,) or sink_values.shape != (sink_keys.shape[0], ring_values.shape[1]):
            raise KernelError(f"sinks of {sink_keys.shape} and {sink_values.shape} beside a ring of {ring_keys.shape}")
