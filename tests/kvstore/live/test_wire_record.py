"""The layer wire as bytes: compared with hand-assembled records, cut, flipped and exaggerated."""

from __future__ import annotations

import tracemalloc
from dataclasses import replace

import numpy as np
import pytest
import wire_bytes as by_hand
from hypothesis import given, settings
from hypothesis import strategies as st

from warmkv.kvstore.live.wire_record import Fit, WireKind, WireRecord, parse, write
from warmkv.schema.errors import FormatError

#: Exact in f16 as well.
K0, V0 = (0.5, -1.25, 2.0, 3.0, -0.125, 8.0), (1.0, 2.0, 4.0, -8.0, 16.0, -32.0)
MASS, STATE = (0.75, 0.1, 3.0), (0.1, -0.2, 1e30, 7.0)
RINGS = tuple(number * 0.125 for number in range(2 * 2 * 3 * 2))

FIT = Fit(WireKind.FULL, heads=2, size=2, identity=0xC0FFEE, layer=5, alive=(True, False))
LINEAR = Fit(WireKind.LINEAR, heads=1, size=2, identity=7, layer=1, state_size=4)
RING = Fit(WireKind.BOUNDED, heads=2, size=2, identity=7, layer=3, window=3)


def full(half: int = 0) -> bytes:
    head = by_hand.header(by_hand.FULL, 3, half=half, identity=0xC0FFEE, layer=5)
    return head + by_hand.full_body(3, 2, (K0, V0, (), ()), half=half, importance=MASS)


def tail(half: int = 0) -> bytes:
    head = by_hand.header(by_hand.TAIL, 9, half=half, identity=0xC0FFEE, layer=5)
    base = by_hand.u32(6, 0)
    return head + base + by_hand.full_body(3, 2, (K0, V0, (), ()), half=half, importance=MASS)


def linear(half: int = 0) -> bytes:
    return by_hand.header(by_hand.LINEAR, 9, half=half, identity=7, layer=1) + by_hand.linear_body(1, 2, STATE)


def ring(half: int = 0, position: int = 11) -> bytes:
    head = by_hand.header(by_hand.BOUNDED, position, half=half, identity=7, layer=3)
    return head + by_hand.bounded_body(2, 2, 3, position, RINGS, half)


def legacy(half: int = 0) -> bytes:
    return by_hand.full_body(3, 2, (K0, V0, (), ()), half=half, importance=MASS)


GOLDEN = [(full, FIT), (tail, FIT), (linear, LINEAR), (ring, RING), (legacy, FIT)]
CASES = [pytest.param(make(half), fit, id=f"{make.__name__}-{half}") for make, fit in GOLDEN for half in (0, 1)]


def same(one: np.ndarray | None, numbers: tuple[float, ...]) -> bool:
    return one is not None and one.dtype == np.float32 and one.tobytes() == np.asarray(numbers, np.float32).tobytes()


def written(record: WireRecord, like: bytes) -> bytes:
    return write(record, versioned=like[:4] == b"CMFS")


# -- what is right -------------------------------------------------------------------------


@pytest.mark.parametrize("half", [0, 1])
@pytest.mark.parametrize(("make", "kind", "base", "position"), [(full, 0, 0, 3), (tail, 3, 6, 9), (legacy, 0, 0, 3)])
def test_rows_come_back(make, kind, base, position, half):  # type: ignore[no-untyped-def]
    record = parse(make(half), FIT)
    assert (record.kind, record.base, record.rows, record.position, record.half) == (kind, base, 3, position, bool(half))
    assert same(record.keys[0], K0) and same(record.values[0], V0) and same(record.importance, MASS)
    assert record.keys[0].shape == (3, 2) and record.keys[1].shape == record.values[1].shape == (0, 2)


