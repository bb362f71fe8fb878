"""The daemon's log: standard error, one line an event, never a token.

What may be logged about a request is its kind, counts, sizes and the first digits of ids.
Exceptions of ours carry messages written with that in mind; of any other exception only the
type and the stack are logged, because its text may quote data.
"""

from __future__ import annotations

import logging
import sys
import time
import traceback
from collections.abc import Callable

#: Control characters written out, but for the end of a line, and all that some reader takes for one.
_WRITTEN_OUT = {code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160)) if code not in (9, 10)}
_WRITTEN_OUT |= {code: f"\\u{code:04x}" for code in (0x2028, 0x2029)}
FORMAT = "%(asctime)s.%(msecs)03dZ %(levelname)s %(name)s: %(message)s"


def configure(level: str) -> None:
    """Send warmkv's records of at least ``level`` to standard error, times in UTC."""
    handler = logging.StreamHandler(sys.stderr)
    formatter = _OneRecord(FORMAT, "%Y-%m-%dT%H:%M:%S")
    formatter.converter = time.gmtime
    handler.setFormatter(formatter)
    root = logging.getLogger("warmkv")
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    root.propagate = False


class _OneRecord(logging.Formatter):
    """Names of files and peers are part of messages: nothing in one begins what looks like another
    record, or tells a terminal what to do."""

    def format(self, record: logging.LogRecord) -> str:
        return super().format(record).translate(_WRITTEN_OUT).replace("\n", "\n  ")


class Seldom:
    """Warns of one kind of event at most every ``pause_s``, and then says of how many it did not: who
    brings them about shall not fill the log. **Threading:** one thread."""

    def __init__(self, log: logging.Logger, pause_s: float = 1.0, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._log = log
        self._pause_s = pause_s
        self._monotonic = monotonic
        self._not_before = monotonic()
        self._unsaid = 0

    def warning(self, text: str, *arguments: object) -> None:
        now = self._monotonic()
        if now < self._not_before:
            self._unsaid += 1
            return
        more = f" (and {self._unsaid} more since the last one)" if self._unsaid else ""
        self._log.warning(text + more, *arguments)
        self._not_before, self._unsaid = now + self._pause_s, 0


def defect(log: logging.Logger, what: str, exc: BaseException) -> None:
    """Log an exception that should not have happened: its type and stack, not its text."""
    frames = "".join(traceback.format_tb(exc.__traceback__))
    log.error("%s failed with %s\n%s", what, type(exc).__qualname__, frames.rstrip())
