"""TurboQuant on one thread: encoding, scoring and decode attention, beside float32 with BLAS.

Keys and values of d = 128. The bandwidth column is what reading the stored bytes alone would take, at
the rate a 512 MB array of float32 is added up in this run. Times are processor time of the one thread
that computes, the least of several rounds: others on the machine disturb them least. Attention is over a whole layer of 8 KV
heads, so that float32 rows come from memory and not from a cache they would not be in.
"""

from __future__ import annotations

import os

os.environ.update(OMP_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1", MKL_NUM_THREADS="1")

import argparse
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt
from harness import print_table, write_json

from warmkv.kernels.turboquant.attend import REFERENCE, Operations, attend, fast
from warmkv.kernels.turboquant.planes import KeyPlanes, PlainKeyPlanes, ValuePlanes
from warmkv.kernels.turboquant.rotation import Rotation

SIZE = 128
KV_HEADS = 8
F32 = npt.NDArray[np.float32]
ROTATION = Rotation.of(42, 0, SIZE)


def least_s(action: Callable[[], object], rounds: int) -> float:
    """Least processor seconds of ``action`` over ``rounds``, after one that is not counted."""
    times = []
    for _ in range(rounds + 1):
        began = time.thread_time()
        action()
        times.append(time.thread_time() - began)
    return min(times[1:])


def rows_of(count: int, heads: int = 1) -> F32:
    return np.random.default_rng(count).standard_normal((count, heads, SIZE), dtype=np.float32)


def bandwidth() -> float:
    """Bytes a second of adding up what no cache holds."""
    array = np.ones(1 << 27, np.float32)
    return array.nbytes / least_s(lambda: array.sum(), 5)


def timed_encoders(operations: Operations, rows: F32) -> dict[str, float]:
    rounds = 3 if operations.name == "reference" else 7
    encoders: dict[str, Callable[[], object]] = {
        "keys": lambda: operations.encode_keys(rows, ROTATION),
        "values": lambda: operations.encode_values(rows, ROTATION),
        "tq3 keys": lambda: operations.encode_plain_keys(rows, ROTATION),
    }
    return {name: least_s(action, rounds) for name, action in encoders.items()}


def timed_reads(operations: Operations, rows: F32) -> dict[str, float]:
    """Seconds of one query's scores and weighted sum over the rows of one head."""
    encoder = fast()
    keys, plain = encoder.encode_keys(rows, ROTATION).head(0), encoder.encode_plain_keys(rows, ROTATION).head(0)
    values = encoder.encode_values(rows, ROTATION).head(0)
    q, weights = rows[:1, 0].copy(), np.random.default_rng(1).random((1, len(rows)), dtype=np.float32)
    rounds = 3 if operations.name == "reference" else 11
    return {
        "keys": least_s(lambda: operations.scores(q, keys, ROTATION), rounds),
        "tq3 keys": least_s(lambda: operations.scores(q, plain, ROTATION), rounds),
        "values": least_s(lambda: operations.weigh(weights, values), rounds),
    }


def timed_blas(rows: F32) -> dict[str, float]:
    flat = np.ascontiguousarray(rows[:, 0])
    q, weights = flat[0].copy(), np.random.default_rng(1).random(len(flat), dtype=np.float32)
    scores = least_s(lambda: flat @ q, 11)
    return {"keys": scores, "tq3 keys": scores, "values": least_s(lambda: weights @ flat, 11)}


def blas_attention(q: F32, keys: F32, values: F32) -> F32:
    """One softmax for queries (KV heads, group, size) over keys and values (KV heads, rows, size)."""
    logits = q @ keys.transpose(0, 2, 1) * np.float32(SIZE**-0.5)
    np.subtract(logits, logits.max(axis=-1, keepdims=True), out=logits)
    np.exp(logits, out=logits)
    logits /= logits.sum(axis=-1, keepdims=True)
    out: F32 = logits @ values
    return out


def timed_attention(count: int, group: int) -> dict[str, float]:
    rows = rows_of(count, KV_HEADS)
    compiled = fast()
    keys, plain = compiled.encode_keys(rows, ROTATION), compiled.encode_plain_keys(rows, ROTATION)
    values = compiled.encode_values(rows, ROTATION)
    wide = np.ascontiguousarray(rows.swapaxes(0, 1))
    q = np.random.default_rng(2).standard_normal((KV_HEADS, group, SIZE), dtype=np.float32)
    other = wide.copy()

    def over(stored: KeyPlanes | PlainKeyPlanes) -> None:
        for head in range(KV_HEADS):
            attend(compiled, q[head], stored.head(head), values.head(head), ROTATION, ROTATION, scale=SIZE**-0.5)

    return {
        "float32, BLAS": least_s(lambda: blas_attention(q, wide, other), 9),
        "TurboQuant": least_s(lambda: over(keys), 9),
        "tq3 keys": least_s(lambda: over(plain), 9),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=[4096, 32768, 131072])
    parser.add_argument("--attention-rows", type=int, default=32768)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    rate = bandwidth()
    stored = {
        "keys": KeyPlanes.row_bytes(SIZE),
        "values": ValuePlanes.row_bytes(SIZE),
        "tq3 keys": PlainKeyPlanes.row_bytes(SIZE),
    }
    fast().encode_keys(rows_of(64), ROTATION)
    encoding, reading, report = [], [], {"bandwidth": rate}
    for count in given.rows:
        rows = rows_of(count)
        slow, quick = timed_encoders(REFERENCE, rows), timed_encoders(fast(), rows)
        blas, slow_reads, quick_reads = timed_blas(rows), timed_reads(REFERENCE, rows), timed_reads(fast(), rows)
        for name in stored:
            report[f"encode {name} {count}"], report[f"read {name} {count}"] = quick[name], quick_reads[name]
            encoding.append([
                f"{count:,} {name}", f"{count / slow[name] / 1e3:,.0f}", f"{count / quick[name] / 1e3:,.0f}",
                f"{slow[name] / quick[name]:.1f}",
            ])  # fmt: skip
            limit = count * stored[name] / rate
            reading.append([
                f"{count:,} {name}", f"{slow_reads[name] * 1e3:.2f}", f"{quick_reads[name] * 1e3:.3f}",
                f"{blas[name] * 1e3:.3f}", f"{limit * 1e3:.3f}", f"{blas[name] / quick_reads[name]:.2f}",
            ])  # fmt: skip
    print_table("Encoding, thousands of rows a second", ["rows", "reference", "fast", "fast/reference"], encoding)
    columns = ["rows", "reference", "fast", "float32 BLAS", "bandwidth", "BLAS/fast"]
    print_table(f"Scores or weighted sum for one query, ms (memory: {rate / 1e9:.1f} GB/s)", columns, reading)
    table = []
    for group in (1, 4):
        seconds = timed_attention(given.attention_rows, group)
        report.update({f"attention {name} group {group}": value for name, value in seconds.items()})
        base = seconds["float32, BLAS"]
        share = {
            "float32, BLAS": 8 * SIZE,
            "TurboQuant": stored["keys"] + stored["values"],
            "tq3 keys": stored["tq3 keys"] + stored["values"],
        }
        for name, value in seconds.items():
            table.append([f"{name}, {group} queries a KV head", f"{share[name]}", f"{value * 1e3:.2f}", f"{base / value:.2f}"])
    title = f"Decode attention over {given.attention_rows:,} rows of {KV_HEADS} KV heads, one thread"
    print_table(title, ["rows as", "bytes a row and head", "ms", "times BLAS' speed"], table)
    write_json(given.json, report)


if __name__ == "__main__":
    main()
