"""What a restart reads: every record once, from tables whose keys have one order.

All of them are walked in lock step, so that the time is one of Python objects, not of searches. A
record comes from its summary where that belongs to the head that lies on disk; else the head is
decoded, and its summary written anew later.
"""

from __future__ import annotations

import heapq
import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from operator import itemgetter
from typing import NamedTuple

import lmdb

from warmkv.kvstore.store.environment import Environment
from warmkv.kvstore.store.summaries import summarize
from warmkv.schema import lmdb_records, summary
from warmkv.schema import segment as container
from warmkv.schema.errors import FormatError, WarmKVError
from warmkv.schema.identity import Identity
from warmkv.schema.ids import fingerprint, namespace_key
from warmkv.schema.lmdb_records import NamespaceRecord, Usage
from warmkv.schema.records import ID_BYTES, Anchor, NamespaceKey, RecordId
from warmkv.schema.summary import Summary

log = logging.getLogger(__name__)
_KEY_BYTES = ID_BYTES + 4


class ColdRecord(NamedTuple):
    """What a restart finds of one record. ``tokens`` are those of a segment."""

    id: RecordId
    summary: Summary
    tokens: bytes
    usage: Usage
    anchors: tuple[Anchor, ...]


@dataclass(slots=True)
class Restart:
    """``bad`` are to be removed: unreadable heads, missing chunks, chunks without a head. ``made``
    are rows of summaries that were missing, ``stray`` those of no record."""

    bad: set[RecordId] = field(default_factory=set)
    made: list[tuple[RecordId, bytes]] = field(default_factory=list)
    stray: list[RecordId] = field(default_factory=list)


def read_namespaces(env: Environment) -> Iterator[tuple[NamespaceKey, NamespaceRecord]]:
    """Namespaces on disk; unreadable ones are reported and left out. Raises lmdb.Error."""
    with env.call(), env.begin() as txn:
        rows = [(NamespaceKey(key), value) for key, value in txn.cursor(env.db[b"namespaces"])]
    for key, value in rows:
        try:
            record = lmdb_records.decode_namespace(value)
            if namespace_key(record.owner_uid, record.share, fingerprint(record.identity)) != key:
                raise FormatError("its owner and identity belong to another key")
        except WarmKVError as exc:
            log.warning("namespace %s on disk is not readable: %s", key.hex(), exc)
            continue
        yield key, record


def read_records(env: Environment, identities: Mapping[NamespaceKey, Identity], take: Callable[[ColdRecord], None]) -> Restart:
    """Hand every whole record to ``take``, in the order of their ids. Raises lmdb.Error, and
    FormatError where the tables themselves cannot be read."""
    found = Restart()
    with env.call(), env.begin() as txn:
        chunks, summaries = _Chunks(env, txn, found.bad), _Rows(env, txn, b"summaries", found.stray)
        usages, anchors = _Rows(env, txn, b"usage"), _Rows(env, txn, b"anchors")
        last = b""
        for key, raw, is_state in _heads(env, txn):
            id_ = RecordId(key)
            if len(id_) != ID_BYTES or id_ == last:
                found.bad.add(id_)
                continue
            last = id_
            count, row = chunks.count(id_), summaries.at(id_)
            usage, marks = _usage(usages.at(id_)), anchors.below(id_)
            about = _trusted(id_, row, raw) or _decoded(id_, raw, identities, found)
            if about is None or not _whole(about, is_state, count, identities):
                log.warning("record %s on disk is not whole", id_.hex())
                found.bad.add(id_)
                continue
            end = about.tokens_at + 4 * (about.end - about.start)
            take(ColdRecord(id_, about, b"" if is_state else raw[about.tokens_at : end], usage, _anchors(id_, marks)))
        chunks.finish()
        summaries.finish()
    return found


def _heads(env: Environment, txn: lmdb.Transaction[bytes]) -> Iterator[tuple[bytes, bytes, bool]]:
    segments = ((key, value, False) for key, value in txn.cursor(env.db[b"segments"]))
    states = ((key, value, True) for key, value in txn.cursor(env.db[b"states"]))
    if not txn.stat(env.db[b"states"])["entries"]:
        return segments
    return heapq.merge(segments, states, key=itemgetter(0))


