"""Does what a header describes fit the model? Asked of everything that comes from a peer or disk.

Rows of a group of layers (`needs.RowGroup`) come together or not at all, and layers that need
every row have all of a segment's; so what a segment covers is one range a group.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

from warmkv.kvstore.needs import ModelNeeds, Provides, needs_of_model
from warmkv.schema.errors import FormatError
from warmkv.schema.identity import FIELD_FORMATS, Identity, LayerKind, PlaneFormat, PlaneRole, PlaneSpec
from warmkv.schema.records import NO_FIELD, Plane, row_bytes
from warmkv.schema.segment import SegmentHeader, StateHeader

#: Largest vocabulary whose logits may be parked.
MAX_VOCABULARY = 1 << 24
Extent = tuple[int, int]
Layout = tuple[int, PlaneRole, PlaneFormat, tuple[int, ...], int]
NO_ROWS: Extent = (0, 0)


@dataclass(frozen=True, slots=True)
class Coverage:
    """Rows a segment holds, one range per group of the model (empty: `NO_ROWS`), and the fields
    its rows were quantised with (`NO_FIELD` where one is still open)."""

    extents: tuple[Extent, ...]
    fields: frozenset[bytes] = frozenset()


def segment_coverage(header: SegmentHeader, identity: Identity) -> Coverage:
    """What the segment covers. Raises FormatError unless its planes fit the identity."""
    known = _known_coverage(header, identity)
    return _proven_coverage(header, identity) if known is None else known


def _known_coverage(header: SegmentHeader, identity: Identity) -> Coverage | None:
    """The same for planes of which others, alike but for their rows, were proven to fit; None where
    there were none or they differ in more."""
    layout = tuple((plane.layer, plane.role, plane.format, plane.row_shape, plane.row_bytes) for plane in header.planes)
    groups = _plain_layout(identity, layout)
    if groups is None or any(plane.field != NO_FIELD for plane in header.planes):
        return None
    extents = []
    for whole, members in groups:
        found = {(header.planes[at].first_row, header.planes[at].rows) for at in members}
        first, rows = found.pop() if len(found) == 1 else (0, 0)
        if rows == 0 or (whole and (first, rows) != (header.start, header.end - header.start)):
            return None
        extents.append((first, first + rows))
    return Coverage(tuple(extents))


@lru_cache(maxsize=64)
def _plain_layout(identity: Identity, layout: tuple[Layout, ...]) -> tuple[tuple[bool, tuple[int, ...]], ...] | None:
    """By group: whether it needs every row, and which planes are its own; None unless the planes
    are exactly the rows of the model's layers, in formats without fields."""
    expected = {
        (index, spec.role): (spec.format, spec.row_shape, row_bytes(spec.format, spec.row_shape, spec.role))
        for index, layer in enumerate(identity.layers)
        for spec in layer.row_planes
    }
    found = {(layer, role): (format_, shape, size) for layer, role, format_, shape, size in layout}
    if found != expected or len(found) != len(layout) or any(item[0] in FIELD_FORMATS for item in expected.values()):
        return None
    return tuple(
        (group.whole, tuple(at for at, item in enumerate(layout) if item[0] in group.layers)) for group in _needs(identity).groups
    )


def _proven_coverage(header: SegmentHeader, identity: Identity) -> Coverage:
    planes = {(plane.layer, plane.role): plane for plane in header.planes}
    groups = _needs(identity).groups
    extents = tuple(_group_extent(group.layers, group.whole, planes, header, identity) for group in groups)
    if any(group.whole for group in groups) and all(extent == NO_ROWS for extent in extents):
        raise FormatError(f"segment [{header.start}, {header.end}) holds no rows")
    expected = {(index, spec.role) for index, layer in enumerate(identity.layers) for spec in layer.row_planes}
    fields = set()
    for place, plane in planes.items():
        if plane.role == PlaneRole.FIELD:
            _check_field_plane(plane, header, identity)
        elif place not in expected:
            raise FormatError(f"{_name(plane)} does not fit the identity, which has no such rows")
        elif plane.format in FIELD_FORMATS:
            fields.add(plane.field)
            if plane.field != NO_FIELD and identity.layers[plane.layer].field_planes:
                _require_field(planes.get((plane.layer, PlaneRole.FIELD)), plane)
        elif plane.field != NO_FIELD:
            raise FormatError(f"{_name(plane)} names a field, {plane.format.name} has none")
    return Coverage(extents, frozenset(fields))


def _require_field(found: Plane | None, rows: Plane) -> None:
    """Rows are of no use without the field they were quantised with."""
    if found is None or found.field != rows.field:
        raise FormatError(f"{_name(rows)} names a field that the segment does not hold")


