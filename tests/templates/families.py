"""Chat templates of public model families, in our own words after their public descriptions, and
a small real tokenizer to render them with. Loaded by path: `families()` of the conftest beside.

Every template is rendered as transformers does it: the same sandbox, the same whitespace rules, the
same filters. The tokenizer is byte-level BPE trained here on text that makes newlines merge, so that
a changed character does change tokens before it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
import numpy as np
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

HERE = Path(__file__).resolve().parent
SPECIAL = (
    "<|im_start|> <|im_end|> <think> </think> <tool_call> </tool_call> <tool_response> </tool_response> "
    "<|begin_of_text|> <|start_header_id|> <|end_header_id|> <|eot_id|> <bos> <start_of_turn> <end_of_turn> "
    "<s> </s> [INST] [/INST] [AVAILABLE_TOOLS] [/AVAILABLE_TOOLS] [TOOL_CALLS] [TOOL_RESULTS] [/TOOL_RESULTS] "
    "<｜begin▁of▁sentence｜> <｜end▁of▁sentence｜> <｜User｜> <｜Assistant｜> <｜tool▁calls▁begin｜> <｜tool▁calls▁end｜> "
    "<｜tool▁call▁begin｜> <｜tool▁call▁end｜> <｜tool▁sep｜> <｜tool▁outputs▁begin｜> <｜tool▁outputs▁end｜> "
    "<｜tool▁output▁begin｜> <｜tool▁output▁end｜> <|vision_start|> <|vision_end|> <|image_pad|>"
).split()
#: Words with a leading space, single digits, punctuation together with newlines behind it, runs of
#: whitespace up to a newline: the pre-tokenizer most current families use.
PIECES = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"

Messages = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Family:
    """One template, what it takes, and its options."""

    name: str
    template: str
    system: bool = True
    tools: bool = False
    argument_text: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)

    def renderer(self, tools: Sequence[Any] | None = None, *, trimmed: bool = False) -> JinjaRenderer:
        return JinjaRenderer(self, tools, trimmed=trimmed)


FAMILIES = {
    family.name: family
    for family in (
        Family("chatml", "chatml"),
        Family("qwen3", "qwen3", tools=True),
        Family("qwen3-nothink", "qwen3", tools=True, options={"enable_thinking": False}),
        Family("llama3", "llama3", tools=True, options={"bos_token": "<|begin_of_text|>"}),
        Family("gemma", "gemma", system=False, options={"bos_token": "<bos>"}),
        Family("mistral", "mistral", tools=True, options={"bos_token": "<s>", "eos_token": "</s>"}),
        Family("deepseek-r1", "deepseek_r1", tools=True, argument_text=True, options={"bos_token": "<｜begin▁of▁sentence｜>"}),
        Family("plain", "plain"),
    )
}
VISION = Family("vision", "vision")


class JinjaRenderer:
    """A Renderer over jinja2 and the small tokenizer. Counts what it renders and tokenizes."""

    def __init__(self, family: Family, tools: Sequence[Any] | None = None, *, trimmed: bool = False) -> None:
        self.family, self._tools, self._trimmed = family, tools, trimmed
        self.rendered: list[int] = []
        self.tokenized: list[int] = []

    @property
    def tools(self) -> Sequence[Any] | None:
        return self._tools

    @property
    def solid(self) -> frozenset[int]:
        return solid_ids()

    def with_tools(self, tools: Sequence[Any] | None) -> JinjaRenderer:
        other = JinjaRenderer(self.family, tools, trimmed=self._trimmed)
        other.rendered, other.tokenized = self.rendered, self.tokenized
        return other

    def text(self, messages: Messages, *, generation: bool) -> str:
        self.rendered.append(len(messages))
        return compiled(self.family.template).render(
            messages=list(messages), tools=self._tools, add_generation_prompt=generation, **self.family.options
        )

    def tokenize(self, text: str) -> tuple[np.ndarray, np.ndarray]:
        found = tokenizer(self._trimmed).encode(text, add_special_tokens=False)
        self.tokenized.append(len(found.ids))
        return np.array(found.ids, np.uint32), np.array(found.offsets, np.int64).reshape(-1, 2)


@lru_cache
def compiled(name: str) -> jinja2.Template:
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols])

    def refuse(message: str) -> None:
        raise jinja2.exceptions.TemplateError(message)

    def tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent)

    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = refuse
    return environment.from_string((HERE / f"{name}.jinja").read_text())


@lru_cache
def tokenizer(trimmed: bool = False) -> Tokenizer:
    """1,200 tokens; ``trimmed`` leaves spaces out of offsets, as several families' tokenizers do."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECES), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    made.decoder = decoders.ByteLevel()
    if trimmed:
        made.post_processor = processors.ByteLevel(trim_offsets=True)
    trainer = trainers.BpeTrainer(
        vocab_size=1200, special_tokens=SPECIAL, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    made.train_from_iterator(corpus(), trainer)
    return made


@lru_cache
def solid_ids() -> frozenset[int]:
    return frozenset(tokenizer().token_to_id(token) for token in SPECIAL)


def corpus() -> list[str]:
    """Text whose newlines, quotes and brackets want to merge with what stands beside them."""
    words = "system user assistant model tool name arguments parameters type object string properties result file line"
    texts = [f"{word}\n\n{word}.\n{word}:\n\n\n{word}!\n  {word}\n\t{word}" for word in words.split()]
    texts += [json.dumps({"type": "function", "function": {"name": word, "parameters": {}}}) for word in words.split()]
    texts += [json.dumps([{"path": word, "line": 3}, {"ok": True}], indent=4) for word in words.split()]
    for path in sorted(HERE.glob("*.jinja")):
        texts.append(path.read_text())
    texts.append(Path(__file__).read_text())
    return texts * 3
