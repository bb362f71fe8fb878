"""Is the store worth asking? Measured on the client, which knows how fast it computes.

A cache that costs more than it saves is worse than none: a prompt of a few tokens is computed
in less time than a question to the daemon takes, and state that takes longer to load than to
compute is better computed (that half is the store's to decide, from the speed it is told).
"""

from __future__ import annotations

import threading

from warmkv.schema.errors import RecordError

#: Weight of a new measurement; the speeds of a machine change slowly.
ALPHA = 0.25
#: Tokens from which on a prefill says something about the speed, not only about its overhead.
MEASURABLE_TOKENS = 32
#: A round trip to the store before one was measured, with mapping and a first touch.
ROUND_TRIP_S = 0.002


class Admission:
    """Prefill speed and the store's round trip, as exponential averages, and what follows from them.

    ``prefill_tps`` > 0 begins with a known speed, in tokens a second. **Threading:** every method
    may be called from any thread."""

    def __init__(self, *, prefill_tps: float = 0.0, round_trip_s: float = ROUND_TRIP_S) -> None:
        if prefill_tps < 0 or round_trip_s < 0:
            raise RecordError(f"speeds are {prefill_tps} tokens/s and {round_trip_s} s, expected at least 0")
        self._lock = threading.Lock()
        self._prefill_tps = prefill_tps
        self._round_trip_s = round_trip_s

    @property
    def prefill_tps(self) -> float:
        """Tokens a second, 0 while unknown: then everything is asked and everything is offered."""
        return self._prefill_tps

    @property
    def least_tokens(self) -> int:
        """Fewest missing tokens for which asking can pay; 1 while the speed is unknown."""
        return max(1, int(self._round_trip_s * self._prefill_tps))

    def bypasses(self, missing_tokens: int) -> bool:
        """Whether computing that many tokens takes no longer than asking for them."""
        return missing_tokens < self.least_tokens

    def note_prefill(self, tokens: int, seconds: float) -> None:
        """Tell of ``tokens`` computed in ``seconds``; too few to tell the speed are passed over."""
        if tokens < MEASURABLE_TOKENS or seconds <= 0:
            return
        with self._lock:
            speed = tokens / seconds
            self._prefill_tps += (ALPHA if self._prefill_tps else 1.0) * (speed - self._prefill_tps)

    def note_round_trip(self, seconds: float) -> None:
        """Tell how long a question that moved no state took."""
        if seconds <= 0:
            return
        with self._lock:
            self._round_trip_s += ALPHA * (seconds - self._round_trip_s)
