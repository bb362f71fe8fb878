"""Hints from the file system: something in a folder changed, look now instead of later.

Hints may be lost (a full queue, a folder deleted and made anew, an observer that died), so nothing
rests on them: whoever gets them looks by the clock as well. Folders are observed, never single
files, which editors and package managers replace under the observer.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path

from watchdog.events import FileSystemEvent, FileSystemEventHandler
from watchdog.observers import Observer
from watchdog.observers.api import BaseObserver, ObservedWatch

log = logging.getLogger(__name__)

#: Each folder is a thread of the observer; what is beyond is only looked at by the clock.
MAX_FOLDERS = 64
#: A folder with so many events within so long, wanted or not, is only looked at by the clock: whoever
#: may write there must not keep us busy.
NOISY_EVENTS = 5000
NOISY_S = 10.0
#: Opening and reading are events too, ours among them.
_TELLING = frozenset({"created", "modified", "moved", "deleted", "closed"})

#: Folders, and the names in each that matter (None: all).
Wanted = Mapping[Path, frozenset[str] | None]
#: Called with a path that may have changed, and whether its writer is done with it.
Hint = Callable[[Path, bool], None]


class Folders(FileSystemEventHandler):
    """Observes folders and calls ``hint``, on a thread of the observer.

    **Threading:** `follow` and `stop` on one thread; `problem` on any."""

    def __init__(
        self, hint: Hint, observer: Callable[[], BaseObserver] = Observer, monotonic: Callable[[], float] = time.monotonic
    ) -> None:
        self._hint = hint
        self._make = observer
        self._monotonic = monotonic
        self._lock = threading.Lock()
        self._observer: BaseObserver | None = None
        self._wanted: Wanted = {}
        #: Device and inode of each observed folder: one deleted and made anew is another.
        self._observed: dict[Path, tuple[ObservedWatch, tuple[int, int]]] = {}
        #: By where it really is, which is observed, the folder that was wanted: links are not followed.
        self._named: dict[Path, Path] = {}
        #: Folders of which the observer said that they are gone.
        self._gone: set[Path] = set()
        #: When counting began, and the events of each folder since; folders that were too much.
        self._counted: tuple[float, Counter[Path]] = (monotonic(), Counter())
        self._noisy: set[Path] = set()
        self._error = "not started"

    def follow(self, wanted: Wanted) -> None:
        """Observe these folders from now on, as far as they exist; start the observer anew if it
        died. What goes wrong is a `problem`, not an exception."""
        self._wanted = wanted
        self._noisy &= wanted.keys()
        error = ""
        try:
            observer = self._living()
            for path in [path for path in self._observed if not self._still_good(observer, path)]:
                self._leave(observer, path)
            for path in [path for path in wanted if path not in self._observed and path not in self._noisy][
                : MAX_FOLDERS - len(self._observed)
            ]:
                error = self._enter(observer, path) or error
        except Exception as exc:  # noqa: BLE001 - a library, threads and the system's limits: hints end, looking goes on
            error = f"no hints from the file system: {type(exc).__name__} {exc}"
            self._end()
        self._error = error

    def problem(self) -> str:
        """Why hints do not come, or empty."""
        with self._lock:
            observer = self._observer
        if observer is None:
            return self._error or "no hints from the file system: the observer does not run"
        if not _alive(observer):
            return "no hints from the file system: the observer died"
        dead = [emitter.watch.path for emitter in list(observer.emitters) if not emitter.is_alive()]
        if any(self._named.get(Path(path)) not in self._gone and os.path.isdir(path) for path in dead):
            return f"no hints from folder {dead[0]}: its observer died"
        return self._error

    def stop(self) -> None:
        """End the observer and its threads. Idempotent."""
        self._end()
        self._error = "not started"

    def on_any_event(self, event: FileSystemEvent) -> None:
        self._count(self._named.get(Path(os.fsdecode(event.src_path)).parent))
        if event.event_type not in _TELLING:
            return
        for raw, whole in ((event.src_path, event.event_type == "closed"), (event.dest_path, True)):
            path = Path(os.fsdecode(raw))
            if raw and path in self._named:
                if event.event_type in ("deleted", "moved"):
                    self._gone.add(self._named[path])
                    self._hint(self._named[path], False)
            elif raw and path.parent in self._named:
                folder = self._named[path.parent]
                names = self._wanted.get(folder, frozenset())
                if names is None or path.name in names:
                    self._hint(folder / path.name, whole)

    def _count(self, folder: Path | None) -> None:
        if folder is None:
            return
        since, counts = self._counted
        if self._monotonic() - since > NOISY_S:
            since, counts = self._counted = (self._monotonic(), Counter())
        counts[folder] += 1
        if counts[folder] == NOISY_EVENTS:
            log.info("%d events in folder %s within %.0f s: it is looked at by the clock only", NOISY_EVENTS, folder, NOISY_S)
            self._noisy.add(folder)
            self._hint(folder, False)

    # -- the observer -----------------------------------------------------------------------

    def _living(self) -> BaseObserver:
        """The observer, a new one if there is none that lives."""
        if self._observer is not None and _alive(self._observer):
            return self._observer
        if self._observer is not None:
            log.warning("the observer of %d folders died and is started anew", len(self._observed))
            self._end()
        observer = self._make()
        observer.start()
        with self._lock:
            self._observer = observer
        return observer

    def _still_good(self, observer: BaseObserver, path: Path) -> bool:
        watch, identity = self._observed[path]
        alive = any(emitter.watch == watch and emitter.is_alive() for emitter in list(observer.emitters))
        wanted = path in self._wanted and path not in self._noisy
        return alive and wanted and path not in self._gone and _identity(path) == identity

    def _enter(self, observer: BaseObserver, path: Path) -> str:
        """Observe a folder if there is one; what went wrong."""
        self._gone.discard(path)
        identity = _identity(path)
        if identity is None:
            return ""
        real = Path(os.path.realpath(path))
        self._named[real] = path
        try:
            watch = observer.schedule(self, str(real))
        except OSError as exc:
            return f"no hints from folder {path}: {exc.strerror or exc}"
        self._observed[path] = (watch, identity)
        return ""

    def _leave(self, observer: BaseObserver, path: Path) -> None:
        watch, _ = self._observed.pop(path)
        self._named = {real: named for real, named in self._named.items() if named != path}
        self._gone.discard(path)
        try:
            observer.unschedule(watch)
        except KeyError:
            pass  # the observer let go of it already

    def _end(self) -> None:
        with self._lock:
            observer, self._observer = self._observer, None
        self._observed.clear()
        self._named = {}
        self._gone.clear()
        if observer is None:
            return
        try:
            observer.unschedule_all()
            observer.stop()
            observer.join()
        except (RuntimeError, OSError) as exc:  # never started, or half dead
            log.debug("ending the observer: %s", exc)


def _alive(observer: BaseObserver) -> bool:
    """Whether an observer lives, and the thread that reads from the kernel for it, where it is one."""
    reader = getattr(observer, "_inotify_fd", None)
    return observer.is_alive() and not (isinstance(reader, threading.Thread) and not reader.is_alive())


def _identity(path: Path) -> tuple[int, int] | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return (found.st_dev, found.st_ino) if os.path.isdir(path) else None
