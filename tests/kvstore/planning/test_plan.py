"""The plan itself: what is in it, what is kept first, and that no template can break it."""

from __future__ import annotations

import itertools
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import warmkv
from warmkv.kvstore.planning import STEP, Plan, Planned, Rank, encode, plan
from warmkv.schema.errors import RecordError
from warmkv.schema.records import Anchor, AnchorKind, Attachment, pack_anchors, unpack_anchors

SYSTEM = {"role": "system", "content": "You answer in one line and never guess. Say so if you do not know."}
TOOL = {"type": "function", "function": {"name": "read", "description": "Reads a file.", "parameters": {"type": "object"}}}


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def talk(turns: int) -> list[dict[str, Any]]:
    answered = [(user(f"Question {at}?"), {"role": "assistant", "content": f"Answer {at}."}) for at in range(turns)]
    return [SYSTEM, *itertools.chain.from_iterable(answered), user("And the last one?")]


def planned(renderer: Any, messages: list[dict[str, Any]], **options: Any) -> Plan:
    return plan(renderer, messages, encode(renderer, messages).ids, **options)


def at(plan_: Plan, rank: Rank) -> list[int]:
    """Settled positions of a rank."""
    return [item.anchor.position for item in plan_.items if item.rank == rank and item.settled]


# -- what is in it ----------------------------------------------------------------------------


def test_short_first_chat_has_anchors(families: Any) -> None:
    """A conversation of one short message is no reason for an empty plan."""
    renderer = families.FAMILIES["gemma"].renderer()
    found = planned(renderer, [user("Hi")])
    length = len(encode(renderer, [user("Hi")]).ids)
    assert length < 16
    assert at(found, Rank.LAST) == [length - 1] and at(found, Rank.NEXT_TURN)


@pytest.mark.parametrize("name", ["chatml", "qwen3", "llama3", "mistral", "deepseek-r1", "plain"])
def test_anchors_are_unique_sorted_within_the_prompt_and_can_be_stored(families: Any, name: str) -> None:
    family = families.FAMILIES[name]
    renderer = family.renderer([TOOL] if family.tools else None)
    found = planned(renderer, talk(5))
    positions = [anchor.position for anchor in found.anchors]
    assert positions == sorted(set(positions))
    assert 0 < positions[0] and positions[-1] <= found.length
    by_priority = sorted(found.items, key=lambda item: item.priority)
    assert [item.priority for item in by_priority] == list(range(len(positions)))
    assert [item.settled for item in by_priority] == sorted((item.settled for item in by_priority), reverse=True)
    assert unpack_anchors(pack_anchors(found.anchors)) == found.anchors
    for anchor in found.anchors:
        assert type(anchor.position) is int and anchor.shift_offset == 0 and anchor.semantic_hash < 2**64


def test_depth_is_the_number_of_messages_before(families: Any) -> None:
    renderer, messages = families.FAMILIES["chatml"].renderer(), talk(3)
    whole = encode(renderer, messages)
    closing = families.tokenizer().token_to_id("<|im_end|>")
    closed = np.flatnonzero(whole.ids == closing)
    for item in planned(renderer, messages).items:
        if item.settled and not item.name.startswith("before"):
            assert item.anchor.depth == np.count_nonzero(closed < item.anchor.position), item


def test_kinds_say_what_the_boundary_is(families: Any) -> None:
    made = {"id": "abcdefgh1", "type": "function", "function": {"name": "read", "arguments": {"path": "a"}}}
    messages = [
        SYSTEM,
        user("q"),
        {"role": "assistant", "content": "", "reasoning_content": "Think about it.", "tool_calls": [made]},
        {"role": "tool", "content": "the file"},
    ]
    renderer = families.FAMILIES["qwen3"].renderer([TOOL])
    kinds = {item.anchor.kind for item in planned(renderer, messages).items}
    assert kinds >= {
        AnchorKind.TURN,
        AnchorKind.TOOL_CALL,
        AnchorKind.TOOL_OUTPUT,
        AnchorKind.THINKING,
        AnchorKind.SYSTEM_PROMPT,
    }


