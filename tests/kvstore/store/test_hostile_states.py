"""Commits of states, windows and several containers by peers of bad will: each is refused by name
and changes nothing, and the good one still fits afterwards."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest

from warmkv.kvstore import memfd
from warmkv.kvstore.containers import Container, PlaneSource, write_segment, write_state
from warmkv.kvstore.rows import LayerState
from warmkv.kvstore.store import Store
from warmkv.kvstore.store.check import check
from warmkv.kvstore.store.session import LocalSession
from warmkv.kvstore.testing import FOLDED, IMAGE, OTHER_IMAGE, TOKENS, check_restore, save
from warmkv.kvstore.testing.samples import (
    CONV,
    ENCODER,
    FULL,
    OPAQUE,
    RECURRENT,
    mixed_identity,
    model_rows,
    model_states,
    sliding,
)
from warmkv.schema import ids as naming
from warmkv.schema import messages as m
from warmkv.schema import segment as container
from warmkv.schema.errors import DigestError, FormatError, OfferAgain, TooLarge, WarmKVError
from warmkv.schema.identity import Identity, PlaneRole
from warmkv.schema.records import (
    CLEAN,
    MAX_TOKENS,
    ROOT,
    Attachment,
    Lineage,
    NamespaceKey,
    Plane,
    RecordId,
    as_tokens,
    coverage,
)

OpenStore = Callable[..., Store]
KIB = 1024
BUDGET = 512 * KIB
UID = os.getuid()
IMAGES = (Attachment(3, 4, IMAGE),)
MODEL = mixed_identity(FULL, sliding(4), RECURRENT, CONV, OPAQUE, ENCODER)
LONG = [*TOKENS, 20, 21, 22]


class Arena:
    """A store with neighbours an attacker may point at, and the tools to make states that lie."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.engine = store.engine
        self.session = self.engine.session(UID)
        self.key = self.session.open(MODEL.canonical(), "")
        other = mixed_identity(*MODEL.layers, seed=7)
        self.other_key = self.session.open(other.canonical(), "")
        self.descriptors: list[int] = []
        #: Segments of rows [0, 9), and one that continues the first with three more.
        self.base = self._saved(MODEL, TOKENS)
        self.later = self._saved(MODEL, LONG)
        self.folded = self._saved(MODEL, TOKENS, lineage=FOLDED)
        self.foreign = self._saved(other, TOKENS)
        self.pictured = self._saved(MODEL, TOKENS, attachments=IMAGES)
        with self.engine.index.changed:
            self.state_of_base = next(child.id for child in self.record(self.base).children if child.is_state)

    def _saved(self, identity: Identity, ids: Sequence[int], **options: Any) -> RecordId:
        saved = save(self.store, identity, ids, **options)
        assert saved.id is not None
        return saved.id

    def record(self, id_: RecordId) -> Any:
        return self.engine.index.records[id_]

    def state(
        self, position: int, parent: RecordId, *, ids: Sequence[int] = tuple(LONG), attachments: tuple[Attachment, ...] = (),
        lineage: Lineage = CLEAN, key: NamespaceKey | None = None, layers: Sequence[int] = (2, 3),
        change: Callable[[list[LayerState]], list[LayerState]] = list,
    ) -> bytes:  # fmt: skip
        """A container of the states at ``position`` as a client would make it."""
        before = tuple(item for item in attachments if item.end <= position)
        found = model_states(MODEL, ids[:position], before, lineage)
        kept = change([item for item in found if item.layer in layers and item.position == position])
        sources = []
        for item in kept:
            specs = {spec.role: spec for spec in MODEL.layers[item.layer].state_planes}
            for plane in item.planes:
                shape = plane.rows.shape[1:] if plane.role == PlaneRole.BLOB else specs[plane.role].row_shape
                sources.append(PlaneSource(item.layer, shape, 0, plane))
        made = write_state(key or self.key, lineage, parent, as_tokens(ids[:position]), before, sources)
        return content(made)

    def rows(
        self, start: int, parent: RecordId, *, ids: Sequence[int] = tuple(LONG), window: tuple[int, int] | None = None
    ) -> bytes:
        """A container of rows [start, len(ids)); of the windowed layer those of ``window``."""
        first, last = window or (start, len(ids))
        ranges = {0: (start, len(ids)), 1: (first, last)}
        sources = []
        for record in model_rows(MODEL, ids):
            begin, end = ranges[record.layer]
            for plane in record.planes if begin < end else ():
                cut = replace(plane, rows=plane.rows[begin:end])
                sources.append(PlaneSource(record.layer, plane.rows.shape[1:], begin, cut))
        return content(write_segment(self.key, CLEAN, parent, start, as_tokens(ids), (), sources))

    def edited(self, data: bytes, *, named_by: Sequence[int] | None = None, **changes: Any) -> bytes:
        """The container with other header fields; with ``named_by`` its id is that of these tokens."""
        head = container.decode_head(data)
        payload: bytes = changes.pop("payload", data[head.payload_offset :])
        changes.setdefault("digests", container.payload_digests(payload))
        header = replace(head.header, **changes)
        if named_by is not None:
            id_ = naming.state_id(
                header.namespace, header.lineage, coverage(header.planes), header.attachments, as_tokens(named_by)
            )
            header = replace(header, id=id_)
        packed = container.encode_head(header, len(payload))
        return packed.ljust(container.align(len(packed), container.PAYLOAD_ALIGNMENT), b"\0") + payload

    def sealed(self, data: bytes, seals: int = memfd.SEALS) -> int:
        fd = memfd.create("hostile", len(data))
        memfd.write(fd, data, 0)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
        self.descriptors.append(fd)
        return fd

    def request(self, **changes: Any) -> m.Commit:
        return replace(m.Commit(self.key, self.engine.epoch, 0), **changes)

    def reserve(self, session: LocalSession, total_bytes: int = 20 * KIB) -> int:
        session.open(MODEL.canonical(), "")
        offered = session.offer(m.Offer(self.key, CLEAN, as_tokens([5] * 10), fixed_bytes=total_bytes))
        assert offered.reservation and offered.reserved_bytes == total_bytes
        return offered.reservation

    @property
    def reserved_bytes(self) -> int:
        return self.engine.warm.ledger.reserved_bytes

    def close_descriptors(self) -> None:
        while self.descriptors:
            os.close(self.descriptors.pop())


