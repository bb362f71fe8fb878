"""What tests of attention on CUDA share: a cache on a machine, beside what it means in float64."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from warmkv.kernels.dispatch import kernels
from warmkv.kernels.formats import RowFormat
from warmkv.kernels.resident.host import HostOperations
from warmkv.kernels.resident.plane import TAIL_PAD, Counters, ResidentPlane
from warmkv.kernels.testing import rows as some
from warmkv.kernels.testing import softmax_attention
from warmkv.kernels.turboquant.rotation import Rotation
from warmkv.kernels.turboquant.turn import Turn

F32 = npt.NDArray[np.float32]
F64 = npt.NDArray[np.float64]
#: Byte of rows that nobody wrote: NaN in every format that has one, also as a float16 scale.
UNWRITTEN = 0xFF
#: What attention may differ by, of the largest number of a head.
TOLERANCE = 1e-5


def counted(length: int, base: int = 0) -> Counters:
    return Counters(np.array([length], np.int32), np.array([base], np.int32))


def unwritten(format_: RowFormat, heads: int, size: int, capacity: int, *, keys: bool) -> ResidentPlane:
    """A plane on the host; q8_2f has a field, rotated formats are turned somehow."""
    bytes_ = capacity * heads * format_.row_bytes(size, keys=keys) + TAIL_PAD
    field = None
    if format_.quantised:
        field = np.random.default_rng(size).uniform(0.25, 4, (heads, size)).astype(np.float32)
    turn = Turn(Rotation.of(42, 1, size)) if format_.rotated else None
    return ResidentPlane(format_, heads, size, keys, capacity, np.full(bytes_, UNWRITTEN, np.uint8), field, turn)


def moved(machine: Any, plane: ResidentPlane) -> ResidentPlane:
    """A host's plane on a machine."""
    field = None if plane.field is None else machine.put(plane.field)
    return ResidentPlane(
        plane.format, plane.heads, plane.size, plane.keys, plane.rows, machine.put(plane.data), field, plane.turn
    )


@dataclass
class Cache:
    """Planes of a machine that hold ``keys`` and ``values`` (rows, KV heads, size) float64, once stored, at physical
    rows from 0 on, row 0 being position ``base``."""

    machine: Any
    planes: tuple[ResidentPlane, ResidentPlane]
    keys: F64
    values: F64
    base: int = 0

    @classmethod
    def of(
        cls, machine: Any, formats: tuple[RowFormat, RowFormat], sizes: tuple[int, int], rows: int, *, heads: int = 2,
        capacity: int | None = None, base: int = 0, keys: F32 | None = None, values: F32 | None = None,
    ) -> Cache:  # fmt: skip
        """Rows as given, or of some numbers, stored on the host by the reference."""
        host, stored, meant = HostOperations(kernels("reference")), [], []
        for side, (format_, size, given) in enumerate(zip(formats, sizes, (keys, values), strict=True)):
            numbers = some(rows * heads, size, seed=7 + side).reshape(rows, heads, size) if given is None else given
            room = rows if capacity is None else capacity
            plane = unwritten(format_, heads, size, room, keys=side == 0)
            host.append(plane, numbers, counted(0))
            decoded = np.empty(numbers.shape, np.float32)
            host.decode(plane, 0, rows, decoded)
            stored.append(moved(machine, plane))
            meant.append(decoded.astype(np.float64))
        return cls(machine, (stored[0], stored[1]), meant[0], meant[1], base)

    def attended(
        self, operations: Any, q: F32, *, length: int | None = None, scale: float = 0.02, window: int = 0, softcap: float = 0.0,
        sinks: F32 | None = None, scratch: int | None = None,
    ) -> F32:  # fmt: skip
        """Queries (n, heads, size) of the newest positions, out and scratch poisoned before."""
        put, (keys, values) = self.machine.put, self.planes
        length = len(self.keys) if length is None else length
        floats = operations.scratch_floats(q.shape[1], values.size, keys.rows) if scratch is None else scratch
        out = put(np.full((*q.shape[:2], values.size), np.nan, np.float32))
        counters = counted(self.base + length, self.base)
        operations.attend_chunk(
            put(q), keys, values, Counters(put(counters.length), put(counters.base)), out=out,
            scratch=put(np.full(floats, np.nan, np.float32)), scale=scale, window=window, softcap=softcap,
            sinks=None if sinks is None else put(sinks),
        )  # fmt: skip
        found: F32 = self.machine.get(out)
        return found

    def expected(
        self, q: F32, *, length: int | None = None, scale: float = 0.02, window: int = 0, softcap: float = 0.0,
        sinks: F32 | None = None,
    ) -> F64:  # fmt: skip
        """The same in float64, one softmax over all rows."""
        length = len(self.keys) if length is None else length
        heads = self.keys.shape[1]
        group, out = q.shape[1] // heads, np.zeros((*q.shape[:2], self.values.shape[2]))
        for token in range(len(q)):
            upto = length - len(q) + token + 1
            # Rows before the base are gone, whatever the window.
            first = max(0, self.base + upto - window - self.base) if window else 0
            for head in range(heads):
                part = slice(head * group, (head + 1) * group)
                if upto > first:
                    out[token, part] = softmax_attention(
                        q[token, part].astype(np.float64), self.keys[first:upto, head], self.values[first:upto, head],
                        float(np.float32(scale)), 0, upto - first, softcap, None if sinks is None else sinks[part].tolist(),
                    )[0]  # fmt: skip
        return out


def queries(tokens: int, heads: int, size: int, seed: int = 3) -> F32:
    return np.random.default_rng(seed).standard_normal((tokens, heads, size)).astype(np.float32)


def assert_close(found: F32, expected: F64, tolerance: float = TOLERANCE) -> None:
    """Each head within the tolerance of its largest number."""
    assert found.shape == expected.shape
    off = np.abs(found - expected).max(axis=-1, initial=0)
    assert (off <= tolerance * np.abs(expected).max(axis=-1, initial=0)).all(), off.max()


class Deaf:
    """A launcher that nothing may be launched by."""

    def launch(self, *arguments: Any, **more: Any) -> None:
        raise AssertionError("launched")

    def constant(self, values: Any) -> Any:
        return values
