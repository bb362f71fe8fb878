"""Bytes that are almost right: a valid sample and a short program of edits.

The same programs are drawn at random by `run_fuzz` and by Hypothesis in the tests, so that a
failing one is written down as three small numbers an edit. A `Repair` sets right what would end
reading at once (lengths, digests), so that edits reach what lies behind it.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Sequence
from dataclasses import replace

import xxhash

from warmkv.schema import ids, segment
from warmkv.schema.errors import WarmKVError
from warmkv.schema.records import coverage

#: What to do, where (in 65536ths of the length), and with what.
Edit = tuple[int, int, int]
Repair = Callable[[bytes], bytes]

SCALE = 1 << 16
MAX_EDITS = 6
#: No edit makes more of a sample than this: long inputs are slow, and their caps have tests of their own.
MAX_BYTES = 1 << 15
NUMBERS = (
    0, 1, 2, 3, 4, 15, 16, 17, 63, 64, 127, 128, 255, 256, 4095, 4096, 2**16 - 1, 2**16, 2**24, 2**24 + 1,
    2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**44, 2**62, 2**63 - 1, 2**63, 2**64 - 1,
)  # fmt: skip


def edited(sample: bytes, edits: Sequence[Edit], others: Sequence[bytes]) -> bytes:
    """``sample`` after all edits; parts of ``others`` may be put into it."""
    data = bytearray(sample)
    for kind, place, value in edits:
        at = place * (len(data) + 1) // SCALE
        _EDITS[kind % len(_EDITS)](data, at, value, others)
        del data[MAX_BYTES:]
    return bytes(data)


def spelled(program: bytes) -> tuple[int, bool, list[Edit]]:
    """Which sample, whether to repair it, and edits, as bytes spell them: any bytes do."""
    rows = range(2, len(program) - 4, 5)
    edits = [(program[at], program[at + 1] << 8 | program[at + 2], program[at + 3] << 8 | program[at + 4]) for at in rows]
    return program[0], bool(program[1] & 1), edits


def random_edits(rng: random.Random) -> list[Edit]:
    """Mostly one edit, seldom many."""
    count = 1
    while count < MAX_EDITS and rng.random() < 0.4:
        count += 1
    return [(rng.randrange(len(_EDITS)), rng.randrange(SCALE), rng.randrange(SCALE)) for _ in range(count)]


def _flip(data: bytearray, at: int, value: int, others: Sequence[bytes]) -> None:
    if data:
        data[at % len(data)] ^= (value & 0xFF) or 1


def _number(data: bytearray, at: int, value: int, others: Sequence[bytes]) -> None:
    """A length, offset or count of an awkward size, aligned as such fields are."""
    size = (1, 2, 4, 8)[value & 3]
    at = at // size * size
    data[at : at + size] = (NUMBERS[(value >> 2) % len(NUMBERS)] % (1 << 8 * size)).to_bytes(size, "little")


def _nearby(data: bytearray, at: int, value: int, others: Sequence[bytes]) -> None:
    """A number a little more or less than it is."""
    size = (1, 2, 4, 8)[value & 3]
    at = at // size * size
    more = int.from_bytes(data[at : at + size], "little") + (value >> 2) % 129 - 64
    data[at : at + size] = (more % (1 << 8 * size)).to_bytes(size, "little")


def _cut(data: bytearray, at: int, value: int, others: Sequence[bytes]) -> None:
    del data[at:]


def _drop(data: bytearray, at: int, value: int, others: Sequence[bytes]) -> None:
    del data[at : at + 1 + value % 64]


def _repeat(data: bytearray, at: int, value: int, others: Sequence[bytes]) -> None:
    """A piece, a row of a table perhaps, several times over."""
    size = (1, 4, 8, 16, 24, 32, 40, 48, 72, 128)[value % 10]
    data[at:at] = data[at : at + size] * (1 + value // 10 % 40)


def _insert(data: bytearray, at: int, value: int, others: Sequence[bytes]) -> None:
    data[at:at] = bytes([value & 0xFF]) * (1 + (value >> 8) % 64)


def _move(data: bytearray, at: int, value: int, others: Sequence[bytes]) -> None:
    """A piece over another one."""
    start = value * (len(data) + 1) // SCALE
    piece = data[start : start + 1 + value % 48]
    data[at : at + len(piece)] = piece


def _splice(data: bytearray, at: int, value: int, others: Sequence[bytes]) -> None:
    """The rest of another sample."""
    if others:
        other = others[value % len(others)]
        data[at:] = other[at * len(other) // max(1, len(data)) :]


_EDITS = (_flip, _number, _nearby, _cut, _drop, _repeat, _insert, _move, _splice, _number, _flip)


def repair_nothing(data: bytes) -> bytes:
    return data


def repair_head(data: bytes) -> bytes:
    """The preamble's length, payload offset and digest fit the header that follows."""
    if len(data) < segment.PREAMBLE.size:
        return data
    return _head(data, data[segment.PREAMBLE.size :], None)


