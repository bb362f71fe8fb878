"""Wire messages: against the schema source, through the generated readers, and under attack."""

from __future__ import annotations

import re
import struct
import sys
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import MISSING, fields, replace
from pathlib import Path
from typing import Any

import flatbuffers
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from make_golden import CREATED_NS, LINEAGE, MESSAGES, NAMESPACE, REQUEST_ID, TOKENS

from warmkv.schema import messages as m
from warmkv.schema.errors import FormatError
from warmkv.schema.generated import wire_generated as gen

GOLDEN = Path(__file__).resolve().parent.parent / "golden"
SOURCE = Path(m.__file__).resolve().parent / "fbs" / "wire.fbs"
KINDS = sorted(m.CLASSES)
#: Types of one value each, and what they read as.
SCALARS = {"bool": bool, "double": float, **dict.fromkeys(("ubyte", "ushort", "uint", "ulong", "long"), int)}
INTEGERS = {
    "ubyte": (0, 2**8 - 1),
    "ushort": (0, 2**16 - 1),
    "uint": (0, 2**32 - 1),
    "ulong": (0, 2**64 - 1),
    "long": (-(2**63), 2**63 - 1),
}


def tables() -> dict[str, list[tuple[str, str, int]]]:
    """Table name to (field, type, default) in order, read from the schema source itself."""
    text = re.sub(r"//.*", "", SOURCE.read_text())
    found = {}
    for name, body in re.findall(r"table\s+(\w+)\s*\{(.*?)\}", text, re.DOTALL):
        parts = re.findall(r"(\w+)\s*:\s*([\w\[\]]+)\s*(?:=\s*(-?\d+)\s*)?;", body)
        found[name] = [(field, type_, int(default or 0)) for field, type_, default in parts]
    return found


TABLES = tables()


def types(kind: str) -> list[tuple[str, str]]:
    return [(field, type_) for field, type_, _ in TABLES[kind]]


def same(one: Any, other: Any) -> bool:
    """Equality of messages, arrays by dtype and content."""
    if type(one) is not type(other):
        return False
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and np.array_equal(one, other)
    if type(one) in m.CLASSES.values():
        return all(same(getattr(one, item.name), getattr(other, item.name)) for item in fields(one))
    return bool(one == other)


def altered(message: m.Message, field: str, value: Any) -> Any:
    """The message with one field of any value, fit or not."""
    changes: Any = {field: value}
    return replace(message, **changes)


def camel(name: str) -> str:
    return "".join(part.capitalize() for part in name.split("_"))


# -- the classes and the schema source --------------------------------------------------------


def test_there_is_one_class_for_each_table_and_one_sample_for_each_class() -> None:
    assert set(TABLES) - {"Message"} == set(m.CLASSES) == set(MESSAGES)
    union = re.search(r"union\s+Body\s*\{(.*?)\}", SOURCE.read_text(), re.DOTALL)
    assert union is not None
    assert [name.strip() for name in union[1].split(",")] == list(m.CLASSES)


@pytest.mark.parametrize("kind", KINDS)
def test_fields_are_those_of_the_table(kind: str) -> None:
    spellings = {"[ubyte]": "bytes", "[uint]": "array", "[ulong]": "array", "string": "text"}
    # Fields are added behind those there were: Acquired, which is a Matched with more, has another order.
    expected = {field: spellings.get(type_, "scalar") for field, type_, _ in TABLES[kind]}
    assert {field.name: field.kind for field in m.SPELLINGS[m.CLASSES[kind]].fields} == expected
    assert all(type_ in SCALARS for field, type_, _ in TABLES[kind] if expected[field] == "scalar")


@pytest.mark.parametrize("kind", KINDS)
def test_a_default_of_a_class_is_what_an_absent_field_means(kind: str) -> None:
    defaults = {field: SCALARS[type_](default) for field, type_, default in TABLES[kind] if type_ in SCALARS}
    for item in fields(m.CLASSES[kind]):
        if item.default is not MISSING and item.name in defaults:
            assert item.default == defaults[item.name] and type(item.default) is type(defaults[item.name])


@pytest.mark.parametrize("kind", KINDS)
def test_samples_leave_no_field_at_its_default(kind: str) -> None:
    for field, type_, default in TABLES[kind]:
        value = getattr(MESSAGES[kind], field)
        assert value != default if type_ in SCALARS else np.asarray(value).size, field