def _whole(about: Summary, is_state: bool, chunks: int, identities: Mapping[NamespaceKey, Identity]) -> bool:
    fits = bool(about.provides) == is_state and about.namespace in identities
    return fits and container.chunk_count(about.payload_bytes) == chunks


def _trusted(id_: RecordId, row: bytes, raw: bytes) -> Summary | None:
    """The summary, where it and the head are undamaged and belong together."""
    if not row:
        return None
    try:
        about = summary.decode(id_, row)
    except FormatError:
        return None
    return about if container.is_head(raw, about.head_digest) else None


def _decoded(id_: RecordId, raw: bytes, identities: Mapping[NamespaceKey, Identity], found: Restart) -> Summary | None:
    """A summary made from the head; None, with a message, for a head that is of no use."""
    try:
        header = container.decode_head(raw).header
        if header.id != id_:
            raise FormatError(f"it is that of {header.id.hex()}")
        if (identity := identities.get(header.namespace)) is None:
            raise FormatError(f"its namespace {header.namespace.hex()} is not known")
        about = summarize(raw, identity)
        found.made.append((id_, summary.encode(id_, about)))
    except WarmKVError as exc:
        log.warning("the head of record %s on disk is of no use: %s", id_.hex(), exc)
        return None
    return about


def _usage(data: bytes) -> Usage:
    try:
        return lmdb_records.decode_usage(data)
    except FormatError:
        return Usage(0, 0, 0)


def _anchors(id_: RecordId, values: list[bytes]) -> tuple[Anchor, ...]:
    """Anchors of a record; those of an unknown kind are left out."""
    if not values:
        return ()
    anchors = []
    for value in values:
        try:
            anchors.append(lmdb_records.decode_anchor(value))
        except FormatError as exc:
            log.warning("an anchor of segment %s on disk is not readable: %s", id_.hex(), exc)
    return tuple(anchors)


class _Rows:
    """Values of a table whose keys begin with an id, asked for in the order of ids. ``passed`` gets
    the ids that nobody asked for."""

    def __init__(
        self, env: Environment, txn: lmdb.Transaction[bytes], table: bytes, passed: list[RecordId] | None = None
    ) -> None:
        self._rows = iter(txn.cursor(env.db[table]))
        self._passed = passed
        self._key, self._value = next(self._rows, (b"", b""))

    def at(self, id_: RecordId) -> bytes:
        """The value whose key is ``id_``; empty where there is none."""
        if self._key != id_:
            self._seek(id_)
            if self._key != id_:
                return b""
        value = self._value
        self._key, self._value = next(self._rows, (b"", b""))
        return value

    def below(self, id_: RecordId) -> list[bytes]:
        """The values whose keys begin with ``id_``."""
        if not self._key or self._key < id_:
            self._seek(id_)
        values: list[bytes] = []
        while self._key.startswith(id_):
            values.append(self._value)
            self._key, self._value = next(self._rows, (b"", b""))
        return values

    def finish(self) -> None:
        """All that are left were not asked for."""
        while self._key:
            self._pass()

    def _seek(self, id_: RecordId) -> None:
        while self._key and self._key < id_:
            self._pass()

    def _pass(self) -> None:
        if self._passed is not None:
            self._passed.append(RecordId(self._key))
        self._key, self._value = next(self._rows, (b"", b""))


class _Chunks:
    """How many chunks each id has, asked for in the order of ids; ``orphans`` gets ids that nobody
    asked for. Chunks themselves are not read."""

    def __init__(self, env: Environment, txn: lmdb.Transaction[bytes], orphans: set[RecordId]) -> None:
        self._keys = iter(txn.cursor(env.db[b"chunks"]).iternext(keys=True, values=False))
        self._orphans = orphans
        self._key: bytes = next(self._keys, b"")

    def count(self, id_: RecordId) -> int:
        while self._key and self._key < id_:  # a chunk's key is longer than its id
            self._pass()
        count = 0
        while self._key.startswith(id_):
            self._check()
            count += 1
            self._key = next(self._keys, b"")
        return count

    def finish(self) -> None:
        while self._key:
            self._pass()

    def _pass(self) -> None:
        self._check()
        self._orphans.add(RecordId(self._key[:ID_BYTES]))
        self._key = next(self._keys, b"")

    def _check(self) -> None:
        if len(self._key) != _KEY_BYTES:
            raise FormatError(f"chunk key has {len(self._key)} bytes, expected {_KEY_BYTES}")
