"""From checked records to the layers a caller gets.

Everything here was proven before (see `assembly`): rows are there, planes fit, bounds hold. Layers
are made when they are looked at, hence apart from the checks, which come first and all at once.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from warmkv.kvstore.needs import ModelNeeds, Provides, needs_of_model
from warmkv.kvstore.restored import RestoredLayer, RestoredPlane, Rows
from warmkv.kvstore.rows import stored_shape
from warmkv.schema.identity import Identity, PlaneRole, PlaneSpec
from warmkv.schema.records import Plane

Places = dict[tuple[int, PlaneRole], Plane]


@dataclass(slots=True)
class Piece:
    """One mapped record: its payload and planes by layer and role."""

    payload: Rows
    planes: Places

    def rows(self, plane: Plane, dtype: np.dtype[np.generic], shape: tuple[int, ...], start: int, end: int) -> Rows:
        """Rows [start, end) of a plane, counted as the plane counts them."""
        first = plane.offset + (start - plane.first_row) * plane.row_bytes
        return np.ndarray((end - start, *shape), dtype, self.payload, first)

    def all_rows(self, plane: Plane, spec: PlaneSpec) -> Rows:
        """All rows of a plane whose rows need not have the shape the model says."""
        dtype, shape = stored_shape(replace(spec, row_shape=plane.row_shape))
        return self.rows(plane, dtype, shape, plane.first_row, plane.first_row + plane.rows)


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a layer hands out: that of layer ``source``, rows as its group needs them (-1: none), each
    plane with dtype and shape of a row, and states of this kind."""

    source: int
    group: int
    state: Provides
    row_planes: tuple[tuple[PlaneSpec, np.dtype[np.generic], tuple[int, ...]], ...]
    field_planes: tuple[PlaneSpec, ...]
    state_planes: tuple[PlaneSpec, ...]


@lru_cache(maxsize=64)
def wanted_of(identity: Identity) -> tuple[ModelNeeds, tuple[Wanted, ...]]:
    """What a model needs to resume, and by layer what is handed out."""
    needs = needs_of_model(identity.layers)
    groups = {layer: number for number, group in enumerate(needs.groups) for layer in group.layers}
    kinds = ((needs.exact, Provides.EXACT), (needs.trimmable, Provides.TRIMMABLE), (needs.constant, Provides.CONSTANT))
    flags = {layer: flag for layers, flag in kinds for layer in layers}
    wanted = []
    for index, layer in enumerate(identity.layers):
        source = index if layer.shared_with < 0 else layer.shared_with
        own = identity.layers[source]
        rows = tuple((spec, *stored_shape(spec)) for spec in own.row_planes)
        about = (source, groups.get(source, -1), flags.get(source, Provides.NOTHING))
        wanted.append(Wanted(*about, rows, own.field_planes, own.state_planes))
    return needs, tuple(wanted)


@dataclass(frozen=True, slots=True)
class Run:
    """Rows [start, end) of a group, taken from one record."""

    piece: Piece
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class State:
    """A state at ``position``; ``start`` is that of the attachment it belongs to, or -1."""

    piece: Piece
    position: int
    start: int

    def planes(self, layer: int, specs: tuple[PlaneSpec, ...]) -> dict[PlaneRole, RestoredPlane]:
        found = {}
        for spec in specs:
            plane = self.piece.planes.get((layer, spec.role))
            if plane is not None:
                rows = self.piece.all_rows(plane, spec)
                found[spec.role] = RestoredPlane(spec.role, spec.format, plane.row_shape, (rows,), (self.position,))
        return found


def make_layer(index: int, wanted: Wanted, runs: tuple[Run, ...], states: tuple[State, ...]) -> RestoredLayer:
    """One layer, its rows taken from ``runs``."""
    source, starts = wanted.source, tuple([run.start for run in runs])
    planes = {}
    for spec, dtype, shape in wanted.row_planes:
        role, blocks, fields = spec.role, [], []
        for run in runs:
            plane = run.piece.planes[source, role]
            blocks.append(run.piece.rows(plane, dtype, shape, run.start, run.end))
            fields.append(plane.field)
        planes[role] = RestoredPlane(role, spec.format, spec.row_shape, tuple(blocks), starts, tuple(fields))
    quantised = {}
    for spec in wanted.field_planes:
        for run in runs:
            found = run.piece.planes.get((source, spec.role))
            if found is not None:
                quantised[found.field] = run.piece.all_rows(found, spec)[0]
    if wanted.state == Provides.CONSTANT:
        constants = {state.start: state.planes(source, wanted.state_planes) for state in states}
        return RestoredLayer(index, planes, {}, constants, quantised)
    return RestoredLayer(index, planes, states[0].planes(source, wanted.state_planes) if states else {}, {}, quantised)