# -- golden -----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_golden_body(kind: str) -> None:
    data = (GOLDEN / f"wire_{kind.lower()}.bin").read_bytes()
    assert m.encode(MESSAGES[kind], REQUEST_ID) == data
    request_id, message = m.decode(data)
    assert request_id == REQUEST_ID
    assert same(message, MESSAGES[kind])


def test_a_commit_of_an_older_client_names_no_prefill_time() -> None:
    request_id, message = m.decode((GOLDEN / "wire_commit_1.bin").read_bytes())
    assert request_id == REQUEST_ID
    assert same(message, replace(MESSAGES["Commit"], prefill_us=0))


@pytest.mark.parametrize("kind", KINDS)
def test_golden_body_through_the_generated_readers(kind: str) -> None:
    data = (GOLDEN / f"wire_{kind.lower()}.bin").read_bytes()
    root = gen.Message.GetRootAs(data, 0)
    assert root.Id() == REQUEST_ID
    assert root.BodyType() == getattr(gen.Body, kind) == list(m.CLASSES).index(kind) + 1
    union = root.Body()
    table = getattr(gen, kind)()
    table.Init(union.Bytes, union.Pos)
    for field, type_, _ in TABLES[kind]:
        value, name = getattr(MESSAGES[kind], field), camel(field)
        if type_ == "string":
            assert getattr(table, name)() == value.encode()
        elif type_.startswith("["):
            read = getattr(table, name)
            assert [read(at) for at in range(getattr(table, name + "Length")())] == list(value), field
        else:
            assert getattr(table, name)() == value, field


def test_packed_spans_layout() -> None:
    span = np.zeros(1, m.SPAN_DTYPE)
    span["id"], span["start"], span["end"], span["container_bytes"] = np.arange(16), 1, 2**40, CREATED_NS
    assert span.tobytes() == struct.pack("<16sQQQ", bytes(range(16)), 1, 2**40, CREATED_NS)


def test_packed_groups_layout() -> None:
    group = np.zeros(1, m.GROUP_DTYPE)
    group["layer"], group["usable"] = 3, 2**40
    assert group.tobytes() == struct.pack("<QQ", 3, 2**40)


# -- round trips ------------------------------------------------------------------------------

LENGTHS = {"namespace": (0, 16), "lineage": (16,), "parent": (16,), "id": (16,), "window_parent": (0, 16)}


def value_of(field: str, type_: str) -> st.SearchStrategy[Any]:
    if type_ == "string":
        return st.text(st.characters(codec="utf-8"), max_size=30)
    if type_ == "bool":
        return st.booleans()
    if type_ == "double":
        return st.floats(allow_nan=False)
    if type_ == "[ubyte]":
        sizes = LENGTHS.get(field)
        if sizes is None:
            return st.binary(max_size=100)
        return st.one_of([st.binary(min_size=size, max_size=size) for size in sizes])
    if type_ in ("[uint]", "[ulong]"):
        dtype, (low, high) = ("<u4", INTEGERS["uint"]) if type_ == "[uint]" else ("<u8", INTEGERS["ulong"])
        return st.lists(st.integers(low, high), max_size=20).map(lambda ids: np.array(ids, dtype))
    return st.integers(*INTEGERS[type_])


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data(), request_id=st.integers(0, 2**64 - 1))
def test_round_trip(kind: str, data: st.DataObject, request_id: int) -> None:
    values = {field: data.draw(value_of(field, type_), label=field) for field, type_, _ in TABLES[kind]}
    message = m.CLASSES[kind](**values)
    body = m.encode(message, request_id)
    back_id, back = m.decode(body)
    assert back_id == request_id
    assert same(back, message)
    assert m.encode(back, request_id) == body


@pytest.mark.parametrize("kind", KINDS)
def test_every_scalar_reaches_both_ends_of_its_range_and_no_further(kind: str) -> None:
    for field, type_, _ in TABLES[kind]:
        if type_ in INTEGERS:
            low, high = INTEGERS[type_]
            for value in (low, high):
                message = altered(MESSAGES[kind], field, value)
                assert same(m.decode(m.encode(message, 1))[1], message)
            outside: tuple[Any, ...] = (low - 1, high + 1, 1.5, None, "1")
            for value in outside:
                with pytest.raises(FormatError):
                    m.encode(altered(MESSAGES[kind], field, value), 1)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if "double" in dict(types(kind)).values()])
