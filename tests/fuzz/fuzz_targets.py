"""What is fuzzed: for each kind of input the function that reads it, and what it may cost.

A target returns where the input is good, raises one of its documented errors where it is not, and
raises AssertionError where a promise is broken: a value that does not survive writing and reading,
an index that contradicts itself, a descriptor left open. `attempt` holds it to that and to its cap
on memory. One table of them all, hence one module.
"""

from __future__ import annotations

import array
import io
import json
import os
import socket
import tracemalloc
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import fuzz_samples as samples
from fuzz_mutation import Repair, repair_container, repair_head, repair_nothing, repair_pack, repair_value

from warmkv.daemon import config
from warmkv.kvstore import geometry, memfd
from warmkv.kvstore.channel import Channel, Deadline
from warmkv.kvstore.kvcache import about as descriptions
from warmkv.kvstore.kvcache import fingerprint, layers
from warmkv.kvstore.live import wire, wire_record
from warmkv.kvstore.results import Match
from warmkv.kvstore.store import importing
from warmkv.kvstore.store.check import check
from warmkv.kvstore.store.engine import Engine
from warmkv.kvstore.store.options import StoreOptions
from warmkv.schema import errors, kvcache_file, lmdb_records, pack_file, protocol, segment, summary
from warmkv.schema import messages as m
from warmkv.schema.identity import Identity
from warmkv.schema.records import CLEAN, RecordId, unpack_anchors, unpack_attachments, unpack_table

KIB, MIB = 1 << 10, 1 << 20
#: What the frames of a parser in Python take that goes on to the limit of recursion.
NESTING_BYTES = 8 * MIB
#: Longer than any answer takes on a busy machine; only a hang reaches it.
PATIENCE_S = 60.0


class Excess(Exception):
    """A target took more memory than its input allows."""


@dataclass(frozen=True)
class Target:
    """``errors`` may be raised; of memory at most ``fixed_bytes`` and ``factor`` for each byte of
    input may be taken at a time."""

    name: str
    run: Callable[[bytes], None]
    samples: Callable[[], list[bytes]]
    errors: tuple[type[Exception], ...]
    factor: int
    fixed_bytes: int
    repair: Repair = repair_nothing

    def cap(self, input_bytes: int) -> int:
        return self.fixed_bytes + self.factor * input_bytes


def attempt(target: Target, data: bytes, *, measured: bool = True) -> Exception | None:
    """Run the target on ``data``; the documented error that came, if one did. Raises whatever else
    came, or `Excess`. Unless ``measured`` memory is not looked at, which takes a third of the time."""
    refused: Exception | None = None
    if measured:
        tracemalloc.start()
    try:
        target.run(data)
    except target.errors as exc:
        refused = exc.with_traceback(None)
    finally:
        taken = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    if taken > target.cap(len(data)):
        raise Excess(f"{target.name}: {taken} bytes of memory for {len(data)} of input, the cap is {target.cap(len(data))}")
    return refused


def prepare(target: Target) -> None:
    """Whatever is made once and kept is made now, not on the account of an input."""
    for data in target.samples():
        with suppress(*target.errors):
            target.run(data)


# -- the wire ------------------------------------------------------------------------------


def run_frame(data: bytes) -> None:
    """A stream of frames, descriptors with its first bytes, read to its end."""
    count, torn, stream = data[0] % 4 if data else 0, data[1] if len(data) > 1 else 0, data[2:]
    if not stream:
        return
    lowest = _lowest_descriptor()
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        control = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [0] * count))] if count else []
        sent = theirs.sendmsg([stream[: torn or None]], control)
        theirs.sendall(stream[sent:])
        theirs.shutdown(socket.SHUT_WR)
        channel = Channel(ours)
        while (frame := channel.receive(Deadline(PATIENCE_S), PATIENCE_S)) is not None:
            frame.close()
            assert not frame.truncated and len(frame.fds) <= count
            m.decode(frame.body)
    finally:
        ours.close()
        theirs.close()
        assert _lowest_descriptor() == lowest, "a descriptor was left open"


def _lowest_descriptor() -> int:
    """Grows when a descriptor is left open."""
    fd = os.dup(0)
    os.close(fd)
    return fd


