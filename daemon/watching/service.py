"""Everything the daemon keeps an eye on, as one service: settings, weight files, spool, memory."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path

from watchdog.observers import Observer
from watchdog.observers.api import BaseObserver

from warmkv.daemon import config as configuration
from warmkv.daemon import pressure
from warmkv.daemon.config import Config
from warmkv.daemon.watching.config_file import ConfigFile
from warmkv.daemon.watching.settings import Settings, store_options
from warmkv.daemon.watching.spool import Spool
from warmkv.daemon.watching.warm_budget import WarmBudget
from warmkv.daemon.watching.watcher import Watcher
from warmkv.daemon.watching.weight_watch import WeightWatch
from warmkv.kvstore.store import cgroup, reconfigure
from warmkv.kvstore.store.engine import Engine
from warmkv.kvstore.store.importing import ImportResult, import_file
from warmkv.kvstore.store.weight_file import groups_of

log = logging.getLogger(__name__)

#: Importing the largest file, or reading from the slowest disk, takes no longer at a time.
IMPORT_S = 1800.0
#: Nothing needs to be done for these: they are read from the settings in force.
_READ_THERE = ("watch_interval_s", "stop_timeout_s", "spool")


class Watching:
    """**Threading:** `start` and `stop` on one thread. The settings may be reloaded from any."""

    def __init__(self, config: Config, engine: Engine, *, observer: Callable[[], BaseObserver] = Observer) -> None:
        assert engine.options.warm_bytes is not None
        self.settings = Settings(config)
        self._engine = engine
        self.budget = WarmBudget(
            engine.options.warm_bytes, lambda: self.settings.config.warm_bytes, self._set_warm,
            limit=cgroup.limit_bytes, machine=cgroup.machine_bytes,
        )  # fmt: skip
        self.spool = Spool(
            lambda: self.settings.config.spool, self._import, self._permitted, lambda: self.settings.config.watch_interval_s,
            engine.options.clock.monotonic,
        )  # fmt: skip
        file = ConfigFile(configuration.file_of(config), self.settings.reload, self._wake)
        # Reading weights and importing take minutes, and a file server may never answer: apart.
        files = (WeightWatch(engine.weights), self.spool)
        clock = engine.options.clock.monotonic
        self.watchers = (
            Watcher("settings", (file, self.budget), config.watch_interval_s, observer=observer, monotonic=clock),
            Watcher("files", files, config.watch_interval_s, observer=observer, monotonic=clock, late_s=IMPORT_S),
        )
        told = pressure.source(config.pressure_watch, config.pressure_write)
        self.pressure = pressure.PressureWatch(told, engine.eviction.shrink, monotonic=engine.options.clock.monotonic)
        self._register()

    def start(self) -> None:
        """Bring the warm budget within what may be used, then look and wait on threads."""
        self.budget.look(lambda: True)
        self._engine.weights.on_registered = self._wake
        for watcher in self.watchers:
            watcher.start()
        if self.settings.config.pressure:
            self.pressure.start()

    def stop(self) -> None:
        """End all threads. Idempotent; afterwards nothing is reloaded any more."""
        self.settings.close()
        self._engine.weights.on_registered = lambda: None
        for watcher in self.watchers:
            watcher.stop()
        self.pressure.stop()
        for name in ("watching", "watchers", "configuration", "spool", "pressure"):
            self._engine.health.forget(name)

    def look(self) -> None:
        """Look at everything once, on this thread; for tests that started none."""
        for watcher in self.watchers:
            watcher.look()

    def problem(self) -> str:
        """A health check: whether looking goes on, and hints come."""
        return next((found for watcher in self.watchers if (found := watcher.problem())), "")

    def _register(self) -> None:
        engine, settings = self._engine, self.settings
        engine.health.watch("watching", self.problem)
        engine.health.watch("watchers", lambda: "; ".join(filter(None, (item.died() for item in self.watchers))), vital=True)
        engine.health.watch("configuration", settings.problem)
        engine.health.watch("spool", self.spool.problem)
        engine.health.watch("pressure", self.pressure.problem)
        engine.figures |= {
            "cgroup": cgroup.memory,
            "pressure": self.pressure.figures,
            "configuration": settings.status,
            "spool": lambda: {"imported": self.spool.imported, "failed": self.spool.failed},
            "weights": lambda: {"retired": engine.weights.retired},
        }
        engine.reload = self._reload
        settings.on(("log_level",), lambda new: logging.getLogger("warmkv").setLevel(new.log_level.upper()))
        settings.on(("warm_bytes",), lambda new: self._wake())
        settings.on(("cold_bytes",), self._set_cold)
        settings.on(reconfigure.LIVE, lambda new: reconfigure.reconfigure(engine, store_options(new)))
        settings.on(("evict_interval_s",), lambda new: bool(settings.config.evict_interval_s and new.evict_interval_s))
        settings.on(("pressure",), lambda new: self.pressure.start() if new.pressure else self.pressure.stop())
        settings.on(_READ_THERE, self._look_as_told)

    def _reload(self) -> dict[str, object]:
        self.settings.reload("asked for")
        return dict(self.settings.status())

    # -- applying --------------------------------------------------------------------------

    def _set_warm(self, warm_bytes: int) -> None:
        self._engine.eviction.set_budgets(warm_bytes=warm_bytes)

    def _set_cold(self, new: Config) -> bool:
        """A smaller budget holds at once; a larger one as far as the store was opened with it. With 0 the
        next start does without the store, which is no reason to empty it now."""
        cold = self._engine.cold
        if cold is None or not new.cold_bytes:
            return False
        self._engine.eviction.set_budgets(cold_bytes=min(new.cold_bytes, cold.budget_bytes))
        return new.cold_bytes <= cold.budget_bytes

    def _look_as_told(self, new: Config) -> None:
        for watcher in self.watchers:
            watcher.interval_s = new.watch_interval_s
        self._wake()

    def _wake(self) -> None:
        for watcher in self.watchers:
            watcher.wake()

    # -- the spool -------------------------------------------------------------------------

    def _import(self, path: Path, uid: int) -> ImportResult:
        return import_file(self._engine, path, uid, durable=True)

    def _permitted(self, uid: int) -> bool:
        """Whether a user may connect, by what the account database says of groups."""
        config = self.settings.config
        if uid == os.geteuid() or uid in config.allow_uids:
            return True
        return bool(config.allow_gids) and not groups_of(uid).isdisjoint(config.allow_gids)
