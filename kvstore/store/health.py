"""Health: what must be alive for the store to keep its promises, asked on demand.

Each part registers one question whose answer is empty, or says in a sentence what is wrong.
`warmkv health`, the service manager's status text and the watchdog ask all of them.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

log = logging.getLogger(__name__)

#: Answers "" while all is well, else a sentence.
Check = Callable[[], str]


class Health:
    """**Threading:** any thread; checks are called without any lock held and must be quick."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._checks: dict[str, Check] = {}
        self._vital: set[str] = set()

    def watch(self, name: str, check: Check, *, vital: bool = False) -> None:
        """Ask ``check`` from now on; an earlier one of that name is replaced. What is ``vital`` only
        a new process can mend, such as a thread that died: it stops the pings of the watchdog."""
        with self._lock:
            self._checks[name] = check
            (self._vital.add if vital else self._vital.discard)(name)

    def forget(self, name: str) -> None:
        """Ask no longer. Idempotent."""
        with self._lock:
            self._checks.pop(name, None)
            self._vital.discard(name)

    def names(self) -> list[str]:
        with self._lock:
            return list(self._checks)

    def problems(self, *, vital: bool = False) -> dict[str, str]:
        """What is wrong, by name of the part, or with what is ``vital`` only; a check that fails is
        itself a problem."""
        with self._lock:
            checks = [(name, check) for name, check in self._checks.items() if not vital or name in self._vital]
        found = {}
        for name, check in checks:
            try:
                said = check()
            except Exception as exc:  # noqa: BLE001 - a broken check is reported, not raised
                log.error("health check %s failed with %s", name, type(exc).__qualname__)
                said = f"the check failed with {type(exc).__qualname__}"
            if said:
                found[name] = said
        return found
