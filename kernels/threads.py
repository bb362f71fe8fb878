"""Threads for kernels that let go of the interpreter lock: a small pool that stays between calls.

The caller works too, so one thread means none of ours, and a call from within a task cannot wait
for threads that wait for it. Which thread does which task is left to chance: what tasks compute must
not depend on it.

**Threading:** may be used from any thread. A forked child starts without threads and makes its own;
they end with `close` or with the interpreter, which waits for them.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import count

from warmkv.kernels.errors import KernelError

#: Threads beside the callers', whatever is asked for.
MOST = min(64, os.cpu_count() or 1)
NAME = "warmkv-kernel"

_lock = threading.Lock()
_pool: ThreadPoolExecutor | None = None


def run(task: Callable[[int], None], tasks: int, threads: int = 1) -> None:
    """Call ``task`` with each of 0 .. ``tasks`` - 1, at most ``threads`` at a time, and return once all
    are done; with fewer threads where the machine has no more. Where tasks raise, no new one is begun and
    the exception of the lowest is raised."""
    if threads < 1:
        raise KernelError(f"{threads} threads, expected at least 1")
    if threads == 1 or tasks < 2:
        for index in range(tasks):
            task(index)
        return
    work = _Work(task, tasks)
    helpers: list[Future[None]] = []
    try:
        for _ in range(min(threads, tasks, MOST + 1) - 1):
            helpers.append(Future())
            _submit(helpers[-1], work)
    except RuntimeError:  # no more threads to be had, or the interpreter is about to end: fewer will do
        pass
    work()
    for helper in helpers:
        if not helper.cancel():
            helper.result()
    if work.failed:
        raise work.failed[min(work.failed)]


def alive() -> int:
    """Threads of the pool there are now."""
    return sum(thread.name.startswith(NAME) for thread in threading.enumerate())


def close() -> None:
    """End the pool's threads once they are done; the next `run` starts new ones."""
    global _pool
    with _lock:
        pool, _pool = _pool, None
    if pool is not None:
        pool.shutdown(wait=True)


class _Work:
    """Tasks that are drawn one after the other by whoever has time."""

    def __init__(self, task: Callable[[int], None], tasks: int) -> None:
        self.task, self.tasks = task, tasks
        self.failed: dict[int, BaseException] = {}
        self._next = count()  # next() of it is one step for the interpreter: no index is drawn twice

    def __call__(self) -> None:
        while not self.failed and (index := next(self._next)) < self.tasks:
            try:
                self.task(index)
            except BaseException as exc:
                self.failed[index] = exc


def _submit(helper: Future[None], work: _Work) -> None:
    """Have ``work`` done by a thread of the pool, unless ``helper`` is cancelled before one comes to it. A pool
    that raises may have taken it all the same: whoever returns cancels it or waits for it."""
    global _pool
    with _lock:  # held while submitting, so that a pool is not closed in between
        if _pool is None:
            _pool = ThreadPoolExecutor(MOST, thread_name_prefix=NAME)
        _pool.submit(_help, helper, work)


def _help(helper: Future[None], work: _Work) -> None:
    if helper.set_running_or_notify_cancel():
        try:
            work()
        finally:
            helper.set_result(None)


def _forget() -> None:
    global _lock, _pool
    _lock, _pool = threading.Lock(), None


os.register_at_fork(after_in_child=_forget)