def content(made: Container) -> bytes:
    try:
        return memfd.read(made.fd, made.total_bytes, 0)
    finally:
        made.close()


@pytest.fixture
def arena(open_store_with: OpenStore) -> Iterator[Arena]:
    made = Arena(open_store_with(warm_bytes=BUDGET, busy_timeout_s=0.01))
    yield made
    made.close_descriptors()


def accounts(arena: Arena) -> dict[str, Any]:
    """Everything the store counts, the high-water mark apart."""
    told: dict[str, Any] = arena.store.stats()
    del told["warm"]["peak_bytes"]
    return told


def refused(
    arena: Arena, error: type[WarmKVError], attempt: Callable[[], object], descriptors: Callable[[], int],
    match: str | None = None,
) -> None:  # fmt: skip
    """``attempt`` raises exactly ``error``; nothing is counted, held, open or broken."""
    before, open_before = accounts(arena), descriptors()
    with pytest.raises(error, match=match) as caught:
        attempt()
    assert caught.type is error
    del caught
    assert (accounts(arena), descriptors()) == (before, open_before)
    assert check(arena.engine) == []


def goes_on(arena: Arena) -> None:
    """The good state fits where the bad one did not, and what was there is still there."""
    assert not arena.session.commit(arena.request(), arena.sealed(arena.state(8, arena.base))).duplicate
    check_restore(arena.store, MODEL, [*LONG, 1], 12, verify=True)
    check_restore(arena.store, MODEL, [*TOKENS, 1], 9, verify=True, attachments=IMAGES)


# -- what a state says of itself -------------------------------------------------------------


