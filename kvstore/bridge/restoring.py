"""From what was restored into a live cache: all of it, or the cache is as it was.

Everything is checked and all memory is had before the first layer changes. Rows whose field was fixed
from tokens that are not these, or by two writers, are never mixed into one sequence: that is a miss.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

import numpy as np

from warmkv.kernels.formats import F32
from warmkv.kvstore.bridge import nystrom, rows
from warmkv.kvstore.bridge.anchors import shift_offset_of
from warmkv.kvstore.bridge.specs import ROW_FORMATS, layer_specs, sides_of, stored_sides
from warmkv.kvstore.live import lineage as lineages
from warmkv.kvstore.live.layers.attention import AttentionLayer
from warmkv.kvstore.live.layers.base import where
from warmkv.kvstore.live.layers.bounded import BoundedLayer, RingSnapshot
from warmkv.kvstore.live.layers.conv import ConvLayer
from warmkv.kvstore.live.layers.nystrom import NystromLayer
from warmkv.kvstore.live.layers.recurrent import RecurrentLayer, conv_shape
from warmkv.kvstore.live.layers.resident_recurrent import ResidentRecurrentLayer
from warmkv.kvstore.live.model import Layer, ModelCache
from warmkv.kvstore.live.state import InferenceState
from warmkv.kvstore.restored import Restored, RestoredLayer, Rows
from warmkv.schema.errors import FormatError, LiveError, OutOfMemory, RecordError, UnsupportedError
from warmkv.schema.identity import LayerKind, LayerSpec, PlaneFormat, PlaneRole, without_rotation
from warmkv.schema.records import CLEAN, Lineage

log = logging.getLogger(__name__)
#: Planes whose rows may be written anew in another format.
_WRITTEN = frozenset({PlaneRole.KEY, PlaneRole.VALUE})
#: Kinds a layer of rows may be stored as.
_OF_ROWS = frozenset({LayerKind.FULL, LayerKind.SLIDING, LayerKind.HYBRID, LayerKind.SPARSE})


def restore_into(cache: ModelCache, restored: Restored, *, convert: bool = False) -> int:
    """Replace all that ``cache`` holds by the restored tokens' state, copied; weights of the layers stay.
    The cache takes the lineage of what was restored, and how far it was shifted.

    Rows on devices are uploaded from where they are mapped, before anything is changed. Logits that came back with
    the last token are parked, unless rows were converted.

    Returns how many tokens that is. 0 is a miss, with the cache untouched: nothing was restored, or its
    quantised rows cannot be gone on with bit for bit (they mix fields, or were cut before the row at which
    theirs was fixed). ``convert`` takes rows of other formats than the plan's: they are written anew, which
    changes the lineage.

    Raises RecordError where the identity is not one of `layer_specs` of the plan, FormatError where
    a state's bytes are not what they should be, CapacityExceeded, OutOfMemory, DeviceFault where an upload fails;
    the cache is untouched, but for logits that were parked. A device that breaks after that, when its rows are put
    where they belong, leaves an empty cache."""
    return _fill(cache, restored, mapped=False, convert=convert)


def on_prefix(cache: ModelCache, restored: Restored) -> int:
    """As `restore_into`, but layers of rows attend over them where they were mapped: nothing is copied but
    states, and what is appended lies behind them. Truncation and trims only narrow views; what picks or
    rewrites rows copies first. ``restored`` may be closed: views keep the mapping.

    Raises as `restore_into`, and UnsupportedError for a cache on devices, which cannot read what is mapped."""
    if cache.residence is not None:
        names = ", ".join(dict.fromkeys(device.name for device in cache.residence.devices))
        raise UnsupportedError(f"mapped rows cannot be attended on {names}: restore_into uploads them")
    return _fill(cache, restored, mapped=True, convert=False)


def prepare(
    cache: ModelCache, restored: Restored, *, convert: bool = False, mapped: bool = False, short: bool = False
) -> Callable[[], int] | None:  # fmt: skip
    """Everything of `restore_into` that may fail, None for a miss: for who changes several caches or none. Calling
    what is returned does the rest and gives the number of tokens; the cache must not change between, but for the one
    thing that is seen at once: nothing is parked any more where logits came back. ``short``: what is restored for
    another of the caches `is_short`, whatever this is."""
    if not restored:
        return None
    layers, position = restored.match.identity.layers, restored.usable
    _require_fit(cache, layers, convert=convert)
    room = cache.capacity if isinstance(cache, InferenceState) else 0
    try:
        changes = [
            _prepare(layer, layers[layer.index], restored.layers[layer.index], position, mapped=mapped, room=room)
            for layer in cache.own
        ]
    except rows.NotExact as exc:
        log.info("%s; nothing was restored", exc)
        return None
    except MemoryError as exc:
        requested = _bytes(restored)
        raise OutOfMemory(f"{requested} bytes for the state of {position} tokens could not be had", requested) from exc
    resumed = _resumed(cache, restored, short or is_short(restored))
    lineage, offset = _converted(cache, layers, position, resumed), shift_offset_of(restored)
    logits = restored.logits if lineage == resumed else None
    park = None if logits is None else cache.prepare_logits(np.asarray(logits, np.float32).reshape(-1))

    def apply() -> int:
        try:
            for change in changes:
                change()
        except BaseException:
            _empty(cache)
            raise
        cache.lineage, cache.shift_offset = lineage, offset
        if park is not None:
            park()
        return position

    return apply


def _fill(cache: ModelCache, restored: Restored, *, mapped: bool, convert: bool) -> int:
    apply = prepare(cache, restored, convert=convert, mapped=mapped)
    return 0 if apply is None else apply()


def _empty(cache: ModelCache) -> None:
    """Nothing rather than layers of two sequences, as far as devices let it."""
    for layer in cache.own:
        with suppress(LiveError):
            layer.clear()
    cache.lineage, cache.shift_offset = CLEAN, 0


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
        foreign = [plane for plane in spec.planes if plane.role in _WRITTEN and plane.format not in ROW_FORMATS]
        if alike and foreign:
            known = ", ".join(format_.name for format_ in ROW_FORMATS)
            raise RecordError(f"layer {index} was stored as {_told(spec)}; rows of a live cache are read as {known} alone")
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
    return replace(
        spec,
        planes=tuple(replace(plane, format=PlaneFormat.RAW, parameters=without_rotation(plane.parameters)) for plane in kept),
    )


def is_short(restored: Restored) -> bool:
    """Whether more is stored behind what was restored, of these ids or of others that part from them there, so that
    it may end short of where its rows were shifted or written anew. An anchor of shifted rows lies behind the shift."""
    found = restored.match
    return (found.usable < found.matched or found.first_difference is not None) and shift_offset_of(restored) == 0


def _resumed(cache: ModelCache, restored: Restored, short: bool) -> Lineage:
    """The lineage of a cache that goes on where it was restored. Where that is ``short``, what it computes for the
    tokens that come is not what is stored for them, or will be, by who had all: it must not pass for it."""
    lineage, layers = restored.match.lineage, restored.match.identity.layers
    shiftable = all(isinstance(layer, (AttentionLayer, ConvLayer)) for layer in cache.own)
    if lineage == CLEAN or not short or not shiftable or any(spec.kind == LayerKind.SPARSE for spec in layers):
        return lineage
    return lineages.rewound(lineage, restored.usable)


def _converted(cache: ModelCache, layers: tuple[LayerSpec, ...], position: int, lineage: Lineage) -> Lineage:
    """The lineage after rows up to ``position`` of other formats, or rotated by another seed, were written anew."""
    for layer in cache.own:
        if isinstance(layer, AttentionLayer):
            stored, own = stored_sides(layer.plan, layers[layer.index]), sides_of(layer.plan)
            if stored != own:
                keys, values = ((before.format, after.format) for before, after in zip(stored, own, strict=True))
                seeds = tuple(-1 if side.seed is None else side.seed for pair in zip(stored, own, strict=True) for side in pair)
                lineage = lineages.requantised(lineage, layer.index, position, keys, values, seeds if max(seeds) >= 0 else ())
    return lineage


def _prepare(
    layer: Layer, spec: LayerSpec, found: RestoredLayer, position: int, *, mapped: bool, room: int
) -> Callable[[], None]:  # fmt: skip
    """Everything that may fail of putting a layer's state back; calling what is returned cannot."""
    if isinstance(layer, AttentionLayer):
        return rows.prepare(layer, spec, found, position, mapped=mapped, room=room)
    if isinstance(layer, NystromLayer):
        return nystrom.prepare(layer, _state(layer, found, PlaneRole.NYSTROM), position)
    if isinstance(layer, BoundedLayer):
        return layer.prepare_restore(_ring(layer, found, position))
    if isinstance(layer, ConvLayer):
        return layer.prepare_adopt(_one(layer, found, PlaneRole.CONV, layer.state.shape), position)
    assert isinstance(layer, (RecurrentLayer, ResidentRecurrentLayer))
    conv = None if layer.plan.conv is None else _one(layer, found, PlaneRole.CONV, conv_shape(layer.plan))
    return layer.prepare_adopt(_one(layer, found, PlaneRole.RECURRENT, (layer.plan.state_size,)), position, conv=conv)


def _one(layer: Layer, found: RestoredLayer, role: PlaneRole, shape: tuple[int, ...]) -> F32:
    """The one row of a state, where it is mapped."""
    came = _state(layer, found, role)
    if came.shape != (1, *shape):
        raise FormatError(f"{where(layer.plan, layer.index)}: {role.name} of shape {came.shape}, expected {(1, *shape)}")
    return np.asarray(came[0], np.float32)


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