def run_message(data: bytes) -> None:
    """A body, as either side takes it: whatever is understood can be said again in the same words."""
    number, message = m.decode(data)
    body = m.encode(message, number)
    again, same = m.decode(body)
    assert again == number and m.encode(same, again) == body
    with suppress(errors.ProtocolError):
        conversation = protocol.ServerConversation()
        conversation.receive(message, 0)
        if isinstance(message, m.Hello):
            protocol.choose_version(message.version_min, message.version_max)
    if isinstance(message, m.Matched):
        for identity in samples.IDENTITIES:
            Match.of(message, identity, (), CLEAN).explain()
    for name, unpack in (("attachments", unpack_attachments), ("anchors", unpack_anchors)):
        if isinstance(getattr(message, name, None), bytes):
            unpack(getattr(message, name))
    if isinstance(message, m.Acquired):
        unpack_table(message.spans, m.SPAN_DTYPE, "spans").tolist()


# -- containers ----------------------------------------------------------------------------


def run_head(data: bytes) -> None:
    """A head, and what it says of each of the models."""
    head = segment.decode_head(data)
    header = head.header
    again = segment.decode_head(segment.encode_head(header, head.payload_bytes))
    same = again.header
    assert repr(same) == repr(header) and again.payload_bytes == head.payload_bytes
    for plane in header.planes:
        assert 0 <= plane.offset and plane.offset + plane.total_bytes <= head.payload_bytes
    for identity in samples.IDENTITIES:
        with suppress(errors.FormatError):
            if isinstance(header, segment.SegmentHeader):
                geometry.segment_coverage(header, identity)
            else:
                geometry.state_provides(header, identity)


@cache
def _engine() -> Engine:
    """A store in memory, small enough that what is let in makes room again and again."""
    return Engine.open(StoreOptions(warm_bytes=MIB, warm_entries=24, busy_timeout_s=0.01))


class _Commits:
    """A peer that hands over containers for all of the samples' models."""

    def __init__(self) -> None:
        self.engine = _engine()
        self.session = self.engine.session(samples.UID)
        self.keys = {self.session.open(identity.canonical(), "") for identity in samples.IDENTITIES}
        self.roots = samples.containers()
        self.count = 0

    def commit(self, data: bytes) -> None:
        fd = memfd.create("fuzz", len(data))
        try:
            memfd.write(fd, data, 0)
            memfd.seal(fd)
            key = data[self._namespace_at(data) :][:16]
            request = m.Commit(key if key in self.keys else min(self.keys), self.engine.epoch, 0)  # type: ignore[arg-type]
            self.session.commit(request, fd)
        finally:
            os.close(fd)

    def acquire(self, request: m.Acquire) -> m.Acquired:
        grant = self.session.acquire(request)
        for fd in grant.fds:
            os.close(fd)
        grant.release()
        grant.release_flight()
        return grant.reply

    def _namespace_at(self, data: bytes) -> int:
        return next((at for at in (data.find(key) for key in self.keys) if at >= 0), 0)

    def look(self) -> None:
        """Now and then: does the index still agree with itself? Parents come back that made room."""
        self.count += 1
        if self.count % 500 == 1:
            assert check(self.engine) == []
            for data in self.roots:
                with suppress(errors.StoreError):
                    self.commit(data)


_commits = cache(_Commits)


def run_container(data: bytes) -> None:
    """A sealed container, committed to a store that holds what the samples build on."""
    commits = _commits()
    commits.look()
    commits.commit(data)


def run_pack(data: bytes) -> None:
    """A snapshot pack, read to its end, and imported where it can be."""
    reader = pack_file.PackReader(io.BytesIO(data).read, len(data))
    for record in reader.records():
        assert sum(map(len, record.pieces)) == record.container_bytes
    commits = _commits()
    commits.look()
    fd = memfd.create("fuzz", len(data))
    try:
        memfd.write(fd, data, 0)
        importing.import_pack(commits.engine, commits.session.access, fd)
    finally:
        os.close(fd)


