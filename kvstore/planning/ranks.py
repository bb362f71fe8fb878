"""What a boundary is, and which boundaries are worth a state before others."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

from warmkv.schema.records import AnchorKind


class Rank(IntEnum):
    """Boundaries by how surely somebody comes back to them, the surest first.

    The next turn of the same conversation is nearly certain, and an exact retry finds its state a
    few tokens before the end as well; so the next turn goes before the last token. Then what other
    conversations share, then what an edit or another question to the same input leaves."""

    NEXT_TURN = 0
    """Where the prompt of the user's next message will first differ."""
    TOOL_TURN = 1
    """Where the prompt with a tool's result will first differ."""
    LAST = 2
    """Length - 1, for an exact retry."""
    SHARED = 3
    """Where another user's first message would begin."""
    TOOLS = 4
    """Where one more tool would be defined."""
    SYSTEM = 5
    """End of the system prompt, start of tool definitions."""
    LAST_USER = 6
    """Start of the user's last message."""
    ATTACHMENT = 7
    """Start and end of an image or another input."""
    GENERATION = 8
    """Before the prompt for an answer."""
    MESSAGE = 9
    """Starts and ends within the history; later ones first."""


@dataclass(frozen=True, slots=True)
class Boundary:
    """A place before character ``character`` of a rendered conversation.

    ``name`` says which and is part of the anchor's hash. Where ``until`` is set, a token that
    never merges is looked for from here to that character, ``within`` so many tokens if that is
    set too; the place is behind the first one, and here if there is none."""

    name: str
    rank: Rank
    kind: AnchorKind
    character: int
    until: int | None = None
    within: int | None = None
