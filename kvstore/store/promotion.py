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
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

from warmkv.kvstore import memfd
from warmkv.kvstore.store import packing
from warmkv.kvstore.store.cold import ColdTier
from warmkv.kvstore.store.faults import NO_FAULTS, Faults
from warmkv.kvstore.store.index import Cold, Index, Record
from warmkv.kvstore.store.path import Span
from warmkv.kvstore.store.warm import WarmTier
from warmkv.kvstore.store.write_behind import WriteBehind
from warmkv.schema import segment as container
from warmkv.schema.errors import DescriptorLimit, FormatError, OfferAgain, StoreError
from warmkv.schema.records import ROOT

log = logging.getLogger(__name__)

#: Told of a packed segment and of what it was made of, see `Promotion.pack`.
Swap = Callable[[Record, Sequence[Record]], None]


class Promotion:
    """**Threading:** `promote` and `quarantine` want the index lock free."""

    def __init__(
        self, index: Index, warm: WarmTier, cold: ColdTier | None, writer: WriteBehind | None, *, faults: Faults = NO_FAULTS
    ) -> None:
        self._faults = faults
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

    def pack(self, spans: Sequence[Span], swap: Swap) -> tuple[int, str]:
        """Pack what of these is worth it, see `packing`; bytes of packed segments made, and what was
        wrong with a record that was quarantined on the way.

        ``swap`` gets each packed segment and what it was made of, the lock held, before any of that
        may go: the leases of who asked belong on the packed one now. Where there is no room, no
        descriptor or no disk, packing ends: whoever promotes one by one meets the same and tells."""
        made = 0
        for run in self._runs(spans):
            try:
                made += self._pack(run, swap)
            except FormatError as exc:
                return made, str(exc)
            except (StoreError, OSError) as exc:
                log.debug("packing ends: %s", exc)
                break
            finally:
                self._warm.reap()
        return made, ""

    def left_by_packing(self, spans: Sequence[Span]) -> int:
        """How many records there are to hand over once these are packed."""
        return len(spans) - sum(len(run) - 1 for run in self._runs(spans))

    def _runs(self, spans: Sequence[Span]) -> list[list[Record]]:
        return list(packing.runs(spans, min(packing.MAX_PACK_BYTES, self._warm.ledger.budget_bytes // 4)))

    def _pack(self, run: list[Record], swap: Swap) -> int:
        """Pack one run, once however many ask: who comes second does nothing here."""
        with self._index.changed:
            last = run[-1]
            if any(record.promotion or record.gone for record in run) or last.node is None:
                return 0
            for record in run:
                record.promotion = self
            parent, from_disk = run[0].parent, not any(record.warm for record in run)
            tokens, attachments = last.namespace.trees[last.lineage].prefix(last.node, last.end)
        fd, began = -1, time.monotonic()
        pack: packing.Pack | None = None
        try:
            pack = packing.plan(run, parent.id if parent is not None else ROOT, tokens, attachments)
            if self._reserve_pack(pack):
                fd = self._write_pack(pack)
                self._faults.reached("pack.written")
        finally:
            admitted = self._publish_pack(run, pack, fd, swap)
        if admitted:
            self._faults.reached("pack.done")
        if admitted and from_disk:
            self._note_speed(pack.total_bytes, time.monotonic() - began)
        return pack.total_bytes if admitted else 0

    def _reserve_pack(self, pack: packing.Pack) -> bool:
        """Make room; False where the same segment is there already."""
        with self._index.changed:
            if pack.header.id in self._index.records:
                return False
            # Segments from memory are packed if it can be had at once: they are of use as they are.
            last = pack.parts[-1].record
            self._warm.make_room(pack.total_bytes, last, wait=not last.warm, uid=last.namespace.owner_uid)
            self._warm.ledger.promote(last.namespace.owner_uid, pack.total_bytes)
            pack.reserved = True
        # What gave way is let go of before its memory is taken again.
        self._warm.reap()
        self._faults.reached("pack.reserved")
        return True

    def _write_pack(self, pack: packing.Pack) -> int:
        packer = packing.Packer(pack)
        try:
            for part in pack.parts:
                self._copy_part(part, packer)
            return packer.finish()
        finally:
            packer.close()

    def _copy_part(self, part: packing.Part, packer: packing.Packer) -> None:
        """From memory or, where it is not there, from disk. One descriptor at a time: a long run
        has more parts than a process may have of them."""
        record, own = part.record, -1
        with self._index.changed:
            if record.gone:
                raise OfferAgain("a segment was dropped while it was packed")
            try:
                own = fcntl.fcntl(record.fd, fcntl.F_DUPFD_CLOEXEC, 0) if record.warm else -1
            except OSError as exc:
                raise DescriptorLimit("no descriptor left to pack segments") from exc
        if own >= 0:
            try:
                view = memoryview(memfd.map_private(own, record.total_bytes))
            finally:
                os.close(own)
            head = container.decode_head(view, len(view))
            packer.place(part, head.header, 0, view[head.payload_offset :])
        elif self._cold is not None:
            try:
                self._cold.read(record.id, partial(packer.place, part))
            except FormatError as exc:
                self.quarantine(record, str(exc))
                raise

    def _publish_pack(self, run: list[Record], pack: packing.Pack | None, fd: int, swap: Swap) -> bool:
        """Give back the budget, enter the packed segment, then let go of what it replaces."""
        admitted = False
        with self._index.changed:
            if pack is not None and pack.reserved:
                self._warm.ledger.promote(run[0].namespace.owner_uid, -pack.total_bytes)
                gone = any(record.gone for record in run) or pack.header.id in self._index.records
                admitted = fd >= 0 and not gone and not self._warm.closing
            if admitted and pack is not None:
                cold = [record for record in run if not record.warm]
                self.packed += 1
                self.count += bool(cold)
                self.total_bytes += sum(record.total_bytes for record in cold)
                made = self._admit_pack(pack, fd)
                swap(made, run)
                self._replace(pack, made)
            self._finish(*run)
        if fd >= 0 and not admitted:
            os.close(fd)
        return admitted

    def _admit_pack(self, pack: packing.Pack, fd: int) -> Record:
        first, header = pack.parts[0].record, pack.header
        made = Record(
            header.id, first.namespace, header.lineage, header.start, header.end, pack.total_bytes, pack.payload_bytes,
            header.created_ns, header.writer, coverage=pack.coverage, packed=True, prefill_us=pack.prefill_us,
        )  # fmt: skip
        made.hits = max(part.record.hits for part in pack.parts)
        made.pinned_until_ns = max(part.record.pinned_until_ns for part in pack.parts)
        self._index.add(made, first.parent, pack.tokens, pack.attachments)
        self._warm.admit(made, fd)
        self._index.touch([made])
        return made

    def _replace(self, pack: packing.Pack, made: Record) -> None:
        """What is on disk as well leaves the warm tier, an older packed segment too; without a disk
        what is wholly packed leaves the index, and what builds on it builds on the new one."""
        for part in reversed(pack.parts):
            record = part.record
            if not record.warm or self._warm.leased(record) or not pack.replaces(part):
                continue
            if self._writer is None:
                self._index.adopt(made, record)
                self._warm.evict(record)
            elif record.cold == Cold.STORED or (record.packed and record.cold == Cold.ABSENT and not record.children):
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
                self._warm.make_room(record.total_bytes, uid=record.namespace.owner_uid)
                if record.gone:
                    raise OfferAgain("the record was dropped while room was made for it")
            except BaseException:
                self._finish(record)
                raise
            self._warm.ledger.promote(record.namespace.owner_uid, record.total_bytes)
        return self._cold

    def _copy(self, record: Record, cold: ColdTier) -> int:
        fd = -1
        started = time.monotonic()
        try:
            self._faults.reached("promote.reserved")
            fd = cold.load(record.id, record.total_bytes)
            self._faults.reached("promote.copied")
        except FormatError as exc:
            self._publish(record, -1)
            self.quarantine(record, str(exc))
            raise
        except BaseException as exc:
            if fd >= 0:
                os.close(fd)
            self._publish(record, -1)
            if isinstance(exc, OSError):
                raise StoreError(f"the record could not be read from disk: {exc}") from exc
            raise
        self._note_speed(record.total_bytes, time.monotonic() - started)
        if not self._publish(record, fd):
            raise OfferAgain("the record was dropped while it was promoted")
        self._faults.reached("promote.done")
        return record.total_bytes

    def _publish(self, record: Record, fd: int) -> bool:
        """Give back the promotion's budget and, unless record or store are gone, admit ``fd``."""
        with self._index.changed:
            self._warm.ledger.promote(record.namespace.owner_uid, -record.total_bytes)
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

    @contextmanager
    def kept(self, record: Record) -> Iterator[bool]:
        """Whether a record is on disk; inside it does not give way, so that what cannot be read of it is
        bad, unless it was dropped. Wants the index lock free."""
        with self._index.changed:
            stored = record.cold == Cold.STORED and not record.gone
            record.awaited += stored
        try:
            yield stored
        finally:
            with self._index.changed:
                record.awaited -= stored
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
