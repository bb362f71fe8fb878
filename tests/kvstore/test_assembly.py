"""Grants that lie: nothing of them is handed out, and nothing of them is kept.

A grant is put together here from containers of a model's true rows and states, so that each test
changes one thing in what a daemon would have sent.
"""

from __future__ import annotations

import fcntl
import gc
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

from warmkv.kvstore import memfd
from warmkv.kvstore.assembly import restore
from warmkv.kvstore.containers import Container, PlaneSource, write_segment, write_state
from warmkv.kvstore.restored import Restored
from warmkv.kvstore.results import Match
from warmkv.kvstore.rows import LayerRows, LayerState, PlaneRows
from warmkv.kvstore.session import Grant
from warmkv.kvstore.testing import FOLDED, IMAGE, OTHER_IMAGE, TOKENS, assert_rows, model_rows, random_identity
from warmkv.kvstore.testing.comparison import assert_states
from warmkv.kvstore.testing.samples import (
    CONV,
    ENCODER,
    FULL,
    OPAQUE,
    RECURRENT,
    chunked,
    mixed_identity,
    model_logits,
    model_states,
    shared,
    sliding,
)
from warmkv.schema import ids as naming
from warmkv.schema import messages as m
from warmkv.schema import segment as container
from warmkv.schema.errors import DigestError, FormatError, ProtocolError, RemoteProtocolError, StoreError, WarmKVError
from warmkv.schema.identity import Identity, PlaneFormat, PlaneRole
from warmkv.schema.records import (
    CLEAN,
    ROOT,
    Attachment,
    Lineage,
    NamespaceKey,
    Plane,
    RecordId,
    as_tokens,
    coverage,
)

KEY = NamespaceKey(b"n" * 16)
QUERY = [*TOKENS, 1]
IMAGES = (Attachment(2, 3, IMAGE),)
Header = container.Header


@dataclass
class Sender:
    """What a daemon holds of one prompt, as containers. ``released`` counts ends of leases,
    ``landed`` those of flights."""

    identity: Identity
    ids: Sequence[int] = tuple(TOKENS)
    attachments: tuple[Attachment, ...] = ()
    lineage: Lineage = CLEAN
    key: NamespaceKey = KEY
    released: int = 0
    landed: int = 0

    def segment(self, start: int, end: int, **first: int) -> Container:
        """Rows [start, end) of all layers; ``layer_1=5`` begins those of layer 1 at row 5 only."""
        sources = []
        for record in model_rows(self.identity, self.ids[:end], self._until(end), self.lineage):
            begin = first.get(f"layer_{record.layer}", start)
            for plane in record.planes if begin < end else ():
                shape = plane.rows.shape[1:]
                sources.append(PlaneSource(record.layer, shape, begin, replace(plane, rows=plane.rows[begin:])))
        return write_segment(self.key, self.lineage, ROOT, start, as_tokens(self.ids[:end]), self._until(end), sources)

    def state(self, position: int, layers: Sequence[int] | None = None) -> Container:
        """States of all layers that end at ``position``, or of these only."""
        found = model_states(self.identity, self.ids[:position], self._until(position), self.lineage)
        return self.written(position, [item for item in found if item.position == position], layers)

    def logits(self, position: int) -> Container:
        row = model_logits(self.identity, self.ids[:position], self._until(position), self.lineage)[np.newaxis]
        plane = PlaneRows(PlaneRole.LOGITS, PlaneFormat.F32, row)
        source = PlaneSource(len(self.identity.layers), row.shape[1:], 0, plane)
        return write_state(self.key, self.lineage, ROOT, as_tokens(self.ids[:position]), self._until(position), [source])

    def written(self, position: int, states: Sequence[LayerState], layers: Sequence[int] | None = None) -> Container:
        sources = []
        for item in states:
            specs = {spec.role: spec for spec in self.identity.layers[item.layer].state_planes}
            for plane in item.planes if layers is None or item.layer in layers else ():
                blob = plane.role == PlaneRole.BLOB
                shape = plane.rows.shape[1:] if blob else specs[plane.role].row_shape
                sources.append(PlaneSource(item.layer, shape, 0, plane))
        return write_state(self.key, self.lineage, ROOT, as_tokens(self.ids[:position]), self._until(position), sources)

    def _until(self, end: int) -> tuple[Attachment, ...]:
        return tuple(item for item in self.attachments if item.end <= end)

    def grant(self, usable: int, *parts: tuple[Container, int, int], flight: int = 7, **changes: Any) -> Grant:
        """A grant of these containers with the spans they contribute."""
        spans = b"".join(span(item.id, start, end, item.total_bytes) for item, start, end in parts)
        reply = replace(
            m.Acquired(matched=usable, usable=usable, tier=m.TIER_WARM, lease=3, flight=flight, spans=spans), **changes
        )
        return Grant(reply, tuple(item.fd for item, _, _ in parts), self._release, self._land)

    def _release(self) -> None:
        self.released += 1

    def _land(self) -> None:
        self.landed += 1


