"""The embedded store: the verbs over an engine in this process, no daemon needed."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NoReturn

from warmkv.kvstore.store.engine import Engine
from warmkv.kvstore.store.options import StoreOptions
from warmkv.kvstore.verbs import Verbs
from warmkv.schema.errors import ClosedError, WarmKVError


class Store(Verbs):
    """A store opened by this process alone; every failure raises. Not usable after a fork:
    the child must open its own (and cannot while the parent holds the lock)."""

    def __init__(self, engine: Engine, *, share: str = "") -> None:
        super().__init__(engine.session(os.getuid(), every_share=True), share=share)
        self._engine = engine
        self._pid = os.getpid()

    @property
    def engine(self) -> Engine:
        """The engine behind the verbs, for tests and tools."""
        return self._engine

    def flush(self, timeout_s: float | None = None) -> bool:
        """Wait until every queued save is done and everything is on disk."""
        if not self._closed:
            self._require_open()
        return super().flush(timeout_s) and self._engine.flush(timeout_s)

    def close(self) -> None:
        """Finish saves, flush to disk, release the lock. Idempotent."""
        if self._pid == os.getpid() and not self._closed:
            super().close()
            self._engine.close()

    def _failed(self, exc: WarmKVError) -> NoReturn:
        raise exc

    def _require_open(self) -> None:
        super()._require_open()
        if self._pid != os.getpid():
            raise ClosedError("this store was opened before a fork; open one in this process")


def open_store(
    path: str | os.PathLike[str] | None = None, *, warm_bytes: int | None = None, cold_bytes: int | None = None, anchors: int = 0,
    share: str = "",
) -> Store:  # fmt: skip
    """Open, or create, the store in the directory ``path``; None keeps everything in memory.

    Budgets in bytes; None takes the defaults, 0 switches that tier off. ``anchors`` limits the
    states at named positions that each namespace keeps in memory; 0 leaves that to the budget.
    Raises StoreInUse, StoreTooNew, BudgetError, StoreError."""
    options = StoreOptions(Path(path) if path is not None else None, warm_bytes, cold_bytes, anchors=anchors)
    return Store(Engine.open(options), share=share)
