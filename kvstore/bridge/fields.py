"""The frozen fields of a layer's quantised planes, as one plane of its records.

Keys' field (heads, size), then values', flat, float32: of the planes that are quantised. Its digest is
BLAKE2b-128 of these bytes, and rows name it.
"""

from __future__ import annotations

import hashlib
from typing import Union

import numpy as np
import numpy.typing as npt

from warmkv.kernels.formats import F32
from warmkv.kvstore.bridge.specs import Side
from warmkv.kvstore.live.layers.attention import AttentionLayer
from warmkv.kvstore.live.layers.base import where
from warmkv.schema.errors import FormatError, RecordError

Fields = tuple[Union[F32, None], ...]


def joined(layer: AttentionLayer) -> F32 | None:
    """The field plane's row (1, n), copied; None while the fields are open or where there are none.

    Raises RecordError where one plane's field is frozen and the other's is not."""
    planes = [plane for plane in (layer.keys, layer.values) if plane.format.quantised]
    fields = [plane.field for plane in planes]
    parts = [field.reshape(1, -1) for field in fields if field is not None]
    if len(parts) not in (0, len(planes)):
        raise RecordError(f"{where(layer.plan, layer.index)}: one of its two fields is frozen, expected both or none")
    return np.concatenate(parts, axis=1, dtype=np.float32) if parts else None


def digest(row: F32) -> bytes:
    """What rows name a field by."""
    return hashlib.blake2b(np.ascontiguousarray(row, "<f4").tobytes(), digest_size=16).digest()


def split(row: npt.NDArray[np.generic] | None, sides: tuple[Side, ...], name: str) -> Fields:
    """By side its field (heads, size) of a plane's row (n,), as views; None where it has none.

    Raises FormatError for numbers that cannot be a field."""
    if row is None:
        return (None,) * len(sides)
    numbers = np.asarray(row, np.float32)
    if not (np.isfinite(numbers).all() and (numbers > 0).all()):
        raise FormatError(f"{name}: a field with numbers that are not above 0 and finite")
    found: list[F32 | None] = []
    at = 0
    for side in sides:
        count = side.heads * side.size if side.format.quantised else 0
        found.append(numbers[at : at + count].reshape(side.heads, side.size) if count else None)
        at += count
    if at != numbers.size:
        raise FormatError(f"{name}: a field of {numbers.size} numbers, expected {at}")
    return tuple(found)
