"""A recurrent state on a device goes forward between two addresses, and holds what one on the host would."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
from devices_at_hand import at_hand, brought
from failing_device import FailingDevice

from warmkv.kvstore.live.devices.host import HostDevice
from warmkv.kvstore.live.geometry import layer_geometry
from warmkv.kvstore.live.layers.recurrent import RecurrentLayer
from warmkv.kvstore.live.layers.resident_recurrent import ResidentRecurrentLayer
from warmkv.kvstore.live.plan import ConvPlan, LayerPlan
from warmkv.schema.errors import CannotRewind, DeviceFault, OutOfMemory, RecordError
from warmkv.schema.identity import LayerKind

F32 = npt.NDArray[np.float32]
SIZE, TAPS, CHANNELS = 6, 3, 5
PLAIN = LayerPlan(LayerKind.RECURRENT, state_size=SIZE)
DELTA = LayerPlan(LayerKind.RECURRENT, state_size=SIZE, conv=ConvPlan(CHANNELS, taps=TAPS, history=0))
both = pytest.mark.parametrize("plan", [PLAIN, DELTA], ids=["alone", "with a convolution"])


def numbers(seed: int, plan: LayerPlan) -> tuple[F32, F32 | None]:
    """A state and, where the plan has one, a convolution."""
    rng = np.random.default_rng(seed)
    state = rng.standard_normal(SIZE).astype(np.float32)
    return state, None if plan.conv is None else rng.standard_normal((TAPS, CHANNELS)).astype(np.float32)


def update(layer: RecurrentLayer | ResidentRecurrentLayer, seed: int, count: int = 1) -> None:
    state, conv = numbers(seed, layer.plan)
    layer.update(state, count, conv=conv)


def held(layer: RecurrentLayer | ResidentRecurrentLayer) -> tuple[int, bytes, bytes]:
    taken = layer.taken()
    return layer.position, taken.state.tobytes(), b"" if taken.conv is None else taken.conv.tobytes()


def address(array: F32) -> int:
    return array.__array_interface__["data"][0]


@both
def test_starts_with_zeros(plan: LayerPlan) -> None:
    layer = ResidentRecurrentLayer(plan, device=HostDevice())
    state, conv = layer.taken().state, layer.taken().conv
    assert layer.position == 0 and state.shape == (SIZE,) and not state.any()
    assert conv is None if plan.conv is None else conv is not None and conv.shape == (TAPS, CHANNELS) and not conv.any()


@both
def test_holds_what_a_layer_of_the_host_holds(plan: LayerPlan) -> None:
    resident, host = ResidentRecurrentLayer(plan, device=HostDevice()), RecurrentLayer(plan)
    for step in range(7):
        for layer in (resident, host):
            update(layer, step, 1 + step % 3)
        assert held(resident) == held(host)


@both
@pytest.mark.parametrize("kind", ["stand-in", "cuda"])
def test_devices_with_memory_of_their_own_hold_the_same(kind: str, plan: LayerPlan, monkeypatch: pytest.MonkeyPatch) -> None:
    device = at_hand(kind, monkeypatch)
    resident, host = ResidentRecurrentLayer(plan, device=device), RecurrentLayer(plan)
    assert held(resident) == held(host)
    kept = resident.set_aside()
    for step in range(3):
        for layer in (resident, host):
            update(layer, step)
        assert held(resident) == held(host)
    state, conv = numbers(9, plan)
    device.copy_into(resident.spare, 0, brought(device, state), 0, SIZE)
    resident.step()
    assert resident.taken().state.tobytes() == state.tobytes() and resident.position == 4
    before = held(resident)
    change = resident.prepare_return(kept)
    change.apply()
    assert held(resident) == held(RecurrentLayer(plan))
    change.undo()
    assert held(resident) == before
    resident.set_aside_into(kept)
    resident.clear()
    assert held(resident) == held(RecurrentLayer(plan))
    resident.prepare_return(kept).apply()
    assert held(resident) == before
    for layer in (resident, host):
        layer.adopt(state, 5, conv=conv)
    assert held(resident) == held(host)


@both
def test_a_thousand_steps_alternate_between_two_addresses_and_ask_for_nothing(plan: LayerPlan) -> None:
    device = HostDevice()
    layer = ResidentRecurrentLayer(plan, device=device)
    asked, bytes_, conv = device.allocations, device.allocated_bytes, layer.conv
    expected = np.zeros(SIZE, np.float32)
    seen = []
    for step in range(1000):
        seen.append((address(layer.state), address(layer.spare)))
        np.add(layer.state, np.float32(1), out=layer.spare)
        if layer.conv is not None:
            device.copy_into(layer.conv.reshape(-1), 0, layer.conv.reshape(-1), CHANNELS, (TAPS - 1) * CHANNELS)
            layer.conv[-1] = step
        layer.step()
        expected += np.float32(1)
    assert len(set(seen)) == 2 and len({at for pair in seen for at in pair}) == 2
    assert all(before == after[::-1] for before, after in zip(seen, seen[1:], strict=False))
    assert layer.conv is conv and (device.allocations, device.allocated_bytes) == (asked, bytes_)
    assert layer.position == 1000 and layer.taken().state.tobytes() == expected.tobytes()
    if plan.conv is not None:
        assert layer.taken().conv.tolist() == [[at] * CHANNELS for at in (997, 998, 999)]  # type: ignore[union-attr]


@both
def test_memory_is_what_the_geometry_says(plan: LayerPlan) -> None:
    device = HostDevice()
    layer = ResidentRecurrentLayer(plan, device=device)
    expected = layer_geometry(plan, 64).allocated_bytes
    assert expected == 4 * (2 * SIZE + (TAPS * CHANNELS if plan.conv is not None else 0))
    assert device.allocated_bytes == layer.allocated_bytes == layer.memory().total == expected
    layer.free()
    assert device.allocated_bytes == 0


@both
@pytest.mark.parametrize("fails_at", [0, 1, 2])
def test_refused_memory_leaves_none_behind(plan: LayerPlan, fails_at: int) -> None:
    device = FailingDevice()
    device.fail("alloc", fails_at)
    if fails_at == 2 and plan.conv is None:
        ResidentRecurrentLayer(plan, device=device)
        return
    with pytest.raises(OutOfMemory):
        ResidentRecurrentLayer(plan, device=device)
    assert device.allocated_bytes == 0


@both
def test_state_from_elsewhere_is_copied_in(plan: LayerPlan) -> None:
    device = HostDevice()
    layer = ResidentRecurrentLayer(plan, device=device)
    update(layer, 1, 3)
    before, bytes_, generation = held(layer), device.allocated_bytes, layer.generation
    state, conv = numbers(2, plan)
    install = layer.prepare_adopt(state, 11, conv=conv)
    assert held(layer) == before and layer.generation == generation
    state[:] = 9
    update(layer, 3)
    install()
    twin = RecurrentLayer(plan)
    update(twin, 2, 11)
    assert held(layer) == held(twin) and layer.generation > generation and device.allocated_bytes == bytes_
    layer.clear()
    assert held(layer) == held(RecurrentLayer(plan))


@both
@pytest.mark.parametrize(("method", "after"), [("alloc", 0), ("alloc", 1), ("upload", 0), ("upload", 1)])
def test_a_device_that_fails_while_state_is_brought_keeps_the_layer(plan: LayerPlan, method: str, after: int) -> None:
    device = FailingDevice()
    layer = ResidentRecurrentLayer(plan, device=device)
    update(layer, 1, 3)
    before, bytes_ = held(layer), device.allocated_bytes
    state, conv = numbers(2, plan)
    if after and plan.conv is None:
        return
    device.fail(method, after)
    with pytest.raises((OutOfMemory, DeviceFault)):
        layer.prepare_adopt(state, 4, conv=conv)
    device.heal()
    assert held(layer) == before and device.allocated_bytes == bytes_


@both
def test_copies_set_aside_are_gone_back_to_as_often_as_one_likes(plan: LayerPlan) -> None:
    device = HostDevice()
    for layer in (ResidentRecurrentLayer(plan, device=device), RecurrentLayer(plan)):
        update(layer, 1, 3)
        generation = layer.generation
        kept, before = layer.set_aside(), held(layer)
        for attempt in range(2):
            update(layer, 2 + attempt)
            assert held(layer) != before
            layer.prepare_return(kept).apply()
            assert held(layer) == before and layer.generation == generation
        update(layer, 9)
        after, asked = held(layer), device.allocations
        layer.set_aside_into(kept)
        update(layer, 10)
        layer.prepare_return(kept).apply()
        assert held(layer) == after and device.allocations == asked


@both
def test_a_return_can_be_undone_before_and_after_it_is_made(plan: LayerPlan) -> None:
    layer = ResidentRecurrentLayer(plan, device=HostDevice())
    update(layer, 1, 3)
    kept = layer.set_aside()
    update(layer, 2)
    before = held(layer)
    change = layer.prepare_return(kept)
    change.undo()
    assert held(layer) == before
    change.apply()
    assert held(layer) != before
    change.undo()
    assert held(layer) == before


@pytest.mark.parametrize("count", [1, 3])
def test_going_back_is_refused(count: int) -> None:
    layer = ResidentRecurrentLayer(PLAIN, index=4, device=HostDevice())
    update(layer, 1, 3)
    before = held(layer)
    with pytest.raises(CannotRewind, match="layer 4 .RECURRENT."):
        layer.truncate_last(count)
    with pytest.raises(RecordError, match="expected 0 to 3"):
        layer.truncate_last(4)
    layer.truncate_last(0)
    assert held(layer) == before


@both
def test_numbers_that_do_not_fit_are_refused_unchanged(plan: LayerPlan) -> None:
    state, conv = numbers(1, plan)
    extra = np.zeros((TAPS, CHANNELS), np.float32)
    bad: list[tuple[object, object, object]] = [
        (state[:-1], 1, conv), (state.astype(np.float64), 1, conv), (list(state), 1, conv), (state, -1, conv),
        (state, 1, extra if conv is None else None), (state, 1, extra[:-1]), (state, 1, extra.T),
    ]  # fmt: skip
    for layer in (ResidentRecurrentLayer(plan, index=2, device=HostDevice()), RecurrentLayer(plan, index=2)):
        update(layer, 1, 3)
        before, generation = held(layer), layer.generation
        for given, count, beside in bad:
            for attempt in (layer.update, layer.adopt):
                with pytest.raises(RecordError, match="layer 2 .RECURRENT.: "):
                    attempt(given, count, conv=beside)  # type: ignore[arg-type]
        assert held(layer) == before and layer.generation == generation
    with pytest.raises(RecordError, match="-1 positions"):
        ResidentRecurrentLayer(plan, device=HostDevice()).step(-1)


def test_other_plans_are_refused() -> None:
    with pytest.raises(RecordError, match="the plan has no state of its own"):
        ResidentRecurrentLayer(LayerPlan(LayerKind.FULL, 1, 1, 4, 4), device=HostDevice())


@both
@pytest.mark.parametrize("method", ["upload", "copy_into"])
def test_a_state_that_was_half_written_over_is_not_handed_out(plan: LayerPlan, method: str) -> None:
    device = FailingDevice()
    kept_at, state = 3, numbers(2, plan)[0]
    for after in range(4):
        layer = ResidentRecurrentLayer(plan, device=device)
        update(layer, 1, kept_at)
        kept, before = layer.set_aside(), held(layer)
        changes = {"upload": [layer.clear, lambda layer=layer: update(layer, 2)]}.get(
            method, [layer.prepare_adopt(state, 9, conv=numbers(2, plan)[1])]
        )
        for change in changes:
            device.fail(method, after)
            try:
                change()
                device.heal()
                continue
            except DeviceFault:
                device.heal()
            try:
                assert held(layer) == before  # nothing of it was written over
                layer.step(0)
                layer.step(0)
            except DeviceFault:
                for use in (lambda layer=layer: layer.step(), layer.set_aside, lambda layer=layer: update(layer, 3)):
                    with pytest.raises(DeviceFault, match="clear or restore"):
                        use()
            layer.prepare_return(kept).apply()
            assert held(layer) == before
            layer.clear()
            assert held(layer) == held(ResidentRecurrentLayer(plan, device=device))
            update(layer, 1, kept_at)


def test_a_convolution_that_may_be_half_written_over_is_not_handed_out() -> None:
    device = FailingDevice()
    layer = ResidentRecurrentLayer(DELTA, device=device)
    update(layer, 1, 3)
    before = held(layer)
    device.fail("upload", 0)
    with pytest.raises(DeviceFault, match="told to"):
        update(layer, 2)
    device.heal()
    assert held(layer) == before  # only the spare was to be written
    device.fail("upload", 1)
    with pytest.raises(DeviceFault, match="told to"):
        update(layer, 2)
    device.heal()
    with pytest.raises(DeviceFault, match="clear or restore"):
        layer.taken()
