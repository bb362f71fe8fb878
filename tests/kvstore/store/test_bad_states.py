"""Bad input about states, windows and logits: a typed error that says where, nothing stored,
nothing left behind."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from warmkv.kvstore.rows import LayerRows, LayerState, PlaneRows
from warmkv.kvstore.store import Store
from warmkv.kvstore.testing.samples import (
    CONV,
    ENCODER,
    FULL,
    IMAGE,
    NYSTROM,
    OPAQUE,
    RECURRENT,
    RING,
    TOKENS,
    Records,
    chunked,
    hybrid,
    layer_of,
    mixed_identity,
    model_logits,
    model_rows,
    model_states,
    records_at,
    shared,
    sink_window,
    sliding,
)
from warmkv.schema.errors import IdentityError, OfferAgain, RecordError, WarmKVError
from warmkv.schema.identity import AdapterRef, Identity, LayerKind, LayerSpec, PlaneFormat, PlaneRole, PlaneSpec
from warmkv.schema.records import Attachment

OpenStore = Callable[..., Store]
IDS = TOKENS[:5]


@pytest.fixture(params=[False, True], ids=["warm", "cold"])
def store(request: pytest.FixtureRequest, open_store_with: OpenStore, descriptors: Callable[[], int]) -> Iterator[Store]:
    """A store that holds one prompt of another model, and at the end just as much."""
    opened = open_store_with(request.param)
    other = mixed_identity(FULL, RECURRENT, seed=9)
    opened.save(other, IDS, records_at(other, IDS))
    opened.flush()
    gc.collect()  # what tests before this one left to the collector
    before = held(opened), descriptors()
    yield opened
    gc.collect()
    opened.flush()
    assert (held(opened), descriptors()) == before
    assert opened.match(other, [*IDS, 1]).usable == 5


def held(store: Store) -> tuple[object, ...]:
    engine = store.engine
    with engine.index.changed:
        ledger = engine.warm.ledger
        return len(engine.index.records), len(engine.index.namespaces), ledger.reserved_bytes, ledger.resident_bytes


def refused(store: Store, identity: Identity, records: Any, match: str, ids: Any = IDS, **options: Any) -> None:
    """Saving raises RecordError with these words, at once or from the queue."""
    for call in (store.save, store.save_async):
        with pytest.raises(RecordError, match=match):
            call(identity, ids, records, **options)


def change(records: Records, layer: int, kind: type, **changes: Any) -> Records:
    """The records with the one of this layer and kind changed."""
    return [replace(item, **changes) if item.layer == layer and isinstance(item, kind) else item for item in records]


def change_plane(records: Records, layer: int, kind: type, role: PlaneRole, rows: Any, **changes: Any) -> Records:
    found = []
    for item in records:
        if item.layer == layer and isinstance(item, kind):
            planes = tuple(replace(p, rows=rows(p.rows), **changes) if p.role == role else p for p in item.planes)
            item = replace(item, planes=planes)
        found.append(item)
    return found


# -- states ------------------------------------------------------------------------------


EXACT = {"ring": RING, "conv": CONV, "recurrent": RECURRENT, "nystroem": NYSTROM, "hybrid": hybrid(), "blob": OPAQUE}
by_kind = pytest.mark.parametrize("layer", EXACT.values(), ids=EXACT.keys())


@by_kind
def test_a_missing_state_is_named(store: Store, layer: Any) -> None:
    identity = mixed_identity(FULL, layer)
    records = [item for item in records_at(identity, IDS) if not isinstance(item, LayerState)]
    refused(store, identity, records, r"layer 1 \(\w+\): its state at 5 is missing")


@by_kind
@pytest.mark.parametrize("position", [0, -1, 4, 6, 2**40])
def test_a_state_of_another_position_than_the_ids_is_refused(store: Store, layer: Any, position: int) -> None:
    """As it comes from speculative decoding: the state ran ahead of the accepted tokens."""
    identity = mixed_identity(FULL, layer)
    records = change(records_at(identity, IDS), 1, LayerState, position=position)
    refused(store, identity, records, f"layer 1.*{position}")


@by_kind
def test_two_states_of_one_layer_are_refused(store: Store, layer: Any) -> None:
    identity = mixed_identity(layer)
    records = records_at(identity, IDS)
    refused(store, identity, [*records, *model_states(identity, IDS)], "layer 0")


@by_kind
def test_states_of_wrong_shape_or_type_are_refused(store: Store, layer: Any) -> None:
    identity = mixed_identity(FULL, layer)
    records = records_at(identity, IDS)
    for spec in layer.state_planes:
        if spec.role == PlaneRole.IMPORTANCE:
            continue
        role = spec.role
        bad: dict[str, Callable[[Any], Any]] = {
            "another type": lambda rows: rows.astype(np.float64),
            "another byte order": lambda rows: rows.astype(rows.dtype.newbyteorder(">")) if rows.itemsize > 1 else rows.tolist(),
            "a list": lambda rows: rows.tolist(),
            "a number": lambda rows: np.float32(1),
            "nothing": lambda rows: None,
        }
        if layer.kind != LayerKind.OPAQUE:
            bad |= {
                "a smaller row": lambda rows: rows[..., :-1],
                "fewer dimensions": lambda rows: rows[:, 0],
                "an axis more": lambda rows: rows[:, None],
                "axes swapped": lambda rows: np.ascontiguousarray(rows.swapaxes(-1, -2)) if rows.ndim > 2 else rows[..., :-1],
            }
        if role in (PlaneRole.CONV, PlaneRole.RECURRENT, PlaneRole.BLOB):
            bad |= {"two rows": lambda rows: np.concatenate([rows, rows]), "no rows": lambda rows: rows[:0]}
        for name, make in bad.items():
            with pytest.raises(RecordError, match="layer 1"):
                store.save(identity, IDS, change_plane(records, 1, LayerState, role, make))
                pytest.fail(f"{name} of {role.name} was accepted")
        with pytest.raises(RecordError, match="layer 1"):
            store.save(identity, IDS, change_plane(records, 1, LayerState, role, lambda rows: rows, format=PlaneFormat.Q8_0))


def test_a_conv_state_with_fewer_columns_than_the_kernel_is_refused(store: Store) -> None:
    """Few accepted tokens leave a short tail; it is stored whole or not at all."""
    identity = mixed_identity(CONV)
    for kept in (0, 1, 2):
        records = change_plane(records_at(identity, IDS), 0, LayerState, PlaneRole.CONV, lambda rows, kept=kept: rows[..., :kept])
        refused(store, identity, records, "layer 0, plane CONV has rows of shape")


@by_kind
def test_missing_unknown_and_doubled_planes_of_a_state_are_refused(store: Store, layer: Any) -> None:
    identity = mixed_identity(layer)
    (state,) = [item for item in records_at(identity, IDS) if isinstance(item, LayerState)]
    rest: Records = [item for item in records_at(identity, IDS) if isinstance(item, LayerRows)]
    stray = PlaneRows(PlaneRole.LATENT, PlaneFormat.F32, np.zeros((1, 4), np.float32))
    for planes in ((), state.planes[1:], (*state.planes, stray), (*state.planes, state.planes[0]), (stray,)):
        if [plane.role for plane in planes] != [plane.role for plane in state.planes if plane.role != PlaneRole.IMPORTANCE]:
            refused(store, identity, [*rest, replace(state, planes=planes)], "layer 0")


@pytest.mark.parametrize("index", [-1, 1, 2, 10**6])
def test_a_state_of_a_layer_that_has_none_is_refused(store: Store, index: int) -> None:
    identity = mixed_identity(CONV, FULL)
    records = records_at(identity, IDS)
    (state,) = [item for item in records if isinstance(item, LayerState)]
    refused(store, identity, [*records, replace(state, layer=index)], "layer")


def test_things_that_are_no_records_are_refused(store: Store) -> None:
    identity = mixed_identity(CONV)
    for wrong in (None, 3, b"rows", {"layer": 0}, (0, ())):
        refused(store, identity, [*records_at(identity, IDS), wrong], "record")


def test_records_of_a_shared_layer_are_refused(store: Store) -> None:
    identity = mixed_identity(FULL, shared(0))
    records = records_at(identity, IDS)
    refused(store, identity, [*records, replace(records[0], layer=1)], "layers")


def test_encoder_output_belongs_to_the_end_of_an_attachment(store: Store) -> None:
    identity, image = mixed_identity(ENCODER, FULL), [Attachment(1, 2, IMAGE)]
    records = records_at(identity, IDS, image)
    for position in (0, 1, 2, 4, 5):
        bad = change(records, 0, LayerState, position=position)
        refused(store, identity, bad, f"layer 0: encoder output at {position}", attachments=image)
    refused(store, identity, records, "layer 0: encoder output at 3")
    refused(store, identity, [*records, records[-1]], "layer 0", attachments=image)


# -- rows of windowed layers ---------------------------------------------------------------


@pytest.mark.parametrize("layer", [sliding(3), chunked(4), sink_window(1, 3), hybrid(3), FULL, hybrid()])
def test_rows_that_do_not_end_with_the_ids_are_refused(store: Store, layer: Any) -> None:
    identity = mixed_identity(CONV, layer)
    records = records_at(identity, IDS)
    for first in (-1, 1, 4, 6, 2**40):
        shifted = [replace(item, first=first) if isinstance(item, LayerRows) else item for item in records]
        rows = [item for item in shifted if isinstance(item, LayerRows)]
        if rows[-1].end != 5 or first < 0:
            refused(store, identity, shifted, "layer 1")
    for cut in (slice(1, None), slice(0, -1)):
        refused(store, identity, change_plane(records, 1, LayerRows, PlaneRole.KEY, lambda rows, cut=cut: rows[cut]), "layer 1")


def test_a_window_of_no_rows_is_refused_where_rows_are_needed(store: Store) -> None:
    """What cannot be resumed from must not look saved."""
    identity = mixed_identity(sliding(3))
    rows = model_rows(identity, IDS)[0]
    empty = replace(rows, planes=tuple(replace(plane, rows=plane.rows[5:]) for plane in rows.planes), first=5)
    short = replace(rows, planes=tuple(replace(plane, rows=plane.rows[4:]) for plane in rows.planes), first=4)
    for record in (empty, short):
        with pytest.raises((RecordError, OfferAgain), match="layer 0"):
            store.save(identity, IDS, [record])


def test_sinks_and_window_that_overlap_or_are_swapped_are_refused(store: Store) -> None:
    identity = mixed_identity(sink_window(2, 3))
    ids = list(range(20))
    sinks, window = records_at(identity, ids)
    assert isinstance(sinks, LayerRows) and isinstance(window, LayerRows)
    whole = model_rows(identity, ids)[0]
    for records in ([window, sinks], [sinks, sinks], [sinks], [whole, window], [sinks, whole], [sinks, window, window], [window]):
        with pytest.raises((RecordError, OfferAgain), match="layer 0"):
            store.save(identity, ids, records)
            pytest.fail(f"{[(item.first, item.end) for item in records]} was accepted")
    cut = replace(sinks, planes=tuple(replace(plane, rows=plane.rows[:1]) for plane in sinks.planes))
    with pytest.raises((RecordError, OfferAgain), match="layer 0"):
        store.save(identity, ids, [cut, window])


# -- ids, logits, identities ---------------------------------------------------------------


@pytest.mark.parametrize("ids", [[], [2**32, 1, 2, 3, 4], [-1, 1, 2, 3, 4], np.zeros((5, 1), np.uint32), [1.0] * 5, [None] * 5])
def test_ids_that_are_none_are_refused(store: Store, ids: Any) -> None:
    identity = mixed_identity(RECURRENT, sliding(2))
    refused(store, identity, records_at(identity, IDS), "token ids", ids=ids)
    for call in (store.match, store.restore, store.offer, store.forget):
        with pytest.raises(RecordError):
            call(identity, ids)


@pytest.mark.parametrize(
    "logits",
    [
        np.zeros(0, np.float32), np.zeros((1, 7), np.float32), np.zeros(7, np.float64), np.zeros(7, np.float16),
        np.zeros(7, ">f4"), [0.0] * 7, 1.0, np.float32(1),
    ],
    ids=str,
)  # fmt: skip
def test_logits_that_are_no_row_of_float32_are_refused(store: Store, logits: Any) -> None:
    for layers in ((FULL,), (RECURRENT,)):
        identity = mixed_identity(*layers)
        refused(store, identity, records_at(identity, IDS), "logits", logits=logits)


@pytest.mark.parametrize("layers", [(FULL,), (RECURRENT,), (sliding(3),), (sliding(1),), (OPAQUE, FULL), (hybrid(),)])
def test_no_records_add_nothing_where_nothing_is_held(store: Store, layers: Any) -> None:
    """Neither anchors nor logits make a prompt of ids alone."""
    identity = mixed_identity(*layers)
    for logits in (None, model_logits(identity, IDS)):
        with pytest.raises((RecordError, OfferAgain)):
            store.save(identity, IDS, [], logits=logits)


@pytest.mark.parametrize("digest", [b"", b"short", IMAGE[:31], IMAGE + b"x"])
def test_attachments_without_a_digest_are_refused(store: Store, digest: bytes) -> None:
    identity, bad = mixed_identity(RECURRENT, ENCODER), [Attachment(1, 2, digest)]
    good = [Attachment(1, 2, IMAGE)]
    refused(store, identity, records_at(identity, IDS, good), "digest", attachments=bad)
    with pytest.raises(RecordError, match="digest"):
        store.match(identity, IDS, attachments=bad)


def test_identities_that_leave_something_open_are_refused() -> None:
    good = mixed_identity(FULL, RECURRENT)
    for digest in (b"none", b"", b"x"):
        with pytest.raises(IdentityError):
            replace(good, adapters=(AdapterRef(digest, 1.0),))
    for kind in ("dynamic", "dynamic-ntk", "longrope", "something new", ""):
        with pytest.raises(IdentityError):
            replace(good, rope=replace(good.rope, kind=kind))
    wrong: Any = 99
    bad_layers = (
        layer_of(LayerKind.SLIDING), layer_of(LayerKind.CHUNKED), layer_of(LayerKind.SINK_WINDOW, sinks=1),
        layer_of(LayerKind.SHARED), replace(FULL, kind=wrong), replace(FULL, planes=()), replace(FULL, shared_with=0),
        replace(RECURRENT, planes=()), replace(CONV, planes=CONV.planes * 2), replace(FULL, window=-1),
    )  # fmt: skip
    for layer in bad_layers:
        with pytest.raises(IdentityError):
            mixed_identity(FULL, layer)


def test_hybrids_need_both_rows_and_a_state(store: Store) -> None:
    """A hybrid without the planes of either is another kind, and says so before it is stored."""
    rows, states = hybrid().row_planes, hybrid().state_planes
    for planes in (rows, states):
        with pytest.raises(WarmKVError):
            identity = mixed_identity(replace(hybrid(), planes=planes))
            store.save(identity, IDS, records_at(identity, IDS))


def test_rotated_rows_are_stored_under_their_seed(open_store_with: OpenStore) -> None:
    """Rows, and states of a RING, in formats that rotate; nothing is found under another seed."""
    store = open_store_with()
    for layer in (FULL, LayerSpec(LayerKind.RING, FULL.planes, window=4)):
        spec = [PlaneSpec(plane.role, PlaneFormat.TQ3, (3, 24), "rotation seed 7") for plane in layer.planes]
        identity = mixed_identity(replace(layer, planes=tuple(spec)))
        store.save(identity, IDS, records_at(identity, IDS))
        assert store.match(identity, [*IDS, 1]).usable == len(IDS)
        other = mixed_identity(replace(layer, planes=tuple(replace(plane, parameters="rotation seed 8") for plane in spec)))
        assert store.match(other, [*IDS, 1]).usable == 0
        taken = mixed_identity(replace(layer, planes=(replace(spec[0], format=PlaneFormat.TQ_KEY), *spec[1:])))
        with pytest.raises(RecordError, match="layer 0, plane KEY is TQ_KEY"):
            store.save(identity, IDS, records_at(taken, IDS))
        with pytest.raises(IdentityError, match="name no seed"):
            mixed_identity(replace(layer, planes=tuple(replace(plane, parameters="none") for plane in spec)))


def test_a_cut_inside_an_attachment_rounds_down_to_its_start(open_store_with: OpenStore, tmp_path: Path) -> None:
    store, image = open_store_with(), [Attachment(3, 4, IMAGE)]
    for layers in ((RECURRENT,), (FULL, sliding(3)), (OPAQUE,), (hybrid(2), CONV)):
        identity = mixed_identity(*layers)
        store.save(identity, TOKENS[:3], records_at(identity, TOKENS[:3]))
        store.save(identity, TOKENS, records_at(identity, TOKENS, image), attachments=image)
        changed = [*TOKENS[:5], 99, *TOKENS[6:]]
        match = store.match(identity, changed, attachments=image)
        assert (match.matched, match.usable) == (5, 3)
        assert store.offer(identity, changed, attachments=image).held == 3
        with store.restore(identity, changed, attachments=image) as restored:
            assert restored.usable == 3
        assert store.match(identity, TOKENS[:7], attachments=image).usable == 3
