"""Snapshot packs, `.warmkv`: prompts with their states as one file (docs/formats.md).

    preamble   magic, version, identity bytes, digest                     64 bytes
    identity   canonical bytes of the model's identity
    record     mark, anchor and container bytes, prefill time, digest     64 bytes
               packed anchors, container (parents before children), digest of both
    end        mark, records, bytes before this, digest of all digests    64 bytes

Written and read as a stream. A file is hostile until checked: nothing is allocated for a length
that its digest, its cap and the size of the file do not bear out, and a record counts only once
its digest was compared.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import xxhash

from warmkv.schema.errors import DigestError, FormatError, TooNewError
from warmkv.schema.identity import MAX_IDENTITY_BYTES
from warmkv.schema.records import ANCHOR_DTYPE, MAX_TABLE_ROWS, Anchor, pack_anchors, unpack_anchors
from warmkv.schema.segment import MAX_HEADER_BYTES, MAX_PAYLOAD_BYTES, PREAMBLE

MAGIC = b"WARMKVP\n"
MAJOR, MINOR = 1, 0
SUFFIX = ".warmkv"
PIECE_BYTES = 4 << 20
DIGEST_BYTES = 16
#: Magic, version, nothing, identity bytes, time of writing; then nothing, and the digest.
_PREAMBLE = struct.Struct("<8sHHIQQ16s")
#: Mark and three numbers; then the total digest or nothing, and the digest of these.
_BLOCK = struct.Struct("<8sQQQ16s")
_RECORD, _END = b"RECORD\r\n", b"THE END\n"
BLOCK_BYTES = 64
assert _PREAMBLE.size + DIGEST_BYTES == BLOCK_BYTES == _BLOCK.size + DIGEST_BYTES
MAX_CONTAINER_BYTES = MAX_PAYLOAD_BYTES + MAX_HEADER_BYTES + 8192
_MAX_ANCHOR_BYTES = MAX_TABLE_ROWS * ANCHOR_DTYPE.itemsize
_MAX_PREFILL_US = 2**32 - 1
_NOTHING = bytes(16)

#: Reads exactly so many bytes, or fewer at the end of the file.
Read = Callable[[int], bytes]
#: Takes a piece of a container.
Take = Callable[[bytes | memoryview], None]
#: Writes bytes at an offset.
Write = Callable[[bytes | memoryview, int], None]


class _Seal:
    """The digest over the digests of everything so far."""

    def __init__(self) -> None:
        self._hash = hashlib.blake2b(digest_size=DIGEST_BYTES)

    def add(self, digest: bytes) -> bytes:
        self._hash.update(digest)
        return digest

    def digest(self) -> bytes:
        return self._hash.digest()


class PackWriter:
    """Writes a pack through ``write``, front to back. A pack without `finish` is no pack;
    ``total_bytes`` is how long it is by then."""

    def __init__(self, write: Write, identity: bytes, created_ns: int) -> None:
        self.records = 0
        self.total_bytes = 0
        self._write_at = write
        self._seal = _Seal()
        head = _PREAMBLE.pack(MAGIC, MAJOR, MINOR, 0, len(identity), created_ns, _NOTHING)
        self._write(head + self._seal.add(xxhash.xxh3_128_digest(head + identity)) + identity)

    def record(
        self, anchors: tuple[Anchor, ...], container_bytes: int, fill: Callable[[Take], None], prefill_us: int = 0
    ) -> None:  # fmt: skip
        """Add a container of ``container_bytes``, which ``fill`` hands over piece by piece, and whose
        rows took ``prefill_us`` to compute (0: nobody knows; at most 32 bits).

        Where ``fill`` raises, or hands over more or less (FormatError), the next record is written
        over this one."""
        began = self.total_bytes
        try:
            self._write(self._record(anchors, container_bytes, fill, prefill_us))
        except BaseException:
            self.total_bytes = began
            raise
        self.records += 1

    def _record(self, anchors: tuple[Anchor, ...], container_bytes: int, fill: Callable[[Take], None], prefill_us: int) -> bytes:
        packed = pack_anchors(anchors)
        head = _BLOCK.pack(_RECORD, len(packed), container_bytes, min(prefill_us, _MAX_PREFILL_US), _NOTHING)
        self._write(head + xxhash.xxh3_128_digest(head) + packed)
        hasher, began = xxhash.xxh3_128(packed), self.total_bytes

        def take(piece: bytes | memoryview) -> None:
            hasher.update(piece)
            self._write(piece)

        fill(take)
        if self.total_bytes - began != container_bytes:
            raise FormatError(f"a container of {container_bytes} bytes came as {self.total_bytes - began}")
        return self._seal.add(hasher.digest())

    def finish(self) -> None:
        """Write the end mark, without which nobody reads to the end."""
        head = _BLOCK.pack(_END, self.records, self.total_bytes, 0, self._seal.digest())
        self._write(head + xxhash.xxh3_128_digest(head))

    def _write(self, data: bytes | memoryview) -> None:
        self._write_at(data, self.total_bytes)
        self.total_bytes += len(data)


@dataclass(frozen=True, slots=True)
class PackedRecord:
    """One record of a pack. ``pieces`` yields its container once, in order; it ends only if the
    digest was right, so whoever has not come to its end has nothing. Raises FormatError,
    DigestError."""

    anchors: tuple[Anchor, ...]
    container_bytes: int
    pieces: Iterator[bytes]
    prefill_us: int = 0


class PackReader:
    """Reads a pack of ``total_bytes`` front to back through ``read``.

    Raises FormatError for what is no pack, TooNewError, DigestError."""

    def __init__(self, read: Read, total_bytes: int) -> None:
        self._read_in = read
        self._total_bytes = total_bytes
        self._at = 0
        self._seal = _Seal()
        block = self._read(BLOCK_BYTES, "preamble")
        magic, major, minor, nothing, identity_bytes, self.created_ns, rest = _PREAMBLE.unpack(block[: _PREAMBLE.size])
        if magic != MAGIC:
            raise FormatError(f"magic is {magic!r}, expected {MAGIC!r}: this is no snapshot pack")
        if major > MAJOR:
            raise TooNewError(f"snapshot pack of version {major}, this program reads up to {MAJOR}")
        if major != MAJOR or nothing or rest != _NOTHING:
            raise FormatError(f"snapshot pack of version {major}.{minor} with reserved bytes in use is not readable")
        if not 0 < identity_bytes <= MAX_IDENTITY_BYTES:
            raise FormatError(f"an identity of {identity_bytes} bytes, expected 1..{MAX_IDENTITY_BYTES}")
        self.identity = self._read(identity_bytes, "identity")
        self._seal.add(_same(xxhash.xxh3_128_digest(block[: _PREAMBLE.size] + self.identity), block, "the preamble"))

    def records(self) -> Iterator[PackedRecord]:
        """Every record, each to be read to its end before the next is asked for; comes to an end only
        behind the mark of a whole file."""
        count = 0
        while True:
            before = self._at
            block = self._read(BLOCK_BYTES, f"head of record {count}")
            mark, first, second, third, total = _BLOCK.unpack(block[: _BLOCK.size])
            _same(xxhash.xxh3_128_digest(block[: _BLOCK.size]), block, f"the head of record {count}")
            if mark == _END:
                self._check_end(first == count and second == before and not third, total, count)
                return
            if mark != _RECORD or third > _MAX_PREFILL_US or total != _NOTHING:
                raise FormatError(f"record {count} begins with {mark!r}, expected {_RECORD!r} or {_END!r}")
            yield self._record(count, first, second, third)
            count += 1

    def _record(self, number: int, anchor_bytes: int, container_bytes: int, prefill_us: int) -> PackedRecord:
        left = self._total_bytes - self._at
        if anchor_bytes > _MAX_ANCHOR_BYTES or not PREAMBLE.size < container_bytes <= MAX_CONTAINER_BYTES:
            raise FormatError(f"record {number} claims {anchor_bytes} bytes of anchors and {container_bytes} of container")
        if anchor_bytes + container_bytes + DIGEST_BYTES > left:
            raise FormatError(f"record {number} claims {container_bytes} bytes, {left} are left of the file")
        packed = self._read(anchor_bytes, f"anchors of record {number}")
        return PackedRecord(unpack_anchors(packed), container_bytes, self._pieces(number, packed, container_bytes), prefill_us)

    def _pieces(self, number: int, packed: bytes, left: int) -> Iterator[bytes]:
        hasher = xxhash.xxh3_128(packed)
        while left:
            piece = self._read(min(left, PIECE_BYTES), f"record {number}")
            hasher.update(piece)
            left -= len(piece)
            yield piece
        stored = self._read(DIGEST_BYTES, f"digest of record {number}")
        self._seal.add(_same(hasher.digest(), stored, f"record {number}"))

    def _check_end(self, counted: bool, total: bytes, count: int) -> None:
        if not counted or total != self._seal.digest():
            raise DigestError(f"the end of the pack does not belong to the {count} records before it")
        if self._at != self._total_bytes:
            raise FormatError(f"{self._total_bytes - self._at} bytes behind the end of the pack")

    def _read(self, size: int, what: str) -> bytes:
        data = self._read_in(size) if size else b""
        self._at += len(data)
        if len(data) != size:
            raise FormatError(f"the pack is cut in the {what}: {len(data)} of {size} bytes at {self._at - len(data)}")
        return data


def _same(computed: bytes, stored: bytes, what: str) -> bytes:
    """``computed``, where ``stored`` ends with it; DigestError elsewhere."""
    if stored[-DIGEST_BYTES:] != computed:
        raise DigestError(f"{what} of the pack does not match its digest")
    return computed