def test_message_is_closed_by_a_tag_close_to_its_end_and_not_by_a_later_one(families: Any) -> None:
    """Tool definitions that follow a system prompt quote tags; none of them ends the prompt."""
    renderer = families.FAMILIES["qwen3"].renderer([TOOL])
    prompt = encode(renderer, talk(3))
    for item in planned(renderer, talk(3)).items:
        if item.name == "content end":
            said = prompt.text[: prompt.offsets[item.anchor.position - 1, 1]]
            content = talk(3)[item.anchor.depth - 1]["content"]
            assert said.endswith((content, content + "<|im_end|>"))


def test_each_message_has_a_start_and_the_last_question_a_better_rank(families: Any) -> None:
    renderer, messages = families.FAMILIES["chatml"].renderer(), talk(3)
    prompt = encode(renderer, messages)
    starts = {}
    for item in planned(renderer, messages).items:
        if item.name in ("content start", "shared"):
            behind = prompt.text[prompt.offsets[item.anchor.position, 0] :]
            starts[next(at for at, said in enumerate(messages) if behind.startswith(said["content"]))] = item.rank
    assert starts == {**dict.fromkeys(range(len(messages)), Rank.MESSAGE), 1: Rank.SHARED, len(messages) - 1: Rank.LAST_USER}


def test_call_ends_behind_its_arguments(families: Any) -> None:
    arguments = {"path": "a/very/long/path/to/a/file/" * 8, "line": 12}
    made = {"id": "abcdefgh1", "type": "function", "function": {"name": "read", "arguments": arguments}}
    messages = [user("q"), {"role": "assistant", "content": "", "tool_calls": [made]}, {"role": "tool", "content": "x"}]
    renderer = families.FAMILIES["qwen3"].renderer([TOOL])
    prompt = encode(renderer, messages)
    (end,) = [item.anchor for item in planned(renderer, messages).items if item.name == "call end"]
    assert end.kind is AnchorKind.TOOL_CALL and end.depth == 2
    assert prompt.text[: prompt.offsets[end.position - 1, 1]].endswith('"line": 12}}\n</tool_call>')


def test_a_boundary_that_may_merge_has_a_settled_step_before_it(families: Any) -> None:
    found = planned(families.FAMILIES["plain"].renderer(), talk(2))
    settled = [item.anchor.position for item in found.items if item.settled]
    moving = [item.anchor.position for item in found.items if not item.settled]
    assert moving
    for position in moving:
        assert any(position - STEP <= other < position for other in settled), position


def test_only_what_lies_beyond_is_planned(families: Any) -> None:
    renderer, messages = families.FAMILIES["chatml"].renderer(), talk(6)
    whole = planned(renderer, messages)
    for beyond in (0, 1, 40, whole.length - 20, whole.length - 1, whole.length, whole.length + 5):
        part = planned(renderer, messages, beyond=beyond)
        assert part.anchors == tuple(anchor for anchor in whole.anchors if anchor.position > beyond)


def test_hash_of_a_boundary_survives_another_history_behind_it_and_another_order_of_keys(families: Any) -> None:
    family = families.FAMILIES["qwen3"]
    function = TOOL["function"]
    turned = {"function": dict(reversed(function.items())), "type": "function"}  # type: ignore[attr-defined]
    one = planned(family.renderer([TOOL]), [SYSTEM, user("q")])
    other = planned(family.renderer([turned]), [SYSTEM, user("something else entirely")])
    assert hashes(one, "before shared") == hashes(other, "before shared") != set()
    assert hashes(one, "before next turn").isdisjoint(hashes(other, "before next turn"))


def hashes(found: Plan, name: str) -> set[int]:
    return {item.anchor.semantic_hash for item in found.items if item.name == name}


# -- attachments ------------------------------------------------------------------------------


