"""TurboQuant rows as blocks: packed bytes, and what is needed to read them.

A row of one head is one run of bytes, its planes one after the other as `planes` lists them:

    tq_key     codes d/4    signs d/8    norm 2    residual 2
    tq_value   codes d/4    norm 2
    tq3        codes 3d/8   norm 2

So a row is stored, moved and sent like a row of any other format, and a head's planes are views of it
wherever rows lie. Norms are little-endian; with d an odd multiple of 8 they lie at odd addresses in
rows of keys, which costs a copy of them where they are read compiled.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import numpy as np

from warmkv.kernels.errors import KernelError
from warmkv.kernels.formats import F32, Block, RowFormat
from warmkv.kernels.turboquant.packing import U8, packed_bytes
from warmkv.kernels.turboquant.planes import KeyPlanes, PlainKeyPlanes, Planes, ValuePlanes
from warmkv.kernels.turboquant.reference import reconstruct
from warmkv.kernels.turboquant.rotation import Rotation
from warmkv.kernels.turboquant.turn import Turn

#: What rows of a format are, plane by plane.
PLANES: dict[RowFormat, type[Planes]] = {
    RowFormat.TQ_KEY: KeyPlanes,
    RowFormat.TQ_VALUE: ValuePlanes,
    RowFormat.TQ3: PlainKeyPlanes,
}


class Encoders(Protocol):
    """The encoders of a backend, see `reference`."""

    @property
    def encode_keys(self) -> Callable[[F32, Rotation], KeyPlanes]: ...

    @property
    def encode_values(self) -> Callable[[F32, Rotation], ValuePlanes]: ...

    @property
    def encode_plain_keys(self) -> Callable[[F32, Rotation], PlainKeyPlanes]: ...


def turn_of(block: Block) -> Turn:
    """Raises KernelError for rows that were not rotated."""
    if block.turn is None:
        raise KernelError(f"rows of {block.format.value} without a rotation")
    return block.turn


def planes_of(block: Block) -> Planes:
    """The planes of a block's rows, views of its bytes."""
    size, at = turn_of(block).size, 0
    arrays: dict[str, Any] = {}
    for name, bits in PLANES[block.format].bits.items():
        width = packed_bytes(bits, size) if bits else 2
        part = block.codes[:, at : at + width]
        arrays[name] = part if bits else part.view("<f2")[:, 0]
        at += width
    return PLANES[block.format](size, **arrays)


def keys_of(block: Block) -> KeyPlanes | PlainKeyPlanes:
    """`planes_of` rows that can be scored. Raises KernelError."""
    planes = planes_of(block)
    if not isinstance(planes, (KeyPlanes, PlainKeyPlanes)):
        raise KernelError(f"rows of {block.format.value} as keys")
    return planes


def values_of(block: Block) -> ValuePlanes:
    """`planes_of` rows that can be weighed. Raises KernelError."""
    planes = planes_of(block)
    if not isinstance(planes, ValuePlanes):
        raise KernelError(f"rows of {block.format.value} as values")
    return planes


def packed(planes: Planes) -> U8:
    """Planes (rows, ...) as bytes (rows, ..., row bytes), a copy."""
    parts = [
        getattr(planes, name) if bits else np.ascontiguousarray(getattr(planes, name), "<f2")[..., None].view(np.uint8)
        for name, bits in planes.bits.items()
    ]
    return np.concatenate(parts, axis=-1)


def decode(block: Block) -> F32:
    """The float32 rows (rows, size) a block stands for, as a copy: products with them are its scores, within
    rounding, so that its estimator decides."""
    turn = turn_of(block)
    return reconstruct(planes_of(block), turn.rotation, gain=turn.kappa)


def encode(backend: Encoders, rows: F32, format_: RowFormat, turn: Turn) -> U8:
    """``rows`` (n, heads, size) float32 as bytes (n, heads, row bytes). Raises NormRefused, KernelError."""
    encoders: dict[RowFormat, Callable[[F32, Rotation], Planes]] = {
        RowFormat.TQ_KEY: backend.encode_keys, RowFormat.TQ_VALUE: backend.encode_values,
        RowFormat.TQ3: backend.encode_plain_keys,
    }  # fmt: skip
    if format_ not in encoders:
        raise KernelError(f"rows of {format_.value} are not rotated")
    return packed(encoders[format_](rows, turn.rotation))
