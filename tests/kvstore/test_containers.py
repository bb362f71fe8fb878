"""Containers as they are written: bytes in the order of tokens, digests over every chunk, nothing
left behind by a failure."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import xxhash

from warmkv.kvstore import memfd
from warmkv.kvstore.containers import Container, PlaneSource, write_segment, write_state
from warmkv.kvstore.rows import PlaneRows
from warmkv.kvstore.testing import FOLDED, IMAGE, OTHER_IMAGE
from warmkv.schema import ids
from warmkv.schema import segment as container
from warmkv.schema.identity import PlaneFormat, PlaneRole
from warmkv.schema.records import CLEAN, ROOT, Attachment, NamespaceKey, RecordId, as_tokens, coverage

KEY, PARENT = NamespaceKey(b"n" * 16), RecordId(b"p" * 16)
TOKENS = as_tokens([5, 6, 7, 8, 9, 10])
MIB = 1 << 20
IMAGES = [Attachment(1, 2, IMAGE), Attachment(4, 1, OTHER_IMAGE)]


def source(rows: Any, role: PlaneRole = PlaneRole.KEY, layer: int = 0, first_row: int = 0, format_: Any = None) -> PlaneSource:
    """A plane of raw bytes, or of whatever the rows are."""
    if format_ is None:
        format_ = {"float32": PlaneFormat.F32, "uint16": PlaneFormat.BF16, "uint8": PlaneFormat.RAW}[rows.dtype.name]
    return PlaneSource(layer, rows.shape[1:], first_row, PlaneRows(role, format_, rows))


def taken(made: Container) -> tuple[container.Head, bytes]:
    """Head and payload of a container; it must be sealed and as large as it says."""
    try:
        assert memfd.check_sealed(made.fd, made.total_bytes) == made.total_bytes
        data = memfd.read(made.fd, made.total_bytes, 0)
    finally:
        made.close()
    head = container.decode_head(data, made.total_bytes)
    assert head.header.id == made.id
    return head, data[head.payload_offset :]


def chunks(payload: bytes) -> bytes:
    """One digest for each 4 MiB, computed anew."""
    return b"".join(xxhash.xxh3_128_digest(payload[at : at + 4 * MIB]) for at in range(0, len(payload), 4 * MIB))


@pytest.fixture(autouse=True)
def flat() -> Any:
    before = len(os.listdir("/proc/self/fd"))
    yield
    assert len(os.listdir("/proc/self/fd")) == before


# -- headers ---------------------------------------------------------------------------------


def test_a_segment_names_what_it_holds() -> None:
    rows = np.arange(24, dtype=np.float32).reshape(4, 2, 3)
    head, payload = taken(write_segment(KEY, FOLDED, PARENT, 2, TOKENS, IMAGES, [source(rows, first_row=2)]))
    header = head.header
    assert isinstance(header, container.SegmentHeader)
    assert (header.namespace, header.lineage, header.parent, header.start, header.end) == (KEY, FOLDED, PARENT, 2, 6)
    assert header.tokens.tolist() == [7, 8, 9, 10] and header.attachments == (IMAGES[1],)
    assert header.id == ids.segment_id(KEY, FOLDED, 2, coverage(header.planes), IMAGES, TOKENS)
    (plane,) = header.planes
    assert (plane.first_row, plane.rows, plane.row_shape, plane.row_bytes) == (2, 4, (2, 3), 24)
    assert payload == rows.tobytes() and header.digests == chunks(payload)


def test_a_state_names_where_it_lies() -> None:
    rows = np.arange(6, dtype=np.float32).reshape(1, 2, 3)
    head, payload = taken(write_state(KEY, CLEAN, PARENT, TOKENS[:4], IMAGES[:1], [source(rows, PlaneRole.RECURRENT)]))
    header = head.header
    assert isinstance(header, container.StateHeader)
    assert (header.position, header.parent, header.attachments) == (4, PARENT, (IMAGES[0],))
    assert header.id == ids.state_id(KEY, CLEAN, coverage(header.planes), IMAGES[:1], TOKENS[:4])
    assert payload == rows.tobytes() and header.digests == chunks(payload)


def test_attachments_that_begin_later_belong_to_later_records() -> None:
    rows = np.zeros((4, 1), np.float32)
    head, _ = taken(write_segment(KEY, CLEAN, ROOT, 0, TOKENS[:4], IMAGES, [source(rows)]))
    assert head.header.attachments == (IMAGES[0],)
    assert head.header.id == ids.segment_id(KEY, CLEAN, 0, coverage(head.header.planes), IMAGES[:1], TOKENS[:4])
    head, _ = taken(write_state(KEY, CLEAN, PARENT, TOKENS[:4], IMAGES, [source(rows[:1], PlaneRole.CONV)]))
    assert head.header.attachments == (IMAGES[0],)


def test_planes_lie_in_order_of_layer_and_role_wherever_they_came_from() -> None:
    planes = {
        (layer, role): np.full((6, 3 + layer), 10 * layer + role, np.uint8)
        for layer in (2, 0, 1)
        for role in (PlaneRole.VALUE, PlaneRole.KEY)
    }
    sources = [source(rows, role, layer) for (layer, role), rows in planes.items()]
    made = [taken(write_segment(KEY, CLEAN, ROOT, 0, TOKENS, (), order)) for order in (sources, sources[::-1])]
    for head, payload in made:
        assert [(plane.layer, plane.role) for plane in head.header.planes] == sorted(planes)
        assert all(plane.offset % 64 == 0 for plane in head.header.planes)
        for plane in head.header.planes:
            assert payload[plane.offset : plane.offset + plane.total_bytes] == planes[plane.layer, plane.role].tobytes()
    assert made[0][1] == made[1][1] and made[0][0].header.id == made[1][0].header.id


def test_a_record_without_planes_has_no_payload() -> None:
    head, payload = taken(write_segment(KEY, CLEAN, ROOT, 0, TOKENS, (), []))
    assert (head.header.planes, head.header.digests, payload) == ((), b"", b"")


def test_planes_without_rows_take_no_room() -> None:
    sources = [source(np.zeros((0, 7), np.uint8)), source(np.full((6, 5), 3, np.uint8), PlaneRole.VALUE)]
    head, payload = taken(write_segment(KEY, CLEAN, ROOT, 0, TOKENS, (), sources))
    assert [plane.rows for plane in head.header.planes] == [0, 6]
    assert payload == bytes([3]) * 30


# -- payloads --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "sizes",
    [
        [4 * MIB - 1], [4 * MIB], [4 * MIB + 1], [8 * MIB], [8 * MIB + 65], [1, 4 * MIB], [4 * MIB - 64, 64, 1],
        [4 * MIB - 63, 4 * MIB], [3 * MIB, 3 * MIB, 3 * MIB], [63, 64, 65, 127, 4 * MIB - 300], [MIB + 1] * 5,
    ],
    ids=str,
)  # fmt: skip
def test_digests_are_one_per_chunk_wherever_planes_end(sizes: list[int]) -> None:
    """Gaps between planes are part of what is hashed."""
    rng = np.random.default_rng(len(sizes))
    arrays = [np.frombuffer(rng.bytes(size), np.uint8).reshape(1, size) for size in sizes]
    sources = [source(rows, PlaneRole.BLOB, layer) for layer, rows in enumerate(arrays)]
    head, payload = taken(write_state(KEY, CLEAN, PARENT, TOKENS, (), sources))
    for plane, rows in zip(head.header.planes, arrays, strict=True):
        assert payload[plane.offset : plane.offset + plane.total_bytes] == rows.tobytes()
    assert head.header.digests == chunks(payload)


STRIDED: dict[str, Callable[[Any], Any]] = {
    "as they lie": lambda rows: rows,
    "heads first": lambda rows: np.ascontiguousarray(rows.transpose(1, 0, 2)).transpose(1, 0, 2),
    "every second": lambda rows: np.repeat(rows, 2, axis=0)[::2],
    "backwards": lambda rows: rows[::-1].copy()[::-1],
    "a part of wider rows": lambda rows: np.concatenate([rows, rows], axis=2)[:, :, : rows.shape[2]],
    "the same row again": lambda rows: np.broadcast_to(rows[:1], rows.shape),
    "column by column": lambda rows: np.asfortranarray(rows),
}


@pytest.mark.parametrize("name", STRIDED)
@pytest.mark.parametrize("count", [1, 7, 3000])
def test_rows_of_any_strides_come_out_in_order(name: str, count: int) -> None:
    rng = np.random.default_rng(3)
    rows = STRIDED[name](rng.standard_normal((count, 4, 33)).astype(np.float32))
    head, payload = taken(write_state(KEY, CLEAN, PARENT, TOKENS, (), [source(rows, PlaneRole.RING)]))
    assert payload == np.ascontiguousarray(rows).tobytes()
    assert head.header.digests == chunks(payload)


def test_rows_larger_than_the_buffer_are_gathered_one_at_a_time() -> None:
    wide = np.arange(3 * 600_000, dtype=np.float32).reshape(600_000, 3).T
    assert not wide.flags.c_contiguous and wide[0].nbytes > MIB
    head, payload = taken(write_state(KEY, CLEAN, PARENT, TOKENS, (), [source(wide, PlaneRole.RING)]))
    assert payload == np.ascontiguousarray(wide).tobytes() and head.header.digests == chunks(payload)


def test_packed_formats_keep_the_shape_of_the_identity() -> None:
    """Two heads of 64 elements are 4 blocks of 34 bytes; callers hand them in as bytes."""
    rows = np.arange(6 * 136, dtype=np.uint32).astype(np.uint8).reshape(6, 136)
    packed = PlaneSource(0, (2, 64), 0, PlaneRows(PlaneRole.KEY, PlaneFormat.Q8_0, rows))
    head, payload = taken(write_segment(KEY, CLEAN, ROOT, 0, TOKENS, (), [packed]))
    (plane,) = head.header.planes
    assert (plane.row_shape, plane.row_bytes, plane.format) == ((2, 64), 136, PlaneFormat.Q8_0)
    assert payload == rows.tobytes()


# -- failures --------------------------------------------------------------------------------


@pytest.mark.parametrize("at", [0, 1, 2])
def test_a_failure_while_writing_closes_what_was_begun(monkeypatch: pytest.MonkeyPatch, at: int) -> None:
    left, write = [at], memfd.write

    def failing(fd: int, data: Any, offset: int) -> None:
        left[0] -= 1
        if left[0] < 0:
            raise OSError(28, "No space left on device")
        write(fd, data, offset)

    monkeypatch.setattr(memfd, "write", failing)
    sources = [source(np.zeros((6, 5), np.uint8)), source(np.zeros((6, 5), np.uint8), PlaneRole.VALUE)]
    with pytest.raises(OSError, match="No space"):
        write_segment(KEY, CLEAN, ROOT, 0, TOKENS, (), sources)


def test_a_failure_while_sealing_closes_what_was_written(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(fd: int) -> None:
        raise OSError(1, "Operation not permitted")

    monkeypatch.setattr(memfd, "seal", failing)
    with pytest.raises(OSError, match="not permitted"):
        write_state(KEY, CLEAN, PARENT, TOKENS, (), [source(np.zeros((1, 5), np.uint8), PlaneRole.BLOB)])
