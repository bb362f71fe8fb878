"""Rows as TurboQuant stores them, plane by plane, and the norms it refuses.

Planes grow by whole rows: their first axis counts tokens, so that new rows are written behind old ones
and no stored byte changes. A row of one head with d channels, n its length, u = R k / n:

    keys        codes d/4 (two bits of every u_i), signs d/8 (of the second rotation of what the codes
                leave over), norms 2 (n, float16), residuals 2 (length of what is left over, float16)
    values      codes d/4, norms 2
    plain keys  codes 3d/8 (three bits of every u_i), norms 2: format `tq3`, ours

Bits lie as `packing` says. Arrays of one head (`head`) have shape (rows, bytes) and (rows,), those of a
layer (rows, heads, bytes) and (rows, heads); they are views wherever they can be.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Self

import numpy as np
import numpy.typing as npt

from warmkv.kernels.errors import KernelError, NotFinite
from warmkv.kernels.turboquant.packing import U8, packed_bytes

F16 = npt.NDArray[np.float16]
_HALF = np.dtype("<f2")


class NormRefused(NotFinite):
    """A row whose length is not finite, or too large for float16. ``row`` counts within what was handed
    in, ``position`` is that of the token in its sequence."""

    def __init__(self, what: str, row: int, head: int, position: int, norm: float) -> None:
        super().__init__(
            f"{what}: the row of head {head} at position {position} has length {norm}; "
            f"expected a finite one below {float(np.finfo(np.float16).max):g}, the largest float16",
            row,
        )
        self.head = head
        self.position = position
        self.norm = norm


@dataclass(frozen=True, slots=True)
class Planes:
    """What all three have in common. ``bits`` of a plane: packed codes of so many bits; 0: float16."""

    bits: ClassVar[dict[str, int]] = {}
    size: int
    codes: U8
    norms: F16

    def __len__(self) -> int:
        return int(self.norms.shape[0])

    @classmethod
    def row_bytes(cls, size: int) -> int:
        """Bytes of one row of one head."""
        return sum(packed_bytes(bits, size) if bits else _HALF.itemsize for bits in cls.bits.values())

    @classmethod
    def empty(cls, rows: int, heads: int, size: int) -> Self:
        """Zeroed planes of a layer."""
        arrays: dict[str, Any] = {
            name: np.zeros((rows, heads, packed_bytes(bits, size)), np.uint8) if bits else np.zeros((rows, heads), _HALF)
            for name, bits in cls.bits.items()
        }
        return cls(size, **arrays)

    def rows(self, first: int, last: int) -> Self:
        """Rows [first, last), as views."""
        return self._each(lambda plane: plane[first:last])

    def head(self, index: int) -> Self:
        """The rows of one head of a layer, as views."""
        return self._each(lambda plane: plane[:, index])

    def put(self, first: int, other: Self) -> None:
        """Write the rows of ``other`` from row ``first`` on, in place. Raises KernelError, having
        written nothing, where they do not fit."""
        given, own = (*other.norms.shape[1:], other.size), (*self.norms.shape[1:], self.size)
        if given != own or not 0 <= first <= len(self) - len(other):
            raise KernelError(
                f"{len(other)} rows of (heads, channels) {given} do not fit from row {first} on into {len(self)} rows of {own}"
            )
        for name in self.bits:
            getattr(self, name)[first : first + len(other)] = getattr(other, name)

    def check(self, axes: int, where: str) -> None:
        """Raises KernelError unless all planes have the shapes and dtypes of ``axes`` leading axes."""
        lead = self.norms.shape
        for name, bits in self.bits.items():
            plane = getattr(self, name)
            shape = (*lead, packed_bytes(bits, self.size)) if bits else lead
            dtype = np.dtype(np.uint8) if bits else _HALF
            if len(lead) != axes or plane.shape != shape or plane.dtype != dtype:
                raise KernelError(
                    f"{where}: {name} are {plane.dtype} of shape {plane.shape}, expected {dtype} of {shape}, {axes} axes of rows"
                )

    def _each(self, change: Callable[[npt.NDArray[Any]], npt.NDArray[Any]]) -> Self:
        return type(self)(self.size, **{item.name: change(getattr(self, item.name)) for item in fields(self)[1:]})


@dataclass(frozen=True, slots=True)
class KeyPlanes(Planes):
    """Two bits a coordinate and a sign of the rest: 3d/8 + 4 bytes a row."""

    bits: ClassVar[dict[str, int]] = {"codes": 2, "signs": 1, "norms": 0, "residuals": 0}
    signs: U8
    residuals: F16


@dataclass(frozen=True, slots=True)
class ValuePlanes(Planes):
    """Two bits a coordinate: d/4 + 2 bytes a row."""

    bits: ClassVar[dict[str, int]] = {"codes": 2, "norms": 0}


@dataclass(frozen=True, slots=True)
class PlainKeyPlanes(Planes):
    """Format `tq3`, three bits a coordinate and nothing else: 3d/8 + 2 bytes a row."""

    bits: ClassVar[dict[str, int]] = {"codes": 3, "norms": 0}
