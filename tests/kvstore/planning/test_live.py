"""How much of an answered prompt a later prompt can share; what lies behind is dead."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from warmkv.kvstore.planning import encode, live_length
from warmkv.schema.errors import RecordError
from warmkv.schema.records import Attachment

TOOL = {"type": "function", "function": {"name": "read", "description": "Reads.", "parameters": {"type": "object"}}}
CLOSING = {"chatml": "<|im_end|>", "qwen3": "<|im_end|>", "qwen3-nothink": "<|im_end|>", "llama3": "<|eot_id|>"}
CLOSING |= {"gemma": "<end_of_turn>", "mistral": "</s>", "deepseek-r1": "<｜end▁of▁sentence｜>"}
THOUGHT = "I should look at it from all sides. " * 40
SAYINGS = st.text(st.sampled_from("abc AZ\n.,:{}\"'12中🙂"), min_size=1, max_size=30).map(str.strip).filter(bool)


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def assistant(text: str, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **more}


def call(family: Any) -> list[dict[str, Any]]:
    written: Any = '{"path": "a"}' if family.argument_text else {"path": "a"}
    return [{"id": "abcdefgh1", "type": "function", "function": {"name": "read", "arguments": written}}]


def tokens(renderer: Any, text: str) -> list[int]:
    return [int(item) for item in renderer.tokenize(text)[0]]


def sampled(renderer: Any, messages: list[dict[str, Any]], answer: str) -> tuple[list[int], list[int]]:
    """Prompt and answer ids as a model produces them: the answer tokenized by itself."""
    return [int(item) for item in encode(renderer, messages).ids], tokens(renderer, answer)


def common(one: Any, other: Any) -> int:
    one, other = np.array(one), np.array(other)
    length = min(len(one), len(other))
    return int(np.argmin(np.append(one[:length] == other[:length], False)))


# -- against what really follows --------------------------------------------------------------


@pytest.mark.parametrize("thinks", [False, True])
@pytest.mark.parametrize("name", sorted(CLOSING))
@settings(max_examples=40, deadline=None)
@given(question=SAYINGS, said=SAYINGS, following=SAYINGS)
def test_live_length_is_what_the_next_prompt_shares(
    families: Any, name: str, thinks: bool, question: str, said: str, following: str
) -> None:
    family = families.FAMILIES[name]
    renderer = family.renderer()
    messages = [user(question)]
    opened = encode(renderer, messages).text.endswith("<think>\n")
    thought = ("" if opened else "<think>\n") + THOUGHT + "\n</think>\n\n" if thinks or opened else ""
    lead = " " if name == "mistral" else ""
    prompt, answer = sampled(renderer, messages, f"{lead}{thought}{said}{CLOSING[name]}")
    ids = prompt + answer
    message = assistant(thought + said)
    live = live_length(renderer, messages, ids, message)
    later = encode(renderer, [*messages, message, user(following)]).ids
    assert live == common(ids, later)


@settings(max_examples=40, deadline=None)
@given(question=SAYINGS, output=SAYINGS)
def test_thinking_before_a_call_lives_until_the_next_question(families: Any, question: str, output: str) -> None:
    family = families.FAMILIES["qwen3"]
    renderer = family.renderer([TOOL])
    messages = [user(question)]
    made = assistant("", reasoning_content=THOUGHT.strip(), tool_calls=call(family))
    written = encode(renderer, [*messages, made], generation=False).ids.tolist()
    assert live_length(renderer, messages, written, made) == len(written)
    later = encode(renderer, [*messages, made, {"role": "tool", "content": output}]).ids
    assert common(written, later) == len(written)
    # Where no result can follow, the next question drops the thought.
    plain = encode(renderer, messages).ids
    assert live_length(renderer, messages, written, made, tool_follows=False) < len(plain) + 4


# -- dead tails -------------------------------------------------------------------------------


def test_thinking_tail_is_dead_where_history_drops_it(families: Any) -> None:
    renderer = families.FAMILIES["qwen3"].renderer()
    prompt, answer = sampled(renderer, [user("q")], f"<think>\n{THOUGHT}\n</think>\n\nShort.<|im_end|>")
    live = live_length(renderer, [user("q")], prompt + answer, assistant(f"<think>\n{THOUGHT}\n</think>\n\nShort."))
    assert live == len(prompt) and len(answer) > 300


def test_empty_thinking_tags_of_the_prompt_are_dead(families: Any) -> None:
    renderer = families.FAMILIES["qwen3-nothink"].renderer()
    prompt, answer = sampled(renderer, [user("q")], "Yes.<|im_end|>")
    tags = tokens(renderer, "<think>\n\n</think>\n\n")
    assert prompt[-len(tags) :] == tags
    assert live_length(renderer, [user("q")], prompt + answer, assistant("Yes.")) == len(prompt) - len(tags)


def test_all_is_alive_where_thinking_is_kept(families: Any) -> None:
    renderer = families.FAMILIES["chatml"].renderer()
    said = f"<think>\n{THOUGHT}\n</think>\n\nShort."
    prompt, answer = sampled(renderer, [user("q")], said + "<|im_end|>")
    assert live_length(renderer, [user("q")], prompt + answer, assistant(said)) == len(prompt + answer)


def test_end_token_the_template_does_not_repeat_is_dead(families: Any) -> None:
    renderer = families.FAMILIES["chatml"].renderer()
    prompt, answer = sampled(renderer, [user("q")], "Yes.</s>")
    assert live_length(renderer, [user("q")], prompt + answer, assistant("Yes.")) == len(prompt + answer) - 1


def test_tokens_the_tokenizer_would_not_choose_are_dead(families: Any) -> None:
    """A model may spell a word in pieces; rendered again, it is one token."""
    renderer = families.FAMILIES["chatml"].renderer()
    prompt, _ = sampled(renderer, [user("q")], "")
    whole = tokens(renderer, "The parameters")
    pieces = [*tokens(renderer, "The"), *tokens(renderer, " par"), *tokens(renderer, "ameters")]
    assert pieces != whole
    agreeing = common(pieces, whole)
    assert live_length(renderer, [user("q")], prompt + pieces, assistant("The parameters")) == len(prompt) + agreeing


def test_call_in_other_json_than_the_template_writes_is_dead_from_there(families: Any) -> None:
    family = families.FAMILIES["qwen3"]
    renderer = family.renderer([TOOL])
    prompt, answer = sampled(
        renderer, [user("q")], '<tool_call>\n{"arguments": {"path": "a"}, "name": "read"}\n</tool_call><|im_end|>'
    )
    live = live_length(renderer, [user("q")], prompt + answer, assistant("", tool_calls=call(family)))
    assert len(prompt) < live <= len(prompt) + 4


# -- which prompts can follow -----------------------------------------------------------------


def test_raw_answer_may_hide_a_call_where_tools_are_bound(families: Any) -> None:
    """Nobody has looked for calls in the text yet; after a call the thought would stay alive."""
    family = families.FAMILIES["qwen3"]
    said = f"<think>\n{THOUGHT.strip()}\n</think>\n\nShort."
    for bound, expected in (([TOOL], "all"), (None, "prompt")):
        renderer = family.renderer(bound)
        prompt, answer = sampled(renderer, [user("q")], said + "<|im_end|>")
        ids = prompt + answer
        lengths = {"all": len(ids), "prompt": len(prompt)}
        assert live_length(renderer, [user("q")], ids, assistant(said)) == lengths[expected]
        assert live_length(renderer, [user("q")], ids, assistant(said, tool_calls=[])) == len(prompt)
        assert live_length(renderer, [user("q")], ids, assistant(said), tool_follows=False) == len(prompt)
        assert live_length(renderer, [user("q")], ids, assistant(said), tool_follows=True) == len(ids)


@pytest.mark.parametrize("name", ["mistral", "llama3", "deepseek-r1"])
def test_call_waits_for_its_result_only(families: Any, name: str) -> None:
    family = families.FAMILIES[name]
    renderer = family.renderer([TOOL])
    made = assistant("", tool_calls=call(family))
    written = encode(renderer, [user("q"), made], generation=False).ids.tolist()
    later = encode(renderer, [user("q"), made, {"role": "tool", "tool_call_id": "abcdefgh1", "content": "x"}]).ids
    assert live_length(renderer, [user("q")], written, made) == common(written, later) > 20


def test_the_longer_of_two_prompts_counts(families: Any) -> None:
    """A template that rewrites a call once its result is there: the next question shares more."""

    class Rewriting:
        tools, solid = None, frozenset[int]()

        def text(self, messages: Any, *, generation: bool) -> str:
            called = "called: " if messages[-1]["role"] == "tool" else "calls: "
            return "".join(called + "x;" if item.get("tool_calls") else item["content"] + ";" for item in messages)

        def tokenize(self, text: str) -> Any:
            return np.array([ord(letter) for letter in text]), np.array([(at, at + 1) for at in range(len(text))])

    ids = [ord(letter) for letter in "q;calls: x;"]
    assert live_length(Rewriting(), [user("q")], ids, assistant("", tool_calls=[{"name": "x"}])) == len(ids)


# -- it errs by keeping -----------------------------------------------------------------------


class Refusing:
    def __init__(self, inner: Any, roles: set[str], tools: Any = None, mute: bool = False) -> None:
        self._inner, self._roles, self._mute, self.tools, self.solid = inner, roles, mute, tools, inner.solid

    def text(self, messages: Any, *, generation: bool) -> str:
        if messages[-1]["role"] in self._roles:
            raise ValueError("not that role")
        return str(self._inner.text(messages, generation=generation))

    def tokenize(self, text: str) -> Any:
        if self._mute:
            raise RuntimeError("no tokenizer")
        return self._inner.tokenize(text)


def test_all_is_kept_where_it_cannot_be_told(families: Any) -> None:
    inner = families.FAMILIES["qwen3"].renderer([TOOL])
    ids, _ = sampled(inner, [user("q")], "")
    ids = [*ids, 1, 2, 3]
    answer = assistant("Yes.")
    known = live_length(inner, [user("q")], ids, answer, tool_follows=False)
    assert known < len(ids)
    for refused, tool_follows in (({"user"}, False), ({"user", "tool"}, True), ({"tool"}, True), ({"user"}, True)):
        renderer = Refusing(inner, refused, [TOOL])
        assert live_length(renderer, [user("q")], ids, answer, tool_follows=tool_follows) == len(ids)
    assert live_length(Refusing(inner, set(), mute=True), [user("q")], ids, answer) == len(ids)
    calling = assistant("", tool_calls=call(families.FAMILIES["qwen3"]))
    assert live_length(Refusing(inner, {"tool"}, [TOOL]), [user("q")], ids, calling) == len(ids)
    assert live_length(Refusing(inner, {"user"}, [TOOL]), [user("q")], ids, calling) < len(ids)


def test_images_before_the_answer_are_counted_whole(families: Any) -> None:
    renderer = families.VISION.renderer()
    asked = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What?"}]}]
    marker = families.tokenizer().token_to_id("<|image_pad|>")
    prompt, answer = sampled(renderer, asked, "A cat.<|im_end|>")
    at = prompt.index(marker)
    grown = prompt[:at] + [marker] * 64 + prompt[at + 1 :]
    message = assistant([{"type": "text", "text": "A cat."}])  # type: ignore[arg-type]
    ids, images = grown + answer, [Attachment(at, 64, bytes(32))]
    assert live_length(renderer, asked, ids, message, attachments=images) == len(ids)
    assert live_length(renderer, asked, [*ids[:-1], 7], message, attachments=images) == len(ids) - 1


def test_bad_input_is_a_typed_error(families: Any) -> None:
    renderer = families.FAMILIES["chatml"].renderer()
    with pytest.raises(RecordError):
        live_length(renderer, [user("q")], [], assistant("a"))
    with pytest.raises(RecordError):
        live_length(renderer, [user("q")], [1, 2], assistant("a"), attachments=[Attachment(1, 2, bytes(32))])


def test_conversation_is_not_changed(families: Any) -> None:
    family = families.FAMILIES["qwen3"]
    messages, answer = [user("q")], assistant("", tool_calls=call(family))
    before = json.dumps([messages, answer])
    live_length(family.renderer([TOOL]), messages, [1, 2, 3], answer)
    assert json.dumps([messages, answer]) == before
