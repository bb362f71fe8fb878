"""The eviction service: keeps both tiers below their watermarks, and time from piling up.

What arrives makes its own room; this service makes that rare. It looks now and then, decides
under the index lock from plans that are pure, and closes, deletes and waits outside it.
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Iterator

from warmkv.kvstore.store import room
from warmkv.kvstore.store.cold import stored_bytes
from warmkv.kvstore.store.health import Health
from warmkv.kvstore.store.index import Index, Record
from warmkv.kvstore.store.options import StoreOptions
from warmkv.kvstore.store.policy import Candidate, overfull, plan_eviction
from warmkv.kvstore.store.warm import WarmTier
from warmkv.kvstore.store.write_behind import WriteBehind
from warmkv.schema.errors import Busy

log = logging.getLogger(__name__)

#: What is only in memory is waited for this long, until the disk has it, before less is freed.
DEMOTE_S = 5.0
#: Deletions asked for on demand are waited for this long.
DELETE_S = 60.0
#: Records looked at under one hold of the lock.
SLICE = 512


class Eviction:
    """**Threading:** every method wants the index lock free. `start` and `stop` once each."""

    def __init__(self, index: Index, warm: WarmTier, writer: WriteBehind | None, options: StoreOptions, health: Health) -> None:
        self.runs = 0
        self.expired = 0
        self.shrinks = 0
        self._index = index
        self._warm = warm
        self._writer = writer
        self._options = options
        self._health = health
        self._problem = ""
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="warmkv-eviction", daemon=True)

    def start(self) -> None:
        """Look every ``evict_interval_s``; 0: never."""
        if self._options.evict_interval_s:
            self._thread.start()
            self._health.watch("eviction", self._ended, vital=True)
            self._health.watch("evictions", lambda: self._problem)

    def stop(self) -> None:
        """End the thread. Idempotent."""
        self._stopped.set()
        if self._thread.is_alive():
            self._thread.join()

    def figures(self) -> dict[str, object]:
        """What it did since the start, for reports."""
        return {"policy": self._options.policy, "runs": self.runs, "expired": self.expired, "shrinks": self.shrinks}

    def _ended(self) -> str:
        dead = not self._thread.is_alive() and not self._stopped.is_set()
        return "the eviction service has ended" if dead else ""

    def _run(self) -> None:
        while not self._stopped.wait(self._options.evict_interval_s):
            try:
                self.run_once()
                self._problem = ""
            except Exception as exc:  # noqa: BLE001 - the service must live
                log.exception("eviction failed")
                self._problem = f"eviction failed: {exc}"

    # -- what it does --------------------------------------------------------------------

    def run_once(self) -> dict[str, int]:
        """Drop what is too old, then bring tiers above the high watermark down to the low one. What
        went, by tier, in records and bytes."""
        expired = self._expire()
        high, low = self._options.high_watermark, self._options.low_watermark
        with self._index.changed:
            self._warm.expire()
            try:
                room.for_tokens(self._index, self._warm, self._writer, 0, self._options.max_tokens, None)
            except Busy as exc:
                log.debug("%s", exc)
            ledger = self._warm.ledger
            excess_bytes = overfull(ledger.used_bytes, ledger.limit_bytes, high, low)
        self._warm.reap()
        # What the disk has not yet can go when it has: the next look finds it there.
        warm = self._trim_warm(excess_bytes)
        cold: list[Record] = []
        if self._writer is not None:
            with self._index.changed:
                cold = self._writer.trim(overfull(self._writer.cold_bytes, self._writer.limit_bytes, high, low))
        self.runs += 1
        return {**_told("warm", warm), **_told("cold", cold), **_told("expired", expired)}

    def evict(self, tier: str = "both", to_bytes: int | None = None, dry_run: bool = False) -> dict[str, int]:
        """Bring "warm", "cold" or "both" down to ``to_bytes`` each (None: the low watermark), as far
        as nothing is pinned, leased or in flight; returns when the bytes are gone. What went, or with
        ``dry_run`` what would, in records and bytes."""
        done: dict[str, int] = {}
        if tier in ("warm", "both"):
            done |= _told("warm", self._bring_down_warm(to_bytes, dry_run))
        if tier in ("cold", "both"):
            cold: list[Record] = []
            if self._writer is not None:
                with self._index.changed:
                    target = self._low(self._writer.limit_bytes) if to_bytes is None else to_bytes
                    cold = self._writer.trim(self._writer.cold_bytes - target, dry_run=dry_run)
                if not dry_run:
                    self._writer.settle(DELETE_S)
            done |= _told("cold", cold)
        return done

    def shrink(self, fraction: float) -> int:
        """Memory is scarce: free this part of what is resident, and take no more than what is left
        until it was calm for a while. What is on disk as well is dropped at once; for the rest the
        disk is waited for, a bounded time. Bytes freed."""
        with self._index.changed:
            goal = math.ceil(self._warm.ledger.resident_bytes * min(1.0, max(0.0, fraction)))
        freed = sum(self._warm.ledger.paged(record.total_bytes) for record in self._trim_warm(goal, wait=True))
        with self._index.changed:
            self._warm.ledger.cap(self._warm.ledger.used_bytes, self._warm.clock())
        self.shrinks += 1
        return freed

    def set_budgets(self, warm_bytes: int | None = None, cold_bytes: int | None = None) -> None:
        """Set other budgets, and evict what is over them. Uploads that were promised room keep it. What
        is leased or pinned goes when it may; until then nothing is taken in. The cold budget
        cannot grow above the one with which the store was opened."""
        with self._index.changed:
            if warm_bytes is not None:
                self._warm.ledger.resize(warm_bytes)
            excess_bytes = self._warm.ledger.used_bytes - self._warm.ledger.limit_bytes
        self._trim_warm(excess_bytes, wait=True)
        with self._index.changed:
            self._warm.expire()
            self._warm.ledger.settle()
            if cold_bytes is not None and self._writer is not None:
                self._writer.lowered_bytes = cold_bytes
                self._writer.trim(self._writer.cold_bytes - self._writer.limit_bytes)
            self._index.changed.notify_all()

    def _low(self, limit_bytes: int) -> int:
        return int(limit_bytes * self._options.low_watermark)

    def _bring_down_warm(self, to_bytes: int | None, dry_run: bool) -> list[Record]:
        with self._index.changed:
            self._warm.expire()
            ledger = self._warm.ledger
            excess_bytes = ledger.used_bytes - (self._low(ledger.limit_bytes) if to_bytes is None else to_bytes)
            if dry_run:
                return self._warm.trim(excess_bytes, dry_run=True)
        return self._trim_warm(excess_bytes, wait=True)

    def _trim_warm(self, excess_bytes: int, *, wait: bool = False) -> list[Record]:
        """Free so many bytes of memory, or all that can be; once more after a ``wait`` for the disk."""
        if excess_bytes <= 0:
            return []
        with self._index.changed:
            victims = self._warm.trim(excess_bytes)
            left = excess_bytes - sum(self._warm.ledger.paged(record.total_bytes) for record in victims)
            dirty = self._index.dirty_bytes
            self._index.changed.notify_all()
        self._warm.reap()
        if wait and left > 0 and dirty and self._writer is not None:
            self._writer.flush(DEMOTE_S)
            victims += self._trim_warm(left)
        return victims

    # -- age -----------------------------------------------------------------------------

    def _expire(self) -> list[Record]:
        """Drop, leaves first, what was not used for ``ttl_s``; end pins that are over."""
        with self._index.changed:
            records = list(self._index.records.values())
        now_ns = self._options.clock.wall_ns()
        for record in [item for item in records if 0 < item.pinned_until_ns <= now_ns]:
            with self._index.changed:
                if record.pinned_until_ns <= now_ns and not record.gone:
                    record.pinned_until_ns = 0
                    self._index.touched.add(record)
        if not self._options.ttl_s:
            return []
        before_s = self._options.clock.wall_s() - self._options.ttl_s
        # What builds on a record begins behind its start, and states go before what they hang on.
        old = [record for record in records if record.used_at_s < before_s]
        old.sort(key=lambda record: (-record.start, not record.is_state))
        gone: list[Record] = []
        for at in range(0, len(old), SLICE):
            with self._index.changed:
                victims = plan_eviction(self._aged(old[at : at + SLICE], before_s), len(old), partial=True) or []
                room.drop(self._index, self._warm, self._writer, victims)
                self._index.changed.notify_all()
            gone += victims
            self._warm.reap()
        self.expired += len(gone)
        return gone

    def _aged(self, records: list[Record], before_s: float) -> Iterator[Candidate[Record]]:
        """Those still too old, counted as one each."""
        now_ns = self._options.clock.wall_ns()
        for record in records:
            keep = record.gone or record.used_at_s >= before_s or not room.droppable(record, self._warm, now_ns)
            yield Candidate(record, record.parent, 1, len(record.children), keep)


def _told(name: str, records: list[Record]) -> dict[str, int]:
    size = stored_bytes if name == "cold" else lambda total_bytes, _: total_bytes
    total_bytes = sum(size(record.total_bytes, record.payload_bytes) for record in records)
    return {f"{name}_records": len(records), f"{name}_bytes": total_bytes}
