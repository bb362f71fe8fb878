"""Decode attention beside BLAS and beside the speed at which its rows can be read at all.

One token attends over T rows of every KV head. So many layers are held that what is read does not
stay in a cache. In every round the rows are read once, attended, and BLAS does the same in float32
(two matrix products and a softmax, on as many threads): ratios are of neighbours in time. A process
per number of threads, since BLAS is told before it starts.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path

import attention_prefill
import numpy as np
import numpy.typing as npt
from harness import console, print_table, write_json

from warmkv.kernels import threads as pool
from warmkv.kernels.attention.layer import attend_heads
from warmkv.kernels.dispatch import REFERENCE, kernels
from warmkv.kernels.formats import F32, Block, RowFormat
from warmkv.kernels.quant.reference import encode

SIZE = 128
GEOMETRIES = ((32, 8), (32, 32))
COUNTS = (1024, 4096, 32768, 131072)
FORMATS = (
    RowFormat.F32, RowFormat.F16, RowFormat.Q8_2F, RowFormat.Q8_0, RowFormat.Q5_1, RowFormat.Q4_0, RowFormat.FP8,
)  # fmt: skip
#: Bytes read a round, six times a third-level cache of 32 MB.
WORKING_SET_BYTES = 192 << 20
AIM_ROWS, AIM_OF_READ, AIM_OVER_BLAS, STRETCH_OVER_BLAS = 32768, 0.6, 1.5, 2.5
COLUMNS = [
    "rows", "heads", "storage", "threads", "MB a layer", "read GB/s", "reference ms", "BLAS f32 ms", "fast ms", "fast GB/s",
    "of read", "x BLAS",
]  # fmt: skip


@dataclass(frozen=True)
class Measured:
    """Times are milliseconds of one layer, the least of the rounds; ``reference`` 0: left out."""

    rows: int
    heads: int
    kv_heads: int
    storage: str
    threads: int
    layer_bytes: int
    read_gbps: float
    reference_ms: float
    blas_ms: float
    fast_ms: float

    @property
    def fast_gbps(self) -> float:
        return self.layer_bytes / self.fast_ms / 1e6

    @property
    def of_read(self) -> float:
        return self.fast_gbps / self.read_gbps

    @property
    def over_blas(self) -> float:
        return self.blas_ms / self.fast_ms

    def line(self) -> list[str]:
        return [
            f"{self.rows:,}", f"{self.heads}/{self.kv_heads}/{SIZE}", self.storage, str(self.threads),
            f"{self.layer_bytes / 1e6:.1f}", f"{self.read_gbps:.1f}", f"{self.reference_ms:,.1f}" if self.reference_ms else "",
            f"{self.blas_ms:,.2f}", f"{self.fast_ms:,.3f}", f"{self.fast_gbps:.1f}", f"{self.of_read:.2f}",
            f"{self.over_blas:.1f}",
        ]  # fmt: skip


Head = tuple[Block, Block]


def held(count: int, format_: RowFormat, token_major: int = 0) -> Iterator[Head]:
    """KV heads of random rows, each in memory of its own; or ``token_major`` of them side by side, as
    in a segment."""
    rng = np.random.default_rng(count)
    base = [encode(rng.standard_normal((1024, SIZE), np.float32), format_, keys=keys) for keys in (True, False)]
    while True:
        wide = max(1, token_major)
        planes = []
        for block in base:
            codes = np.resize(block.codes, (count, wide, block.codes.shape[1]))
            scales = None if block.scales is None else np.resize(block.scales, (count, wide, block.scales.shape[1]))
            planes.append([Block(format_, codes[:, i], None if scales is None else scales[:, i]) for i in range(wide)])
        yield from zip(*planes, strict=True)


def plane_bytes(block: Block) -> int:
    return len(block) * (block.codes.itemsize * block.codes.shape[1] + (0 if block.scales is None else 4 * block.scales.shape[1]))


def layers(count: int, kv_heads: int, format_: RowFormat, token_major: bool) -> list[list[Head]]:
    """As many layers as make the working set; of a large one only as many heads."""
    heads = held(count, format_, kv_heads if token_major else 0)
    first = next(heads)
    head_bytes = sum(plane_bytes(block) for block in first)
    together = kv_heads if token_major else min(kv_heads, max(1, WORKING_SET_BYTES // head_bytes))
    many = max(1, WORKING_SET_BYTES // (head_bytes * together))
    taken = [first, *(next(heads) for _ in range(together * many - 1))]
    return [taken[at : at + together] for at in range(0, len(taken), together)]


def measure(count: int, heads: int, kv_heads: int, format_: RowFormat, threads: int, token_major: bool = False) -> Measured:
    held_layers, group = layers(count, kv_heads, format_, token_major), heads // kv_heads
    together = len(held_layers[0])
    q = np.random.default_rng(1).standard_normal((together * group, SIZE), np.float32)
    plain = held_layers if format_ is RowFormat.F32 else layers(count, kv_heads, RowFormat.F32, False)
    fast = kernels("fast")

    def attend() -> None:
        for layer in held_layers:
            attend_heads(fast, q, [[k] for k, _ in layer], [[v] for _, v in layer], scale=SIZE**-0.5, threads=threads)

    codes = [block.codes for layer in held_layers for head in layer for block in head]
    whole = {id(array.base): array.base for array in codes if array.base is not None} if token_major else {}
    arrays = list(whole.values()) or codes
    read_s, fast_s, blas_s = in_turn([lambda: _read(arrays, threads), attend, lambda: _blas(plain, q, group)])
    layer_bytes = sum(plane_bytes(block) for block in held_layers[0][0]) * kv_heads
    per_layer = kv_heads / together * 1e3
    return Measured(
        count, heads, kv_heads, format_.value + (" token-major" if token_major else ""), threads, layer_bytes,
        sum(array.nbytes for array in arrays) / read_s / 1e9, _reference_ms(held_layers[0][0], q[:group], kv_heads, threads),
        blas_s / len(plain) * kv_heads / len(plain[0]) * 1e3, fast_s / len(held_layers) * per_layer,
    )  # fmt: skip


def in_turn(actions: list[Callable[[], object]], least_rounds: int = 3, seconds: float = 0.8) -> list[float]:
    """The least seconds of each; all take their turn in every round, the first of which only warms up."""
    times: list[list[float]] = [[] for _ in actions]
    until = time.perf_counter() + seconds
    while len(times[0]) < least_rounds + 1 or time.perf_counter() < until:
        for own, action in zip(times, actions, strict=True):
            began = time.perf_counter()
            action()
            own.append(time.perf_counter() - began)
    return [min(own[1:]) for own in times]


def _read(arrays: Sequence[npt.NDArray[np.generic]], threads: int) -> None:
    """Touch every byte once, as fast as numpy can."""
    pool.run(lambda index: arrays[index].reshape(-1).view(np.int64).max(), len(arrays), threads)


def _blas(planes: list[list[Head]], q: F32, group: int) -> None:
    for layer in planes:
        for index, (k, v) in enumerate(layer):
            mine = q[index * group : (index + 1) * group]
            scores: F32 = mine @ k.codes.T  # type: ignore[operator]
            scores *= np.float32(SIZE**-0.5)
            scores -= scores.max(axis=1, keepdims=True)
            np.exp(scores, out=scores)
            scores /= scores.sum(axis=1, keepdims=True)
            scores @ v.codes


def _reference_ms(head: Head, q: F32, kv_heads: int, threads: int) -> float:
    """Of one KV head, times their number; on one thread only."""
    if threads > 1:
        return 0.0
    began = time.perf_counter()
    REFERENCE.attend(q, [head[0]], [head[1]], scale=SIZE**-0.5)
    return (time.perf_counter() - began) * kv_heads * 1e3


def on_threads(threads: int, counts: tuple[int, ...]) -> list[Measured]:
    """Everything on so many threads, in a process whose BLAS was told so."""
    done = []
    for heads, kv_heads in GEOMETRIES:
        for count in counts:
            done += [measure(count, heads, kv_heads, format_, threads) for format_ in FORMATS]
        if AIM_ROWS in counts:
            done.append(measure(AIM_ROWS, heads, kv_heads, RowFormat.Q8_2F, threads, token_major=True))
    return done


def _verdict(found: list[Measured]) -> bool:
    """Prints each aim with what was reached; whether all were."""
    reached = True
    for one in found:
        if one.rows != AIM_ROWS or one.storage != RowFormat.Q8_2F.value:
            continue
        single = one.heads == one.kv_heads
        value, aim = (one.of_read, AIM_OF_READ) if single else (one.over_blas, AIM_OVER_BLAS)
        reached &= value >= aim
        what = "of the read bandwidth" if single else f"times as fast as BLAS in f32 (stretch {STRETCH_OVER_BLAS})"
        group, verdict = one.heads // one.kv_heads, "reached" if value >= aim else "MISSED"
        console.print(
            f"{verdict}: q8 at {one.rows:,} rows, {group} query head(s) a KV head, {one.threads} thread(s): "
            f"{value:.2f} {what}, aim {aim}"
        )
    return reached


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=COUNTS, help="rows to attend over")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--no-prefill", action="store_true", help="leave out prefill chunks")
    parser.add_argument("--json", type=Path, help="write all figures there")
    options = parser.parse_args()
    found: list[Measured] = []
    for threads in options.threads:
        for name in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"):
            os.environ[name] = str(threads)
        with ProcessPoolExecutor(1, get_context("spawn")) as process:
            found += process.submit(on_threads, threads, tuple(options.rows)).result()
            if not options.no_prefill and threads == 1:
                prefill = process.submit(attention_prefill.rows).result()
    print_table(f"decode, {SIZE} channels, per layer and token", COLUMNS, [one.line() for one in found])
    if not options.no_prefill and 1 in options.threads:
        title = f"prefill, chunk of {attention_prefill.CHUNK}, one KV head of {attention_prefill.SIZE} channels, one thread"
        print_table(title, attention_prefill.COLUMNS, prefill)
    write_json(options.json, [asdict(one) for one in found])
    return 0 if _verdict(found) else 1


if __name__ == "__main__":
    raise SystemExit(main())
