"""The field of a ring's rows is that of the first rows of its sequence, as in host memory, or there is none."""

from __future__ import annotations

import numpy as np
import pytest
from dumps import rows_of
from resident_oracle import KV_HEADS, SIZE, made, plan_of

from warmkv.kernels.dispatch import REFERENCE
from warmkv.kernels.formats import F32, WARMUP_ROWS, RowFormat
from warmkv.kernels.resident.host import HostOperations
from warmkv.kvstore.live.devices.host import HostDevice
from warmkv.kvstore.live.layers.attention import AttentionLayer
from warmkv.kvstore.live.layers.resident import ResidentLayer
from warmkv.schema.errors import CapacityExceeded

WINDOW = 16
PLAN = plan_of(RowFormat.Q8_2F, RowFormat.Q8_2F, window=WINDOW)


def ring(rows: int) -> ResidentLayer:
    return made(HostDevice(HostOperations(REFERENCE)), PLAN, rows, ringed=True)


def sequence(count: int) -> F32:
    """Rows that grow, so that a field tells which of them it was fixed from."""
    rows = np.random.default_rng(5).standard_normal((count, KV_HEADS, SIZE))
    return (rows * np.linspace(1, 9, count)[:, None, None]).astype(np.float32)


def same_field(layer: ResidentLayer, twin: AttentionLayer) -> None:
    for mine, theirs in ((layer.keys.field, twin.keys.field), (layer.values.field, twin.values.field)):
        assert mine is not None and theirs is not None and np.array_equal(mine, theirs)


@pytest.mark.parametrize("before", [WARMUP_ROWS - 15, WARMUP_ROWS - 1, WARMUP_ROWS])
def test_rows_that_are_to_fix_a_field_are_not_given_up(before: int) -> None:
    room = 100
    rows = sequence(room + 20)
    layer, twin = ring(room), AttentionLayer(PLAN, index=3)
    layer.append(rows[:before], rows[:before])
    held = rows_of(layer), layer.ring
    with pytest.raises(CapacityExceeded, match="fix a field"):
        layer.append(rows[before : room + 1], rows[before : room + 1])
    with pytest.raises(CapacityExceeded, match="fix a field"):
        layer.rebase(1)
    assert (rows_of(layer), layer.ring) == held
    for first, last in ((before, WARMUP_ROWS + 1), (WARMUP_ROWS + 1, len(rows))):
        layer.append(rows[first:last], rows[first:last])
    twin.append(rows, rows)
    assert layer.ring is not None and layer.ring.base > 0
    same_field(layer, twin)


def test_a_ring_too_small_for_a_field_is_full_when_it_is_full() -> None:
    layer, rows = ring(WARMUP_ROWS - 1), sequence(WARMUP_ROWS)
    layer.append(rows[:-1], rows[:-1])
    with pytest.raises(CapacityExceeded, match="fix a field"):
        layer.append(rows[-1:], rows[-1:])


@pytest.mark.parametrize("how", ["adopted", "restored", "grown", "taken over"])
def test_all_rows_come_along_while_a_field_is_to_be_fixed(how: str) -> None:
    held = WARMUP_ROWS - 10
    rows = sequence(held + 40)
    before, twin = ring(100), AttentionLayer(PLAN, index=3)
    before.append(rows[:held], rows[:held])
    layer = before
    if how == "grown":
        layer.prepare_grow(150)()
    elif how == "taken over":
        layer = made(before.device, PLAN, 150, ringed=True)  # type: ignore[arg-type]
        layer.take_over(before)
    else:
        layer = ring(100)
        if how == "adopted":
            planes = before.keys.gathered(None), before.values.gathered(None)
            layer.adopt(*planes, position=held, base=0, importance=None, gapless=True)
        else:
            layer.prepare_restore([before.keys.packed()], [before.values.packed()], position=held, base=0)()
    assert (layer.rows, layer.base) == (held, 0)
    layer.append(rows[held:], rows[held:])
    twin.append(rows, rows)
    same_field(layer, twin)
    assert layer.keys.packed().tobytes() == b"".join(row.tobytes() for row in made_of(twin)[len(rows) - layer.rows :])


def made_of(twin: AttentionLayer) -> F32:
    """The record bytes of all keys of ``twin``, from a flat layer of its rows."""
    flat = made(HostDevice(HostOperations(REFERENCE)), PLAN, twin.rows)
    flat.adopt(
        twin.keys.gathered(None), twin.values.gathered(None), position=twin.rows, base=0, importance=None, gapless=True
    )  # fmt: skip
    return flat.keys.packed()


def test_a_fixed_field_takes_the_window_only() -> None:
    rows = sequence(90)
    layer, other = ring(100), ring(100)
    layer.append(rows, rows)
    planes = layer.keys.gathered(None), layer.values.gathered(None)
    other.adopt(*planes, position=90, base=0, importance=None, gapless=True)
    assert other.base == 64 and other.rows == 26
    same_field(other, layer)
