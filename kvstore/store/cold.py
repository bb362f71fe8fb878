"""The cold tier: containers cut into head and 4 MiB chunks in one LMDB environment.

Chunks of one size let LMDB reuse what deletions free; metadata is written in the last
transaction of a save, so that a record that can be found is whole. Default mode throughout:
no writemap (a full disk would be a SIGBUS), synchronous commits (a commit is a promise).

**Threading:** any thread. Whoever changes what is stored waits for others who do, and while a
compaction copies; all transactions are short. `close` waits for calls under way: their views lie in
the map it takes away.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import lmdb

from warmkv.kvstore.store import compaction
from warmkv.kvstore.store.cold_deletions import ColdDeletions
from warmkv.kvstore.store.cold_reads import ColdReads
from warmkv.kvstore.store.cold_records import ColdRecord, Restart, read_namespaces, read_records
from warmkv.kvstore.store.cold_writes import TRANSACTION_BYTES, ColdWrites, WriteItem
from warmkv.kvstore.store.environment import Environment
from warmkv.kvstore.store.faults import NO_FAULTS, Faults
from warmkv.kvstore.store.lmdb_map import PAGE_BYTES
from warmkv.schema import segment as container
from warmkv.schema.errors import ColdFull, CorruptStore, FormatError, StoreError
from warmkv.schema.identity import Identity
from warmkv.schema.lmdb_records import NamespaceRecord, Usage
from warmkv.schema.records import Anchor, NamespaceKey, RecordId

__all__ = ["TRANSACTION_BYTES", "ColdRecord", "ColdTier", "WriteItem", "stored_bytes"]

#: What a transaction takes beside its chunks, generously.
SPARE_BYTES = 2 << 20


def stored_bytes(total_bytes: int, payload_bytes: int) -> int:
    """Pages a container takes in LMDB."""
    full, rest = divmod(payload_bytes, container.CHUNK_BYTES)
    pages = full * _pages(container.CHUNK_BYTES) + (_pages(rest) if rest else 0) + _pages(total_bytes - payload_bytes)
    return pages * PAGE_BYTES


def _pages(size: int) -> int:
    return -(-(size + 16) // PAGE_BYTES)


class ColdTier:
    """See the module docstring. Create with `open`; `close` releases environment and lock."""

    def __init__(self, env: Environment, wall_ns: Callable[[], int] = time.time_ns) -> None:
        self._env = env
        self._wall_ns = wall_ns
        self._deletions = ColdDeletions(env)
        self._writes = ColdWrites(env, self._deletions)
        self._reads = ColdReads(env)

    @classmethod
    def open(
        cls, path: Path, budget_bytes: int, faults: Faults = NO_FAULTS, *,
        allow_network: bool = False, wall_ns: Callable[[], int] = time.time_ns,
    ) -> ColdTier:  # fmt: skip
        """Open or create the store in the directory ``path``. Raises as `Environment.open` does."""
        return cls(Environment.open(path, budget_bytes, faults, allow_network=allow_network), wall_ns)

    @property
    def path(self) -> Path:
        return self._env.folder.path

    @property
    def budget_bytes(self) -> int:
        return self._env.budget_bytes

    @property
    def faults(self) -> Faults:
        return self._env.faults

    @property
    def bytes_written(self) -> int:
        return self._writes.bytes_written

    def keep_room_for(self, total_bytes: int) -> None:
        """What is stored stays within the budget though others took the disk's room meanwhile:
        evicting it would give nothing back to the disk."""
        self._env.budget_bytes = max(self._env.budget_bytes, min(self._env.wanted_bytes, total_bytes))

    def begin_anew(self, reason: str) -> None:
        """Move an environment that turned out unreadable aside and begin a fresh one. Nobody else
        may use the tier yet. Raises StoreError."""
        self._env.begin_anew(reason)
        self._writes.namespaces.clear()
        self._deletions.leftover.clear()

    def close(self) -> None:
        """Close the environment and give up the lock. Idempotent."""
        self._env.close()
        self._env.faults.reached("stop.closed")

    # -- writing -------------------------------------------------------------------------

    def write(self, items: Sequence[WriteItem], counter: int) -> None:
        """Commit records, parents before children, in transactions of at most 64 MB; metadata of
        all of them in the last one. Raises ColdFull, and then nothing of them can be found."""
        with self._env.writing, self._env.call():
            self._writes.write(items, counter)

    def write_usage(self, rows: Iterable[tuple[RecordId, Usage, tuple[Anchor, ...]]], counter: int) -> None:
        """One transaction of usage and anchors of stored records, and the recency counter. Raises
        ColdFull."""
        with self._changing("writing usage to"):
            self._writes.write_usage(rows, counter)

    def delete(self, ids: Sequence[RecordId]) -> None:
        """Remove records, of each its metadata before its chunks. Raises ColdFull when the disk
        refuses; the same call may be made again."""
        if not ids and not self._deletions.leftover:
            return
        with self._changing("deleting from"):
            self._deletions.remove(ids)
            self._deletions.remove_leftover()

    def scattered(self, refusal: ColdFull, wanted_bytes: int) -> bool:
        """Whether `write` refused so much because the map has it neither in one piece nor at its end:
        deleting more may help."""
        if not isinstance(refusal.__cause__, lmdb.MapFullError):
            return False
        info = self.info()
        return info["map_bytes"] - info["file_bytes"] < wanted_bytes + SPARE_BYTES

    def note_quarantine(self, id_: RecordId, reason: str) -> None:
        """Keep a note that a record's bytes were bad, until it is saved anew. Raises ColdFull."""
        with self._changing("writing to"):
            self._writes.note_quarantine(id_, reason, self._wall_ns())

    def note(self, name: bytes, value: bytes) -> None:
        """Keep a value of the tier's own, see `noted`. Raises ColdFull."""
        with self._changing("writing to"):
            self._writes.put_meta(name, value)

    def sweep(self, bad: Sequence[RecordId], empty: Sequence[NamespaceKey]) -> None:
        """At start: remove records that are not whole and namespaces that hold nothing. Raises
        ColdFull."""
        self.delete(bad)
        with self._changing("deleting from"):
            self._writes.drop_namespaces(empty)

    def write_summaries(self, found: Restart) -> None:
        """At start: what a restart has made of heads. Raises ColdFull."""
        with self._changing("writing to"):
            self._writes.write_summaries(found.made, found.stray)

    @contextmanager
    def _changing(self, what: str) -> Iterator[None]:
        with self._env.writing:
            try:
                with self._env.call():
                    yield
            except (lmdb.Error, OSError) as exc:
                raise ColdFull(f"{what} {self.path} failed: {exc}") from exc

    # -- reading -------------------------------------------------------------------------

    def load(self, id_: RecordId, total_bytes: int) -> int:
        """Copy a record into a new sealed memfd, checking head and every chunk; its descriptor,
        owned by the caller. Raises DigestError or FormatError for a record that is not whole,
        StoreError when it cannot be read just now."""
        return self._reads.load(id_, total_bytes)

    def read(self, id_: RecordId, place: Callable[[container.Header, int, memoryview], None]) -> None:
        """Hand the payload of a record to ``place`` in pieces, each with its offset, checking head
        and every chunk; a chunk is checked after it was handed over. Raises as `load` does."""
        self._reads.read(id_, place)

    def piece(self, id_: RecordId, index: int) -> tuple[container.Head, bytes]:
        """The head of a record and a copy of one chunk, both checked: for who may be slow with it, while
        nothing waits for that. Raises as `load` does."""
        return self._reads.piece(id_, index)

    def verify(self, id_: RecordId) -> container.Head:
        """Check head and payload of a record without copying it. Raises as `load` does."""
        return self._reads.verify(id_)

    def counter(self) -> int:
        """The recency counter. Raises FormatError, StoreError."""
        return self._reads.counter()

    def noted(self, name: bytes) -> bytes:
        """What was kept by `note`; empty where nothing. Raises FormatError, StoreError."""
        return self._reads.meta(name)

    def quarantined(self) -> int:
        """Records whose bytes were bad and that were not saved anew; 0 while that cannot be read."""
        try:
            return self._reads.quarantined()
        except (FormatError, StoreError):
            return 0

    def stored_ids(self) -> tuple[set[RecordId], set[RecordId]]:
        """Ids that have a head on disk, and those that have a summary. Raises FormatError, StoreError."""
        return self._reads.stored_ids()

    # -- restart -------------------------------------------------------------------------

    def namespaces(self) -> Iterator[tuple[NamespaceKey, NamespaceRecord]]:
        """Namespaces on disk; unreadable ones are reported and left out. Raises CorruptStore."""
        try:
            for key, record in read_namespaces(self._env):
                self._writes.namespaces.add(key)
                yield key, record
        except lmdb.Error as exc:
            raise CorruptStore(str(exc)) from exc

    def records(self, identities: Mapping[NamespaceKey, Identity], take: Callable[[ColdRecord], None]) -> Restart:
        """Hand every whole record of these namespaces to ``take``, one at a time; what is to be
        removed. Raises CorruptStore where the tables themselves cannot be read."""
        try:
            return read_records(self._env, identities, take)
        except (lmdb.Error, FormatError) as exc:
            raise CorruptStore(str(exc)) from exc

    # -- care ----------------------------------------------------------------------------

    def compact(self) -> dict[str, int]:
        """Give free pages back to the disk, while others go on. Raises StoreError, and then nothing
        has changed. See `compaction`."""
        done = compaction.compact(self._env)
        self.keep_room_for(self._env.live_bytes())
        return done

    def backup(self, target: Path) -> dict[str, object]:
        """Copy the store as it is now to ``target``, which must not exist, while others go on. Raises
        StoreError. See `compaction`."""
        return compaction.backup(self._env, target)

    def reader_check(self) -> int:
        """Free the reader slots of processes that died; how many."""
        return self._env.reader_check()

    def problem(self) -> str:
        """What keeps this tier from storing anything for good, in a sentence; empty when nothing."""
        return self._env.problem()

    def info(self) -> dict[str, int]:
        """File and map sizes, readers in use, environments moved aside; zeros, see `problem`, while
        there is no environment."""
        try:
            return self._env.info()
        except StoreError:
            return {"map_bytes": 0, "file_bytes": 0, "readers": 0, "moved_aside": len(self._env.folder.aside())}
