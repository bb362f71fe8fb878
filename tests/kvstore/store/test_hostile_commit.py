"""Commits of every kind of bad will or bad luck: each is refused by name, changes nothing and
costs nothing, and the next good save works."""

from __future__ import annotations

import fcntl
import os
import socket
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from warmkv.kvstore import memfd
from warmkv.kvstore.containers import PlaneSource, write_segment
from warmkv.kvstore.store import Store
from warmkv.kvstore.store.check import check
from warmkv.kvstore.store.session import MAX_RESERVATIONS, LocalSession
from warmkv.kvstore.testing import FOLDED, IMAGE, OTHER_IMAGE, TOKENS, check_restore, model_rows, random_identity, save
from warmkv.schema import ids as naming
from warmkv.schema import messages as m
from warmkv.schema import segment as container
from warmkv.schema.errors import (
    Busy,
    ClosedError,
    DigestError,
    FormatError,
    IdentityError,
    OfferAgain,
    RecordError,
    RemoteProtocolError,
    StoreError,
    TooLarge,
    TooNewError,
    UnknownNamespace,
    UnsupportedError,
    WarmKVError,
)
from warmkv.schema.identity import Identity, LayerKind, LayerSpec, PlaneFormat, PlaneRole
from warmkv.schema.records import (
    CLEAN,
    ROOT,
    Anchor,
    AnchorKind,
    Attachment,
    Lineage,
    NamespaceKey,
    RecordId,
    as_tokens,
    coverage,
    pack_anchors,
    pack_attachments,
)

OpenStore = Callable[..., Store]
KIB = 1024
BUDGET = 512 * KIB
UID = os.getuid()
IMAGES = [Attachment(3, 4, IMAGE)]
LONG = [*TOKENS, 20, 21, 22]


class Arena:
    """A store with one prefix for each neighbour an attacker may point at, and the tools to make
    containers that lie."""

    def __init__(self, store: Store, identity: Identity) -> None:
        self.store = store
        self.engine = store.engine
        self.identity = identity
        self.other = random_identity(seed=7)
        self.session = self.engine.session(UID)
        self.key = self.session.open(identity.canonical(), "")
        self.other_key = self.session.open(self.other.canonical(), "")
        self.descriptors: list[int] = []
        #: Ids of rows [0, 9) as ours, folded, of another model, and with an image in them.
        self.base = self._saved(identity)
        self.folded = self._saved(identity, lineage=FOLDED)
        self.foreign = self._saved(self.other)
        self.pictured = self._saved(identity, attachments=IMAGES)

    def _saved(self, identity: Identity, **options: Any) -> RecordId:
        saved = save(self.store, identity, TOKENS, **options)
        assert saved.id is not None
        return saved.id

    def good(
        self, ids: list[int], start: int = 0, parent: RecordId = ROOT, *, attachments: list[Attachment] | None = None,
        lineage: Lineage = CLEAN, identity: Identity | None = None, key: NamespaceKey | None = None,
    ) -> bytes:  # fmt: skip
        """A container of rows [start, len(ids)) as a client would make it."""
        identity, items = identity or self.identity, attachments or []
        shapes = {(at, spec.role): spec.row_shape for at, layer in enumerate(identity.layers) for spec in layer.planes}
        sources = [
            PlaneSource(record.layer, shapes[record.layer, plane.role], start, replace(plane, rows=plane.rows[start:]))
            for record in model_rows(identity, ids, items, lineage)
            for plane in record.planes
        ]
        made = write_segment(key or self.key, lineage, parent, start, as_tokens(ids), items, sources)
        try:
            return memfd.read(made.fd, made.total_bytes, 0)
        finally:
            made.close()

    def edited(self, data: bytes, *, before: list[int] | None = None, rename: bool = True, **changes: Any) -> bytes:
        """The container with other header fields, its digests and (with ``rename``) its id set right."""
        head = container.decode_head(data)
        payload = changes.pop("payload", data[head.payload_offset :])
        header = head.header
        assert isinstance(header, container.SegmentHeader)
        header = replace(header, digests=container.payload_digests(payload))
        header = replace(header, **changes)
        if rename:
            tokens = as_tokens([*(before or []), *header.tokens.tolist()] or [0])
            id_ = naming.segment_id(
                header.namespace, header.lineage, header.start, coverage(header.planes), header.attachments, tokens
            )
            header = replace(header, id=changes.get("id", id_))
        return self.joined(container.encode_head(header, len(payload)), payload)

    @staticmethod
    def joined(head: bytes, payload: bytes) -> bytes:
        return head + bytes(container.align(len(head), container.PAYLOAD_ALIGNMENT) - len(head)) + payload

    def header(self, data: bytes) -> container.SegmentHeader:
        header = container.decode_head(data).header
        assert isinstance(header, container.SegmentHeader)
        return header

    def sealed(self, data: bytes, seals: int = memfd.SEALS, total_bytes: int | None = None) -> int:
        fd = memfd.create("hostile", len(data) if total_bytes is None else total_bytes)
        memfd.write(fd, data, 0)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
        return self.kept(fd)

    def kept(self, fd: int) -> int:
        """A descriptor that the arena closes at the end."""
        self.descriptors.append(fd)
        return fd

    def request(self, **changes: Any) -> m.Commit:
        return replace(m.Commit(self.key, self.engine.epoch, 0), **changes)

    def reserve(self, session: LocalSession) -> int:
        session.open(self.identity.canonical(), "")
        offered = session.offer(m.Offer(self.key, CLEAN, as_tokens([5] * 10), row_bytes=100, fixed_bytes=100))
        assert offered.reservation
        return offered.reservation

    def close_descriptors(self) -> None:
        while self.descriptors:
            os.close(self.descriptors.pop())