def span(id_: bytes, start: int, end: int, total_bytes: int) -> bytes:
    row = np.zeros(1, m.SPAN_DTYPE)
    row["id"], row["start"], row["end"], row["container_bytes"] = np.frombuffer(id_, "u1"), start, end, total_bytes
    return row.tobytes()


def edited(item: Container, *, payload: Callable[[bytes], bytes] = bytes, digests: bool = True, **changes: Any) -> Container:
    """The container with other header fields; its digests set right unless they are to lie."""
    data = memfd.read(item.fd, item.total_bytes, 0)
    head = container.decode_head(data)
    body = payload(data[head.payload_offset :])
    if digests:
        changes.setdefault("digests", container.payload_digests(body))
    header = replace(head.header, **changes)
    packed = container.encode_head(header, len(body))
    item.close()
    return sealed(packed.ljust(container.align(len(packed), container.PAYLOAD_ALIGNMENT), b"\0") + body, header)


def sealed(data: bytes, header: Header, seals: int = memfd.SEALS) -> Container:
    fd = memfd.create("lie", len(data))
    memfd.write(fd, data, 0)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    return Container(fd, header.id, len(data))


def header_of(item: Container) -> Header:
    return container.decode_head(memfd.read(item.fd, item.total_bytes, 0)).header


def take(sender: Sender, grant: Grant, query: Sequence[int] = tuple(QUERY), **options: Any) -> Restored:
    """What the verbs do with a grant."""
    about = options.pop("attachments", sender.attachments), options.pop("lineage", sender.lineage)
    match = Match.of(grant.reply, sender.identity, *about)
    return restore(grant, match, KEY, as_tokens(query), **{"verify": False, "writable": False, **options})


@pytest.fixture(autouse=True)
def flat() -> Iterator[None]:
    """No descriptor and no mapping is left of any grant, good or bad."""
    before = len(os.listdir("/proc/self/fd"))
    yield
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == before
    with open("/proc/self/maps") as lines:
        assert not [line for line in lines if "warmkv:" in line or "memfd:lie" in line]


def refused(sender: Sender, grant: Grant, error: type[WarmKVError], match: str | None = None, **options: Any) -> None:
    """Exactly this error; the lease and the promise to compute are ended, each once."""
    with pytest.raises(error, match=match) as caught:
        take(sender, grant, **options)
    assert caught.type is error
    # At once, while the frames of the failure are still alive.
    assert (sender.released, sender.landed) == (1, 1)
    del caught
    assert (sender.released, sender.landed) == (1, 1)
    for fd in grant.fds:
        with pytest.raises(OSError):
            os.fstat(fd)


# -- good grants -----------------------------------------------------------------------------

PLAIN = random_identity()
MIXED = mixed_identity(FULL, sliding(4), RECURRENT, shared(0), CONV)


def plain(**changes: Any) -> Sender:
    return replace(Sender(PLAIN), **changes)


def two(sender: Sender) -> list[tuple[Container, int, int]]:
    """Rows [0, 9) in two segments."""
    return [(sender.segment(0, 5), 0, 5), (sender.segment(5, 9), 5, 9)]


def all_parts(sender: Sender) -> list[tuple[Container, int, int]]:
    """What MIXED needs to resume behind nine tokens: full rows, a window, the states."""
    return [(sender.segment(0, 6, layer_1=6), 0, 6), (sender.segment(6, 9), 6, 9), (sender.state(9), 9, 9)]


