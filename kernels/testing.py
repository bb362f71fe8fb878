"""Rows to try kernels with, and oracles: float64, one softmax over everything, written without
the kernels. For our own tests and those of other backends.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt

F64 = npt.NDArray[np.float64]


def rows(count: int, size: int, seed: int, spread: float = 1.0) -> npt.NDArray[np.float32]:
    """Normal numbers, every third channel eight times as large."""
    data = np.random.default_rng(seed).standard_normal((count, size))
    data[:, ::3] *= 8.0
    return (spread * data).astype(np.float32)


@contextmanager
def poisoned() -> Iterator[None]:
    """While it lasts, memory that numpy hands out unfilled has NaN, or 85 where there is no NaN, in it: what a
    kernel forgets to fill shows. Kernels that compile when first called are to be called before."""
    fresh, like = np.empty, np.empty_like

    def filled(*given: Any, **more: Any) -> Any:
        array = fresh(*given, **more)
        array.fill(np.nan if array.dtype.kind == "f" else 85)
        return array

    try:
        setattr(np, "empty", filled)  # noqa: B010
        setattr(np, "empty_like", lambda array: filled(array.shape, array.dtype))  # noqa: B010
        yield
    finally:
        setattr(np, "empty", fresh)  # noqa: B010
        setattr(np, "empty_like", like)  # noqa: B010


def softmax_attention(
    q: F64, k: F64, v: F64, scale: float, first: int, upto: int, softcap: float, sinks: Sequence[float] | None
) -> tuple[F64, F64, F64]:
    """Output, log of the denominator, and probabilities (heads, rows) with zeros where nothing is
    seen: the whole row masked with -inf, the sink as one more column."""
    logits = q @ k.T * scale
    if softcap:
        logits = softcap * np.tanh(logits / softcap)
    mask = np.zeros(k.shape[0], bool)
    mask[first:upto] = True
    logits = np.where(mask, logits, -np.inf)
    column = np.full((q.shape[0], 1), -np.inf) if sinks is None else np.asarray(sinks, np.float64)[:, None]
    whole = np.concatenate([logits, column], axis=1)
    top = whole.max(axis=1, keepdims=True)
    weights = np.exp(whole - top)
    total = weights.sum(axis=1, keepdims=True)
    p = (weights / total)[:, :-1]
    return p @ v, (top + np.log(total))[:, 0], p