def with_planes(change: Callable[[list[Plane]], list[Plane]], layers: Sequence[int] = (2, 3)) -> Callable[[Arena], bytes]:
    """Other planes, laid out and named as if they were meant."""

    def make(arena: Arena) -> bytes:
        data = arena.state(8, arena.base, layers=layers)
        planes, payload_bytes = container.layout(change(list(container.decode_head(data).header.planes)))
        return arena.edited(data, planes=planes, payload=bytes(payload_bytes), named_by=LONG[:8])

    return make


def on_role(role: PlaneRole, **changes: Any) -> Callable[[list[Plane]], list[Plane]]:
    return lambda planes: [replace(plane, **changes) if plane.role == role else plane for plane in planes]


LOGITS = Plane(6, PlaneRole.LOGITS, MODEL.layers[0].planes[0].format, (7,), 0, 1, 28)
STATES: dict[str, tuple[type[WarmKVError], Callable[[Arena], bytes]]] = {
    "a parent that does not reach it": (FormatError, lambda a: a.state(12, a.base)),
    "a parent that begins where it lies": (FormatError, lambda a: a.state(9, a.later)),
    "a parent that begins behind it": (FormatError, lambda a: a.state(8, a.later)),
    "an unknown parent": (OfferAgain, lambda a: a.state(8, RecordId(b"p" * 16))),
    "no parent": (OfferAgain, lambda a: a.state(8, ROOT)),
    "a state as its parent": (OfferAgain, lambda a: a.state(8, a.state_of_base)),
    "a parent of another namespace": (OfferAgain, lambda a: a.state(8, a.foreign)),
    "a parent of another lineage": (FormatError, lambda a: a.state(8, a.folded)),
    "a parent with an image in it": (FormatError, lambda a: a.state(8, a.pictured)),
    "a parent without its image": (FormatError, lambda a: a.state(8, a.base, attachments=IMAGES)),
    "another image than its parent": (
        FormatError, lambda a: a.state(8, a.pictured, attachments=(Attachment(3, 4, OTHER_IMAGE),)),
    ),
    "an image under our id": (FormatError, lambda a: a.edited(a.state(8, a.base), attachments=IMAGES)),
    "no image under the id of one with it": (
        FormatError, lambda a: a.edited(a.state(8, a.pictured, attachments=IMAGES), attachments=()),
    ),
    "a position behind its parent, named by its parent's tokens": (
        FormatError, lambda a: a.edited(a.state(9, a.base), position=12),
    ),
    "another lineage than its parent": (FormatError, lambda a: a.state(8, a.base, lineage=FOLDED)),
    "another namespace than the request": (FormatError, lambda a: a.state(8, a.foreign, key=a.other_key)),
    "a position inside an attachment": (
        FormatError, lambda a: a.edited(a.state(5, a.pictured), attachments=(), named_by=LONG[:5]),
    ),
    "a position before the first token": (
        FormatError, lambda a: a.edited(a.state(1, a.base), position=0, named_by=LONG[:1]),
    ),
    "a position beyond all": (FormatError, lambda a: a.edited(a.state(8, a.base), position=MAX_TOKENS + 1)),
    "another position than its id": (FormatError, lambda a: a.edited(a.state(8, a.base), position=7)),
    "another id": (FormatError, lambda a: a.edited(a.state(8, a.base), id=RecordId(b"x" * 16))),
    "no id": (FormatError, lambda a: a.edited(a.state(8, a.base), id=ROOT)),
    "the id of the segment": (FormatError, lambda a: a.edited(a.state(8, a.base), id=a.base)),
    "the id of the state behind it": (FormatError, lambda a: a.edited(a.state(8, a.base), id=a.state_of_base)),
    "tokens of another prompt": (FormatError, lambda a: a.state(8, a.base, ids=[*LONG[:7], 99])),
    "tokens with another beginning": (FormatError, lambda a: a.state(8, a.base, ids=[99, *LONG[1:8]])),
    "no planes": (FormatError, with_planes(lambda planes: [])),
    "a layer missing": (FormatError, lambda a: a.state(8, a.base, layers=[2])),
    "the other layer missing": (FormatError, lambda a: a.state(8, a.base, layers=[3])),
    "a plane missing": (
        FormatError, with_planes(lambda planes: [plane for plane in planes if plane.role != PlaneRole.RECURRENT]),
    ),
    "an unknown layer": (FormatError, with_planes(on_role(PlaneRole.RECURRENT, layer=9))),
    "rows of a layer": (FormatError, with_planes(lambda planes: [*planes, replace(LOGITS, layer=0, role=PlaneRole.KEY)])),
    "two rows": (FormatError, with_planes(on_role(PlaneRole.RECURRENT, rows=2))),
    "no rows": (FormatError, with_planes(on_role(PlaneRole.RECURRENT, rows=0))),
    "another shape": (FormatError, with_planes(on_role(PlaneRole.RECURRENT, row_shape=(3, 2, 2)))),
    "a field": (FormatError, with_planes(on_role(PlaneRole.RECURRENT, field=b"f" * 16))),
    "a blob of two rows": (FormatError, with_planes(on_role(PlaneRole.BLOB, rows=2), layers=[4])),
    "a blob with heads": (FormatError, with_planes(on_role(PlaneRole.BLOB, row_shape=(4, 16)), layers=[4])),
    "logits of a layer": (FormatError, with_planes(lambda planes: [*planes, replace(LOGITS, layer=2)])),
    "logits of two tokens": (FormatError, with_planes(lambda planes: [*planes, replace(LOGITS, rows=2)])),
    "a writer with no end of a name": (FormatError, lambda a: a.edited(a.state(8, a.base), writer="w" * 100_000)),
}  # fmt: skip


