"""The engine: both tiers and the index of one store, put together.

One engine per store and process; the embedded store and the daemon use it alike, through one
`LocalSession` per user. Decisions are taken under the index lock, work is done outside it.
"""

from __future__ import annotations

import fcntl
import itertools
import os
import secrets
import time
from dataclasses import replace
from functools import partial

import numpy as np

from warmkv.kvstore.store.cold import ColdTier
from warmkv.kvstore.store.index import Found, Index, Record, Span
from warmkv.kvstore.store.intake import Intake
from warmkv.kvstore.store.options import StoreOptions
from warmkv.kvstore.store.promotion import Promotion
from warmkv.kvstore.store.recovery import load_index
from warmkv.kvstore.store.removal import Removal
from warmkv.kvstore.store.session import LocalSession
from warmkv.kvstore.store.warm import WarmTier
from warmkv.kvstore.store.write_behind import WriteBehind
from warmkv.schema import messages as m
from warmkv.schema.errors import CorruptStore, DescriptorLimit, WarmKVError
from warmkv.schema.records import MAX_TABLE_ROWS, Attachment, Lineage, check_attachments, pack_anchors, unpack_attachments

#: Records one reply hands over; of a longer chain the first so many.
MAX_SPANS = 128
#: Time a hand-over takes apart from copying: a round trip and the mappings.
HANDOVER_US = 200