def _group_extent(
    layers: Iterable[int], whole: bool, planes: dict[tuple[int, PlaneRole], Plane], header: SegmentHeader, identity: Identity
) -> Extent:
    """The range all planes of these layers agree about."""
    found: set[Extent] = set()
    for index in layers:
        for spec in identity.layers[index].row_planes:
            plane = planes.get((index, spec.role))
            if plane is None or plane.rows == 0:
                found.add(NO_ROWS)
                continue
            _check_spec(plane, spec)
            found.add((plane.first_row, plane.first_row + plane.rows))
    if len(found) != 1:
        raise FormatError(f"layers {list(layers)} are needed alike, but hold the rows {sorted(found)}")
    (extent,) = found
    if extent != NO_ROWS and whole and extent != (header.start, header.end):
        raise FormatError(f"layers {list(layers)} hold rows {extent}, not those of [{header.start}, {header.end})")
    return extent


def state_provides(header: StateHeader, identity: Identity) -> Provides:
    """What the state is good for. Raises FormatError unless its planes fit the identity."""
    if header.position < 1:
        raise FormatError("a state at position 0 is none")
    planes = {(plane.layer, plane.role): plane for plane in header.planes}
    needs = _needs(identity)
    found, known = Provides.NOTHING, 0
    for layers, flag in (
        (needs.exact, Provides.EXACT), (needs.trimmable, Provides.TRIMMABLE), (needs.constant, Provides.CONSTANT)
    ):  # fmt: skip
        count, complete = _state_planes(layers, planes, identity)
        if count and not complete:
            raise FormatError(f"the state lacks planes of the {flag.name} layers {list(layers)}")
        found, known = (found | flag if count else found), known + count
    if any(plane.role == PlaneRole.IMPORTANCE for plane in header.planes):
        found |= Provides.IMPORTANCE
    logits = planes.get((len(identity.layers), PlaneRole.LOGITS))
    if logits is not None:
        if logits.format != PlaneFormat.F32 or len(logits.row_shape) != 1 or logits.rows != 1:
            raise FormatError(f"parked logits are {logits.rows} rows of {logits.format.name} {logits.row_shape}")
        if logits.row_shape[0] > MAX_VOCABULARY:
            raise FormatError(f"parked logits of {logits.row_shape[0]} tokens, at most {MAX_VOCABULARY} are allowed")
        found, known = found | Provides.LOGITS, known + 1
    if known != len(header.planes) or not found & ~Provides.IMPORTANCE:
        raise FormatError(f"{len(header.planes)} planes of state, {known} of them belong to the identity")
    return found


def _state_planes(layers: Iterable[int], planes: dict[tuple[int, PlaneRole], Plane], identity: Identity) -> tuple[int, bool]:
    """Planes of state these layers have, and whether none that is needed is missing."""
    count, complete = 0, True
    for index in layers:
        layer = identity.layers[index]
        for spec in layer.state_planes:
            plane = planes.get((index, spec.role))
            if plane is None:
                complete &= spec.role in layer.optional_planes
                continue
            _check_state_plane(plane, spec, layer.kind)
            count += 1
    return count, complete


def _check_state_plane(plane: Plane, spec: PlaneSpec, kind: LayerKind) -> None:
    if plane.field != NO_FIELD:
        raise FormatError(f"{_name(plane)} names a field")
    if kind == LayerKind.OPAQUE:
        if plane.format != spec.format or len(plane.row_shape) != 1 or plane.rows != 1:
            raise FormatError(f"{_name(plane)} is {plane.rows} rows of {plane.format.name} {plane.row_shape}, expected one blob")
        return
    _check_spec(plane, spec)
    one = plane.role in (PlaneRole.CONV, PlaneRole.RECURRENT) and kind not in (LayerKind.RING, LayerKind.NYSTROM)
    if one and plane.rows != 1:
        raise FormatError(f"{_name(plane)} has {plane.rows} rows, expected the one at its position")
    if kind == LayerKind.SPARSE and plane.role == PlaneRole.FIELD and plane.rows > 1:
        raise FormatError(f"{_name(plane)} has {plane.rows} rows, expected one, or none while the field is open")
    if kind == LayerKind.SPARSE and plane.role == PlaneRole.BLOB and plane.rows != 1:
        raise FormatError(f"{_name(plane)} has {plane.rows} rows, expected one")


def _check_field_plane(plane: Plane, header: SegmentHeader, identity: Identity) -> None:
    layer = identity.layers[plane.layer] if plane.layer < len(identity.layers) else None
    spec = next(iter(layer.field_planes), None) if layer is not None else None
    if spec is None:
        raise FormatError(f"{_name(plane)} is not in the identity")
    _check_spec(plane, spec)
    if plane.rows != 1 or plane.first_row != header.start:
        raise FormatError(f"{_name(plane)} has {plane.rows} rows at {plane.first_row}, expected one at {header.start}")


def _check_spec(plane: Plane, spec: PlaneSpec) -> None:
    if plane.format != spec.format or plane.row_shape != spec.row_shape:
        raise FormatError(
            f"{_name(plane)} is {plane.format.name} {plane.row_shape}, the identity says {spec.format.name} {spec.row_shape}"
        )
    if plane.row_bytes != row_bytes(spec.format, spec.row_shape, spec.role):
        raise FormatError(f"{_name(plane)} has rows of {plane.row_bytes} bytes")


def _name(plane: Plane) -> str:
    return f"layer {plane.layer}: plane {plane.role.name}"


def _needs(identity: Identity) -> ModelNeeds:
    return needs_of_model(identity.layers)
