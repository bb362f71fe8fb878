"""Services: what runs on threads of its own around the server, from before it is ready until it stops."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Protocol

from warmkv.daemon import logs
from warmkv.daemon.notify import Notifier
from warmkv.kvstore.store.engine import Engine

log = logging.getLogger("warmkv.daemon")
STATUS_EVERY_S = 10.0
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


class Service(Protocol):
    """**Threading:** both are called on the main thread; neither may wait for a peer."""

    def start(self) -> None: ...

    def stop(self) -> None:
        """Idempotent, and right for one that never started."""


@contextmanager
def running(services: Sequence[Service]) -> Iterator[None]:
    """Start services in order; stop those that were started in reverse, whatever the others do."""
    with ExitStack() as started:
        for service in services:
            started.callback(_stopped, service)
            service.start()
        yield


def _stopped(service: Service) -> None:
    try:
        service.stop()
    except Exception as exc:  # noqa: BLE001 - the rest must still be stopped, and the store flushed
        logs.defect(log, f"stopping {type(service).__name__}", exc)


class Repeating:
    """Does ``step`` on a thread of its own, every ``pause_s`` (None: only when asked) and soon after
    `ask`, which a signal handler may call, even one that interrupts another `ask`: an event has a lock
    that one thread cannot take twice. What fails is logged and tried again next time."""

    def __init__(self, name: str, step: Callable[[], None], pause_s: float | None = None) -> None:
        self._step = step
        self._pause_s = pause_s
        self._asked: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._ended = False
        self._thread = threading.Thread(target=self._run, name=f"warmkv-{name}", daemon=True)

    def ask(self) -> None:
        self._asked.put(None)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._ended = True
        self.ask()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        while True:
            self._await()
            if self._ended:
                return
            try:
                self._step()
            except Exception as exc:  # noqa: BLE001 - one failure must not end the service
                logs.defect(log, self._thread.name, exc)

    def _await(self) -> None:
        """Until the next step is due or was asked for, however often it was."""
        try:
            self._asked.get(timeout=self._pause_s)
            while True:
                self._asked.get_nowait()
        except queue.Empty:
            pass


class StatusText:
    """The line a service manager shows: what is held, who is served, what is wrong. Told when it
    changed; `__call__` does one step."""

    def __init__(self, notifier: Notifier, engine: Engine, connections: Callable[[], int]) -> None:
        self._notifier = notifier
        self._engine = engine
        self._connections = connections
        self._told = ""

    def __call__(self) -> None:
        text = self.text()
        if text != self._told:
            self._notifier.status(text)
            self._told = text

    def text(self) -> str:
        problems = self._engine.health.problems()
        with self._engine.index.changed:
            records = len(self._engine.index.records)
            warm_bytes = self._engine.warm.ledger.resident_bytes
            cold_bytes = self._engine.writer.cold_bytes if self._engine.writer else 0
        held = f"{records} records, {_size(warm_bytes)} in memory, {_size(cold_bytes)} on disk, {self._connections()} connections"
        wrong = "; ".join(f"{name}: {said}" for name, said in problems.items())
        return f"{held}; {wrong or 'no problems'}"


def _size(count: int) -> str:
    amount, unit = float(count), 0
    while amount >= 1024 and unit < len(_UNITS) - 1:
        amount, unit = amount / 1024, unit + 1
    return f"{amount:.1f} {_UNITS[unit]}" if unit else f"{count} B"
