"""What is handed to a layer, checked: the messages say what was found, what was expected and where."""

from __future__ import annotations

from collections.abc import Sequence, Sized

import numpy as np
import numpy.typing as npt

from warmkv.kernels.formats import F32
from warmkv.kernels.turboquant.planes import NormRefused
from warmkv.kernels.turboquant.reference import length, require_norms
from warmkv.kvstore.live.rows.base import PlaneRows
from warmkv.kvstore.live.rows.encoded import Indices
from warmkv.schema.errors import RecordError

#: Squares of lengths that fit float16 whatever order they were summed in.
_SURELY_SHORT = np.float32(65000.0**2)


def floats(array: F32, shape: tuple[int | None, ...], what: str) -> F32:
    """``array`` where it is float32 of ``shape`` (None: any length)."""
    if not isinstance(array, np.ndarray):
        raise RecordError(f"{what}: {type(array).__name__}, expected a numpy array")
    expected = tuple("n" if size is None else size for size in shape)
    fits = array.ndim == len(shape) and all(size in (None, found) for size, found in zip(shape, array.shape, strict=True))
    if array.dtype != np.float32 or not fits:
        raise RecordError(f"{what}: {array.dtype} of shape {array.shape}, expected float32 ({', '.join(map(str, expected))})")
    return array


def same_length(what: str, keys: Sized, values: Sized) -> None:
    if len(keys) != len(values):
        raise RecordError(f"{what}: {len(keys)} rows of keys, {len(values)} of values")


def finite(rows: F32, what: str, heads: Sequence[int], row: int, position: int) -> None:
    """Rows (n, heads, size) of KV heads numbered ``heads``, the first of which would be row ``row`` at
    ``position``, are all finite."""
    good = np.isfinite(rows).all(axis=2)
    if good.all():
        return
    at, head = (int(found) for found in np.argwhere(~good)[0])
    raise RecordError(
        f"{what}, KV head {heads[head]}, row {row + at} (position {position + at}): "
        "NaN or infinity, which a quantised format cannot hold"
    )


def lengths(rows: F32, what: str, heads: Sequence[int], row: int, position: int) -> None:
    """As `finite`: the lengths of rows fit float16, where a rotated format keeps them."""
    with np.errstate(over="ignore", invalid="ignore"):
        squares = np.einsum("ijk,ijk->ij", rows, rows)
        if (squares < _SURELY_SHORT).all():
            return
    try:
        require_norms(length(rows), what, position)
    except NormRefused as exc:
        raise RecordError(
            f"{what}, KV head {heads[exc.head]}, row {row + exc.row} (position {exc.position}): a length of {exc.norm}, "
            f"which float16 cannot hold"
        ) from exc


def indices(kept: Sequence[int] | npt.NDArray[np.integer], rows: int, what: str) -> Indices:
    """Row indices that ascend, as an array."""
    found = np.asarray(kept)
    if found.ndim != 1 or (found.size and not np.issubdtype(found.dtype, np.integer)):
        raise RecordError(f"{what}: rows to keep are {found.dtype} of shape {found.shape}, expected a list of indices")
    ascending = found.astype(np.intp)
    if len(ascending) and (ascending[0] < 0 or ascending[-1] >= rows or (np.diff(ascending) <= 0).any()):
        raise RecordError(f"{what}: rows to keep must ascend within 0 to {rows - 1}")
    return ascending


def same_makings(given: PlaneRows, mine: PlaneRows, what: str) -> None:
    """Whether a plane is made as this layer makes its own."""
    found, expected = ((plane.format.value, plane.heads, plane.size, plane.keys) for plane in (given, mine))
    if found != expected:
        raise RecordError(f"{what}: (format, heads, size, keys) are {found}, expected {expected}")
    if given.turn != mine.turn:
        raise RecordError(f"{what}: rows rotated as {given.turn}, expected {mine.turn}")


def adopted_places(what: str, rows: int, position: int, base: int, gapless: bool, window: int) -> None:
    """Whether so many rows can stand before ``position``, and are enough for the next query."""
    if base < 0 or (base + rows != position if gapless else base or rows > position):
        raise RecordError(f"{what}: {rows} {'gapless' if gapless else 'scattered'} rows from {base} to position {position}")
    if window and (not gapless or base > max(0, position - window + 1)):
        raise RecordError(f"{what}: rows from {base} on before position {position}, a window of {window} sees earlier ones")
