"""Comparing rows and states: equal bits, not merely equal numbers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from warmkv.kvstore.restored import Restored, RestoredPlane
from warmkv.kvstore.rows import LayerRows, LayerState
from warmkv.kvstore.testing.naive import ExpectedLayer
from warmkv.schema.identity import LayerKind

Rows = npt.NDArray[np.generic]


def row_bits(rows: Rows, usable: int) -> bytes:
    """The bytes of the first ``usable`` rows: equal bits, not merely equal numbers."""
    return np.ascontiguousarray(rows[:usable]).tobytes()


def positions(plane: RestoredPlane) -> list[int]:
    """Token positions of the rows a plane came back with, in the order of its blocks."""
    return [start + at for start, block in zip(plane.starts, plane.blocks, strict=True) for at in range(len(block))]


def plane_bits(plane: RestoredPlane) -> bytes:
    """The bytes of all blocks, one after the other."""
    return b"".join(np.ascontiguousarray(block).tobytes() for block in plane.blocks)


def assert_rows(restored: Restored, expected: Sequence[LayerRows]) -> None:
    """Every restored row is that of its position among the expected ones, bit for bit; layers that
    need every row have exactly the first ``usable``, others at least one where they need any."""
    assert restored.layers
    by_layer = {record.layer: record for record in expected}
    for layer in restored.layers:
        shared_with = restored.match.identity.layers[layer.layer].shared_with
        source = layer.layer if shared_with < 0 else shared_with
        spec, record = restored.match.identity.layers[source], by_layer.get(source)
        for plane in record.planes if record else ():
            got = layer.plane(plane.role)
            assert got.array().dtype == plane.rows.dtype and got.row_shape == plane.rows.shape[1:]
            for start, block in zip(got.starts, got.blocks, strict=True):
                assert 0 <= start and start + len(block) <= restored.usable
                assert np.ascontiguousarray(block).tobytes() == row_bits(plane.rows[start:], len(block))
            if not (spec.window or spec.chunk):
                assert positions(got) == list(range(restored.usable))


def assert_contents(restored: Restored, expected: Iterable[ExpectedLayer]) -> None:
    """Exactly the rows and states the twin expects came back, bit for bit, and nothing else."""
    layers = {layer.layer: layer for layer in restored.layers}
    assert sorted(layers) == list(range(len(restored.match.identity.layers)))
    wanted = {item.layer: item for item in expected}
    for index, spec in enumerate(restored.match.identity.layers):
        source = wanted[index if spec.shared_with < 0 else spec.shared_with]
        got = layers[index]
        where = f"layer {index} ({spec.kind.name}) at {restored.usable}"
        assert set(got.planes) == set(source.rows), where
        for role, bits in source.rows.items():
            assert positions(got.planes[role]) == list(source.positions), f"{where}: {role.name}"
            assert plane_bits(got.planes[role]) == bits, f"{where}: {role.name}"
        if spec.shared_with < 0:
            states = {role: plane_bits(plane) for role, plane in got.states.items()}
            assert states in source.states if source.states else not states, where
            constants = {at: {role: plane_bits(plane) for role, plane in item.items()} for at, item in got.constants.items()}
            assert constants == source.constants, where


def assert_states(restored: Restored, expected: Sequence[LayerState]) -> None:
    """Every expected state came back bit for bit; of blobs, which may be longer, the first bytes."""
    layers = {layer.layer: layer for layer in restored.layers}
    images = {item.end: item.start for item in restored.match.attachments}
    for record in expected:
        spec, layer = restored.match.identity.layers[record.layer], layers[record.layer]
        planes = layer.constants[images[record.position]] if spec.kind == LayerKind.ENCODER else layer.states
        assert set(planes) == {plane.role for plane in record.planes}
        for plane in record.planes:
            bits, wanted = plane_bits(planes[plane.role]), np.ascontiguousarray(plane.rows).tobytes()
            assert bits[: len(wanted)] == wanted
            assert spec.kind == LayerKind.OPAQUE or len(bits) == len(wanted)
