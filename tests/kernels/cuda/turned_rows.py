"""What tests of TurboQuant on CUDA share: planes on a device, and an oracle in float64 that shares no code with it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from warmkv.kernels.cuda.launch import Launcher
from warmkv.kernels.formats import RowFormat
from warmkv.kernels.resident.plane import TAIL_PAD, Counters, ResidentPlane
from warmkv.kernels.turboquant.reference import Estimator
from warmkv.kernels.turboquant.rotation import Rotation
from warmkv.kernels.turboquant.turn import Turn

F32 = npt.NDArray[np.float32]
F64 = npt.NDArray[np.float64]
U8 = npt.NDArray[np.uint8]
#: Byte of a plane that nobody wrote.
UNWRITTEN = 0xA5
#: Positive levels of two bits by head size, times sqrt(d): published.
LEVELS = {
    32: (0.45142788, 1.48955953), 64: (0.45211895, 1.49997480), 96: (0.45234265, 1.50345285), 128: (0.45245325, 1.50519298),
    256: (0.45261758, 1.50780451),
}  # fmt: skip


class Machine(Protocol):
    """The fixture of that name."""

    @property
    def launcher(self) -> Launcher: ...

    @property
    def put(self) -> Callable[[Any], Any]: ...

    @property
    def get(self) -> Callable[[Any], Any]: ...


def some(rows: int, heads: int, size: int, seed: int = 0) -> F32:
    """Rows of very different lengths."""
    rng = np.random.default_rng(seed)
    return (rng.standard_normal((rows, heads, size)) * np.exp(rng.standard_normal((rows, heads, 1)))).astype(np.float32)


def turn_of(size: int, *, seed: int = 42, layer: int = 0, estimator: Estimator = Estimator.UNBIASED) -> Turn:
    return Turn(Rotation.of(seed, layer, size), estimator)


def plane_of(machine: Machine, format_: RowFormat, rows: int, heads: int, turn: Turn) -> ResidentPlane:
    """A plane whose bytes nobody wrote."""
    keys = format_.stores(keys=True)
    data = np.full(rows * heads * format_.row_bytes(turn.size, keys=keys) + TAIL_PAD, UNWRITTEN, np.uint8)
    return ResidentPlane(format_, heads, turn.size, keys, rows, machine.put(data), None, turn)


def counters_of(machine: Machine, length: int, base: int = 0) -> Counters:
    return Counters(machine.put(np.array([length], np.int32)), machine.put(np.array([base], np.int32)))


def nothing(machine: Machine, *shape: int) -> Any:
    """Numbers that nobody wrote, on the device."""
    return machine.put(np.full(shape, np.nan, np.float32))


def rows_of(machine: Machine, plane: ResidentPlane) -> U8:
    """Bytes (rows, heads, row bytes), on the host."""
    found: U8 = machine.get(plane.data)[:-TAIL_PAD].reshape(plane.rows, plane.heads, -1)
    return found


def dense(size: int) -> F64:
    """The flat orthogonal matrix of a size, whole: Hartley's of its odd factor times Hadamard's of the rest."""
    odd = size
    while odd % 2 == 0:
        odd //= 2
    angles = 2 * np.pi * np.outer(np.arange(odd), np.arange(odd)) / odd
    matrix: F64 = np.cos(angles) + np.sin(angles)
    while len(matrix) < size:
        matrix = np.kron(matrix, np.array([[1.0, 1.0], [1.0, -1.0]]))
    return matrix / np.sqrt(size)


@dataclass(frozen=True)
class Oracle:
    """Rows of two bits a coordinate, and what they leave over, by dense products and searching."""

    rotated: F64
    bounds: F64
    codes: npt.NDArray[np.int64]
    flat: F64
    norms: F64
    rho: F64

    @classmethod
    def of(cls, x: F32, rotation: Rotation) -> Oracle:
        """Of rows (..., size)."""
        size = x.shape[-1]
        inner, outer = np.array(LEVELS[size]) / np.sqrt(size)
        levels = np.array([-outer, -inner, inner, outer])
        bounds = (levels[1:] + levels[:-1]) / 2
        wide = x.astype(np.float64)
        norms = np.linalg.norm(wide, axis=-1)
        rotated = (wide / norms[..., None] * rotation.polar) @ dense(size)
        codes = np.searchsorted(bounds, rotated, side="right")
        left = rotated - levels[codes]
        rho = np.linalg.norm(left, axis=-1)
        return cls(rotated, bounds, codes, (left * rotation.jl) @ dense(size) / rho[..., None], norms, rho)

    @property
    def sure(self) -> npt.NDArray[np.bool_]:
        """Where a coordinate is not so near a bound that float32 may take the other side."""
        size = self.rotated.shape[-1]
        apart: F64 = np.abs(self.rotated[..., None] - self.bounds).min(axis=-1)
        return apart >= 4 * size**0.5 * 2.0**-24


def bits(packed: U8, each: int) -> npt.NDArray[np.int64]:
    """Codes (..., count) of ``each`` bits in bytes (..., bytes), from the lowest bit on."""
    flat = np.unpackbits(packed, axis=-1, bitorder="little").astype(np.int64)
    return flat.reshape(*packed.shape[:-1], -1, each) @ (1 << np.arange(each))
