"""A list of rows that forgets nothing, beside a resident layer: what it holds, sees and refuses."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from warmkv.kernels.formats import RowFormat
from warmkv.kernels.quant.packed import pack
from warmkv.kernels.quant.reference import decode, encode
from warmkv.kernels.testing import softmax_attention
from warmkv.kvstore.live.devices.base import Device
from warmkv.kvstore.live.devices.workspace import Workspace
from warmkv.kvstore.live.layers.resident import ResidentLayer
from warmkv.kvstore.live.plan import LayerPlan
from warmkv.kvstore.live.rings import Ring
from warmkv.schema.identity import LayerKind

HEADS, KV_HEADS, SIZE = 4, 2, 32


def plan_of(keys: RowFormat = RowFormat.Q8_0, values: RowFormat = RowFormat.Q5_1, *, window: int = 0, **more) -> LayerPlan:
    kind = LayerKind.SLIDING if window else LayerKind.FULL
    return LayerPlan(kind, HEADS, KV_HEADS, SIZE, SIZE, keys, values, window=window, importance=False, **more)


def made(
    device: Device, plan: LayerPlan, capacity: int, *, ringed: bool = False, chunk: int = 16, workspace: Workspace | None = None
) -> ResidentLayer:
    """A layer of its own workspace; a ring of ``capacity`` rows."""
    workspace = workspace or Workspace.of(device, [plan], capacity, chunk=chunk)
    ring = Ring(capacity, plan.window) if ringed else None
    base = device.zeros((1,), np.int32) if ringed else None
    return ResidentLayer(plan, index=3, device=device, workspace=workspace, capacity=capacity, ring=ring, base=base)


@dataclass
class Row:
    position: int
    stored: tuple[bytes, bytes]
    read: tuple[np.ndarray, np.ndarray]


@dataclass
class Oracle:
    """``rows`` by position, those given up included; ``held`` counts the newest that are still stored, unless
    rows were picked out."""

    plan: LayerPlan
    rows: list[Row] = field(default_factory=list)
    position: int = 0
    sinks: np.ndarray | None = None

    def append(self, k: np.ndarray, v: np.ndarray) -> None:
        if not len(k):
            return
        sides = [self._written(k, self.plan.key_format, keys=True), self._written(v, self.plan.value_format, keys=False)]
        for (key, key_read), (value, value_read) in zip(*sides, strict=True):
            self.rows.append(Row(self.position, (key, value), (key_read, value_read)))
            self.position += 1

    def _written(self, rows: np.ndarray, format_: RowFormat, *, keys: bool) -> list[tuple[bytes, np.ndarray]]:
        """Each row as its record has it, and as it reads. Rows are stored one by one: cut anywhere, they are the same."""
        blocks = [encode(np.ascontiguousarray(rows[:, head]), format_, keys=keys) for head in range(KV_HEADS)]
        packed = pack([[block] for block in blocks], format_, SIZE, keys=keys)
        read = np.stack([decode(block) for block in blocks], axis=1).astype(np.float64)
        return [(stored.tobytes(), numbers) for stored, numbers in zip(packed, read, strict=True)]

    def truncate(self, count: int) -> None:
        if count:
            del self.rows[-count:]
            self.position -= count

    def attend(self, q: np.ndarray, last: int | None = None) -> np.ndarray:
        """Of queries at position ``last`` - 1, counted in the rows that were never given up."""
        seen = self.rows[:last] if last is not None else self.rows
        seen = seen[-self.plan.window :] if self.plan.window else seen
        if not seen:
            return np.zeros((HEADS, SIZE))
        k, v = (np.stack([row.read[side] for row in seen]) for side in range(2))
        out, group = np.zeros((HEADS, SIZE)), HEADS // KV_HEADS
        for head in range(KV_HEADS):
            mine = slice(head * group, (head + 1) * group)
            sinks = None if self.sinks is None else self.sinks[mine].tolist()
            out[mine], _, _ = softmax_attention(
                q[mine].astype(np.float64), k[:, head], v[:, head], self.plan.logit_scale, 0, len(seen), self.plan.softcap, sinks
            )
        return out

    def check(self, layer: ResidentLayer) -> None:
        """All that the layer says, holds and mirrors."""
        assert layer.position == self.position
        held = self.rows[len(self.rows) - layer.rows :]
        for plane, side in ((layer.keys, 0), (layer.values, 1)):
            assert plane.packed().tobytes() == b"".join(row.stored[side] for row in held)
        if layer.ring is not None:
            padding = layer.base - layer.ring.base
            assert 0 <= padding < 32 and padding == layer.keys.padding == layer.values.padding
            assert layer.mirrors() == (self.position, layer.ring.base)
        else:
            assert layer.mirrors() == (layer.rows, 0)
        assert layer.mirrors() == layer.expected_mirrors
        if layer.gapless:
            assert [row.position for row in held] == list(range(layer.base, self.position))


def near(found: object, expected: np.ndarray) -> None:
    assert isinstance(found, np.ndarray)
    np.testing.assert_allclose(found, expected, rtol=2e-5, atol=2e-5)
