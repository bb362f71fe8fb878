"""TurboQuant on CUDA: the programs, the tables they read, and their launches.

Rows are written and read as `reference` does it, to the bit. Attention over rotated rows is that over any others:
a row reads as numbers in rotated space (`rows.cu`), of which a query has as many (`Turning.queries`), and what was
summed there is turned back once (`Turning.values`).
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np

from warmkv.kernels.cuda.launch import Launcher, Program
from warmkv.kernels.cuda.numbers import FORMAT_NUMBERS
from warmkv.kernels.errors import KernelError
from warmkv.kernels.formats import F32, RowFormat
from warmkv.kernels.resident.checks import require, require_rows, require_wide, told
from warmkv.kernels.resident.plane import Counters, ResidentPlane
from warmkv.kernels.turboquant.block import PLANES
from warmkv.kernels.turboquant.levels import levels
from warmkv.kernels.turboquant.rotation import Rotation
from warmkv.kernels.turboquant.turn import Turn

#: Channels of a row that a warp keeps in registers, at most.
MAX_SIZE = 1024
#: Warps of a block, and threads of one.
WARPS, LANES = 4, 32
#: Blocks that are worth starting: twice what processors of an H200 have at a time.
BLOCKS = 2 * 16 * 132
#: What an attention program with a rotated side has, the one behind `quant/rows.cu`, the other behind
#: `attention/spans.cu`.
ROWS = "turboquant/rows.cu"
SPANS = "turboquant/spans.cu"
_TURNED = ("cuda/prelude.cu", "turboquant/rotate.cu", "turboquant/attend.cu")
_STORED = ("cuda/prelude.cu", "quant/rows.cu", "turboquant/rotate.cu", ROWS, "turboquant/append.cu", "turboquant/decode.cu")

Defines = tuple[tuple[str, int], ...]


def width(format_: RowFormat, size: int) -> int:
    """Numbers of a row as attention reads it, and so of its query: WIDTH of `Row` in `rows.cu`."""
    return 2 * size if format_ is RowFormat.TQ_KEY else size


def attention_defines(keys: RowFormat, key_size: int, values: RowFormat, value_size: int) -> Defines:
    """What `rows.cu` needs to know of the sides that are rotated: their levels. Raises KernelError."""
    sides = ((keys, key_size), (values, value_size))
    return tuple(define for format_, size in sides if format_.rotated for define in _level_defines(format_, size))


class Turning:
    """Launches on one device. Tables of a rotation are uploaded when it is first met and then stay where they are,
    since captured launches read them: about 8 bytes a channel for each layer of a model.

    **Threading:** one caller at a time."""

    def __init__(self, launcher: Launcher, blocks: int = BLOCKS) -> None:
        """``blocks`` are the most that one launch has: from there on, warps take several rows each."""
        self._launcher, self._blocks = launcher, blocks
        self._tables: dict[Rotation, Any] = {}
        #: int32 (1,) on the device: rows so far that `append` stored as zeros since float16 cannot hold their length.
        self.refused: Any = launcher.constant(np.zeros(1, np.int32))

    def append(self, plane: ResidentPlane, rows: Any, counters: Counters) -> None:
        """See `RowOperations.append`; what does not fit into the plane is left out. A row whose length is no finite
        float16 becomes a row of zeros and counts in `refused`: who has it on the host refuses it before. Raises
        KernelError."""
        turn = _turn(plane)
        require(rows, (None, plane.heads, plane.size), "rows")
        require_wide(rows, plane.size, "rows")
        self._launch(
            _stored(plane.format, plane.size), "append_turned", rows.shape[0] * plane.heads,
            (rows, plane.data, counters.length, counters.base, self.table(turn.rotation), self.refused, turn.rotation.scale,
             np.int32(rows.shape[0]), np.int32(plane.heads), np.int32(plane.rows)),
        )  # fmt: skip

    def decode(self, plane: ResidentPlane, first: int, last: int, out: Any) -> None:
        """See `RowOperations.decode`: the numbers of `block.decode`. Raises KernelError."""
        turn, count = _turn(plane), (last - first) * plane.heads
        require_rows(plane, first, last)
        require(out, (last - first, plane.heads, plane.size), "out")
        require_wide(out, plane.size, "out")
        self._launch(
            _stored(plane.format, plane.size), "decode_turned", count,
            (plane.data, out, self.table(turn.rotation), turn.rotation.scale, np.float32(turn.kappa),
             np.int64(first * plane.heads), np.int64(count)),
        )  # fmt: skip

    def queries(self, q: Any, format_: RowFormat, turn: Turn, out: Any) -> None:
        """Turn queries ``q`` (..., size) float32 for rows of keys of a rotated format, to ``out``, flat float32 of
        `width` numbers a query or more. Raises KernelError."""
        count = _count(q, turn.size)
        require(out, (None,), "turned queries")
        require_wide(out, turn.size, "turned queries")
        if out.size < count * width(format_, turn.size):
            raise KernelError(f"turned queries: {told(out)} for {count} queries of {width(format_, turn.size)} numbers")
        again = np.int32(format_ is RowFormat.TQ_KEY)
        self._launch(
            _turned(turn.size), "turn_queries", count,
            (q, out, self.table(turn.rotation), turn.rotation.scale, np.float32(turn.kappa), again, np.int32(count)),
        )  # fmt: skip

    def values(self, sums: Any, turn: Turn) -> None:
        """Turn weighted sums of rotated values ``sums`` (..., size) float32 back, in place. Raises KernelError."""
        count = _count(sums, turn.size)
        self._launch(
            _turned(turn.size), "turn_back", count,
            (sums, self.table(turn.rotation), turn.rotation.scale, np.int32(count)),
        )  # fmt: skip

    def table(self, rotation: Rotation) -> Any:
        """The device's copy of both signs and the mixing matrix, one after the other."""
        found = self._tables.get(rotation)
        if found is None:
            parts = rotation.polar, rotation.jl, rotation.mix.ravel()
            found = self._tables[rotation] = self._launcher.constant(np.concatenate(parts).astype(np.float32))
        return found

    def _launch(self, program: Program, kernel: str, rows: int, arguments: tuple[Any, ...]) -> None:
        if rows:
            grid = min(self._blocks, -(-rows // WARPS)), 1, 1
            self._launcher.launch(program, kernel, grid, LANES * WARPS, arguments)


@lru_cache(maxsize=64)
def _stored(format_: RowFormat, size: int) -> Program:
    """What writes and reads rows of a format."""
    bounds = _numbers("BOUND", levels(size, _bits(format_)).bounds)
    fixed = ("FORMAT", FORMAT_NUMBERS[format_]), ("SIZE", size), ("WARPS", WARPS)
    return Program(_STORED, (*fixed, *_level_defines(format_, size), *bounds))


@lru_cache(maxsize=64)
def _turned(size: int) -> Program:
    """What turns queries and sums."""
    return Program(_TURNED, (("SIZE", size), ("WARPS", WARPS)))


def _turn(plane: ResidentPlane) -> Turn:
    """Raises KernelError unless a plane is of rotated rows and says by what."""
    if not plane.format.rotated or plane.turn is None or plane.turn.size != plane.size:
        raise KernelError(f"rows of {plane.format.value} with {plane.size} channels, rotated as {plane.turn}")
    _check_size(plane.size)
    return plane.turn


def _check_size(size: int) -> None:
    if size > MAX_SIZE:
        raise KernelError(f"rotated rows of {size} channels: expected at most {MAX_SIZE} on a device")


def _count(rows: Any, size: int) -> int:
    """How many rows (..., size) an array has."""
    _check_size(size)
    if rows.shape[-1:] != (size,) or rows.dtype != np.float32 or not rows.flags.c_contiguous:
        raise KernelError(f"rows: {told(rows)}, expected contiguous float32 (..., {size})")
    require_wide(rows, size, "rows")
    return int(rows.size) // size


def _bits(format_: RowFormat) -> int:
    return PLANES[format_].bits["codes"]


@lru_cache(maxsize=64)
def _level_defines(format_: RowFormat, size: int) -> Defines:
    _check_size(size)
    side = "KEY" if format_.stores(keys=True) else "VALUE"
    return _numbers(f"{side}_LEVEL", levels(size, _bits(format_)).centroids)


def _numbers(name: str, numbers: F32) -> Defines:
    """The positive ones of float32 constants as what a define can be: their bits."""
    return tuple((f"{name}_{index}", int(bits)) for index, bits in enumerate(numbers[numbers > 0].view(np.uint32)))