@pytest.mark.parametrize("name", STATES)
def test_state_that_lies(arena: Arena, descriptors: Callable[[], int], name: str) -> None:
    error, make = STATES[name]
    fd = arena.sealed(make(arena))
    refused(arena, error, lambda: arena.session.commit(arena.request(), fd), descriptors)
    goes_on(arena)


def test_the_tools_make_good_states_without_a_lie(arena: Arena) -> None:
    good = [
        arena.state(8, arena.base),
        arena.edited(arena.state(7, arena.base), named_by=LONG[:7]),
        arena.state(11, arena.later),
        arena.state(9, arena.base, layers=[4], ids=TOKENS),
        arena.state(8, arena.pictured, attachments=IMAGES),
        with_planes(lambda planes: [*planes, LOGITS])(arena),
        arena.state(8, arena.folded, lineage=FOLDED),
    ]
    # The fourth is held already, the sixth holds more than the first.
    duplicates = [arena.session.commit(arena.request(), arena.sealed(data)).duplicate for data in good]
    assert duplicates == [False, False, False, True, False, False, False]
    assert check(arena.engine) == []
    again = arena.session.commit(arena.request(), arena.sealed(good[0]))
    assert again.duplicate and again.stored_bytes == 0


def test_a_state_of_a_strangers_prompt_is_not_told_from_none(arena: Arena) -> None:
    stranger = arena.engine.session(UID + 1)
    theirs = stranger.open(MODEL.canonical(), "")
    answers = []
    for parent in (arena.base, RecordId(b"p" * 16), arena.state_of_base):
        fd = arena.sealed(arena.state(8, parent, key=theirs))
        with pytest.raises(OfferAgain) as caught:
            stranger.commit(m.Commit(theirs, arena.engine.epoch, 0), fd)
        answers.append(str(caught.value))
    assert len(set(answers)) == 1
    goes_on(arena)


@pytest.mark.parametrize("where", [0.0, 0.5, 0.999])
def test_flipped_byte_of_a_state(arena: Arena, descriptors: Callable[[], int], where: float) -> None:
    data = bytearray(arena.state(8, arena.base))
    offset = container.decode_head(bytes(data)).payload_offset
    data[offset + int((len(data) - offset) * where)] ^= 0x10
    fd = arena.sealed(bytes(data))
    refused(arena, DigestError, lambda: arena.session.commit(arena.request(), fd), descriptors)
    goes_on(arena)