def repair_container(data: bytes) -> bytes:
    """Offsets, sizes and all digests fit the bytes; the id fits where it needs no other tokens."""
    size = segment.PREAMBLE.size
    if len(data) < size:
        return data
    header_bytes = segment.PREAMBLE.unpack(data[:size])[6]
    offset = segment.align(size + header_bytes, segment.PAYLOAD_ALIGNMENT)
    if offset > len(data):
        return data
    payload = data[offset:]
    head = _head(data, data[size : size + header_bytes], len(payload))
    try:
        header = segment.decode_head(head).header
        header = replace(header, digests=segment.payload_digests(payload))
        if isinstance(header, segment.SegmentHeader) and header.start == 0:
            covered = coverage(header.planes)
            made = ids.segment_id(header.namespace, header.lineage, 0, covered, header.attachments, header.tokens)
            header = replace(header, id=made)
        again = segment.encode_head(header, len(payload))
    except WarmKVError:
        return head + data[len(head) :]
    if segment.align(len(again), segment.PAYLOAD_ALIGNMENT) != offset:
        return head + data[len(head) :]
    return again.ljust(offset, b"\0") + payload


def repair_value(data: bytes) -> bytes:
    """The digest of a summary fits its record and its row; other values have none."""
    if len(data) < 33 or data[0] % 6 != 5:
        return data
    return data[:17] + xxhash.xxh3_128_digest(data[1:17] + data[33:]) + data[33:]


def repair_pack(data: bytes) -> bytes:
    """All digests of a pack fit what lies between them, as far as its lengths lead."""
    out, seal, at, records = bytearray(data), hashlib.blake2b(digest_size=16), 64, 0
    if len(data) < 64:
        return data
    end = at + int.from_bytes(data[16:24], "little")
    digest = xxhash.xxh3_128_digest(data[:48] + data[at:end])
    out[48:64] = digest
    while len(out) - end >= 64 and end <= len(data):
        seal.update(digest)
        if out[end : end + 8] != b"RECORD\r\n":
            out[end + 8 : end + 24] = records.to_bytes(8, "little") + end.to_bytes(8, "little")
            out[end + 32 : end + 48] = seal.digest()
        out[end + 48 : end + 64] = xxhash.xxh3_128_digest(bytes(out[end : end + 48]))
        at = end + 64
        end = at + int.from_bytes(out[end + 8 : end + 16], "little") + int.from_bytes(out[end + 16 : end + 24], "little")
        if end + 16 > len(out):
            break
        digest, records = xxhash.xxh3_128_digest(bytes(out[at:end])), records + 1
        out[end : end + 16] = digest
        end += 16
    return bytes(out[: len(data)])


def _head(data: bytes, body: bytes, payload_bytes: int | None) -> bytes:
    fields = list(segment.PREAMBLE.unpack(data[: segment.PREAMBLE.size]))
    fields[6], fields[7] = len(body), segment.align(segment.PREAMBLE.size + len(body), segment.PAYLOAD_ALIGNMENT)
    if payload_bytes is not None:
        fields[8] = payload_bytes
    fields[9] = xxhash.xxh3_128_digest(segment.PREAMBLE.pack(*fields[:9], b"", b"") + body)
    return segment.PREAMBLE.pack(*fields) + body
