"""Promotion: bring a record from the cold into the warm tier, once however many ask.

The first asker reserves room under the lock, copies outside it and publishes; the others wait
for that. A record whose bytes do not match their digests is quarantined with all that builds
on it: a miss, never a wrong answer.
"""

from __future__ import annotations

import logging
import os
import time

from warmkv.kvstore.store.cold import ColdTier
from warmkv.kvstore.store.index import Cold, Index, Record
from warmkv.kvstore.store.warm import WarmTier
from warmkv.kvstore.store.write_behind import WriteBehind
from warmkv.schema.errors import FormatError, OfferAgain, StoreError

log = logging.getLogger(__name__)


class Promotion:
    """**Threading:** `promote` and `quarantine` want the index lock free."""

    def __init__(self, index: Index, warm: WarmTier, cold: ColdTier | None, writer: WriteBehind | None) -> None:
        self.count = 0
        self.total_bytes = 0
        self.quarantined = 0
        #: Measured bytes per second, an exponential average; begins at a modest disk's speed.
        self.bytes_per_s = 5e8
        self._index = index
        self._warm = warm
        self._cold = cold
        self._writer = writer

    def promote(self, record: Record) -> int:
        """Make the record warm; bytes copied by this call (0 if it was, or another call did it).

        Raises TooLarge, Busy, FormatError (quarantined), OfferAgain (gone meanwhile)."""
        try:
            cold = self._begin(record)
        finally:
            self._warm.reap()
        return 0 if cold is None else self._copy(record, cold)

    def _begin(self, record: Record) -> ColdTier | None:
        """Make room for the record and mark it as being promoted; None if it is warm already."""
        with self._index.changed:
            while True:
                if record.warm:
                    return None
                if record.gone or record.cold != Cold.STORED or self._cold is None:
                    raise OfferAgain("the record was evicted meanwhile")
                if record.promotion is None:
                    break
                self._index.changed.wait()
            record.promotion = self
            try:
                self._warm.make_room(record.total_bytes)
                if record.gone:
                    raise OfferAgain("the record was dropped while room was made for it")
            except BaseException:
                self._finish(record)
                raise
            self._warm.ledger.promoting_bytes += record.total_bytes
            self._warm.ledger.promoting_entries += 1
            self._warm.ledger.note_peak()
        return self._cold

    def _copy(self, record: Record, cold: ColdTier) -> int:
        fd = -1
        started = time.monotonic()
        try:
            fd = cold.load(record.id, record.total_bytes)
        except FormatError as exc:
            self._publish(record, -1)
            self.quarantine(record, str(exc))
            raise
        except BaseException:
            self._publish(record, -1)
            raise
        speed = record.total_bytes / max(1e-9, time.monotonic() - started)
        self.bytes_per_s += 0.25 * (speed - self.bytes_per_s)
        if not self._publish(record, fd):
            raise OfferAgain("the record was dropped while it was promoted")
        return record.total_bytes

    def _publish(self, record: Record, fd: int) -> bool:
        """Give back the promotion's budget and, unless record or store are gone, admit ``fd``."""
        with self._index.changed:
            self._warm.ledger.promoting_bytes -= record.total_bytes
            self._warm.ledger.promoting_entries -= 1
            admitted = fd >= 0 and not record.gone and not self._warm.closing
            if admitted:
                self._warm.admit(record, fd)
                self.count += 1
                self.total_bytes += record.total_bytes
            self._finish(record)
        if fd >= 0 and not admitted:
            os.close(fd)
        return admitted

    def _finish(self, record: Record) -> None:
        record.promotion = None
        self._index.changed.notify_all()

    def quarantine(self, record: Record, reason: str) -> None:
        """Take a record whose bytes are bad, and all that builds on it, out of both tiers."""
        with self._index.changed:
            if record.gone:
                return
            doomed = self._index.subtree(record)
            ids = [item.id for item in doomed if item.cold == Cold.STORED]
            for item in doomed:
                if self._writer is not None:
                    self._writer.discard(item)
                if item.warm:
                    self._warm.evict(item)
                if not item.gone:
                    self._index.drop(item)
            self.quarantined += 1
            self._index.changed.notify_all()
        self._warm.reap()
        log.error("segment %s quarantined with %d that build on it: %s", record.id.hex(), len(doomed) - 1, reason)
        if self._cold is not None and record.id in ids:
            try:
                self._cold.note_quarantine(record.id, reason)
            except StoreError as exc:
                log.error("the quarantine could not be noted on disk: %s", exc)