def run_kvcache(data: bytes) -> None:
    """Another program's file: what is read can be written and is the same again."""
    file = kvcache_file.decode(data)
    assert sum(layer.keys.nbytes + layer.values.nbytes for layer in file.layers) <= len(data)
    again = kvcache_file.decode(kvcache_file.encode(file))
    assert again.tokens.tobytes() == file.tokens.tobytes() and again.anchor == file.anchor
    assert (again.fingerprint, again.shift_offset) == (file.fingerprint, file.shift_offset)
    for one, other in zip(again.layers, file.layers, strict=True):
        assert (one.tag, one.keys.tobytes(), one.values.tobytes()) == (other.tag, other.keys.tobytes(), other.values.tobytes())


def run_kvcache_rows(data: bytes) -> None:
    """A file as rows of a model: they are the model's, and the same bytes again as layers of a file."""
    file, identity = kvcache_file.decode(data), samples.KVCACHE_MODEL
    if len(file.layers) != len(identity.layers):
        return
    about = descriptions.About("", "cpu:m", "a", 16, 2)
    with suppress(errors.FormatError, errors.UnsupportedError):
        fingerprint.require_model(file, about, identity)
    for record in layers.records_of(file, identity):
        found, spec = file.layers[record.layer], identity.layers[record.layer]
        again = layers.layer_of(record.layer, spec, found.tag, {plane.role: plane.rows for plane in record.planes})
        assert (again.keys.tobytes(), again.values.tobytes()) == (found.keys.tobytes(), found.values.tobytes())


def run_table(data: bytes) -> None:
    """A description of such files."""
    try:
        text = data.decode()
    except UnicodeDecodeError:
        return
    found = descriptions.parse(text)
    assert bool(found.namespace) != bool(found.identity) or not found.namespace


@cache
def _live_layers() -> tuple[Any, ...]:
    return tuple(samples.live_layer(number, 3) for number in range(len(samples.LIVE)))


def run_layer(data: bytes) -> None:
    """A record for a live layer that holds something: it replaces it, or leaves no trace. What was taken
    is what the layer says from then on."""
    layer, record = _live_layers()[data[0] % len(samples.LIVE) if data else 0], data[1:]
    before = layer.generation, wire.export_layer(layer)
    try:
        wire.import_layer(layer, record)
    except errors.WarmKVError:
        assert (layer.generation, wire.export_layer(layer)) == before
        raise
    sent = wire_record.parse(record, wire.fit_of(layer.plan, layer.index))
    assert layer.generation != before[0] and layer.position == sent.position
    if sent.state is not None and sent.state.size != layer.plan.state_size:
        assert not layer.state.any(), "nothing was seen, so the vector is zeros"
    else:
        assert wire.export_layer(layer) == wire_record.write(replace(sent, half=False))


# -- what lies on the disk -----------------------------------------------------------------


def run_values(data: bytes) -> None:
    """A value of one of the cold tier's tables."""
    kind, value = data[0] % 6 if data else 0, data[1:]
    if kind == 0:
        usage = lmdb_records.decode_usage(value)
        assert lmdb_records.encode_usage(usage) == value
    elif kind == 1:
        record = lmdb_records.decode_namespace(value)
        assert lmdb_records.encode_namespace(record) == value
    elif kind == 2:
        anchor = lmdb_records.decode_anchor(value)
        assert lmdb_records.decode_anchor(lmdb_records.encode_anchor(anchor)) == anchor
    elif kind == 3:
        lmdb_records.decode_format(value)
    elif kind == 4:
        record_id, index = lmdb_records.split_chunk_key(value)
        assert lmdb_records.chunk_key(record_id, index) == value
    else:
        named = RecordId(value[:16])
        row = summary.decode(named, value[16:])
        assert summary.decode(named, summary.encode(named, row)) == row


@cache
def _plain_head() -> bytes:
    return samples.heads()[0]


def run_identity(data: bytes) -> None:
    """The canonical bytes of an identity: one spelling, and a model whose geometry can be asked for."""
    identity = Identity.from_canonical(data)
    assert identity.canonical() == data
    header = segment.decode_head(_plain_head()).header
    assert isinstance(header, segment.SegmentHeader)
    with suppress(errors.FormatError, errors.UnsupportedError):
        geometry.segment_coverage(header, identity)


# -- what people write ---------------------------------------------------------------------