@pytest.mark.parametrize("half", [0, 1])
def test_a_recurrent_vector_comes_back_in_full_precision_whatever_the_width(half: int) -> None:
    record = parse(linear(half), LINEAR)
    assert record.kind is WireKind.LINEAR and record.position == 9 and same(record.state, STATE)


@pytest.mark.parametrize("half", [0, 1])
@pytest.mark.parametrize("position", [0, 1, 2, 3, 4, 11, 1 << 40])
def test_a_ring_comes_back_slot_by_slot(position: int, half: int) -> None:
    record = parse(ring(half, position), RING)
    assert record.position == position and record.window == 3
    assert same(np.stack((*record.keys, *record.values)), RINGS)


@pytest.mark.parametrize(("data", "fit"), CASES)
def test_what_was_read_is_written_in_the_same_bytes(data: bytes, fit: Fit) -> None:
    assert written(parse(data, fit), data) == data


def test_records_are_written_as_assembled_by_hand() -> None:
    """From values, not from what was read."""
    plane = {0: np.asarray(K0, np.float32).reshape(3, 2), 1: np.asarray(V0, np.float32).reshape(3, 2)}
    none = np.empty((0, 2), np.float32)
    rows = WireRecord(
        WireKind.FULL, 2, 2, 3, 0xC0FFEE, 5, False, 3, 0, (plane[0], none), (plane[1], none), np.asarray(MASS, np.float32)
    )
    assert write(rows) == full() and write(replace(rows, half=True)) == full(1)
    assert write(replace(rows, kind=WireKind.FULL_TAIL, base=6, position=9)) == tail()
    assert write(rows, versioned=False) == legacy()
    state = np.asarray(STATE, np.float32)
    assert write(WireRecord(WireKind.LINEAR, 1, 2, 9, 7, 1, True, state=state)) == linear(1)
    halves = np.asarray(RINGS, np.float32).reshape(4, 3, 2)
    rings = WireRecord(WireKind.BOUNDED, 2, 2, 11, 7, 3, keys=tuple(halves[:2]), values=tuple(halves[2:]), window=3)
    assert write(rings) == ring() and write(replace(rings, half=True)) == ring(1)


def test_numbers_that_are_no_numbers_travel_as_they_are() -> None:
    odd = (float("nan"), float("inf"), -0.0, 1e-45, -1e38, 0.0)
    data = by_hand.header(0, 3) + by_hand.full_body(3, 2, (odd, odd))
    record = parse(data, Fit(WireKind.FULL, 1, 2))
    assert same(record.keys[0], odd) and write(record) == data


def test_state_comes_before_importance_where_a_body_has_both() -> None:
    """As the source writes a layer of rows that keeps a vector besides."""
    data = by_hand.header(0, 3) + by_hand.full_body(3, 2, (K0, V0), state=STATE, importance=MASS)
    record = parse(data, Fit(WireKind.FULL, 1, 2, state_size=4))
    assert same(record.state, STATE) and same(record.importance, MASS) and write(record) == data


def test_a_recurrent_layer_takes_the_unversioned_body() -> None:
    data = by_hand.full_body(9, 2, ((), ()), state=STATE, importance=())
    record = parse(data, LINEAR)
    assert record.kind is WireKind.LINEAR and record.position == 9 and same(record.state, STATE)


def test_a_recurrent_layer_that_has_seen_nothing_may_send_no_state() -> None:
    empty = by_hand.header(1, 0, identity=7, layer=1) + by_hand.linear_body(1, 2, ())
    record = parse(empty, LINEAR)
    assert record.state is not None and record.state.size == 0
    with pytest.raises(FormatError, match="recurrent state of 0 numbers, this layer's has 4"):
        parse(by_hand.header(1, 9, identity=7, layer=1) + by_hand.linear_body(1, 2, ()), LINEAR)


def test_importance_may_be_left_out_of_a_record() -> None:
    assert parse(by_hand.header(0, 3) + by_hand.full_body(3, 2, (K0, V0), importance=()), Fit(WireKind.FULL, 1, 2)).rows == 3


