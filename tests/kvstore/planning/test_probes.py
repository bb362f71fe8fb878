"""What-if renderings: what is asked, and what is made of the answers."""

from __future__ import annotations

import os.path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from warmkv.kvstore.planning import probes
from warmkv.kvstore.planning.ranks import Boundary, Rank

TOOL = {"type": "function", "function": {"name": "read", "description": "d", "parameters": {"type": "object"}}}


def asked(renderer: Any, messages: list[dict[str, Any]], generation: bool = True) -> tuple[str, dict[Rank, list[Boundary]]]:
    text = renderer.text(messages, generation=generation)
    by_rank: dict[Rank, list[Boundary]] = {}
    for item in probes.boundaries(renderer, messages, text, generation=generation):
        by_rank.setdefault(item.rank, []).append(item)
    return text, by_rank


def place(found: tuple[str, dict[Rank, list[Boundary]]], rank: Rank) -> str:
    """The text before the first boundary of a rank."""
    text, by_rank = found
    return text[: by_rank[rank][0].character]


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def assistant(text: str, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **more}


def call(arguments: Any) -> dict[str, Any]:
    function = {"name": "read", "arguments": arguments}
    return assistant("", tool_calls=[{"id": "abcdefgh1", "type": "function", "function": function}])


@given(one=st.text(st.sampled_from("ab中"), max_size=40), other=st.text(st.sampled_from("ab中"), max_size=40))
def test_common_prefix_is_that_of_a_character_loop(one: str, other: str) -> None:
    assert probes.common_prefix(one, other) == len(os.path.commonprefix([one, other]))
    assert probes.common_prefix(one, one + other) == len(one)


def test_stand_in_is_not_in_the_text() -> None:
    word = probes.stand_in("")
    other = probes.stand_in(f"a prompt that quotes {word} and more")
    assert other != word and other not in word and word not in other


def test_next_turn_of_a_template_that_writes_empty_thinking_is_before_it(families: Any) -> None:
    found = asked(families.FAMILIES["qwen3-nothink"].renderer(), [user("q")])
    assert place(found, Rank.NEXT_TURN) == "<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n"
    assert found[0] == place(found, Rank.NEXT_TURN) + "<think>\n\n</think>\n\n"


def test_next_turn_of_a_template_that_opens_a_thought_is_before_it(families: Any) -> None:
    found = asked(families.FAMILIES["deepseek-r1"].renderer(), [user("q")])
    assert place(found, Rank.NEXT_TURN) == "<｜begin▁of▁sentence｜><｜User｜>q<｜Assistant｜>"


def test_next_turn_goes_back_to_thinking_that_will_be_dropped(families: Any) -> None:
    messages = [user("q"), {**call({}), "reasoning_content": "Look at the file."}, {"role": "tool", "content": "x"}]
    found = asked(families.FAMILIES["qwen3"].renderer([TOOL]), messages)
    # "<think>" and "<tool_call>", which comes in its place, share two characters.
    assert place(found, Rank.NEXT_TURN).endswith("q<|im_end|>\n<|im_start|>assistant\n<t")
    assert place(found, Rank.TOOL_TURN) == found[0]
    dropped = [found[0][: item.character] for item in found[1][Rank.MESSAGE]]
    assert dropped[0] == place(found, Rank.NEXT_TURN)
    assert dropped[1].endswith("Look at the file.\n</think>\n\n<t")


def test_next_turn_of_moving_tools_is_before_the_tools(families: Any) -> None:
    family = families.FAMILIES["mistral"]
    found = asked(family.renderer([TOOL]), [user("one"), assistant("two"), user("three")])
    # "[AVAILABLE_TOOLS]" and "[INST]", which comes in its place, share a character.
    assert place(found, Rank.NEXT_TURN) == "<s>[INST] one[/INST] two</s>["
    assert place(found, Rank.TOOL_TURN) == found[0]


def test_shared_ends_where_the_first_user_speaks(families: Any) -> None:
    system = {"role": "system", "content": "s"}
    for name, tools, before in (
        ("chatml", None, "<|im_start|>system\ns<|im_end|>\n<|im_start|>user\n"),
        ("gemma", None, "<bos><start_of_turn>user\n"),
        ("plain", None, "s\n\nUSER: "),
        ("deepseek-r1", None, "<｜begin▁of▁sentence｜>s<｜User｜>"),
    ):
        messages = [*([] if name == "gemma" else [system]), user("Zap"), assistant("b"), user("c")]
        assert place(asked(families.FAMILIES[name].renderer(tools), messages), Rank.SHARED) == before


def test_shared_includes_tools_written_into_the_first_message(families: Any) -> None:
    found = asked(families.FAMILIES["llama3"].renderer([TOOL]), [user("q")])
    before = place(found, Rank.SHARED)
    assert '"name": "read"' in before and found[0][len(before) :].startswith("q<|eot_id|>")