@pytest.mark.parametrize("verify", [False, True])
@pytest.mark.parametrize("writable", [False, True])
def test_a_good_grant_is_handed_out(verify: bool, writable: bool) -> None:
    sender = Sender(MIXED)
    restored = take(sender, sender.grant(9, *all_parts(sender)), verify=verify, writable=writable)
    assert restored.usable == 9 and restored.flight is not None
    assert_rows(restored, model_rows(MIXED, TOKENS))
    assert_states(restored, model_states(MIXED, TOKENS))
    assert restored.layers[1].planes[PlaneRole.KEY].starts == (6,)
    assert restored.layers[2].states[PlaneRole.RECURRENT].array().flags.writeable == writable
    assert (sender.released, sender.landed) == (0, 0)
    restored.flight.close()
    restored.flight.close()
    restored.close()
    restored.close()
    assert (sender.released, sender.landed) == (1, 1)


def test_a_flight_outlives_the_lease_and_ends_when_nobody_holds_it() -> None:
    sender = plain()
    restored = take(sender, sender.grant(9, *two(sender)))
    restored.close()
    assert (sender.released, sender.landed) == (1, 0)
    del restored
    gc.collect()
    assert (sender.released, sender.landed) == (1, 1)


def test_a_grant_of_nothing_is_a_miss_that_keeps_its_flight() -> None:
    sender = plain()
    restored = take(sender, sender.grant(0))
    assert not restored and restored.layers == () and restored.flight is not None
    assert (sender.released, sender.landed) == (1, 0)
    with restored.flight:
        pass
    assert sender.landed == 1
    sender = plain()
    assert take(sender, sender.grant(0, flight=0)).flight is None
    assert sender.landed == 0


def test_segments_may_overlap_and_go_on_with_another_prompt() -> None:
    """A branch shares the first rows of a segment, whatever follows in it."""
    other = plain(ids=[*TOKENS[:6], 50, 51, 52])
    sender = plain()
    parts = [(other.segment(0, 9), 0, 6), (sender.segment(2, 9), 6, 9)]
    with take(sender, sender.grant(9, *parts), verify=True) as restored:
        assert_rows(restored, model_rows(PLAIN, TOKENS))
    with take(sender, sender.grant(6, (other.segment(0, 9), 0, 6))) as restored:
        assert_rows(restored, model_rows(PLAIN, TOKENS))


def test_parked_logits_are_handed_out_where_they_were_asked_for() -> None:
    sender = plain()
    parts = [*two(sender), (sender.logits(9), 9, 9)]
    with take(sender, sender.grant(9, *parts), TOKENS, logits=True, verify=True) as restored:
        assert restored.logits is not None
        assert restored.logits.tobytes() == model_logits(PLAIN, TOKENS).tobytes()
    with take(sender, sender.grant(9, *two(sender)), QUERY, logits=True) as restored:
        assert restored.logits is None


def test_encoder_output_is_handed_out_by_attachment() -> None:
    sender = Sender(mixed_identity(ENCODER, FULL), attachments=IMAGES)
    parts = [(sender.segment(0, 9), 0, 9), (sender.state(5), 5, 5)]
    with take(sender, sender.grant(9, *parts), verify=True) as restored:
        assert sorted(restored.layers[0].constants) == [2]
        assert_states(restored, model_states(sender.identity, TOKENS, IMAGES))


BLOB = mixed_identity(OPAQUE, FULL)


def test_a_blob_behind_what_is_usable_is_proven_by_the_tokens_it_comes_with() -> None:
    """Saved with another ending: [.. 6 of ours .., 50, 51, 52] with its state behind all nine."""
    saved = Sender(BLOB, [*TOKENS[:6], 50, 51, 52])
    sender = Sender(BLOB)
    for parts in (
        [(saved.segment(0, 9), 0, 6), (saved.state(9), 9, 9)],
        [(saved.segment(0, 5), 0, 5), (saved.segment(5, 9), 5, 6), (saved.state(9), 9, 9)],
        [(saved.segment(0, 6), 0, 6), (saved.segment(6, 9), 6, 6), (saved.state(9), 9, 9)],
        [(saved.segment(0, 8), 0, 6), (saved.state(7), 7, 7)],
    ):
        with take(sender, sender.grant(6, *parts), verify=True) as restored:
            assert_rows(restored, model_rows(BLOB, TOKENS[:6]))
            assert_states(restored, model_states(BLOB, TOKENS[:6]))


# -- counts and sizes ------------------------------------------------------------------------