class _Text(type(Path())):  # type: ignore[misc]
    """A file whose content is at hand."""

    content = b""

    def open(self, *how: object, **more: object) -> io.BytesIO:  # type: ignore[override]
        return io.BytesIO(self.content)


def run_config(data: bytes) -> None:
    path = _Text("/nowhere/config.toml")
    path.content = data
    config.load({}, path, {"HOME": "/nowhere", "XDG_RUNTIME_DIR": "/nowhere"})


VERBS = ("status", "stats", "ls", "show", "verify", "health", "watch", "scrub", "evict", "reload-status", "nonsense", "identity")


def run_arguments(data: bytes) -> None:
    """Arguments of a report, asked for by a user who is not the daemon's own."""
    commits = _commits()
    commits.look()
    document = commits.session.report(m.Report(VERBS[data[0] % len(VERBS)] if data else "ls", data[1:]))
    assert isinstance(json.loads(document.json), dict)


def run_request(data: bytes) -> None:
    """A request to a store that holds something: answered, or refused by name, whatever its numbers."""
    _, message = m.decode(data)
    commits = _commits()
    commits.look()
    ask: dict[type, Callable[[Any], Any]] = {
        m.Match: commits.session.match, m.Prefetch: commits.session.prefetch, m.Offer: commits.session.offer,
        m.Annotate: commits.session.annotate, m.Pin: commits.session.pin, m.Forget: commits.session.forget,
        m.Clear: commits.session.clear, m.Report: commits.session.report,
        m.Open: lambda asked: commits.session.open(asked.identity, asked.share),
        m.Release: lambda asked: commits.session.release(asked.leases.tolist()),
        m.Acquire: lambda asked: commits.acquire(replace(asked, wait_ms=0)),
    }  # fmt: skip
    if type(message) not in ask or (isinstance(message, m.Report) and message.verb not in VERBS):
        return
    reply = ask[type(message)](message)
    if isinstance(reply, m.Offered) and reply.reservation:
        commits.engine.intake.give_back(reply.reservation)
    if isinstance(reply, tuple(m.CLASSES.values())):
        m.encode(reply, 7)


_READ = (errors.FormatError,)
_COMMIT = (
    errors.FormatError, errors.RecordError, errors.RemoteProtocolError, errors.UnsupportedError, errors.OfferAgain,
    errors.TooLarge, errors.Busy,
)  # fmt: skip
_PACK = (*_COMMIT, errors.IdentityError, errors.StoreError)
_REPORT = (errors.RecordError, errors.FormatError, errors.StoreError, errors.UnsupportedError, errors.DaemonError)
_REQUEST = (*_REPORT, errors.IdentityError)

TARGETS = {
    target.name: target
    for target in (
        Target("frame", run_frame, samples.frames, (errors.RemoteProtocolError, errors.FormatError, OSError), 16, 3 * MIB),
        Target("message", run_message, samples.messages, (errors.FormatError, errors.RemoteProtocolError), 48, 256 * KIB),
        Target("head", run_head, samples.heads, _READ, 48, 256 * KIB, repair_head),
        Target("container", run_container, samples.containers, _COMMIT, 48, MIB, repair_container),
        Target("pack", run_pack, samples.packs, _PACK, 48, 6 * MIB, repair_pack),
        Target("kvcache", run_kvcache, samples.kvcaches, (errors.FormatError, errors.UnsupportedError), 48, 256 * KIB),
        Target("kvcache_rows", run_kvcache_rows, samples.kvcaches, (errors.FormatError, errors.UnsupportedError), 48, 256 * KIB),
        Target("table", run_table, samples.tables, (errors.FormatError,), 48, NESTING_BYTES),
        Target("layer", run_layer, samples.layer_records, (errors.FormatError,), 48, 256 * KIB),
        Target("request", run_request, samples.requests, _REQUEST, 64, MIB),
        Target("values", run_values, samples.values, (errors.FormatError, errors.IdentityError), 48, 256 * KIB, repair_value),
        Target("identity", run_identity, samples.identities, (errors.FormatError, errors.IdentityError), 48, 256 * KIB),
        Target("config", run_config, samples.configurations, (errors.ConfigError,), 64, NESTING_BYTES),
        Target("arguments", run_arguments, samples.arguments, _REPORT, 64, 2 * MIB),
    )
}  # fmt: skip
