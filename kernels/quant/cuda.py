"""Rows into planes of a device and back, by CUDA: what `quant.reference` is for blocks, byte by byte.

Rotated formats have kernels of their own, see `turboquant.cuda`.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from warmkv.kernels.cuda.launch import Launcher, Program
from warmkv.kernels.cuda.numbers import FORMAT_NUMBERS
from warmkv.kernels.errors import KernelError
from warmkv.kernels.formats import RowFormat
from warmkv.kernels.resident.checks import MOST, address, require, require_rows, require_wide, told
from warmkv.kernels.resident.plane import Counters, ResidentPlane

THREADS = 256
#: Numbers that a thread has to do with; sources take whatever grid there is.
PER_THREAD = 4
#: The widest words that rows of a gather may be moved in.
WORDS = (16, 8, 4, 2, 1)

_ADVANCE = Program(("cuda/prelude.cu", "resident/advance.cu"))


def program(kernel: str, format_: RowFormat, heads: int, size: int, *, keys: bool) -> Program:
    """That of ``kernel`` ("append" or "decode") for planes of these rows. Raises KernelError for rotated formats."""
    if format_.rotated:
        raise KernelError(f"rows of {format_.value} are stored and read by `turboquant.cuda`")
    # Of the others one program serves both sides.
    side = keys or not format_.quantised
    defines = ("FORMAT", FORMAT_NUMBERS[format_]), ("KEYS", int(side)), ("HEADS", heads), ("SIZE", size)
    return Program(("cuda/prelude.cu", "quant/rows.cu", f"quant/{kernel}.cu"), defines)


def append(launcher: Launcher, plane: ResidentPlane, rows: Any, counters: Counters) -> None:
    """See `RowOperations.append`: rows that the plane has no room for are left out. The numbers are not looked
    at; what has no place in the format (NaN, infinity) is stored as some number.
    Raises KernelError."""
    count = _checked(plane, rows, None, "rows")
    if count:
        arguments = rows, plane.data, plane.field, counters.length, counters.base, np.int32(count), np.int32(plane.rows)
        launcher.launch(_program("append", plane), "append", grid(rows.size), THREADS, arguments)


def decode(launcher: Launcher, plane: ResidentPlane, first: int, last: int, out: Any) -> None:
    """See `RowOperations.decode`. Raises KernelError."""
    require_rows(plane, first, last)
    _checked(plane, out, last - first, "out")
    if last > first:
        arguments = plane.data, plane.field, np.int32(first), np.int32(last - first), out
        launcher.launch(_program("decode", plane), "decode", grid(out.size), THREADS, arguments)


def advance(launcher: Launcher, counters: Counters, count: int) -> None:
    """See `RowOperations.advance`."""
    launcher.launch(_ADVANCE, "advance", (1, 1, 1), 1, (counters.length, np.int32(count)))


def gather(launcher: Launcher, plane: ResidentPlane, kept: Any, scratch: Any) -> None:
    """See `RowOperations.gather`. Raises KernelError."""
    require(kept, (None,), "kept rows", np.int32)
    require(scratch, (None,), "scratch", np.uint8)
    count, row_bytes = len(kept), plane.row_bytes
    if count > plane.rows or scratch.size < count * row_bytes:
        raise KernelError(f"{count} of {plane.rows} rows through a scratch of {scratch.size} bytes, expected {count * row_bytes}")
    word = next(word for word in WORDS if row_bytes % word == 0)
    if address(scratch) % word:
        raise KernelError(f"scratch: {told(scratch)} begins at an address that is no multiple of {word} bytes")
    words = count * row_bytes // word
    if words > MOST:
        raise KernelError(f"{words} words in one launch, expected at most {MOST}")
    if count:
        code = gather_program(word)
        out = plane.data, kept, np.int32(count), np.int32(plane.rows), np.int32(row_bytes // word), scratch
        launcher.launch(code, "gather", grid(words), THREADS, out)
        launcher.launch(code, "put", grid(words), THREADS, (scratch, np.int32(words), plane.data))


def gather_program(word: int) -> Program:
    """That of `gather` for rows moved in words of so many bytes."""
    return Program(("cuda/prelude.cu", "resident/gather.cu"), (("WORD", word),))


def grid(numbers: int) -> tuple[int, int, int]:
    """Blocks of THREADS for so many numbers."""
    return (-(-numbers // (THREADS * PER_THREAD)), 1, 1)


def _program(kernel: str, plane: ResidentPlane) -> Program:
    return program(kernel, plane.format, plane.heads, plane.size, keys=plane.keys)


def _checked(plane: ResidentPlane, rows: Any, count: int | None, what: str) -> int:
    """How many rows there are, of ``count`` if that is given. Raises KernelError for others, and for too many."""
    require(rows, (count, plane.heads, plane.size), what)
    require_wide(rows, plane.size, what)
    if rows.size > MOST:
        raise KernelError(f"{what}: {rows.size} numbers in one launch, expected at most {MOST}")
    return int(rows.shape[0])
