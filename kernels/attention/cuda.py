"""Decode attention on CUDA: the programs, how rows are split over blocks, and the launches.

Where rows are, and how many, only the device knows when a launch runs; grids are made for planes that are
full. Every split of a query's rows leaves its part in the scratch, and parts are merged once; one split
alone is the result.

Rows that are rotated read as numbers in rotated space: queries are turned before, sums back behind.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np

from warmkv.kernels.attention.tiling import OCTET, Tiling, tiling
from warmkv.kernels.cuda.launch import Launcher, Program
from warmkv.kernels.cuda.numbers import FORMAT_NUMBERS
from warmkv.kernels.errors import KernelError
from warmkv.kernels.formats import RowFormat
from warmkv.kernels.resident.checks import MOST, require, require_counters, require_laid, require_sides, require_wide
from warmkv.kernels.resident.plane import Counters, ResidentPlane
from warmkv.kernels.turboquant import cuda as turned

_PRELUDE, _ROWS, _SPANS = "cuda/prelude.cu", "quant/rows.cu", "attention/spans.cu"
#: Processors of a device: those of an H200. Splits aim at blocks that all of them run side by side, once.
PROCESSORS = 132
#: Rows that are worth a block of their own, and splits that merging can take.
SPLIT_ROWS, MOST_SPLITS = 64, 128
#: Numbers of scratch beside each value channel, for turned queries.
TURNED = 8
_THREADS = 256


@lru_cache(maxsize=256)
def program(keys: RowFormat, key_size: int, values: RowFormat, value_size: int, group: int) -> tuple[Program, Tiling]:
    """What attends groups of ``group`` query heads over keys and values of these formats, and its shape."""
    words = (_words(keys, key_size), _words(values, value_size))
    shape = tiling(group, turned.width(keys, key_size), value_size, *words)
    defines = (
        ("KEY_FORMAT", FORMAT_NUMBERS[keys]), ("KEY_SIZE", key_size), ("VALUE_FORMAT", FORMAT_NUMBERS[values]),
        ("VALUE_SIZE", value_size), ("SHARED_BY", group), *shape.defines,
    )  # fmt: skip
    if not keys.rotated and not values.rotated:
        return Program((_PRELUDE, _ROWS, _SPANS, "attention/decode.cu"), defines), shape
    levels = turned.attention_defines(keys, key_size, values, value_size)
    return Program((_PRELUDE, _ROWS, turned.ROWS, _SPANS, turned.SPANS, "attention/decode.cu"), defines + levels), shape


def merge_program(size: int) -> Program:
    """What merges parts of heads of ``size`` channels."""
    return Program((_PRELUDE, "attention/merge.cu"), (("SIZE", size), ("THREADS", _THREADS)))


class Attention:
    """Launches on one device.

    **Threading:** one caller at a time."""

    def __init__(self, launcher: Launcher, turning: turned.Turning, blocks: int | None = None) -> None:
        """``blocks`` are what splits aim at; None: what a device runs side by side."""
        self._launcher, self._turning, self._blocks = launcher, turning, blocks

    def scratch_floats(self, heads: int, value_size: int, rows: int) -> int:
        """See `RowOperations.scratch_floats`: every split's output, maximum and sum of each head."""
        return heads * ((value_size + 2) * _most_splits(rows) + TURNED * value_size)

    def attend(
        self, q: Any, keys: ResidentPlane, values: ResidentPlane, counters: Counters, *, out: Any, scratch: Any, scale: float,
        window: int, softcap: float, sinks: Any | None,
    ) -> None:  # fmt: skip
        """See `RowOperations.attend_chunk`. The scratch is enough for any number of queries: where it is short, rows
        are split less, and queries that have to be turned are taken some at a time. Raises KernelError."""
        require_sides(keys, values)
        require_laid(keys, "keys")
        require_laid(values, "values")
        require_counters(counters)
        require(q, (None, None, keys.size), "queries")
        count, heads, _ = q.shape
        if heads < 1 or heads % keys.heads:
            raise KernelError(f"{heads} query heads over {keys.heads} KV heads, expected a multiple")
        require(out, (count, heads, values.size), "out")
        require(scratch, (None,), "scratch")
        require_wide(scratch, values.size, "scratch")
        if sinks is not None:
            require(sinks, (heads,), "sinks")
        if window < 0 or softcap < 0:
            raise KernelError(f"a window of {window} rows, a soft cap of {softcap}")
        width = heads * turned.width(keys.format, keys.size) if keys.turn is not None else 0
        at_once = min(count, scratch.size // width) if width else count
        if count and not at_once:
            raise KernelError(f"scratch: {scratch.size} numbers, expected at least {width} for turned queries")
        if count * heads * max(turned.width(keys.format, keys.size), values.size) > MOST:
            raise KernelError(f"{count} queries of {heads} heads at once, more than a launch can count")
        for first in range(0, count, max(1, at_once)):
            part, to = q[first : first + at_once], out[first : first + at_once]
            left = scratch
            if keys.turn is not None:
                part, left = scratch[: len(to) * width], scratch[len(to) * width :]
                self._turning.queries(q[first : first + at_once], keys.format, keys.turn, part)
            self._split(part, count - first, keys, values, counters, to, left, scale, window, softcap, sinks)
            if values.turn is not None:
                self._turning.values(to, values.turn)

    def merge(self, outs: Any, tops: Any, totals: Any, out: Any) -> None:
        """See `RowOperations.merge`. Raises KernelError."""
        require(outs, (None, None, None), "outputs of parts")
        require_wide(outs, outs.shape[2], "outputs of parts")
        require(tops, outs.shape[:2], "largest logits of parts")
        require(totals, outs.shape[:2], "sums of parts")
        require(out, outs.shape[1:], "out")
        if not outs.shape[0]:
            raise KernelError("no parts to merge")
        self._merge(outs, tops, totals, None, out, outs.shape[0], outs.shape[1], outs.shape[1], outs.shape[2])

    def _split(
        self, q: Any, newest: int, keys: ResidentPlane, values: ResidentPlane, counters: Counters, out: Any, scratch: Any,
        scale: float, window: int, softcap: float, sinks: Any | None,
    ) -> None:  # fmt: skip
        """Queries of ``out``'s shape, the first of them ``newest`` positions before the length, over as many splits
        as fill the device and fit the scratch."""
        count, heads, size = out.shape
        if not count:
            return
        attend, shape = program(keys.format, keys.size, values.format, size, heads // keys.heads)
        seen = min(keys.rows, window) if window else keys.rows
        beside = count * keys.heads * shape.sections
        room = scratch.size // (count * heads * (size + 2))
        blocks = PROCESSORS * shape.beside if self._blocks is None else self._blocks
        splits = max(1, min(_most_splits(seen), blocks // beside, room))
        outs, tops, totals = out, None, None
        if splits > 1:
            rows = splits * count * heads
            outs, tops, totals = scratch[: rows * size], scratch[rows * size : rows * (size + 1)], scratch[rows * (size + 1) :]
        self._launcher.launch(
            attend, "attend", (splits * count, keys.heads * shape.sections, 1), shape.threads,
            (q, keys.data, values.data, keys.field, values.field, sinks, counters.length,
             counters.base, outs, tops, totals, np.int32(newest), np.int32(count), np.int32(keys.heads),
             np.int32(keys.row_bytes // keys.heads), np.int32(values.row_bytes // values.heads), np.int32(keys.rows),
             np.int32(window), np.int32(splits), np.float32(scale), np.float32(softcap)),
        )  # fmt: skip
        if splits > 1:
            self._merge(outs, tops, totals, sinks, out, splits, count * heads, heads, size)

    def _merge(
        self, outs: Any, tops: Any, totals: Any, sinks: Any | None, out: Any, parts: int, rows: int, heads: int, size: int
    ) -> None:  # fmt: skip
        if rows and size:
            self._launcher.launch(
                merge_program(size), "merge", (rows, 1, 1), _THREADS,
                (outs, tops, totals, sinks, out, np.int32(parts), np.int32(rows), np.int32(heads)),
            )  # fmt: skip


def _most_splits(rows: int) -> int:
    return max(1, min(MOST_SPLITS, -(-rows // SPLIT_ROWS)))


def _words(format_: RowFormat, size: int) -> int:
    """Registers that `spans.cu` loads an octet into, at most."""
    return OCTET if format_ is RowFormat.F32 or size % OCTET else OCTET // 2
