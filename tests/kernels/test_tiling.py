"""The shape of decode attention: everything covered, nothing beyond what a block has."""

from __future__ import annotations

import pytest

from warmkv.kernels.attention.tiling import HEAD_WARPS, LANES, MOST_HEADS, OCTET, ROW_WARPS, SHARED_BYTES, tiling

WIDTHS = [(1, 1), (3, 17), (32, 32), (40, 40), (64, 64), (80, 96), (112, 112), (128, 128), (192, 128), (256, 256), (576, 512)]


@pytest.mark.parametrize("group", [1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 45, 71, 128])
@pytest.mark.parametrize(("keys", "values"), WIDTHS)
def test_every_head_of_a_group_is_covered_by_a_block_that_a_device_can_run(group: int, keys: int, values: int) -> None:
    shape = tiling(group, keys, values)
    together = shape.heads * shape.chunks
    assert 1 <= shape.heads <= MOST_HEADS and together * shape.sections >= group > together * (shape.sections - 1)
    assert 1 <= shape.across <= LANES and shape.across & (shape.across - 1) == 0
    assert ROW_WARPS * LANES <= shape.threads <= HEAD_WARPS * LANES
    assert 4 * together * OCTET * (-(-values // OCTET) | 1) <= SHARED_BYTES


def test_lanes_share_a_row_where_it_is_wide() -> None:
    shares = [tiling(4, size, size).across for size in (8, 32, 64, 128, 256, 512)]
    assert shares == sorted(shares) and shares[0] < 4 and shares[-1] == LANES
