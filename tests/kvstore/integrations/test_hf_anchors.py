"""Where a prefill stops."""

from __future__ import annotations

import numpy as np
import pytest

from warmkv.kvstore.integrations.hf_anchors import last_and_branch, stops
from warmkv.schema.errors import RecordError
from warmkv.schema.records import Anchor, AnchorKind

TURN = Anchor(7, AnchorKind.TURN, depth=2)


def test_stops_lie_behind_what_is_held_and_before_the_end() -> None:
    assert stops([0, 5, 4, 9, 10, 11, -1, 6], 10, 4) == (Anchor(5), Anchor(6), Anchor(9))


def test_a_position_is_stopped_at_once_and_keeps_its_name() -> None:
    assert stops([7, TURN, 7], 10, 0) == (TURN,)
    assert stops([TURN, 7, Anchor(7, AnchorKind.THINKING)], 10, 0) == (TURN,)


@pytest.mark.parametrize("position", [np.int64(5), np.uint32(5)])
def test_numbers_of_numpy_are_positions(position: int) -> None:
    (stop,) = stops([position], 10, 0)
    assert stop == Anchor(5) and type(stop.position) is int


@pytest.mark.parametrize("position", [5.0, "5", None, True])
def test_what_is_no_position_is_an_error(position: object) -> None:
    with pytest.raises(RecordError, match="a planned anchor is"):
        stops([position], 10, 0)  # type: ignore[list-item]


@pytest.mark.parametrize(
    ("length", "matched", "usable", "expected"),
    [(10, 0, 0, [9]), (10, 6, 4, [6, 9]), (10, 4, 4, [9]), (10, 9, 4, [9]), (10, 10, 9, []), (1, 0, 0, []), (2, 1, 0, [1])],
)
def test_the_default_keeps_the_last_but_one_and_the_branch(length: int, matched: int, usable: int, expected: list[int]) -> None:
    ids = np.arange(length, dtype=np.uint32)
    assert [stop.position for stop in stops(last_and_branch(ids, matched, usable), length, usable)] == expected
