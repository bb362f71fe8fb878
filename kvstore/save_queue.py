"""The bounded queue behind save_async: saving never delays an answer.

One thread, started with the first save. A full queue gives the new save up instead of
waiting: the rows will be offered again with the next turn.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future

from warmkv.kvstore.results import Saved


class SaveQueue:
    """Runs jobs in order on one daemon thread.

    Notes: the lock covers the deque only; a job runs outside it. After a fork the child starts
    with an empty queue and no thread."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._jobs: deque[tuple[Callable[[], Saved], Future[Saved]]] = deque()
        self._changed = threading.Condition()
        self._running = 0
        self._thread: threading.Thread | None = None
        self._closing = False
        self._pid = os.getpid()

    def submit(self, job: Callable[[], Saved]) -> Future[Saved]:
        """A future of the job's result; already resolved as not stored when the queue is full."""
        future: Future[Saved] = Future()
        self._after_fork()
        with self._changed:
            if self._closing or len(self._jobs) + self._running >= self._limit:
                why = "saving was closed" if self._closing else f"{self._limit} saves are already queued"
                future.set_result(Saved(False, reason=why))
                return future
            self._jobs.append((job, future))
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="warmkv-save", daemon=True)
                self._thread.start()
            self._changed.notify_all()
        return future

    def join(self, timeout_s: float | None) -> bool:
        """Wait for all submitted jobs; False when ``timeout_s`` passed first."""
        self._after_fork()
        with self._changed:
            return self._changed.wait_for(lambda: not self._jobs and not self._running, timeout_s)

    def close(self) -> None:
        """Run what is queued, then end the thread."""
        self._after_fork()
        with self._changed:
            self._closing = True
            self._changed.notify_all()
            thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join()

    def _after_fork(self) -> None:
        if self._pid != os.getpid():
            self.__init__(self._limit)  # type: ignore[misc]

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._jobs or self._closing)
                if not self._jobs:
                    return
                job, future = self._jobs.popleft()
                self._running = 1
            try:
                if future.set_running_or_notify_cancel():
                    future.set_result(job())
            except BaseException as exc:  # noqa: BLE001 - handed to whoever holds the future
                future.set_exception(exc)
            finally:
                del job, future
                with self._changed:
                    self._running = 0
                    self._changed.notify_all()
