"""The engine: both tiers and the index of one store, put together.

One engine per store and process; the embedded store and the daemon use it alike, through one
`LocalSession` per user. Decisions are taken under the index lock, work is done outside it.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable, Mapping

from warmkv.kvstore.store import answers
from warmkv.kvstore.store.access import Access, administers
from warmkv.kvstore.store.acquisition import Acquisition
from warmkv.kvstore.store.cold import ColdTier
from warmkv.kvstore.store.eviction import Eviction
from warmkv.kvstore.store.health import Health
from warmkv.kvstore.store.index import DAY_S, Index, Namespace
from warmkv.kvstore.store.intake import Intake, Owner
from warmkv.kvstore.store.opening import open_cold
from warmkv.kvstore.store.options import StoreOptions
from warmkv.kvstore.store.promotion import Promotion
from warmkv.kvstore.store.recovery import load_index
from warmkv.kvstore.store.removal import Removal
from warmkv.kvstore.store.scrub import Scrubber
from warmkv.kvstore.store.session import LocalSession
from warmkv.kvstore.store.warm import WarmTier
from warmkv.kvstore.store.weights import Weights
from warmkv.kvstore.store.write_behind import WriteBehind
from warmkv.schema.errors import CorruptStore
from warmkv.schema.records import NamespaceKey


class Engine:
    """**Threading:** every method may be called from any thread. Closing it flushes."""

    def __init__(self, options: StoreOptions, cold: ColdTier | None) -> None:
        assert options.warm_bytes is not None and options.warm_entries is not None
        self.options = options
        self.health = Health()
        self.epoch = secrets.randbits(63) | 1
        clock, faults = options.clock, options.faults
        gap_s = min(DAY_S, int(options.ttl_s / 2)) if options.ttl_s else DAY_S
        self.index = Index(policy=options.policy, clock=clock, max_gap_s=gap_s)
        self.warm = WarmTier(
            self.index, options.warm_bytes, options.warm_entries, options.busy_timeout_s,
            clock=clock.monotonic, wall_ns=clock.wall_ns, uid_share=options.uid_share,
            floor_bytes=options.namespace_floor_bytes, faults=faults,
        )  # fmt: skip
        self.cold = cold
        self.swept = load_index(self.index, cold) if cold is not None else 0
        self.writer: WriteBehind | None = None
        if cold is not None:
            self.writer = WriteBehind(
                self.index, self.warm, cold, options.usage_interval_s,
                wall_ns=clock.wall_ns, uid_share=options.uid_share, floor_bytes=options.namespace_floor_bytes, faults=faults,
            )  # fmt: skip
        self.promotion = Promotion(self.index, self.warm, cold, self.writer, faults=faults)
        self.acquisition = Acquisition(self.index, self.warm, self.promotion, options, self.epoch)
        self.intake = Intake(self.index, self.warm, self.writer, options, self.epoch)
        self.removal = Removal(self.index, self.warm, self.writer, wall_ns=clock.wall_ns)
        self.scrubber = Scrubber(self.index, self.warm, cold, self.promotion, options) if cold is not None else None
        self.eviction = Eviction(self.index, self.warm, self.writer, options, self.health)
        self.weights = Weights(self.index, self.removal, options.path if cold is not None else None, self._may_write)
        self.started = time.time()
        #: What the process around the engine adds: reports shown in `stats` under their names, and
        #: how its settings are read again.
        self.figures: dict[str, Callable[[], Mapping[str, object]]] = {}
        self.reload: Callable[[], Mapping[str, object]] | None = None
        self._closed = False
        self._pid = os.getpid()

    @classmethod
    def open(cls, options: StoreOptions) -> Engine:
        """Open the store, load its index, start write-behind.

        Raises StoreInUse, StoreTooNew, BudgetError, StoreError."""
        options = options.resolved()
        cold, problem = open_cold(options)
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
        engine.health.watch("store", cold.problem if cold is not None else lambda: problem)
        if engine.writer is not None:
            engine.writer.start()
            engine.health.watch("writer", engine.writer.problem, vital=True)
        engine.eviction.start()
        if engine.scrubber is not None:
            engine.scrubber.start()
            engine.health.watch("scrub", engine.scrubber.problem)
        return engine

    @property
    def serving(self) -> bool:
        """False once it is closed, and in a child that a fork made of its process."""
        return not self._closed and self._pid == os.getpid()

    def session(
        self, uid: int, foreign: bool = False, gids: frozenset[int] = frozenset(), *, every_share: bool = False
    ) -> LocalSession:
        """A session of user ``uid``; closing it ends its leases and reservations. See `LocalSession`."""
        return LocalSession(self, uid, foreign=foreign, gids=gids, every_share=every_share)

    def _may_write(self, uid: int, namespace: Namespace) -> bool:
        return administers(uid) or Access(uid, lambda: self.options.shares).writes(namespace)

    def flush(self, timeout_s: float | None = None) -> bool:
        """Wait until all that was accepted is on disk; False when the time ran out first."""
        return self.writer is None or self.writer.flush(timeout_s)

    def interrupt(self) -> None:
        """Let requests that wait for somebody else's computation go on without it."""
        self.acquisition.flights.interrupt()

    def close(self) -> None:
        """Commit what is pending and release every descriptor and lock. Idempotent. In a forked
        child it does nothing: lock and environment are its parent's, and unlocking is not undone."""
        if not self.serving:
            return
        self.acquisition.flights.interrupt(close=True)
        with self.index.changed:
            if self._closed:
                return
            self._closed = self.warm.closing = True
            self.index.changed.notify_all()
        self.eviction.stop()
        if self.scrubber is not None:
            self.scrubber.stop()
        if self.writer is not None:
            self.writer.stop()
        with self.index.changed:
            # What builds on a record begins behind its start.
            for record in sorted(self.index.warm_order, key=lambda item: -item.start):
                self.warm.evict(record)
        self.warm.reap()
        if self.cold is not None:
            self.cold.close()

    def nearest_difference(self, key: NamespaceKey, owner: Owner, access: Access) -> tuple[tuple[str, ...], str]:
        """Fields in which the nearest namespace of the same tenant that may be read differs from the
        one asked for, and the same in words; none where that one is stored, or nothing is."""
        with self.index.changed:
            if key in self.index.namespaces:
                return (), ""
            kin = [item for item in access.readable(self.index) if item.identity.tenant == owner.identity.tenant]
        return answers.nearest_difference(owner.identity, kin)
