"""Prefill: a chunk attended over what is stored, beside its two matrix products alone.

The baseline multiplies the same shapes and nothing else, in tiles as `kernels.attention.chunk` cuts
them and in one piece; both run in turn with what is measured, so that a busy machine slows all alike.
BLAS runs on as many threads as the environment gives it (OPENBLAS_NUM_THREADS=1 for one).
"""

from __future__ import annotations

import importlib.util
import os
import sys
import time
from collections.abc import Callable
from functools import partial

import numpy as np
from harness import print_table

from warmkv.kernels.attention import chunk
from warmkv.kernels.formats import F32, Block, RowFormat
from warmkv.kernels.quant.reference import encode, refield

CHUNK, SIZE = 512, 128
COLUMNS = [
    "rows", "group", "storage", "softmax", "BLAS tiled ms", "BLAS whole ms", "chunk ms", "of tiled", "of whole",
    "window 1024", "with importance, of tiled",
]  # fmt: skip
STORAGES = ("f32", "f16", "q8_2f", "field")


def rows(counts: tuple[int, ...] = (4096, 32768), groups: tuple[int, ...] = (4, 1), rounds: int = 5) -> list[list[str]]:
    """Table rows for `COLUMNS`: times of one KV head and its group of query heads. Shares say how
    much of the speed of the bare products is left; a window sees 1024 rows of all there are."""
    table = []
    for count in counts:
        for group in groups:
            for storage in STORAGES if group == 4 else STORAGES[:1]:
                table += [_row(count, group, storage, name, rounds) for name in _softmaxes()]
    return table


def _softmaxes() -> list[str]:
    return ["numpy", "compiled"] if importlib.util.find_spec("numba") else ["numpy"]


def _row(count: int, group: int, storage: str, softmax: str, rounds: int) -> list[str]:
    rng = np.random.default_rng(count)
    q = rng.standard_normal((CHUNK, group, SIZE), dtype=np.float32)
    k, v = (rng.standard_normal((count, SIZE), dtype=np.float32) for _ in range(2))
    attend = partial(_attend(softmax), q, [_stored(k, storage, keys=True)], [_stored(v, storage, keys=False)])
    attend = partial(attend, scale=SIZE**-0.5, start=count - CHUNK)
    stack = q.reshape(-1, SIZE)
    tiled, whole, plain, windowed, observed = _in_turn(
        [
            lambda: _products(stack, k, v, chunk.QUERY_ROWS, chunk.TILE_ROWS),
            lambda: _products(stack, k, v, len(stack), count),
            attend,
            partial(attend, window=1024),
            lambda: attend(importance=np.zeros(count, np.float32)),
        ],
        rounds,
    )
    times = [f"{seconds * 1e3:.1f}" for seconds in (tiled, whole, plain)]
    shares = [f"{tiled / plain:.2f}", f"{whole / plain:.2f}", f"{windowed * 1e3:.1f} ms", f"{tiled / observed:.2f}"]
    return [f"{count:,}", str(group), storage, softmax, *times, *shares]


def _attend(softmax: str) -> Callable[..., object]:
    if softmax == "numpy":
        return chunk.attend_chunk
    from warmkv.kernels.attention.soften import soften

    return partial(chunk.attend_chunk, soften=soften)


def _stored(x: F32, storage: str, *, keys: bool) -> Block:
    if storage == "field":
        return refield(encode(x, RowFormat.Q8_2F, keys=keys))
    return encode(x, RowFormat(storage), keys=keys)


def _products(stack: F32, k: F32, v: F32, queries: int, tile: int) -> None:
    for begin in range(0, len(k), tile):
        for first in range(0, len(stack), queries):
            scores = stack[first : first + queries] @ k[begin : begin + tile].T
            scores @ v[begin : begin + tile]


def _in_turn(actions: list[Callable[[], object]], rounds: int) -> list[float]:
    """The least seconds of each, one after the other in every round."""
    least = [float("inf")] * len(actions)
    for round_ in range(rounds + 1):
        for index, action in enumerate(actions):
            began = time.perf_counter()
            action()
            if round_:
                least[index] = min(least[index], time.perf_counter() - began)
    return least


def main() -> int:
    threads = os.environ.get("OPENBLAS_NUM_THREADS", "its own choice of")
    print_table(f"chunk of {CHUNK}, one KV head of {SIZE} channels, BLAS on {threads} thread(s)", COLUMNS, rows())
    return 0


if __name__ == "__main__":
    sys.exit(main())
