"""Settings in force, and how others take their place while the daemon runs.

A new configuration is taken as a whole or not at all: one value that is wrong leaves everything as
it was, and health says so until the configuration is valid again. What nobody can apply to a
running daemon is named, and stays as it was until the next start.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, fields, replace

from warmkv.daemon import config as configuration
from warmkv.daemon import logs
from warmkv.daemon.config import Config
from warmkv.kvstore.store.options import StoreOptions
from warmkv.schema.errors import WarmKVError

log = logging.getLogger(__name__)

#: Puts the new settings in force; False: as far as it could, the rest needs a restart.
Apply = Callable[[Config], bool | None]
#: Names of settings that differ from what is in force.
_OF_STORE = frozenset({item.name for item in fields(StoreOptions)} & {item.name for item in fields(Config)})


@dataclass(frozen=True, slots=True)
class ReloadResult:
    """What became of a reload: settings that are in force now, and settings that wait for a restart.
    ``error`` says why the new configuration was refused altogether, or is empty."""

    reason: str
    error: str = ""
    applied: tuple[str, ...] = ()
    needs_restart: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        return not self.error


class Settings:
    """``load`` reads the configuration anew, from the places it came from at the start.

    **Threading:** any thread; one reload at a time. Whoever applies is called on the thread that
    reloads."""

    def __init__(
        self, config: Config, load: Callable[[Config], Config] = configuration.again, wall_s: Callable[[], float] = time.time
    ) -> None:
        self.config = config
        self.reloads = 0
        self.last: ReloadResult | None = None
        self._last_s = 0.0
        self._load = load
        self._wall_s = wall_s
        self._appliers: list[tuple[frozenset[str], Apply]] = []
        self._reloading = threading.Lock()
        self._closed = False

    def on(self, names: Iterable[str], apply: Apply) -> None:
        """Call ``apply`` when one of these settings is another. Before the first reload."""
        self._appliers.append((frozenset(names), apply))

    def reload(self, reason: str) -> ReloadResult:
        """Read everything anew and put it in force as far as that is possible. Never raises."""
        with self._reloading:
            if self._closed:
                return ReloadResult(reason, "the daemon is stopping")
            try:
                result = self._reload(reason)
            except Exception as exc:  # noqa: BLE001 - whatever a file can bring about, the old settings stay
                logs.defect(log, "reading the configuration", exc)
                result = ReloadResult(reason, f"reading the configuration failed with {type(exc).__qualname__}")
            self.reloads += 1
            self.last, self._last_s = result, self._wall_s()
            return result

    def close(self) -> None:
        """Wait for a reload under way and refuse others from now on."""
        with self._reloading:
            self._closed = True

    def problem(self) -> str:
        """A health check: why the configuration as it lies there is not in force, or empty."""
        error = self.last.error if self.last is not None else ""
        return f"the configuration is not valid, the former one stays in force: {error}" if error else ""

    def status(self) -> Mapping[str, object]:
        """What became of the last reload, for reports."""
        if self.last is None:
            return {"reloads": 0}
        return {"reloads": self.reloads, "at_s": round(self._last_s, 3), "ok": self.last.ok, **asdict(self.last)}

    def _reload(self, reason: str) -> ReloadResult:
        try:
            new = self._load(self.config)
            check(new)
        except WarmKVError as exc:
            log.error("%s: the configuration is not valid, the former one stays in force: %s", reason, exc)
            return ReloadResult(reason, str(exc))
        if self.last is not None and not self.last.ok:
            log.info("%s: the configuration is valid again", reason)
        changed = [name for name in configuration.SETTINGS if getattr(new, name) != getattr(self.config, name)]
        applied = self._apply(new, frozenset(changed))
        waiting = tuple(name for name in changed if name not in applied)
        # What waits for a restart stays different, so that every reload names it again.
        self.config = replace(self.config, **{name: getattr(new, name) for name in applied})
        if applied:
            log.info("%s: in force now: %s", reason, ", ".join(sorted(applied)))
        if waiting:
            log.warning("%s: in force after a restart only: %s", reason, ", ".join(waiting))
        return ReloadResult(reason, "", tuple(sorted(applied)), waiting)

    def _apply(self, new: Config, changed: frozenset[str]) -> set[str]:
        """Call whoever one of these settings concerns; those that are in force then."""
        applied: set[str] = set()
        left: set[str] = set()
        for names, apply in self._appliers:
            concerned = names & changed
            if not concerned:
                continue
            try:
                whole = apply(new) is not False
            except Exception as exc:  # noqa: BLE001 - the settings of others do not hang on it
                logs.defect(log, f"applying {', '.join(sorted(concerned))}", exc)
                whole = False
            (applied if whole else left).update(concerned)
        return applied - left


def store_options(config: Config) -> StoreOptions:
    """What of the configuration concerns the store, but where it lies."""
    return StoreOptions(**{name: getattr(config, name) for name in _OF_STORE})


def check(config: Config) -> None:
    """Whether settings fit each other. Raises BudgetError."""
    store_options(config).resolved()