def test_every_double_arrives_bit_for_bit(kind: str) -> None:
    for field, type_ in types(kind):
        if type_ == "double":
            for value in (0.0, 5e-324, 0.1, -812.5, 1e308, float("inf"), float("-inf"), float("nan")):
                _, back = m.decode(m.encode(altered(MESSAGES[kind], field, value), 1))
                assert struct.pack("<d", getattr(back, field)) == struct.pack("<d", value)
            wrong: tuple[Any, ...] = (None, "1", b"1", [1.0])
            for value in wrong:
                with pytest.raises(FormatError):
                    m.encode(altered(MESSAGES[kind], field, value), 1)


@pytest.mark.parametrize("request_id", [-1, 2**64, 1.5, None, "1"])
def test_request_ids_out_of_range_are_refused(request_id: Any) -> None:
    with pytest.raises(FormatError):
        m.encode(m.Pinned(1), request_id)


@pytest.mark.parametrize("kind", KINDS)
def test_vectors_and_text_of_another_type_are_refused(kind: str) -> None:
    for field, type_, _ in TABLES[kind]:
        if type_ in ("string", "[ubyte]"):
            for value in (None, 7, ["a"]):
                with pytest.raises(FormatError):
                    m.encode(altered(MESSAGES[kind], field, value), 1)


WRONG_ARRAYS: list[Any] = [
    np.arange(5),
    np.arange(5, dtype=np.uint8),
    np.arange(5, dtype="<i4"),
    np.ones(5, np.float32),
    np.ones((2, 2), "<u4"),
]


@pytest.mark.parametrize("tokens", WRONG_ARRAYS, ids=[f"{array.dtype} {array.ndim}d" for array in WRONG_ARRAYS])
def test_arrays_of_other_elements_are_refused_not_reinterpreted(tokens: Any) -> None:
    with pytest.raises(FormatError):
        m.encode(m.Match(NAMESPACE, LINEAGE, tokens), 1)
    if tokens.ndim == 1 and tokens.dtype.itemsize < 8:
        with pytest.raises(FormatError):
            m.encode(m.Release(tokens), 1)


@pytest.mark.parametrize("tokens", [TOKENS.astype(">u4"), np.repeat(TOKENS, 2)[::2], TOKENS.astype("<u4")])
def test_arrays_of_another_layout_keep_their_numbers(tokens: Any) -> None:
    (_, back) = m.decode(m.encode(m.Match(NAMESPACE, LINEAGE, tokens), 1))
    assert isinstance(back, m.Match)
    assert back.tokens.dtype == np.dtype("<u4")
    assert back.tokens.tolist() == TOKENS.tolist()


def test_text_for_people_always_arrives_and_other_text_is_exact() -> None:
    _, fault = m.decode(m.encode(m.Fault(1, "no file \udcff.toml", False), 1))
    assert isinstance(fault, m.Fault)
    assert fault.message == r"no file \udcff.toml"
    with pytest.raises(FormatError):
        m.encode(m.Open(b"", "share \udcff"), 1)


# -- absent and wrong lengths -----------------------------------------------------------------


def raw(kind: str, values: dict[str, Any], body_type: int | None = None) -> bytes:
    """A body built with the generated code alone; fields not named stay absent."""
    builder = flatbuffers.Builder(256)
    ready: dict[str, Any] = {}
    for field, value in values.items():
        if isinstance(value, bytes):
            ready[field] = builder.CreateByteVector(value)
        elif isinstance(value, np.ndarray):
            ready[field] = builder.CreateNumpyVector(value)
        else:
            ready[field] = builder.CreateString(value) if isinstance(value, str) else value
    getattr(gen, f"{kind}Start")(builder)
    for field, value in ready.items():
        getattr(gen, f"{kind}Add{camel(field)}")(builder, value)
    end = getattr(gen, f"{kind}End")(builder)
    gen.MessageStart(builder)
    gen.MessageAddId(builder, 9)
    gen.MessageAddBodyType(builder, getattr(gen.Body, kind) if body_type is None else body_type)
    gen.MessageAddBody(builder, end)
    builder.Finish(gen.MessageEnd(builder))
    return bytes(builder.Output())


