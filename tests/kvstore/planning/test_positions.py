"""Characters to positions: odd offsets, placeholders, and positions that no later text moves."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from warmkv.kvstore.planning.positions import STEP, Ruler, ends, shared
from warmkv.kvstore.planning.renderer import Encoded, encode
from warmkv.schema.errors import RecordError
from warmkv.schema.records import Attachment

PROSE = st.text(st.sampled_from("ab  \n\n.,:{}\"'1中é🙂<"), max_size=60)


def encoded(text: str, *offsets: tuple[int, int], ids: list[int] | None = None) -> Encoded:
    made = np.arange(len(offsets)) if ids is None else np.array(ids)
    return Encoded(text, made.astype(np.uint32), np.array(offsets, np.int64).reshape(-1, 2))


def ruler(
    made: Encoded, ids: list[int] | None = None, attachments: list[Attachment] | None = None, solid: set[int] | None = None
) -> Ruler:
    tokens = made.ids if ids is None else np.array(ids, np.uint32)
    return Ruler(made, tokens, attachments or [], solid or set())


def image(start: int, length: int) -> Attachment:
    return Attachment(start, length, bytes(32))


# -- odd offsets ------------------------------------------------------------------------------


def test_tokens_are_counted_that_end_at_or_before_the_character() -> None:
    made = ruler(encoded("abcdef", (0, 2), (2, 3), (3, 6)))
    assert [made.position(at) for at in range(7)] == [0, 0, 1, 2, 2, 2, 3]
    assert [made.character(at) for at in range(4)] == [0, 2, 3, 6]


def test_token_added_before_the_text_belongs_to_every_position() -> None:
    made = ruler(encoded("abcd", (0, 0), (0, 2), (2, 4)))
    assert [made.position(at) for at in range(5)] == [1, 1, 2, 2, 3]


def test_token_added_behind_the_text_belongs_to_none() -> None:
    made = ruler(encoded("abcd", (0, 2), (2, 4), (0, 0)))
    assert made.position(4) == 2


def test_token_without_offsets_in_the_middle_ends_with_the_one_before() -> None:
    made = ruler(encoded("abcd", (0, 2), (0, 0), (2, 4)))
    assert [made.position(at) for at in (1, 2, 4)] == [0, 2, 3]


def test_bytes_of_one_character_are_never_parted() -> None:
    made = ruler(encoded("a中b", (0, 1), (1, 2), (1, 2), (1, 2), (2, 3)))
    assert [made.position(at) for at in range(4)] == [0, 1, 4, 5]


def test_spaces_left_out_of_offsets_do_not_put_a_boundary_inside_a_token() -> None:
    # "\n  " is one token whose offsets leave its spaces out; nothing ends at characters 2 and 3.
    made = ruler(encoded("a\n  b", (0, 1), (1, 2), (4, 5)))
    assert [made.position(at) for at in range(6)] == [0, 1, 1, 1, 2, 3]


def test_no_tokens_at_all() -> None:
    made = Ruler(None, np.array([1, 2], np.uint32), [], set())
    assert made.position(0) is None
    assert made.character(2) == 0


@settings(max_examples=300, deadline=None)
@given(text=PROSE.filter(bool))
def test_real_tokenizer_positions_are_true_and_trimmed_offsets_never_later(families: Any, text: str) -> None:
    plain, trimmed = (encode_text(families, text, trim) for trim in (False, True))
    assert plain.ids.tolist() == trimmed.ids.tolist()
    sharp, careful = ruler(plain), ruler(trimmed)
    backend = families.tokenizer()
    for character in range(len(text) + 1):
        exact, early = sharp.position(character), careful.position(character)
        assert exact is not None and early is not None and early <= exact
        whole = backend.decode(plain.ids[:exact].tolist(), skip_special_tokens=False)
        assert text[:character].startswith(whole)
        # The next token would pass the character: no later position was possible.
        if exact < len(plain.ids):
            assert plain.offsets[exact, 1] > character
        assert exact - early <= 1 or not plain.offsets[early:exact, 1].max() > character


def encode_text(families: Any, text: str, trimmed: bool) -> Encoded:
    ids, offsets = families.FAMILIES["chatml"].renderer(trimmed=trimmed).tokenize(text)
    return Encoded(text, ids, offsets)


def test_ends_never_decrease() -> None:
    made = ends(encoded("abcdef", (0, 0), (0, 3), (2, 3), (3, 3), (0, 0), (3, 6), (0, 0)))
    assert made.tolist() == [0, 3, 3, 3, 3, 6, 7]


def test_offsets_that_do_not_fit_the_ids_are_an_error() -> None:
    class Wrong:
        tools, solid = None, frozenset[int]()

        def with_tools(self, tools: object) -> Wrong:
            return self

        def text(self, messages: object, *, generation: bool) -> str:
            return "ab"

        def tokenize(self, text: str) -> tuple[Any, Any]:
            return np.array([1, 2]), np.array([[0, 1]])

    with pytest.raises(RecordError, match=r"offsets of 2 tokens have shape \(1, 2\)"):
        encode(Wrong(), [])


# -- attachments ------------------------------------------------------------------------------


def letters(text: str, ids: list[int]) -> Encoded:
    """One token a character."""
    return encoded(text, *((at, at + 1) for at in range(len(text))), ids=ids)


def test_marker_stands_for_its_run_of_placeholders() -> None:
    made = ruler(letters("ab*cd", [1, 2, 9, 3, 4]), [1, 2, 9, 9, 9, 9, 3, 4], [image(2, 4)])
    assert [made.position(at) for at in range(6)] == [0, 1, 2, 6, 7, 8]
    assert [made.character(at) for at in (2, 3, 5, 6, 7)] == [2, 3, 3, 3, 4]


@pytest.mark.parametrize(
    ("written", "text"),
    [([1, 2, 3], "abc"), ([1, 9, 2, 3], "a*bc"), ([1, 7, 8, 9, 2, 3], "a<i>bc"), ([1, 5, 5, 5, 2, 3], "a***bc")],
)
def test_attachment_may_be_written_as_nothing_one_marker_or_several(written: list[int], text: str) -> None:
    made = ruler(letters(text, written), [1, 5, 5, 5, 2, 3], [image(1, 3)])
    assert made.position(len(text)) == 6
    assert made.position(len(text) - 2) == 4
    assert made.position(1) == (4 if len(written) == 3 else 1)


def test_position_is_never_inside_placeholders_that_the_text_spells_out() -> None:
    made = ruler(letters("a***bc", [1, 5, 5, 5, 2, 3]), None, [image(1, 3)])
    assert [made.position(at) for at in range(7)] == [0, 1, 1, 1, 4, 5, 6]


def test_two_images_in_a_row_and_one_at_the_very_end() -> None:
    made = ruler(letters("a**b*", [1, 9, 9, 2, 9]), [1, 9, 9, 9, 9, 9, 2, 9, 9], [image(1, 3), image(4, 2), image(7, 2)])
    assert [made.position(at) for at in range(6)] == [0, 1, 4, 6, 7, 9]


def test_ruler_ends_where_ids_and_text_part() -> None:
    made = ruler(letters("abcd", [1, 2, 3, 4]), [1, 2, 7, 4])
    assert [made.position(at) for at in range(5)] == [0, 1, None, None, None]
    made = ruler(letters("ab*cd", [1, 2, 9, 3, 4]), [1, 2, 9, 9, 8, 8], [image(2, 2)])
    assert [made.position(at) for at in range(4)] == [0, 1, None, None]


def test_shared_counts_attachments_whole() -> None:
    ids = np.array([1, 9, 9, 9, 2, 3, 4], np.uint32)
    for written, expected in (
        ([1, 9, 2, 3, 8], 6),
        ([1, 9, 2, 3, 4, 5], 7),
        ([1, 9, 8], 1),
        ([1, 2], 5),
        ([7], 0),
        ([1, 9, 9, 9, 2], 5),
    ):
        assert shared(np.array(written, np.uint32), ids, [image(1, 3)]) == expected


# -- settled ----------------------------------------------------------------------------------


def test_settled_goes_back_to_a_token_that_never_merges_or_eight() -> None:
    made = ruler(letters("x" * 30, list(range(30))), None, [], {3, 20})
    assert [made.settled(at) for at in (0, 1, 3, 4, 5, 11, 12, 13, 21, 22, 29)] == [0, 0, 0, 4, 4, 4, 4, 5, 21, 21, 21]
    assert made.settled(30) == 30 - STEP


def test_attachment_is_as_good_as_a_token_that_never_merges() -> None:
    made = ruler(letters("x" * 20, list(range(20))), None, [image(4, 6)])
    assert [made.settled(at) for at in (4, 10, 12, 19)] == [0, 10, 10, 11]
    assert made.settled(18) == 10


def test_closed_is_behind_the_first_token_that_never_merges_before_the_limit() -> None:
    made = ruler(letters("x" * 10, list(range(10))), None, [], {4, 6})
    assert [made.closed(2, limit) for limit in (2, 4, 5, 9)] == [None, None, 5, 5]
    assert made.closed(5, 10) == 7
