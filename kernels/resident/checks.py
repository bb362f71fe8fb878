"""What device arrays are checked for before a kernel is told of them: shape, dtype and place, never numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from warmkv.kernels.errors import KernelError
from warmkv.kernels.formats import RowFormat
from warmkv.kernels.resident.plane import TAIL_PAD, Counters, ResidentPlane
from warmkv.kernels.rope.reference import Rope

#: What grids and 32-bit places in kernels allow.
MOST = 2**31 - 1
#: Bytes that kernels read and write at once where rows are whole multiples of them.
WIDE = 16


def told(array: Any) -> str:
    """What an array is, for messages."""
    shape = getattr(array, "shape", None)
    return type(array).__name__ if shape is None else f"{getattr(array, 'dtype', '?')} {shape}"


def require(array: Any, shape: Sequence[int | None], name: str, dtype: type[np.generic] = np.float32) -> None:
    """Raises KernelError unless the array is contiguous, of that dtype and shape, None being any number."""
    there = getattr(array, "shape", ())
    fits = getattr(array, "dtype", None) == dtype and len(there) == len(shape)
    if not fits or any(want not in (None, have) for want, have in zip(shape, there, strict=True)):
        wanted = ", ".join("n" if want is None else str(want) for want in shape)
        raise KernelError(f"{name}: {told(array)}, expected {np.dtype(dtype).name} ({wanted})")
    if not array.flags.c_contiguous:
        raise KernelError(f"{name}: {told(array)} is not contiguous")


def require_wide(array: Any, size: int, name: str) -> None:
    """Raises KernelError unless float32 rows of ``size`` numbers begin where kernels can take them `WIDE` bytes at a
    time, where they are whole multiples of that. A GPU that is told otherwise does nothing any more, for anybody."""
    if size * 4 % WIDE == 0 and array.size and address(array) % WIDE:
        raise KernelError(f"{name}: {told(array)} begins at an address that is no multiple of {WIDE} bytes")


def require_laid(plane: ResidentPlane, name: str) -> None:
    """As `require_wide`, of a plane and its field."""
    if address(plane.data) % WIDE:
        raise KernelError(f"{name}: rows begin at an address that is no multiple of {WIDE} bytes")
    if plane.field is not None:
        require_wide(plane.field, plane.size, f"{name}: field")


def address(array: Any) -> int:
    """Where an array of the host or of a device begins."""
    place = getattr(array.data, "ptr", None)
    return int(array.ctypes.data if place is None else place)


def require_plane(plane: ResidentPlane, name: str) -> None:
    """Raises KernelError unless a plane is what it says it is."""
    format_, side = plane.format, "keys" if plane.keys else "values"
    refused = format_.refusal(plane.size)
    if refused is not None or not format_.stores(keys=plane.keys) or plane.heads < 1 or plane.size < 1:
        raise KernelError(f"{name}: {plane.heads} heads of {plane.size} channels as {side} in {format_.value}: {refused or 'no'}")
    if not 0 <= plane.rows <= MOST:
        raise KernelError(f"{name}: {plane.rows} rows")
    require(plane.data, (plane.rows * plane.row_bytes + TAIL_PAD,), f"{name}: rows", np.uint8)
    if plane.field is not None:
        if format_ is not RowFormat.Q8_2F:
            raise KernelError(f"{name}: a field beside rows of {format_.value}")
        require(plane.field, (plane.heads, plane.size), f"{name}: field")
    if format_.rotated != (plane.turn is not None) or (plane.turn is not None and plane.turn.size != plane.size):
        raise KernelError(f"{name}: rows of {format_.value} with {plane.size} channels, rotated as {plane.turn}")


def require_counters(counters: Counters) -> None:
    """Raises KernelError unless both are int32 (1,)."""
    require(counters.length, (1,), "length", np.int32)
    require(counters.base, (1,), "base", np.int32)


def require_rows(plane: ResidentPlane, first: int, last: int) -> None:
    """Raises KernelError unless [first, last) are rows of the plane."""
    if not 0 <= first <= last <= plane.rows:
        raise KernelError(f"rows [{first}, {last}) of a plane of {plane.rows}")


def require_sides(keys: ResidentPlane, values: ResidentPlane) -> None:
    """Raises KernelError unless the planes are keys and values of the same rows."""
    require_plane(keys, "keys")
    require_plane(values, "values")
    if not keys.keys or values.keys or (keys.heads, keys.rows) != (values.heads, values.rows):
        raise KernelError(
            f"{'keys' if keys.keys else 'values'} of {keys.rows} rows with {keys.heads} heads, and "
            f"{'keys' if values.keys else 'values'} of {values.rows} with {values.heads}: expected keys and values of the same"
        )


def require_turnable(plane: ResidentPlane, rope: Rope, formats: frozenset[RowFormat]) -> None:
    """Raises KernelError unless rows of a plane are keys that a rotation by ``rope`` commutes with."""
    if not plane.keys or plane.format not in formats:
        side, names = "keys" if plane.keys else "values", ", ".join(sorted(format_.value for format_ in formats))
        raise KernelError(f"{side} of {plane.format.value} cannot be turned where they lie, only keys of {names}")
    if rope.size != plane.size:
        raise KernelError(f"a rope of {rope.size} channels for keys of {plane.size}")
