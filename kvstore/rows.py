"""What a caller hands in to be saved: rows and states as they lie.

Rows may have any strides and begin at any position at or before what is already held; windowed
layers hold fewer of them than their prompt is long. Everything is checked against the identity
before anything is asked or written.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from warmkv.kvstore.needs import needs_of_model
from warmkv.schema.errors import RecordError, UnsupportedError
from warmkv.schema.identity import ELEMENT_BYTES, Identity, LayerKind, LayerSpec, PlaneFormat, PlaneRole, PlaneSpec
from warmkv.schema.records import NO_FIELD, Attachment, row_bytes

#: numpy dtypes of planes as callers see them. numpy has no bfloat16: its bits travel as uint16.
DTYPES: dict[PlaneFormat, np.dtype[np.generic]] = {
    PlaneFormat.F32: np.dtype("<f4"),
    PlaneFormat.F16: np.dtype("<f2"),
    PlaneFormat.BF16: np.dtype("<u2"),
}
_BYTES = np.dtype("u1")
#: Planes of which a state holds one row; others have as many as their runtime says.
_ONE_ROW = frozenset({PlaneRole.CONV, PlaneRole.RECURRENT, PlaneRole.BLOB, PlaneRole.LOGITS})
Array = npt.NDArray[np.generic]


@dataclass(frozen=True, slots=True)
class PlaneRows:
    """Rows of one plane, shape (rows, *row_shape), any strides; bf16 as uint16 bits, formats that
    pack blocks as uint8 of shape (rows, row bytes). ``field`` is the digest of the frozen
    quantisation field the rows were written with, for formats that have one."""

    role: PlaneRole
    format: PlaneFormat
    rows: Array
    field: bytes = NO_FIELD


@dataclass(frozen=True, slots=True)
class LayerRows:
    """Rows of one layer; ``first`` is the token position of row 0 of every plane.

    The arrays are borrowed until the save is done and must not change before that."""

    layer: int
    planes: tuple[PlaneRows, ...]
    first: int = 0

    @classmethod
    def kv(
        cls,
        layer: int,
        keys: Array,
        values: Array,
        *,
        format: PlaneFormat = PlaneFormat.F32,  # noqa: A002 - the field's own name
        first: int = 0,
    ) -> LayerRows:
        """Keys and values of an attention layer, each (rows, heads, head_size)."""
        return cls(layer, (PlaneRows(PlaneRole.KEY, format, keys), PlaneRows(PlaneRole.VALUE, format, values)), first)

    @property
    def end(self) -> int:
        return self.first + next((len(plane.rows) for plane in self.planes if plane.role != PlaneRole.FIELD), 0)


@dataclass(frozen=True, slots=True)
class LayerState:
    """What one layer keeps at exactly ``position``: the end of the saved ids, or for encoder
    output the end of its attachment. Planes have shape (rows, *row_shape): one row for conv,
    recurrent and blob planes; of importance one for each row beside it. Borrowed as `LayerRows` are."""

    layer: int
    position: int
    planes: tuple[PlaneRows, ...]


@dataclass(frozen=True, slots=True)
class CheckedRecords:
    """Records that fit an identity and a length: rows and states by layer, constants by layer and
    position, parked logits as one row."""

    length: int
    rows: dict[int, tuple[LayerRows, ...]] = field(default_factory=dict)
    states: dict[int, LayerState] = field(default_factory=dict)
    constants: dict[tuple[int, int], LayerState] = field(default_factory=dict)
    logits: Array | None = None


def require_served(identity: Identity) -> None:
    """UnsupportedError unless everything in every layer can be stored by this version."""
    for index, layer in enumerate(identity.layers):
        if layer.shared_with >= 0 and identity.layers[layer.shared_with].shared_with >= 0:
            raise UnsupportedError(f"layer {index} shares with layer {layer.shared_with}, which has no rows of its own either")
        if layer.row_planes and layer.kind != LayerKind.HYBRID and layer.state_planes:
            raise UnsupportedError(f"layer {index}: {layer.state_planes[0].role.name} beside rows is for HYBRID layers")


def stored_shape(spec: PlaneSpec) -> tuple[np.dtype[np.generic], tuple[int, ...]]:
    """dtype and shape of one row as callers see it."""
    if spec.format in DTYPES:
        return DTYPES[spec.format], spec.row_shape
    if spec.format in ELEMENT_BYTES:
        return _BYTES, spec.row_shape
    return _BYTES, (row_bytes(spec.format, spec.row_shape, spec.role),)


def row_bytes_of(layer: LayerSpec) -> int:
    """Bytes one token takes in the rows of a layer."""
    return sum(row_bytes(plane.format, plane.row_shape, plane.role) for plane in layer.row_planes)


def check_records(
    identity: Identity,
    records: Sequence[LayerRows | LayerState],
    length: int,
    attachments: Sequence[Attachment] = (),
    logits: Array | None = None,
) -> CheckedRecords:
    """Records in order, once they cover every layer at exactly ``length`` in the identity's
    geometry; none at all is a save that only adds to what is held.

    Raises RecordError that names layer and plane."""
    checked = CheckedRecords(length, logits=_check_logits(logits))
    for record in records:
        if not isinstance(record, (LayerRows, LayerState)):
            raise RecordError(f"a record is {type(record).__name__}, expected LayerRows or LayerState")
        if not 0 <= record.layer < len(identity.layers):
            raise RecordError(f"records for layers {[record.layer]} are unexpected, the model has {len(identity.layers)} layers")
        if isinstance(record, LayerRows):
            checked.rows[record.layer] = (*checked.rows.get(record.layer, ()), record)
        else:
            _enter_state(identity, record, checked, attachments)
    if records:
        _require_all(identity, checked)
    encoders = [index for index, layer in enumerate(identity.layers) if layer.kind == LayerKind.ENCODER]
    for position in {at for _, at in checked.constants}:
        for index in encoders:
            if (index, position) not in checked.constants:
                raise RecordError(f"layer {index}: the encoder output of the attachment that ends at {position} is missing")
    for index, found in checked.rows.items():
        _check_rows(index, identity.layers[index], found, length)
    for group in needs_of_model(identity.layers).groups if checked.rows else ():
        first = [(record.first, record.end) for record in checked.rows[group.layers[0]]]
        for index in group.layers:
            ranges = [(record.first, record.end) for record in checked.rows[index]]
            if ranges != first:
                raise RecordError(f"layer {index} holds rows {ranges}, layer {group.layers[0]}, which needs them alike, {first}")
    return checked


def _check_logits(logits: Array | None) -> Array | None:
    if logits is None:
        return None
    if not isinstance(logits, np.ndarray) or logits.dtype != np.float32 or logits.ndim != 1 or not logits.size:
        shape = getattr(logits, "shape", type(logits).__name__)
        raise RecordError(f"logits are {getattr(logits, 'dtype', '')} {shape}, expected float32 of shape (vocabulary,)")
    return logits[np.newaxis]


def _enter_state(identity: Identity, state: LayerState, checked: CheckedRecords, attachments: Sequence[Attachment]) -> None:
    index, layer = state.layer, identity.layers[state.layer]
    _check_state(index, layer, state)
    if layer.kind == LayerKind.ENCODER:
        if state.position not in {item.end for item in attachments}:
            raise RecordError(f"layer {index}: encoder output at {state.position}, where no attachment ends")
        known = (index, state.position) in checked.constants
        checked.constants[index, state.position] = state
    else:
        if state.position != checked.length:
            raise RecordError(f"layer {index}: its state is at position {state.position}, the ids end at {checked.length}")
        known = index in checked.states
        checked.states[index] = state
    if known:
        raise RecordError(f"layer {index}: two records of its state")


def _require_all(identity: Identity, checked: CheckedRecords) -> None:
    wanted = {index for index, layer in enumerate(identity.layers) if layer.row_planes}
    if set(checked.rows) != wanted:
        missing, extra = sorted(wanted - set(checked.rows)), sorted(set(checked.rows) - wanted)
        raise RecordError(f"records for layers {missing} are missing, for layers {extra} unexpected")
    for index, layer in enumerate(identity.layers):
        if layer.state_planes and layer.kind != LayerKind.ENCODER and index not in checked.states:
            raise RecordError(f"layer {index} ({layer.kind.name}): its state at {checked.length} is missing")


def _check_rows(index: int, layer: LayerSpec, found: tuple[LayerRows, ...], length: int) -> None:
    """One record up to ``length``; layers with sinks may have another one before it."""
    if len(found) > (2 if layer.kind == LayerKind.SINK_WINDOW else 1):
        raise RecordError(f"layer {index}: two records of its rows")
    fixed = {spec.role for spec in layer.row_planes}
    specs = {spec.role: spec for spec in (*layer.row_planes, *layer.field_planes)}
    for number, record in enumerate(found):
        roles = [plane.role for plane in record.planes]
        if not fixed <= set(roles) <= set(specs) or len(set(roles)) != len(roles):
            raise RecordError(f"layer {index} has planes {[r.name for r in roles]}, expected {[r.name for r in specs]}")
        for plane in record.planes:
            _check_plane(f"layer {index}, plane {plane.role.name}", plane, specs[plane.role])
        named = {plane.field for plane in record.planes if plane.role in fixed} - {NO_FIELD}
        given = {plane.field for plane in record.planes if plane.role == PlaneRole.FIELD}
        if layer.field_planes and not named <= given:
            raise RecordError(f"layer {index}: its rows name the field {min(named - given).hex()}, which was not handed in")
        ends = {record.first + len(plane.rows) for plane in record.planes if plane.role in fixed}
        last = number == len(found) - 1
        if record.first < 0 or len(ends) != 1 or (last and ends != {length}):
            where = f"[{record.first}, {', '.join(map(str, sorted(ends)))})"
            raise RecordError(f"layer {index} holds rows {where}, expected them to end at {length}")
    if len(found) == 2 and (found[0].first != 0 or found[0].end > found[1].first):
        raise RecordError(f"layer {index}: the rows of its sinks and of its window overlap or are in the wrong order")


def _check_state(index: int, layer: LayerSpec, state: LayerState) -> None:
    specs = {spec.role: spec for spec in layer.state_planes}
    roles = [plane.role for plane in state.planes]
    if not set(specs) - layer.optional_planes <= set(roles) <= set(specs) or len(set(roles)) != len(roles):
        raise RecordError(f"layer {index} has state planes {[r.name for r in roles]}, expected {[r.name for r in specs]}")
    for plane in state.planes:
        name = f"layer {index}, plane {plane.role.name}"
        _check_plane(name, plane, specs[plane.role], any_size=layer.kind == LayerKind.OPAQUE)
        if plane.role in _ONE_ROW and layer.kind not in (LayerKind.RING, LayerKind.NYSTROM) and len(plane.rows) != 1:
            raise RecordError(f"{name} has {len(plane.rows)} rows, expected the one at position {state.position}")
        if plane.role == PlaneRole.FIELD and layer.kind == LayerKind.SPARSE and len(plane.rows) > 1:
            raise RecordError(f"{name} has {len(plane.rows)} rows, expected one, or none while the field is open")


def _check_plane(name: str, plane: PlaneRows, spec: PlaneSpec, *, any_size: bool = False) -> None:
    if plane.format != spec.format:
        raise RecordError(f"{name} is {plane.format.name}, the identity says {spec.format.name}")
    if not isinstance(plane.rows, np.ndarray) or plane.rows.ndim == 0:
        raise RecordError(f"{name} is {type(plane.rows).__name__}, expected a numpy array of rows")
    dtype, shape = stored_shape(spec)
    if plane.rows.dtype != dtype:
        raise RecordError(f"{name} has dtype {plane.rows.dtype}, expected {dtype} for {plane.format.name}")
    if any_size and plane.rows.ndim == 2 and plane.rows.shape[1]:
        return
    if plane.rows.shape[1:] != shape:
        raise RecordError(f"{name} has rows of shape {plane.rows.shape[1:]}, expected {shape}")
    if len(plane.field) != len(NO_FIELD):
        raise RecordError(f"{name} has a field digest of {len(plane.field)} bytes, expected {len(NO_FIELD)}")
