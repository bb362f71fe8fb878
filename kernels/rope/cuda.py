"""Keys turned on CUDA, where they lie: the program, its tables, and the launch."""

from __future__ import annotations

from typing import Any

import numpy as np

from warmkv.kernels.cuda.launch import Launcher, Program
from warmkv.kernels.cuda.numbers import FORMAT_NUMBERS
from warmkv.kernels.errors import KernelError
from warmkv.kernels.formats import RowFormat
from warmkv.kernels.resident.checks import MOST, require_plane, require_rows, require_turnable
from warmkv.kernels.resident.plane import ResidentPlane
from warmkv.kernels.rope.reference import Pairs, Rope

#: Formats whose keys can be turned.
TURNABLE = frozenset({RowFormat.F32, RowFormat.F16, RowFormat.BF16})
#: Tables kept: layers of a model share one, and the same shift is made of all of them.
TABLES = 8
_THREADS = 256


def program(format_: RowFormat, rope: Rope) -> Program:
    """What turns keys of that format."""
    defines = (
        ("FORMAT", FORMAT_NUMBERS[format_]), ("SIZE", rope.size), ("TURNED", rope.turned),
        ("NEOX", int(rope.pairs is Pairs.NEOX)),
    )  # fmt: skip
    return Program(("cuda/prelude.cu", "rope/shift.cu"), defines)


class Shifting:
    """Launches on one device. Angles are taken on the host, in float64, and their cosines and sines uploaded.

    **Threading:** one caller at a time."""

    def __init__(self, launcher: Launcher) -> None:
        self._launcher = launcher
        self._tables: dict[tuple[Rope, int], Any] = {}

    def shift(self, plane: ResidentPlane, first: int, last: int, delta: int, rope: Rope) -> None:
        """See `RowOperations.shift`: the numbers of `rope.reference.shift`, but that halves which grow beyond
        their format become infinite. Raises KernelError."""
        require_turnable(plane, rope, TURNABLE)
        require_plane(plane, "keys")
        require_rows(plane, first, last)
        heads = (last - first) * plane.heads
        blocks = -(-heads * (rope.turned // 2) // _THREADS)
        if blocks > MOST:
            raise KernelError(f"{last - first} rows of {plane.heads} heads at once, more than a launch can count")
        if blocks and delta:
            self._launcher.launch(
                program(plane.format, rope), "shift", (blocks, 1, 1), _THREADS,
                (plane.data, self._table(rope, delta), np.int64(first * plane.heads), np.int64(heads)),
            )  # fmt: skip

    def _table(self, rope: Rope, delta: int) -> Any:
        """Cosines and sines of a shift, (2, pairs) float32 on the device."""
        if (rope, delta) not in self._tables:
            angles = np.float64(delta) * rope.frequencies()
            while len(self._tables) >= TABLES:
                del self._tables[next(iter(self._tables))]
            self._tables[rope, delta] = self._launcher.constant(np.stack([np.cos(angles), np.sin(angles)]).astype(np.float32))
        return self._tables[rope, delta]
