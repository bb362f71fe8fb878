"""The warm budget follows the limit of the control group, which may change while we run."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

from warmkv.daemon.watching.folders import Wanted
from warmkv.kvstore.store import cgroup

log = logging.getLogger(__name__)


class WarmBudget:
    """Calls ``set_budget`` with the bytes the warm tier may use whenever that is another number than
    ``now`` or what was set last. ``configured`` gives the setting, None for automatic."""

    name = "the memory limit"

    def __init__(
        self, now: int, configured: Callable[[], int | None], set_budget: Callable[[int], None], *,
        limit: Callable[[], int | None], machine: Callable[[], int],
    ) -> None:  # fmt: skip
        self._set = now
        self._configured = configured
        self._set_budget = set_budget
        self._limit = limit
        self._machine = machine
        self._warned: tuple[int, int] | None = None

    def folders(self) -> Wanted:
        return {}

    def hint(self, path: Path, whole: bool) -> None:
        pass

    def look(self, keep_on: Callable[[], bool]) -> None:
        configured, limit = self._configured(), self._limit()
        wanted = cgroup.warm_budget(configured, limit, self._machine())
        if configured is not None and wanted < configured and limit is not None and self._warned != (configured, limit):
            self._warned = (configured, limit)
            log.warning("warm_bytes is %d, more than fits the memory limit of %d bytes: %d are used", configured, limit, wanted)
        if wanted != self._set:
            log.info("the warm budget is %d bytes now, before %d", wanted, self._set)
            self._set_budget(wanted)
            self._set = wanted