def pictures() -> list[dict[str, Any]]:
    return [
        {"role": "system", "content": [{"type": "text", "text": "Describe."}]},
        {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What is it?"}]},
        {"role": "assistant", "content": [{"type": "text", "text": "A cat."}]},
        {"role": "user", "content": [{"type": "text", "text": "And this?"}, {"type": "image"}]},
    ]


def grown(families: Any, ids: Any, lengths: tuple[int, ...]) -> tuple[list[int], list[Attachment]]:
    """Each image marker as a run of placeholders, as a vision processor feeds it."""
    marker = families.tokenizer().token_to_id("<|image_pad|>")
    out: list[int] = []
    attachments: list[Attachment] = []
    for item in ids.tolist():
        if item == marker:
            length = lengths[len(attachments)]
            attachments.append(Attachment(len(out), length, bytes([len(attachments)]) * 32))
            out += [item] * length
        else:
            out.append(item)
    return out, attachments


@pytest.mark.parametrize("lengths", [(1, 1), (5, 5), (64, 300)])
def test_images_have_a_start_and_an_end_and_nothing_inside(families: Any, lengths: tuple[int, int]) -> None:
    renderer = families.VISION.renderer()
    short = encode(renderer, pictures())
    ids, attachments = grown(families, short.ids, lengths)
    found = plan(renderer, pictures(), ids, attachments=attachments)
    positions = {anchor.position for anchor in found.anchors}
    for item in attachments:
        assert {item.start, item.end} <= positions
        assert not positions & set(range(item.start + 1, item.end))
    # The rest of the plan is that of the short prompt, moved by what the images grew.
    moved = {
        place + sum(grow.length - 1 for grow in attachments if grow.start < place)
        for place in short_positions(families, renderer)
    }
    assert moved <= positions | {position for item in attachments for position in range(item.start, item.end + STEP)}


def short_positions(families: Any, renderer: Any) -> set[int]:
    return {item.anchor.position for item in planned(renderer, pictures()).items if not item.name.startswith("before")}


def test_image_end_is_worth_a_state_whatever_lies_close(families: Any) -> None:
    renderer = families.VISION.renderer()
    ids, attachments = grown(families, encode(renderer, pictures()).ids, (4, 4))
    kept = {anchor.position for anchor in plan(renderer, pictures(), ids, attachments=attachments).best(100)}
    assert {item.end for item in attachments} <= kept


def test_text_that_does_not_fit_the_ids_is_planned_up_to_the_difference(families: Any) -> None:
    renderer, messages = families.FAMILIES["chatml"].renderer(), talk(4)
    ids = encode(renderer, messages).ids.copy()
    whole = planned(renderer, messages)
    ids[60] += 1
    found = plan(renderer, messages, ids)
    positions = [anchor.position for anchor in found.anchors]
    assert positions[:-1] == [anchor.position for anchor in whole.anchors if anchor.position < 60]
    assert positions[-1] == len(ids) - 1


# -- what is kept first -----------------------------------------------------------------------


def served(item: Planned, positions: Iterable[int]) -> bool:
    return any(item.enough <= position <= item.anchor.position for position in positions)


@pytest.mark.parametrize("name", ["chatml", "qwen3-nothink", "llama3", "plain"])
def test_best_serves_the_first_boundaries_first(families: Any, name: str) -> None:
    found = planned(families.FAMILIES[name].renderer(), talk(8))
    by_priority = sorted(found.items, key=lambda item: item.priority)
    assert found.best(0) == ()
    for limit in range(1, 12):
        kept = {anchor.position for anchor in found.best(limit)}
        assert len(kept) <= limit
        assert all(served(item, kept) for item in by_priority[:limit])


@pytest.mark.parametrize("name", ["chatml", "qwen3-nothink", "llama3", "plain"])
def test_one_state_serves_boundaries_that_lie_close(families: Any, name: str) -> None:
    """Whatever boundary a prompt comes back to, it costs at most STEP tokens more."""
    found = planned(families.FAMILIES[name].renderer(), talk(8))
    kept = [found.beyond, *(anchor.position for anchor in found.best(1000))]
    assert {item.settled for item in found.items if item.anchor.position in kept} == {True}
    for item in found.items:
        assert any(item.anchor.position - STEP <= position <= item.anchor.position for position in kept), item
    # Two ends a turn and what lies around them, where closing tags hold boundaries together.
    assert len(kept) <= (2 * 8 + 5 if name != "plain" else len(found.items) * 0.7)


def test_nothing_is_kept_close_behind_what_is_held(families: Any) -> None:
    renderer, messages = families.FAMILIES["chatml"].renderer(), talk(3)
    length = len(encode(renderer, messages).ids)
    assert planned(renderer, messages, beyond=length - 3).best(10) == ()
    assert [anchor.position for anchor in planned(renderer, messages, beyond=length - 30).best(1)] == [length - 4]


def test_last_token_is_kept_where_the_next_turn_leaves_it_behind(families: Any) -> None:
    """A thought prompted at length: the next turn goes back before it, a retry does not."""
    renderer = families.FAMILIES["chatml"].renderer()

    class Thinking:
        tools, solid = None, renderer.solid

        def text(self, messages: Any, *, generation: bool) -> str:
            tail = "<think>Think carefully, step by step, about all that was said above.\n" if generation else ""
            return renderer.text(messages, generation=generation) + tail

        def tokenize(self, text: str) -> Any:
            return renderer.tokenize(text)

    found = planned(Thinking(), talk(1))
    assert found.length - 1 > at(found, Rank.NEXT_TURN)[0] + 2 * STEP
    kept = [anchor.position for anchor in found.best(2)]
    assert kept[1] == found.length - 1 and at(found, Rank.NEXT_TURN)[0] - STEP < kept[0] <= at(found, Rank.NEXT_TURN)[0]


def test_best_of_handmade_items() -> None:
    def item(position: int, priority: int, enough: int) -> Planned:
        return Planned(Anchor(position), "x", Rank.MESSAGE, priority, True, enough)

    made = Plan(100, 10, (item(15, 0, 7), item(30, 1, 22), item(34, 2, 26), item(39, 3, 31), item(60, 4, 60)))
    # 15 is served by what is held, 34 by the state at 30, and 39 by none of them.
    assert [anchor.position for anchor in made.best(9)] == [30, 39, 60]
    assert [anchor.position for anchor in made.best(2)] == [30, 39]
    close = Plan(100, 0, (item(48, 2, 40), item(50, 0, 42), item(55, 1, 47), item(57, 3, 49)))
    assert [anchor.position for anchor in close.best(1)] == [48]
    assert [anchor.position for anchor in close.best(2)] == [48, 57]
    with pytest.raises(RecordError, match="-1 anchors"):
        made.best(-1)


# -- no template can break it -----------------------------------------------------------------


class Refusing:
    """A renderer whose answers are those of another until ``refuses`` says otherwise."""

    def __init__(self, inner: Any, refuses: Any, error: Exception, tools: Any = None) -> None:
        self._inner, self._refuses, self._error, self.tools = inner, refuses, error, tools
        self.solid = inner.solid

    def with_tools(self, tools: Any) -> Refusing:
        return Refusing(self._inner.with_tools(tools), self._refuses, self._error, tools)

    def text(self, messages: Any, *, generation: bool) -> str:
        if self._refuses(messages, generation, self.tools):
            raise self._error
        return str(self._inner.text(messages, generation=generation))

    def tokenize(self, text: str) -> Any:
        return self._inner.tokenize(text)


@settings(max_examples=120, deadline=None)
@given(data=st.data())
def test_whatever_a_template_refuses_the_rest_is_planned(families: Any, data: st.DataObject) -> None:
    family = families.FAMILIES["qwen3"]
    inner, messages = family.renderer([TOOL]), talk(2)
    ids = encode(inner, messages).ids
    verdicts: dict[str, bool] = {}

    def refuses(asked: Any, generation: bool, tools: Any) -> bool:
        key = repr((asked, generation, tools))
        if key not in verdicts:
            verdicts[key] = data.draw(st.booleans())
        return verdicts[key]

    error = data.draw(st.sampled_from([ValueError("no"), TypeError("no"), KeyError("no"), RecursionError(), OSError()]))
    found = plan(Refusing(inner, refuses, error, [TOOL]), messages, ids)
    allowed = {anchor.position for anchor in planned(inner, messages).anchors}
    assert {anchor.position for anchor in found.anchors} <= allowed
    assert len(ids) - 1 in {anchor.position for anchor in found.anchors}


def test_template_or_tokenizer_that_always_fails_leaves_last_and_attachments(families: Any) -> None:
    inner = families.FAMILIES["chatml"].renderer()
    broken = Refusing(inner, lambda *_: True, RuntimeError("no template"))
    found = plan(broken, talk(1), range(50), attachments=[Attachment(10, 5, bytes(32))])
    assert [anchor.position for anchor in found.anchors] == [10, 15, 49]

    ending = plan(broken, talk(1), range(50), attachments=[Attachment(45, 5, bytes(32))])
    assert [anchor.position for anchor in ending.anchors] == [45, 50]

    def fail(text: str) -> Any:
        raise RuntimeError("no tokenizer")

    mute = Refusing(inner, lambda *_: False, RuntimeError())
    mute.tokenize = fail  # type: ignore[method-assign]
    assert [anchor.position for anchor in plan(mute, talk(1), range(50)).anchors] == [49]
    assert plan(broken, [], [7]).anchors == ()
    mute.tokenize = lambda text: (np.empty(0, np.uint32), np.empty((0, 2), np.int64))  # type: ignore[method-assign]
    assert [anchor.position for anchor in plan(mute, talk(1), range(50)).anchors] == [49]
    mute.text = lambda messages, generation: ""  # type: ignore[method-assign]
    assert [anchor.position for anchor in plan(mute, [], range(50)).anchors] == [49]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"beyond": -1}, "-1 tokens are said to be held"),
        ({"attachments": [Attachment(0, 10**6, bytes(32))]}, "leaves the"),
        ({"attachments": [Attachment(0, 2, b"short")]}, "digest of 5 bytes"),
    ],
)
def test_bad_input_is_a_typed_error(families: Any, options: dict[str, Any], says: str) -> None:
    with pytest.raises(RecordError, match=says):
        planned(families.FAMILIES["chatml"].renderer(), talk(1), **options)
    with pytest.raises(RecordError, match="span"):
        plan(families.FAMILIES["chatml"].renderer(), talk(1), [1, 2**32])


