"""Everything a layer holds, bit for bit: what "unchanged" is compared by."""

from __future__ import annotations

import numpy as np

from warmkv.kvstore.live.layers.attention import AttentionLayer
from warmkv.kvstore.live.layers.bounded import BoundedLayer
from warmkv.kvstore.live.layers.conv import ConvLayer
from warmkv.kvstore.live.layers.nystrom import NystromLayer
from warmkv.kvstore.live.layers.recurrent import RecurrentLayer
from warmkv.kvstore.live.model import Layer, ModelCache

Dump = tuple[object, ...]


def bits(array: object) -> object:
    if not isinstance(array, np.ndarray):
        return array
    return (array.dtype.str, array.shape, array.tobytes())


def rows_of(layer: AttentionLayer) -> Dump:
    planes = []
    for plane in (layer.keys, layer.values):
        for head in range(plane.heads):
            blocks = plane.blocks(head)
            planes.append(tuple((bits(block.codes), bits(block.scales), bits(block.field)) for block in blocks))
    places = (layer.rows, layer.position, layer.base, layer.gapless)
    return (*places, layer.generation, bits(layer.importance), bits(layer.sinks), tuple(planes))


def history_of(layer: ConvLayer) -> Dump:
    """Every state the layer would go back to."""
    states = []
    for position in layer.history.positions:
        slot = layer.history._slot(position)
        states.append((position, bits(layer.history._states[slot])))
    return tuple(states)


def repr_of(value: object) -> object:
    if isinstance(value, (list, tuple)):
        return tuple(repr_of(item) for item in value)
    if hasattr(value, "__dataclass_fields__"):
        return tuple(repr_of(getattr(value, name)) for name in value.__dataclass_fields__)
    return bits(value)


def dump(layer: Layer) -> Dump:
    """Of any layer; equal exactly where nothing has changed."""
    if isinstance(layer, AttentionLayer):
        return rows_of(layer)
    about = (layer.position, layer.generation)
    if isinstance(layer, BoundedLayer):
        undo = (bits(layer._undo_keys), bits(layer._undo_values))
        return (
            *about,
            bits(layer.keys),
            bits(layer.values),
            *undo,
            layer.undo_rows,
            bits(layer.sink_keys),
            bits(layer.sink_values),
        )
    if isinstance(layer, RecurrentLayer):
        return (*about, bits(layer.state), bits(layer.conv), bits(layer.scratch))
    if isinstance(layer, ConvLayer):
        return (*about, bits(layer.state), history_of(layer))
    assert isinstance(layer, NystromLayer)
    rows = None if layer.attention is None else rows_of(layer.attention)
    return (*about, rows, bits(layer.trace), layer.failure, layer.pending_boundary, layer.sealed_rows, repr_of(layer.groups))


def dump_all(cache: ModelCache) -> Dump:
    return (cache.lineage, cache.shift_offset, *(dump(layer) for layer in cache.own))
