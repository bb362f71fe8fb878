"""The one rule against a brute-force twin that reads the table of needs literally."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from warmkv.kvstore import resume
from warmkv.kvstore.resume import (
    All,
    Chunk,
    Const,
    Exact,
    Held,
    Intervals,
    Last,
    Need,
    Nothing,
    RowNeed,
    SinksAndLast,
    Trimmable,
)
from warmkv.kvstore.testing import IMAGE
from warmkv.kvstore.testing.samples import (
    CONV,
    ENCODER,
    FULL,
    NYSTROM,
    OPAQUE,
    RECURRENT,
    RING,
    SPARSE,
    hybrid,
    layer_of,
    shared,
    sliding,
    weighed,
)
from warmkv.schema.identity import LayerKind, LayerSpec, PlaneFormat, PlaneRole, PlaneSpec
from warmkv.schema.records import Attachment


@dataclass
class Truth:
    """What is held of one layer, as plain sets: rows, exact states, (position, agrees up to) of
    trimmable states, and starts of attachments whose record is there."""

    rows: set[int] = field(default_factory=set)
    states: set[int] = field(default_factory=set)
    blobs: set[tuple[int, int]] = field(default_factory=set)
    constants: set[int] = field(default_factory=set)

    def held(self, rng: random.Random) -> Held:
        """The same for the rule: ranges in any order, cut and overlapping at random."""
        ranges: list[tuple[int, int]] = []
        for row in sorted(self.rows):
            if ranges and ranges[-1][1] == row and rng.random() < 0.8:
                ranges[-1] = (ranges[-1][0], row + 1)
            else:
                ranges.append((row, row + 1))
        ranges += [(start, min(end, start + rng.randint(0, 3))) for start, end in ranges if rng.random() < 0.3]
        rng.shuffle(ranges)
        agrees = max((min(position, common) for position, common in self.blobs), default=0)
        return Held(Intervals(ranges), tuple(sorted(self.states)), agrees, frozenset(self.constants))


def met(need: Need, p: int, truth: Truth) -> bool:
    """The table, read aloud: which rows, or which state, must be there to resume at p."""
    if isinstance(need, All):
        wanted = set(range(p))
    elif isinstance(need, Last):
        wanted = set(range(max(0, p - need.n), p))
    elif isinstance(need, Chunk):
        wanted = set(range(p // need.c * need.c, p))
    elif isinstance(need, SinksAndLast):
        wanted = set(range(min(need.s, p))) | set(range(max(0, p - need.n), p))
    elif isinstance(need, Exact):
        return p in truth.states
    elif isinstance(need, Trimmable):
        return any(position >= p and common >= p for position, common in truth.blobs)
    elif isinstance(need, Const):
        wanted_constants = {item.start for item in need.attachments if item.start < p}
        return wanted_constants <= truth.constants
    else:
        assert isinstance(need, Nothing)
        return True
    return wanted <= truth.rows


def brute_force(
    needs: list[tuple[Need, Truth]], matched: int, length: int, attachments: tuple[Attachment, ...], logits_at: set[int]
) -> int:
    for p in range(min(matched, length), 0, -1):
        if p == length and p not in logits_at:
            continue
        if any(item.start < p < item.end for item in attachments):
            continue
        if all(met(need, p, truth) for need, truth in needs):
            return p
    return 0


def random_attachments(rng: random.Random, length: int) -> tuple[Attachment, ...]:
    found, at = [], 0
    while rng.random() < 0.5 and at < length:
        start = rng.randint(at, length - 1)
        size = rng.randint(1, min(6, length - start))
        found.append(Attachment(start, size, IMAGE))
        at = start + size
    return tuple(found)


def random_need(rng: random.Random, attachments: tuple[Attachment, ...]) -> Need:
    n = rng.choice((0, 1, 2, 3, 5, 8, 40))
    choices: list[Callable[[], Need]] = [
        All, lambda: Last(n), lambda: Chunk(max(1, n)), lambda: SinksAndLast(rng.choice((0, 1, 2, 4, 30)), n), Exact,
        Trimmable, lambda: Const(attachments), Nothing,
    ]  # fmt: skip
    return rng.choice(choices)()


def random_truth(rng: random.Random, length: int, attachments: tuple[Attachment, ...]) -> Truth:
    end = length + rng.randint(0, 3)
    rows = set(range(end if rng.random() < 0.7 else rng.randint(0, end)))
    for _ in range(rng.choice((0, 0, 1, 1, 2, 4))):
        hole = rng.randint(0, end)
        rows -= set(range(hole, hole + rng.randint(1, 4)))
    dense = rng.random() < 0.5
    states = {p for p in range(1, end + 1) if rng.random() < (0.8 if dense else 0.15)}
    blobs = {(p, rng.randint(0, p)) for p in (rng.randint(1, end) for _ in range(rng.randint(0, 3)))}
    constants = {item.start for item in attachments if rng.random() < 0.8}
    return Truth(rows, states, blobs, constants)


@pytest.mark.parametrize("seed", range(4))
def test_rule_equals_brute_force(seed: int) -> None:
    rng = random.Random(seed)
    answers = set()
    for case in range(6000):
        length = rng.randint(1, 24)
        attachments = random_attachments(rng, length)
        count = rng.choice((0, 1, 1, 2, 2, 3, 5))
        needs = [(random_need(rng, attachments), random_truth(rng, length, attachments)) for _ in range(count)]
        matched = rng.choice((length, rng.randint(0, length)))
        logits = {rng.randint(1, length)} if rng.random() < 0.3 else set()
        expected = brute_force(needs, matched, length, attachments, logits)
        found = resume.usable([(need, truth.held(rng)) for need, truth in needs], matched, length, attachments, logits)
        assert found == expected, (case, needs, matched, length, attachments, logits)
        answers.add((found == length, found == 0))
    assert len(answers) == 3  # exact hits, partial ones and misses all occur


@pytest.mark.parametrize("need", [All(), Last(4), Chunk(5), SinksAndLast(3, 4), Exact(), Trimmable()])
def test_last_valid_is_the_greatest_position_at_which_the_need_is_met(need: Need) -> None:
    rng = random.Random(5)
    for _ in range(300):
        truth = random_truth(rng, 14, ())
        held = truth.held(rng)
        for p in range(16):
            assert need.last_valid(p, held) == max((q for q in range(1, p + 1) if met(need, q, truth)), default=0)


ROW_NEEDS: list[RowNeed] = [
    All(), *(Last(n) for n in (0, 1, 2, 7, 40)), *(Chunk(c) for c in (1, 2, 5, 40)),
    *(SinksAndLast(s, n) for s in (0, 1, 3, 40) for n in (0, 1, 4, 40)),
]  # fmt: skip


@pytest.mark.parametrize("need", ROW_NEEDS, ids=str)
def test_required_rows_are_exactly_those_of_the_need(need: RowNeed) -> None:
    """With them it is met, without any one of them it is not, and no other row is named."""
    for p in range(45):
        ranges = need.required(p)
        assert all(start < end for start, end in ranges)
        assert all(end < start for (_, end), (start, _) in zip(ranges, ranges[1:], strict=False)), "they touch or overlap"
        named = {row for start, end in ranges for row in range(start, end)}
        assert met(need, p, Truth(rows=named))
        for row in named:
            assert 0 <= row < p and not met(need, p, Truth(rows=named - {row}))
        assert need.last_valid(p, Held(Intervals(ranges))) == p


def rows(*ranges: tuple[int, int]) -> Held:
    return Held(Intervals(ranges))


@pytest.mark.parametrize("window", [1, 2, 8])
def test_window_boundaries(window: int) -> None:
    need, n = Last(window - 1), window - 1
    for p in (1, max(1, window - 1), window, window + 1, 3 * window):
        assert need.last_valid(p, rows((max(0, p - n), p))) == p
        if 0 < n < p:
            one_short = rows((p - n + 1, p))
            assert need.last_valid(p, one_short) == 0
            assert need.last_valid(p, rows((0, p - 1))) == p - 1


@pytest.mark.parametrize("chunk", [1, 2, 8])
def test_chunk_boundaries(chunk: int) -> None:
    need = Chunk(chunk)
    for p in (chunk - 1, chunk, chunk + 1, 3 * chunk - 1, 3 * chunk, 3 * chunk + 1):
        floor = p // chunk * chunk
        assert need.last_valid(p, rows((floor, p))) == p
        assert need.last_valid(p, rows((floor, max(floor, p - 1)))) == max(floor, p - 1)
        assert need.last_valid(p, rows((floor + 1, p))) == floor


def test_one_token_is_left_to_feed_unless_logits_are_parked() -> None:
    needs = [(All(), rows((0, 9)))]
    assert resume.usable(needs, 9, 9) == 8
    assert resume.usable(needs, 9, 9, logits_at=[9]) == 9
    assert resume.usable(needs, 9, 9, logits_at=[8]) == 8
    assert resume.usable(needs, 8, 9, logits_at=[9]) == 8
    assert resume.usable(needs, 9, 10) == 9
    assert resume.usable(needs, 1, 1) == 0
    assert resume.usable([(Exact(), Held(states=(8,)))], 8, 8) == 0
    assert resume.usable([(Exact(), Held(states=(5, 8)))], 8, 8) == 5


def test_needs_of_every_layer_kind() -> None:
    key, state = (PlaneSpec(role, PlaneFormat.F32, (1, 4)) for role in (PlaneRole.KEY, PlaneRole.RECURRENT))
    image = (Attachment(1, 2, IMAGE),)
    expected: dict[LayerKind, tuple[Need, ...]] = {
        LayerKind.FULL: (All(),),
        LayerKind.SLIDING: (Last(7),),
        LayerKind.CHUNKED: (Chunk(8),),
        LayerKind.SINK_WINDOW: (SinksAndLast(4, 7),),
        LayerKind.RING: (Exact(),),
        LayerKind.CONV: (Exact(),),
        LayerKind.RECURRENT: (Exact(),),
        LayerKind.NYSTROM: (Exact(),),
        LayerKind.OPAQUE: (Trimmable(),),
        LayerKind.ENCODER: (Const(image),),
        LayerKind.SHARED: (Nothing(),),
        LayerKind.HYBRID: (Last(7), Exact()),
        LayerKind.SPARSE: (Exact(),),
    }
    for kind in LayerKind:
        planes = (key, state) if kind == LayerKind.HYBRID else (key,)
        layer = LayerSpec(kind, planes, window=8, chunk=8, sinks=4, shared_with=0 if kind == LayerKind.SHARED else -1)
        assert resume.needs_of(layer, image) == expected[kind]
        parts = [need for need in (resume.row_need(layer), resume.state_need(layer, image)) if need is not None]
        assert tuple(parts) or (Nothing(),) == expected[kind]
    assert resume.needs_of(hybrid()) == (All(), Exact())
    assert resume.needs_of(sliding(1)) == (Last(0),)


def test_rows_and_states_of_a_layer_are_needed_apart() -> None:
    image = (Attachment(1, 2, IMAGE),)
    for layer in (RING, CONV, RECURRENT, NYSTROM, OPAQUE, ENCODER, SPARSE, shared(0)):
        assert resume.row_need(layer) is None
    for layer in (FULL, sliding(4), layer_of(LayerKind.CHUNKED, chunk=4), layer_of(LayerKind.SINK_WINDOW, window=4), shared(0)):
        assert resume.state_need(layer) is None
    assert (resume.state_need(ENCODER, image), resume.state_need(OPAQUE)) == (Const(image), Trimmable())


def test_importance_beside_rows_is_needed_where_it_was_stored() -> None:
    """Going on without it would weigh rows anew, as if nothing had looked at them."""
    assert resume.needs_of(weighed()) == (All(), Exact())
    assert resume.needs_of(weighed(4)) == (Last(3), Exact())
    beside = LayerSpec(LayerKind.FULL, (*FULL.planes, PlaneSpec(PlaneRole.IMPORTANCE, PlaneFormat.F32, (4,))))
    assert resume.needs_of(beside) == (All(), Exact())


def test_rows_with_gaps_are_needed_as_one_state() -> None:
    assert resume.row_need(SPARSE) is None
    assert resume.needs_of(SPARSE) == (Exact(),)


def test_intervals_merge_and_find_runs() -> None:
    held = Intervals([(5, 7), (0, 2), (2, 3), (6, 9), (4, 4)])
    assert [held.run_end(at) for at in (0, 2, 3, 5, 8, 9)] == [3, 3, 3, 9, 9, 9]
    assert [held.run_ending(at) for at in (1, 3, 4, 6, 12)] == [(0, 1), (0, 3), (0, 3), (5, 6), (5, 9)]
    assert held.covers(5, 9) and held.covers(3, 3) and not held.covers(4, 6)
    assert Intervals().run_ending(4) == (0, 0)
