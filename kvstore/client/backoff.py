"""Not asking again at once: what keeps an absent or slow daemon from costing time per call."""

from __future__ import annotations

import time
from collections.abc import Callable

from warmkv.schema.errors import DaemonTimeout, WarmKVError

FIRST_S = 1.0
LONGEST_S = 30.0


class Backoff:
    """After a failure every `check` inside the window raises the same failure again.

    The window is 1 s; it doubles up to 30 s while calls keep timing out, because each of them
    costs its caller the whole time-out. **Threading:** any; state is one tuple, replaced whole."""

    def __init__(self, *, enabled: bool = True, clock: Callable[[], float] = time.monotonic) -> None:
        self._enabled = enabled
        self._clock = clock
        self._last: tuple[float, float, WarmKVError] | None = None

    def check(self) -> None:
        """Raise the remembered failure while its window is open."""
        last = self._last
        if last is not None and self._clock() < last[0]:
            raise type(last[2])(f"{last[2]} (not asked again yet)")

    def failed(self, exc: WarmKVError) -> None:
        """Open a window for ``exc``."""
        if not self._enabled:
            return
        last = self._last
        window_s = FIRST_S
        if last is not None and isinstance(exc, DaemonTimeout) and isinstance(last[2], DaemonTimeout):
            window_s = min(2 * last[1], LONGEST_S)
        self._last = (self._clock() + window_s, window_s, type(exc)(str(exc)))

    def succeeded(self) -> None:
        self._last = None
