"""The configuration file: another one is taken as soon as it is seen."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

from warmkv.daemon.watching.folders import Wanted

Seen = tuple[int, ...]
#: Between emptying a file and writing it anew an editor takes less; an empty one would be valid.
SETTLE_S = 0.2


class ConfigFile:
    """Calls ``changed`` once for every change of the file at ``path``, which need not exist. The
    first look counts as one: the file may have changed since it was read. What changed only just
    now is left to another look, which ``again`` asks for."""

    name = "the configuration file"

    def __init__(
        self, path: Path, changed: Callable[[str], object], again: Callable[[], None], wall_s: Callable[[], float] = time.time
    ) -> None:
        self._path = path.absolute()
        self._changed = changed
        self._again = again
        self._wall_s = wall_s
        self._seen: Seen | None = None

    def folders(self) -> Wanted:
        return {self._path.parent: frozenset({self._path.name})}

    def hint(self, path: Path, whole: bool) -> None:
        pass

    def look(self, keep_on: Callable[[], bool]) -> None:
        seen = self._look()
        if seen == self._seen:
            return
        if seen and 0 <= self._wall_s() - seen[-1] / 1e9 < SETTLE_S:
            self._again()
        else:
            first, self._seen = self._seen is None, seen
            self._changed("start" if first else "configuration file changed")

    def _look(self) -> Seen:
        try:
            found = os.stat(self._path)
        except OSError:
            return ()
        return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns
