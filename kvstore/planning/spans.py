"""Where every string of a conversation lies in its rendered text, found with one more rendering.

All strings that a client or a model wrote (content, thinking, names of called tools) are replaced
by marks at once. What the template writes between two marks is its own, and is looked for in the
real text between the real strings. A string the template changed (thinking cut out of it, say) has
a start and no end, and what follows is searched for; one that cannot be found is left out.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from warmkv.kvstore.planning.probes import stand_in
from warmkv.kvstore.planning.renderer import Message, Messages, Renderer, attempt

#: Names under which messages carry what a model thought before it answered.
THINKING_FIELDS = ("reasoning_content", "reasoning", "thinking")
#: Characters of a string that must be found again, behind the template's own, where the place is unknown.
_HEAD = 32


class Part(Enum):
    CONTENT = "content"
    THINKING = "thinking"
    CALL = "call"


@dataclass(frozen=True, slots=True)
class Span:
    """Characters [start, end) hold one string of message number ``message``; ``end`` is None
    where the template wrote something else than the string."""

    message: int
    part: Part
    start: int
    end: int | None


@dataclass(frozen=True, slots=True)
class _String:
    message: int
    part: Part
    value: str


@dataclass(frozen=True, slots=True)
class _Piece:
    """The template's own ``before`` and ``behind`` one string."""

    before: str
    string: _String
    behind: str


def spans(renderer: Renderer, messages: Messages, text: str, *, generation: bool) -> list[Span]:
    """Spans of the strings of ``messages`` in ``text``, their rendering, in the order of the text.

    One rendering; empty where the template refuses the marks."""
    word = stand_in(text)
    strings: list[_String] = []
    marked = [_marked(item, index, word, strings) for index, item in enumerate(messages)]
    pattern = re.compile(f"{word}n([0-9]+)z")
    rendered = attempt(renderer, marked, generation=generation)
    return [] if rendered is None else list(_located(text, _pieces(rendered, pattern, strings)))


# -- marks ------------------------------------------------------------------------------------


def _marked(message: Message, index: int, word: str, strings: list[_String]) -> Message:
    """``message`` with a mark for each of its strings, which are appended to ``strings``.

    Beside calls, templates ask whether there is content at all: blank content stays blank there."""
    called = bool(message.get("tool_calls"))

    def mark(value: object, part: Part) -> object:
        if not isinstance(value, str) or (called and not value.strip()):
            return value
        strings.append(_String(index, part, value))
        return f"{word}n{len(strings) - 1}z"

    def inside(part: object) -> object:
        if not isinstance(part, Mapping):
            return part
        of = {"text": Part.CONTENT, "thinking": Part.THINKING}
        return {key: mark(value, of[key]) if key in of else value for key, value in part.items()}

    def call(made: object) -> object:
        if not isinstance(made, Mapping):
            return made
        if isinstance(made.get("function"), Mapping):
            return {**made, "function": call(made["function"])}
        return {key: mark(value, Part.CALL) if key == "name" else value for key, value in made.items()}

    out = dict(message)
    for name in THINKING_FIELDS:
        if name in out:
            out[name] = mark(out[name], Part.THINKING)
    content, calls = out.get("content"), out.get("tool_calls")
    if isinstance(content, list):
        out["content"] = [inside(part) for part in content]
    elif "content" in out:
        out["content"] = mark(content, Part.CONTENT)
    if isinstance(calls, list):
        out["tool_calls"] = [call(made) for made in calls]
    return out


def _pieces(rendered: str, pattern: re.Pattern[str], strings: Sequence[_String]) -> list[_Piece]:
    marks = [item for item in pattern.finditer(rendered) if int(item[1]) < len(strings)]
    edges = [0, *(item.end() for item in marks)]
    own = [rendered[begin : item.start()] for begin, item in zip(edges, marks, strict=False)] + [rendered[edges[-1] :]]
    return [_Piece(own[at], strings[int(item[1])], own[at + 1]) for at, item in enumerate(marks)]


# -- the real text ----------------------------------------------------------------------------


def _located(text: str, pieces: Sequence[_Piece]) -> Iterator[Span]:
    at, sure = 0, True
    for piece in pieces:
        start = _start(text, at, sure, piece)
        if start is None:
            sure = False
            continue
        end, sure = _end(text, start, piece)
        at = start if end is None else end
        yield Span(piece.string.message, piece.string.part, start, end)


def _start(text: str, at: int, sure: bool, piece: _Piece) -> int | None:
    """Where the string of ``piece`` begins: right here, or else at the next place that looks alike."""
    if sure and text.startswith(piece.before, at):
        return at + len(piece.before)
    found = text.find(piece.before + piece.string.value.strip()[:_HEAD], at)
    return None if found < 0 else found + len(piece.before)


def _end(text: str, start: int, piece: _Piece) -> tuple[int | None, bool]:
    """Where the string ends, and whether the template's own goes on from there as expected."""
    written = [form for form in _forms(piece.string.value) if text.startswith(form, start)]
    for form in written:
        if text.startswith(piece.behind, start + len(form)):
            return start + len(form), True
    return (start + len(written[0]), False) if written else (None, False)


def _forms(value: str) -> Iterator[str]:
    """What templates make of a string: itself, trimmed, or inside JSON."""
    yield from dict.fromkeys((value, value.rstrip(), value.lstrip(), value.strip()))
    yield json.dumps(value, ensure_ascii=False)[1:-1]
