"""Digests by two threads are those of one, whatever the size."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import xxhash

from warmkv.kvstore.digests import TOGETHER_BYTES, payload_digests
from warmkv.schema.segment import CHUNK_BYTES


@pytest.mark.parametrize(
    "size",
    [
        0,
        1,
        CHUNK_BYTES,
        TOGETHER_BYTES - 1,
        TOGETHER_BYTES,
        TOGETHER_BYTES + 1,
        3 * CHUNK_BYTES,
        4 * CHUNK_BYTES + 64,
        5 * CHUNK_BYTES - 1,
    ],
)
def test_digests_are_those_of_each_chunk(size: int) -> None:
    payload = np.random.default_rng(size).integers(0, 256, size, np.uint8).data
    expected = b"".join(xxhash.xxh3_128(payload[at : at + CHUNK_BYTES]).digest() for at in range(0, size, CHUNK_BYTES))
    before = threading.active_count()
    assert payload_digests(payload) == expected
    assert threading.active_count() == before


@pytest.mark.parametrize("at", [0, 6 * CHUNK_BYTES // 2 - 1, 6 * CHUNK_BYTES // 2, 6 * CHUNK_BYTES - 1])
def test_a_flipped_byte_in_either_half_shows(at: int) -> None:
    payload = np.zeros(6 * CHUNK_BYTES, np.uint8)
    before = payload_digests(payload.data)
    payload[at] = 1
    after = payload_digests(payload.data)
    differing = [number for number in range(6) if before[16 * number :][:16] != after[16 * number :][:16]]
    assert differing == [at // CHUNK_BYTES]
