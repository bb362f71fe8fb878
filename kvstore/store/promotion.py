"""Promotion: bring a record from the cold into the warm tier, once however many ask.

The first asker reserves room under the lock, copies outside it and publishes; the others wait
for that. A record whose bytes do not match their digests is quarantined with all that builds
on it: a miss, never a wrong answer.
"""

from __future__ import annotations

import fcntl
import logging
import os
import time
from collections.abc import Sequence
from functools import partial

from warmkv.kvstore import memfd
from warmkv.kvstore.store import packing
from warmkv.kvstore.store.cold import ColdTier
from warmkv.kvstore.store.index import Cold, Index, Record
from warmkv.kvstore.store.path import Span
from warmkv.kvstore.store.warm import WarmTier
from warmkv.kvstore.store.write_behind import WriteBehind
from warmkv.schema import segment as container
from warmkv.schema.errors import DescriptorLimit, FormatError, OfferAgain, StoreError
from warmkv.schema.records import ROOT

log = logging.getLogger(__name__)


class Promotion:
    """**Threading:** `promote` and `quarantine` want the index lock free."""

    def __init__(self, index: Index, warm: WarmTier, cold: ColdTier | None, writer: WriteBehind | None) -> None:
        self.count = 0
        self.total_bytes = 0
        self.quarantined = 0
        self.packed = 0
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

    def pack(self, spans: Sequence[Span]) -> tuple[int, str]:
        """Pack what of these is worth it, see `packing`; bytes of packed segments made, and what
        went wrong: then everything is as before, or a bad record was quarantined."""
        made, trouble = 0, ""
        limit = min(packing.MAX_PACK_BYTES, self._warm.ledger.budget_bytes // 4)
        for run in list(packing.runs(spans, limit)):
            try:
                made += self._pack(run)
            except (StoreError, FormatError) as exc:
                trouble = str(exc)
            finally:
                self._warm.reap()
        return made, trouble

    def _pack(self, run: list[Record]) -> int:
        """Pack one run, once however many ask: who comes second does nothing here."""
        with self._index.changed:
            last = run[-1]
            if any(record.promotion or record.gone for record in run) or last.node is None:
                return 0
            for record in run:
                record.promotion = self
            parent = run[0].parent
            tokens, attachments = last.namespace.trees[last.lineage].prefix(last.node, last.end)
        fd, held = -1, [-1] * len(run)
        pack: packing.Pack | None = None
        began = time.monotonic()
        try:
            pack = packing.plan(run, parent.id if parent is not None else ROOT, tokens, attachments)
            if pack is None or not self._reserve_pack(pack, held):
                return 0
            fd = self._write_pack(pack, held)
        finally:
            admitted = self._publish_pack(run, pack, fd)
            from_disk = not any(own >= 0 for own in held)
            for own in held:
                if own >= 0:
                    os.close(own)
        if from_disk:
            self._note_speed(pack.total_bytes, time.monotonic() - began)
        return pack.total_bytes if admitted else 0

    def _reserve_pack(self, pack: packing.Pack, held: list[int]) -> bool:
        """Make room, and fill in descriptors of the parts that are in memory; False where the
        same segment is there already."""
        with self._index.changed:
            if pack.header.id in self._index.records:
                return False
            records = [part.record for part in pack.parts]
            self._warm.make_room(pack.total_bytes, records[-1])
            if any(record.gone or not (record.warm or record.cold == Cold.STORED) for record in records):
                raise OfferAgain("a segment was dropped while room was made to pack it")
            try:
                for number, record in enumerate(records):
                    held[number] = fcntl.fcntl(record.fd, fcntl.F_DUPFD_CLOEXEC, 0) if record.warm else -1
            except OSError as exc:
                raise DescriptorLimit("no descriptor left to pack segments") from exc
            self._warm.ledger.promoting_bytes += pack.total_bytes
            self._warm.ledger.promoting_entries += 1
            self._warm.ledger.note_peak()
            pack.reserved = True
        return True

    def _write_pack(self, pack: packing.Pack, held: list[int]) -> int:
        packer = packing.Packer(pack)
        try:
            for part, own in zip(pack.parts, held, strict=True):
                try:
                    if own >= 0:
                        view = memoryview(memfd.map_private(own, part.record.total_bytes))
                        head = container.decode_head(view, len(view))
                        packer.place(part, head.header, 0, view[head.payload_offset :])
                    elif self._cold is not None:
                        self._cold.read(part.record.id, partial(packer.place, part))
                except FormatError as exc:
                    self.quarantine(part.record, str(exc))
                    raise
            return packer.finish()
        finally:
            packer.close()

    def _publish_pack(self, run: list[Record], pack: packing.Pack | None, fd: int) -> bool:
        """Give back the budget, enter the packed segment, then let go of what it replaces."""
        admitted = False
        with self._index.changed:
            if pack is not None and pack.reserved:
                self._warm.ledger.promoting_bytes -= pack.total_bytes
                self._warm.ledger.promoting_entries -= 1
                gone = any(record.gone for record in run) or pack.header.id in self._index.records
                admitted = fd >= 0 and not gone and not self._warm.closing
            if admitted and pack is not None:
                cold = [record for record in run if not record.warm]
                self.packed += 1
                self.count += bool(cold)
                self.total_bytes += sum(record.total_bytes for record in cold)
                self._admit_pack(pack, fd)
                self._replace(pack)
            self._finish(*run)
        if fd >= 0 and not admitted:
            os.close(fd)
        return admitted

    def _admit_pack(self, pack: packing.Pack, fd: int) -> None:
        first, header = pack.parts[0].record, pack.header
        made = Record(
            header.id, first.namespace, header.lineage, header.start, header.end, pack.total_bytes, pack.payload_bytes,
            header.created_ns, header.writer, coverage=pack.coverage, packed=True,
        )  # fmt: skip
        records = [part.record for part in pack.parts]
        made.pinned_until_ns = min(record.pinned_until_ns for record in records)
        self._index.add(made, first.parent, pack.tokens, pack.attachments)
        self._warm.admit(made, fd)
        self._index.touch([made])

    def _replace(self, pack: packing.Pack) -> None:
        """What is on disk as well leaves the warm tier; without a disk, what is wholly packed
        leaves the index, and what builds on it builds on the packed segment."""
        made = self._index.records[pack.header.id]
        for part in reversed(pack.parts):
            record = part.record
            if not record.warm or self._warm.leased(record) or not pack.replaces(part):
                continue
            if record.cold == Cold.STORED:
                self._warm.evict(record)
            elif self._writer is None:
                self._index.adopt(made, record)
                self._warm.evict(record)

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
        self._note_speed(record.total_bytes, time.monotonic() - started)
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

    def _note_speed(self, copied_bytes: int, seconds: float) -> None:
        self.bytes_per_s += 0.25 * (copied_bytes / max(1e-9, seconds) - self.bytes_per_s)

    def _finish(self, *records: Record) -> None:
        for record in records:
            record.promotion = None
        self._index.changed.notify_all()

    def settled(self, records: Sequence[Record]) -> bool:
        """Wait until nobody promotes one of these; whether nobody did. What was waited for may
        have been packed: look again."""
        with self._index.changed:
            if not any(record.promotion for record in records):
                return True
            self._index.changed.wait_for(lambda: not any(record.promotion for record in records))
            return False

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