def test_every_flipped_byte_of_a_states_head_is_seen(arena: Arena) -> None:
    data = arena.state(8, arena.base)
    before = accounts(arena)
    for at in range(container.decode_head(data).head_bytes):
        broken = bytearray(data)
        broken[at] ^= 1 << at % 8
        fd = arena.sealed(bytes(broken))
        with pytest.raises(FormatError):
            arena.session.commit(arena.request(), fd)
        arena.close_descriptors()
    assert accounts(arena) == before
    goes_on(arena)


# -- windows ---------------------------------------------------------------------------------


def test_windows_of_any_length_are_taken(arena: Arena) -> None:
    """Fewer rows than the segment has tokens, or none at all; what is there is what is covered."""
    for number, window in enumerate([(9, 12), (10, 12), (9, 10), (10, 11), (12, 12)]):
        ids = [*TOKENS, 30 + number, 31, 32]
        data = arena.rows(9, arena.base, ids=ids, window=window)
        done = arena.session.commit(arena.request(), arena.sealed(data))
        assert not done.duplicate and done.held == 12
        with arena.engine.index.changed:
            expected = window if window[0] < window[1] else (0, 0)
            assert arena.record(done.id).extents == ((9, 12), expected)
    assert check(arena.engine) == []


def test_windows_that_do_not_fit_are_refused(arena: Arena, descriptors: Callable[[], int]) -> None:
    ids = [*TOKENS, 30, 31, 32]
    data = arena.rows(9, arena.base, ids=ids, window=(10, 12))
    header = container.decode_head(data).header
    window = [plane for plane in header.planes if plane.layer == 1]
    for change in ({"first_row": 9}, {"first_row": 10, "rows": 1}, {"rows": 0}, {"row_shape": (4, 1)}, {"layer": 2}):
        planes = tuple(replace(plane, **change) if plane == window[0] else plane for plane in header.planes)
        placed, payload_bytes = container.layout(planes)
        id_ = naming.segment_id(arena.key, CLEAN, 9, coverage(placed), (), as_tokens(ids))
        fd = arena.sealed(arena.edited(data, planes=placed, payload=bytes(payload_bytes), id=id_))
        refused(arena, FormatError, lambda fd=fd: arena.session.commit(arena.request(), fd), descriptors)  # type: ignore[misc]
    goes_on(arena)


# -- several containers of one reservation ---------------------------------------------------


def test_a_reservation_lasts_for_several_containers(arena: Arena) -> None:
    reservation = arena.reserve(arena.session)
    sizes = []
    for position in (6, 7):
        data = arena.state(position, arena.base)
        before = arena.reserved_bytes
        arena.session.commit(arena.request(reservation=reservation, more=True), arena.sealed(data))
        assert arena.reserved_bytes == before - len(data)
        sizes.append(len(data))
    assert arena.reserved_bytes == 20 * KIB - sum(sizes)
    arena.session.commit(arena.request(reservation=reservation), arena.sealed(arena.state(8, arena.base)))
    assert arena.reserved_bytes == 0
    fd = arena.sealed(arena.state(5, arena.base))
    with pytest.raises(OfferAgain):
        arena.session.commit(arena.request(reservation=reservation), fd)
    assert check(arena.engine) == []


def test_what_is_held_already_takes_nothing_of_a_reservation(arena: Arena) -> None:
    reservation = arena.reserve(arena.session)
    data = arena.state(6, arena.base)
    arena.session.commit(arena.request(), arena.sealed(data))
    done = arena.session.commit(arena.request(reservation=reservation, more=True), arena.sealed(data))
    assert done.duplicate and arena.reserved_bytes == 20 * KIB
    arena.session.annotate(m.Annotate(arena.key, CLEAN, as_tokens(TOKENS), reservation=reservation))
    assert arena.reserved_bytes == 0


