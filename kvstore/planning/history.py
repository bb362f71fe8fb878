"""Boundaries within a conversation: around what each message says, thinks and calls."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from warmkv.kvstore.planning.positions import STEP
from warmkv.kvstore.planning.probes import SYSTEM_ROLES, is_tool
from warmkv.kvstore.planning.ranks import Boundary, Rank
from warmkv.kvstore.planning.renderer import Message, Messages
from warmkv.kvstore.planning.spans import Part, Span
from warmkv.schema.records import AnchorKind


def boundaries(messages: Messages, found: Sequence[Span], text: str) -> Iterator[Boundary]:
    """Start and end of the strings of each message, as they were ``found`` in ``text``.

    An end is behind the first token that never merges (a closing tag, as a rule): a few tokens on
    at most, or anywhere before the next string behind a call, whose arguments are no strings here."""
    last_user = max((index for index, item in enumerate(messages) if item.get("role") == "user"), default=-1)
    for at, span in enumerate(found):
        message = messages[span.message]
        kind, call = _kind(message, span.part), span.part is Part.CALL
        first = at == 0 or found[at - 1].message != span.message
        if first or span.part is not Part.CONTENT:
            latest = first and span.message == last_user
            yield Boundary(f"{span.part.value} start", Rank.LAST_USER if latest else Rank.MESSAGE, kind, span.start)
        following = found[at + 1] if at + 1 < len(found) else None
        last = following is None or following.message != span.message
        if span.end is not None and (last or not call):
            rank = Rank.MESSAGE
            if message.get("role") in SYSTEM_ROLES:  # clients append to it: notes, the date
                rank = Rank.SYSTEM
                yield Boundary("system", rank, kind, span.end)
            until = len(text) if following is None else following.start
            yield Boundary(f"{span.part.value} end", rank, kind, span.end, until, None if call else STEP)


def _kind(message: Message, part: Part) -> AnchorKind:
    if part is Part.THINKING:
        return AnchorKind.THINKING
    if part is Part.CALL:
        return AnchorKind.TOOL_CALL
    if message.get("role") in SYSTEM_ROLES:
        return AnchorKind.SYSTEM_PROMPT
    return AnchorKind.TOOL_OUTPUT if is_tool(message) else AnchorKind.TURN
