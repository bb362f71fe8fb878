"""What if? Renderings of conversations that did not happen, compared with the one that did.

The furthest character that the prompt shares with what a later prompt would look like is found
without knowing why they differ: a template that drops thinking from history, writes empty thinking
tags into the last turn only or moves tool definitions shows it here. Each question is one
rendering; one that the template refuses has no answer.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from warmkv.kvstore.planning.ranks import Boundary, Rank
from warmkv.kvstore.planning.renderer import Message, Messages, Renderer, attempt
from warmkv.schema.records import AnchorKind

SYSTEM_ROLES = frozenset({"system", "developer"})
TOOL_ROLES = frozenset({"tool", "ipython", "function"})
#: Some templates take call ids of nine letters and digits only.
_CALL_ID = "call00001"
#: Characters of a later prompt that must be found again to say where a dropped stretch ends.
_RESUMING = 24


def common_prefix(one: str, other: str) -> int:
    """Characters two texts share from the start on; slices are compared, not characters."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def stand_in(text: str) -> str:
    """A word that ``text`` does not contain, to stand for what is not known yet."""
    return next(word for count in range(len(text) + 2) if (word := f"Zq{count}xj") not in text)


def boundaries(renderer: Renderer, messages: Messages, text: str, *, generation: bool) -> Iterator[Boundary]:
    """Boundaries of ``text``, the rendering of ``messages``, found by what-if renderings: at most
    seven, each of at most this conversation and two short messages."""
    word = stand_in(text)
    yield from _next_turn(renderer, messages, text, word)
    if calls_tools(renderer, messages):
        yield from _tool_turn(renderer, messages, text, word)
    yield from _shared(renderer, messages, text, word)
    yield from _tool_definitions(renderer, messages, text, word)
    if generation:
        without = attempt(renderer, messages, generation=False)
        if without is not None:
            yield Boundary("generation", Rank.GENERATION, AnchorKind.TURN, common_prefix(text, without))


def calls_tools(renderer: Renderer, messages: Messages) -> bool:
    """Whether a tool's result may come next: tools are bound, or were called before."""
    return bool(renderer.tools) or any(is_tool(item) or item.get("tool_calls") for item in messages)


def is_tool(message: Message) -> bool:
    return message.get("role") in TOOL_ROLES or "tool_call_id" in message


def next_turn(renderer: Renderer, messages: Messages, word: str) -> str | None:
    """The prompt of the user's next message, which is ``word``, to a conversation that ends with
    an answer; None where the template refuses it."""
    return attempt(renderer, [*messages, _spoken("user", word, messages)], generation=True)


def tool_turn(renderer: Renderer, messages: Messages, word: str) -> str | None:
    """The prompt with ``word`` as the result of the call that ends ``messages``."""
    return attempt(renderer, [*messages, *_results(messages, word)], generation=True)


# -- one question each -------------------------------------------------------------------------


def _next_turn(renderer: Renderer, messages: Messages, text: str, word: str) -> Iterator[Boundary]:
    answered = [*messages] if _ends_with_answer(messages) else [*messages, _spoken("assistant", word, messages)]
    later = next_turn(renderer, answered, word)
    if later is None:
        return
    parted = _parted(text, later, word)
    yield Boundary("next turn", Rank.NEXT_TURN, AnchorKind.TURN, parted)
    # What the next turn drops from the middle (thinking, as a rule) ends where its text goes on.
    behind = later[parted : parted + _RESUMING]
    dropped = text.find(behind, parted) if word not in behind and len(behind) == _RESUMING else -1
    if dropped > parted:
        yield Boundary("dropped start", Rank.MESSAGE, AnchorKind.THINKING, parted)
        yield Boundary("dropped end", Rank.MESSAGE, AnchorKind.THINKING, dropped)