def test_more_than_was_reserved_is_taken_where_there_is_room(arena: Arena) -> None:
    reservation = arena.reserve(arena.session, total_bytes=100)
    arena.session.commit(arena.request(reservation=reservation, more=True), arena.sealed(arena.state(6, arena.base)))
    assert arena.reserved_bytes == 0
    arena.session.commit(arena.request(reservation=reservation), arena.sealed(arena.state(7, arena.base)))
    assert check(arena.engine) == []


@pytest.mark.parametrize("more", [False, True])
def test_a_reservation_of_somebody_else_is_refused(arena: Arena, descriptors: Callable[[], int], more: bool) -> None:
    other = arena.engine.session(UID)
    reservation = arena.reserve(other)
    fd = arena.sealed(arena.state(8, arena.base))
    request = arena.request(reservation=reservation, more=more)
    refused(arena, OfferAgain, lambda: arena.session.commit(request, fd), descriptors)
    assert arena.reserved_bytes == 20 * KIB
    assert other.commit(request, fd).held == 8
    other.close()
    assert arena.reserved_bytes == 0
    assert arena.session.commit(arena.request(), arena.sealed(arena.state(7, arena.base))).held == 7


@pytest.mark.parametrize("where", ["descriptor", "head", "payload", "epoch", "anchors", "parent", "planes"])
def test_a_refused_container_ends_the_reservation_though_more_should_come(arena: Arena, where: str) -> None:
    """Its sender has lost the thread; nothing stays aside for it."""
    data = arena.state(8, RecordId(b"p" * 16) if where == "parent" else arena.base, layers=[2] if where == "planes" else (2, 3))
    broken = bytearray(data)
    broken[-1 if where == "payload" else 70] ^= where in ("head", "payload")
    fd = arena.sealed(bytes(broken), 0 if where == "descriptor" else memfd.SEALS)
    reservation = arena.reserve(arena.session)
    lies: dict[str, dict[str, Any]] = {"epoch": {"epoch": 1}, "anchors": {"anchors": b"x"}}
    with pytest.raises(WarmKVError):
        arena.session.commit(arena.request(reservation=reservation, more=True, **lies.get(where, {})), fd)
    assert arena.reserved_bytes == 0
    arena.session.close()
    assert arena.reserved_bytes == 0 and check(arena.engine) == []


def test_what_is_left_of_a_reservation_ends_with_its_session(arena: Arena) -> None:
    other = arena.engine.session(UID)
    reservation = arena.reserve(other)
    other.commit(arena.request(reservation=reservation, more=True), arena.sealed(arena.state(6, arena.base)))
    assert 0 < arena.reserved_bytes < 20 * KIB
    other.close()
    assert arena.reserved_bytes == 0 and check(arena.engine) == []


def test_a_reservation_that_expired_between_two_containers_is_no_obstacle(arena: Arena) -> None:
    reservation = arena.reserve(arena.session)
    arena.session.commit(arena.request(reservation=reservation, more=True), arena.sealed(arena.state(6, arena.base)))
    with arena.engine.index.changed:
        arena.engine.warm.ledger.expire(float("inf"))
    assert arena.reserved_bytes == 0
    arena.session.commit(arena.request(reservation=reservation, more=True), arena.sealed(arena.state(7, arena.base)))
    arena.session.commit(arena.request(reservation=reservation), arena.sealed(arena.state(8, arena.base)))
    assert arena.reserved_bytes == 0 and check(arena.engine) == []


def test_containers_beyond_the_budget_are_refused_whatever_was_reserved(arena: Arena, descriptors: Callable[[], int]) -> None:
    with pytest.raises(TooLarge):
        arena.reserve(arena.session, total_bytes=BUDGET + 1)
    reservation = arena.reserve(arena.session)
    fd = arena.sealed(bytes(BUDGET + 1))
    with pytest.raises(TooLarge):
        arena.session.commit(arena.request(reservation=reservation, more=True), fd)
    assert arena.reserved_bytes == 0 and check(arena.engine) == []
    goes_on(arena)
