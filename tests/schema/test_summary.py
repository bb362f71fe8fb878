"""The row that a restart reads instead of a head: golden bytes, and nothing but them."""

from __future__ import annotations

import struct

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st
from make_golden import HERE as GOLDEN
from make_golden import ID, SUMMARY

from warmkv.schema import summary
from warmkv.schema.errors import FormatError, RecordError
from warmkv.schema.records import Attachment, RecordId
from warmkv.schema.summary import Summary

U64 = st.integers(0, 2**64 - 1)
DIGEST = st.binary(min_size=16, max_size=16)
SAMPLE = SUMMARY


def test_golden_bytes_field_by_field() -> None:
    golden = (GOLDEN / "lmdb_summary.bin").read_bytes()
    about = SUMMARY
    body = struct.pack("<HHI", 1, about.provides, about.tokens_at)
    body += struct.pack("<5Q", about.start, about.end, about.total_bytes, about.payload_bytes, about.created_ns)
    body += about.head_digest + about.namespace + about.lineage + about.parent
    writer = "écrit".encode()
    body += struct.pack("<HHII", 2, 1, 1, len(writer))
    body += struct.pack("<4Q", 3, 8, 5, 8) + bytes(range(16)) + struct.pack("<QQ32s", 5, 1, bytes(range(32, 64))) + writer
    assert golden == xxhash.xxh3_128_digest(ID + body) + body
    assert summary.decode(ID, golden) == about


@given(
    st.builds(
        Summary, DIGEST, DIGEST, DIGEST, DIGEST, U64, U64, U64, U64, U64, st.text(max_size=40), st.integers(0, 2**16 - 1),
        st.integers(0, 2**32 - 1), st.lists(st.tuples(U64, U64), max_size=4).map(tuple), st.lists(DIGEST, max_size=3).map(tuple),
        st.lists(st.builds(Attachment, U64, U64, st.binary(min_size=32, max_size=32)), max_size=3).map(tuple),
    ),
    DIGEST,
)  # fmt: skip
def test_a_row_round_trips(about: Summary, id_: RecordId) -> None:
    assert summary.decode(id_, summary.encode(id_, about)) == about


def test_every_flipped_bit_and_every_cut_is_noticed() -> None:
    row = summary.encode(ID, SAMPLE)
    for bit in range(8 * len(row)):
        changed = bytearray(row)
        changed[bit // 8] ^= 1 << bit % 8
        with pytest.raises(FormatError):
            summary.decode(ID, bytes(changed))
    for size in range(len(row)):
        with pytest.raises(FormatError):
            summary.decode(ID, row[:size])
    with pytest.raises(FormatError):
        summary.decode(ID, row + b"\0")


def test_a_row_belongs_to_one_record() -> None:
    with pytest.raises(FormatError):
        summary.decode(RecordId(bytes(range(1, 17))), summary.encode(ID, SAMPLE))


@given(st.binary(max_size=400))
def test_any_bytes_are_no_row(data: bytes) -> None:
    with pytest.raises(FormatError):
        summary.decode(ID, data)


def test_a_row_of_other_rules_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(summary, "VERSION", 2)
    row = summary.encode(ID, SAMPLE)
    monkeypatch.undo()
    with pytest.raises(FormatError, match="version 2, expected 1"):
        summary.decode(ID, row)


def test_a_value_its_field_cannot_hold_is_refused() -> None:
    for about in (SAMPLE._replace(start=-1), SAMPLE._replace(end=2**64), SAMPLE._replace(extents=((0, 2**64),))):
        with pytest.raises(RecordError):
            summary.encode(ID, about)
