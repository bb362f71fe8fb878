"""Canonical bytes: spelled by hand with struct, and attacked as a decoder of foreign bytes."""

from __future__ import annotations

import struct
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from warmkv.schema import canonical
from warmkv.schema.errors import FormatError

BOOL, INT, FLOAT, TEXT, BYTES, LIST = range(1, 7)


def item(kind: int, body: bytes) -> bytes:
    return bytes([kind]) + len(body).to_bytes(4, "little") + body


SCALARS = (
    st.booleans()
    | st.integers(-(2**63), 2**63 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(codec="utf-8"), max_size=20)
    | st.binary(max_size=20)
)
VALUES = st.recursive(SCALARS, lambda inner: st.lists(inner, max_size=4).map(tuple), max_leaves=12)


def typed(value: canonical.Value) -> object:
    """The value with its types, because True == 1 == 1.0 and 0.0 == -0.0 in Python."""
    if isinstance(value, tuple):
        return ("list", tuple(typed(part) for part in value))
    return (type(value), value)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (True, item(BOOL, b"\1")),
        (False, item(BOOL, b"\0")),
        (0, item(INT, bytes(8))),
        (-1, item(INT, b"\xff" * 8)),
        (2**63 - 1, item(INT, b"\xff" * 7 + b"\x7f")),
        (-(2**63), item(INT, bytes(7) + b"\x80")),
        (1.5, item(FLOAT, struct.pack("<d", 1.5))),
        (5e-324, item(FLOAT, b"\1" + bytes(7))),
        ("", item(TEXT, b"")),
        ("né", item(TEXT, b"n\xc3\xa9")),
        (b"\0\xff", item(BYTES, b"\0\xff")),
        (bytearray(b"ab"), item(BYTES, b"ab")),
        (memoryview(b"ab"), item(BYTES, b"ab")),
        ((), item(LIST, b"")),
        ([1, ("a", [])], item(LIST, item(INT, b"\1" + bytes(7)) + item(LIST, item(TEXT, b"a") + item(LIST, b"")))),
    ],
)
def test_spelling_is_type_length_body(value: canonical.Value, expected: bytes) -> None:
    assert canonical.encode(value) == expected


def test_text_is_never_normalised() -> None:
    assert canonical.encode("\u00e9") != canonical.encode("e\u0301")


def test_both_zeros_have_one_spelling() -> None:
    assert canonical.encode(-0.0) == canonical.encode(0.0) == item(FLOAT, bytes(8))


@pytest.mark.parametrize("body", [struct.pack("<d", number) for number in (-0.0, float("nan"), float("inf"), float("-inf"))])
def test_second_spellings_of_floats_are_refused(body: bytes) -> None:
    with pytest.raises(FormatError):
        canonical.decode(item(FLOAT, body))


def test_equal_looking_values_of_different_types_differ() -> None:
    spellings = [canonical.encode(value) for value in (0, 0.0, False, "", b"", (), "0", b"0", (0,), ((),))]
    assert len(set(spellings)) == len(spellings)


@pytest.mark.parametrize(
    "value",
    [
        None,
        {},
        {"a": 1},
        {1},
        object(),
        2**63,
        -(2**63) - 1,
        float("nan"),
        float("inf"),
        float("-inf"),
        "\udc80",
        ("deep", [("\ud800",)]),
        (1, None),
    ],
)
def test_values_without_a_spelling_are_refused(value: canonical.Value) -> None:
    with pytest.raises(FormatError):
        canonical.encode(value)


def test_what_can_be_written_can_be_read_and_no_deeper() -> None:
    value: canonical.Value = ()
    for _ in range(canonical.MAX_DEPTH):
        value = (value,)
    assert canonical.decode(canonical.encode(value)) == value
    with pytest.raises(FormatError, match="deeper"):
        canonical.encode((value,))
    with pytest.raises(FormatError, match="deeper"):
        canonical.decode(item(LIST, canonical.encode(value)))


def test_bottomless_nesting_is_an_error_not_a_recursion() -> None:
    value: list[object] = []
    value.append(value)
    with pytest.raises(FormatError):
        canonical.encode(value)  # type: ignore[arg-type]
    data = b""
    for _ in range(5000):
        data = item(LIST, data)
    with pytest.raises(FormatError):
        canonical.decode(data)


@given(VALUES)
def test_round_trip(value: canonical.Value) -> None:
    assert typed(canonical.decode(canonical.encode(value))) == typed(value)


@given(VALUES, VALUES)
def test_one_spelling_per_value(one: canonical.Value, other: canonical.Value) -> None:
    same = canonical.encode(one) == canonical.encode(other)
    assert same == (typed(one) == typed(other))


@given(st.binary(max_size=64) | VALUES.map(canonical.encode).flatmap(lambda data: st.just(data) | st.just(data[:-1])))
def test_whatever_is_accepted_is_in_canonical_form(data: bytes) -> None:
    try:
        value = canonical.decode(data)
    except FormatError:
        return
    assert canonical.encode(value) == data


SAMPLE = canonical.encode(("identity", 1, (("a", 1.5), ("b", True), ("c", (b"xyz", "é", -7)))))


def test_every_byte_flip_is_refused_or_another_value() -> None:
    seen = set()
    for at in range(len(SAMPLE)):
        for mask in (1, 2, 4, 8, 16, 32, 64, 128, 255):
            data = bytearray(SAMPLE)
            data[at] ^= mask
            try:
                value = canonical.decode(bytes(data))
            except FormatError:
                continue
            assert canonical.encode(value) == bytes(data)
            seen.add(repr(typed(value)))
    assert repr(typed(canonical.decode(SAMPLE))) not in seen


def test_every_truncation_and_every_tail_is_refused() -> None:
    for end in range(len(SAMPLE)):
        with pytest.raises(FormatError):
            canonical.decode(SAMPLE[:end])
    for tail in (b"\0", SAMPLE, item(LIST, b"")):
        with pytest.raises(FormatError):
            canonical.decode(SAMPLE + tail)


@pytest.mark.parametrize("kind", [BOOL, INT, FLOAT, TEXT, BYTES, LIST, 0, 7, 255])
def test_claimed_lengths_allocate_nothing(kind: int) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(FormatError):
            canonical.decode(bytes([kind]) + b"\xff\xff\xff\xff" + bytes(64))
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    "data",
    [
        item(BOOL, b"\2"),
        item(BOOL, b""),
        item(BOOL, b"\1\1"),
        item(INT, bytes(7)),
        item(INT, bytes(9)),
        item(FLOAT, bytes(4)),
        item(TEXT, b"\xff"),
        item(TEXT, b"\xed\xa0\x80"),
        item(0, b""),
        item(7, b""),
        item(LIST, b"\1"),
        item(LIST, item(INT, bytes(8))[:-1]),
        b"",
    ],
)
def test_malformed_items_are_refused(data: bytes) -> None:
    with pytest.raises(FormatError):
        canonical.decode(data)
