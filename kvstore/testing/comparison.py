"""Comparing rows: equal bits, not merely equal numbers."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from warmkv.kvstore.restored import Restored
from warmkv.kvstore.rows import LayerRows

Rows = npt.NDArray[np.generic]


def row_bits(rows: Rows, usable: int) -> bytes:
    """The bytes of the first ``usable`` rows: equal bits, not merely equal numbers."""
    return np.ascontiguousarray(rows[:usable]).tobytes()


def assert_rows(restored: Restored, expected: Sequence[LayerRows]) -> None:
    """Every restored layer holds exactly the first ``usable`` of the expected rows, bit for bit."""
    assert restored.layers
    by_layer = {record.layer: record for record in expected}
    for layer in restored.layers:
        spec = restored.match.identity.layers[layer.layer]
        record = by_layer[layer.layer if spec.shared_with < 0 else spec.shared_with]
        for plane in record.planes:
            got = layer.plane(plane.role)
            assert sum(len(block) for block in got.blocks) == restored.usable
            assert got.array().dtype == plane.rows.dtype and got.row_shape == plane.rows.shape[1:]
            assert row_bits(got.array(), restored.usable) == row_bits(plane.rows, restored.usable)
