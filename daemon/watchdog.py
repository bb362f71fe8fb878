"""Signs of life that prove progress: pings go out only while the daemon could serve somebody.

A thread that pings because it exists proves nothing. Before every ping three things are shown:
the accept loop answered a knock, the index lock could be had, no thread that only a restart
brings back is dead. Slow disks prove nothing either way: no I/O happens under that lock nor on
the accept loop, so an fsync of a minute costs no ping, and a deadlock costs all of them.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from warmkv.daemon import logs
from warmkv.daemon.notify import Notifier
from warmkv.kvstore.store.health import Health

if TYPE_CHECKING:
    from warmkv.daemon.server import Server
    from warmkv.kvstore.store.engine import Engine

log = logging.getLogger("warmkv.daemon.watchdog")
#: Pings a manager's patience has room for: one late answer of a busy machine must not count.
PINGS_A_PERIOD = 4
US = 1_000_000
#: Says "" where there was progress, else what is stuck.
Proof = Callable[[], str]


def interval_s(watchdog_usec: str, watchdog_pid: str, pid: int) -> float:
    """The manager's patience with process ``pid`` from the variables it set, 0: it does not watch."""
    if not watchdog_usec.isdecimal() or int(watchdog_usec) <= 0:
        return 0.0
    if watchdog_pid and watchdog_pid != str(pid):
        return 0.0
    return int(watchdog_usec) / US


class Knocks:
    """Proof of a loop: it answered the knock of the last time. ``knock`` wakes it, ``answers``
    counts how often it woke to one."""

    def __init__(self, knock: Callable[[], None], answers: Callable[[], int]) -> None:
        self._knock = knock
        self._answers = answers
        self._expected: int | None = None

    def __call__(self) -> str:
        answered = self._answers()
        if self._expected is not None and answered < self._expected:
            return "the accept loop does not answer"
        self._expected = answered + 1
        self._knock()
        return ""


def takes(lock: threading.Condition, timeout_s: float) -> Proof:
    """Proof of a lock: it can be had within ``timeout_s``."""

    def proof() -> str:
        if not lock.acquire(timeout=timeout_s):
            return f"the index lock could not be had for {timeout_s:.1f} s"
        lock.release()
        return ""

    return proof


def sound(health: Health) -> Proof:
    """Proof that nothing is dead which only a restart brings back."""

    def proof() -> str:
        return "; ".join(f"{name}: {said}" for name, said in health.problems(vital=True).items())

    return proof


def proofs(server: Server, engine: Engine, patience_s: float) -> tuple[Proof, ...]:
    """What a daemon shows for its life."""
    return (
        Knocks(server.knock, lambda: server.answers),
        takes(engine.index.changed, patience_s / PINGS_A_PERIOD),
        sound(engine.health),
    )


class Watchdog:
    """Pings ``notifier`` several times within ``interval_s`` as long as every proof holds.

    **Threading:** a thread of its own from `start` to `stop`; proofs are called on it."""

    def __init__(
        self, notifier: Notifier, interval_s: float, proofs: Sequence[Proof], wait: Callable[[float], bool] | None = None
    ) -> None:
        """``wait`` sleeps and says whether to end; None: until `stop`."""
        self.pings = 0
        self._notifier = notifier
        self._pause_s = interval_s / PINGS_A_PERIOD
        self._proofs = proofs
        self._ended = threading.Event()
        self._wait = wait or self._ended.wait
        self._said = ""
        self._thread = threading.Thread(target=self._run, name="warmkv-watchdog", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Idempotent."""
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join()

    def step(self) -> bool:
        """Ask for every proof and ping, or log what is stuck; whether it pinged."""
        stuck = "; ".join(filter(None, map(self._asked, self._proofs)))
        if stuck != self._said:
            if stuck:
                log.error("no sign of life to the service manager: %s", stuck)
            else:
                log.info("signs of life to the service manager again")
            self._said = stuck
        if stuck:
            return False
        self.pings += 1
        self._notifier.alive()
        return True

    def _run(self) -> None:
        self.step()
        while not self._wait(self._pause_s):
            self.step()

    @staticmethod
    def _asked(proof: Proof) -> str:
        try:
            return proof()
        except Exception as exc:  # noqa: BLE001 - a proof that fails proves nothing
            logs.defect(log, "a proof of progress", exc)
            return f"a proof failed with {type(exc).__qualname__}"
