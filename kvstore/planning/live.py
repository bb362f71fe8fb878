"""How much of an answered prompt is alive: can still be the beginning of a later prompt.

Thinking that a template drops from history, empty thinking tags it writes into the last turn only,
an end token it does not repeat: what lies behind the first of these is dead once the conversation
goes on, and can take gigabytes.
"""

from __future__ import annotations

from collections.abc import Sequence

from warmkv.kvstore.planning import probes
from warmkv.kvstore.planning.positions import shared
from warmkv.kvstore.planning.renderer import Message, Messages, Renderer
from warmkv.schema.records import Attachment, Tokens, TokensLike, as_tokens, check_attachments


def live_length(
    renderer: Renderer, messages: Messages, ids: TokensLike, answer: Message, *, attachments: Sequence[Attachment] = (),
    tool_follows: bool | None = None,
) -> int:  # fmt: skip
    """Leading tokens of ``ids`` that a later prompt of the conversation can share.

    ``messages`` are those of the prompt, ``ids`` prompt and answer as they were fed and sampled,
    ``answer`` the assistant's message as the caller's history will hold it. The longer of two
    prompts counts: the user's next message, and the result of a tool in the same turn.
    ``tool_follows`` says whether the latter can happen; None finds out: yes where ``answer`` has
    tool calls; no where it has an empty ``tool_calls``; and where it has no such key (a call may
    hide in its text) where tools are bound or were called before.

    Costs two renderings and tokenizations. Errs by keeping: all of ``ids`` where the template or
    the tokenizer refuses. Raises RecordError for ids or attachments that are none."""
    tokens = as_tokens(ids)
    attached = check_attachments(attachments, len(tokens))
    conversation = [*messages, answer]
    word = probes.stand_in("")
    calls = answer.get("tool_calls")
    if tool_follows is None:
        tool_follows = bool(calls) or ("tool_calls" not in answer and probes.calls_tools(renderer, messages))
    user = _shared(renderer, probes.next_turn(renderer, conversation, word), tokens, attached)
    tool = _shared(renderer, probes.tool_turn(renderer, conversation, word), tokens, attached) if tool_follows else None
    if tool_follows and calls and tool is not None:
        return max(user or 0, tool)  # a call that waits for its result: no user's turn may be possible
    if user is None or (tool_follows and tool is None):
        return len(tokens)
    return max(user, tool or 0)


def _shared(renderer: Renderer, later: str | None, ids: Tokens, attachments: Sequence[Attachment]) -> int | None:
    """Leading ``ids`` that the prompt ``later`` begins with; None where that cannot be told."""
    if later is None:
        return None
    try:
        written, _ = renderer.tokenize(later)
        return shared(as_tokens(written), ids, attachments)
    except Exception:  # noqa: BLE001 - a foreign program; keeping too much is the mistake that costs nothing but room
        return None
