"""Match and acquire: from a query to leased, promoted records and their descriptors."""

from __future__ import annotations

import fcntl
import itertools
import os
from collections.abc import Iterable
from dataclasses import replace

from warmkv.kvstore.store import answers
from warmkv.kvstore.store.flights import Flights
from warmkv.kvstore.store.index import Found, Index, Record
from warmkv.kvstore.store.options import StoreOptions
from warmkv.kvstore.store.path import Span
from warmkv.kvstore.store.promotion import Promotion
from warmkv.kvstore.store.warm import WarmTier
from warmkv.schema import messages as m
from warmkv.schema.errors import DescriptorLimit, WarmKVError
from warmkv.schema.records import Attachment, Lineage, NamespaceKey, check_attachments, unpack_attachments

#: Records one reply hands over; of a longer chain the first so many.
MAX_SPANS = 128


class Acquisition:
    """**Threading:** every method wants the index lock free."""

    def __init__(self, index: Index, warm: WarmTier, promotion: Promotion, options: StoreOptions, epoch: int) -> None:
        self.hits = 0
        self.misses = 0
        self.tokens_usable = 0
        self.refusals = 0
        self.flights = Flights(index, options.lease_ttl_s, warm.clock)
        self._index = index
        self._warm = warm
        self._promotion = promotion
        self._options = options
        self._epoch = epoch
        self._lease_ids = itertools.count(1)
        self._leased: dict[int, tuple[Record, ...]] = {}

    def match(self, request: m.Match) -> m.Matched:
        """How much is known and usable. Moves nothing."""
        attachments = _attachments(request)
        with self._index.changed:
            found, refusal = self._find(request, attachments, 0, detail=request.detail)
            return _because(self._answer(request, found), refusal)

    def acquire(self, request: m.Acquire) -> tuple[m.Acquired, tuple[int, ...]]:
        """Lease and promote the records; descriptors owned by the caller. What cannot be promoted
        whole is handed over as far as it can, with the reason."""
        attachments = _attachments(request)
        flight, waited_s = self._join(request, attachments) if request.wait_ms else (0, 0.0)
        try:
            answer, found, lease, promoted, fds = self._acquire(request, attachments)
        except BaseException:
            self.release([flight])
            raise
        if flight and found.usable >= len(request.tokens) - 1:
            self.release([flight])
            flight = 0
        shown = {name: getattr(answer, name) for name in m.Matched.__dataclass_fields__}
        spans = answers.pack_spans(found.spans)
        acquired = m.Acquired(
            **shown, lease=lease, promoted_bytes=promoted, spans=spans, flight=flight, waited_ms=int(waited_s * 1000)
        )
        return acquired, fds

    def _acquire(
        self, request: m.Acquire, attachments: tuple[Attachment, ...]
    ) -> tuple[m.Matched, Found, int, int, tuple[int, ...]]:
        lease, limit, promoted, trouble = next(self._lease_ids), request.limit, 0, ""
        tier: int | None = None
        packed = False
        while True:
            with self._index.changed:
                found, refusal = self._find(request, attachments, limit)
                answer = self._answer(request, found)
                self._lease(found, lease)
            tier = answer.tier if tier is None else tier
            try:
                if not packed:
                    packed = True
                    made, trouble = self._promotion.pack(found.spans)
                    promoted += made
                    if made or trouble:
                        raise _Gone
                moved, failed, reason = self._promote(found.spans)
                promoted += moved
                fds = self._descriptors(found.spans) if failed is None else ()
            except _Gone:
                self.release([lease])
                continue
            except BaseException:
                self.release([lease])
                raise
            if failed is None:
                break
            self.release([lease])
            trouble = reason or trouble
            if not failed.record.gone:
                # A state at or behind what is usable is found again from anywhere before it.
                limit = failed.start if failed.start < failed.end else failed.start - 1
                limit = limit if limit < found.usable else 0
            if limit == 0 and not failed.record.gone:
                with self._index.changed:
                    found = Found(found.path, found.held, anchors=found.anchors)
                    answer = self._answer(request, found)
                fds = ()
                break
        self._count(found)
        answer = _because(replace(answer, tier=tier if found.usable else m.TIER_NONE), refusal, trouble)
        return answer, found, lease if found.spans else 0, promoted, fds

    def prefetch(self, request: m.Prefetch) -> m.Matched:
        """Promote what a later acquire will want."""
        acquire = m.Acquire(request.namespace, request.lineage, request.tokens, request.attachments, request.at)
        reply, fds = self.acquire(acquire)
        for fd in fds:
            os.close(fd)
        self.release([reply.lease])
        return m.Matched(**{name: getattr(reply, name) for name in m.Matched.__dataclass_fields__})

    def release(self, leases: Iterable[int]) -> None:
        """End leases and flights; unknown ones are ignored."""
        with self._index.changed:
            for lease in leases:
                self.flights.end(lease)
                for record in self._leased.pop(lease, ()):
                    record.leases.pop(lease, None)
                    if not record.leases:
                        self._warm.unlend(record)
            self._index.changed.notify_all()

    # -- finding ---------------------------------------------------------------------------

    def _find(
        self, request: m.Match | m.Acquire, attachments: tuple[Attachment, ...], limit: int, *, detail: bool = False
    ) -> tuple[Found, str]:
        """What is offered of what is found, and why that is less; the index lock is held."""
        found = self._look(request, attachments, limit, detail=detail)
        if request.prefill_tps <= 0 or not found.usable:
            return found, ""
        refusal = ""
        while found.usable:
            load_s = answers.load_us(found, self._promotion.bytes_per_s) / 1e6
            compute_s = found.usable / request.prefill_tps
            cold = [span for span in found.spans if not span.record.warm]
            if load_s <= compute_s:
                break
            refusal = refusal or f"to load {found.usable} tokens would take {load_s:.2f} s, to compute them {compute_s:.2f} s"
            # What is in memory already may still be worth it.
            most = min((span.start if span.start < span.end else span.start - 1 for span in cold), default=0)
            if most <= 0 or most >= found.usable:
                found = Found(found.path, found.held, anchors=found.anchors, groups=found.groups)
            else:
                found = self._look(request, attachments, most, detail=detail)
        self.refusals += bool(refusal)
        return found, refusal

    def _look(self, request: m.Match | m.Acquire, attachments: tuple[Attachment, ...], limit: int, *, detail: bool) -> Found:
        key, lineage, tokens = request.namespace, Lineage(request.lineage), request.tokens.tobytes()
        anchored = request.at == m.AT_ANCHOR
        while True:
            found = self._index.find(
                key, lineage, tokens, attachments, anchored=anchored, limit=limit, logits=request.logits, detail=detail
            )
            if len(found.spans) <= MAX_SPANS:
                return found
            limit = max(1, min(found.spans[MAX_SPANS].start, found.usable - 1))

    def _join(self, request: m.Acquire, attachments: tuple[Attachment, ...]) -> tuple[int, float]:
        """The flight entered for this request, or 0, once there is nothing to wait for."""
        flight = next(self._lease_ids)
        key, lineage = NamespaceKey(request.namespace), Lineage(request.lineage)

        def usable() -> int:
            return self._look(request, attachments, request.limit, detail=False).usable

        with self._index.changed:
            entered, waited_s = self.flights.join(
                flight, key, lineage, request.tokens.tobytes(), attachments, request.wait_ms / 1000, usable
            )
        return (flight if entered else 0), waited_s

    def _answer(self, request: m.Match | m.Acquire, found: Found) -> m.Matched:
        return answers.matched(request.tokens, found, self._promotion.bytes_per_s, self._epoch)

    # -- handing over ----------------------------------------------------------------------

    def _lease(self, found: Found, lease: int) -> None:
        records = tuple(span.record for span in found.spans)
        deadline = self._warm.clock() + self._options.lease_ttl_s
        for record in records:
            record.leases[lease] = deadline
        if records:
            self._leased[lease] = records
            self._index.touch(records, hit=True)

    def _promote(self, spans: tuple[Span, ...]) -> tuple[int, Span | None, str]:
        """Promote each span's record; (bytes moved, the span that failed or None, why)."""
        moved = 0
        if not self._promotion.settled([span.record for span in spans if not span.record.warm]):
            raise _Gone
        for span in spans:
            try:
                moved += self._promotion.promote(span.record)
            except DescriptorLimit:
                raise
            except WarmKVError as exc:
                return moved, span, str(exc)
        return moved, None, ""

    def _descriptors(self, spans: tuple[Span, ...]) -> tuple[int, ...]:
        fds: list[int] = []
        try:
            with self._index.changed:
                for span in spans:
                    if not span.record.warm:
                        raise _Gone
                    fds.append(fcntl.fcntl(span.record.fd, fcntl.F_DUPFD_CLOEXEC, 0))
        except OSError as exc:
            _close(fds)
            raise DescriptorLimit(f"no descriptor left to hand over {len(spans)} records") from exc
        except BaseException:
            _close(fds)
            raise
        return tuple(fds)

    def _count(self, found: Found) -> None:
        with self._index.changed:
            if found.usable:
                self.hits += 1
                self.tokens_usable += found.usable
            else:
                self.misses += 1


class _Gone(Exception):
    """A leased record was forgotten between promotion and hand-over: look again."""


def _attachments(request: m.Match | m.Acquire) -> tuple[Attachment, ...]:
    return check_attachments(unpack_attachments(request.attachments), len(request.tokens))


def _because(answer: m.Matched, *reasons: str) -> m.Matched:
    return replace(answer, reason="; ".join(part for part in (answer.reason, *reasons) if part))


def _close(fds: list[int]) -> None:
    for fd in fds:
        os.close(fd)