@pytest.mark.parametrize("usable", [9, 10, 2**40])
def test_more_than_the_query_is_refused(usable: int) -> None:
    """One token is always left to feed, unless logits were asked for."""
    for asked in (False, True):
        sender = plain()
        if asked and usable == 9:
            continue
        refused(sender, sender.grant(usable, *two(sender)), RemoteProtocolError, "at most", query=TOKENS, logits=asked)


def test_all_of_the_query_without_logits_is_refused() -> None:
    sender = plain()
    refused(sender, sender.grant(9, *two(sender)), RemoteProtocolError, "logits", query=TOKENS, logits=True)
    sender = plain()
    parts = [*two(sender), (sender.logits(8), 8, 8)]
    refused(sender, sender.grant(9, *parts), RemoteProtocolError, "logits", query=TOKENS, logits=True)


def test_more_or_fewer_descriptors_than_spans_are_refused() -> None:
    sender = plain()
    first, second = two(sender)
    good = sender.grant(9, first, second)
    refused(sender, replace(good, reply=replace(good.reply, spans=good.reply.spans[:40])), RemoteProtocolError, "descriptors")
    sender = plain()
    first, second = two(sender)
    good = sender.grant(9, first, second)
    more = span(first[0].id, 0, 5, first[0].total_bytes)
    refused(sender, replace(good, reply=replace(good.reply, spans=good.reply.spans + more)), RemoteProtocolError, "descriptors")


def test_spans_that_are_no_table_are_refused() -> None:
    sender = plain()
    good = sender.grant(9, *two(sender))
    refused(sender, replace(good, reply=replace(good.reply, spans=good.reply.spans[:-1])), FormatError)


def test_a_grant_of_nothing_with_descriptors_gives_them_back() -> None:
    sender = plain()
    refused(sender, sender.grant(0, *two(sender), spans=b""), RemoteProtocolError, "descriptors")


@pytest.mark.parametrize("difference", [-4096, -1, 1, 4096, 2**50])
def test_a_descriptor_of_another_size_is_refused(difference: int) -> None:
    sender = plain()
    first, second = two(sender)
    good = sender.grant(9, first, second)
    told = good.reply.spans[:40] + span(second[0].id, 5, 9, max(0, second[0].total_bytes + difference))
    refused(sender, replace(good, reply=replace(good.reply, spans=told)), RemoteProtocolError)


@pytest.mark.parametrize("missing", [fcntl.F_SEAL_WRITE, fcntl.F_SEAL_SHRINK, fcntl.F_SEAL_GROW, memfd.SEALS])
def test_a_descriptor_that_can_still_change_is_refused(missing: int) -> None:
    sender = plain()
    first, (whole, *_) = two(sender)
    loose = sealed(memfd.read(whole.fd, whole.total_bytes, 0), header_of(whole), memfd.SEALS & ~missing)
    whole.close()
    refused(sender, sender.grant(9, first, (loose, 5, 9)), RemoteProtocolError, "seal")


@pytest.mark.parametrize("kind", ["file", "pipe", "directory", "device", "empty"])
def test_what_is_no_sealed_memory_is_refused(kind: str) -> None:
    if kind == "pipe":
        fd, writing = os.pipe()
        os.close(writing)
    elif kind == "empty":
        fd = memfd.create("lie", 0)
        memfd.seal(fd)
    else:
        path = {"file": "/proc/self/exe", "directory": "/", "device": "/dev/zero"}[kind]
        fd = os.open(path, os.O_RDONLY)
    sender = plain()
    first, (second, *_) = two(sender)
    second.close()
    refused(sender, sender.grant(9, first, (replace(second, fd=fd), 5, 9)), RemoteProtocolError)


