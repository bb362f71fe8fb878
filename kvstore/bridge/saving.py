"""From a live cache to the records of a save.

Rows are copied, token-major, in the bytes they are stored as: quantised rows stay quantised. So the
cache may go on while a save is under way.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from warmkv.kernels.formats import F32, Block
from warmkv.kernels.quant.packed import pack
from warmkv.kvstore.bridge import fields, nystrom
from warmkv.kvstore.bridge.specs import FORMATS, HAS_GAPS, SEAT, SEAT_VERSION, Side, field_size, sides_of
from warmkv.kvstore.live.layers.attention import AttentionLayer
from warmkv.kvstore.live.layers.base import where
from warmkv.kvstore.live.layers.bounded import BoundedLayer
from warmkv.kvstore.live.layers.conv import ConvLayer
from warmkv.kvstore.live.layers.nystrom import NystromLayer
from warmkv.kvstore.live.layers.recurrent import RecurrentLayer
from warmkv.kvstore.live.layers.resident_recurrent import ResidentRecurrentLayer
from warmkv.kvstore.live.model import Layer, ModelCache
from warmkv.kvstore.live.rows.base import PlaneRows as StoredRows
from warmkv.kvstore.live.rows.device import DeviceRows
from warmkv.kvstore.rows import Array, LayerRows, LayerState, PlaneRows
from warmkv.schema.errors import RecordError
from warmkv.schema.identity import LayerKind, PlaneFormat, PlaneRole
from warmkv.schema.records import CLEAN, NO_FIELD


def has_gaps(cache: ModelCache) -> bool:
    """Whether rows of full attention were given up, so that the cache is to be saved with the identity
    of `layer_specs` with gaps."""
    full = [layer for layer in cache.own if isinstance(layer, AttentionLayer) and layer.plan.kind is LayerKind.FULL]
    return any(not layer.gapless or layer.base or layer.rows != layer.position for layer in full)


def field_digests(cache: ModelCache) -> tuple[bytes, ...]:
    """The frozen fields of the cache's layers, for `offer`. Raises RecordError."""
    rows = [fields.joined(layer) for layer in cache.own if isinstance(layer, AttentionLayer)]
    return tuple(sorted({fields.digest(row) for row in rows if row is not None}))


def records_of(cache: ModelCache, length: int, *, held: int = 0) -> list[LayerRows | LayerState]:
    """What the cache holds after ``length`` tokens, for a save of them under ``cache.lineage`` and an
    identity of `layer_specs`, with gaps where the cache `has_gaps`. The arrays are the caller's.

    ``held`` is how many tokens an offer with `field_digests` said are held: rows before it are left out,
    but for what windows need. Raises RecordError where a layer is at another position, or keeps fewer
    rows than its window needs, and where rows were given up that the lineage does not tell of (by a
    layer's own `keep`); ReplayDue after a rollback until the accepted tokens were replayed."""
    if not 0 <= held <= length:
        raise RecordError(f"{held} tokens held of {length}")
    cache.require_replayed("saved")
    gaps = has_gaps(cache)
    if gaps and cache.lineage == CLEAN:
        raise RecordError("rows were evicted, but the lineage is clean: evict through the cache, or set its lineage")
    records: list[LayerRows | LayerState] = []
    for layer in cache.own:
        if layer.position != length:
            raise RecordError(f"{where(layer.plan, layer.index)} is at position {layer.position}, the ids end at {length}")
        records += _records(layer, length, held, gaps)
    return records


def _records(layer: Layer, length: int, held: int, gaps: bool) -> list[LayerRows | LayerState]:
    if isinstance(layer, AttentionLayer):
        if gaps and layer.plan.kind is LayerKind.FULL:
            return [_sparse(layer, length)]
        return _rows(layer, length, held)
    if isinstance(layer, BoundedLayer):
        return [LayerState(layer.index, length, _ring(layer))]
    if isinstance(layer, NystromLayer):
        return [LayerState(layer.index, length, (PlaneRows(PlaneRole.NYSTROM, PlaneFormat.RAW, nystrom.pages(layer)),))]
    if isinstance(layer, ConvLayer):
        return [LayerState(layer.index, length, (PlaneRows(PlaneRole.CONV, PlaneFormat.F32, layer.state[None].copy()),))]
    assert isinstance(layer, (RecurrentLayer, ResidentRecurrentLayer))
    taken = layer.taken()
    planes = [PlaneRows(PlaneRole.RECURRENT, PlaneFormat.F32, taken.state[None])]
    if taken.conv is not None:
        planes.append(PlaneRows(PlaneRole.CONV, PlaneFormat.F32, taken.conv[None]))
    return [LayerState(layer.index, length, tuple(planes))]