def test_planning_loads_neither_templates_nor_stores(tmp_path: Path) -> None:
    program = "import sys, warmkv.kvstore.planning; print(*sorted(sys.modules))"
    where = str(Path(warmkv.__file__).absolute().parent.parent)
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, env={"PYTHONPATH": where}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    loaded = set(done.stdout.split())
    assert "warmkv.kvstore.planning.plan" in loaded
    assert loaded & {"jinja2", "transformers", "tokenizers", "torch", "lmdb"} == set()
    ours = {name for name in loaded if name.startswith("warmkv.")}
    assert {name for name in ours if not name.startswith(("warmkv.kvstore.planning", "warmkv.schema"))} == {"warmkv.kvstore"}


# -- what it costs ----------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["chatml", "qwen3", "llama3", "mistral", "deepseek-r1"])
def test_renderings_do_not_grow_with_the_conversation(families: Any, name: str) -> None:
    counts = set()
    for turns in (1, 10, 100):
        family = families.FAMILIES[name]
        renderer = family.renderer([TOOL] if family.tools else None)
        messages = talk(turns)
        found = encode(renderer, messages)
        renderer.rendered.clear()
        renderer.tokenized.clear()
        plan(renderer, messages, found.ids, encoded=found)
        assert renderer.tokenized == []
        assert max(renderer.rendered) <= len(messages) + 2
        counts.add(len(renderer.rendered))
        planned(renderer, messages)
    assert len(counts) == 1 and max(counts) <= 8
