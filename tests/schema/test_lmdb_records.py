"""Values and keys of the cold tier: golden, by hand, and refused when they are not theirs."""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from make_golden import ANCHOR, CREATED_NS, ID, IDENTITY, NAMESPACE_RECORD, OWNER_UID, SHARE, USAGE, golden_bytes

from warmkv.schema import canonical, lmdb_records
from warmkv.schema.errors import FormatError, IdentityError
from warmkv.schema.lmdb_records import Usage
from warmkv.schema.records import Anchor, AnchorKind, RecordId

GOLDEN = Path(__file__).resolve().parent.parent / "golden"
U64 = st.integers(0, 2**64 - 1)
DECODERS: dict[str, tuple[Callable[[bytes], object], object]] = {
    "lmdb_usage.bin": (lmdb_records.decode_usage, USAGE),
    "lmdb_namespace.bin": (lmdb_records.decode_namespace, NAMESPACE_RECORD),
    "lmdb_anchor.bin": (lmdb_records.decode_anchor, ANCHOR),
    "lmdb_format.bin": (lmdb_records.decode_format, (2, 1)),
    "lmdb_format_1.bin": (lmdb_records.decode_format, (1, 0)),
    "lmdb_chunk_key.bin": (lmdb_records.split_chunk_key, (ID, 0x01020304)),
}
NAMES = sorted(name for name in golden_bytes() if name.startswith("lmdb_"))


@pytest.mark.parametrize("name", NAMES)
def test_golden_bytes(name: str) -> None:
    assert golden_bytes()[name] == (GOLDEN / name).read_bytes()


@pytest.mark.parametrize("name", sorted(DECODERS))
def test_golden_bytes_are_read_back(name: str) -> None:
    decode, expected = DECODERS[name]
    assert decode((GOLDEN / name).read_bytes()) == expected


def test_golden_bytes_by_hand() -> None:
    golden = {name: (GOLDEN / name).read_bytes() for name in NAMES}
    assert golden["lmdb_usage.bin"] == struct.pack("<QQQQ", 2**40, 12, CREATED_NS, 0)
    assert golden["lmdb_format.bin"] == struct.pack("<HH", 2, 1)
    assert (GOLDEN / "lmdb_format_1.bin").read_bytes() == struct.pack("<HH", 1, 0)
    anchor = struct.pack("<QB3xIQq", 5, 3, 3, 0xFEDCBA9876543210, -17)
    assert golden["lmdb_anchor.bin"] == anchor
    assert golden["lmdb_chunk_key.bin"] == bytes(range(0xD0, 0xE0)) + b"\1\2\3\4"
    assert golden["lmdb_anchor_key.bin"] == bytes(range(0xD0, 0xE0)) + (5).to_bytes(8, "big") + b"\3"
    identity = (GOLDEN / "identity.bin").read_bytes()
    items = [
        struct.pack("<BI", 4, 9) + b"namespace",
        struct.pack("<BIq", 2, 8, OWNER_UID),
        struct.pack("<BI", 4, len(SHARE)) + SHARE.encode(),
        struct.pack("<BI", 5, len(identity)) + identity,
        struct.pack("<BIq", 2, 8, CREATED_NS),
    ]
    body = b"".join(items)
    assert golden["lmdb_namespace.bin"] == struct.pack("<BI", 6, len(body)) + body


def test_table_names_are_final() -> None:
    assert lmdb_records.TABLES == (
        b"meta",
        b"namespaces",
        b"segments",
        b"states",
        b"chunks",
        b"usage",
        b"anchors",
        b"quarantine",
        b"summaries",
    )


@given(U64, U64, U64)
def test_usage_round_trip(last_used: int, hits: int, pinned: int) -> None:
    usage = Usage(last_used, hits, pinned)
    assert lmdb_records.decode_usage(lmdb_records.encode_usage(usage)) == usage