def _rows(layer: AttentionLayer, length: int, held: int) -> list[LayerRows | LayerState]:
    """Rows from ``held`` on, or those the window needs, and the importance of all rows needed."""
    window, base = layer.plan.window, layer.position - layer.rows
    first = max(0, length - (window - 1)) if window else 0
    if base > first or not layer.gapless:
        raise RecordError(f"{where(layer.plan, layer.index)} holds rows from {base} on, expected them from {first} on")
    start = first if window else held
    field = fields.joined(layer)
    records: list[LayerRows | LayerState] = [LayerRows(layer.index, _planes(layer, start - base, field), start)]
    if layer.importance is not None:
        records.append(LayerState(layer.index, length, (_importance(layer, first - base),)))
    return records


def _sparse(layer: AttentionLayer, length: int) -> LayerState:
    """All rows as one state."""
    field = fields.joined(layer)
    planes = [PlaneRows(plane.role, plane.format, plane.rows) for plane in _planes(layer, 0, field)]
    if field is None and layer.plan.quantised:
        planes.append(PlaneRows(PlaneRole.FIELD, PlaneFormat.F32, np.empty((0, field_size(layer.plan)), np.float32)))
    if layer.importance is not None:
        planes.append(_importance(layer, 0))
    seat = SEAT.pack(SEAT_VERSION, 0 if layer.gapless else HAS_GAPS)
    planes.append(PlaneRows(PlaneRole.BLOB, PlaneFormat.RAW, np.frombuffer(seat, np.uint8)[None]))
    return LayerState(layer.index, length, tuple(planes))


def _planes(layer: AttentionLayer, first: int, field: F32 | None) -> tuple[PlaneRows, ...]:
    """Keys and values from row ``first`` on, and the field they name, where it is frozen."""
    named = NO_FIELD if field is None else fields.digest(field)
    planes = [
        PlaneRows(side.role, FORMATS[side.format], packed(plane, side, first), named if side.format.quantised else NO_FIELD)
        for side, plane in zip(sides_of(layer.plan), (layer.keys, layer.values), strict=True)
    ]
    if field is not None:
        planes.append(PlaneRows(PlaneRole.FIELD, PlaneFormat.F32, field, named))
    return tuple(planes)


def packed(plane: StoredRows, side: Side, first: int) -> Array:
    """Rows from ``first`` on, token-major, copied; of a device no others are downloaded."""
    if isinstance(plane, DeviceRows):
        return plane.packed(first)
    return pack([_behind(plane.blocks(head), first) for head in range(side.heads)], side.format, side.size, keys=side.keys)


def _behind(blocks: Sequence[Block], first: int) -> list[Block]:
    """Blocks without their first ``first`` rows."""
    kept = []
    for block in blocks:
        kept.append(block.rows(min(first, len(block)), len(block)))
        first -= min(first, len(block))
    return kept


def _importance(layer: AttentionLayer, first: int) -> PlaneRows:
    assert layer.importance is not None
    mass = np.array(layer.importance[first : layer.rows], np.float32).reshape(-1, 1)
    return PlaneRows(PlaneRole.IMPORTANCE, PlaneFormat.F32, mass)


def _ring(layer: BoundedLayer) -> tuple[PlaneRows, ...]:
    """The ring's rows, oldest first, token-major."""
    window = layer.keys.shape[1]
    slots = np.arange(layer.position - layer.rows, layer.position) % window
    return tuple(
        PlaneRows(role, PlaneFormat.F32, np.ascontiguousarray(ring[:, slots].transpose(1, 0, 2)))
        for role, ring in ((PlaneRole.KEY, layer.keys), (PlaneRole.VALUE, layer.values))
    )
