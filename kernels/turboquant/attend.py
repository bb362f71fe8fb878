"""Decode attention over TurboQuant rows, from the operations of a backend.

    l_t = estimate of scale * <q, k_t>     p = softmax(l)     out = R^-1 sum_t p_t n_t c[code_t]

What stands in `attention.reference` about soft caps, sinks and importance holds here too; results can be
merged with those over rows of other formats.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Protocol

import numpy as np

from warmkv.kernels.attention.reference import Attended
from warmkv.kernels.errors import BackendMissing, KernelError
from warmkv.kernels.formats import F32
from warmkv.kernels.turboquant import reference
from warmkv.kernels.turboquant.planes import KeyPlanes, PlainKeyPlanes, ValuePlanes
from warmkv.kernels.turboquant.reference import Estimator
from warmkv.kernels.turboquant.rotation import Rotation


class EncodeKeys(Protocol):
    def __call__(self, rows: F32, rotation: Rotation, *, position: int = 0) -> KeyPlanes: ...


class EncodeValues(Protocol):
    def __call__(self, rows: F32, rotation: Rotation, *, position: int = 0) -> ValuePlanes: ...


class EncodePlainKeys(Protocol):
    def __call__(self, rows: F32, rotation: Rotation, *, position: int = 0) -> PlainKeyPlanes: ...


class Scores(Protocol):
    def __call__(
        self, q: F32, keys: KeyPlanes | PlainKeyPlanes, rotation: Rotation, *, scale: float = 1.0,
        estimator: Estimator = Estimator.UNBIASED,
    ) -> F32: ...  # fmt: skip


@dataclass(frozen=True, slots=True)
class Operations:
    """What one backend does; what each does stands in `reference`."""

    name: str
    encode_keys: EncodeKeys
    encode_values: EncodeValues
    encode_plain_keys: EncodePlainKeys
    scores: Scores
    weigh: Callable[[F32, ValuePlanes], F32]
    unrotate: Callable[[F32, Rotation], F32]


REFERENCE = Operations(
    "reference",
    reference.encode_keys,
    reference.encode_values,
    reference.encode_plain_keys,
    reference.scores,
    reference.weigh,
    reference.unrotate,
)


def fast() -> Operations:
    """The compiled operations. Raises BackendMissing without numba."""
    if find_spec("numba") is None:
        raise BackendMissing("backend 'fast' needs numba: pip install 'warmkv[fast]'")
    from warmkv.kernels.turboquant import fast as compiled

    return Operations(
        "fast",
        compiled.encode_keys,
        compiled.encode_values,
        compiled.encode_plain_keys,
        compiled.scores,
        compiled.weigh,
        compiled.unrotate,
    )


def attend(
    operations: Operations, q: F32, keys: KeyPlanes | PlainKeyPlanes, values: ValuePlanes, key_rotation: Rotation,
    value_rotation: Rotation, *, scale: float, estimator: Estimator = Estimator.UNBIASED, first: int = 0,
    upto: int | None = None, softcap: float = 0.0, sinks: F32 | None = None, importance: F32 | None = None,
) -> Attended:  # fmt: skip
    """Attend the query heads ``q`` (heads, key size) float32 of one KV head over its rows [first, upto).

    ``sinks`` (heads,) float32 are learned logits; ``importance`` (rows,) float32 gets every visible
    row's probability of every head added, in place. Raises KernelError, having added nothing."""
    last = len(keys) if upto is None else min(upto, len(keys))
    if len(values) != len(keys) or first < 0 or last < 0 or values.size != value_rotation.size:
        raise KernelError(
            f"rows [{first}, {last}) of {len(keys)} keys and {len(values)} values of {values.size} channels, "
            f"their rotation of {value_rotation.size}"
        )
    if sinks is not None and sinks.shape != q.shape[:1]:
        raise KernelError(f"{sinks.shape} sink logits for {q.shape[:1]} heads")
    if importance is not None and (importance.dtype != np.float32 or importance.shape[0] < last):
        raise KernelError(f"importance is {importance.dtype} of {importance.shape}, expected float32 of {last} rows or more")
    first = min(first, last)
    logits = operations.scores(q, keys.rows(first, last), key_rotation, scale=scale, estimator=estimator)
    if softcap > 0:
        logits = np.float32(softcap) * np.tanh(logits / np.float32(softcap))
    extra = np.full(len(q), -np.inf, np.float32) if sinks is None else sinks
    top = np.maximum(logits.max(axis=1, initial=-np.inf), extra)
    anchor = np.where(np.isneginf(top), np.float32(0), top)
    np.subtract(logits, anchor[:, None], out=logits)
    weights = np.exp(logits, out=logits)
    total = weights.sum(axis=1, dtype=np.float64) + np.exp(np.float64(extra - anchor))
    weights /= np.where(total == 0, 1.0, total).astype(np.float32)[:, None]
    out = operations.unrotate(operations.weigh(weights, values.rows(first, last)), value_rotation)
    if importance is not None:
        for each in weights:
            importance[first:last] += each
    return Attended(out, top.astype(np.float32), total.astype(np.float32))
