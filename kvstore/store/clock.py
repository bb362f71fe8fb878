"""Time as a store sees it: durations that only grow, and a wall clock that never runs backward.

A wall clock jumps: a battery is replaced, a network answers, somebody sets it. What is kept "until
Tuesday" must neither be lost nor live for ever because of that. So the system's wall clock is read
once; from then on wall time is that plus what the machine's own clock, sleep included, counted.
"""

from __future__ import annotations

import time
from collections.abc import Callable

NS = 1_000_000_000


def _boot_ns() -> int:
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME)


class Clock:
    """``monotonic`` in seconds for deadlines, ``wall_ns`` for what outlives the process.

    **Threading:** any thread."""

    def __init__(
        self, monotonic: Callable[[], float] = time.monotonic, wall_ns: Callable[[], int] = time.time_ns,
        elapsed_ns: Callable[[], int] = _boot_ns,
    ) -> None:  # fmt: skip
        self.monotonic = monotonic
        self._elapsed_ns = elapsed_ns
        self._begin_ns = elapsed_ns()
        self._start_wall_ns = wall_ns()

    def not_before(self, wall_ns: int) -> None:
        """Wall time that was seen before, in another life of the store: it is not earlier now."""
        self._start_wall_ns = max(self._start_wall_ns, wall_ns - (self._elapsed_ns() - self._begin_ns))

    def wall_ns(self) -> int:
        """Nanoseconds since 1970, never less than a call before said."""
        return self._start_wall_ns + max(0, self._elapsed_ns() - self._begin_ns)

    def wall_s(self) -> int:
        return self.wall_ns() // NS
