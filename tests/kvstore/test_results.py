"""Answers as values: what a reply says, in the caller's terms, and what it must not say."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from warmkv.kvstore.results import FirstDifference, LayerGroup, Match
from warmkv.kvstore.testing import FOLDED, IMAGE, random_identity
from warmkv.kvstore.testing.samples import CONV, ENCODER, FULL, OPAQUE, hybrid, mixed_identity, shared, sliding
from warmkv.schema import messages as m
from warmkv.schema.errors import FormatError, RemoteProtocolError
from warmkv.schema.records import CLEAN, Anchor, AnchorKind, Attachment, pack_anchors

#: Row groups (0, 3) and (1, 5); exact layers 2 and 5, of which 5 has rows as well; a blob, an encoder.
MIXED = mixed_identity(FULL, sliding(4), CONV, FULL, shared(0), hybrid(4), OPAQUE, ENCODER)
HYBRID = mixed_identity(hybrid(), hybrid())
ANCHORS = (Anchor(2, AnchorKind.SYSTEM_PROMPT), Anchor(5, AnchorKind.TURN), Anchor(9))


def groups(*rows: tuple[int, int]) -> bytes:
    return np.array(rows, "<u8").tobytes()


def told(reply: m.Matched, identity: Any = MIXED) -> Match:
    return Match.of(reply, identity, (), CLEAN)


def test_a_reply_is_told_as_it_is() -> None:
    image = (Attachment(1, 2, IMAGE),)
    reply = m.Matched(
        matched=7, usable=5, tier=m.TIER_COLD, segments=3, total_bytes=4096, load_us=1500, anchors=pack_anchors(ANCHORS),
        diff_position=7, diff_query=8, diff_stored=9, reason="differs", epoch=77, identity_difference="rope,tokenizer",
    )  # fmt: skip
    match = Match.of(reply, MIXED, image, FOLDED)
    assert (match.matched, match.usable, match.tier, match.segments, match.total_bytes) == (7, 5, "cold", 3, 4096)
    assert (match.load_s, match.epoch, match.reason, match.attachments, match.lineage) == (0.0015, 77, "differs", image, FOLDED)
    assert match.first_difference == FirstDifference(7, 8, 9)
    assert match.anchors == ANCHORS and match.nearest_anchor == ANCHORS[1]
    assert match.identity_difference == ("rope", "tokenizer") and match.groups == ()
    assert bool(match) and not bool(told(m.Matched(matched=7)))
    assert told(m.Matched()).first_difference is None and told(m.Matched()).tier is None


def test_groups_are_those_of_the_model() -> None:
    packed = groups((0, 9), (1, 7), (2, 6), (6, 8), (7, 9))
    assert told(m.Matched(groups=packed)).groups == (
        LayerGroup((0, 3), 9), LayerGroup((1, 5), 7), LayerGroup((2, 5), 6), LayerGroup((6,), 8), LayerGroup((7,), 9),
    )  # fmt: skip


def test_rows_and_states_of_the_same_layers_are_two_groups() -> None:
    assert told(m.Matched(groups=groups((0, 9), (0, 4))), HYBRID).groups == (LayerGroup((0, 1), 9), LayerGroup((0, 1), 4))


@pytest.mark.parametrize(
    ("packed", "error"),
    [
        (groups((3, 9)), RemoteProtocolError), (groups((4, 9)), RemoteProtocolError), (groups((8, 9)), RemoteProtocolError),
        (groups((2**64 - 1, 9)), RemoteProtocolError), (groups((0, 9))[:-1], FormatError), (b"x", FormatError),
    ],
    ids=range(6),
)  # fmt: skip
def test_groups_of_no_layers_are_refused(packed: bytes, error: type[Exception]) -> None:
    with pytest.raises(error):
        told(m.Matched(groups=packed))


def test_other_nonsense_is_refused() -> None:
    for reply in (m.Matched(tier=3), m.Matched(tier=255), m.Acquired(tier=7)):
        with pytest.raises(RemoteProtocolError, match="tier"):
            told(reply)
    with pytest.raises(FormatError):
        told(m.Matched(anchors=b"odd"))


def test_an_explanation_says_what_is_known() -> None:
    words = {8: " red", 9: " blue"}
    match = replace(
        told(m.Matched(matched=7, diff_position=7, diff_query=8, diff_stored=9, reason="differs at 7")), anchors=ANCHORS
    )
    assert match.explain() == "differs at 7; nearest anchor before it at 5 (turn)"
    spelled = match.explain(lambda ids: "".join(words[number] for number in ids))
    assert spelled == "differs at 7; asked for ' red', stored is ' blue'; nearest anchor before it at 5 (turn)"
    assert replace(match, anchors=()).explain() == "differs at 7"
    assert Match(random_identity()).explain() == ""
    assert replace(match, anchors=(Anchor(8),)).nearest_anchor is None