def required(kind: str) -> dict[str, bytes]:
    return {field: bytes(16) for field, _, _ in TABLES[kind] if field in ("lineage", "parent", "id")}


@pytest.mark.parametrize("kind", KINDS)
def test_absent_fields_are_empty_or_their_default(kind: str) -> None:
    request_id, message = m.decode(raw(kind, required(kind)))
    assert request_id == 9
    for field, type_, default in TABLES[kind]:
        value = getattr(message, field)
        if field in required(kind):
            continue
        if type_ in ("[uint]", "[ulong]"):
            assert value.size == 0 and value.dtype == np.dtype("<u4" if type_ == "[uint]" else "<u8")
        else:
            expected: object = {"string": "", "[ubyte]": b"", "bool": False, "double": 0.0}.get(type_, default)
            assert value == expected and type(value) is type(expected), field


@pytest.mark.parametrize("kind", [kind for kind in KINDS if set(LENGTHS) & {field for field, _, _ in TABLES[kind]}])
def test_digests_of_another_length_are_refused(kind: str) -> None:
    for field, _, _ in TABLES[kind]:
        if field in LENGTHS:
            for length in (0, 1, 15, 17, 32, 4096):
                data = raw(kind, {**required(kind), field: bytes(length)})
                if length in LENGTHS[field]:
                    m.decode(data)
                else:
                    with pytest.raises(FormatError):
                        m.decode(data)


def test_text_that_is_not_utf8_is_refused() -> None:
    with pytest.raises(FormatError):
        m.decode(raw("Fault", {"message": b"\xff\xfe"}))


@pytest.mark.parametrize("body_type", [0, 24, 255])
def test_unknown_kinds_are_refused(body_type: int) -> None:
    with pytest.raises(FormatError):
        m.decode(raw("Pinned", {"held": 1}, body_type))


def test_tokens_written_by_the_byte_call_are_refused() -> None:
    with pytest.raises(FormatError):
        m.decode(raw("Match", {"lineage": bytes(16), "tokens": TOKENS.tobytes()}))


@pytest.mark.parametrize("body", [b"", bytes(3), bytes(15), bytes(16), bytes(64), b"\xff" * 64])
def test_bodies_of_nothing_are_refused(body: bytes) -> None:
    with pytest.raises(FormatError):
        m.decode(body)


def test_more_tokens_than_any_prompt_has_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    body = m.encode(m.Match(NAMESPACE, LINEAGE, TOKENS), 1)
    monkeypatch.setattr(m, "MAX_TOKENS", len(TOKENS))
    m.decode(body)
    monkeypatch.setattr(m, "MAX_TOKENS", len(TOKENS) - 1)
    with pytest.raises(FormatError):
        m.decode(body)


def test_a_body_above_the_cap_is_refused_unread() -> None:
    class Long(bytes):
        def __len__(self) -> int:
            return m.MAX_BODY_BYTES + 1

    with pytest.raises(FormatError):
        m.decode(Long(64))


# -- hostile bodies ---------------------------------------------------------------------------

MIB = 1 << 20


@contextmanager
def bounded(calls: int, peak_bytes: int) -> Iterator[None]:
    """At most so many function calls and so much memory inside: bounds on work without a clock."""
    seen = 0

    def count(frame: object, event: str, argument: object) -> None:
        nonlocal seen
        seen += event in ("call", "c_call")

    tracemalloc.start()
    sys.setprofile(count)
    try:
        yield
    finally:
        sys.setprofile(None)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert seen <= calls, f"{seen} calls"
    assert peak <= peak_bytes, f"{peak} bytes"


def outcome(body: bytes) -> m.Message | None:
    """A valid message, or None for FormatError; anything else fails the test."""
    try:
        request_id, message = m.decode(body)
    except FormatError:
        return None
    assert 0 <= request_id < 2**64
    kind = type(message).__name__
    for field, type_, _ in TABLES[kind]:
        value: Any = getattr(message, field)
        if type_ in INTEGERS:
            assert INTEGERS[type_][0] <= value <= INTEGERS[type_][1]
        elif field in LENGTHS:
            assert len(value) in LENGTHS[field]
        elif type_ in ("[uint]", "[ulong]"):
            assert value.ndim == 1 and value.flags.aligned and value.nbytes <= len(body)
        else:
            expected: Any = {"string": str, "[ubyte]": bytes, **SCALARS}[type_]
            assert type(value) is expected
            assert type_ in SCALARS or len(value) <= len(body)
    m.encode(message, request_id)
    return message