# -- what is wrong -------------------------------------------------------------------------


@pytest.mark.parametrize(("data", "fit"), CASES)
def test_no_beginning_of_a_record_is_one(data: bytes, fit: Fit) -> None:
    for length in range(len(data)):
        with pytest.raises(FormatError):
            parse(data[:length], fit)


@pytest.mark.parametrize(("data", "fit"), CASES)
def test_bytes_behind_the_record_are_refused(data: bytes, fit: Fit) -> None:
    with pytest.raises(FormatError, match=f"1 bytes after the layer wire's record, which ends at byte {len(data)}"):
        parse(data + b"\0", fit)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"version": 1}, "version 1, expected 2"), ({"version": 3}, "version 3, expected 2"),
        ({"identity": 0}, "operator identity 0000000000000000, this layer's is 0000000000c0ffee"),
        ({"layer": 4}, "layer 4, this is layer 5"),
        ({"kind": 1}, r"kind 1 does not match this layer's FULL \(0\)"), ({"kind": 2}, "kind 2 does not match"),
        ({"kind": 9}, "kind 9 does not match"), ({"half": 2}, "half flag 2"), ({"half": 1}, "body has half flag 0, expected 1"),
        ({"reserved": 1}, "reserved bytes 0x0001"), ({"position": 4}, "3 rows from 0, its header says position 4"),
        ({"position": 1 << 63}, "position 9223372036854775808"),
    ],
)  # fmt: skip
def test_a_header_that_is_not_the_layers_is_refused(changes: dict[str, int], said: str) -> None:
    fields = {"kind": 0, "position": 3, "identity": 0xC0FFEE, "layer": 5} | changes
    with pytest.raises(FormatError, match=said):
        parse(by_hand.header(**fields) + legacy(), FIT)  # type: ignore[arg-type]


@pytest.mark.parametrize("position", [(1 << 48) + 1, 1 << 63, (1 << 64) - 1])
def test_a_position_no_sequence_has_is_refused(position: int) -> None:
    """Also where there are no rows it could be compared with."""
    body = by_hand.linear_body(1, 2, STATE)
    assert parse(by_hand.header(1, 1 << 48, identity=7, layer=1) + body, LINEAR).position == 1 << 48
    with pytest.raises(FormatError, match=f"at position {position}, expected at most {1 << 48}"):
        parse(by_hand.header(1, position, identity=7, layer=1) + body, LINEAR)


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (by_hand.full_body(3, 3, ((0.0,) * 9,) * 2), "1x3 numbers a position, this layer has 2x2"),
        (by_hand.full_body(3, 2, (K0, V0)), "1x2 numbers a position"),
        (by_hand.full_body(3, 2, (K0, V0, K0, V0)), "6 numbers of keys of head 1, expected 0"),
        (by_hand.full_body(3, 2, (K0, V0, (), V0)), "6 numbers of values of head 1, expected 0"),
        (by_hand.full_body(3, 2, ((), V0, (), ())), "0 numbers of keys of head 0, expected 6"),
        (by_hand.full_body(3, 2, (K0, V0[:4], (), ())), "4 numbers of values of head 0, expected 6"),
        (by_hand.full_body(3, 2, (K0, (*V0, 1.0), (), ())), "7 numbers of values of head 0, expected 6"),
        (by_hand.full_body(3, 2, (K0, V0, (), ()), importance=(1.0,)), "importance of 1 rows, expected 0 or 3"),
        (by_hand.full_body(3, 2, (K0, V0, (), ()), state=(1.0,)), "recurrent state of 1 numbers, this layer's has 0"),
        (by_hand.u32(2) + legacy()[4:], "half flag 2, expected 0"),
    ],
)  # fmt: skip
def test_a_body_that_is_not_the_layers_is_refused(body: bytes, said: str) -> None:
    head = by_hand.header(0, 3, identity=0xC0FFEE, layer=5)
    with pytest.raises(FormatError, match=said):
        parse(head + body, FIT)


