"""Plans against what really happens next: the same family's later prompts, token by token.

The oracle is the common prefix of two prompts' ids. Nothing of the planner is in it.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from warmkv.kvstore.planning import STEP, Plan, Rank, encode, plan
from warmkv.schema.records import Attachment

NAMES = ("chatml", "qwen3", "qwen3-nothink", "llama3", "gemma", "mistral", "deepseek-r1", "plain")
WITH_TOOLS = ("qwen3", "qwen3-nothink", "llama3", "mistral", "deepseek-r1")
#: Two characters may share their first three bytes, and bytes are tokens at worst.
BYTES = 3
SAYINGS = st.text(st.sampled_from("abc AZ\n\n\t.,:;<>{}[]\"'/120中文é🙂🙃"), max_size=40)
TALKS = st.lists(st.tuples(SAYINGS, SAYINGS), max_size=4)
SYSTEM = "You are a careful assistant on a small machine. Answer in one line; do not guess. Numbers have units."


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def assistant(text: str, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **more}


def history(family: Any, talk: list[tuple[str, str]], question: str, system: str = SYSTEM) -> list[dict[str, Any]]:
    messages = [{"role": "system", "content": system}] if family.system else []
    for asked, answered in talk:
        messages += [user(asked), assistant(answered)]
    return [*messages, user(question)]


def tools(*names: str) -> list[dict[str, Any]]:
    made = []
    for name in names:
        parameters = {"type": "object", "properties": {"path": {"type": "string"}, "line": {"type": "integer"}}}
        made.append({"type": "function", "function": {"name": name, "description": f"Can {name}.", "parameters": parameters}})
    return made


def calling(family: Any, name: str, arguments: dict[str, Any], id_: str = "abcdefgh1") -> list[dict[str, Any]]:
    written = json.dumps(arguments) if family.argument_text else arguments
    return [{"id": id_, "type": "function", "function": {"name": name, "arguments": written}}]


def result(text: str, id_: str = "abcdefgh1") -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": id_, "content": text}


def ids_of(renderer: Any, messages: list[dict[str, Any]]) -> np.ndarray:
    return encode(renderer, messages).ids


def common(one: np.ndarray, other: np.ndarray) -> int:
    length = min(len(one), len(other))
    return int(np.argmin(np.append(one[:length] == other[:length], False)))


def planned(renderer: Any, messages: list[dict[str, Any]]) -> Plan:
    return plan(renderer, messages, ids_of(renderer, messages))


def settled(found: Plan, *ranks: Rank) -> list[int]:
    return [item.anchor.position for item in found.items if item.settled and item.rank in ranks]


def best_before(found: Plan, position: int) -> int:
    return max((item.anchor.position for item in found.items if item.anchor.position <= position), default=0)


# -- the system prompt of many users ----------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=50, deadline=None)
@given(one=SAYINGS, other=SAYINGS, system=SAYINGS)
def test_shared_anchor_is_before_every_divergence_of_users_and_close_to_it(
    families: Any, name: str, one: str, other: str, system: str
) -> None:
    family = families.FAMILIES[name]
    renderer = family.renderer(tools("read", "list") if family.tools else None)
    prompts = [history(family, [], text, system=SYSTEM + system) for text in (one, other)]
    parted = common(*(ids_of(renderer, messages) for messages in prompts))
    for messages in prompts:
        shared = served_by(planned(renderer, messages), Rank.SHARED)
        assert shared <= parted
        if one.strip()[:1] != other.strip()[:1]:
            assert parted - shared <= STEP + BYTES


def served_by(found: Plan, rank: Rank) -> int:
    """The settled position of a rank, or the better-ranked one in its place, or 0 at the very start."""
    exact = [item for item in found.items if item.rank == rank]
    if exact:
        return min(item.anchor.position for item in exact)
    return 0


@pytest.mark.parametrize("name", [name for name in NAMES if name != "gemma"])
def test_twenty_users_of_one_system_prompt(families: Any, name: str) -> None:
    """Tails of any length: the state kept for the first user serves the nineteen others."""
    family = families.FAMILIES[name]
    renderer = family.renderer(tools("read") if family.tools else None)
    asked = [f"{chr(65 + at)}{' what about this' * (4**at % 997)}?" for at in range(20)]
    prompts = [history(family, [], text, system=SYSTEM * 20) for text in asked]
    first = ids_of(renderer, prompts[0])
    kept = [anchor.position for anchor in planned(renderer, prompts[0]).best(3)]
    for messages in prompts[1:]:
        parted = common(first, ids_of(renderer, messages))
        assert parted > 400
        assert parted - max(position for position in kept if position <= parted) <= STEP


# -- the next turn ----------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=50, deadline=None)
@given(talk=TALKS, question=SAYINGS, answer=SAYINGS.filter(str.strip), following=SAYINGS)
def test_next_turn_anchor_is_before_the_real_divergence_and_close_to_it(
    families: Any, name: str, talk: list[tuple[str, str]], question: str, answer: str, following: str
) -> None:
    family = families.FAMILIES[name]
    for bound in (None, tools("read")) if family.tools else (None,):
        renderer = family.renderer(bound)
        messages = history(family, talk, question)
        later = [*messages, assistant(answer), user(following)]
        ids = ids_of(renderer, messages)
        parted = common(ids, ids_of(renderer, later))
        found = plan(renderer, messages, ids)
        anchors = settled(found, Rank.NEXT_TURN)
        if anchors:
            assert len(anchors) == 1 and anchors[0] <= parted <= anchors[0] + STEP + BYTES
        else:
            assert parted <= STEP  # a template that moves its tools from right behind the start


@pytest.mark.parametrize("name", WITH_TOOLS)
@settings(max_examples=30, deadline=None)
@given(talk=TALKS, question=SAYINGS, output=SAYINGS, thought=st.one_of(st.none(), SAYINGS.filter(str.strip)))
def test_tool_turn_anchor_is_before_the_real_divergence_and_close_to_it(
    families: Any, name: str, talk: list[tuple[str, str]], question: str, output: str, thought: str | None
) -> None:
    family = families.FAMILIES[name]
    renderer = family.renderer(tools("read", "list"))
    messages = history(family, talk, question)
    reasoning = {} if thought is None else {"reasoning_content": thought}
    for step in range(3):
        ids = ids_of(renderer, messages)
        call = calling(family, "read", {"path": "a.txt", "line": step})
        later = [*messages, assistant("", tool_calls=call, **reasoning), result(output)]
        parted = common(ids, ids_of(renderer, later))
        anchors = settled(plan(renderer, messages, ids), Rank.TOOL_TURN, Rank.NEXT_TURN)
        close = [position for position in anchors if position <= parted <= position + STEP + BYTES]
        assert close, (anchors, parted)
        messages = later


@pytest.mark.parametrize("inline", [True, False])
@pytest.mark.parametrize("name", ["qwen3", "qwen3-nothink"])
@settings(max_examples=40, deadline=None)
@given(question=SAYINGS, output=SAYINGS, thought=SAYINGS.filter(str.strip), following=SAYINGS)
def test_thinking_dropped_at_the_next_question_leaves_an_anchor_before_it(
    families: Any, name: str, inline: bool, question: str, output: str, thought: str, following: str
) -> None:
    """Three calls with thoughts of one turn: the next question drops all three thoughts."""
    family = families.FAMILIES[name]
    renderer = family.renderer(tools("read"))
    messages = history(family, [], question)
    for step in range(3):
        call = calling(family, "read", {"line": step})
        thinking = assistant(f"<think>\n{thought}\n</think>\n\n", tool_calls=call)
        messages += [thinking if inline else assistant("", reasoning_content=thought, tool_calls=call), result(output)]
    later = [*messages, assistant("Done."), user(following)]
    ids = ids_of(renderer, messages)
    parted = common(ids, ids_of(renderer, later))
    first_answer = common(ids, ids_of(renderer, history(family, [], question)))
    assert first_answer - 1 <= parted <= first_answer + 1
    found = plan(renderer, messages, ids)
    assert [item for item in settled(found, Rank.NEXT_TURN) if item <= parted <= item + STEP]
    dropped = [item.name for item in found.items if item.name.endswith("dropped end")]
    assert dropped


# -- what agents change -----------------------------------------------------------------------


def turned(value: Any) -> Any:
    """The same JSON with the keys of all mappings in the opposite order."""
    if isinstance(value, dict):
        return {key: turned(value[key]) for key in reversed(value)}
    return [turned(item) for item in value] if isinstance(value, list) else value


def before(text: str, offsets: np.ndarray, mark: str, start: int = 0) -> int:
    """Tokens before the first place of ``mark``."""
    return int(np.count_nonzero(offsets[:, 1] <= text.index(mark, start)))


@pytest.mark.parametrize("name", ["qwen3", "llama3", "mistral"])
def test_turned_tool_schema_keeps_what_lies_before_the_tools(families: Any, name: str) -> None:
    family = families.FAMILIES[name]
    made = tools("read", "list")
    renderer, other = family.renderer(made), family.renderer([turned(made[0]), made[1]])
    messages = history(family, [], "What is in a.txt?")
    prompt = encode(renderer, messages)
    parted = common(prompt.ids, ids_of(other, messages))
    tools_begin = before(prompt.text, prompt.offsets, {"qwen3": "# Tools", "llama3": "{\n", "mistral": "[AVAILABLE"}[name])
    assert tools_begin <= parted
    reached = best_before(plan(renderer, messages, prompt.ids), parted)
    # The last boundary before the change: the end of the system prompt where tools follow it.
    boundary = {"qwen3": tools_begin, "mistral": tools_begin}.get(name)
    if boundary is None:
        boundary = before(prompt.text, prompt.offsets, "<|start_header_id|>user")
    assert boundary - reached <= STEP


@pytest.mark.parametrize("name", ["qwen3", "llama3", "mistral", "deepseek-r1"])
@settings(max_examples=30, deadline=None)
@given(talk=TALKS, question=SAYINGS, output=SAYINGS)
def test_turned_call_arguments_keep_what_lies_before_the_call(
    families: Any, name: str, talk: list[tuple[str, str]], question: str, output: str
) -> None:
    family = families.FAMILIES[name]
    renderer = family.renderer(tools("read"))
    arguments = {"path": "some/where/a.txt", "line": 12}
    asked = history(family, talk, question)
    one, other = (
        [*asked, assistant("", tool_calls=calling(family, "read", made)), result(output)]
        for made in (arguments, turned(arguments))
    )
    prompt = encode(renderer, one)
    parted = common(prompt.ids, ids_of(renderer, other))
    opening = {
        "qwen3": "<tool_call>\n{",
        "llama3": '{"name": "read", "par',
        "mistral": "[TOOL_CALLS]",
        "deepseek-r1": "<｜tool▁calls▁begin",
    }
    call = before(prompt.text, prompt.offsets, opening[name], len(renderer.text(asked, generation=False)) - 5)
    assert call <= parted < len(prompt.ids)
    assert call - best_before(plan(renderer, one, prompt.ids), parted) <= STEP


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=40, deadline=None)
@given(talk=st.lists(st.tuples(SAYINGS, SAYINGS), min_size=3, max_size=5), edited=SAYINGS, data=st.data())
def test_an_edited_message_leaves_an_anchor_before_it(
    families: Any, name: str, talk: list[tuple[str, str]], edited: str, data: st.DataObject
) -> None:
    family = families.FAMILIES[name]
    renderer = family.renderer()
    messages = history(family, talk, "And now?")
    at = data.draw(st.integers(1 if family.system else 0, len(messages) - 1))
    changed = [*messages[:at], {**messages[at], "content": edited}, *messages[at + 1 :]]
    ids = ids_of(renderer, messages)
    parted = common(ids, ids_of(renderer, changed))
    # By construction: the prompt that ends just before the edited message is shared.
    kept = common(ids, ids_of(renderer, changed[:at])) if at else 0
    reached = best_before(planned(renderer, messages), parted)
    assert min(kept, parted) - reached <= STEP + BYTES


@pytest.mark.parametrize("length", [1, 4, 64])
def test_image_changed_in_the_third_message_leaves_an_anchor_at_its_start(families: Any, length: int) -> None:
    image, marker = {"type": "image"}, families.tokenizer().token_to_id("<|image_pad|>")
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": [image, {"type": "text", "text": "What is this?"}]},
        {"role": "assistant", "content": [{"type": "text", "text": "A cat."}]},
        {"role": "user", "content": [{"type": "text", "text": "And that:"}, image, {"type": "text", "text": "?"}]},
    ]
    renderer = families.VISION.renderer()
    ids: list[int] = []
    attachments: list[Attachment] = []
    for item in ids_of(renderer, messages).tolist():
        if item == marker:
            attachments.append(Attachment(len(ids), length, bytes([len(attachments)]) * 32))
        ids += [item] * (length if item == marker else 1)
    found = plan(renderer, messages, ids, attachments=attachments)
    assert best_before(found, attachments[1].start) == attachments[1].start
    kept = [anchor.position for anchor in found.best(6)]
    changed_at = attachments[1].start
    assert changed_at - max(position for position in kept if position <= changed_at) <= STEP
    # The same image, another question.
    assert attachments[0].end in kept and attachments[1].end in {anchor.position for anchor in found.anchors}
