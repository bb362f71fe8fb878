"""A tokenizer's chat template as planning asks for it: text, and tokens with their characters."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from typing import cast

import numpy as np
from transformers import PreTrainedTokenizerBase

from warmkv.kvstore.planning import Messages, Offsets, Tools
from warmkv.schema.errors import UnsupportedError
from warmkv.schema.records import Tokens, as_tokens


class TemplateRenderer:
    """Implements `planning.Renderer` for one request: ``tools`` and ``template`` options bound in.

    Tokens with offsets need a fast tokenizer; others raise UnsupportedError, and planning does
    without. **Threading:** one thread at a time."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, tools: Sequence[object] | None, template: Mapping[str, object]
    ) -> None:
        self._tokenizer = tokenizer
        self._tools = None if tools is None else list(tools)
        self._template = {name: value for name, value in template.items() if name != "add_generation_prompt"}
        added = cast(Mapping[int, object], getattr(tokenizer, "added_tokens_decoder", {}))
        self._solid = frozenset(added)

    @property
    def tools(self) -> Tools | None:
        return self._tools

    @property
    def solid(self) -> Container[int]:
        return self._solid

    def with_tools(self, tools: Tools | None) -> TemplateRenderer:
        return TemplateRenderer(self._tokenizer, tools, self._template)

    def text(self, messages: Messages, *, generation: bool) -> str:
        apply = cast(Callable[..., str], self._tokenizer.apply_chat_template)
        options = {**self._template, "tokenize": False, "add_generation_prompt": generation}
        return apply([dict(message) for message in messages], tools=self._tools, **options)

    def tokenize(self, text: str) -> tuple[Tokens, Offsets]:
        if not getattr(self._tokenizer, "is_fast", False):
            raise UnsupportedError("this tokenizer does not tell which characters a token stands for")
        encode = cast(Callable[..., Mapping[str, Sequence[int]]], self._tokenizer)
        found = encode(text, add_special_tokens=False, return_offsets_mapping=True)
        return as_tokens(np.asarray(found["input_ids"])), np.asarray(found["offset_mapping"], np.int64).reshape(-1, 2)
