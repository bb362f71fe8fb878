"""A device that fails at any of its calls leaves rows as they were, or rows that nobody reads until they are replaced."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from dumps import rows_of
from failing_device import FAULTS, FailingDevice
from resident_oracle import HEADS, KV_HEADS, SIZE, Oracle, made, near, plan_of

from warmkv.kernels.dispatch import REFERENCE
from warmkv.kernels.errors import KernelError
from warmkv.kernels.formats import F32, RowFormat
from warmkv.kernels.resident.host import HostOperations
from warmkv.kvstore.live.layers.attention import AttentionLayer
from warmkv.kvstore.live.layers.resident import ResidentLayer
from warmkv.kvstore.live.plan import LayerPlan
from warmkv.schema.errors import DeviceFault, OutOfMemory

WINDOW = 16
FIELDS = (RowFormat.Q8_2F, RowFormat.Q8_2F)
#: By name what is done to a layer: ``new`` gives rows, always the same ones.
VERBS: dict[str, Callable[[ResidentLayer, Callable[[int], F32]], object]] = {
    "append one": lambda layer, new: layer.append(new(1), new(1)),
    "append thirty": lambda layer, new: layer.append(new(30), new(30)),
    "truncate": lambda layer, new: layer.truncate_last(3),
    "keep the newest": lambda layer, new: layer.keep(range(layer.rows - 20, layer.rows)),
    "keep from the midst": lambda layer, new: layer.keep(range(3, 20)),
    "pick out": lambda layer, new: layer.keep(range(0, layer.rows, 3)),
    "trim": lambda layer, new: layer.trim_window(2, 4),
    "adopt": lambda layer, new: layer.adopt(new(70), new(70), position=70, base=0, importance=None, gapless=True),
}


#: Operations that fail as methods of `FAULTS` do.
OPERATIONS = ("append", "advance", "gather")


class FailingOperations(HostOperations):
    """``fail`` names one of `OPERATIONS` that raises from its call number ``after`` on."""

    failing, left = "", 0

    def fail(self, method: str, after: int) -> None:
        self.failing, self.left = method, after

    def append(self, *args: Any) -> None:
        self._count("append")
        super().append(*args)

    def advance(self, *args: Any) -> None:
        self._count("advance")
        super().advance(*args)

    def gather(self, *args: Any) -> None:
        self._count("gather")
        super().gather(*args)

    def _count(self, method: str) -> None:
        if method == self.failing:
            self.left -= 1
            if self.left < 0:
                raise KernelError(f"{method} fails because it was told to")


def numbers(seed: int) -> Callable[[int], F32]:
    rng = np.random.default_rng(seed)
    return lambda count: rng.standard_normal((count, KV_HEADS, SIZE)).astype(np.float32)


def filled(plan: LayerPlan, *, ringed: bool, rows: int) -> tuple[FailingDevice, ResidentLayer]:
    device = FailingDevice(operations=FailingOperations(REFERENCE))
    layer = made(device, plan, 100, ringed=ringed)
    new = numbers(1)
    for at in range(0, rows, 23):
        count = min(23, rows - at)
        layer.append(new(count), new(count))
    return device, layer


def held(layer: AttentionLayer) -> tuple[object, ...]:
    """All rows, and where they stand; not the generation."""
    found = rows_of(layer)
    assert found[4] == layer.generation
    return (*found[:4], *found[5:])


def answers(layer: AttentionLayer) -> F32:
    return np.array(layer.attend(np.random.default_rng(2).standard_normal((HEADS, SIZE)).astype(np.float32)))


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize(
    ("formats", "window", "ringed", "rows"),
    [
        ((RowFormat.Q8_0, RowFormat.Q5_1), 0, False, 60), ((RowFormat.Q8_0, RowFormat.Q5_1), WINDOW, False, 60),
        ((RowFormat.Q8_0, RowFormat.Q5_1), WINDOW, True, 90), (FIELDS, 0, False, 60), (FIELDS, WINDOW, True, 90),
    ],
    ids=["flat", "window", "ring", "open field", "ring with a field"],
)  # fmt: skip
def test_a_fault_leaves_what_was_there_or_nothing_to_be_read(
    formats: tuple[RowFormat, RowFormat], window: int, ringed: bool, rows: int, verb: str
) -> None:
    """At every call of every kind, with a device that goes on failing and then works again."""
    plan = plan_of(*formats, window=window)
    if "keep" in verb and window or "pick" in verb and window:
        return
    device, layer = filled(plan, ringed=ringed, rows=rows)
    VERBS[verb](layer, numbers(3))
    wanted = held(layer)
    failed = 0
    for method in (*FAULTS, *OPERATIONS):
        for after in range(40):
            device, layer = filled(plan, ringed=ringed, rows=rows)
            before, seen = held(layer), answers(layer)
            failing: Any = device if method in FAULTS else device.operations
            failing.fail(method, after)
            try:
                VERBS[verb](layer, numbers(3))
                break
            except (DeviceFault, OutOfMemory):
                failed += 1
            failing.fail("", 0)
            try:
                found = answers(layer)
            except DeviceFault:
                unreadable_until_cleared(layer)
                continue
            assert found.tobytes() == seen.tobytes() and layer.position == before[1]
            assert held(layer) == before or ringed  # which may have moved: what no query sees is gone then
            assert layer.mirrors() == layer.expected_mirrors
            VERBS[verb](layer, numbers(3))
            assert held(layer) == wanted
        else:
            raise AssertionError(f"{method} is called more often than was tried")
    assert failed or (verb == "trim" and (not window or ringed))


def unreadable_until_cleared(layer: ResidentLayer) -> None:
    one = np.ones((1, KV_HEADS, SIZE), np.float32)
    uses: list[Callable[[], object]] = [
        lambda: layer.append(one, one), lambda: layer.truncate_last(1), lambda: layer.keys.packed(),
        lambda: layer.values.gathered(None), lambda: layer.attend_head(np.ones(SIZE, np.float32), 0),
    ]  # fmt: skip
    if layer.ring is not None:
        del uses[0]  # a ring that would move its rows goes on with that
    for use in uses:
        with pytest.raises(DeviceFault, match="clear or restore"):
            use()
    new = numbers(4)
    k, v = new(20), new(20)
    q = np.random.default_rng(2).standard_normal((HEADS, SIZE)).astype(np.float32)
    twin = AttentionLayer(layer.plan, kernels=REFERENCE)
    twin.append(k, v)
    layer.adopt(k, v, position=20, base=0, importance=None, gapless=True)
    near(np.array(layer.attend(q)), np.asarray(twin.attend(q), np.float64))
    layer.clear()
    assert (layer.rows, layer.position) == (0, 0)
    layer.append(k, v)
    near(np.array(layer.attend(q)), np.asarray(twin.attend(q), np.float64))
    assert layer.mirrors() == layer.expected_mirrors


def test_a_ring_left_half_moved_goes_on_where_it_stopped() -> None:
    plan = plan_of(window=WINDOW)
    new = numbers(3)
    k, v = new(30), new(30)
    twin = filled(plan, ringed=True, rows=90)[1]
    twin.append(k, v)
    for after in range(2):
        device, layer = filled(plan, ringed=True, rows=90)
        device.fail("copy_into", after)
        with pytest.raises(DeviceFault):
            layer.append(k, v)
        device.heal()
        with pytest.raises(DeviceFault, match="clear or restore"):
            layer.append(k[:1], v[:1])  # for which there would be room
        layer.append(k, v)
        assert held(layer) == held(twin) and layer.ring == twin.ring
        assert answers(layer).tobytes() == answers(twin).tobytes()


def test_counters_that_a_fault_left_behind_are_written_before_the_next_use() -> None:
    device, layer = filled(plan_of(), ringed=False, rows=30)
    device.fail("set_one")
    with pytest.raises(DeviceFault):
        layer.attend(np.ones((HEADS, SIZE), np.float32), upto=10)
    with pytest.raises(DeviceFault):
        layer.clear()
    device.heal()
    assert layer.rows == 0 and layer.mirrors() != layer.expected_mirrors
    oracle, new = Oracle(layer.plan), numbers(5)
    k, v = new(3), new(3)
    layer.append(k, v)
    oracle.append(k, v)
    oracle.check(layer)
    q = np.random.default_rng(2).standard_normal((HEADS, SIZE)).astype(np.float32)
    near(np.array(layer.attend(q)), oracle.attend(q))


def test_a_layer_that_is_freed_leaves_no_sinks_on_the_books() -> None:
    device = FailingDevice(operations=HostOperations(REFERENCE))
    layer = made(device, plan_of(), 20)
    workspace = layer.workspace.allocated_bytes
    layer.sinks = np.zeros(HEADS, np.float32)
    layer.free()
    assert device.allocated_bytes == workspace
