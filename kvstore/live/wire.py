"""Layers to and from the layer wire (`wire_record` has the bytes).

What the wire cannot tell is refused rather than sent half: rows of any format but f32, Nystroem
layers, keys and values of different sizes, layers that share another's rows. A layer of full attention
whose rows have gaps travels as a tail whose base is its position less its rows: the next position and
every answer are then right, but which positions the rows had is not told. So a tail that comes to a
layer of full attention is taken for rows with gaps: it is never saved as a prefix of its tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from warmkv.kernels.formats import F32, Block, RowFormat
from warmkv.kvstore.live import lineage
from warmkv.kvstore.live.layers.attention import AttentionLayer
from warmkv.kvstore.live.layers.base import LayerState, where
from warmkv.kvstore.live.layers.bounded import BoundedLayer, RingSnapshot
from warmkv.kvstore.live.layers.recurrent import RecurrentLayer
from warmkv.kvstore.live.plan import LayerPlan
from warmkv.kvstore.live.rows.allocation import refusals
from warmkv.kvstore.live.wire_record import MAX_NUMBERS, Fit, WireKind, WireRecord, parse, write
from warmkv.schema.errors import FormatError, RecordError, UnsupportedError
from warmkv.schema.identity import LayerKind
from warmkv.schema.records import Lineage

_KINDS = {
    LayerKind.FULL: WireKind.FULL, LayerKind.SLIDING: WireKind.FULL, LayerKind.RING: WireKind.BOUNDED,
    LayerKind.RECURRENT: WireKind.LINEAR,
}  # fmt: skip
#: Numbers from here on would round to infinity.
_F16_END = 65520.0


def fit_of(plan: LayerPlan, index: int) -> Fit:
    """What the wire says about a layer. Raises UnsupportedError for one it cannot tell of, RecordError
    for an operator identity that is no unsigned 64-bit number."""
    name = where(plan, index)
    if plan.kind not in _KINDS:
        raise UnsupportedError(f"{name}: the layer wire has no record of this kind")
    if plan.conv is not None:
        raise UnsupportedError(f"{name}: the layer wire has no record of the convolution beside its state")
    if plan.kind is not LayerKind.RECURRENT:
        _check_rows(plan, name)
    if not 0 <= plan.wire_identity < 1 << 64:
        raise RecordError(f"{name}: operator identity {plan.wire_identity}, expected an unsigned 64-bit number")
    states = plan.state_size if plan.kind is LayerKind.RECURRENT else 0
    window = 0 if plan.ring is None else plan.ring.window
    place = (plan.wire_identity, index, plan.alive)
    return Fit(_KINDS[plan.kind], plan.kv_heads, plan.key_size, *place, states, window, plan.untagged_wire)


def _check_rows(plan: LayerPlan, name: str) -> None:
    for plane, format_ in (("keys", plan.key_format), ("values", plan.value_format)):
        if format_ is not RowFormat.F32:
            raise UnsupportedError(f"{name}: {plane} are {format_.value}, the layer wire tells of f32 rows alone")
    if plan.key_size != plan.value_size:
        raise UnsupportedError(f"{name}: keys of {plan.key_size} and values of {plan.value_size}, the layer wire has one size")


def export_layer(layer: LayerState, *, f16: bool = False) -> bytes:
    """The layer's state as one record. ``f16`` halves keys, values and rings, at the price of their
    precision; recurrent state and importance stay f32.

    Raises UnsupportedError for what the wire cannot tell, RecordError where a finite number of a row
    has no finite f16."""
    record = record_of(layer, f16=f16)
    for plane in (*record.keys, *record.values):
        if plane.size > MAX_NUMBERS:
            raise UnsupportedError(
                f"{where(layer.plan, layer.index)}: {plane.size} numbers a head, the layer wire has {MAX_NUMBERS}"
            )
        if f16:
            _check_narrow(plane, where(layer.plan, layer.index))
    return write(record)


def import_layer(layer: LayerState, data: bytes | memoryview) -> None:
    """Replace the layer's state by a record's; weights (sinks, sink rows) stay. All of ``data`` is checked
    before the layer is touched.

    Raises FormatError for bytes that are no record or one of another layer, UnsupportedError,
    OutOfMemory: the layer is as it was, bit for bit."""
    prepare_import(layer, data)[1]()


def prepare_import(layer: LayerState, data: bytes | memoryview) -> tuple[WireRecord, Callable[[], None]]:
    """Everything of `import_layer` that may fail; calling what is returned beside the record cannot."""
    record = parse(data, fit_of(layer.plan, layer.index))
    with refusals(2 * len(data), f"{where(layer.plan, layer.index)}: layer wire"):
        return record, _prepare(layer, record)


def _prepare(layer: LayerState, record: WireRecord) -> Callable[[], None]:
    if isinstance(layer, BoundedLayer):
        snapshot = RingSnapshot(np.stack(record.keys), np.stack(record.values), record.position)
        return layer.prepare_restore(snapshot)
    if isinstance(layer, RecurrentLayer):
        state = record.state
        if state is None or not state.size:
            state = np.zeros(layer.plan.state_size, np.float32)
        return layer.prepare_adopt(state, record.position)
    if isinstance(layer, AttentionLayer):
        return _prepare_rows(layer, record)
    raise UnsupportedError(f"{where(layer.plan, layer.index)}: the layer wire does not know {type(layer).__name__}")


def record_of(layer: LayerState, *, f16: bool = False) -> WireRecord:
    """The layer as a record; arrays may be views of its rows."""
    fit = fit_of(layer.plan, layer.index)
    if isinstance(layer, BoundedLayer):
        keys, values = tuple(layer.keys), tuple(layer.values)
        return WireRecord(
            WireKind.BOUNDED, fit.heads, fit.size, layer.position, fit.identity, fit.layer, f16,
            keys=keys, values=values, window=fit.window,
        )  # fmt: skip
    if isinstance(layer, RecurrentLayer):
        return WireRecord(WireKind.LINEAR, fit.heads, fit.size, layer.position, fit.identity, fit.layer, f16, state=layer.state)
    if isinstance(layer, AttentionLayer):
        return _record_of_rows(layer, fit, f16)
    raise UnsupportedError(f"{where(layer.plan, layer.index)}: the layer wire does not know {type(layer).__name__}")


def _record_of_rows(layer: AttentionLayer, fit: Fit, f16: bool) -> WireRecord:
    base = layer.position - layer.rows
    empty = np.empty((0, fit.size), np.float32)
    alive = {head: number for number, head in enumerate(layer.plan.alive_heads)}
    keys, values = (
        tuple(_whole(plane.blocks(alive[head])) if head in alive else empty for head in range(fit.heads))
        for plane in (layer.keys, layer.values)
    )
    return WireRecord(
        WireKind.FULL_TAIL if base else WireKind.FULL, fit.heads, fit.size, layer.position, fit.identity, fit.layer, f16,
        layer.rows, base, keys, values, layer.importance,
    )  # fmt: skip


def lineage_of(before: Lineage, layers: Sequence[LayerState], records: Sequence[WireRecord]) -> Lineage:
    """What is told of layers that were sent with lineage ``before``: half precision loses digits, except of a
    recurrent vector, which is sent whole; rows with gaps were evicted."""
    for layer, record in zip(layers, records, strict=True):
        halved = record.half and record.kind is not WireKind.LINEAR
        gaps = record.base if layer.plan.kind is LayerKind.FULL else 0
        if halved or gaps:
            before = lineage.wired(before, layer.index, record.position, gaps, halved)
    return before


def _prepare_rows(layer: AttentionLayer, record: WireRecord) -> Callable[[], None]:
    name, plan = where(layer.plan, layer.index), layer.plan
    if record.base and record.rows < plan.window - 1:
        raise FormatError(f"{name}: a tail of {record.rows} rows, expected the {plan.window - 1} that the next query sees")
    importance = record.importance if plan.importance else None
    if plan.importance and (importance is None or len(importance) != record.rows):
        raise FormatError(f"{name}: {record.rows} rows without their importance")
    gapless = not record.base or plan.kind is LayerKind.SLIDING
    keys, values = (np.stack([planes[head] for head in plan.alive_heads], axis=1) for planes in (record.keys, record.values))
    return layer.prepare_adopt(
        keys, values, position=record.position, base=record.base if gapless else 0, importance=importance, gapless=gapless
    )


def _whole(blocks: Sequence[Block]) -> F32:
    """Rows of one head, f32, as one array; a view where they lie in one block."""
    codes = [np.asarray(block.codes, np.float32) for block in blocks]
    return codes[0] if len(codes) == 1 else np.concatenate(codes)


def _check_narrow(plane: F32, name: str) -> None:
    wide = (np.abs(plane) >= _F16_END) & np.isfinite(plane)
    if wide.any():
        row, channel = (int(at) for at in np.argwhere(wide)[0])
        raise RecordError(f"{name}: {plane[row, channel]} in row {row} has no finite f16, expected less than {_F16_END:g}")
