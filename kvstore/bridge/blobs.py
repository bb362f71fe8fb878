"""TurboQuant rows of a live layer as the blobs TQK1 and TQV1 of `.kvcache` files, and back.

A file holds both blobs or none, and every position from 0 on. Neither the seed nor the layer is in a blob:
who reads one must have made sure that the rotation is the layer's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np

from warmkv.kernels.errors import KernelError
from warmkv.kernels.formats import RowFormat
from warmkv.kernels.quant.packed import view
from warmkv.kernels.turboquant import blobs
from warmkv.kernels.turboquant.block import packed, planes_of
from warmkv.kernels.turboquant.planes import KeyPlanes, Planes, ValuePlanes
from warmkv.kvstore.live.layers.attention import AttentionLayer
from warmkv.kvstore.live.layers.base import where
from warmkv.kvstore.live.rows.allocation import refusals
from warmkv.kvstore.live.rows.base import PlaneRows
from warmkv.kvstore.live.rows.growing import GrowingRows
from warmkv.schema.errors import FormatError, RecordError

P = TypeVar("P", KeyPlanes, ValuePlanes)


def blobs_of(layer: AttentionLayer) -> tuple[bytes, bytes]:
    """Keys and values of all rows. Raises RecordError for a layer that is not TurboQuant on both sides, or whose
    rows do not stand for every position from 0 on."""
    name = _require_both(layer)
    if not layer.gapless or layer.base:
        raise RecordError(f"{name}: {layer.rows} rows before position {layer.position}, expected all of them")
    return blobs.write_keys(_joined(KeyPlanes, layer.keys)), blobs.write_values(_joined(ValuePlanes, layer.values))


def prepare_blobs(layer: AttentionLayer, keys: bytes | memoryview, values: bytes | memoryview) -> Callable[[], None]:
    """What replaces all rows of ``layer`` by those of two blobs, once all is checked and all memory is there;
    calling it cannot fail. Raises RecordError for another kind of layer, FormatError for blobs that are none
    or have other heads than it or rows than each other, OutOfMemory."""
    name = _require_both(layer)
    try:
        with refusals(len(keys) + len(values), f"the rows of {name}"):
            read: tuple[Planes, Planes] = (blobs.read_keys(keys), blobs.read_values(values))
    except KernelError as exc:
        raise FormatError(f"{name}: {exc}") from exc
    rows, made = len(read[0]), layer.empty_planes()
    for planes, plane in zip(read, made, strict=True):
        found, expected = (*planes.norms.shape, planes.size), (rows, plane.heads, plane.size)
        if found != expected:
            raise FormatError(f"{plane.name}: a blob of (rows, heads, channels) {found}, expected {expected}")
    filled = [_filled(planes, plane) for planes, plane in zip(read, made, strict=True)]
    mass = np.zeros(rows, np.float32) if layer.plan.importance else None
    return layer.prepare_adopt(filled[0], filled[1], position=rows, base=0, importance=mass, gapless=True)


def _require_both(layer: AttentionLayer) -> str:
    plan, name = layer.plan, where(layer.plan, layer.index)
    if (plan.key_format, plan.value_format) != (RowFormat.TQ_KEY, RowFormat.TQ_VALUE):
        raise RecordError(
            f"{name}: rows of {plan.key_format.value} and {plan.value_format.value}, blobs are of tq_key and tq_value"
        )
    return name


def _joined(kind: type[P], plane: PlaneRows) -> P:
    """All rows of a plane."""
    heads = [[planes_of(block) for block in plane.blocks(head)] for head in range(plane.heads)]
    arrays: dict[str, Any] = {
        name: np.stack([np.concatenate([getattr(part, name) for part in parts]) for parts in heads], axis=1) for name in kind.bits
    }
    return kind(plane.size, **arrays)


def _filled(planes: Planes, empty: GrowingRows) -> GrowingRows:
    rows = packed(planes).reshape(len(planes), empty.heads * planes.row_bytes(empty.size))
    heads = view(rows, empty.format, empty.heads, empty.size, keys=empty.keys, turn=empty.turn)
    return empty.copied([[block] for block in heads])
