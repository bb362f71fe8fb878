"""Bounds on tests: what hangs fails instead."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

#: Longer than any work of a test takes on a busy machine; only a hang reaches it.
TASK_S = 60.0


@contextmanager
def bounded(seconds: int) -> Iterator[None]:
    """Raise TimeoutError in the main thread when the block takes longer than ``seconds``."""

    def expire(*_: object) -> None:
        raise TimeoutError("test took too long")

    before = signal.signal(signal.SIGALRM, expire)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


class Task(threading.Thread):
    """A thread whose outcome is asked for: what it returned, or what it raised."""

    def __init__(self, work: Callable[[], Any]) -> None:
        super().__init__(daemon=True)
        self._work = work
        self._result: Any = None
        self._error: BaseException | None = None
        self.start()

    def run(self) -> None:
        try:
            self._result = self._work()
        except BaseException as exc:  # noqa: BLE001 - handed to whoever asks
            self._error = exc

    def outcome(self) -> Any:
        self.join(TASK_S)
        assert not self.is_alive()
        if self._error is not None:
            raise self._error
        return self._result