def test_a_failure_in_the_middle_closes_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each record in turn cannot be mapped."""
    check_sealed = memfd.check_sealed
    for number in range(3):
        left = [number]

        def failing(fd: int, max_bytes: int, left: list[int] = left) -> int:
            left[0] -= 1
            if left[0] < 0:
                raise StoreError("not as it should be")
            return check_sealed(fd, max_bytes)

        sender = Sender(MIXED)
        grant = sender.grant(9, *all_parts(sender))
        monkeypatch.setattr(memfd, "check_sealed", failing)
        refused(sender, grant, StoreError)
        monkeypatch.setattr(memfd, "check_sealed", check_sealed)


# -- other bytes -----------------------------------------------------------------------------


def flipped(at: int) -> Callable[[bytes], bytes]:
    def flip(body: bytes) -> bytes:
        broken = bytearray(body)
        broken[at] ^= 0x10
        return bytes(broken)

    return flip


@pytest.mark.parametrize("at", [0, -1])
@pytest.mark.parametrize("which", [0, 1, 2])
def test_a_flipped_payload_is_seen_where_it_is_looked_for(which: int, at: int) -> None:
    sender = Sender(MIXED)
    parts = all_parts(sender)
    item, start, end = parts[which]
    parts[which] = edited(item, payload=flipped(at), digests=False), start, end
    again = [(Container(os.dup(item.fd), item.id, item.total_bytes), start, end) for item, start, end in parts]
    refused(sender, sender.grant(9, *parts), DigestError, verify=True)
    unseen = Sender(MIXED)
    with take(unseen, unseen.grant(9, *again)) as restored:
        assert restored.usable == 9


def test_a_flipped_head_is_seen_always() -> None:
    for at in (0, 9, 40, 70, 200):
        sender = plain()
        first, (second, *_) = two(sender)
        data = bytearray(memfd.read(second.fd, second.total_bytes, 0))
        data[at] ^= 1
        broken = sealed(bytes(data), header_of(second))
        second.close()
        with pytest.raises(FormatError):
            take(sender, sender.grant(9, first, (broken, 5, 9)))
        assert (sender.released, sender.landed) == (1, 1)


# -- other records ---------------------------------------------------------------------------


def other(**changes: Any) -> Callable[[], tuple[Sender, list[tuple[Container, int, int]]]]:
    """The second segment as somebody else would have it."""

    def make() -> tuple[Sender, list[tuple[Container, int, int]]]:
        sender = plain()
        first, (second, *_) = two(sender)
        second.close()
        return sender, [first, (replace(sender, **changes).segment(5, 9), 5, 9)]

    return make


def parts_of(make: Callable[[Sender], list[tuple[Container, int, int]]], sender: Sender | None = None) -> Any:
    def made() -> tuple[Sender, list[tuple[Container, int, int]]]:
        mine = replace(sender) if sender is not None else plain()
        return mine, make(mine)

    return made


def second(change: Callable[[Container], Container]) -> Any:
    def make(sender: Sender) -> list[tuple[Container, int, int]]:
        first, (item, start, end) = two(sender)
        return [first, (change(item), start, end)]

    return parts_of(make)


def planes_changed(change: Callable[[Any], Any]) -> Any:
    """The second segment with its first plane described otherwise."""

    def make(item: Container) -> Container:
        first, *rest = header_of(item).planes
        return edited(item, planes=(change(first), *rest))

    return second(make)


SEGMENTS: dict[str, Any] = {
    "another namespace": other(key=NamespaceKey(b"o" * 16)),
    "another lineage": other(lineage=FOLDED),
    "another token at its start": other(ids=[*TOKENS[:5], 99, *TOKENS[6:]]),
    "another token at its end": other(ids=[*TOKENS[:8], 99]),
    "an image that is not ours": other(attachments=(Attachment(6, 2, IMAGE),)),
    "another lineage under our id": second(lambda item: edited(item, lineage=FOLDED)),
    "another namespace under our id": second(lambda item: edited(item, namespace=NamespaceKey(b"o" * 16))),
    "another token under our id": second(lambda item: edited(item, tokens=as_tokens([*TOKENS[5:8], 99]))),
    "an image under our id": second(lambda item: edited(item, attachments=(Attachment(6, 2, IMAGE),))),
    "another id than announced": second(lambda item: replace(item, id=RecordId(b"x" * 16))),
    "the first segment twice": parts_of(lambda s: [(s.segment(0, 5), 0, 5), (s.segment(0, 5), 5, 9)]),
    "a state instead": parts_of(lambda s: [(s.segment(0, 5), 0, 5), (s.logits(9), 5, 9)]),
    "a gap": parts_of(lambda s: [(s.segment(0, 4), 0, 4), (s.segment(5, 9), 5, 9)]),
    "an end before what was promised": parts_of(lambda s: [(s.segment(0, 5), 0, 5), (s.segment(5, 8), 5, 8)]),
    "no beginning": parts_of(lambda s: [(s.segment(5, 9), 5, 9)]),
    "nothing": parts_of(lambda s: []),
    "a segment behind all that is known": parts_of(lambda s: [*two(s), (replace(s, ids=QUERY * 2).segment(10, 12), 10, 12)]),
    "planes of another shape": planes_changed(lambda plane: replace(plane, row_shape=(8, 2))),
    "planes of another format": planes_changed(lambda plane: replace(plane, format=PlaneFormat.RAW, row_shape=(64,))),
    "planes of another layer": planes_changed(lambda plane: replace(plane, layer=9)),
    "planes of another role": planes_changed(lambda plane: replace(plane, role=PlaneRole.LATENT)),
    "rows of one plane missing": planes_changed(lambda plane: replace(plane, rows=3)),
    "rows that are frozen": planes_changed(lambda plane: replace(plane, field=b"f" * 16)),
    "planes missing": second(lambda item: edited(item, planes=header_of(item).planes[:2], payload=lambda body: body[:512])),
}


@pytest.mark.parametrize("name", SEGMENTS)
@pytest.mark.parametrize("verify", [False, True])
def test_segments_that_are_not_of_the_query_are_refused(name: str, verify: bool) -> None:
    sender, parts = SEGMENTS[name]()
    refused(sender, sender.grant(9, *parts), RemoteProtocolError, verify=verify)


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ((), IMAGES), (IMAGES, ()), (IMAGES, (Attachment(2, 3, OTHER_IMAGE),)), (IMAGES, (Attachment(2, 4, IMAGE),)),
        (IMAGES, (Attachment(1, 3, IMAGE),)), (IMAGES, (*IMAGES, Attachment(7, 1, IMAGE))),
    ],
    ids=range(6),
)  # fmt: skip
def test_rows_behind_another_image_are_refused(ours: tuple[Attachment, ...], theirs: tuple[Attachment, ...]) -> None:
    sender = plain(attachments=ours)
    parts = two(plain(attachments=theirs))
    refused(sender, sender.grant(9, *parts), RemoteProtocolError, "attachments")


def test_rows_of_a_window_behind_another_prefix_are_refused() -> None:
    """The tokens of the window are ours, those before it are not, and its rows depend on them."""
    identity = mixed_identity(sliding(4))
    sender, stranger = Sender(identity), Sender(identity, [99, *TOKENS[1:]])
    refused(sender, sender.grant(9, (stranger.segment(6, 9), 6, 9)), RemoteProtocolError)
    sender = Sender(identity)
    with take(sender, sender.grant(9, (sender.segment(6, 9), 6, 9))) as restored:
        assert_rows(restored, model_rows(identity, TOKENS))


# -- rows of layers that need less than all --------------------------------------------------

WINDOWS = mixed_identity(FULL, sliding(4), chunked(4))


def windows(sender: Sender, first: int, chunk: int) -> list[tuple[Container, int, int]]:
    return [(sender.segment(0, 5), 0, 5), (sender.segment(5, 9, layer_1=first, layer_2=chunk), 5, 9)]


def test_windows_come_as_far_as_they_are_needed() -> None:
    sender = Sender(WINDOWS)
    for first, chunk in ((6, 8), (5, 5)):
        with take(sender, sender.grant(9, *windows(sender, first, chunk)), verify=True) as restored:
            assert restored.layers[1].planes[PlaneRole.KEY].starts == (6,)
            assert restored.layers[2].planes[PlaneRole.KEY].starts == (8,)
            assert_rows(restored, model_rows(WINDOWS, TOKENS))


@pytest.mark.parametrize(("first", "chunk"), [(7, 8), (9, 8), (6, 9)])
def test_windows_that_lack_rows_are_refused(first: int, chunk: int) -> None:
    sender = Sender(WINDOWS)
    refused(sender, sender.grant(9, *windows(sender, first, chunk)), RemoteProtocolError, "did not come")


# -- states ----------------------------------------------------------------------------------


def with_states(*states: Callable[[Sender], tuple[Container, int, int]], sender: Sender | None = None) -> Any:
    def make(mine: Sender) -> list[tuple[Container, int, int]]:
        return [(mine.segment(0, 9), 0, 9), *(item(mine) for item in states)]

    return parts_of(make, sender or Sender(MIXED))


def state(position: int = 9, layers: Sequence[int] | None = None, **changes: Any) -> Callable[[Sender], Any]:
    return lambda sender: (replace(sender, **changes).state(position, layers), position, position)


def changed_state(change: Callable[[Any], Any], *, rename: bool = True) -> Callable[[Sender], Any]:
    """The state with its planes described otherwise, named rightly."""

    def make(sender: Sender) -> Any:
        item = sender.state(9)
        planes = tuple(change(header_of(item).planes))
        named: dict[str, Any] = {"id": naming.state_id(KEY, CLEAN, coverage(planes), (), as_tokens(TOKENS))}
        return edited(item, planes=planes, **(named if rename else {})), 9, 9

    return make


def recurrent(plane: Plane, **changes: Any) -> Plane:
    return replace(plane, **changes) if plane.role == PlaneRole.RECURRENT else plane


STATES: dict[str, Any] = {
    "none": with_states(),
    "one of another position": with_states(state(8)),
    "one of another position, told to be of ours": with_states(lambda s: (s.state(8), 9, 9)),
    "one of the exact layers only": with_states(state(layers=[2])),
    "the other of the exact layers only": with_states(state(layers=[4])),
    "both in two records": with_states(state(layers=[2]), state(layers=[4])),
    "parked logits alone": with_states(lambda s: (s.logits(9), 9, 9)),
    "one of another token": with_states(state(ids=[*TOKENS[:8], 99])),
    "one of another first token": with_states(state(ids=[99, *TOKENS[1:]])),
    "one of another lineage": with_states(state(lineage=FOLDED)),
    "one of another namespace": with_states(state(key=NamespaceKey(b"o" * 16))),
    "one with an image that is not ours": with_states(state(attachments=IMAGES)),
    "one behind all tokens": with_states(lambda s: (replace(s, ids=QUERY).state(10), 10, 10)),
    "one of another model": with_states(lambda s: (replace(s, identity=mixed_identity(CONV)).state(9), 9, 9)),
    "one of another lineage under our id": with_states(lambda s: (edited(s.state(9), lineage=FOLDED), 9, 9)),
    "one of another namespace under our id": with_states(
        lambda s: (edited(s.state(9), namespace=NamespaceKey(b"o" * 16)), 9, 9)
    ),
    "one with an image under our id": with_states(lambda s: (edited(s.state(9), attachments=IMAGES), 9, 9)),
    "one told to be elsewhere under our id": with_states(lambda s: (edited(s.state(9), position=8), 8, 8)),
    "one that is named like another": with_states(
        lambda s: (edited(s.state(9), id=RecordId(b"x" * 16)), 9, 9)
    ),
    "two rows of a recurrent state": with_states(
        changed_state(lambda planes: [recurrent(p, rows=2, row_bytes=24, row_shape=(2, 3, 1)) for p in planes])
    ),
    "another shape": with_states(
        changed_state(lambda planes: [recurrent(p, row_shape=(3, 2, 2)) for p in planes])
    ),
    "a plane of another layer": with_states(
        changed_state(lambda planes: [recurrent(p, layer=1) for p in planes])
    ),
    "planes renamed in place": with_states(
        changed_state(lambda planes: [replace(p, layer=p.layer + 90) for p in planes], rename=False)
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", STATES)
def test_states_that_are_not_of_the_query_are_refused(name: str) -> None:
    sender, parts = STATES[name]()
    refused(sender, sender.grant(9, *parts), RemoteProtocolError)


@pytest.mark.parametrize("theirs", [(), (Attachment(2, 3, OTHER_IMAGE),), (Attachment(2, 4, IMAGE),)], ids=range(3))
def test_states_behind_another_image_are_refused(theirs: tuple[Attachment, ...]) -> None:
    sender = Sender(MIXED, attachments=IMAGES)
    good = [(sender.segment(0, 9), 0, 9)]
    refused(sender, sender.grant(9, *good, (replace(sender, attachments=theirs).state(9), 9, 9)), RemoteProtocolError)


def test_encoder_output_that_is_missing_or_of_another_image_is_refused() -> None:
    identity, images = mixed_identity(ENCODER, FULL), (*IMAGES, Attachment(6, 2, OTHER_IMAGE))
    swapped = (*IMAGES, Attachment(6, 2, IMAGE))
    cases: list[Callable[[Sender], list[tuple[Container, int, int]]]] = [
        lambda s: [],
        lambda s: [(s.state(5), 5, 5)],
        lambda s: [(s.state(8), 8, 8)],
        lambda s: [(s.state(5), 5, 5), (replace(s, attachments=swapped).state(8), 8, 8)],
        lambda s: [(s.state(5), 5, 5), (s.state(5), 8, 8)],
    ]
    for case in cases:
        sender = Sender(identity, attachments=images)
        refused(sender, sender.grant(9, (sender.segment(0, 9), 0, 9), *case(sender)), RemoteProtocolError)


# -- blobs behind what is usable -------------------------------------------------------------


def blob_cases() -> dict[str, Callable[[Sender, Sender], list[tuple[Container, int, int]]]]:
    """Ways not to prove that a blob begins with the query's six tokens; arguments are a sender of
    the query, and one of what was saved: those six and three more."""
    stranger = Sender(BLOB, [99, *TOKENS[1:6], 50, 51, 52])
    return {
        "none": lambda ours, saved: [(saved.segment(0, 9), 0, 6)],
        "one before what is usable": lambda ours, saved: [(saved.segment(0, 9), 0, 6), (saved.state(5), 5, 5)],
        "one of another prompt": lambda ours, saved: [(saved.segment(0, 9), 0, 6), (stranger.state(9), 9, 9)],
        "no proof": lambda ours, saved: [(saved.segment(0, 6), 0, 6), (saved.state(9), 9, 9)],
        "a proof that ends early": lambda ours, saved: [(saved.segment(0, 8), 0, 6), (saved.state(9), 9, 9)],
        "a proof with a gap": lambda ours, saved: [
            (saved.segment(0, 6), 0, 6), (saved.segment(7, 9), 6, 6), (saved.state(9), 9, 9),
        ],
        "the proof of another ending": lambda ours, saved: [
            (saved.segment(0, 6), 0, 6), (replace(saved, ids=[*TOKENS[:6], 50, 51, 53]).segment(6, 9), 6, 6),
            (saved.state(9), 9, 9),
        ],
        "the state first": lambda ours, saved: [(saved.state(9), 9, 9), (saved.segment(0, 9), 0, 6)],
        "rows and proof of another beginning": lambda ours, saved: [
            (stranger.segment(0, 9), 0, 6), (stranger.state(9), 9, 9),
        ],
        "a proof of another beginning": lambda ours, saved: [
            (saved.segment(0, 6), 0, 6), (stranger.segment(0, 9), 6, 6), (stranger.state(9), 9, 9),
        ],
    }  # fmt: skip


@pytest.mark.parametrize("name", blob_cases())
def test_blobs_that_are_not_proven_are_refused(name: str) -> None:
    sender, saved = Sender(BLOB), Sender(BLOB, [*TOKENS[:6], 50, 51, 52])
    parts = blob_cases()[name](sender, saved)
    refused(sender, sender.grant(6, *parts), RemoteProtocolError)


def test_a_blob_behind_another_image_is_refused() -> None:
    images = (Attachment(6, 2, IMAGE),)
    saved, sender = Sender(BLOB, [*TOKENS[:6], 50, 51, 52], images), Sender(BLOB)
    plain_proof = replace(saved, attachments=())
    good = [(saved.segment(0, 9), 0, 6), (saved.state(9), 9, 9)]
    with take(sender, sender.grant(6, *good), verify=True) as restored:
        assert_states(restored, model_states(BLOB, TOKENS[:6]))
    for parts in (
        [(saved.segment(0, 9), 0, 6), (plain_proof.state(9), 9, 9)],
        [(plain_proof.segment(0, 9), 0, 6), (saved.state(9), 9, 9)],
    ):
        sender = Sender(BLOB)
        refused(sender, sender.grant(6, *parts), RemoteProtocolError)


# -- replies ---------------------------------------------------------------------------------


def test_a_reply_that_makes_no_sense_is_a_protocol_error() -> None:
    for changes in ({"tier": 9}, {"groups": b"x" * 15}, {"groups": np.array([[77, 1]], "<u8").tobytes()}, {"anchors": b"x"}):
        with pytest.raises((ProtocolError, FormatError)):
            Match.of(replace(m.Acquired(usable=9), **changes), PLAIN, (), CLEAN)


def test_good_rows_are_what_the_model_computed() -> None:
    """The tools themselves: the sender's rows are those the comparisons expect."""
    (record, *_) = model_rows(PLAIN, TOKENS)
    assert isinstance(record, LayerRows) and len(record.planes[0].rows) == 9
    made = plain().segment(2, 9)
    header = header_of(made)
    made.close()
    assert isinstance(header, container.SegmentHeader) and (header.start, header.end) == (2, 9)
