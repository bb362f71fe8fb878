"""Where the prefill of a prompt stops to keep its state, for models that resume nowhere else."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import numpy as np

from warmkv.schema.errors import RecordError
from warmkv.schema.records import Anchor, AnchorKind, Tokens


class AnchorPlan(Protocol):
    """Says where to stop in a prompt of which ``matched`` tokens are known and ``usable`` can be
    resumed from. Positions outside (usable, len(ids)) are passed over; any order will do."""

    def __call__(self, ids: Tokens, matched: int, usable: int) -> Iterable[int | Anchor]: ...


def last_and_branch(ids: Tokens, matched: int, usable: int) -> Iterable[int | Anchor]:
    """One token before the end, so that the same prompt again is a hit; and where the prompt
    leaves what is known, since what several prompts share is likely to come again."""
    return (len(ids) - 1, matched)


def stops(positions: Iterable[int | Anchor], length: int, usable: int) -> tuple[Anchor, ...]:
    """The anchors of a plan that lie in (usable, length), ascending, one a position; one that says
    what it is goes before one that does not. Raises RecordError for what is no position."""
    found: dict[int, Anchor] = {}
    for item in positions:
        anchor = item if isinstance(item, Anchor) else Anchor(_position(item))
        known = found.get(anchor.position)
        if usable < anchor.position < length and (known is None or known.kind == AnchorKind.UNSPECIFIED):
            found[anchor.position] = anchor
    return tuple(found[position] for position in sorted(found))


def _position(item: object) -> int:
    if isinstance(item, (int, np.integer)) and not isinstance(item, bool):
        return int(item)
    raise RecordError(f"a planned anchor is {item!r}, expected a position in tokens or an Anchor")
