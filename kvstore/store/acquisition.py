"""Match and acquire: from a query to leased, promoted records and their descriptors."""

from __future__ import annotations

import fcntl
import itertools
import os
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial

from warmkv.kvstore.needs import Provides
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

#: Records one reply hands over; of a chain that is longer and cannot be packed the first so many.
MAX_SPANS = 128
#: Times one request packs: again only where somebody else was packing the same.
PACK_ROUNDS = 3
#: Shorter prefixes looked at where a long one would take too long to load.
MAX_LOOKS = 4


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
            return self._answer(request, found, refusal)

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
        rounds = PACK_ROUNDS
        while True:
            with self._index.changed:
                found, refusal = self._find(request, attachments, limit, packed=not rounds)
                answer = self._answer(request, found, refusal)
                self._lease(found, lease)
            tier = answer.tier if tier is None else tier
            try:
                if rounds:
                    made, trouble = self._promotion.pack(found.spans, partial(self._swap, lease))
                    promoted += made
                    alone = len(found.spans) <= MAX_SPANS or self._promotion.settled([span.record for span in found.spans])
                    rounds = 0 if alone else rounds - 1
                    if made or trouble or len(found.spans) > MAX_SPANS:
                        continue
                moved, failed, reason = self._promote(found.spans)
                promoted += moved
                fds = self._descriptors(found.spans) if failed is None else ()
            except _Gone:
                continue
            except BaseException:
                self.release([lease])
                raise
            if failed is None:
                break
            self.release([lease])
            trouble = reason or trouble
            if not failed.record.gone:
                limit = _before(failed, found.usable)
            if limit == 0 and not failed.record.gone:
                with self._index.changed:
                    found = Found(found.path, found.held, anchors=found.anchors)
                    answer = self._answer(request, found)
                fds = ()
                break
        self._count(found)
        tier = tier if found.usable else m.TIER_NONE
        if trouble or answer.tier != tier:
            answer = _because(replace(answer, tier=tier), trouble)
        return answer, found, lease if found.spans else 0, promoted, fds

    def prefetch(self, request: m.Prefetch) -> m.Matched:
        """Promote what a later acquire will want."""
        acquire = m.Acquire(request.namespace, request.lineage, request.tokens, request.attachments, request.at)
        reply, fds = self.acquire(acquire)
        for fd in fds:
            os.close(fd)
        self.release([reply.lease])
        return m.Matched(**{name: getattr(reply, name) for name in m.Matched.__dataclass_fields__})

    def hold(self, record: Record) -> int:
        """Lease one record, for who reads it in this process; `release` ends that. Lock held."""
        lease = next(self._lease_ids)
        record.leases[lease] = self._warm.clock() + self._options.lease_ttl_s
        self._leased[lease] = (record,)
        return lease

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
        self, request: m.Match | m.Acquire, attachments: tuple[Attachment, ...], limit: int, *,
        detail: bool = False, packed: bool = False,
    ) -> tuple[Found, str]:  # fmt: skip
        """What is offered of what is found, and why that is less; the index lock is held."""
        found = self._look(request, attachments, limit, detail=detail, packed=packed)
        if request.prefill_tps <= 0 or not found.usable:
            return found, ""
        refusal, looks = "", MAX_LOOKS
        while found.usable:
            load_s = answers.load_us(found, self._promotion.bytes_per_s) / 1e6
            compute_s = found.usable / request.prefill_tps
            cold = [span for span in found.spans if not span.record.warm]
            if load_s <= compute_s:
                break
            refusal = refusal or _slower(found.usable, load_s, compute_s)
            # What is in memory already may still be worth it.
            most = min((_before(span, found.usable) for span in cold), default=0)
            looks -= 1
            if most <= 0 or most >= found.usable or not looks:
                found = Found(found.path, found.held, anchors=found.anchors, groups=found.groups)
            else:
                found = self._look(request, attachments, most, detail=detail, packed=packed)
        self.refusals += bool(refusal)
        return found, refusal

    def _look(
        self, request: m.Match | m.Acquire, attachments: tuple[Attachment, ...], limit: int, *,
        detail: bool = False, packed: bool = False,
    ) -> Found:  # fmt: skip
        """What is found, as far as one reply can hand it over: once it is packed, or as it is where
        it was ``packed`` already as far as it can be."""
        key, lineage, tokens = request.namespace, Lineage(request.lineage), request.tokens.tobytes()
        anchored = request.at == m.AT_ANCHOR
        while True:
            found = self._index.find(
                key, lineage, tokens, attachments, anchored=anchored, limit=limit, logits=request.logits, detail=detail
            )
            count = len(found.spans)
            if count > MAX_SPANS and not packed:
                count = self._promotion.left_by_packing(found.spans)
            if count <= MAX_SPANS:
                return found
            limit = _before(found.spans[MAX_SPANS], found.usable)
            if limit <= 0:
                return Found(found.path, found.held, anchors=found.anchors, groups=found.groups)

    def _join(self, request: m.Acquire, attachments: tuple[Attachment, ...]) -> tuple[int, float]:
        """The flight entered for this request, or 0, once there is nothing to wait for."""
        flight = next(self._lease_ids)
        key, lineage = NamespaceKey(request.namespace), Lineage(request.lineage)

        def usable() -> int:
            return self._look(request, attachments, request.limit).usable

        with self._index.changed:
            entered, waited_s = self.flights.join(
                flight, key, lineage, request.tokens.tobytes(), attachments, request.wait_ms / 1000, usable, request.limit
            )
        return (flight if entered else 0), waited_s

    def _answer(self, request: m.Match | m.Acquire, found: Found, refusal: str = "") -> m.Matched:
        return answers.matched(request.tokens, found, self._promotion.bytes_per_s, self._epoch, refusal)

    # -- handing over ----------------------------------------------------------------------

    def _lease(self, found: Found, lease: int) -> None:
        """Hold what was found, and no longer what the lease held before."""
        if lease in self._leased:
            self.release([lease])
        records = tuple(span.record for span in found.spans)
        deadline = self._warm.clock() + self._options.lease_ttl_s
        for record in records:
            record.leases[lease] = deadline
        if records:
            self._leased[lease] = records
            self._index.touch(records, hit=True)

    def _swap(self, lease: int, made: Record, parts: Sequence[Record]) -> None:
        """Hold a packed segment instead of what it was made of; the index lock is held."""
        for record in parts:
            record.leases.pop(lease, None)
            if not record.leases:
                self._warm.unlend(record)
        made.leases[lease] = self._warm.clock() + self._options.lease_ttl_s
        self._leased[lease] = (*self._leased.get(lease, ()), made)

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


def _before(span: Span, usable: int) -> int:
    """The deepest position for which a record is not needed; 0 where every one before needs it: a
    blob that can be cut back, and what proves it, are found again from anywhere."""
    if span.start < span.end:
        return min(span.start, usable - 1)
    return span.start - 1 if span.record.is_state and not span.record.provides & Provides.TRIMMABLE else 0


def _slower(tokens: int, load_s: float, compute_s: float) -> str:
    return f"to load {tokens} tokens would take about {load_s:.3g} s, to compute them {compute_s:.3g} s"


def _because(answer: m.Matched, *reasons: str) -> m.Matched:
    return replace(answer, reason="; ".join(part for part in (answer.reason, *reasons) if part))


def _close(fds: list[int]) -> None:
    for fd in fds:
        os.close(fd)
