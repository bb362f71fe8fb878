"""FlatBuffers tables of known fields, written and read in one go.

The builder and the accessors of the generated code cost a microsecond or more a field, which is
most of the time of a small request. What they do depends on little: which scalars are not at their
default, and how the vectors happen to be aligned. So the fixed part of a message (its tables, their
vtables and the root) is laid out once for each such case, and then one struct holds all of it. The
bytes are those the builder makes, to the last one.

Where fields lie and what they hold is learned from the generated setters, so that the schema stays
the only place that says so.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from warmkv.schema.errors import FormatError

#: What a generated setter calls the type of a scalar, and how struct does.
_FORMATS = {
    "Bool": "?", "Uint8": "B", "Uint16": "H", "Uint32": "I", "Uint64": "Q", "Int64": "q", "Float64": "d",
}  # fmt: skip
_SCALARS = {format_: struct.Struct("<" + format_) for format_ in _FORMATS.values()}
_U16, _U32, _I32 = struct.Struct("<H"), struct.Struct("<I"), struct.Struct("<i")
#: No type is aligned to more; where a table ends, modulo this, decides how it is laid out.
_ALIGNMENT = 8
_GAPS = tuple(bytes(gap) for gap in range(_ALIGNMENT))
#: Layouts that are kept; a kind of message has a dozen in practice.
MAX_CASES = 1024


@dataclass(frozen=True, slots=True)
class Field:
    """One field: ``format`` is that of struct for a scalar, or empty for a vector, text or table."""

    slot: int
    format: str
    default: int | float

    @property
    def size(self) -> int:
        return struct.calcsize("<" + self.format) if self.format else _U32.size


class _Listener:
    """Stands in for a builder and notes what a setter asks of it."""

    def __init__(self) -> None:
        self.heard: Field | None = None

    def __getattr__(self, name: str) -> Callable[[int, object, int | float], None]:
        kind = name.removeprefix("Prepend").removesuffix("Slot")

        def listen(slot: int, value: object, default: int | float) -> None:
            format_ = "" if kind == "UOffsetTRelative" else _FORMATS[kind]
            self.heard = Field(slot, format_, bool(default) if format_ == "?" else default)

        return listen


def field_of(setter: Callable[[Any, Any], None]) -> Field:
    """The field that a generated setter fills."""
    listener = _Listener()
    setter(listener, 0)
    assert listener.heard is not None
    return listener.heard


@dataclass(frozen=True, slots=True)
class _Placed:
    """A table in a message, everything counted in bytes from the end of the message: where the table
    and each of its fields begin, by slot, and the vtable that lies before it."""

    begin: int
    at: dict[int, int]
    vtable: bytes


def _place(fields: Sequence[Field], end: int) -> _Placed:
    """Lay out these fields, the first one last, before what lies behind ``end``."""
    here, at = end, {}
    for field in fields:
        here += -here % field.size + field.size
        at[field.slot] = here
    here += -here % _I32.size + _I32.size
    offsets = [here - at[slot] if slot in at else 0 for slot in range(max(at, default=-1) + 1)]
    return _Placed(here, at, struct.pack(f"<{len(offsets) + 2}H", 2 * len(offsets) + 4, here - end, *offsets))


class _Case:
    """The fixed part of messages whose envelope and body have these fields, and behind which lie
    ``end`` bytes modulo the greatest alignment, itself aligned to ``alignment``.

    ``vectors`` are the body's fields that hold offsets: which of them, and where each begins;
    ``body`` is what the envelope's last field holds, the offset of the body."""

    def __init__(self, envelope: Sequence[Field], fields: Sequence[Field], end: int, alignment: int) -> None:
        inner = _place(fields, end)
        inner_top = inner.begin + len(inner.vtable)
        outer = _place(envelope, inner_top)
        twice = outer.vtable == inner.vtable  # equal ones are written once
        outer_top = outer.begin + (0 if twice else len(outer.vtable))
        top = outer_top + _U32.size
        top += -top % max(alignment, _U32.size, *(field.size for field in (*envelope, *fields)))
        self.vectors = tuple((number, inner.at[field.slot]) for number, field in enumerate(fields) if not field.format)
        self.body = outer.at[envelope[-1].slot] - inner.begin
        fixed = {
            top: _U32.pack(top - outer.begin),
            inner_top: inner.vtable,
            inner.begin: _I32.pack(len(inner.vtable)),
            outer.begin: _I32.pack((inner_top if twice else outer_top) - outer.begin),
        }
        if not twice:
            fixed[outer_top] = outer.vtable
        given = {place.at[field.slot]: field for place, named in ((outer, envelope), (inner, fields)) for field in named}
        image, layout, here = bytearray(top - end), "<", top
        for begin in sorted(given, reverse=True):
            layout += f"{here - begin}x{given[begin].format or 'I'}"
            here = begin - given[begin].size
        self._given = struct.Struct(layout + f"{here - end}x")
        for begin, piece in fixed.items():
            image[top - begin : top - begin + len(piece)] = piece
        # Both parts are zero where the other one is not, and integers are joined in one step.
        self._image = int.from_bytes(image, "little")
        self._size = len(image)

    def pack(self, envelope: Sequence[object], values: Sequence[object]) -> bytes:
        """The fixed part with these values, for which it has room, in it."""
        given = int.from_bytes(self._given.pack(*reversed(envelope), *reversed(values)), "little")
        return (self._image | given).to_bytes(self._size, "little")