@pytest.fixture
def arena(open_store_with: OpenStore, identity: Identity) -> Iterator[Arena]:
    made = Arena(open_store_with(warm_bytes=BUDGET, busy_timeout_s=0.01), identity)
    yield made
    made.close_descriptors()


def accounts(arena: Arena) -> dict[str, Any]:
    """Everything the store counts, the high-water mark apart."""
    told: dict[str, Any] = arena.store.stats()
    del told["warm"]["peak_bytes"]
    return told


def refused(
    arena: Arena,
    error: type[WarmKVError],
    attempt: Callable[[], object],
    descriptors: Callable[[], int],
    match: str | None = None,
) -> None:
    """``attempt`` raises exactly ``error``; nothing is counted, held, open or broken; life goes on."""
    before, open_before = accounts(arena), descriptors()
    with pytest.raises(error, match=match) as caught:
        attempt()
    assert caught.type is error
    del caught
    assert accounts(arena) == before
    assert descriptors() == open_before
    assert check(arena.engine) == []


def goes_on(arena: Arena) -> None:
    fresh = [90, 91, 92, 93, 94]
    assert save(arena.store, arena.identity, fresh).sent_bytes > 0
    check_restore(arena.store, arena.identity, [*fresh, 1], 5, verify=True)
    check_restore(arena.store, arena.identity, [*TOKENS, 1], 9, verify=True)


Case = tuple[type[WarmKVError], Callable[[Arena], int]]
FRESH = [71, 72, 73, 74, 75, 76]


# -- descriptors ------------------------------------------------------------------------------


def regular_file(arena: Arena) -> int:
    with open(Path("/proc/self/exe").resolve(), "rb") as file:
        return arena.kept(os.dup(file.fileno()))


def pipe(arena: Arena) -> int:
    reading, writing = os.pipe()
    arena.kept(writing)
    return arena.kept(reading)


