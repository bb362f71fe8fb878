"""Messages written in one go: the same bytes as the FlatBuffers builder makes, read like its readers."""

from __future__ import annotations

import struct
from typing import Any

import flatbuffers
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from warmkv.schema import flat
from warmkv.schema import messages as m
from warmkv.schema.errors import FormatError
from warmkv.schema.generated import wire_generated as gen
from warmkv.schema.tables import MAX_CASES, Tables, field_of, read

KINDS = sorted(m.CLASSES)
ENVELOPE = [field_of(setter) for setter in (gen.MessageAddId, gen.MessageAddBodyType, gen.MessageAddBody)]
NUMBERS = {"B": 8, "H": 16, "I": 32, "Q": 64}


def setters(kind: str) -> list[Any]:
    """Generated setters of a table, in the order of its fields."""
    names = ["".join(part.capitalize() for part in field.name.split("_")) for field in m.SPELLINGS[m.CLASSES[kind]].fields]
    return [getattr(gen, f"{kind}Add{name}") for name in names]


def built(kind: str, values: list[Any], request_id: int) -> bytes:
    """The message as the builder and the generated code make it."""
    builder, placed = flatbuffers.Builder(64), []
    for value in values:
        if isinstance(value, str):
            placed.append(builder.CreateString(value))
        elif isinstance(value, bytes):
            placed.append(builder.CreateNumpyVector(np.frombuffer(value, np.uint8)))
        elif isinstance(value, np.ndarray):
            placed.append(builder.CreateNumpyVector(value))
        else:
            placed.append(value)
    getattr(gen, f"{kind}Start")(builder)
    for setter, value in zip(setters(kind), placed, strict=True):
        setter(builder, value)
    body = getattr(gen, f"{kind}End")(builder)
    gen.MessageStart(builder)
    gen.MessageAddId(builder, request_id)
    gen.MessageAddBodyType(builder, getattr(gen.Body, kind))
    gen.MessageAddBody(builder, body)
    builder.Finish(gen.MessageEnd(builder))
    return bytes(builder.Output())


def value_of(field: Any, named: Any) -> st.SearchStrategy[Any]:
    """Values of a field; most scalars at their default, as in real messages."""
    if named.kind == "text":
        return st.text(st.characters(codec="utf-8"), max_size=40)
    if named.kind == "bytes":
        return st.binary(max_size=40)
    if named.kind == "array":
        dtype = "<u8" if named.name == "leases" else "<u4"
        return st.lists(st.integers(0, 2**32 - 1), max_size=9).map(lambda items: np.array(items, dtype))
    if field.format == "?":
        return st.booleans()
    if field.format == "d":
        return st.just(0.0) | st.floats(allow_nan=False)
    if field.format == "q":
        return st.just(field.default) | st.integers(-(2**63), 2**63 - 1)
    return st.just(field.default) | st.integers(0, 2 ** NUMBERS[field.format] - 1)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=60)
@given(data=st.data(), request_id=st.just(0) | st.integers(0, 2**64 - 1))
def test_bytes_are_those_of_the_builder(kind: str, data: st.DataObject, request_id: int) -> None:
    spelled = m.SPELLINGS[m.CLASSES[kind]].fields
    fields = [field_of(setter) for setter in setters(kind)]
    values = [data.draw(value_of(field, named)) for field, named in zip(fields, spelled, strict=True)]
    assert m.encode(m.CLASSES[kind](*values), request_id) == built(kind, values, request_id)


def test_a_body_with_the_field_list_of_its_envelope_shares_it() -> None:
    """Both lists are equal where three fields lie as those of the envelope do: written once."""
    builder = flatbuffers.Builder(64)

    def table(id_: int, kind: int, inside: int) -> int:
        gen.MessageStart(builder)
        gen.MessageAddId(builder, id_)
        gen.MessageAddBodyType(builder, kind)
        gen.MessageAddBody(builder, inside)
        return int(gen.MessageEnd(builder))

    builder.Finish(table(7, 8, table(5, 6, builder.CreateString("x"))))
    assert Tables(ENVELOPE, ENVELOPE).write((7, 8), [5, 6, (1, 1, b"x\0")]) == bytes(builder.Output())


@pytest.mark.parametrize(
    ("format_", "value"),
    [("B", 256), ("B", -1), ("H", 1 << 16), ("I", 1 << 32), ("Q", 1 << 64), ("q", 1 << 63), ("?", 2), ("Q", 1.5)],
)
def test_a_value_its_field_cannot_hold_is_refused(format_: str, value: object) -> None:
    for kind in KINDS:
        fields = [field_of(setter) for setter in setters(kind)]
        at = next((number for number, field in enumerate(fields) if field.format == format_), None)
        if at is not None:
            values: list[Any] = [field.default if field.format else (0, 1, b"") for field in fields]
            values[at] = value
            with pytest.raises((struct.error, TypeError, OverflowError)):
                Tables(ENVELOPE, fields).write((1, 1), values)
            return
    pytest.fail(f"no message has a field of format {format_}")


def test_layouts_that_are_kept_are_bounded() -> None:
    fields = [field_of(setter) for setter in setters("Acquired")]
    tables, scalars = Tables(ENVELOPE, fields), [number for number, field in enumerate(fields) if field.format]
    for case in range(MAX_CASES + 50):
        values: list[Any] = [field.default if field.format else (0, 1, b"") for field in fields]
        for bit, number in enumerate(scalars[:11]):
            values[number] = 1 if case >> bit & 1 else values[number]
        tables.write((1, 1), values)
    assert 0 < len(tables._cases) <= MAX_CASES


@pytest.mark.parametrize("kind", KINDS)
def test_no_cut_or_flipped_message_reads_outside_itself(kind: str) -> None:
    fields = [field_of(setter) for setter in setters(kind)]
    values = [b"0123456789abcdef" if named.kind == "bytes" else "text" if named.kind == "text" else
              np.arange(1, 4, dtype="<u8" if named.name == "leases" else "<u4") if named.kind == "array" else 1
              for named in m.SPELLINGS[m.CLASSES[kind]].fields]  # fmt: skip
    whole = built(kind, [bool(v) if f.format == "?" else v for v, f in zip(values, fields, strict=True)], 1)
    for at in range(len(whole)):
        for broken in (whole[:at], whole[:at] + bytes([whole[at] ^ 0xFF]) + whole[at + 1 :]):
            try:
                _, message = m.decode(broken)
            except FormatError:
                continue
            for value in (getattr(message, name) for name in message.__dataclass_fields__):
                if isinstance(value, (bytes, str)):
                    assert len(value) <= len(broken)


def test_a_field_list_before_the_message_is_refused() -> None:
    data = struct.pack("<iI", 100, 0) + bytes(16)
    with pytest.raises(FormatError, match="field list"), flat.reading("message"):
        read(ENVELOPE, data, 0)
