"""From what was restored into a live cache: all of it, or the cache is as it was.

Everything is checked and all memory is had before the first layer changes. Rows whose field was fixed
from tokens that are not these, or by two writers, are never mixed into one sequence: that is a miss.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from warmkv.kernels.formats import F32, RowFormat
from warmkv.kvstore.bridge import nystrom, rows
from warmkv.kvstore.bridge.specs import ROW_FORMATS, layer_specs
from warmkv.kvstore.live import lineage as lineages
from warmkv.kvstore.live.layers.attention import AttentionLayer
from warmkv.kvstore.live.layers.base import where
from warmkv.kvstore.live.layers.bounded import BoundedLayer, RingSnapshot
from warmkv.kvstore.live.layers.nystrom import NystromLayer
from warmkv.kvstore.live.layers.recurrent import RecurrentLayer
from warmkv.kvstore.live.model import Layer, ModelCache
from warmkv.kvstore.restored import Restored, RestoredLayer, Rows
from warmkv.schema.errors import FormatError, OutOfMemory, RecordError
from warmkv.schema.identity import LayerKind, LayerSpec, PlaneFormat, PlaneRole
from warmkv.schema.records import Lineage

log = logging.getLogger(__name__)
#: Kinds a layer of rows may be stored as.
_OF_ROWS = frozenset({LayerKind.FULL, LayerKind.SLIDING, LayerKind.HYBRID, LayerKind.SPARSE})


def restore_into(cache: ModelCache, restored: Restored, *, convert: bool = False) -> int:
    """Replace all that ``cache`` holds by the restored tokens' state, copied; weights of the layers stay.
    The cache takes the lineage of what was restored.

    Returns how many tokens that is. 0 is a miss, with the cache untouched: nothing was restored, or its
    quantised rows cannot be gone on with bit for bit (they mix fields, or were cut before the row at which
    theirs was fixed). ``convert`` takes rows of other formats than the plan's: they are written anew, which
    changes the lineage.

    Raises RecordError where the identity is not one of `layer_specs` of the plan, FormatError where
    a state's bytes are not what they should be, OutOfMemory; the cache is untouched."""
    return _fill(cache, restored, mapped=False, convert=convert)


def on_prefix(cache: ModelCache, restored: Restored) -> int:
    """As `restore_into`, but layers of rows attend over them where they were mapped: nothing is copied but
    states, and what is appended lies behind them. Truncation and trims only narrow views; what picks or
    rewrites rows copies first. ``restored`` may be closed: views keep the mapping."""
    return _fill(cache, restored, mapped=True, convert=False)


def _fill(cache: ModelCache, restored: Restored, *, mapped: bool, convert: bool) -> int:
    if not restored:
        return 0
    layers, position = restored.match.identity.layers, restored.usable
    _require_fit(cache, layers, convert=convert)
    try:
        changes = [
            _prepare(layer, layers[layer.index], restored.layers[layer.index], position, mapped=mapped) for layer in cache.own
        ]
    except rows.NotExact as exc:
        log.info("%s; nothing was restored", exc)
        return 0
    except MemoryError as exc:
        requested = _bytes(restored)
        raise OutOfMemory(f"{requested} bytes for the state of {position} tokens could not be had", requested) from exc
    lineage = _converted(cache, layers, position, restored.match.lineage)
    for change in changes:
        change()
    cache.lineage = lineage
    return position


def _bytes(restored: Restored) -> int:
    """Of all that came back."""
    planes = [plane for layer in restored.layers for part in (layer.planes, layer.states) for plane in part.values()]
    return sum(block.nbytes for plane in planes for block in plane.blocks)


def _require_fit(cache: ModelCache, layers: tuple[LayerSpec, ...], *, convert: bool) -> None:
    """RecordError unless these are the layers the cache's plan has; ``convert``: but for formats."""
    expected = layer_specs(cache.plan, gaps=any(spec.kind == LayerKind.SPARSE for spec in layers))
    if len(layers) != len(expected):
        raise RecordError(f"what was restored has {len(layers)} layers, the cache {len(expected)}")
    for index, (spec, own) in enumerate(zip(layers, expected, strict=True)):
        alike = spec.kind in _OF_ROWS and own.kind in _OF_ROWS and _without_formats(spec) == _without_formats(own)
        if spec != own and not (convert and alike):
            hint = "; convert=True would write its rows anew" if alike else ""
            raise RecordError(f"layer {index} was stored as {_told(spec)}; the plan has {_told(own)}{hint}")