class Tables:
    """Messages of one kind: an envelope whose last field is the body, and that body's fields."""

    def __init__(self, envelope: Sequence[Field], fields: Sequence[Field]) -> None:
        self._envelope, self._fields = tuple(envelope), tuple(fields)
        self._plain = tuple((field.format, field.default) for field in fields)
        self._cases: dict[tuple[object, ...], _Case] = {}

    def write(self, envelope: Sequence[int], values: Sequence[Any]) -> bytes:
        """A message. ``envelope`` are the values of its fields but for the body, ``values`` those of the
        body: a vector as (elements, bytes that it is aligned to, data), data of text with its end.

        Raises struct.error, TypeError or OverflowError for a value its field cannot hold."""
        end, alignment = 0, 1
        behind: list[bytes] = []
        given: list[Any] = []
        shown: list[bool] = []
        for (format_, default), value in zip(self._plain, values, strict=True):
            if format_:
                there = value != default
                if there:
                    if format_ == "?" and value != 1:
                        raise TypeError(f"{value!r} is no truth value")
                    given.append(value)
                shown.append(there)
                continue
            count, step, data = value
            step = step if step > 4 else 4
            alignment = step if step > alignment else alignment
            gap = -(end + len(data)) % step
            end += gap + len(data) + 4
            behind += (_GAPS[gap], data, _U32.pack(count))
            given.append(end)
            shown.append(True)
        seen = [value != field.default for field, value in zip(self._envelope, envelope, strict=False)]
        here = end % _ALIGNMENT
        key = (*shown, *seen, here, alignment)
        case = self._cases.get(key) or self._remember(key, shown, [*seen, True], here, alignment)
        for number, at in case.vectors:
            given[number] = at + end - here - given[number]
        behind.append(case.pack([*(value for value, there in zip(envelope, seen, strict=True) if there), case.body], given))
        return b"".join(reversed(behind))

    def _remember(self, key: tuple[object, ...], shown: list[bool], seen: list[bool], end: int, alignment: int) -> _Case:
        if len(self._cases) >= MAX_CASES:
            self._cases.clear()
        envelope = [field for field, there in zip(self._envelope, seen, strict=True) if there]
        fields = [field for field, there in zip(self._fields, shown, strict=True) if there]
        case = self._cases[key] = _Case(envelope, fields, end, alignment)
        return case

    def read(self, data: bytes, at: int) -> list[Any]:
        """Values of the body's fields: scalars, and of vectors where their elements begin and how many
        there are; (0, 0) for one that is absent.

        Raises FormatError or struct.error for what lies outside of ``data``."""
        return read(self._fields, data, at)


def read(fields: Sequence[Field], data: bytes, at: int) -> list[Any]:
    """Values of a table's fields, as `Tables.read`."""
    table = at - _I32.unpack_from(data, at)[0]
    if at < 0 or table < 0:
        raise FormatError(f"a table at {at} has its field list at {table}")
    count = max(0, (_U16.unpack_from(data, table)[0] - 3) // 2)
    offsets = struct.unpack_from(f"<{count}H", data, table + 4)
    values: list[Any] = []
    for field in fields:
        offset = offsets[field.slot] if field.slot < count else 0
        if not offset:
            values.append(field.default if field.format else (0, 0))
        elif field.format:
            values.append(_SCALARS[field.format].unpack_from(data, at + offset)[0])
        else:
            begin = at + offset + _U32.unpack_from(data, at + offset)[0]
            values.append((begin + 4, _U32.unpack_from(data, begin)[0]))
    return values


def table_at(data: bytes, at: int) -> int:
    """Where the table begins that an offset at ``at`` points to."""
    return at + int(_U32.unpack_from(data, at)[0])