def test_a_ring_whose_size_length_or_head_is_another_is_refused() -> None:
    head = by_hand.header(2, 11, identity=7, layer=3)
    for counts, said in (
        ((2, 2, 4, 4, 3), "ring of 4 rows, this layer's has 3"),
        ((2, 2, 3, 2, 2), "2 rows and head 2 at position 11, expected 3 and 2"),
        ((2, 2, 3, 3, 1), "3 rows and head 1 at position 11, expected 3 and 2"),
        ((1, 2, 3, 3, 2), "1x2 numbers a position"),
    ):
        with pytest.raises(FormatError, match=said):
            parse(head + by_hand.u32(*counts) + by_hand.floats(RINGS), RING)


def test_a_tail_starts_behind_the_start_and_ends_where_the_header_says() -> None:
    head = by_hand.header(3, 3, identity=0xC0FFEE, layer=5)
    with pytest.raises(FormatError, match="a tail whose base is 0"):
        parse(head + by_hand.u32(0, 0) + legacy(), FIT)
    with pytest.raises(FormatError, match="3 rows from 7, its header says position 9"):
        parse(tail().replace(by_hand.u32(6, 0), by_hand.u32(7, 0)), FIT)


def test_the_unversioned_body_is_taken_only_where_it_says_enough() -> None:
    with pytest.raises(FormatError, match="carries no operator identity"):
        parse(legacy(), replace(FIT, untagged=False))
    with pytest.raises(FormatError, match="carries no operator identity"):
        parse(bytes(4), replace(FIT, untagged=False))
    with pytest.raises(FormatError, match="has no ring"):
        parse(legacy(), RING)
    assert parse(full(), replace(FIT, untagged=False)).rows == 3


@pytest.mark.parametrize(("data", "fit"), CASES)
@pytest.mark.parametrize("claim", [1 << 31, (1 << 32) - 1])
def test_claims_beyond_the_bytes_are_refused_and_cost_nothing(data: bytes, fit: Fit, claim: int) -> None:
    """Wherever such a claim stands. Within numbers it is just a number."""
    tracemalloc.start()
    try:
        for at in range(0, len(data) - 3):
            try:
                parse(data[:at] + claim.to_bytes(4, "little") + data[at + 4 :], fit)
            except FormatError:
                pass
        assert tracemalloc.get_traced_memory()[1] < 64 << 10
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("rows", [1 << 31, (1 << 32) - 1])
def test_rows_that_are_claimed_everywhere_alike_cost_nothing(rows: int) -> None:
    head = by_hand.header(0, rows)
    for count in (0, rows):
        with pytest.raises(FormatError, match="cut short"):
            parse(head + by_hand.u32(0, rows, 1, 1, 0, count, rows) + bytes(64), Fit(WireKind.FULL, 1, 1))


@pytest.mark.parametrize(("data", "fit"), CASES)
@settings(deadline=None, max_examples=80)
@given(flips=st.lists(st.tuples(st.integers(0, 1 << 20), st.integers(1, 255)), min_size=1, max_size=4))
def test_a_flipped_record_is_refused_or_a_record_of_just_these_bytes(data: bytes, fit: Fit, flips: list[tuple[int, int]]) -> None:
    """What is accepted has one spelling, so nothing in it went unread."""
    flipped = bytearray(data)
    for at, bits in flips:
        flipped[at % len(data)] ^= bits
    try:
        record = parse(bytes(flipped), fit)
    except FormatError:
        return
    planes = [*record.keys, *record.values, *(part for part in (record.state, record.importance) if part is not None)]
    if record.half and any(np.isnan(plane).any() for plane in planes):
        return  # A quiet NaN may come back for a signalling one.
    assert written(record, bytes(flipped)) == bytes(flipped)
