"""Snapshot packs: what was written is read, and nothing else is; golden layout by hand."""

from __future__ import annotations

import hashlib
import io
import struct
from collections.abc import Iterator

import pytest
import xxhash

from warmkv.schema.errors import DigestError, FormatError, TooNewError
from warmkv.schema.pack_file import BLOCK_BYTES, PIECE_BYTES, PackReader, PackWriter, Take
from warmkv.schema.records import Anchor, AnchorKind, pack_anchors

IDENTITY = b"the canonical bytes of an identity"
ANCHORS = (Anchor(3, AnchorKind.TURN), Anchor(7, AnchorKind.SYSTEM_PROMPT, 2, 99))
CONTAINERS = [(ANCHORS, bytes(range(100))), ((), b"z" * 300), (ANCHORS[:1], b"y" * 65)]
Records = list[tuple[tuple[Anchor, ...], bytes]]


def pieces_of(data: bytes) -> Iterator[bytes]:
    yield from (data[at : at + 37] for at in range(0, len(data), 37))


def packed(records: Records = CONTAINERS) -> bytes:
    out = io.BytesIO()

    def write(data: bytes | memoryview, at: int) -> None:
        out.seek(at)
        out.write(data)

    writer = PackWriter(write, IDENTITY, 5)
    for anchors, data in records:
        writer.record(anchors, len(data), lambda take, data=data: [take(piece) for piece in pieces_of(data)])  # type: ignore[misc]
    writer.finish()
    return out.getvalue()[: writer.total_bytes]


def read(data: bytes, claimed: int | None = None) -> tuple[bytes, Records]:
    """Identity and records, as far as a reader hands them over whole."""
    reader = PackReader(io.BytesIO(data).read, len(data) if claimed is None else claimed)
    return reader.identity, [(item.anchors, b"".join(item.pieces)) for item in reader.records()]


def whole_before(data: bytes) -> Records:
    """What a reader had handed over when it raised."""
    found: Records = []
    with pytest.raises(FormatError):
        for item in PackReader(io.BytesIO(data).read, len(data)).records():
            found.append((item.anchors, b"".join(item.pieces)))
    return found


def test_what_was_written_is_read() -> None:
    assert read(packed()) == (IDENTITY, CONTAINERS)
    assert read(packed([])) == (IDENTITY, [])


@pytest.mark.parametrize(("told", "kept"), [(0, 0), (7, 7), (2**32 - 1, 2**32 - 1), (2**40, 2**32 - 1)])
def test_the_time_of_computing_is_kept(told: int, kept: int) -> None:
    parts: dict[int, bytes] = {}
    writer = PackWriter(lambda data, at: parts.__setitem__(at, bytes(data)), IDENTITY, 5)
    writer.record((), 100, lambda take: take(b"x" * 100), told)
    writer.finish()
    raw = b"".join(parts[at] for at in sorted(parts))
    assert [(item.prefill_us, len(b"".join(item.pieces))) for item in PackReader(io.BytesIO(raw).read, len(raw)).records()] == [
        (kept, 100)
    ]


def test_a_large_container_comes_in_pieces() -> None:
    data = b"x" * (PIECE_BYTES + 1000)
    raw = packed([((), data)])
    (item,) = [[len(piece) for piece in item.pieces] for item in PackReader(io.BytesIO(raw).read, len(raw)).records()]
    assert item == [PIECE_BYTES, 1000]


def test_the_layout_is_the_one_described() -> None:
    head = struct.pack("<8sHHIQQ16s", b"WARMKVP\n", 1, 0, 0, len(IDENTITY), 5, b"")
    first = xxhash.xxh3_128_digest(head + IDENTITY)
    anchors, data = CONTAINERS[0]
    block = struct.pack("<8sQQQ16s", b"RECORD\r\n", len(pack_anchors(anchors)), len(data), 0, b"")
    second = xxhash.xxh3_128_digest(pack_anchors(anchors) + data)
    body = head + first + IDENTITY + block + xxhash.xxh3_128_digest(block) + pack_anchors(anchors) + data + second
    total = hashlib.blake2b(first + second, digest_size=16).digest()
    end = struct.pack("<8sQQQ16s", b"THE END\n", 1, len(body), 0, total)
    assert packed(CONTAINERS[:1]) == body + end + xxhash.xxh3_128_digest(end)


