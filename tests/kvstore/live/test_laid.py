"""Record bytes of planes, wherever their rows lie: the same bytes, and no copy where they lie as records do."""

from __future__ import annotations

import numpy as np
import pytest

from warmkv.kernels.formats import RowFormat
from warmkv.kernels.quant.packed import pack, view
from warmkv.kernels.turboquant.rotation import Rotation
from warmkv.kernels.turboquant.turn import Turn
from warmkv.kvstore.live.rows.growing import GrowingRows
from warmkv.kvstore.live.rows.laid import laid
from warmkv.kvstore.live.rows.prefix import PrefixRows

SIZE = 32
SIDES = [(format_, keys) for format_ in RowFormat for keys in (True, False) if format_.stores(keys=keys)]
ALL_SIDES = pytest.mark.parametrize(
    ("format_", "keys"), SIDES, ids=[f"{format_.value}-{'keys' if keys else 'values'}" for format_, keys in SIDES]
)


def grown(format_: RowFormat, keys: bool, heads: int, count: int) -> GrowingRows:
    turn = Turn(Rotation.of(42, 3, SIZE)) if format_.rotated else None
    plane = GrowingRows(format_, heads, SIZE, keys=keys, turn=turn)
    plane.reserve(count)
    plane.append(np.random.default_rng(count).standard_normal((count, heads, SIZE)).astype(np.float32))
    return plane


def packed_of(plane: GrowingRows) -> np.ndarray:
    return pack([plane.blocks(head) for head in range(plane.heads)], plane.format, SIZE, keys=plane.keys)


def on_prefix(plane: GrowingRows, *cuts: int) -> tuple[PrefixRows, list[np.ndarray]]:
    """The same rows in read-only segments."""
    segments = [np.array(part) for part in np.split(packed_of(plane), cuts)]
    for segment in segments:
        segment.flags.writeable = False
    views = [view(part, plane.format, plane.heads, SIZE, keys=plane.keys, turn=plane.turn) for part in segments]
    return PrefixRows([[blocks[head] for blocks in views] for head in range(plane.heads)], plane.like()), segments


@ALL_SIDES
@pytest.mark.parametrize("heads", [1, 3])
@pytest.mark.parametrize("first", [0, 1, 6, 7, 19, 20])
def test_bytes_are_those_of_the_record(format_: RowFormat, keys: bool, heads: int, first: int) -> None:
    plane = grown(format_, keys, heads, 20)
    expected = packed_of(plane)[first:]
    for rows in (plane, on_prefix(plane, 1, 7)[0]):
        parts = laid(rows, first)
        assert b"".join(part.tobytes() for part in parts) == expected.tobytes()
        assert all(part.dtype == expected.dtype and part.shape[1:] == expected.shape[1:] for part in parts)


@ALL_SIDES
def test_mapped_rows_are_not_copied(format_: RowFormat, keys: bool) -> None:
    prefix, segments = on_prefix(grown(format_, keys, 3, 20), 7)
    parts = laid(prefix, 2)
    assert [len(part) for part in parts] == [5, 13]
    for part, segment in zip(parts, segments, strict=True):
        # The scales of q8_2f lie apart from its codes as soon as there are blocks of them.
        assert np.shares_memory(part, segment) == (not format_.quantised)
        assert format_.quantised or not part.flags.writeable


def test_rows_appended_behind_a_prefix_come_behind_it() -> None:
    plane = grown(RowFormat.Q8_0, True, 2, 20)
    prefix, _ = on_prefix(plane, 7)
    more = np.ones((3, 2, SIZE), np.float32)
    prefix.reserve(3)
    prefix.append(more)
    plane.reserve(3)
    plane.append(more)
    assert b"".join(part.tobytes() for part in laid(prefix, 6)) == packed_of(plane)[6:].tobytes()


def test_heads_that_are_cut_at_different_rows_are_put_together() -> None:
    plane = grown(RowFormat.F16, True, 2, 20)
    blocks = [plane.blocks(head)[0] for head in range(2)]
    prefix = PrefixRows(
        [[blocks[0].rows(0, 5), blocks[0].rows(5, 20)], [blocks[1].rows(0, 9), blocks[1].rows(9, 20)]], plane.like()
    )
    assert b"".join(part.tobytes() for part in laid(prefix, 3)) == packed_of(plane)[3:].tobytes()


def test_heads_in_another_order_are_not_taken_for_a_record() -> None:
    plane = grown(RowFormat.Q8_0, True, 2, 20)
    packed = packed_of(plane)
    views = view(packed, plane.format, 2, SIZE, keys=True)
    swapped = PrefixRows([[views[1]], [views[0]]], plane.like())
    (part,) = laid(swapped)
    assert not np.shares_memory(part, packed)
    assert part[:, :34].tobytes() == packed[:, 34:].tobytes()
