"""Signals of a daemon: SIGTERM and SIGINT ask it to stop, SIGHUP to read its settings again."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from types import FrameType


class Signals:
    """In force inside ``with``, on the main thread; on any other it does nothing. The first signal
    to stop asks, the second ends the process with status 1.

    The kernel may deliver a signal to any thread. Python runs handlers on the main one, which would
    not notice while it waits for connections: ``descriptor`` becomes readable then. Before anybody
    wants them, requests to reload are of no use and ignored."""

    def __init__(self) -> None:
        self.descriptor = -1
        self._sender = -1
        self._wakeup_before = -1
        self._asked = False
        self._stop: Callable[[], None] | None = None
        self._reload: Callable[[], None] | None = None
        self._before: dict[int, object] = {}

    def __enter__(self) -> Signals:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                self._before[number] = signal.signal(number, self._on_stop)
            self._before[signal.SIGHUP] = signal.signal(signal.SIGHUP, self._on_reload)
            self.descriptor, self._sender = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
            self._wakeup_before = signal.set_wakeup_fd(self._sender, warn_on_full_buffer=False)
        return self

    def __exit__(self, *exc: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
        if self._sender >= 0:
            signal.set_wakeup_fd(self._wakeup_before)
            os.close(self._sender)
            os.close(self.descriptor)

    def then(self, stop: Callable[[], None], reload: Callable[[], None] | None = None) -> None:
        """Call ``stop`` on the first signal to stop, at once if that has come already, and ``reload``
        on every SIGHUP. Both are called by a signal handler and must return at once."""
        self._stop, self._reload = stop, reload
        if self._asked:
            stop()

    def _on_stop(self, number: int, frame: FrameType | None) -> None:
        if self._asked:
            os._exit(1)
        self._asked = True
        if self._stop is not None:
            self._stop()

    def _on_reload(self, number: int, frame: FrameType | None) -> None:
        if self._reload is not None:
            self._reload()
