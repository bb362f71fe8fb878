"""What a record is worth keeping: how often it is asked for, the prefill it saves, the bytes it takes.

Rows save what they took to compute. A state saves the way from the last position before its own
that can be resumed from: of two states close to each other one is worth little, and goes before
the rows between them.

**Source:** Pan et al., "Marconi: Prefix Caching for the Era of Hybrid LLMs", MLSys 2025, section 4,
for what a state saves; the rest is the GDSF of `ranking`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from warmkv.kvstore.needs import Provides

if TYPE_CHECKING:
    from warmkv.kvstore.store.index import Record

#: What a token's rows took to compute where nobody ever said: any number, all alike.
UNKNOWN_US = 100.0
#: What makes a position resumable; a state without any of it saves the last token at most.
_RESUMABLE = Provides.EXACT | Provides.TRIMMABLE | Provides.CONSTANT


@dataclass(slots=True)
class Prefill:
    """What was told of how long rows took to compute, summed."""

    us: int = 0
    tokens: int = 0

    def note(self, record: Record) -> None:
        self.us += record.prefill_us
        self.tokens += max(1, record.end - record.start)


def worth_of(prefill: Prefill, record: Record) -> float:
    """Frequency x microseconds of prefill saved / bytes; ``prefill`` is what is known of any model."""
    if record.is_state:
        saved_us = _way_us(prefill, record)
    else:
        saved_us = _token_us(prefill, record) * (record.end - record.start)
    return (1 + record.hits) * saved_us / max(1, record.total_bytes)


def _token_us(prefill: Prefill, segment: Record) -> float:
    """What one token of a segment took: what was told of it, else what is known of its namespace,
    else of any."""
    if segment.prefill_us:
        return segment.prefill_us / max(1, segment.end - segment.start)
    known = segment.namespace.prefill if segment.namespace.prefill.tokens else prefill
    return known.us / known.tokens if known.tokens else UNKNOWN_US


def _way_us(prefill: Prefill, state: Record) -> float:
    """What the rows behind the last position before a state's that can be resumed from took."""
    link, upto, total = state.parent, state.end, 0.0
    wanted = state.provides & _RESUMABLE
    if link is not None and not wanted:
        return _token_us(prefill, link)
    while link is not None:
        same = (item.end for item in link.states if item.end < state.end and item.provides & wanted)
        begin = max(same, default=link.start)
        total += _token_us(prefill, link) * max(0, upto - begin)
        if begin > link.start:
            break
        upto, link = link.start, link.parent
    return total