def _told(spec: LayerSpec) -> str:
    """A layer in one line: what is asked for in a plan, and planes as they are written."""
    planes = ", ".join(
        f"{plane.role.name} {plane.format.name} {plane.row_shape}"
        + (f" ({plane.parameters})" if plane.parameters != "none" else "")
        for plane in spec.planes
    )
    sizes = [f"{name} {getattr(spec, name)}" for name in ("window", "chunk", "sinks") if getattr(spec, name)]
    return f"{', '.join([spec.kind.name, *sizes])}: {planes or 'nothing of its own'}"


def _without_formats(spec: LayerSpec) -> LayerSpec:
    """The layer whatever its rows are written as."""
    kept = (plane for plane in spec.planes if plane.role != PlaneRole.FIELD)
    return replace(spec, planes=tuple(replace(plane, format=PlaneFormat.RAW) for plane in kept))


def _converted(cache: ModelCache, layers: tuple[LayerSpec, ...], position: int, lineage: Lineage) -> Lineage:
    """The lineage after rows up to ``position`` of other formats than the plan's were written anew."""
    for layer in cache.own:
        if isinstance(layer, AttentionLayer):
            keys, values = _formats(layers[layer.index])
            if (keys, values) != (layer.plan.key_format, layer.plan.value_format):
                pairs = (keys, layer.plan.key_format), (values, layer.plan.value_format)
                lineage = lineages.requantised(lineage, layer.index, position, *pairs)
    return lineage


def _formats(spec: LayerSpec) -> tuple[RowFormat, RowFormat]:
    found = {plane.role: plane.format for plane in spec.planes}
    return ROW_FORMATS[found[PlaneRole.KEY]], ROW_FORMATS[found[PlaneRole.VALUE]]


def _prepare(layer: Layer, spec: LayerSpec, found: RestoredLayer, position: int, *, mapped: bool) -> Callable[[], None]:
    """Everything that may fail of putting a layer's state back; calling what is returned cannot."""
    if isinstance(layer, AttentionLayer):
        return rows.prepare(layer, spec, found, position, mapped=mapped)
    if isinstance(layer, NystromLayer):
        return nystrom.prepare(layer, _state(layer, found, PlaneRole.NYSTROM), position)
    if isinstance(layer, BoundedLayer):
        return layer.prepare_restore(_ring(layer, found, position))
    assert isinstance(layer, RecurrentLayer)
    state = np.array(_state(layer, found, PlaneRole.RECURRENT), np.float32).reshape(-1)
    if state.shape != (layer.plan.state_size,):
        raise FormatError(f"{where(layer.plan, layer.index)}: a state of {state.size} numbers, expected {layer.plan.state_size}")
    return layer.prepare_adopt(state, position)


def _ring(layer: BoundedLayer, found: RestoredLayer, position: int) -> RingSnapshot:
    """Rows in temporal order, put where a ring has them: position t in slot t mod W."""
    parts = []
    for role, ring in ((PlaneRole.KEY, layer.keys), (PlaneRole.VALUE, layer.values)):
        came, window = _state(layer, found, role), ring.shape[1]
        kept = min(position, window)
        if came.shape != (kept, ring.shape[0], ring.shape[2]):
            name = f"{where(layer.plan, layer.index)}: ring {role.name}"
            raise FormatError(f"{name} has shape {came.shape}, expected {(kept, ring.shape[0], ring.shape[2])}")
        turned: F32 = np.zeros(ring.shape, np.float32)
        turned[:, np.arange(position - kept, position) % window] = came.transpose(1, 0, 2)
        parts.append(turned)
    return RingSnapshot(parts[0], parts[1], position)


def _state(layer: Layer, found: RestoredLayer, role: PlaneRole) -> Rows:
    plane = found.states.get(role)
    if plane is None:
        raise FormatError(f"{where(layer.plan, layer.index)}: no {role.name} came back")
    return plane.array()