def test_every_flipped_byte_is_noticed_before_its_record_counts() -> None:
    raw = packed()
    for at in range(len(raw)):
        for flip in (1, 0x80):
            bad = bytearray(raw)
            bad[at] ^= flip
            found = whole_before(bytes(bad))
            assert found == CONTAINERS[: len(found)]


def test_every_cut_is_noticed_before_its_record_counts() -> None:
    raw = packed()
    for end in range(len(raw)):
        found = whole_before(raw[:end])
        assert found == CONTAINERS[: len(found)]


@pytest.mark.parametrize("more", [b"\0", b"x" * BLOCK_BYTES])
def test_bytes_behind_the_end_are_no_part_of_a_pack(more: bytes) -> None:
    with pytest.raises(FormatError, match="behind the end"):
        read(packed() + more)


def test_records_cannot_change_places() -> None:
    one, other = packed(CONTAINERS[:1]), packed(CONTAINERS[1:2])
    start = BLOCK_BYTES + len(IDENTITY)
    both, swapped = packed(CONTAINERS[:2]), one[:start] + other[start:-BLOCK_BYTES] + one[start:-BLOCK_BYTES]
    assert len(both) == len(swapped) + BLOCK_BYTES
    with pytest.raises(DigestError, match="does not belong"):
        read(swapped + both[-BLOCK_BYTES:])


def sealed(block: bytes) -> bytes:
    return block + xxhash.xxh3_128_digest(block)


@pytest.mark.parametrize("container_bytes", [0, 63, 64, 2**31, 2**44, 2**62, 2**63, 2**64 - 1])
@pytest.mark.parametrize("anchor_bytes", [0, 31, 2**32, 2**63])
def test_a_length_that_the_file_does_not_bear_out_allocates_nothing(anchor_bytes: int, container_bytes: int) -> None:
    head = packed([])[: BLOCK_BYTES + len(IDENTITY)]
    data = head + sealed(struct.pack("<8sQQQ16s", b"RECORD\r\n", anchor_bytes, container_bytes, 0, b"")) + b"x" * 200
    largest, source = 0, io.BytesIO(data)

    def counted(size: int) -> bytes:
        nonlocal largest
        largest = max(largest, size)
        return source.read(size)

    with pytest.raises(FormatError):
        for item in PackReader(counted, len(data)).records():
            list(item.pieces)
    assert largest <= len(data)


def preamble(magic: bytes = b"WARMKVP\n", major: int = 1, flags: int = 0, size: int = len(IDENTITY), rest: bytes = b"") -> bytes:
    head = struct.pack("<8sHHIQQ16s", magic, major, 0, flags, size, 5, rest)
    return head + xxhash.xxh3_128_digest(head + IDENTITY) + IDENTITY + packed([])[BLOCK_BYTES + len(IDENTITY) :]


def test_preambles_that_are_none() -> None:
    assert PackReader(io.BytesIO(preamble()).read, 1000).identity == IDENTITY
    for bad in (
        preamble(b"WARMKV\r\n"), preamble(major=0), preamble(flags=1), preamble(size=0), preamble(size=1 << 40),
        preamble(rest=b"x"), b"",
    ):  # fmt: skip
        with pytest.raises(FormatError):
            read(bad)
    with pytest.raises(TooNewError, match="version 2"):
        read(preamble(major=2))


@pytest.mark.parametrize("claimed", [99, 101])
def test_a_container_of_another_size_than_announced_is_refused(claimed: int) -> None:
    out: dict[int, bytes] = {}
    writer = PackWriter(lambda data, at: out.__setitem__(at, bytes(data)), IDENTITY, 5)
    before = writer.total_bytes
    with pytest.raises(FormatError, match=f"of {claimed} bytes came as 100"):
        writer.record((), claimed, lambda take: take(b"x" * 100))
    assert (writer.total_bytes, writer.records) == (before, 0)


def test_a_record_that_failed_is_written_over() -> None:
    out = io.BytesIO()

    def write(data: bytes | memoryview, at: int) -> None:
        out.seek(at)
        out.write(data)

    def fails(take: Take) -> None:
        take(b"half of it")
        raise OSError("no more")

    writer = PackWriter(write, IDENTITY, 5)
    with pytest.raises(OSError):
        writer.record(ANCHORS, 1000, fails)
    for anchors, data in CONTAINERS:
        writer.record(anchors, len(data), lambda take, data=data: take(data))  # type: ignore[misc]
    writer.finish()
    assert out.getvalue()[: writer.total_bytes] == packed()
