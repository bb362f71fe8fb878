"""Reading records back from the cold tier: nothing of them is believed before its digest was."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable
from functools import partial
from typing import TypeVar

import lmdb
import xxhash

from warmkv.kvstore import memfd
from warmkv.kvstore.store.environment import Environment
from warmkv.schema import lmdb_records
from warmkv.schema import segment as container
from warmkv.schema.errors import DigestError, FormatError, StoreError
from warmkv.schema.records import RecordId

T = TypeVar("T")
_CHUNK = container.CHUNK_BYTES
#: Tables of heads, by id; no id is in both.
HEADS = (b"segments", b"states")


class ColdReads:
    """**Threading:** any thread. A read holds its transaction, and with it the pages of that moment,
    no longer than it copies."""

    def __init__(self, env: Environment) -> None:
        self._env = env

    def load(self, id_: RecordId, total_bytes: int) -> int:
        """A new sealed memfd with the record. See `ColdTier.load`."""
        return self.reading(partial(self._load, id_, total_bytes))

    def read(self, id_: RecordId, place: Callable[[container.Header, int, memoryview], None]) -> None:
        """The payload in pieces. See `ColdTier.read`."""
        self.reading(partial(self._read, id_, place))

    def piece(self, id_: RecordId, index: int) -> tuple[container.Head, bytes]:
        """One chunk, copied. See `ColdTier.piece`."""
        return self.reading(partial(self._piece, id_, index))

    def verify(self, id_: RecordId) -> container.Head:
        """Check head and payload without a copy. See `ColdTier.verify`."""
        return self.reading(partial(self._verify, id_))

    def reading(self, use: Callable[[lmdb.Transaction[memoryview]], T]) -> T:
        """What ``use`` makes of a read transaction, whose views end with it. Raises what it raises,
        FormatError for pages LMDB cannot follow, StoreError when it cannot be read just now.

        LMDB's slot of a transaction is taken until nothing refers to it any more, ended or not: the
        frames of an exception forget it."""
        with self._env.call():
            try:
                txn = self._env.begin_views()
                try:
                    with txn:
                        return use(txn)
                finally:
                    del txn
            except (lmdb.CorruptedError, lmdb.PageNotFoundError) as exc:
                raise FormatError(f"pages of {self._env.folder.path} are not readable: {_forgetful(exc)}") from exc
            except lmdb.ReadersFullError as exc:
                raise StoreError(f"no reader slot left in {self._env.folder.path}") from _forgetful(exc)
            except lmdb.Error as exc:
                raise StoreError(f"reading from {self._env.folder.path} failed: {exc}") from _forgetful(exc)
            except BaseException as exc:
                _forgetful(exc)
                raise

    def _load(self, id_: RecordId, total_bytes: int, txn: lmdb.Transaction[memoryview]) -> int:
        raw, head = self._head(txn, id_)
        if head.container_bytes != total_bytes:
            raise FormatError(f"record {id_.hex()} has {head.container_bytes} bytes, expected {total_bytes}")
        fd = memfd.create(f"warmkv:{id_.hex()}", total_bytes)
        try:
            memfd.write(fd, raw, 0)
            memfd.write(fd, bytes(head.payload_offset - head.head_bytes), head.head_bytes)
            self._copy(txn, id_, head, lambda at, piece: memfd.write(fd, piece, head.payload_offset + at))
            memfd.seal(fd)
        except BaseException:
            os.close(fd)
            raise
        return fd

    def _read(
        self, id_: RecordId, place: Callable[[container.Header, int, memoryview], None], txn: lmdb.Transaction[memoryview]
    ) -> None:  # fmt: skip
        _, head = self._head(txn, id_)
        self._copy(txn, id_, head, partial(place, head.header))

    def _piece(self, id_: RecordId, index: int, txn: lmdb.Transaction[memoryview]) -> tuple[container.Head, bytes]:
        _, head = self._head(txn, id_)
        piece = bytes(self._chunk(txn, id_, index, head))
        _check_digest(id_, index, head, piece)
        return head, piece

    def _verify(self, id_: RecordId, txn: lmdb.Transaction[memoryview]) -> container.Head:
        _, head = self._head(txn, id_)
        self._copy(txn, id_, head, lambda at, piece: None)
        return head

    def _copy(
        self, txn: lmdb.Transaction[memoryview], id_: RecordId, head: container.Head, place: Callable[[int, memoryview], None]
    ) -> None:  # fmt: skip
        for index in range(container.chunk_count(head.payload_bytes)):
            piece = self._chunk(txn, id_, index, head)
            # The copy first: it takes the page faults without the interpreter lock, and leaves
            # the bytes in the cache for the digest.
            place(index * _CHUNK, piece)
            _check_digest(id_, index, head, piece)

    def _head(self, txn: lmdb.Transaction[memoryview], id_: RecordId) -> tuple[memoryview, container.Head]:
        raw = next((found for table in HEADS if (found := txn.get(id_, db=self._env.db[table])) is not None), None)
        if raw is None:
            raise FormatError(f"segment {id_.hex()} is not in the cold tier")
        head = container.decode_head(raw)
        if head.header.id != id_:
            raise FormatError(f"the head of segment {id_.hex()} is that of {head.header.id.hex()}")
        return memoryview(raw), head

    def _chunk(self, txn: lmdb.Transaction[memoryview], id_: RecordId, index: int, head: container.Head) -> memoryview:
        piece = txn.get(lmdb_records.chunk_key(id_, index), db=self._env.db[b"chunks"])
        expected = min(_CHUNK, head.payload_bytes - index * _CHUNK)
        if piece is None or len(piece) != expected:
            raise FormatError(
                f"chunk {index} of segment {id_.hex()} has {0 if piece is None else len(piece)} bytes, not {expected}"
            )
        return memoryview(piece)

    def meta(self, name: bytes) -> bytes:
        return self.reading(lambda txn: bytes(txn.get(name, db=self._env.db[b"meta"]) or b""))

    def counter(self) -> int:
        return int.from_bytes(self.meta(b"counter"), "little")

    def quarantined(self) -> int:
        return self.reading(lambda txn: int(txn.stat(self._env.db[b"quarantine"])["entries"]))

    def stored_ids(self) -> tuple[set[RecordId], set[RecordId]]:
        """Ids that have a head, and those that have a summary."""
        return self.reading(lambda txn: (self._ids(txn, *HEADS), self._ids(txn, b"summaries")))

    def _ids(self, txn: lmdb.Transaction[memoryview], *tables: bytes) -> set[RecordId]:
        cursors = (txn.cursor(self._env.db[table]).iternext(keys=True, values=False) for table in tables)
        return {RecordId(bytes(key)) for cursor in cursors for key in cursor}


def _check_digest(id_: RecordId, index: int, head: container.Head, piece: bytes | memoryview) -> None:
    if xxhash.xxh3_128_digest(piece) != head.header.digests[16 * index : 16 * index + 16]:
        raise DigestError(f"chunk {index} of record {id_.hex()} does not match its digest")


def _forgetful(exc: BaseException) -> BaseException:
    """The exception, whose frames that are done have let go of what they held."""
    traceback.clear_frames(exc.__traceback__)
    return exc
