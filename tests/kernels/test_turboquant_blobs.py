"""TQK1 and TQV1 bytes: golden ones, round trips, and everything malformed refused with nothing made of it."""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from warmkv.kernels.turboquant.blobs import BlobError, read_keys, read_values, write_keys, write_values
from warmkv.kernels.turboquant.planes import Planes
from warmkv.kernels.turboquant.reference import encode_keys, encode_values
from warmkv.kernels.turboquant.rotation import Rotation

Read = Callable[[bytes], Planes]
GOLDEN = {
    64: (
        "54514b310100000040000000010000006a6dd229e20558d485916f9d19aba53bad01b52170b6bda8fb415b35",
        "545156310100000040000000010000006a6dd229e20558d485916f9d19aba53bfb41",
    ),
    128: (
        "54514b310100000080000000010000003534d325c59ae2e594e6298522890b799e9e68a976141c895a419badcdb7f017e22739e3b0ccc12b"
        "d2f317f31e23f0a634483235",
        "545156310100000080000000010000003534d325c59ae2e594e6298522890b799e9e68a976141c895a419badcdb7f0173448",
    ),
}
READERS: list[tuple[Any, Any]] = [(read_keys, write_keys), (read_values, write_values)]


def blob(writer: Any, rows: int = 3, heads: int = 2, size: int = 16) -> bytes:
    x = np.random.default_rng(rows).standard_normal((rows, heads, size)).astype(np.float32)
    rotation = Rotation.of(42, 0, size)
    return write_keys(encode_keys(x, rotation)) if writer is write_keys else write_values(encode_values(x, rotation))


@pytest.mark.parametrize("size", GOLDEN)
def test_bytes_are_the_published_ones(size: int) -> None:
    row = (np.arange(1, size + 1, dtype=np.float32) * np.float32(0.01)).reshape(1, 1, size)
    rotation = Rotation.of(42, 0, size)
    keys, values = GOLDEN[size]
    assert write_keys(encode_keys(row, rotation)).hex() == keys
    assert write_values(encode_values(row, rotation)).hex() == values


@pytest.mark.parametrize(("read", "write"), READERS)
@pytest.mark.parametrize(("rows", "heads", "size"), [(0, 1, 8), (1, 1, 64), (5, 3, 40), (7, 2, 128)])
def test_blobs_come_back_and_planes_are_by_token(read: Any, write: Any, rows: int, heads: int, size: int) -> None:
    x = np.random.default_rng(1).standard_normal((rows, heads, size)).astype(np.float32)
    encode = encode_keys if write is write_keys else encode_values
    planes = encode(x, Rotation.of(1, 2, size))
    data = write(planes)
    assert len(data) == 16 + heads * rows * planes.row_bytes(size)
    back = read(memoryview(data))
    for name in planes.bits:
        np.testing.assert_array_equal(getattr(back, name), getattr(planes, name))
        assert getattr(back, name).flags.owndata or getattr(back, name).base is not None
    assert write(back) == data
    one = data[16 : 16 + rows * (size // 4)]
    assert one == planes.codes[:, 0].tobytes(), "all rows of head 0 come first"


@pytest.mark.parametrize(("read", "write"), READERS)
def test_every_truncation_and_every_byte_too_much_is_refused(read: Read, write: Any) -> None:
    data = blob(write)
    for end in range(len(data)):
        with pytest.raises(BlobError):
            read(data[:end])
    with pytest.raises(BlobError, match=f"{len(data) + 1} bytes"):
        read(data + b"\0")


@pytest.mark.parametrize(("read", "write"), READERS)
def test_a_flipped_bit_is_refused_or_read_as_what_it_says(read: Read, write: Any) -> None:
    data = blob(write)
    refused = 0
    for at in range(8 * len(data)):
        flipped = bytearray(data)
        flipped[at // 8] ^= 1 << at % 8
        try:
            assert write(read(bytes(flipped))) == bytes(flipped)
        except BlobError:
            refused += 1
        else:
            assert at >= 16 * 8, "no bit of the header is free"
    assert refused >= 16 * 8


@pytest.mark.parametrize(("read", "write"), READERS)
@pytest.mark.parametrize(
    ("heads", "size", "rows"),
    [
        (0, 16, 3), (2, 0, 3), (2, 12, 3), (2, 18, 3), (0, 0, 0), (1 << 31, 1 << 31, 4), (0xFFFFFFFF, 0xFFFFFFF8, 0xFFFFFFFF),
        (1 << 30, 8, 1 << 31), (1, 16, 0xFFFFFFFF), (1 << 16, 1 << 16, 1 << 16),
    ],
)  # fmt: skip
def test_counts_that_cannot_be_are_refused_whatever_they_multiply_to(
    read: Read, write: Any, heads: int, size: int, rows: int
) -> None:
    data = bytearray(blob(write))
    struct.pack_into("<3I", data, 4, heads, size, rows)
    with pytest.raises(BlobError):
        read(bytes(data))


@pytest.mark.parametrize(("read", "write"), READERS)
def test_the_other_kind_is_refused_by_its_magic(read: Read, write: Any) -> None:
    other = blob(write_values if write is write_keys else write_keys)
    with pytest.raises(BlobError, match="begins with"):
        read(other)


@pytest.mark.parametrize("bad", [0x7C00, 0x7E01, 0xFC00, 0xBC00])
@pytest.mark.parametrize(("read", "write"), READERS)
def test_norms_that_are_no_lengths_are_refused_by_head_and_row(read: Read, write: Any, bad: int) -> None:
    data = bytearray(blob(write, rows=3, heads=2))
    struct.pack_into("<H", data, len(data) - 2, bad)
    with pytest.raises(BlobError, match="head 1 at row 2"):
        read(bytes(data))


def test_random_bytes_behind_a_header_never_raise_anything_else() -> None:
    rng = np.random.default_rng(5)
    for _ in range(2000):
        length = int(rng.integers(0, 80))
        data = bytearray(rng.integers(0, 256, length, dtype=np.uint8).tobytes())
        if rng.random() < 0.9:
            data[:16] = rng.choice([b"TQK1", b"TQV1"]).tobytes()[:4] + struct.pack("<3I", *rng.integers(0, 9, 3))
        for read in (read_keys, read_values):
            try:
                read(bytes(data))
            except BlobError:
                continue