def test_word_that_begins_like_the_stand_in_does_not_move_the_boundary(families: Any) -> None:
    word = probes.stand_in("")
    found = asked(families.FAMILIES["chatml"].renderer(), [user(word[:-1])])
    assert place(found, Rank.SHARED).endswith("<|im_start|>user\n")


@pytest.mark.parametrize("name", ["qwen3", "llama3", "mistral"])
def test_tool_definitions_have_a_start_and_an_end(families: Any, name: str) -> None:
    system = {"role": "system", "content": "Be brief."}
    found = asked(families.FAMILIES[name].renderer([TOOL]), [system, user("q")])
    text = found[0]
    ends = place(found, Rank.TOOLS)
    begins = place(found, Rank.SYSTEM)
    assert '"name": "read"' in ends[len(begins) :]
    assert '"name"' not in begins and '"parameters"' not in text[len(ends) :]


class Written:
    """A template as a function of messages, the generation flag and tools."""

    solid = frozenset[int]()

    def __init__(self, write: Any, tools: Any = None) -> None:
        self._write, self.tools = write, tools

    def with_tools(self, tools: Any) -> Written:
        return Written(self._write, tools)

    def text(self, messages: Any, *, generation: bool) -> str:
        return str(self._write(messages, generation, self.tools))


def test_neighbour_of_a_tool_has_its_shape(families: Any) -> None:
    flat, nested = {"name": "read", "parameters": {}}, {"type": "function", "function": {"name": "read"}}
    writers = {
        "flat": (flat, lambda tool: tool["name"]),
        "nested": (nested, lambda tool: tool["function"]["name"]),
        "callable": (print, lambda tool: getattr(tool, "__name__", None) or tool["function"]["name"]),
    }
    for tool, name_of in writers.values():
        renderer = Written(
            lambda said, _, tools, name_of=name_of: "".join(map(name_of, tools or [])) + ";" + said[0]["content"], [tool]
        )
        found = asked(renderer, [user("q")])
        assert place(found, Rank.TOOLS) == name_of(tool)
        assert place(found, Rank.SYSTEM) == ""


def test_generation_is_the_end_of_the_last_turn(families: Any) -> None:
    renderer = families.FAMILIES["chatml"].renderer()
    found = asked(renderer, [user("q")])
    assert place(found, Rank.GENERATION).endswith("q<|im_end|>\n")
    assert Rank.GENERATION not in asked(renderer, [user("q"), assistant("a")], generation=False)[1]


def test_no_tools_no_question_about_tools(families: Any) -> None:
    renderer = families.FAMILIES["qwen3"].renderer()
    assert set(asked(renderer, [user("q")])[1]) == {Rank.NEXT_TURN, Rank.SHARED, Rank.GENERATION}
    assert Rank.TOOL_TURN in asked(renderer, [user("q"), call({}), {"role": "tool", "content": "x"}])[1]


def test_arguments_are_tried_in_both_shapes(families: Any) -> None:
    """One template concatenates arguments, which fails for a mapping; another needs a mapping."""
    conversation = [user("q")]
    for name in ("deepseek-r1", "llama3"):
        assert Rank.TOOL_TURN in asked(families.FAMILIES[name].renderer([TOOL]), conversation)[1]


def test_made_up_messages_have_content_of_the_shape_in_use(families: Any) -> None:
    """A template for parts goes through a string letter by letter, or refuses it."""
    inner = families.VISION.renderer()

    class PartsOnly:
        tools, solid = None, inner.solid

        def text(self, messages: Any, *, generation: bool) -> str:
            if any(isinstance(item["content"], str) for item in messages):
                raise TypeError("content is a list of parts")
            return str(inner.text(messages, generation=generation))

    parts = {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "q"}]}
    system = {"role": "system", "content": [{"type": "text", "text": "s"}]}
    found = asked(PartsOnly(), [system, parts])
    assert set(found[1]) == {Rank.NEXT_TURN, Rank.SHARED, Rank.GENERATION}
    assert place(found, Rank.SHARED).endswith("<|im_start|>user\n")


def test_answer_at_the_end_is_not_answered_again(families: Any) -> None:
    found = asked(families.FAMILIES["gemma"].renderer(), [user("q"), assistant("a")], generation=False)
    assert place(found, Rank.NEXT_TURN) == found[0]


def test_refused_shapes_are_skipped_and_others_still_asked(families: Any) -> None:
    renderer = families.FAMILIES["gemma"].renderer([TOOL])
    found = asked(renderer, [user("q")])
    # No role "tool" and no alternation with it: no tool turn; the rest is there.
    assert set(found[1]) == {Rank.NEXT_TURN, Rank.SHARED, Rank.GENERATION, Rank.TOOLS, Rank.SYSTEM}


def test_only_system_messages(families: Any) -> None:
    found = asked(families.FAMILIES["chatml"].renderer(), [{"role": "system", "content": "s"}])
    assert Rank.SHARED not in found[1] and Rank.NEXT_TURN in found[1]
