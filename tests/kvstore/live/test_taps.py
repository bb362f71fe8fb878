"""Taps lie side by side in a row, where drafters read them, and nothing is written beside them."""

from __future__ import annotations

import numpy as np
import pytest
from devices_at_hand import at_hand, brought

from warmkv.kvstore.live.devices.host import HostDevice
from warmkv.kvstore.live.taps import TapSink
from warmkv.schema.errors import CapacityExceeded, OutOfMemory, RecordError

LAYERS, ROWS, HIDDEN = (7, 2, 11), 6, 5


def sink() -> TapSink:
    made = TapSink(HostDevice(), LAYERS, rows=ROWS, hidden=HIDDEN)
    made.buffer[:] = np.nan
    return made


def residual(seed: int, count: int) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
    return np.random.default_rng(seed).standard_normal((count, HIDDEN)).astype(np.float32)


@pytest.mark.parametrize("count", [0, 1, ROWS - 1, ROWS])
@pytest.mark.parametrize("base", [0, 1, 2])
def test_each_layer_writes_its_slot(count: int, base: int) -> None:
    taps = sink()
    taps.base = base
    if base + count > ROWS:
        with pytest.raises(CapacityExceeded, match=f"rows .{base}, {base + count}., there is room for {ROWS}"):
            taps.write(2, residual(2, count))
        assert np.isnan(taps.buffer).all()
        return
    expected = np.full((ROWS, len(LAYERS), HIDDEN), np.nan, np.float32)
    for slot, layer in enumerate(LAYERS):
        taps.write(layer, residual(layer, count))
        expected[base : base + count, slot] = residual(layer, count)
    np.testing.assert_array_equal(taps.buffer, expected.reshape(ROWS, -1))


def test_a_prompt_is_walked_in_chunks() -> None:
    taps, whole = sink(), residual(1, ROWS)
    for taps.base in range(0, ROWS, 2):
        for layer in LAYERS:
            taps.write(layer, whole[taps.base : taps.base + 2])
    np.testing.assert_array_equal(taps.buffer, np.tile(whole, len(LAYERS)))


@pytest.mark.parametrize("kind", ["stand-in", "cuda"])
def test_devices_with_memory_of_their_own_have_the_same_rows(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    device = at_hand(kind, monkeypatch)
    taps = TapSink(device, LAYERS, rows=ROWS, hidden=HIDDEN)
    device.upload(np.zeros((ROWS, len(LAYERS) * HIDDEN), np.float32), taps.buffer)
    expected = np.zeros((ROWS, len(LAYERS), HIDDEN), np.float32)
    for slot, layer in enumerate(LAYERS):
        taps.base = slot
        rows = brought(device, residual(layer, 3))
        asked = device.allocations
        taps.write(layer, rows)
        assert device.allocations == asked
        expected[slot : slot + 3, slot] = residual(layer, 3)
    np.testing.assert_array_equal(device.download(taps.buffer), expected.reshape(ROWS, -1))
    with pytest.raises(RecordError, match="expected an array of"):
        taps.write(2, residual(1, 2))


def test_writes_ask_for_no_memory() -> None:
    taps = sink()
    device = taps.device
    assert device.allocated_bytes == 4 * ROWS * len(LAYERS) * HIDDEN
    asked = device.allocations
    for _ in range(10):
        for layer in LAYERS:
            taps.write(layer, residual(layer, ROWS))
    assert device.allocations == asked
    taps.free()
    assert device.allocated_bytes == 0


@pytest.mark.parametrize(
    ("layer", "rows"),
    [
        (3, residual(1, 2)), (-1, residual(1, 2)), (2, residual(1, 2)[0]), (2, residual(1, 2)[:, :-1]),
        (2, residual(1, 2).astype(np.float64)), (2, [[0.0] * HIDDEN]),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused_unchanged(layer: int, rows: object) -> None:
    taps = sink()
    with pytest.raises(RecordError):
        taps.write(layer, rows)
    assert np.isnan(taps.buffer).all()


@pytest.mark.parametrize("base", [-1, ROWS + 1])
def test_bases_outside_are_refused(base: int) -> None:
    taps = sink()
    taps.base = base
    with pytest.raises(CapacityExceeded):
        taps.write(2, residual(1, 0))


@pytest.mark.parametrize(
    ("layers", "rows", "hidden"), [((), 1, 1), ((1, 1), 1, 1), ((-1,), 1, 1), ((1,), 0, 1), ((1,), 1, 0), ((1,), -1, -1)]
)
def test_sinks_of_nothing_are_refused(layers: tuple[int, ...], rows: int, hidden: int) -> None:
    device = HostDevice()
    with pytest.raises(RecordError):
        TapSink(device, layers, rows=rows, hidden=hidden)
    assert device.allocations == 0
    with pytest.raises(OutOfMemory):
        TapSink(HostDevice(limit_bytes=4), (1,), rows=1, hidden=2)
