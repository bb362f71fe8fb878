"""The engine: both tiers and the index of one store, put together.

One engine per store and process; the embedded store and the daemon use it alike, through one
`LocalSession` per user. Decisions are taken under the index lock, work is done outside it.
"""

from __future__ import annotations

import os
import secrets
import time

from warmkv.kvstore.store import answers
from warmkv.kvstore.store.acquisition import Acquisition
from warmkv.kvstore.store.cold import ColdTier
from warmkv.kvstore.store.health import Health
from warmkv.kvstore.store.index import Index
from warmkv.kvstore.store.intake import Intake, Owner
from warmkv.kvstore.store.options import StoreOptions
from warmkv.kvstore.store.promotion import Promotion
from warmkv.kvstore.store.recovery import load_index
from warmkv.kvstore.store.removal import Removal
from warmkv.kvstore.store.session import LocalSession
from warmkv.kvstore.store.warm import WarmTier
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
        self.index = Index()
        self.warm = WarmTier(self.index, options.warm_bytes, options.warm_entries, options.busy_timeout_s)
        self.cold = cold
        self.swept = load_index(self.index, cold) if cold is not None else 0
        self.writer = WriteBehind(self.index, self.warm, cold, options.usage_interval_s) if cold is not None else None
        self.promotion = Promotion(self.index, self.warm, cold, self.writer)
        self.acquisition = Acquisition(self.index, self.warm, self.promotion, options, self.epoch)
        self.intake = Intake(self.index, self.warm, self.writer, options, self.epoch)
        self.removal = Removal(self.index, self.warm, self.writer)
        self.started = time.time()
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
        if self.writer is not None:
            self.writer.stop()
        with self.index.changed:
            # What builds on a record begins behind its start.
            for record in sorted(self.index.warm_order, key=lambda item: -item.start):
                self.warm.evict(record)
        self.warm.reap()
        if self.cold is not None:
            self.cold.close()

    def nearest_difference(self, key: NamespaceKey, owner: Owner) -> tuple[tuple[str, ...], str]:
        """Fields in which the nearest namespace this owner may read differs from the one asked
        for, and the same in words; none where that one is stored, or nothing is."""
        with self.index.changed:
            if key in self.index.namespaces:
                return (), ""
            readable = [item for item in self.index.namespaces.values() if not item.share and item.owner_uid == owner.uid]
        return answers.nearest_difference(owner.identity, readable)
