"""Restored rows of one layer as planes of a live one: copied, lent, or written anew in another format."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import cast

import numpy as np

from warmkv.kernels.errors import KernelError
from warmkv.kernels.formats import F32, WARMUP_ROWS, total_rows
from warmkv.kernels.turboquant.reference import Estimator
from warmkv.kvstore.bridge import fields, resident
from warmkv.kvstore.bridge.decoding import Heads, heads_of, pieces
from warmkv.kvstore.bridge.specs import HAS_GAPS, SEAT, SEAT_VERSION, Side, sides_of, stored_sides
from warmkv.kvstore.live.layers.attention import AttentionLayer
from warmkv.kvstore.live.layers.base import where
from warmkv.kvstore.live.layers.resident import ResidentLayer
from warmkv.kvstore.live.rows.base import PlaneRows
from warmkv.kvstore.live.rows.growing import GrowingRows
from warmkv.kvstore.live.rows.planes import Planes
from warmkv.kvstore.live.rows.prefix import PrefixRows
from warmkv.kvstore.restored import RestoredLayer, RestoredPlane, Rows
from warmkv.schema.errors import FormatError
from warmkv.schema.identity import LayerKind, LayerSpec, PlaneRole
from warmkv.schema.records import NO_FIELD


class NotExact(Exception):
    """What came back is right, but no continuation of it would be bit for bit that of one sequence."""


def prepare(
    layer: AttentionLayer, spec: LayerSpec, found: RestoredLayer, position: int, *, mapped: bool, room: int
) -> Callable[[], None]:  # fmt: skip
    """What puts restored rows into ``layer``, once everything fits and all memory is there; ``spec``
    is the layer they were stored of, copies get ``room`` for so many rows in all. Raises NotExact,
    FormatError, RecordError, OutOfMemory."""
    name = where(layer.plan, layer.index)
    sparse = spec.kind == LayerKind.SPARSE
    sides, own = stored_sides(layer.plan, spec), sides_of(layer.plan)
    planes = [_plane(found, side.role, name, state=sparse) for side in sides]
    counts = {sum(map(len, plane.blocks)) for plane in planes}
    if len(counts) != 1:
        raise FormatError(f"{name}: {sorted(counts)} rows of keys and values, expected as many of both")
    (rows,) = counts
    gapless = not sparse or not _has_gaps(found, name)
    base = position - rows if gapless else 0
    if sparse:
        row = _sparse_field(found, sides, name)
    else:
        _require_rows(planes, base, position, layer.plan.window, name)
        row = _field(found, planes, sides, base, position, name)
    parts = fields.split(row, sides, name)
    try:
        heads = [
            heads_of(plane.blocks, side, field, side.turn(layer.index, _estimator(layer, side, mine)))
            for plane, side, field, mine in zip(planes, sides, parts, own, strict=True)
        ]
    except KernelError as exc:
        raise FormatError(f"{name}: {exc}") from exc
    if isinstance(layer, ResidentLayer):
        frozen = cast(resident.Frozen, parts)
        return resident.prepare(layer, planes, (sides, heads), own, frozen, position=position, base=base, gapless=gapless)
    importance = _importance(found, rows, name) if layer.plan.importance else None
    keys, values = _made(layer.empty_planes(), heads, sides, own, mapped=mapped, room=room)
    return layer.prepare_adopt(keys, values, position=position, base=base, importance=importance, gapless=gapless)


def _made(
    empty: tuple[GrowingRows, GrowingRows], heads: Sequence[Heads], sides: resident.Sides, own: resident.Sides, *, mapped: bool,
    room: int,
) -> tuple[PlaneRows, PlaneRows]:  # fmt: skip
    """Keys and values in host memory of rows stored as ``sides`` say, as ``own`` ones."""
    if sides != own and any(side.format.quantised for side in own):  # fields are fixed for both planes at once
        _rewrite(heads, sides, empty)
        return empty
    keys, values = (
        _rewritten(part, side, mine) if side != wanted else _taken(part, mine, mapped=mapped, room=room)
        for part, side, wanted, mine in zip(heads, sides, own, empty, strict=True)
    )
    return keys, values


def _estimator(layer: AttentionLayer, stored: Side, own: Side) -> Estimator:
    """How the signs of rotated keys count: as the layer says where it attends over them. What is written anew
    does not depend on who does it."""
    turboquant = layer.plan.turboquant
    return turboquant.estimator if stored == own and turboquant is not None else Estimator.UNBIASED


def _plane(found: RestoredLayer, role: PlaneRole, name: str, *, state: bool) -> RestoredPlane:
    plane = (found.states if state else found.planes).get(role)
    if plane is None:
        raise FormatError(f"{name}: no {role.name} came back")
    return plane


def _require_rows(planes: Sequence[RestoredPlane], base: int, position: int, window: int, name: str) -> None:
    """Rows without a hole up to ``position``, as many as are needed there."""
    first = max(0, position - (window - 1)) if window else 0
    for plane in planes:
        at = first
        for start, block in zip(plane.starts, plane.blocks, strict=True):
            if start != at:
                raise FormatError(f"{name}: {plane.role.name} rows from {start} on, expected them from {at} on")
            at += len(block)
        if at != position or base != first:
            raise FormatError(f"{name}: {plane.role.name} rows up to {at}, expected them from {first} to {position}")


def _field(
    found: RestoredLayer, planes: Sequence[RestoredPlane], sides: Sequence[Side], base: int, position: int, name: str
) -> Rows | None:
    """The one field all rows were written with; None while it is open, or where there is none.

    A sequence keeps its field open up to row `WARMUP_ROWS` and then fixes it from all rows before: what
    was cut out of a longer one, or begins later, would go on otherwise."""
    quantised = [plane for plane, side in zip(planes, sides, strict=True) if side.format.quantised]
    if not quantised:
        return None
    named = {field for plane in quantised for field in plane.fields} or {NO_FIELD}
    if len(named) != 1:
        raise NotExact(f"{name}: rows of {len(named)} different fields")
    (digest,) = named
    if digest == NO_FIELD:
        if base > 0 or position > WARMUP_ROWS:
            raise NotExact(f"{name}: the field of rows [{base}, {position}) is open")
        return None
    if position < WARMUP_ROWS:
        raise NotExact(f"{name}: {position} rows were cut from a sequence that fixed its field at row {WARMUP_ROWS}")
    row = found.fields.get(digest)
    if row is None or fields.digest(np.asarray(row, np.float32)) != digest:
        raise FormatError(f"{name}: the field {digest.hex()} that its rows name did not come back as it was")
    return row


def _sparse_field(found: RestoredLayer, sides: Sequence[Side], name: str) -> Rows | None:
    if not any(side.format.quantised for side in sides):
        return None
    rows = _plane(found, PlaneRole.FIELD, name, state=True).array()
    return rows[0] if len(rows) else None


def _has_gaps(found: RestoredLayer, name: str) -> bool:
    seat = _plane(found, PlaneRole.BLOB, name, state=True).array().tobytes()
    if len(seat) != SEAT.size or SEAT.unpack(seat)[0] != SEAT_VERSION or SEAT.unpack(seat)[1] & ~HAS_GAPS:
        raise FormatError(f"{name}: where its rows lie is told as {seat[:64].hex()}, expected version {SEAT_VERSION}")
    return bool(SEAT.unpack(seat)[1] & HAS_GAPS)


def _taken(heads: Heads, empty: GrowingRows, *, mapped: bool, room: int) -> PlaneRows:
    if mapped and heads[0]:
        return PrefixRows(heads, empty)
    return empty.copied(heads, max(0, room - sum(map(len, heads[0]))))


def _rewritten(heads: Heads, side: Side, empty: GrowingRows) -> PlaneRows:
    _rewrite([heads], [side], [empty])
    return empty


def _rewrite(stored: Sequence[Heads], sides: Sequence[Side], empty: Sequence[GrowingRows]) -> None:
    """Append rows that were stored otherwise."""
    for plane in empty:
        plane.reserve(total_rows(stored[0][0]))
    planes = Planes(empty)
    for rows in pieces(stored, sides):
        planes.append(rows)


def _importance(found: RestoredLayer, rows: int, name: str) -> F32:
    mass = _plane(found, PlaneRole.IMPORTANCE, name, state=True).array()
    if len(mass) != rows:
        raise FormatError(f"{name}: the importance of {len(mass)} rows for {rows} rows")
    return np.array(mass, np.float32).reshape(rows)