def _tool_turn(renderer: Renderer, messages: Messages, text: str, word: str) -> Iterator[Boundary]:
    if _ends_with_answer(messages):
        called: list[Messages] = [messages]
    else:
        called = [[*messages, _call(word, arguments)] for arguments in _argument_shapes(messages)]
    for conversation in called:
        later = tool_turn(renderer, conversation, word)
        if later is not None:
            yield Boundary("tool turn", Rank.TOOL_TURN, AnchorKind.TOOL_CALL, _parted(text, later, word))
            return


def _shared(renderer: Renderer, messages: Messages, text: str, word: str) -> Iterator[Boundary]:
    first = next((at for at, item in enumerate(messages) if item.get("role") not in SYSTEM_ROLES), None)
    if first is None:
        return
    other = attempt(renderer, [*messages[:first], _spoken("user", word, messages[first : first + 1])], generation=True)
    if other is not None:
        yield Boundary("shared", Rank.SHARED, AnchorKind.SYSTEM_PROMPT, _parted(text, other, word))


def _tool_definitions(renderer: Renderer, messages: Messages, text: str, word: str) -> Iterator[Boundary]:
    tools = renderer.tools
    if not tools:
        return
    more = attempt(renderer.with_tools([*tools, _another(tools[-1], word)]), messages, generation=True)
    if more is not None:
        yield Boundary("tools end", Rank.TOOLS, AnchorKind.SYSTEM_PROMPT, _parted(text, more, word))
    none = attempt(renderer, messages, generation=True, tools=False)
    if none is not None:
        yield Boundary("tools start", Rank.SYSTEM, AnchorKind.SYSTEM_PROMPT, common_prefix(text, none))


def _parted(text: str, later: str, word: str) -> int:
    """Where two renderings part, at the latest where the made-up ``word`` begins."""
    begins = later.find(word)
    parted = common_prefix(text, later)
    return parted if begins < 0 else min(parted, begins)


# -- messages made up -------------------------------------------------------------------------


def _ends_with_answer(messages: Messages) -> bool:
    return bool(messages) and messages[-1].get("role") == "assistant"


def _spoken(role: str, word: str, like: Messages) -> Message:
    """A message that says ``word``, with content of the shape that ``like`` uses."""
    parts = any(isinstance(item.get("content"), list) for item in like)
    return {"role": role, "content": [{"type": "text", "text": word}] if parts else word}


def _call(word: str, arguments: object) -> Message:
    function = {"name": word, "arguments": arguments}
    return {"role": "assistant", "content": "", "tool_calls": [{"id": _CALL_ID, "type": "function", "function": function}]}


def _argument_shapes(messages: Messages) -> tuple[object, ...]:
    """Arguments as templates take them, a mapping or its JSON; the shape in use first."""
    written = any(isinstance(_function(call).get("arguments"), str) for item in messages for call in _calls(item))
    return ("{}", {}) if written else ({}, "{}")


def _results(messages: Messages, word: str) -> list[Message]:
    """A result for each call of the last message, or one without a call."""
    calls = _calls(messages[-1]) if messages else []
    results: list[Message] = []
    for call in calls or [{"id": _CALL_ID}]:
        name = _function(call).get("name", word)
        results.append({"role": "tool", "tool_call_id": call.get("id", _CALL_ID), "name": name, "content": word})
    return results


def _calls(message: Message) -> list[Mapping[str, object]]:
    calls = message.get("tool_calls")
    return [call for call in calls if isinstance(call, Mapping)] if isinstance(calls, Sequence) else []


def _function(call: Mapping[str, object]) -> Mapping[str, object]:
    function = call.get("function", call)
    return function if isinstance(function, Mapping) else {}


def _another(tool: object, word: str) -> object:
    """One more tool, of the shape of ``tool``, called ``word``."""
    parameters = {"type": "object", "properties": {}}
    if isinstance(tool, Mapping) and "function" not in tool and "name" in tool:
        return {**tool, "name": word}
    return {"type": "function", "function": {"name": word, "description": word, "parameters": parameters}}