@given(st.binary(min_size=16, max_size=16), st.lists(st.integers(0, 2**32 - 1), min_size=2, max_size=2))
def test_keys_of_one_record_lie_in_order(record: bytes, indices: list[int]) -> None:
    keys = [lmdb_records.chunk_key(RecordId(record), index) for index in indices]
    assert all(key.startswith(record) and len(key) == 20 for key in keys)
    assert (keys[0] < keys[1]) == (indices[0] < indices[1])
    assert [lmdb_records.split_chunk_key(key) for key in keys] == [(record, index) for index in indices]


@given(U64, U64, st.sampled_from(AnchorKind), st.sampled_from(AnchorKind))
def test_anchor_keys_lie_in_order_of_position(one: int, other: int, kind: AnchorKind, other_kind: AnchorKind) -> None:
    keys = [lmdb_records.anchor_key(ID, Anchor(position, of)) for position, of in ((one, kind), (other, other_kind))]
    assert all(len(key) == 25 for key in keys)
    assert (keys[0] < keys[1]) == ((one, kind) < (other, other_kind))


def test_keys_are_far_below_the_limit_of_lmdb() -> None:
    assert max(len(golden_bytes()[name]) for name in NAMES if name.endswith("_key.bin")) <= 64


@pytest.mark.parametrize("share", ["", "team", "größe", "x" * 400])
@pytest.mark.parametrize("uid", [0, 1000, 2**32 - 1])
def test_namespace_round_trip(uid: int, share: str) -> None:
    record = replace(NAMESPACE_RECORD, owner_uid=uid, share=share)
    assert lmdb_records.decode_namespace(lmdb_records.encode_namespace(record)) == record


IDENTITY_BYTES = IDENTITY.canonical()


@pytest.mark.parametrize(
    "value",
    [
        (),
        7,
        "names",
        b"names",
        ("namespace", 1, "", IDENTITY_BYTES),
        ("namespace", 1, "", IDENTITY_BYTES, 5, 5),
        ("namespaces", 1, "", IDENTITY_BYTES, 5),
        ("namespace", "1", "", IDENTITY_BYTES, 5),
        ("namespace", True, "", IDENTITY_BYTES, 5),
        ("namespace", 1.0, "", IDENTITY_BYTES, 5),
        ("namespace", 1, b"", IDENTITY_BYTES, 5),
        ("namespace", 1, "", IDENTITY_BYTES.hex(), 5),
        ("namespace", 1, "", IDENTITY_BYTES, "5"),
        ("namespace", 1, "", IDENTITY_BYTES, False),
        ("namespace", 1, "", b"", 5),
        ("namespace", 1, "", IDENTITY_BYTES[:-1], 5),
        ("namespace", 1, "", canonical.encode(("identity", 2, ())), 5),
    ],
)
def test_foreign_namespace_values_are_refused(value: Any) -> None:
    with pytest.raises((FormatError, IdentityError)):
        lmdb_records.decode_namespace(canonical.encode(value))


@pytest.mark.parametrize("name", sorted(DECODERS))
def test_every_other_length_is_refused(name: str) -> None:
    decode, _ = DECODERS[name]
    data = (GOLDEN / name).read_bytes()
    for end in range(len(data)):
        with pytest.raises((FormatError, IdentityError)):
            decode(data[:end])
    for tail in (b"\0", data):
        with pytest.raises((FormatError, IdentityError)):
            decode(data + tail)


@pytest.mark.parametrize("name", sorted(DECODERS))
def test_every_byte_flip_is_refused_or_read_as_another_value(name: str) -> None:
    decode, _ = DECODERS[name]
    data = (GOLDEN / name).read_bytes()
    for at in range(len(data)):
        for mask in (1, 0x80, 0xFF):
            broken = bytearray(data)
            broken[at] ^= mask
            try:
                decode(bytes(broken))
            except (FormatError, IdentityError):
                pass


def test_an_anchor_value_holds_one_anchor() -> None:
    one = lmdb_records.encode_anchor(ANCHOR)
    for data in (b"", one + one):
        with pytest.raises(FormatError):
            lmdb_records.decode_anchor(data)
