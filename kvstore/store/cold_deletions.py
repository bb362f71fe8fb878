"""Removing records from the cold tier, also where no byte is left to do it with.

LMDB copies the pages it changes: a deletion needs free ones. So each transaction deletes little,
less where the disk refuses, and what one record alone cannot find comes out of the reserve.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterable, Sequence
from itertools import islice, takewhile
from typing import Any

import lmdb

from warmkv.kvstore.store.cold_reads import HEADS
from warmkv.kvstore.store.environment import Environment
from warmkv.schema.records import RecordId

log = logging.getLogger(__name__)

#: Records, and chunks, that one transaction deletes at most: it must find room for its copies
#: of tree pages and its list of freed ones.
DELETE_RECORDS = 32
_BY_ID = (*HEADS, b"usage", b"summaries")


class ColdDeletions:
    """**Threading:** inside a call of the environment, its ``writing`` held."""

    def __init__(self, env: Environment) -> None:
        self._env = env
        #: Chunks of failed writes that could not be removed either; each deletion tries again.
        self.leftover: set[RecordId] = set()

    def remove(self, ids: Iterable[RecordId]) -> None:
        """Remove records in transactions of `DELETE_RECORDS`, of each its metadata before its chunks.
        Raises lmdb.Error, OSError; the same call may be made again."""
        pending, size, released = deque(ids), DELETE_RECORDS, False
        try:
            while pending:
                batch = list(islice(pending, size))
                try:
                    self._remove_metadata(batch)
                    self._remove_chunks(batch, size)
                except (lmdb.Error, OSError):
                    if size > 1:
                        size //= 2
                    elif released or not (released := self._env.folder.release_reserve()):
                        raise
                    continue
                for id_ in batch:
                    pending.popleft()
                    self.leftover.discard(id_)
                size = min(2 * size, DELETE_RECORDS)
        finally:
            if released:
                self._env.folder.hold_reserve()
        self._env.faults.reached("delete.done")

    def remove_leftover(self) -> None:
        """Try once more what failed writes left; what cannot be removed yet stays listed."""
        if not self.leftover:
            return
        try:
            self.remove(sorted(self.leftover))
        except (lmdb.Error, OSError) as exc:
            log.warning("chunks of %d failed writes could not be removed yet: %s", len(self.leftover), exc)

    def _remove_metadata(self, ids: Sequence[RecordId]) -> None:
        with self._env.begin(write=True) as txn:
            for id_ in ids:
                for table in _BY_ID:
                    txn.delete(id_, db=self._env.db[table])
                for key in _keys_under(txn, self._env.db[b"anchors"], id_):
                    txn.delete(key, db=self._env.db[b"anchors"])
        self._env.faults.reached("delete.metadata")

    def _remove_chunks(self, ids: Sequence[RecordId], limit: int) -> None:
        """Remove the chunks of ``ids``, ``limit`` a transaction."""
        pending = list(ids)
        while pending:
            room = limit
            with self._env.begin(write=True) as txn:
                while pending and room:
                    keys = _keys_under(txn, self._env.db[b"chunks"], pending[-1], limit=room)
                    for key in keys:
                        txn.delete(key, db=self._env.db[b"chunks"])
                    if len(keys) < room:
                        pending.pop()
                    room -= len(keys)
            self._env.faults.reached("delete.chunks")


def _keys_under(txn: lmdb.Transaction, db: Any, prefix: bytes, limit: int = 1 << 30) -> list[bytes]:
    """Up to ``limit`` keys that begin with ``prefix``; their values are not read."""
    cursor = txn.cursor(db)
    if not cursor.set_range(prefix):
        return []
    keys = map(bytes, cursor.iternext(keys=True, values=False))
    return list(takewhile(lambda key: key.startswith(prefix), islice(keys, limit)))
