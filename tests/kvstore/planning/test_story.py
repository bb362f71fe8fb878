"""Depths and hashes: what an anchor says about the conversation before it."""

from __future__ import annotations

import hashlib
from typing import Any

from warmkv.kvstore.planning.spans import Part, Span
from warmkv.kvstore.planning.story import Story

MESSAGES = [
    {"role": "system", "content": "s"},
    {"role": "user", "content": "q", "meta": {"b": 1, "a": [1, 2]}},
    {"role": "assistant", "content": "a"},
]
TOOLS = [{"name": "read", "parameters": {"x": 1, "y": 2}}]


def story(messages: Any = MESSAGES, tools: Any = TOOLS, found: tuple[Span, ...] = ()) -> Story:
    return Story(messages, tools, found)


def test_depth_counts_messages_whose_last_string_has_ended() -> None:
    found = (
        Span(0, Part.CONTENT, 2, 5),
        Span(1, Part.CONTENT, 8, 9),
        Span(2, Part.THINKING, 12, 14),
        Span(2, Part.CONTENT, 15, None),
    )
    made = story(found=found)
    assert [made.depth(at) for at in (0, 4, 5, 8, 9, 13, 14, 20)] == [0, 0, 1, 1, 2, 2, 3, 3]


def test_depth_of_a_system_prompt_that_is_written_last() -> None:
    made = story(found=(Span(1, Part.CONTENT, 2, 5), Span(2, Part.CONTENT, 6, 8), Span(0, Part.CONTENT, 9, 12)))
    assert [made.depth(at) for at in (5, 8, 12)] == [2, 3, 3]


def test_hash_does_not_depend_on_the_order_of_keys() -> None:
    other = [MESSAGES[0], {"meta": {"a": [1, 2], "b": 1}, "content": "q", "role": "user"}, MESSAGES[2]]
    tools = [{"parameters": {"y": 2, "x": 1}, "name": "read"}]
    assert [story().hash("end", at) for at in range(4)] == [story(other, tools).hash("end", at) for at in range(4)]


def test_hash_depends_on_what_comes_before_and_on_nothing_else() -> None:
    base = story()
    changed = story([*MESSAGES[:2], {"role": "assistant", "content": "b"}])
    assert [base.hash("end", at) == changed.hash("end", at) for at in range(4)] == [True, True, True, False]
    assert base.hash("end", 0) != story(tools=None).hash("end", 0)
    assert len({base.hash(name, at) for name in ("end", "start") for at in range(4)}) == 8
    assert len({story([{"content": ["a", "b"]}]).hash("x", 1), story([{"content": ["ab"]}]).hash("x", 1)}) == 2


def test_hash_is_the_same_in_every_process() -> None:
    before = b'[{"name": "read", "parameters": {"x": 1, "y": 2}}]\0{"content": "s", "role": "system"}\0'
    digest = hashlib.blake2b(before, digest_size=16).digest()
    expected = hashlib.blake2b(digest + b"next turn", digest_size=8).digest()
    assert story().hash("next turn", 1) == int.from_bytes(expected, "little")


def test_hash_takes_what_json_does_not() -> None:
    class Image:
        pass

    loop: dict[str, Any] = {}
    loop["self"] = loop
    for odd in (Image(), len, {1: "a", "b": 2}, loop, float("nan"), b"bytes", "\ud800"):
        made = story([{"role": "user", "content": odd}])
        assert 0 <= made.hash("end", 1) < 2**64
    assert story([{"content": Image()}]).hash("end", 1) == story([{"content": Image()}]).hash("end", 1)
