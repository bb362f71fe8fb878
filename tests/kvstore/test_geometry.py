"""What a header describes against what a model is: accepted as exactly what it covers, or refused."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from warmkv.kvstore.geometry import MAX_VOCABULARY, NO_ROWS, Coverage, Extent, segment_coverage, state_provides
from warmkv.kvstore.needs import Provides, needs_of_model
from warmkv.kvstore.testing import random_identity
from warmkv.kvstore.testing.samples import (
    CONV,
    ENCODER,
    FULL,
    NYSTROM,
    OPAQUE,
    RECURRENT,
    RING,
    SPARSE,
    chunked,
    hybrid,
    mixed_identity,
    random_mixture,
    shared,
    sink_window,
    sliding,
    weighed,
)
from warmkv.schema.errors import FormatError
from warmkv.schema.identity import Identity, LayerSpec, PlaneFormat, PlaneRole, PlaneSpec
from warmkv.schema.records import CLEAN, NO_FIELD, ROOT, NamespaceKey, Plane, RecordId, row_bytes
from warmkv.schema.segment import SegmentHeader, StateHeader

START, END = 3, 9
ROWS: Extent = (START, END)
KEY, VALUE = PlaneRole.KEY, PlaneRole.VALUE
FIELD_A, FIELD_B = b"a" * 16, b"b" * 16


def segment(planes: Sequence[Plane], start: int = START, end: int = END) -> SegmentHeader:
    return SegmentHeader(
        id=RecordId(bytes(16)), namespace=NamespaceKey(bytes(16)), lineage=CLEAN, parent=ROOT, start=start, end=end,
        tokens=np.arange(end - start, dtype="<u4"), attachments=(), planes=tuple(planes), digests=b"", created_ns=0, writer="",
    )  # fmt: skip


def state(planes: Sequence[Plane], position: int = END) -> StateHeader:
    return StateHeader(
        id=RecordId(bytes(16)), namespace=NamespaceKey(bytes(16)), lineage=CLEAN, parent=ROOT, position=position,
        attachments=(), planes=tuple(planes), digests=b"", created_ns=0, writer="",
    )  # fmt: skip


def plane(layer: int, spec: PlaneSpec, extent: Extent, **changes: Any) -> Plane:
    """A plane as the identity has it, with rows of ``extent``."""
    size = row_bytes(spec.format, spec.row_shape, spec.role)
    made = Plane(layer, spec.role, spec.format, spec.row_shape, extent[0], extent[1] - extent[0], size)
    return replace(made, **changes)


def planes_of(layer: int, spec: LayerSpec, extent: Extent) -> list[Plane]:
    return [plane(layer, item, extent) for item in spec.row_planes]


def state_planes_of(layer: int, spec: LayerSpec, rows: int = 1) -> list[Plane]:
    return [plane(layer, item, (0, rows)) for item in spec.state_planes]


# -- segments --------------------------------------------------------------------------------

#: Two layers of each need, states and a shared layer between them.
MIXED = mixed_identity(FULL, sliding(4), CONV, FULL, hybrid(4), chunked(4), shared(0), OPAQUE, sink_window(2, 3))
#: Layers by group, in the order of the groups.
GROUPS = ((0, 3), (1, 4), (5,), (8,))


def mixed(whole: Extent, window: Extent, chunk: Extent, sinks: Extent) -> list[Plane]:
    """Planes of MIXED with these rows by group."""
    found = []
    for layers, extent in zip(GROUPS, (whole, window, chunk, sinks), strict=True):
        for index in layers if extent != NO_ROWS else ():
            found += planes_of(index, MIXED.layers[index], extent)
    return found


@pytest.mark.parametrize(
    "extents",
    [
        (ROWS, (6, 9), (8, 9), (7, 9)), (ROWS, ROWS, ROWS, ROWS), (ROWS, NO_ROWS, NO_ROWS, NO_ROWS),
        (NO_ROWS, (4, 7), NO_ROWS, NO_ROWS), (NO_ROWS, NO_ROWS, (3, 4), (3, 5)), (ROWS, (3, 4), NO_ROWS, (5, 6)),
    ],
)  # fmt: skip
def test_what_a_segment_covers_is_one_range_a_group(extents: tuple[Extent, Extent, Extent, Extent]) -> None:
    planes = mixed(*extents)
    assert segment_coverage(segment(planes), MIXED) == Coverage(extents)
    random.Random(1).shuffle(planes)
    assert segment_coverage(segment(planes), MIXED) == Coverage(extents)


def test_planes_without_rows_are_as_good_as_none() -> None:
    for first in (0, START, END):
        empty = [plane(index, spec, (first, first)) for index in (1, 4) for spec in MIXED.layers[index].row_planes]
        found = segment_coverage(segment([*mixed(ROWS, NO_ROWS, NO_ROWS, NO_ROWS), *empty]), MIXED)
        assert found == Coverage((ROWS, NO_ROWS, NO_ROWS, NO_ROWS))


GOOD = mixed(ROWS, (6, 9), (8, 9), (7, 9))


def changed(layer: int, role: PlaneRole, **changes: Any) -> list[Plane]:
    return [replace(item, **changes) if (item.layer, item.role) == (layer, role) else item for item in GOOD]


def without(*places: tuple[int, PlaneRole]) -> list[Plane]:
    return [item for item in GOOD if (item.layer, item.role) not in places]


def whole_of(extent: Extent) -> list[Plane]:
    return mixed(extent, (6, 9), (8, 9), (7, 9))


SEGMENTS: dict[str, list[Plane]] = {
    "a window that begins later in one layer": changed(1, KEY, first_row=7, rows=2),
    "a window that begins later in all planes of one layer": [
        *without((4, KEY), (4, VALUE)), *planes_of(4, MIXED.layers[4], (7, 9)),
    ],
    "a window that ends earlier in one plane": changed(4, VALUE, rows=2),
    "a window of one layer only": without((4, KEY), (4, VALUE)),
    "keys without values": without((5, VALUE)),
    "values without keys": without((8, KEY)),
    "no rows in one plane": changed(5, VALUE, rows=0),
    "a whole layer missing": without((3, KEY), (3, VALUE)),
    "a plane of a whole layer missing": without((3, VALUE)),
    "whole layers that begin later": whole_of((4, 9)),
    "whole layers that end earlier": whole_of((3, 8)),
    "whole layers that begin before the segment": whole_of((2, 9)),
    "whole layers that go on behind the segment": whole_of((3, 10)),
    "whole layers of rows elsewhere": whole_of((100, 106)),
    "whole layers that differ": changed(0, KEY, first_row=4, rows=5),
    "an unknown layer": [*GOOD, plane(9, FULL.planes[0], ROWS)],
    "a layer beyond all": [*GOOD, plane(2**32 - 1, FULL.planes[0], ROWS)],
    "a layer that shares another's rows": [*GOOD, *planes_of(6, FULL, ROWS)],
    "rows of a layer that has only state": [*GOOD, *planes_of(2, FULL, ROWS)],
    "the state of a hybrid layer": [*GOOD, plane(4, hybrid().state_planes[0], (8, 9))],
    "the state of a layer": [*GOOD, plane(2, CONV.planes[0], (8, 9))],
    "a blob": [*GOOD, plane(7, OPAQUE.planes[0], (8, 9))],
    "a role the layer does not have": [*GOOD, plane(0, replace(FULL.planes[0], role=PlaneRole.LATENT), ROWS)],
    "logits": [*GOOD, Plane(9, PlaneRole.LOGITS, PlaneFormat.F32, (7,), 8, 1, 28)],
    "another format": changed(0, KEY, format=PlaneFormat.F16, row_bytes=8),
    "another format of the same size": changed(0, VALUE, format=PlaneFormat.BF16),
    "another shape": changed(0, KEY, row_shape=(2, 4), row_bytes=32),
    "another shape of the same size": changed(0, KEY, row_shape=(4, 1)),
    "an axis more": changed(0, KEY, row_shape=(1, 1, 4)),
    "rows of too few bytes": changed(0, KEY, row_bytes=15),
    "rows of too many bytes": changed(0, KEY, row_bytes=32),
    "another shape in a window": changed(1, KEY, row_shape=(2, 4), row_bytes=32),
    "rows of too few bytes in a window": changed(1, VALUE, row_bytes=2),
    "a frozen field": changed(0, KEY, field=FIELD_A),
    "a frozen field in a window": changed(1, KEY, field=FIELD_A),
    "a plane of a field": [*GOOD, Plane(0, PlaneRole.FIELD, PlaneFormat.RAW, (4,), START, 1, 4, field=FIELD_A)],
    "a field of an unknown layer": [*GOOD, Plane(99, PlaneRole.FIELD, PlaneFormat.RAW, (4,), START, 1, 4, field=FIELD_A)],
}  # fmt: skip


@pytest.mark.parametrize("name", SEGMENTS)
def test_segments_that_do_not_fit_are_refused(name: str) -> None:
    with pytest.raises(FormatError):
        segment_coverage(segment(SEGMENTS[name]), MIXED)


def test_a_segment_of_no_rows_where_rows_are_needed_is_refused() -> None:
    """It would make tokens known of which nothing is held."""
    for identity in (random_identity(), mixed_identity(FULL, CONV), mixed_identity(FULL, sliding(4)), mixed_identity(hybrid())):
        with pytest.raises(FormatError):
            segment_coverage(segment([]), identity)


@pytest.mark.parametrize("layers", [(RECURRENT,), (OPAQUE,), (sliding(1),), (chunked(3),), (ENCODER, RING)])
def test_models_that_need_no_rows_there_have_segments_without(layers: tuple[LayerSpec, ...]) -> None:
    identity = mixed_identity(*layers)
    found = segment_coverage(segment([]), identity)
    assert found == Coverage((NO_ROWS,) * len(needs_of_model(identity.layers).groups))


def test_any_planes_are_accepted_as_they_are_or_refused() -> None:
    """Random models and ranges, read plane by plane: a group is there alike or not at all."""
    rng = random.Random(11)
    outcomes = {True: 0, False: 0}
    for _ in range(4000):
        identity = mixed_identity(*random_mixture(rng, 4))
        usual = [rng.choice((ROWS, (6, 9), NO_ROWS)) for _ in needs_of_model(identity.layers).groups]
        planes, found = [], []
        for group, extent in zip(needs_of_model(identity.layers).groups, usual, strict=True):
            own = []
            for index in group.layers:
                for spec in identity.layers[index].row_planes:
                    mine = extent if rng.random() < 0.95 else rng.choice((ROWS, (6, 9), (6, 8), NO_ROWS))
                    own.append(mine)
                    if mine != NO_ROWS or rng.random() < 0.5:
                        planes.append(plane(index, spec, mine))
            found.append((group.whole, own))
        alike = all(len(set(own)) == 1 for _, own in found)
        whole = all(set(own) <= {ROWS, NO_ROWS} for is_whole, own in found if is_whole)
        held = [is_whole for is_whole, own in found if own[0] != NO_ROWS]
        something = bool(held) or not any(is_whole for is_whole, _ in found)
        good = alike and whole and something
        outcomes[good] += 1
        if good:
            assert segment_coverage(segment(planes), identity).extents == tuple(own[0] for _, own in found)
        else:
            with pytest.raises(FormatError):
                segment_coverage(segment(planes), identity)
    assert min(outcomes.values()) > 500


# -- frozen fields ---------------------------------------------------------------------------


def frozen_identity() -> Identity:
    """Keys and values quantised with a field that each sequence freezes once, and a layer without."""
    planes = (
        PlaneSpec(KEY, PlaneFormat.Q8_2F, (2, 32)), PlaneSpec(VALUE, PlaneFormat.Q8_2F, (2, 32)),
        PlaneSpec(PlaneRole.FIELD, PlaneFormat.F32, (5,)),
    )  # fmt: skip
    return mixed_identity(replace(FULL, planes=planes), FULL)


FROZEN = frozen_identity()


def frozen(digest: bytes = FIELD_A, **changes: Any) -> list[Plane]:
    """Rows of both layers, and last the plane of the field."""
    quantised = [plane(0, spec, ROWS, field=digest) for spec in FROZEN.layers[0].row_planes]
    field_plane = plane(0, FROZEN.layers[0].field_planes[0], (START, START + 1), field=digest)
    return [*quantised, *planes_of(1, FULL, ROWS), replace(field_plane, **changes)]


def test_fields_of_quantised_rows_are_told() -> None:
    for digest in (FIELD_A, NO_FIELD):
        assert segment_coverage(segment(frozen(digest)), FROZEN) == Coverage((ROWS,), frozenset({digest}))
    # Where the field is still open there is none to come along.
    assert segment_coverage(segment(frozen(NO_FIELD)[:-1]), FROZEN) == Coverage((ROWS,), frozenset({NO_FIELD}))
    # A runtime that keeps its fields itself names them only.
    identity = mixed_identity(replace(FULL, planes=FROZEN.layers[0].row_planes))
    quantised = [plane(0, spec, ROWS, field=FIELD_A) for spec in identity.layers[0].row_planes]
    assert segment_coverage(segment(quantised), identity) == Coverage((ROWS,), frozenset({FIELD_A}))
    assert segment_coverage(segment([quantised[0], replace(quantised[1], field=FIELD_B)]), identity).fields == {FIELD_A, FIELD_B}


def test_rows_without_the_field_they_name_are_refused() -> None:
    """Nobody could read them."""
    key, value, *rest = frozen()
    for planes in (frozen()[:-1], frozen(field=FIELD_B), frozen(field=NO_FIELD), [replace(key, field=FIELD_B), value, *rest]):
        with pytest.raises(FormatError):
            segment_coverage(segment(planes), FROZEN)


@pytest.mark.parametrize(
    "changes",
    [
        {"rows": 0}, {"rows": 2}, {"first_row": START + 1}, {"first_row": 0}, {"row_shape": (4,), "row_bytes": 16},
        {"format": PlaneFormat.F16, "row_bytes": 10}, {"row_bytes": 24}, {"layer": 1}, {"layer": 2}, {"layer": 2**32 - 1},
    ],
    ids=str,
)  # fmt: skip
def test_field_planes_that_do_not_fit_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(FormatError):
        segment_coverage(segment(frozen(**changes)), FROZEN)


def test_a_field_does_not_replace_rows() -> None:
    with pytest.raises(FormatError):
        segment_coverage(segment([frozen()[-1]]), FROZEN)
    with pytest.raises(FormatError):
        segment_coverage(segment([*frozen()[:2], *frozen()[-1:]]), FROZEN)


def test_keys_and_values_of_a_quantised_row_have_their_own_sizes() -> None:
    key, value, *_ = frozen()
    assert (key.row_bytes, value.row_bytes) == (2 * (32 + 4), 2 * (32 + 4))
    wide = mixed_identity(replace(FULL, planes=tuple(replace(spec, row_shape=(2, 64)) for spec in FROZEN.layers[0].row_planes)))
    planes = [plane(0, spec, ROWS) for spec in wide.layers[0].row_planes]
    assert [item.row_bytes for item in planes] == [2 * (64 + 8), 2 * (64 + 4)]
    assert segment_coverage(segment(planes), wide).extents == (ROWS,)
    for number in (0, 1):
        wrong = [
            replace(item, row_bytes=planes[1 - number].row_bytes) if at == number else item for at, item in enumerate(planes)
        ]
        with pytest.raises(FormatError):
            segment_coverage(segment(wrong), wide)


# -- states ----------------------------------------------------------------------------------

#: Every kind of state, between layers of rows.
STATEFUL = mixed_identity(FULL, CONV, RECURRENT, RING, NYSTROM, OPAQUE, OPAQUE, ENCODER, hybrid(), shared(0))
EXACT_LAYERS = (1, 2, 3, 4, 8)
EXACT = [item for index in EXACT_LAYERS for item in state_planes_of(index, STATEFUL.layers[index])]
BLOBS = [
    replace(item, row_shape=(size,), row_bytes=size)
    for index, size in ((5, 70), (6, 1))
    for item in state_planes_of(index, STATEFUL.layers[index])
]
CONSTANT = state_planes_of(7, ENCODER, 1500)
LOGITS = [Plane(10, PlaneRole.LOGITS, PlaneFormat.F32, (7,), 0, 1, 28)]
PARTS = {Provides.EXACT: EXACT, Provides.TRIMMABLE: BLOBS, Provides.CONSTANT: CONSTANT, Provides.LOGITS: LOGITS}


@pytest.mark.parametrize("number", range(1, 16))
def test_what_a_state_provides_is_what_it_holds(number: int) -> None:
    flags = Provides(number)
    planes = [item for flag, part in PARTS.items() if flag & flags for item in part]
    random.Random(number).shuffle(planes)
    importance = Provides.IMPORTANCE if flags & Provides.EXACT else Provides.NOTHING
    assert state_provides(state(planes), STATEFUL) == flags | importance


def test_rows_of_rings_landmarks_and_encoders_are_counted_by_their_runtime() -> None:
    for rows in (0, 1, 2, 128, 5000):
        planes = [replace(item, rows=rows) if item.layer in (3, 4) else item for item in EXACT]
        assert state_provides(state(planes), STATEFUL) == Provides.EXACT | Provides.IMPORTANCE
        assert state_provides(state(state_planes_of(7, ENCODER, max(1, rows))), STATEFUL) == Provides.CONSTANT


def test_importance_may_be_left_out_and_does_not_make_a_state() -> None:
    without_it = [item for item in EXACT if item.role != PlaneRole.IMPORTANCE]
    assert state_provides(state(without_it), STATEFUL) == Provides.EXACT
    with pytest.raises(FormatError):
        state_provides(state([item for item in EXACT if item.role == PlaneRole.IMPORTANCE]), STATEFUL)


def test_importance_that_is_all_there_is_must_be_there() -> None:
    identity = mixed_identity(weighed(), CONV, weighed())
    planes = [item for index, layer in enumerate(identity.layers) for item in state_planes_of(index, layer)]
    assert state_provides(state(planes), identity) == Provides.EXACT | Provides.IMPORTANCE
    for lost in (0, 2):
        with pytest.raises(FormatError, match="EXACT"):
            state_provides(state([item for item in planes if item.layer != lost]), identity)
    with pytest.raises(FormatError, match="no such rows"):
        rows = [item for index in (0, 2) for item in planes_of(index, FULL, ROWS)]
        segment_coverage(segment([*rows, planes[0]]), identity)


def test_rows_with_gaps_are_a_state_with_all_of_its_planes() -> None:
    identity = mixed_identity(SPARSE)
    planes = state_planes_of(0, SPARSE)
    assert {item.role for item in planes} >= {KEY, VALUE, PlaneRole.FIELD, PlaneRole.IMPORTANCE}
    open_field = [replace(item, rows=0) if item.role == PlaneRole.FIELD else item for item in planes]
    for good in (planes, open_field, [replace(item, rows=5000) for item in planes if item.role != PlaneRole.FIELD] + planes[2:3]):
        assert state_provides(state(good), identity) == Provides.EXACT | Provides.IMPORTANCE
    for lost in planes:
        with pytest.raises(FormatError):
            state_provides(state([item for item in planes if item.role != lost.role]), identity)
    with pytest.raises(FormatError, match="2 rows"):
        state_provides(state([replace(item, rows=2) if item.role == PlaneRole.FIELD else item for item in planes]), identity)
    with pytest.raises(FormatError, match="names a field"):
        state_provides(state([replace(item, field=FIELD_A) for item in planes]), identity)


def test_the_largest_vocabulary_is_the_largest() -> None:
    size = MAX_VOCABULARY
    assert state_provides(state([replace(LOGITS[0], row_shape=(size,), row_bytes=4 * size)]), STATEFUL) == Provides.LOGITS
    with pytest.raises(FormatError):
        state_provides(state([replace(LOGITS[0], row_shape=(size + 1,), row_bytes=4 * size + 4)]), STATEFUL)


def part(planes: list[Plane], layer: int, role: PlaneRole, **changes: Any) -> list[Plane]:
    assert any((item.layer, item.role) == (layer, role) for item in planes)
    return [replace(item, **changes) if (item.layer, item.role) == (layer, role) else item for item in planes]


STATES: dict[str, list[Plane]] = {
    "nothing": [],
    **{f"no state of layer {layer}": [item for item in EXACT if item.layer != layer] for layer in EXACT_LAYERS},
    "no recurrent plane": [item for item in EXACT if (item.layer, item.role) != (2, PlaneRole.RECURRENT)],
    "no conv plane of the hybrid": [item for item in EXACT if (item.layer, item.role) != (8, PlaneRole.CONV)],
    "no blob of one layer": BLOBS[:1],
    "encoder keys alone": CONSTANT[:1],
    "two conv states": part(EXACT, 1, PlaneRole.CONV, rows=2),
    "no conv state": part(EXACT, 1, PlaneRole.CONV, rows=0),
    "two recurrent states": part(EXACT, 2, PlaneRole.RECURRENT, rows=2),
    "two states of the hybrid": part(EXACT, 8, PlaneRole.RECURRENT, rows=2),
    "another shape": part(EXACT, 1, PlaneRole.CONV, row_shape=(3, 5)),
    "a shorter kernel": part(EXACT, 1, PlaneRole.CONV, row_shape=(5, 2), row_bytes=20),
    "another format": part(EXACT, 1, PlaneRole.CONV, format=PlaneFormat.F16),
    "rows of too few bytes": part(EXACT, 2, PlaneRole.RECURRENT, row_bytes=47),
    "a field": part(EXACT, 2, PlaneRole.RECURRENT, field=FIELD_A),
    "a blob of two rows": part(BLOBS, 5, PlaneRole.BLOB, rows=2),
    "a blob of no rows": part(BLOBS, 5, PlaneRole.BLOB, rows=0),
    "a blob with heads": part(BLOBS, 5, PlaneRole.BLOB, row_shape=(7, 10)),
    "a blob of another format": part(BLOBS, 5, PlaneRole.BLOB, format=PlaneFormat.FP8_E5M2),
    "a blob with a field": part(BLOBS, 5, PlaneRole.BLOB, field=FIELD_A),
    "encoder keys of another shape": part(CONSTANT, 7, KEY, row_shape=(4, 1)),
    "encoder keys of another format": part(CONSTANT, 7, KEY, format=PlaneFormat.F16, row_bytes=8),
    "encoder keys with a field": part(CONSTANT, 7, KEY, field=FIELD_A),
    "rows of a layer": [*EXACT, *planes_of(0, FULL, (0, 9))],
    "rows of a layer alone": planes_of(0, FULL, (0, 9)),
    "rows of the hybrid": [*EXACT, *planes_of(8, STATEFUL.layers[8], (0, 9))],
    "a layer that shares": [*EXACT, *state_planes_of(9, CONV)],
    "an unknown layer": [*EXACT, *state_planes_of(11, CONV)],
    "a layer beyond all": [*EXACT, *state_planes_of(2**32 - 1, CONV)],
    "a role the layer does not have": [*EXACT, plane(1, RECURRENT.planes[1], (0, 1))],
    "a state of a layer of rows": [*EXACT, *state_planes_of(0, CONV)],
    "logits of a layer": [*EXACT, replace(LOGITS[0], layer=0)],
    "logits elsewhere": [replace(LOGITS[0], layer=11)],
    "logits of half the size": [replace(LOGITS[0], format=PlaneFormat.F16, row_bytes=14)],
    "bits of logits": [replace(LOGITS[0], format=PlaneFormat.RAW, row_shape=(28,))],
    "logits of two tokens": [replace(LOGITS[0], rows=2)],
    "logits of no token": [replace(LOGITS[0], rows=0)],
    "logits with an axis": [replace(LOGITS[0], row_shape=(1, 7))],
    "a field plane": [*EXACT, Plane(0, PlaneRole.FIELD, PlaneFormat.RAW, (4,), 0, 1, 4)],
}


@pytest.mark.parametrize("name", STATES)
def test_states_that_do_not_fit_are_refused(name: str) -> None:
    with pytest.raises(FormatError):
        state_provides(state(STATES[name]), STATEFUL)


def test_a_state_before_the_first_token_is_refused() -> None:
    assert state_provides(state(EXACT, 1), STATEFUL) & Provides.EXACT
    with pytest.raises(FormatError, match="position 0"):
        state_provides(state(EXACT, 0), STATEFUL)


def test_logits_are_all_that_a_model_without_states_parks() -> None:
    identity = random_identity(2)
    assert state_provides(state([replace(LOGITS[0], layer=2)]), identity) == Provides.LOGITS
    for planes in (EXACT, BLOBS, CONSTANT, LOGITS):
        with pytest.raises(FormatError):
            state_provides(state(planes), identity)