class Engine:
    """**Threading:** every method may be called from any thread. Closing it flushes."""

    def __init__(self, options: StoreOptions, cold: ColdTier | None) -> None:
        assert options.warm_bytes is not None and options.warm_entries is not None
        self.options = options
        self.epoch = secrets.randbits(63) | 1
        self.index = Index()
        self.warm = WarmTier(self.index, options.warm_bytes, options.warm_entries, options.busy_timeout_s)
        self.cold = cold
        self.swept = load_index(self.index, cold) if cold is not None else 0
        self.writer = WriteBehind(self.index, self.warm, cold, options.usage_interval_s) if cold is not None else None
        self.promotion = Promotion(self.index, self.warm, cold, self.writer)
        self.intake = Intake(self.index, self.warm, self.writer, options, self.epoch)
        self.removal = Removal(self.index, self.warm, self.writer)
        self.started = time.time()
        self.hits = 0
        self.misses = 0
        self.tokens_usable = 0
        self._lease_ids = itertools.count(1)
        self._leased: dict[int, tuple[Record, ...]] = {}
        self._closed = False
        self._pid = os.getpid()

    @classmethod
    def open(cls, options: StoreOptions) -> Engine:
        """Open the store, load its index, start write-behind.

        Raises StoreInUse, StoreTooNew, BudgetError, StoreError."""
        options = options.resolved()
        cold = None
        if options.path is not None and options.cold_bytes:
            cold = ColdTier.open(options.path, options.cold_bytes)
        try:
            try:
                engine = cls(options, cold)
            except CorruptStore as exc:
                assert cold is not None
                cold.begin_anew(str(exc))
                engine = cls(options, cold)
        except BaseException:
            if cold is not None:
                cold.close()
            raise
        if engine.writer is not None:
            engine.writer.start()
        return engine

    @property
    def serving(self) -> bool:
        """False once it is closed, and in a child that a fork made of its process."""
        return not self._closed and self._pid == os.getpid()

    def session(self, uid: int) -> LocalSession:
        """A session of user ``uid``; closing it ends its leases and reservations."""
        return LocalSession(self, uid)

    def flush(self, timeout_s: float | None = None) -> bool:
        """Wait until all that was accepted is on disk; False when the time ran out first."""
        return self.writer is None or self.writer.flush(timeout_s)

    def close(self) -> None:
        """Commit what is pending and release every descriptor and lock. Idempotent. In a forked
        child it does nothing: lock and environment are its parent's, and unlocking is not undone."""
        if not self.serving:
            return
        with self.index.changed:
            if self._closed:
                return
            self._closed = self.warm.closing = True
            self.index.changed.notify_all()
        if self.writer is not None:
            self.writer.stop()
        with self.index.changed:
            for record in list(self.index.warm_order):
                self.warm.evict(record)
        self.warm.reap()
        if self.cold is not None:
            self.cold.close()

    # -- match and acquire ---------------------------------------------------------------

    def match(self, request: m.Match) -> m.Matched:
        attachments = self._attachments(request.attachments, len(request.tokens))
        with self.index.changed:
            return self._answer(request, self._find(request, attachments, 0))

    def acquire(self, request: m.Acquire) -> tuple[m.Acquired, tuple[int, ...]]:
        """Lease and promote the chain; descriptors owned by the caller. A chain that cannot be
        promoted whole is handed over as far as it can, with the reason."""
        attachments = self._attachments(request.attachments, len(request.tokens))
        lease, limit, promoted, trouble = next(self._lease_ids), request.limit, 0, ""
        tier: int | None = None
        while True:
            with self.index.changed:
                found = self._find(request, attachments, limit)
                answer = self._answer(request, found)
                self._lease(found, lease)
            tier = answer.tier if tier is None else tier
            try:
                moved, failed_at, reason = self._promote(found.spans)
                promoted += moved
                fds = self._descriptors(found.spans) if failed_at is None else ()
            except _Gone:
                self.release([lease])
                continue
            except BaseException:
                self.release([lease])
                raise
            if failed_at is None:
                break
            self.release([lease])
            trouble, limit = reason, failed_at
            if failed_at == 0:
                with self.index.changed:
                    found = Found(found.walk)
                    answer = self._answer(request, found)
                break
        self._count(found)
        reason = "; ".join(part for part in (answer.reason, trouble) if part)
        answer = replace(answer, tier=tier if found.usable else m.TIER_NONE, reason=reason)
        shown = {name: getattr(answer, name) for name in m.Matched.__dataclass_fields__}
        held = lease if found.spans else 0
        return m.Acquired(**shown, lease=held, promoted_bytes=promoted, spans=pack_spans(found.spans)), fds

    def prefetch(self, request: m.Prefetch) -> m.Matched:
        acquire = m.Acquire(request.namespace, request.lineage, request.tokens, request.attachments, request.at)
        reply, fds = self.acquire(acquire)
        for fd in fds:
            os.close(fd)
        self.release([reply.lease])
        return m.Matched(**{name: getattr(reply, name) for name in m.Matched.__dataclass_fields__})

    def release(self, leases: list[int]) -> None:
        """End leases; unknown ones are ignored."""
        with self.index.changed:
            for lease in leases:
                for record in self._leased.pop(lease, ()):
                    record.leases.pop(lease, None)
                    if not record.leases:
                        self.warm.unlend(record)
            self.index.changed.notify_all()

    def _find(self, request: m.Match | m.Acquire, attachments: tuple[Attachment, ...], limit: int) -> Found:
        find = partial(
            self.index.find, request.namespace, Lineage(request.lineage), request.tokens.tobytes(), attachments,
            anchored=request.at == m.AT_ANCHOR,
        )  # fmt: skip
        found = find(limit=limit)
        return find(limit=found.spans[MAX_SPANS].start) if len(found.spans) > MAX_SPANS else found

    def _lease(self, found: Found, lease: int) -> None:
        records = tuple(span.record for span in found.spans)
        deadline = self.warm.clock() + self.options.lease_ttl_s
        for record in records:
            record.leases[lease] = deadline
        if records:
            self._leased[lease] = records
            self.index.touch(self.index.chain_of(records[-1]), hit=True)

    def _promote(self, spans: tuple[Span, ...]) -> tuple[int, int | None, str]:
        """Promote each span's record; (bytes moved, start of the span that failed or None, why)."""
        moved = 0
        for span in spans:
            try:
                moved += self.promotion.promote(span.record)
            except DescriptorLimit:
                raise
            except WarmKVError as exc:
                return moved, span.start, str(exc)
        return moved, None, ""

    def _descriptors(self, spans: tuple[Span, ...]) -> tuple[int, ...]:
        fds: list[int] = []
        try:
            with self.index.changed:
                for span in spans:
                    if not span.record.warm:
                        raise _Gone
                    fds.append(fcntl.fcntl(span.record.fd, fcntl.F_DUPFD_CLOEXEC, 0))
        except OSError as exc:
            _close(fds)
            raise DescriptorLimit(f"no descriptor left to hand over {len(spans)} segments") from exc
        except BaseException:
            _close(fds)
            raise
        return tuple(fds)

    def _count(self, found: Found) -> None:
        with self.index.changed:
            if found.usable:
                self.hits += 1
                self.tokens_usable += found.usable
            else:
                self.misses += 1

    @staticmethod
    def _attachments(packed: bytes, length: int) -> tuple[Attachment, ...]:
        return check_attachments(unpack_attachments(packed), length)

    # -- answers -------------------------------------------------------------------------

    def _answer(self, request: m.Match | m.Acquire, found: Found) -> m.Matched:
        """What was found, as a message; the index lock is held."""
        cold = sum(span.record.total_bytes for span in found.spans if not span.record.warm)
        stored = found.walk.stored if found.walk else None
        query = int(request.tokens[found.matched]) if found.matched < len(request.tokens) else 0
        return m.Matched(
            matched=found.matched,
            usable=found.usable,
            tier=m.TIER_NONE if not found.usable else m.TIER_COLD if cold else m.TIER_WARM,
            segments=len(found.spans),
            total_bytes=sum(span.record.total_bytes for span in found.spans),
            load_us=HANDOVER_US + int(cold / self.promotion.bytes_per_s * 1e6) if found.usable else 0,
            anchors=pack_anchors(found.anchors[-MAX_TABLE_ROWS:]),
            diff_position=found.matched if stored is not None else -1,
            diff_query=query if stored is not None else 0,
            diff_stored=stored or 0,
            reason=self._reason(request, found, query, stored),
            epoch=self.epoch,
        )

    def _reason(self, request: m.Match | m.Acquire, found: Found, query: int, stored: int | None) -> str:
        length = len(request.tokens)
        if found.walk is None:
            return "nothing is stored for this model, lineage and owner"
        if found.usable == length:
            return ""
        if found.matched < length:
            if stored is None:
                return f"stored tokens end at {found.matched} of {length}"
            if stored == query:
                return f"another attachment begins at {found.matched}"
            return f"differs at {found.matched}: asked for id {query}, stored is {stored}"
        if found.usable == length - 1:
            return "all tokens are stored; one is left to feed, since no logits are parked at the end"
        return f"all {length} tokens agree, rows to resume from end at {found.usable}"


class _Gone(Exception):
    """A leased record was forgotten between promotion and hand-over: look again."""


def pack_spans(spans: tuple[Span, ...]) -> bytes:
    table = np.zeros(len(spans), m.SPAN_DTYPE)
    for row, span in zip(table, spans, strict=True):
        row["id"], row["start"], row["end"] = np.frombuffer(span.record.id, np.uint8), span.start, span.end
        row["container_bytes"] = span.record.total_bytes
    return table.tobytes()


def _close(fds: list[int]) -> None:
    for fd in fds:
        os.close(fd)
