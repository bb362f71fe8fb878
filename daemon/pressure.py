"""Memory pressure: give memory back before the kernel takes the process.

The kernel tells how long tasks waited for memory ("pressure stall information"). A service manager
may name the file to watch and what to write into it; otherwise the process's own control group is
watched, or the machine where it has none.
"""

from __future__ import annotations

import base64
import binascii
import logging
import os
import select
import socket
import stat
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from warmkv.daemon import logs
from warmkv.kvstore.store import cgroup

log = logging.getLogger(__name__)

MACHINE_FILE = Path("/proc/pressure/memory")
#: Some task waited 0.2 s within 2 s. Without privileges a window must be a multiple of 2 s.
TRIGGER = b"some 200000 2000000\0"
#: What is dropped of the warm tier each time, and how long its effect is awaited before more is.
FRACTION = 0.25
HOLD_OFF_S = 2.0
#: A source that was lost, as a control group that was removed, is looked for again this often.
REOPEN_S = 30.0


@dataclass(frozen=True, slots=True)
class Source:
    """Where pressure is told: a file of the kernel, a pipe, a socket. ``write`` is written once."""

    path: Path
    write: bytes

    def open(self) -> tuple[int, int]:
        """A descriptor and the event of `select.poll` that means pressure. Raises OSError."""
        mode = os.stat(self.path).st_mode
        if stat.S_ISSOCK(mode):
            return self._connected(), select.POLLIN
        # A pipe is opened for writing too, so that it does not end when another writer does.
        fd = os.open(self.path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            if stat.S_ISREG(mode) and self.write:
                os.write(fd, self.write)
        except OSError:
            os.close(fd)
            raise
        return fd, select.POLLPRI if stat.S_ISREG(mode) else select.POLLIN

    def _connected(self) -> int:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as peer:
            peer.settimeout(1.0)
            peer.connect(os.fspath(self.path))
            if self.write:
                peer.sendall(self.write)
            peer.setblocking(False)
            return peer.detach()


def source(watch: str, write: str, machine_file: Path = MACHINE_FILE) -> Source | None:
    """What to watch, by what a service manager said (empty: nothing); None where it said not to, and
    where nothing can be."""
    if watch == os.devnull:
        return None
    if watch:
        try:
            data = base64.b64decode(write, validate=True)
        except (binascii.Error, ValueError):
            log.warning("MEMORY_PRESSURE_WRITE is not base64; %s is watched without it", watch)
            data = b""
        return Source(Path(watch), data)
    group = cgroup.find()
    own = group.pressure_file() if group is not None else None
    # A unit may see its group read-only, and nothing of /proc but processes.
    found = next((path for path in (own, machine_file) if path is not None and os.access(path, os.W_OK)), None)
    return Source(found, TRIGGER) if found is not None else None


class PressureWatch:
    """Calls ``shrink`` with a part of what is held whenever ``told`` says that memory is short, and not
    again within ``hold_off_s``.

    **Threading:** `start` and `stop` by one thread, as often as wanted; the rest by any."""

    def __init__(
        self, told: Source | None, shrink: Callable[[float], int], *, hold_off_s: float = HOLD_OFF_S,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        self.events = 0
        self.freed_bytes = 0
        self._told = told
        self._shrink = shrink
        self._hold_off_s = hold_off_s
        self._monotonic = monotonic
        self._not_before = monotonic()
        self._thread: threading.Thread | None = None
        self._wake = -1
        self._lost = ""

    def start(self) -> None:
        """Watch on a thread, where there is something to watch."""
        if self._told is None or self._thread is not None:
            return
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._thread = threading.Thread(target=self._run, args=(self._told, self._wake), name="warmkv-pressure", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Watch no more. Idempotent."""
        thread, self._thread = self._thread, None
        if thread is not None:
            os.eventfd_write(self._wake, 1)
            thread.join()
            os.close(self._wake)

    def event(self) -> None:
        """Memory is short now."""
        self.events += 1
        if self._monotonic() < self._not_before:
            return
        freed = self._shrink(FRACTION)
        self.freed_bytes += freed
        # Counted from the end: freeing may have waited for the disk.
        self._not_before = self._monotonic() + self._hold_off_s
        log.info("memory is short: %d bytes of the warm tier were given back", freed)

    def problem(self) -> str:
        """A health check: empty unless watching ended by itself."""
        thread = self._thread
        return "the thread that waits for memory pressure died" if thread is not None and not thread.is_alive() else ""

    def figures(self) -> Mapping[str, object]:
        """For reports: what is watched, and what came of it."""
        watching = str(self._told.path) if self._told is not None and self._thread is not None and not self._lost else None
        return {"watching": watching, "events": self.events, "freed_bytes": self.freed_bytes}

    def _run(self, told: Source, wake: int) -> None:
        while True:
            try:
                fd, wanted = told.open()
            except OSError as exc:
                self._lose(f"{exc.strerror or exc}")
            else:
                self._lost = ""
                log.debug("waiting for memory pressure at %s", told.path)
                try:
                    if self._wait(fd, wanted, wake):
                        return
                finally:
                    os.close(fd)
                self._lose("it ended")
            pause = select.poll()
            pause.register(wake, select.POLLIN)
            if pause.poll(REOPEN_S * 1000):
                return

    def _lose(self, why: str) -> None:
        if not self._lost:
            log.warning("memory pressure cannot be watched now: %s", why)
        self._lost = why

    def _wait(self, fd: int, wanted: int, wake: int) -> bool:
        """Take events until told to stop (True) or the source ends."""
        poll = select.poll()
        poll.register(fd, wanted)
        poll.register(wake, select.POLLIN)
        while True:
            ready = dict(poll.poll())
            if wake in ready:
                return True
            if not ready.get(fd, 0) & wanted or wanted == select.POLLIN and not _drain(fd):
                return False
            try:
                self.event()
            except Exception as exc:  # noqa: BLE001 - one failure must not end the watch
                logs.defect(log, "giving memory back", exc)


def _drain(fd: int) -> bool:
    """Read what says that there is pressure; False at the end of a connection."""
    try:
        while data := os.read(fd, 4096):
            if len(data) < 4096:
                return True
    except BlockingIOError:
        return True
    except OSError:
        pass
    return False
