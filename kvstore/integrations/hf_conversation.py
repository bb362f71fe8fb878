"""One request's conversation: where its prompt is worth a state, and how much of its answer lives on."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

from transformers import PreTrainedTokenizerBase

from warmkv.kvstore.integrations.hf_request import Messages
from warmkv.kvstore.integrations.hf_template import TemplateRenderer
from warmkv.kvstore.planning import live_length, plan
from warmkv.schema.records import Anchor, Tokens

log = logging.getLogger("warmkv.transformers")


class Conversation:
    """Messages with the tools and template options they are rendered with.

    What planning cannot find out is not planned, and nothing of an answer is given up then: a
    template that fails here never fails a request. **Threading:** one thread at a time."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, messages: Messages, tools: Sequence[object] | None,
        template: Mapping[str, object],
    ) -> None:  # fmt: skip
        self._messages = messages
        self._renderer = TemplateRenderer(tokenizer, tools, template)

    def anchors(self, tokens: Tokens, usable: int, limit: int) -> tuple[Anchor, ...]:
        """At most ``limit`` named positions of the prompt ``tokens`` behind ``usable`` at which to
        keep state, the most useful ones."""
        try:
            return plan(self._renderer, self._messages, tokens, beyond=usable).best(limit)
        except Exception as exc:  # noqa: BLE001 - planning is a service, not a condition
            log.debug("no anchors were planned: %s: %s", type(exc).__name__, exc)
            return ()

    def live(self, sequence: Tokens, text: str) -> int:
        """Leading tokens of prompt and answer that the conversation can come back to; ``text`` is
        the answer as the caller's history will hold it."""
        try:
            return live_length(self._renderer, self._messages, sequence, {"role": "assistant", "content": text})
        except Exception as exc:  # noqa: BLE001 - as above
            log.debug("all of the answer is kept: %s: %s", type(exc).__name__, exc)
            return len(sequence)
