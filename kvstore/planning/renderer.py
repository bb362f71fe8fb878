"""What planning needs of a chat template and a tokenizer, and how a failing one is asked."""

from __future__ import annotations

import logging
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from warmkv.schema.errors import RecordError
from warmkv.schema.records import Tokens, as_tokens

#: A message as chat templates take it: role, content (text, or a list of parts), tool_calls, ...
Message: TypeAlias = Mapping[str, object]
Messages: TypeAlias = Sequence[Message]
Tools: TypeAlias = Sequence[object]
#: Shape (tokens, 2): first character of each token and the one behind its last.
Offsets: TypeAlias = npt.NDArray[np.int64]

log = logging.getLogger("warmkv.planning")


class Renderer(Protocol):
    """A chat template and a tokenizer, with the tools and template options of one request bound in.

    **Threading:** one thread at a time."""

    @property
    def tools(self) -> Tools | None:
        """The tools of the request, in the order they are rendered."""
        ...

    @property
    def solid(self) -> Container[int]:
        """Ids the tokenizer cuts out of the text before it merges anything (added and special
        tokens): text behind one never changes the tokens before it. May be empty; then every
        boundary gets a step before it."""
        ...

    def with_tools(self, tools: Tools | None) -> Renderer:
        """The same template and options with other tools; raises nothing."""
        ...

    def text(self, messages: Messages, *, generation: bool) -> str:
        """The conversation as text, with the prompt for an answer where ``generation`` is true.
        Raises whatever the template raises for shapes it does not take. ``messages`` may hold
        messages made up for planning, which are never fed to a model."""
        ...

    def tokenize(self, text: str) -> tuple[Tokens, Offsets]:
        """Ids of ``text`` and the characters of each, as a prompt is tokenized. Offsets count
        characters, not bytes; tokens that together make up one character carry that character
        each, tokens that stand for no text carry (0, 0)."""
        ...


@dataclass(frozen=True, slots=True)
class Encoded:
    """A rendered conversation: its text, ``ids`` of shape (n,), ``offsets`` of shape (n, 2)."""

    text: str
    ids: Tokens
    offsets: Offsets


def encode(renderer: Renderer, messages: Messages, *, generation: bool = True) -> Encoded:
    """Render and tokenize ``messages``. Raises what the template raises, and RecordError for
    offsets that do not fit the ids."""
    text = renderer.text(messages, generation=generation)
    return _encoded(text, *renderer.tokenize(text))


def _encoded(text: str, ids: Tokens, offsets: Offsets) -> Encoded:
    tokens, table = as_tokens(ids), np.asarray(offsets, np.int64)
    if table.shape != (len(tokens), 2):
        raise RecordError(f"offsets of {len(tokens)} tokens have shape {table.shape}, expected ({len(tokens)}, 2)")
    return Encoded(text, tokens, table)


def attempt(renderer: Renderer, messages: Messages, *, generation: bool, tools: bool = True) -> str | None:
    """The text of ``messages``, or None where the template refuses them: roles must alternate, no
    system role, no tools. Whatever it raises, a request must not fail for a question about it.
    Without ``tools``, none are bound."""
    try:
        asked = renderer if tools else renderer.with_tools(None)
        return asked.text(messages, generation=generation)
    except Exception as exc:  # noqa: BLE001 - a foreign program; there is no list of what it raises
        log.debug("the template refuses a shape of %d messages: %s", len(messages), exc)
        return None


def attempt_encode(renderer: Renderer, messages: Messages, *, generation: bool) -> Encoded | None:
    """As `encode`, or None where the template or the tokenizer refuses, or leaves nothing."""
    text = attempt(renderer, messages, generation=generation)
    if not text:
        return None
    try:
        ids, offsets = renderer.tokenize(text)
    except Exception as exc:  # noqa: BLE001 - as above
        log.debug("the tokenizer refuses %d messages: %s", len(messages), exc)
        return None
    return _encoded(text, ids, offsets) if len(ids) else None