def write_only(arena: Arena) -> int:
    fd = arena.sealed(arena.good(FRESH), fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    other = arena.kept(os.open(f"/proc/self/fd/{fd}", os.O_WRONLY))
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
    return other


def sparse(arena: Arena) -> int:
    """A whole head, whose 256 KiB of payload are a hole: reading it would allocate them for us."""
    data = arena.good(FRESH)
    plane = replace(arena.header(data).planes[0], rows=6, row_bytes=64)
    hole = bytes(256 * KIB)
    planes, _ = container.layout([replace(plane, format=PlaneFormat.RAW, row_shape=(40_000,), row_bytes=40_000)])
    lying = arena.edited(data, payload=hole[: 6 * 40_000], planes=planes)
    return arena.sealed(lying[: container.decode_head(lying).payload_offset], total_bytes=len(lying))


DESCRIPTORS: dict[str, Case] = {
    "not sealed": (RemoteProtocolError, lambda a: a.sealed(a.good(FRESH), 0)),
    "not sealed against writing": (RemoteProtocolError, lambda a: a.sealed(a.good(FRESH), memfd.SEALS & ~fcntl.F_SEAL_WRITE)),
    "not sealed against shrinking": (RemoteProtocolError, lambda a: a.sealed(a.good(FRESH), memfd.SEALS & ~fcntl.F_SEAL_SHRINK)),
    "not sealed against growing": (RemoteProtocolError, lambda a: a.sealed(a.good(FRESH), memfd.SEALS & ~fcntl.F_SEAL_GROW)),
    "sealed against future writing only": (
        RemoteProtocolError, lambda a: a.sealed(a.good(FRESH), memfd.SEALS & ~fcntl.F_SEAL_WRITE | 0x10),
    ),
    "sparse": (RemoteProtocolError, sparse),
    "empty": (RemoteProtocolError, lambda a: a.sealed(b"")),
    "larger than the budget": (TooLarge, lambda a: a.sealed(bytes(BUDGET + 1))),
    "a pipe": (RemoteProtocolError, pipe),
    "a directory": (RemoteProtocolError, lambda a: a.kept(os.open("/", os.O_RDONLY | os.O_DIRECTORY))),
    "a regular file": (RemoteProtocolError, regular_file),
    "a device": (RemoteProtocolError, lambda a: a.kept(os.open("/dev/zero", os.O_RDONLY))),
    "a socket": (RemoteProtocolError, lambda a: a.kept(socket.socket(socket.AF_UNIX).detach())),
    "an event": (RemoteProtocolError, lambda a: a.kept(os.eventfd(1))),
    "a path": (RemoteProtocolError, lambda a: a.kept(os.open(f"/proc/self/fd/{a.sealed(a.good(FRESH))}", os.O_PATH))),
    "open for writing only": (StoreError, write_only),
    "three bytes": (FormatError, lambda a: a.sealed(b"WAR")),
    "zeros": (FormatError, lambda a: a.sealed(bytes(4096))),
    "noise": (FormatError, lambda a: a.sealed(np.random.default_rng(5).bytes(9000))),
    "cut by one byte": (FormatError, lambda a: a.sealed(a.good(FRESH)[:-1])),
    "cut inside the head": (FormatError, lambda a: a.sealed(a.good(FRESH)[:100])),
    "a head without its payload": (FormatError, lambda a: a.sealed(a.good(FRESH)[:4096])),
    "one byte too long": (FormatError, lambda a: a.sealed(a.good(FRESH) + b"\0")),
}  # fmt: skip


@pytest.mark.parametrize("name", DESCRIPTORS)
def test_descriptor_that_is_no_sealed_container(arena: Arena, descriptors: Callable[[], int], name: str) -> None:
    error, make = DESCRIPTORS[name]
    fd = make(arena)
    refused(arena, error, lambda: arena.session.commit(arena.request(), fd), descriptors)
    goes_on(arena)


# -- what the header says ---------------------------------------------------------------------


def tail(arena: Arena, **changes: Any) -> bytes:
    """Rows [9, 12) that continue ours, edited without a new id where the change is the lie."""
    return arena.edited(arena.good(LONG, 9, arena.base), rename=False, **changes)


def with_images(arena: Arena, start: int, parent: RecordId, images: list[Attachment]) -> bytes:
    """Rows [start, 12) with these attachments, named rightly but for what they break."""
    data = arena.good(LONG, start, parent)
    inside = tuple(item for item in images if item.start >= start)
    planes = arena.header(data).planes
    id_ = naming.segment_id(arena.key, CLEAN, start, coverage(planes), images, as_tokens(LONG))
    return arena.edited(data, attachments=inside, id=id_)


def state(arena: Arena) -> bytes:
    header = container.StateHeader(
        id=RecordId(bytes(range(16))), namespace=arena.key, lineage=CLEAN, parent=arena.base, position=9, attachments=(),
        planes=(), digests=b"", created_ns=1, writer="hostile",
    )  # fmt: skip
    return arena.joined(container.encode_head(header, 0), b"")


def newer(arena: Arena) -> bytes:
    data = bytearray(arena.good(FRESH))
    data[8] = 2
    return bytes(data)


HEADERS: dict[str, tuple[type[WarmKVError], Callable[[Arena], bytes]]] = {
    "another namespace": (FormatError, lambda a: a.good(FRESH, identity=a.other, key=a.other_key)),
    "a namespace that fits no model": (FormatError, lambda a: a.good(FRESH, key=NamespaceKey(bytes(16)))),
    "another id": (FormatError, lambda a: tail(a, id=RecordId(b"x" * 16))),
    "the id of its parent": (FormatError, lambda a: tail(a, id=a.base)),
    "no id": (FormatError, lambda a: tail(a, id=ROOT)),
    "another lineage than its id": (FormatError, lambda a: a.edited(a.good(FRESH), rename=False, lineage=FOLDED)),
    "tokens its id does not name": (FormatError, lambda a: tail(a, tokens=as_tokens([20, 21, 23]))),
    "an unknown parent": (OfferAgain, lambda a: tail(a, parent=RecordId(b"p" * 16))),
    "a parent of another lineage": (FormatError, lambda a: tail(a, parent=a.folded)),
    "a parent of another namespace": (OfferAgain, lambda a: tail(a, parent=a.foreign)),
    "a parent with other attachments": (FormatError, lambda a: tail(a, parent=a.pictured)),
    "a parent that does not reach its start": (FormatError, lambda a: a.good([*LONG, 23], 10, a.base)),
    "a parent that begins where it begins": (FormatError, lambda a: a.edited(a.good(FRESH), rename=False, parent=a.base)),
    "a parent although it begins at 0": (FormatError, lambda a: a.good(FRESH, 0, a.base)),
    "no parent although it begins later": (OfferAgain, lambda a: tail(a, parent=ROOT)),
    "an end before its start": (FormatError, lambda a: tail(a, end=8, tokens=as_tokens([1])[:0])),
    "an end at its start": (FormatError, lambda a: tail(a, end=9, tokens=as_tokens([1])[:0])),
    "fewer tokens than rows": (FormatError, lambda a: tail(a, tokens=as_tokens([20, 21]))),
    "more tokens than rows": (FormatError, lambda a: tail(a, tokens=as_tokens([20, 21, 22, 23]))),
    "more tokens than can be": (FormatError, lambda a: tail(a, end=2**63)),
    "a start inside an attachment": (FormatError, lambda a: with_images(a, 5, a.pictured, IMAGES)),
    "overlapping attachments": (
        FormatError, lambda a: with_images(a, 9, a.base, [Attachment(9, 2, IMAGE), Attachment(10, 2, OTHER_IMAGE)]),
    ),
    "the same attachment twice": (FormatError, lambda a: with_images(a, 9, a.base, [Attachment(9, 2, IMAGE)] * 2)),
    "an attachment before its rows": (
        FormatError, lambda a: a.edited(a.good(LONG, 9, a.base), rename=False, attachments=(Attachment(7, 2, IMAGE),)),
    ),
    "an attachment beyond its rows": (FormatError, lambda a: with_images(a, 9, a.base, [Attachment(10, 3, IMAGE)])),
    "an empty attachment": (FormatError, lambda a: with_images(a, 9, a.base, [Attachment(10, 0, IMAGE)])),
    "a state": (FormatError, state),
    "a newer version": (TooNewError, newer),
    "a writer with no end of a name": (FormatError, lambda a: a.edited(a.good(FRESH), writer="w" * 100_000)),
}  # fmt: skip


@pytest.mark.parametrize("name", HEADERS)
def test_header_that_lies(arena: Arena, descriptors: Callable[[], int], name: str) -> None:
    error, make = HEADERS[name]
    fd = arena.sealed(make(arena))
    refused(arena, error, lambda: arena.session.commit(arena.request(), fd), descriptors)
    goes_on(arena)


def test_the_edited_containers_are_good_but_for_the_lie(arena: Arena) -> None:
    """The tools themselves: what they make without a lie is taken."""
    for number, data in enumerate([
        arena.edited(arena.good(FRESH)),
        arena.edited(arena.good(LONG, 9, arena.base), before=TOKENS),
        with_images(arena, 9, arena.pictured, IMAGES),
        arena.good(LONG, 9, arena.folded, lineage=FOLDED),
        arena.edited(arena.good([1, 2, 3]), writer="w" * 128),
    ]):  # fmt: skip
        done = arena.session.commit(arena.request(), arena.sealed(data))
        assert not done.duplicate and done.held >= 3, number
    again = arena.session.commit(arena.request(), arena.sealed(arena.good(FRESH)))
    assert again.duplicate and again.stored_bytes == 0
    goes_on(arena)


def test_a_parent_of_another_user_is_not_told_from_none(arena: Arena, descriptors: Callable[[], int]) -> None:
    """Ids can be computed by whoever guesses a prompt; the answer must not say whether it is held."""
    stranger = arena.engine.session(UID + 1)
    theirs = stranger.open(arena.identity.canonical(), "")
    answers = []
    for parent in (arena.base, RecordId(b"p" * 16)):
        fd = arena.sealed(arena.good(LONG, 9, parent, key=theirs))
        with pytest.raises(OfferAgain) as caught:
            stranger.commit(m.Commit(theirs, arena.engine.epoch, 0), fd)
        answers.append(str(caught.value))
        del caught
        refused(arena, OfferAgain, lambda fd=fd: stranger.commit(m.Commit(theirs, arena.engine.epoch, 0), fd), descriptors)  # type: ignore[misc]
    assert answers[0] == answers[1]
    goes_on(arena)


# -- geometry ---------------------------------------------------------------------------------


def reshaped(change: Callable[[list[Any]], list[Any]]) -> Callable[[Arena], bytes]:
    """Other planes, laid out and named as if they were meant."""

    def make(arena: Arena) -> bytes:
        data = arena.good(FRESH)
        planes, payload_bytes = container.layout(change(list(arena.header(data).planes)))
        return arena.edited(data, planes=planes, payload=bytes(payload_bytes))

    return make


GEOMETRIES: dict[str, Callable[[Arena], bytes]] = {
    "another dtype": reshaped(lambda p: [replace(p[0], format=PlaneFormat.F16, row_bytes=p[0].row_bytes // 2), *p[1:]]),
    "the bits under another name": reshaped(
        lambda p: [replace(p[0], format=PlaneFormat.RAW, row_shape=(64,), row_bytes=64), *p[1:]]
    ),
    "heads and sizes swapped": reshaped(lambda p: [replace(p[0], row_shape=(8, 2)), *p[1:]]),
    "heads and sizes joined": reshaped(lambda p: [replace(p[0], row_shape=(16,)), *p[1:]]),
    "half the heads": reshaped(lambda p: [replace(p[0], row_shape=(1, 8), row_bytes=32), *p[1:]]),
    "a layer missing": reshaped(lambda p: [item for item in p if item.layer == 0]),
    "a plane missing": reshaped(lambda p: p[:-1]),
    "no planes": reshaped(lambda p: []),
    "a layer too many": reshaped(lambda p: [*p, *(replace(item, layer=2) for item in p[:2])]),
    "a plane too many": reshaped(lambda p: [*p, replace(p[0], role=PlaneRole.LATENT)]),
    "another role": reshaped(lambda p: [replace(p[0], role=PlaneRole.LATENT), *p[1:]]),
    "a plane twice": reshaped(lambda p: [p[0], p[0], *p[1:]]),
    "the last row of all missing": reshaped(lambda p: [replace(item, rows=5) for item in p]),
    "the first row of all missing": reshaped(lambda p: [replace(item, first_row=1, rows=5) for item in p]),
    "the last row missing": reshaped(lambda p: [replace(p[0], rows=5), *p[1:]]),
    "the first row missing": reshaped(lambda p: [replace(p[0], first_row=1, rows=5), *p[1:]]),
    "no rows": reshaped(lambda p: [replace(p[0], rows=0), *p[1:]]),
    "rows beyond its end": reshaped(lambda p: [replace(p[0], rows=7), *p[1:]]),
    "a frozen field": reshaped(lambda p: [replace(p[0], field=b"f" * 16), *p[1:]]),
    "a frozen field of all": reshaped(lambda p: [replace(item, field=b"f" * 16) for item in p]),
    "a field plane": reshaped(lambda p: [*p, replace(p[0], role=PlaneRole.FIELD, rows=1)]),
    "a state among the rows": reshaped(lambda p: [*p, replace(p[0], role=PlaneRole.RECURRENT, rows=1)]),
    "logits among the rows": reshaped(
        lambda p: [*p, replace(p[0], layer=2, role=PlaneRole.LOGITS, row_shape=(7,), row_bytes=28, rows=1)]
    ),
}


@pytest.mark.parametrize("name", GEOMETRIES)
def test_geometry_that_is_not_the_models(arena: Arena, descriptors: Callable[[], int], name: str) -> None:
    fd = arena.sealed(GEOMETRIES[name](arena))
    refused(arena, FormatError, lambda: arena.session.commit(arena.request(), fd), descriptors)
    goes_on(arena)


def moved(change: Callable[[list[Any]], list[Any]]) -> Callable[[Arena], bytes]:
    """The same planes at other places of the same payload."""
    return lambda arena: arena.edited(arena.good(FRESH), planes=tuple(change(list(arena.header(arena.good(FRESH)).planes))))


PLACES: dict[str, Callable[[Arena], bytes]] = {
    "two planes at one place": moved(lambda p: [p[0], replace(p[1], offset=p[0].offset), *p[2:]]),
    "overlapping planes": moved(lambda p: [p[0], replace(p[1], offset=p[1].offset - 64), *p[2:]]),
    "an unaligned plane": moved(lambda p: [replace(p[0], offset=4), *p[1:]]),
    "a plane that leaves the payload": moved(lambda p: [*p[:-1], replace(p[-1], offset=p[-1].offset + 64)]),
    "a plane far outside": moved(lambda p: [*p[:-1], replace(p[-1], offset=2**62)]),
    "payload behind the last plane": lambda a: a.edited(a.good(FRESH), payload=bytes(64 * KIB)),
    "too few digests": lambda a: a.edited(a.good(FRESH), digests=b""),
    "too many digests": lambda a: a.edited(a.good(FRESH), digests=bytes(32)),
    "half a digest": lambda a: a.edited(a.good(FRESH), digests=bytes(8)),
}


@pytest.mark.parametrize("name", PLACES)
def test_layout_that_leads_astray(arena: Arena, descriptors: Callable[[], int], name: str) -> None:
    fd = arena.sealed(PLACES[name](arena))
    refused(arena, FormatError, lambda: arena.session.commit(arena.request(), fd), descriptors)
    goes_on(arena)


def test_model_that_cannot_be_served_is_refused_without_an_offer_too(arena: Arena, descriptors: Callable[[], int]) -> None:
    """`offer` refuses such models; whoever skips it must not get past."""
    sharing = [LayerSpec(LayerKind.SHARED, (), shared_with=layer) for layer in (3, 0)]
    odd = replace(arena.identity, layers=(*arena.identity.layers, *sharing))
    key = arena.session.open(odd.canonical(), "")
    plain = arena.good(FRESH, key=key)
    fd = arena.sealed(plain)
    refused(arena, UnsupportedError, lambda: arena.session.commit(arena.request(namespace=key), fd), descriptors)
    goes_on(arena)


def test_rotated_rows_of_another_size_or_without_a_seed_are_refused(arena: Arena, descriptors: Callable[[], int]) -> None:
    """Taken, they would make every reader stumble over rows that are no whole rows, or turn them back wrongly."""
    layer = arena.identity.layers[0]
    rotated = tuple(replace(p, format=PlaneFormat.TQ_KEY, row_shape=(2, 24), parameters="rotation seed 7") for p in layer.planes)
    odd = replace(arena.identity, layers=(replace(layer, planes=rotated),))
    key = arena.session.open(odd.canonical(), "")
    data = arena.good(FRESH, identity=odd, key=key)
    wrong: tuple[dict[str, Any], ...] = (
        {"row_bytes": 25}, {"row_bytes": 27}, {"row_shape": (2, 23)}, {"row_shape": (26, 1)}, {"format": PlaneFormat.TQ3},
    )  # fmt: skip
    for changes in wrong:
        planes, payload_bytes = container.layout([replace(plane, **changes) for plane in arena.header(data).planes])
        fd = arena.sealed(arena.edited(data, planes=planes, payload=bytes(payload_bytes)))
        commit = partial(arena.session.commit, arena.request(namespace=key), fd)
        refused(arena, FormatError, commit, descriptors)
    for seed in (b"rotation seed x", b"Rotation seed 7"):
        with pytest.raises((FormatError, IdentityError)):
            arena.session.open(odd.canonical().replace(b"rotation seed 7", seed), "")
    arena.session.commit(arena.request(namespace=key), arena.sealed(data))
    goes_on(arena)


def test_anchors_of_shifted_rows_on_a_clean_lineage_are_refused(arena: Arena, descriptors: Callable[[], int]) -> None:
    """Whoever asks by tokens alone would be handed rows of other positions."""
    shifted = pack_anchors([Anchor(2), Anchor(3, AnchorKind.TURN, shift_offset=8)])
    fd = arena.sealed(arena.good(FRESH))
    refused(arena, RecordError, lambda: arena.session.commit(arena.request(anchors=shifted), fd), descriptors, "shifted by 8")
    note = m.Annotate(arena.key, CLEAN, as_tokens(TOKENS), b"", m.ACK_MEMORY, shifted, 0, False, 0)
    with pytest.raises(RecordError, match="anchor at 3: its rows were shifted by 8 positions"):
        arena.session.annotate(note)
    assert arena.store.match(arena.identity, [*TOKENS, 1]).anchors == ()
    arena.session.annotate(replace(note, lineage=FOLDED))
    assert [anchor.shift_offset for anchor in arena.store.match(arena.identity, [*TOKENS, 1], lineage=FOLDED).anchors] == [0, 8]
    goes_on(arena)


# -- flipped bits -----------------------------------------------------------------------------


def test_every_flipped_byte_of_the_head_is_seen(arena: Arena, descriptors: Callable[[], int]) -> None:
    data = arena.good(FRESH)
    size = container.decode_head(data).head_bytes
    before, open_before = accounts(arena), descriptors()
    for at in range(size):
        broken = bytearray(data)
        broken[at] ^= 1 << at % 8
        fd = arena.sealed(bytes(broken))
        with pytest.raises(FormatError):
            arena.session.commit(arena.request(), fd)
            pytest.fail(f"byte {at} was not missed")
        arena.close_descriptors()
    assert (accounts(arena), descriptors()) == (before, open_before)
    assert check(arena.engine) == []
    goes_on(arena)


@pytest.mark.parametrize("where", [0.0, 0.5, 0.999])
def test_flipped_byte_of_the_payload(arena: Arena, descriptors: Callable[[], int], where: float) -> None:
    data = bytearray(arena.good(FRESH))
    offset = container.decode_head(bytes(data)).payload_offset
    data[offset + int((len(data) - offset) * where)] ^= 0x10
    fd = arena.sealed(bytes(data))
    refused(arena, DigestError, lambda: arena.session.commit(arena.request(), fd), descriptors)
    goes_on(arena)
    # The same rows, whole, are no duplicate of what was refused.
    assert not arena.session.commit(arena.request(), arena.sealed(arena.good(FRESH))).duplicate
    check_restore(arena.store, arena.identity, [*FRESH, 1], 6, verify=True)


# -- what the request says --------------------------------------------------------------------


def anchors(*positions: int) -> bytes:
    return pack_anchors([Anchor(position) for position in positions])


def unknown_kind() -> bytes:
    packed = bytearray(anchors(1))
    packed[8] = 200
    return bytes(packed)


REQUESTS: dict[str, tuple[type[WarmKVError], dict[str, Any]]] = {
    "another epoch": (OfferAgain, {"epoch": 12345}),
    "no epoch": (OfferAgain, {"epoch": 0}),
    "an unknown reservation": (OfferAgain, {"reservation": 999}),
    "4097 anchors": (RecordError, {"anchors": anchors(*[1] * 4097)}),
    "more anchors than a table holds": (FormatError, {"anchors": anchors(1) * ((1 << 16) + 1)}),
    "an anchor beyond the end": (RecordError, {"anchors": anchors(6, 7)}),
    "an anchor at 0": (RecordError, {"anchors": anchors(0)}),
    "an anchor at the end of time": (RecordError, {"anchors": anchors(2**64 - 1)}),
    "half an anchor": (FormatError, {"anchors": anchors(1)[:-1]}),
    "an unknown kind of anchor": (FormatError, {"anchors": unknown_kind()}),
    "a namespace not opened": (UnknownNamespace, {"namespace": NamespaceKey(b"n" * 16)}),
    "no namespace": (UnknownNamespace, {"namespace": NamespaceKey(b"")}),
}


@pytest.mark.parametrize("name", REQUESTS)
def test_request_that_does_not_fit(arena: Arena, descriptors: Callable[[], int], name: str) -> None:
    error, changes = REQUESTS[name]
    fd = arena.sealed(arena.good(FRESH))
    refused(arena, error, lambda: arena.session.commit(arena.request(**changes), fd), descriptors)
    goes_on(arena)


def test_anchor_inside_an_attachment_of_an_older_segment(arena: Arena, descriptors: Callable[[], int]) -> None:
    fd = arena.sealed(arena.good(LONG, 9, arena.pictured, attachments=IMAGES))
    refused(arena, RecordError, lambda: arena.session.commit(arena.request(anchors=anchors(5)), fd), descriptors)
    assert arena.session.commit(arena.request(anchors=anchors(3, 7, 12)), fd).held == 12
    goes_on(arena)


def test_reservation_of_another_session(arena: Arena, descriptors: Callable[[], int]) -> None:
    other = arena.engine.session(UID)
    reservation = arena.reserve(other)
    fd = arena.sealed(arena.good(FRESH))
    refused(arena, OfferAgain, lambda: arena.session.commit(arena.request(reservation=reservation), fd), descriptors)
    assert arena.engine.warm.ledger.reserved_bytes > 0
    other.close()
    assert arena.engine.warm.ledger.reserved_bytes == 0
    goes_on(arena)


def test_reservation_used_twice(arena: Arena, descriptors: Callable[[], int]) -> None:
    reservation = arena.reserve(arena.session)
    request = arena.request(reservation=reservation)
    assert arena.session.commit(request, arena.sealed(arena.good(FRESH))).held == 6
    fd = arena.sealed(arena.good([*FRESH, 77]))
    refused(arena, OfferAgain, lambda: arena.session.commit(request, fd), descriptors)
    goes_on(arena)


@pytest.mark.parametrize("where", ["descriptor", "head", "payload", "epoch", "anchors", "parent"])
def test_every_refusal_gives_its_reservation_back(arena: Arena, where: str) -> None:
    data = arena.good(LONG, 9, arena.base)
    broken = bytearray(data)
    broken[-1 if where == "payload" else 70] ^= where in ("head", "payload")
    if where == "parent":
        broken[:] = tail(arena, parent=RecordId(b"p" * 16))
    fd = arena.sealed(bytes(broken), 0 if where == "descriptor" else memfd.SEALS)
    reservation = arena.reserve(arena.session)
    assert arena.engine.warm.ledger.reserved_bytes > 0
    lies: dict[str, dict[str, Any]] = {"epoch": {"epoch": 1}, "anchors": {"anchors": anchors(13)}}
    with pytest.raises(WarmKVError):
        arena.session.commit(arena.request(reservation=reservation, **lies.get(where, {})), fd)
    assert arena.engine.warm.ledger.reserved_bytes == 0
    goes_on(arena)


def test_announced_uploads_are_bounded(arena: Arena, descriptors: Callable[[], int]) -> None:
    """A million of one byte each would fit the budget; every search for room would walk them."""
    offer = m.Offer(arena.key, CLEAN, as_tokens([5, 6]), row_bytes=1)
    taken = [arena.session.offer(offer).reservation for _ in range(MAX_RESERVATIONS)]
    refused(arena, Busy, lambda: arena.session.offer(offer), descriptors)
    with pytest.raises(OfferAgain):
        arena.session.annotate(m.Annotate(arena.key, CLEAN, as_tokens([5, 6]), reservation=taken[0]))
    arena.session.offer(offer)
    # Those that have expired make room for new ones.
    ledger = arena.engine.warm.ledger
    with arena.engine.index.changed:
        ledger.expire(float("inf"))
    assert ledger.reserved_bytes == 0 and arena.session.offer(offer).reservation
    assert len(arena.session._reservations) == 1
    arena.session.close()
    assert ledger.reserved_bytes == 0
    goes_on(arena)


def test_offers_that_cannot_be_met(arena: Arena, descriptors: Callable[[], int]) -> None:
    def offered(**changes: Any) -> m.Offered:
        return arena.session.offer(replace(m.Offer(arena.key, CLEAN, as_tokens([5] * 10), row_bytes=100), **changes))

    cases: list[tuple[type[WarmKVError], dict[str, Any]]] = [
        (StoreError, {"row_bytes": 2**64 - 1}), (StoreError, {"fixed_bytes": 2**64 - 1}), (StoreError, {"fixed_bytes": BUDGET}),
        (RecordError, {"attachments": pack_attachments([Attachment(8, 3, IMAGE)])}), (FormatError, {"attachments": b"odd"}),
        (UnknownNamespace, {"namespace": NamespaceKey(b"n" * 16)}),
    ]  # fmt: skip
    for error, changes in cases:
        before, open_before = accounts(arena), descriptors()
        with pytest.raises(error):
            offered(**changes)
        assert (accounts(arena), descriptors()) == (before, open_before)
    goes_on(arena)


# -- other users ------------------------------------------------------------------------------


def attempts(session: LocalSession, key: NamespaceKey, epoch: int, fd: int) -> list[Callable[[], object]]:
    """Every request that names a namespace."""
    query = (key, CLEAN, as_tokens([*TOKENS, 1]))
    return [
        lambda: session.match(m.Match(*query)),
        lambda: session.acquire(m.Acquire(*query)),
        lambda: session.prefetch(m.Prefetch(*query)),
        lambda: session.offer(m.Offer(*query, row_bytes=10)),
        lambda: session.annotate(m.Annotate(*query, anchors=anchors(1))),
        lambda: session.commit(m.Commit(key, epoch, 0), fd),
        lambda: session.pin(m.Pin(*query, ttl_ms=1000)),
        lambda: session.forget(m.Forget(*query)),
        lambda: session.clear(m.Clear(key)),
    ]


def test_another_user_is_blind(arena: Arena, descriptors: Callable[[], int]) -> None:
    stranger = arena.engine.session(UID + 1)
    fd = arena.sealed(arena.good(FRESH))
    nobody = NamespaceKey(b"n" * 16)
    for ours, none in zip(
        attempts(stranger, arena.key, arena.engine.epoch, fd), attempts(stranger, nobody, arena.engine.epoch, fd), strict=True
    ):
        refused(arena, UnknownNamespace, ours, descriptors, arena.key.hex())
        refused(arena, UnknownNamespace, none, descriptors, nobody.hex())
    with arena.engine.index.changed:
        assert not any(record.pinned_until_ns for record in arena.engine.index.records.values())
    for verb, arguments in [
        ("ls", b"{}"), ("ls", b'{"namespace": "%s"}' % arena.key.hex().encode()),
        ("show", b'{"id": "%s"}' % arena.base.hex().encode()), ("show", b'{"id": "%s"}' % arena.base.hex()[:4].encode()),
    ]:  # fmt: skip
        told = stranger.report(m.Report(verb, arguments)).json
        for secret in (arena.base, arena.folded, arena.foreign, arena.key, arena.other_key):
            assert secret.hex().encode() not in told
    assert stranger.clear(m.Clear(everything=True)).records == 0
    # The same model under another user is another namespace, and empty.
    theirs = stranger.open(arena.identity.canonical(), "")
    assert theirs != arena.key
    assert stranger.match(m.Match(theirs, CLEAN, as_tokens(TOKENS))).matched == 0
    goes_on(arena)


def test_another_users_rows_stay_theirs(arena: Arena) -> None:
    stranger = arena.engine.session(UID + 1)
    theirs = stranger.open(arena.identity.canonical(), "")
    fd = arena.sealed(arena.good(TOKENS, key=theirs))
    assert not stranger.commit(m.Commit(theirs, arena.engine.epoch, 0), fd).duplicate
    before = accounts(arena)["entries"]
    assert arena.store.clear().records == before - 1
    assert stranger.match(m.Match(theirs, CLEAN, as_tokens([*TOKENS, 1]))).usable == 9
    with pytest.raises(UnknownNamespace):
        arena.session.match(m.Match(theirs, CLEAN, as_tokens(TOKENS)))
    assert stranger.clear(m.Clear(everything=True)).records == 1
    assert check(arena.engine) == []
    save(arena.store, arena.identity, TOKENS)
    goes_on(arena)


def test_closed_session_takes_nothing(arena: Arena, descriptors: Callable[[], int]) -> None:
    fd = arena.sealed(arena.good(FRESH))
    arena.session.close()
    for attempt in attempts(arena.session, arena.key, arena.engine.epoch, fd):
        refused(arena, ClosedError, attempt, descriptors)
    for attempt in (
        lambda: arena.session.open(arena.identity.canonical(), ""),
        lambda: arena.session.report(m.Report("stats")),
        lambda: arena.session.clear(m.Clear(everything=True)),
    ):
        refused(arena, ClosedError, attempt, descriptors)
    goes_on(arena)


# -- what is taken must stay answerable -------------------------------------------------------


def test_more_anchors_than_a_reply_can_name_do_not_hide_the_prefix(open_store_with: OpenStore) -> None:
    """Each save may name 4096; of more on one segment the newest are kept."""
    identity = random_identity(1, 1, 1)
    store = open_store_with()
    ids = list(range(10_000))
    kinds = list(AnchorKind)
    save(store, identity, ids)
    session = store.engine.session(UID)
    key = session.open(identity.canonical(), "")
    named = [Anchor(position, kind) for kind in kinds for position in range(1, len(ids) + 1)]
    for at in range(0, len(named), 4096):
        session.annotate(m.Annotate(key, CLEAN, as_tokens(ids), anchors=pack_anchors(named[at : at + 4096])))
    match = store.match(identity, ids)
    assert match.usable == len(ids) - 1
    assert len(match.anchors) == 4096 and match.anchors[-1].position == len(ids)
    store.restore(identity, ids).close()


def test_anchors_find_their_record_in_a_long_chain(open_store_with: OpenStore) -> None:
    identity = random_identity(1, 1, 1)
    store = open_store_with(warm_entries=1000)
    ids = list(range(60))
    for end in range(2, 61, 2):
        save(store, identity, ids[:end])
    save(store, identity, ids, anchors=[Anchor(position) for position in range(1, 61)])
    by_start = {record.start: record for record in store.engine.index.records.values()}
    for start, record in by_start.items():
        assert sorted(place for place, _ in record.anchors) == [start + 1, start + 2]
    branch = [*ids[:31], 99]
    assert [anchor.position for anchor in store.match(identity, branch).anchors] == list(range(1, 32))
    assert len(by_start) == 30