@pytest.mark.parametrize("kind", KINDS)
def test_every_byte_flip_is_refused_or_a_valid_message(kind: str) -> None:
    body = m.encode(MESSAGES[kind], 1)
    for at in range(len(body)):
        for mask in (1, 0x10, 0x80, 0xFF):
            broken = bytearray(body)
            broken[at] ^= mask
            outcome(bytes(broken))


@pytest.mark.parametrize("kind", KINDS)
def test_every_truncation_is_refused_or_a_valid_message(kind: str) -> None:
    body = m.encode(MESSAGES[kind], 1)
    for end in range(len(body)):
        outcome(body[:end])
        outcome(body[end:])


@pytest.mark.parametrize("kind", KINDS)
def test_every_word_may_lie_within_bounded_work(kind: str) -> None:
    """Lengths of 0xFFFFFFFF, offsets to themselves, to the end and backwards."""
    body = m.encode(MESSAGES[kind], 1)
    with bounded(calls=1500 * len(body), peak_bytes=4 * MIB):
        for at in range(0, len(body) - 3, 4):
            for lie in (0xFFFFFFFF, 0x80000000, 0, at, 2**32 - at, len(body) - at):
                try:
                    m.decode(body[:at] + struct.pack("<I", lie & 0xFFFFFFFF) + body[at + 4 :])
                except FormatError:
                    pass


def test_one_lie_costs_a_few_hundred_calls() -> None:
    body = m.encode(MESSAGES["Acquired"], 1)
    at = body.index(struct.pack("<I", 80) + bytes(range(40)))
    with bounded(calls=1000, peak_bytes=MIB), pytest.raises(FormatError):
        m.decode(body[:at] + b"\xff\xff\xff\xff" + body[at + 4 :])


def test_vectors_that_share_the_whole_body_cost_a_few_copies() -> None:
    """Every byte vector of a message may point at one large vector; five fields, five copies."""
    size = 8 * MIB
    builder = flatbuffers.Builder(size + 1024)
    big = builder.CreateNumpyVector(np.zeros(size, np.uint8))
    lineage = builder.CreateByteVector(bytes(16))
    gen.OfferStart(builder)
    gen.OfferAddLineage(builder, lineage)
    gen.OfferAddAttachments(builder, big)
    gen.OfferAddFields(builder, big)
    body = gen.OfferEnd(builder)
    gen.MessageStart(builder)
    gen.MessageAddBodyType(builder, gen.Body.Offer)
    gen.MessageAddBody(builder, body)
    builder.Finish(gen.MessageEnd(builder))
    data = bytes(builder.Output())
    with bounded(calls=1000, peak_bytes=2 * size + MIB):
        _, message = m.decode(data)
    assert isinstance(message, m.Offer) and len(message.fields) == len(message.attachments) == size


@given(st.binary(min_size=16, max_size=200))
def test_random_bodies_are_refused_or_valid(body: bytes) -> None:
    outcome(body)
    outcome(struct.pack("<I", 12) + body)


# -- bulk -------------------------------------------------------------------------------------


def test_200k_tokens_are_written_and_read_in_bulk() -> None:
    tokens = np.arange(200_000, dtype="<u4")
    message = m.Match(NAMESPACE, LINEAGE, tokens)
    with bounded(calls=1000, peak_bytes=6 * tokens.nbytes):
        body = m.encode(message, 1)
    with bounded(calls=300, peak_bytes=tokens.nbytes // 2):
        _, back = m.decode(body)
    assert isinstance(back, m.Match)
    assert np.array_equal(back.tokens, tokens)


def test_a_large_blob_is_written_and_read_in_bulk() -> None:
    blob = bytes(16 * MIB)
    with bounded(calls=1000, peak_bytes=6 * len(blob)):
        body = m.encode(m.Document(blob), 1)
    with bounded(calls=300, peak_bytes=len(blob) + MIB):
        _, back = m.decode(body)
    assert isinstance(back, m.Document) and back.json == blob
