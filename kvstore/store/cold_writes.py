"""Writing to the cold tier: chunks first, what makes a record findable last.

A record that can be found is whole: its metadata is in the last transaction of its save. Whatever
the disk says meanwhile means "not stored", and what was stored of it is removed again.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import lmdb

from warmkv.kvstore import memfd
from warmkv.kvstore.store.cold_deletions import ColdDeletions
from warmkv.kvstore.store.environment import Environment, no_room
from warmkv.kvstore.store.summaries import summarize
from warmkv.schema import canonical, lmdb_records, summary
from warmkv.schema import segment as container
from warmkv.schema.errors import ColdFull, WarmKVError
from warmkv.schema.lmdb_records import NamespaceRecord, Usage
from warmkv.schema.records import Anchor, NamespaceKey, RecordId

log = logging.getLogger(__name__)

TRANSACTION_BYTES = 64 << 20
#: Rows of summaries that one transaction writes: a few hundred pages.
SUMMARY_ROWS = 4096
_CHUNK = container.CHUNK_BYTES


@dataclass(frozen=True, slots=True)
class WriteItem:
    """One record on its way to disk; ``fd`` is its sealed container, borrowed."""

    id: RecordId
    is_state: bool
    namespace: NamespaceKey
    namespace_record: NamespaceRecord
    fd: int
    total_bytes: int
    usage: Usage
    anchors: tuple[Anchor, ...]


class ColdWrites:
    """**Threading:** inside a call of the environment, its ``writing`` held."""

    def __init__(self, env: Environment, deletions: ColdDeletions) -> None:
        self.bytes_written = 0
        #: Namespaces that are on disk already.
        self.namespaces: set[NamespaceKey] = set()
        self._env = env
        self._deletions = deletions

    def write(self, items: Sequence[WriteItem], counter: int) -> None:
        """See `ColdTier.write`."""
        self._require_home()
        try:
            self._write_or_clean_up(items, counter)
        except lmdb.Error as exc:
            # LMDB gives freed pages back only once another transaction was committed after
            # the one that freed them: what was deleted for these records counts now.
            if not self._commit_counter(counter):
                raise self._refusal(exc) from exc
            try:
                self._write_or_clean_up(items, counter)
            except (lmdb.Error, OSError, WarmKVError) as again:
                raise self._refusal(again) from again
        except (OSError, WarmKVError) as exc:
            raise self._refusal(exc) from exc

    def write_usage(self, rows: Iterable[tuple[RecordId, Usage, tuple[Anchor, ...]]], counter: int) -> None:
        """See `ColdTier.write_usage`."""
        self._require_home()
        with self._env.begin(write=True) as txn:
            for id_, usage, anchors in rows:
                txn.put(id_, lmdb_records.encode_usage(usage), db=self._env.db[b"usage"])
                for anchor in anchors:
                    self._put_anchor(txn, id_, anchor)
            self._put_counter(txn, counter)
            self._env.faults.reached("usage.sync")
        self._env.faults.reached("usage.done")

    def write_summaries(self, rows: Sequence[tuple[RecordId, bytes]], gone: Sequence[RecordId]) -> None:
        """Rows that were missing, and those of records that are not there."""
        work = [*((id_, row) for id_, row in rows), *((id_, b"") for id_ in gone)]
        for at in range(0, len(work), SUMMARY_ROWS):
            with self._env.begin(write=True, db=self._env.db[b"summaries"]) as txn:
                for id_, row in work[at : at + SUMMARY_ROWS]:
                    if row:
                        txn.put(id_, row)
                    else:
                        txn.delete(id_)

    def put_meta(self, name: bytes, value: bytes) -> None:
        with self._env.begin(write=True, db=self._env.db[b"meta"]) as txn:
            txn.put(name, value)

    def note_quarantine(self, id_: RecordId, reason: str, now_ns: int) -> None:
        with self._env.begin(write=True, db=self._env.db[b"quarantine"]) as txn:
            txn.put(id_, canonical.encode((reason, now_ns)))

    def drop_namespaces(self, keys: Sequence[NamespaceKey]) -> None:
        with self._env.begin(write=True, db=self._env.db[b"namespaces"]) as txn:
            for key in keys:
                txn.delete(key)
        self.namespaces.difference_update(keys)

    def _require_home(self) -> None:
        """What is written to a file that nobody will find again is not stored. Raises ColdFull."""
        if problem := self._env.folder.problem():
            raise ColdFull(problem)

    def _refusal(self, exc: Exception) -> ColdFull:
        path = self._env.folder.path
        return ColdFull(f"no room left in {path}: {exc}" if no_room(exc) else f"writing to {path} failed: {exc}")

    def _commit_counter(self, counter: int) -> bool:
        try:
            with self._env.begin(write=True) as txn:
                self._put_counter(txn, counter)
        except (lmdb.Error, OSError):
            return False
        return True

    def _write_or_clean_up(self, items: Sequence[WriteItem], counter: int) -> None:
        done: list[RecordId] = []
        if not self._deletions.leftover.isdisjoint(item.id for item in items):
            # Chunks of another container of the same id, which may have had more of them.
            self._deletions.remove(sorted(self._deletions.leftover))
        try:
            self._write(items, counter, done)
        except BaseException:
            self._deletions.leftover.update(done)
            self._deletions.remove_leftover()
            raise
        self._deletions.leftover.difference_update(done)

    def _write(self, items: Sequence[WriteItem], counter: int, done: list[RecordId]) -> None:
        reached = self._env.faults.reached
        reached("commit.begin")
        heads: list[bytes] = []
        txn = self._env.begin(write=True)
        pending = 0
        try:
            for item in items:
                done.append(item.id)
                view = memoryview(memfd.map_private(item.fd, item.total_bytes))
                size = container.head_size(bytes(view[: container.PREAMBLE.size]))
                heads.append(bytes(view[:size]))
                payload = view[container.align(size, container.PAYLOAD_ALIGNMENT) :]
                for index, at in enumerate(range(0, len(payload), _CHUNK)):
                    piece = payload[at : at + _CHUNK]
                    if pending and pending + len(piece) > TRANSACTION_BYTES:
                        txn.commit()
                        reached("commit.split")
                        txn, pending = self._env.begin(write=True), 0
                    txn.put(lmdb_records.chunk_key(item.id, index), piece, db=self._env.db[b"chunks"])
                    pending += len(piece)
                    self.bytes_written += len(piece)
                    reached("commit.chunk")
            for item, head in zip(items, heads, strict=True):
                self._put_metadata(txn, item, head)
            self._put_counter(txn, counter)
            reached("commit.metadata")
            reached("commit.sync")
            txn.commit()
        except BaseException:
            txn.abort()
            raise
        reached("commit.done")
        self.namespaces.update(item.namespace for item in items)

    def _put_metadata(self, txn: lmdb.Transaction, item: WriteItem, head: bytes) -> None:
        db = self._env.db
        if item.namespace not in self.namespaces:
            txn.put(item.namespace, lmdb_records.encode_namespace(item.namespace_record), db=db[b"namespaces"])
        txn.put(item.id, head, db=db[b"states" if item.is_state else b"segments"])
        try:
            row = summary.encode(item.id, summarize(head, item.namespace_record.identity))
        except WarmKVError as exc:
            # The next start reads the head instead, and says what it thinks of it.
            log.warning("record %s is written without a summary: %s", item.id.hex(), exc)
            txn.delete(item.id, db=db[b"summaries"])
        else:
            txn.put(item.id, row, db=db[b"summaries"])
        txn.put(item.id, lmdb_records.encode_usage(item.usage), db=db[b"usage"])
        txn.delete(item.id, db=db[b"quarantine"])
        for anchor in item.anchors:
            self._put_anchor(txn, item.id, anchor)
        self.bytes_written += len(head)

    def _put_anchor(self, txn: lmdb.Transaction, id_: RecordId, anchor: Anchor) -> None:
        txn.put(lmdb_records.anchor_key(id_, anchor), lmdb_records.encode_anchor(anchor), db=self._env.db[b"anchors"])

    def _put_counter(self, txn: lmdb.Transaction, counter: int) -> None:
        txn.put(b"counter", counter.to_bytes(8, "little"), db=self._env.db[b"meta"])
