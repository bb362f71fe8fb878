"""A thread that looks: at the latest every interval, sooner after a hint.

Looking does everything; a hint only says that it is worth while now. So an observer that died, or
never could start, costs promptness and nothing else.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from watchdog.observers import Observer
from watchdog.observers.api import BaseObserver

from warmkv.daemon import logs
from warmkv.daemon.watching.folders import Folders, Wanted

log = logging.getLogger(__name__)

#: A save by an editor is five to seven events.
DEBOUNCE_S = 0.25
#: Stopping waits so long for a look that hangs, as on a file server that is gone.
STOP_S = 10.0
#: What looking may take beyond its interval before the thread counts as stuck.
LATE_S = 60.0


class Subject(Protocol):
    """Something on disk that is looked at."""

    name: str

    def folders(self) -> Wanted:
        """Where hints about it come from."""
        ...

    def hint(self, path: Path, whole: bool) -> None:
        """A path may have changed; ``whole``: and its writer is done. Called by other threads."""
        ...

    def look(self, keep_on: Callable[[], bool]) -> None:
        """Look, and do what there is to do. Long work asks ``keep_on`` again and again."""
        ...


class Watcher:
    """**Threading:** `start` and `stop` by one thread; `wake` and `problem` by any; `look` by its own
    thread, or by a test that started none."""

    def __init__(
        self, name: str, subjects: Sequence[Subject], interval_s: float, *, observer: Callable[[], BaseObserver] = Observer,
        monotonic: Callable[[], float] = time.monotonic, debounce_s: float = DEBOUNCE_S, late_s: float = LATE_S,
    ) -> None:  # fmt: skip
        self.name = name
        self.interval_s = interval_s
        self.looks = 0
        self._subjects = tuple(subjects)
        self._folders = Folders(self._hinted, observer, monotonic)
        self._monotonic = monotonic
        self._debounce_s = debounce_s
        self._late_s = late_s
        self._wake = threading.Event()
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None
        self._beat = monotonic()
        self._failed: dict[str, str] = {}

    def start(self) -> None:
        """Look at once, and from then on."""
        self._stopping.clear()
        self._beat = self._monotonic()
        self._thread = threading.Thread(target=self._run, name=f"warmkv-watch-{self.name}", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Look no more; whatever is being looked at is given up, a look that hangs left to itself.
        Idempotent."""
        self._stopping.set()
        self._wake.set()
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.join(STOP_S)
            if thread.is_alive():
                log.warning("looking at %s did not end within %.0f s", self.name, STOP_S)
        self._folders.stop()

    def wake(self) -> None:
        """Look soon."""
        self._wake.set()

    def look(self) -> None:
        """Look at everything once. Observing comes first, so that nothing falls in between."""
        self._folders.follow(_together([subject.folders() for subject in self._subjects]))
        for subject in self._subjects:
            if not self._keep_on():
                return
            try:
                subject.look(self._keep_on)
                self._failed.pop(subject.name, None)
            except Exception as exc:  # noqa: BLE001 - one subject's defect is not the others'
                logs.defect(log, f"looking at {subject.name}", exc)
                self._failed[subject.name] = f"looking at {subject.name} failed with {type(exc).__qualname__}"
        self.looks += 1

    def died(self) -> str:
        """A health check: whether the thread that looks is there; nothing starts it anew."""
        dead = self._thread is not None and not self._thread.is_alive()
        return f"the thread that looks at {self.name} died" if dead else ""

    def problem(self) -> str:
        """A health check: whether looking goes on, and hints come."""
        if died := self.died():
            return died
        late_s = self._monotonic() - self._beat - self.interval_s
        if self._thread is not None and late_s > self._late_s:
            return f"{self.name} were last looked at {late_s:.0f} s later than they should be"
        if self._thread is not None and not self.looks:
            return ""  # the first look is under way, and not late
        return next(iter(list(self._failed.values())), "") or self._folders.problem()

    def _run(self) -> None:
        while not self._stopping.is_set():
            self.look()
            self._beat = self._monotonic()
            if self._wake.wait(self.interval_s):
                self._stopping.wait(self._debounce_s)
            self._wake.clear()

    def _keep_on(self) -> bool:
        self._beat = self._monotonic()
        return not self._stopping.is_set()

    def _hinted(self, path: Path, whole: bool) -> None:
        for subject in self._subjects:
            subject.hint(path, whole)
        self._wake.set()


def _together(parts: Sequence[Wanted]) -> Wanted:
    """All folders of several subjects, each with all names that matter to any."""
    found: dict[Path, frozenset[str] | None] = {}
    for part in parts:
        for folder, names in part.items():
            known = found.get(folder, frozenset())
            found[folder] = None if names is None or known is None else known | names
    return found
