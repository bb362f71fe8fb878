"""Resident layers at their edges: lengths, windows, wraps, rewinds, loads, refusals, faults and memory."""

from __future__ import annotations

import numpy as np
import pytest
from devices_at_hand import KINDS, at_hand, brought
from dumps import rows_of
from resident_oracle import HEADS, KV_HEADS, SIZE, Oracle, made, near, plan_of

from warmkv.kernels.dispatch import REFERENCE
from warmkv.kernels.formats import RowFormat
from warmkv.kernels.quant.packed import pack
from warmkv.kernels.resident.host import HostOperations
from warmkv.kvstore.live.devices.base import Device
from warmkv.kvstore.live.devices.host import HostDevice
from warmkv.kvstore.live.devices.workspace import Needs, Workspace
from warmkv.kvstore.live.layers.attention import AttentionLayer
from warmkv.kvstore.live.layers.resident import ResidentLayer
from warmkv.kvstore.live.plan import LayerPlan, TurboQuantPlan
from warmkv.kvstore.live.rings import Ring
from warmkv.kvstore.live.rows.prefix import PrefixRows
from warmkv.schema.errors import (
    CannotRewind,
    CapacityExceeded,
    DeviceFault,
    OutOfMemory,
    RecordError,
    UnsupportedError,
)

WINDOW, ROWS = 40, 200


@pytest.fixture(params=KINDS)
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Device:
    return at_hand(request.param, monkeypatch)


@pytest.fixture
def host() -> HostDevice:
    return HostDevice(HostOperations(REFERENCE))


class Both:
    """A layer and what remembers everything."""

    def __init__(self, device: Device, plan: LayerPlan, capacity: int, *, ringed: bool = False, chunk: int = 16) -> None:
        self.device, self.rng = device, np.random.default_rng(11)
        self.layer, self.oracle = made(device, plan, capacity, ringed=ringed, chunk=chunk), Oracle(plan)

    def normal(self, *shape: int) -> np.ndarray:
        return self.rng.standard_normal(shape).astype(np.float32)

    def append(self, count: int, *, on_device: bool = False) -> None:
        k, v = self.normal(count, KV_HEADS, SIZE), self.normal(count, KV_HEADS, SIZE)
        if on_device:
            self.layer.append(brought(self.device, k), brought(self.device, v))
        else:
            self.layer.append(k, v)
        self.oracle.append(k, v)

    def attend(self) -> None:
        q = self.normal(HEADS, SIZE)
        near(self.device.download(self.layer.attend(q)), self.oracle.attend(q))

    def attend_chunk(self, count: int) -> None:
        q = self.normal(count, HEADS, SIZE)
        found = self.device.download(self.layer.attend_chunk(q))
        assert found.shape == (count, HEADS, SIZE)
        for at in range(count):
            near(found[at], self.oracle.attend(q[at], len(self.oracle.rows) - count + at + 1))

    def check(self) -> None:
        self.oracle.check(self.layer)


# -- lengths ------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [0, 1, 31, 32, 33, 63, 64])
@pytest.mark.parametrize("shape", ["full", "window", "ring"])
def test_rows_are_stored_and_seen_at_every_edge(device: Device, count: int, shape: str) -> None:
    both = Both(device, plan_of(window=0 if shape == "full" else 32), 64, ringed=shape == "ring")
    both.append(count)
    both.check()
    both.attend()
    both.attend_chunk(min(count, 3))
    if shape != "ring" and count == 64:
        before = rows_of(both.layer)
        with pytest.raises(CapacityExceeded):
            both.append(1)
        assert rows_of(both.layer) == before
    both.check()


def test_rows_and_queries_of_the_device_are_taken_where_they_are(device: Device) -> None:
    both = Both(device, plan_of(window=8), 64)
    for count in (1, 20, 3):
        both.append(count, on_device=True)
        both.check()
    q = both.normal(HEADS, SIZE)
    near(device.download(both.layer.attend(brought(device, q))), both.oracle.attend(q))


def test_more_than_a_chunk_of_host_rows_is_stored_at_once(device: Device) -> None:
    both = Both(device, plan_of(), 100, chunk=4)
    both.append(61)
    both.check()
    both.attend()
    both.attend_chunk(4)
    with pytest.raises(CapacityExceeded, match="the workspace has room for"):
        both.layer.attend_chunk(both.normal(5, HEADS, SIZE))


@pytest.mark.parametrize("upto", [0, 1, 7, 8, 9, 29, 30])
def test_attention_up_to_a_row_leaves_the_counters_as_they_were(device: Device, upto: int) -> None:
    both = Both(device, plan_of(window=8), 64)
    both.append(30)
    q = both.normal(HEADS, SIZE)
    near(device.download(both.layer.attend(q, upto=upto)), both.oracle.attend(q, upto))
    both.check()
    both.attend()


def test_sinks_and_a_soft_cap_count_as_they_do_on_the_host(device: Device) -> None:
    both = Both(device, plan_of(softcap=20.0, scale=0.3), 64)
    both.append(9)
    both.oracle.sinks = both.layer.sinks = both.normal(HEADS)
    both.attend()
    both.attend_chunk(5)
    both.layer.clear()
    both.oracle.truncate(9)
    both.append(2)
    both.attend()


PAIRS = [
    (RowFormat.F32, RowFormat.F32), (RowFormat.F16, RowFormat.BF16), (RowFormat.Q8_0, RowFormat.Q4_0),
    (RowFormat.FP8, RowFormat.FP8), (RowFormat.TQ_KEY, RowFormat.TQ_VALUE), (RowFormat.TQ3, RowFormat.F16),
    (RowFormat.Q8_2F, RowFormat.Q8_2F), (RowFormat.F32, RowFormat.Q8_2F),
]  # fmt: skip


@pytest.mark.parametrize(("keys", "values"), PAIRS, ids=[f"{keys.value}-{values.value}" for keys, values in PAIRS])
def test_every_format_is_stored_and_read_as_on_the_host(device: Device, keys: RowFormat, values: RowFormat) -> None:
    """Cut over the row at which fields are fixed, against the layer of host memory."""
    if device.name == "harness" and (keys, values) not in PAIRS[2::3]:
        pytest.skip("the sources are tried on every format by tests of their own")
    turboquant = TurboQuantPlan() if keys.rotated or values.rotated else None
    plan = plan_of(keys, values, turboquant=turboquant)
    layer, twin = made(device, plan, 80), AttentionLayer(plan, index=3, kernels=REFERENCE)
    rng = np.random.default_rng(1)
    for count in (62, 5, 1):
        k, v = (rng.standard_normal((count, KV_HEADS, SIZE)).astype(np.float32) for _ in range(2))
        layer.append(k, v)
        twin.append(k, v)
        q = rng.standard_normal((HEADS, SIZE)).astype(np.float32)
        near(device.download(layer.attend(q)), twin.attend(q))
    for mine, theirs in ((layer.keys, twin.keys), (layer.values, twin.values)):
        packed = pack([theirs.blocks(head) for head in range(KV_HEADS)], theirs.format, SIZE, keys=theirs.keys)
        assert mine.packed().tobytes() == packed.tobytes()
        assert mine.frozen and (mine.field is None) == (theirs.field is None)
    assert layer.mirrors() == (68, 0)


# -- cutting ------------------------------------------------------------------------------------


def test_rows_are_picked_out_and_more_come_behind_them(device: Device) -> None:
    both = Both(device, plan_of(), 64)
    both.append(50)
    kept = [0, 1, 2, 7, 30, 31, 48, 49]
    both.layer.keep(kept)
    both.oracle.rows = [both.oracle.rows[at] for at in kept]
    assert (both.layer.rows, both.layer.position, both.layer.gapless) == (8, 50, False)
    both.check()
    both.append(3)
    both.check()
    both.attend()
    both.layer.truncate_last(4)
    both.oracle.truncate(4)
    both.check()
    with pytest.raises(CannotRewind):
        both.layer.truncate_last(2)


def test_a_window_without_a_ring_is_trimmed(device: Device) -> None:
    both = Both(device, plan_of(window=10), 64)
    both.append(40)
    generation = both.layer.generation
    assert both.layer.trim_window(slack=2, align=4) == 28
    assert (both.layer.rows, both.layer.base) == (12, 28) and both.layer.generation != generation
    both.check()
    both.append(52)
    both.check()
    both.attend()
    both.attend_chunk(16)


# -- rings --------------------------------------------------------------------------------------


def test_a_ring_gives_up_rows_only_when_it_has_to(device: Device) -> None:
    both = Both(device, plan_of(window=WINDOW), ROWS, ringed=True)
    both.append(ROWS - 1)
    both.append(1)
    both.check()
    assert both.layer.base == 0
    generation, allocations = both.layer.generation, device.allocations
    both.append(3)
    both.check()
    # (200 - 39) & ~31: there is no room for what a draft would be taken back over.
    assert (both.layer.base, both.layer.rows) == (160, 43)
    assert both.layer.generation != generation and device.allocations == allocations
    both.attend()
    both.attend_chunk(3)


def test_a_ring_of_the_usual_size_keeps_what_a_draft_is_taken_back_over(host: HostDevice) -> None:
    """Worked numbers: a window of 512 in 5151 rows, chunks of 4096."""
    plan = LayerPlan(plan_of(window=1).kind, 1, 1, SIZE, SIZE, RowFormat.FP8, RowFormat.FP8, window=512, importance=False)
    layer = made(host, plan, 5151, ringed=True)
    assert layer.memory().attention == 5151 * 64 + 20 == layer.allocated_bytes
    chunk = np.zeros((4096, 1, SIZE), np.float32)
    bases = []
    for _ in range(4):
        layer.append(chunk, chunk)
        bases.append(layer.base)
        assert layer.mirrors() == (layer.position, layer.base)
    assert bases == [0, 3072, 7168, 11264]
    furthest = 11264 + 511
    layer.check_truncate(4 * 4096 - furthest)
    with pytest.raises(CannotRewind, match="11264"):
        layer.check_truncate(4 * 4096 - furthest + 1)


def test_more_than_fits_beside_the_window_is_refused(device: Device) -> None:
    both = Both(device, plan_of(window=WINDOW), ROWS, ringed=True)
    both.append(ROWS)
    before = rows_of(both.layer)
    with pytest.raises(CapacityExceeded):
        both.append(ROWS - 39)
    assert rows_of(both.layer) == before and both.layer.mirrors() == (ROWS, 0)
    # 40 rows from 160 on stay.
    both.append(ROWS - 40)
    both.check()
    both.attend()


@pytest.mark.parametrize(("count", "allowed"), [(0, True), (1, True), (2, True), (3, False), (41, False), (50, False)])
def test_a_ring_goes_back_as_far_as_a_whole_window_is_there(host: HostDevice, count: int, allowed: bool) -> None:
    both = Both(host, plan_of(window=WINDOW), ROWS, ringed=True)
    both.append(ROWS)
    both.append(1)
    assert both.layer.base == 160
    if allowed:
        both.layer.truncate_last(count)
        both.oracle.truncate(count)
        both.append(1)
        both.attend()
    else:
        before = rows_of(both.layer)
        with pytest.raises(CannotRewind):
            both.layer.truncate_last(count)
        assert rows_of(both.layer) == before
    both.check()


def test_a_truncation_is_taken_back_whole(device: Device) -> None:
    both = Both(device, plan_of(window=8), 64, ringed=True)
    both.append(30)
    before = rows_of(both.layer)
    both.layer.truncate_last(7)
    assert both.layer.mirrors() == (23, 0)
    both.layer.untruncate_last(7)
    assert rows_of(both.layer) == before
    both.check()


def test_rows_of_a_ring_are_given_up_when_told(host: HostDevice) -> None:
    both = Both(host, plan_of(window=8), 64, ringed=True)
    both.append(60)
    assert both.layer.trim_window() == 0
    both.layer.rebase(32)
    both.check()
    assert both.layer.base == 32
    for base, error in ((31, CannotRewind), (61, RecordError), (40.5, RecordError), (-1, RecordError)):
        with pytest.raises(error):
            both.layer.rebase(base)
    both.attend()
    both.layer.clear()
    assert (both.layer.base, both.layer.mirrors(), both.layer.ring) == (0, (0, 0), Ring(64, 8))


# -- loading ------------------------------------------------------------------------------------


@pytest.mark.parametrize("held", [0, 5, 64])
@pytest.mark.parametrize("length", [0, 1, 31, 32, 33, 63, 64])
@pytest.mark.parametrize("shape", ["full", "window", "ring"])
def test_record_bytes_are_restored_at_the_right_rows(host: HostDevice, held: int, length: int, shape: str) -> None:
    plan = plan_of(window=0 if shape == "full" else 12)
    both, source = Both(host, plan, 64, ringed=shape == "ring"), Both(host, plan, 64)
    both.append(held)
    source.append(length)
    cut = length // 3
    keys, values = ([plane.packed(0, cut), plane.packed(cut)] for plane in (source.layer.keys, source.layer.values))
    install = both.layer.prepare_restore(keys, values, position=length, base=0)
    both.check()
    install()
    both.oracle = source.oracle
    both.check()
    assert both.layer.base == (max(0, length - 11) // 32 * 32 if shape == "ring" else 0)
    both.attend()
    if shape == "ring" or length < 60:
        both.append(3)
        both.check()
        both.attend()


def test_mapped_rows_and_float_rows_are_adopted(device: Device) -> None:
    """From where a restored prefix lies, a plane of the host, and arrays."""
    plan = plan_of(window=12)
    twin = AttentionLayer(plan, index=3, kernels=REFERENCE)
    both = Both(device, plan, 64, ringed=True)
    k, v = both.normal(50, KV_HEADS, SIZE), both.normal(50, KV_HEADS, SIZE)
    twin.append(k, v)
    both.oracle.append(k, v)
    mapped = [
        PrefixRows([plane.blocks(head) for head in range(KV_HEADS)], tail)
        for plane, tail in zip((twin.keys, twin.values), twin.empty_planes(), strict=True)
    ]
    for keys, values in (tuple(mapped), (twin.keys, twin.values), (k, v)):
        both.layer.clear()
        both.layer.adopt(keys, values, position=50, base=0, importance=None, gapless=True)
        both.check()
        assert both.layer.base == 32
        both.attend()


@pytest.mark.parametrize("ringed", [False, True])
def test_a_window_is_restored_from_just_its_rows(device: Device, ringed: bool) -> None:
    """As records end with them: 11 rows, from no multiple of anything on."""
    plan = plan_of(window=12)
    source = Both(device, plan, 64)
    source.append(60)
    keys, values = [source.layer.keys.packed(49)], [source.layer.values.packed(49)]
    both = Both(device, plan, 64, ringed=ringed)
    both.append(5)
    before = rows_of(both.layer)
    with pytest.raises(RecordError, match="a window of 12 sees earlier ones"):
        both.layer.prepare_restore([keys[0][1:]], [values[0][1:]], position=60, base=50)
    assert rows_of(both.layer) == before
    both.layer.prepare_restore(keys, values, position=60, base=49)()
    both.oracle = source.oracle
    both.check()
    assert (both.layer.base, both.layer.rows) == (49, 11)
    assert both.layer.mirrors() == ((60, 32) if ringed else (11, 0))
    for count in (1, 30, 20):
        if not ringed:
            both.layer.trim_window()
        both.append(count)
        both.check()
        both.attend()


@pytest.mark.parametrize("window", [1, 2, 31, 32, 33, 512])
def test_a_ring_restored_at_any_position_goes_on_back_and_round(host: HostDevice, window: int) -> None:
    """From records of just the window: what lies before them is not there, whatever the ring would allow."""
    plan = plan_of(RowFormat.FP8, RowFormat.FP8, window=window)
    rows = window + 31 + 64
    workspace = Workspace.of(host, [plan], rows)
    source = Both(host, plan, window + 120)
    k, v = source.normal(window + 110, KV_HEADS, SIZE), source.normal(window + 110, KV_HEADS, SIZE)
    source.layer.append(k, v)
    source.oracle.append(k, v)
    known, q = source.oracle, source.normal(HEADS, SIZE)
    for position in range(window + 32, window + 64):
        first = position - (window - 1)
        parts = [[plane.packed(first, position)] for plane in (source.layer.keys, source.layer.values)]
        layer = made(host, plan, rows, ringed=True, workspace=workspace)
        layer.prepare_restore(*parts, position=position, base=first)()
        aligned = first // 32 * 32
        assert (layer.base, layer.rows, layer.ring.base, layer.mirrors()) == (first, window - 1, aligned, (position, aligned))
        assert layer.keys.packed().tobytes() == parts[0][0].tobytes()
        ahead = 41
        layer.append(k[position : position + ahead], v[position : position + ahead])
        near(layer.attend(q), Oracle(plan, known.rows[: position + ahead]).attend(q))
        for back in range(1, ahead + 3):
            if back <= ahead:
                layer.check_truncate(back)
            else:
                with pytest.raises(CannotRewind):
                    layer.check_truncate(back)
        taken = position % 41
        layer.truncate_last(taken)
        now = position + ahead - taken
        layer.append(k[now : now + 1], v[now : now + 1])
        near(layer.attend(q), Oracle(plan, known.rows[: now + 1]).attend(q))
        for _ in range(4):  # round the ring: padding is gone with the first rows
            layer.append(k[:31], v[:31])
        assert layer.base == layer.ring.base > aligned and layer.keys.padding == 0
        assert layer.mirrors() == (layer.position, layer.base)


def test_what_cannot_be_restored_changes_nothing(host: HostDevice) -> None:
    plan = plan_of(window=12)
    both = Both(host, plan, 40, ringed=True)
    both.append(30)
    before = rows_of(both.layer)
    row = both.layer.keys.packed(0, 1), both.layer.values.packed(0, 1)
    restore = both.layer.prepare_restore
    for keys, values, position, base in (
        ([row[0]] * 3, [row[1]] * 2, 3, 0), ([row[1]] * 3, [row[0]] * 3, 3, 0), ([row[0]] * 3, [row[1]] * 3, 4, 0),
        ([row[0]] * 3, [row[1]] * 3, 99, 96), ([row[0]] * 3, [row[1]] * 3, 2, -1),
    ):  # fmt: skip
        with pytest.raises(RecordError):
            restore(keys, values, position=position, base=base)
    with pytest.raises(RecordError, match="window"):
        restore([row[0]], [row[1]], position=3, base=0, gapless=False)
    with pytest.raises(RecordError, match="field"):
        restore([row[0]], [row[1]], position=1, base=0, fields=(np.ones((KV_HEADS, SIZE), np.float32), None))
    with pytest.raises(RecordError, match="importance"):
        both.layer.adopt(*both.layer.empty_planes(), position=0, base=0, importance=np.zeros(0, np.float32), gapless=True)
    flat = made(host, plan_of(), 40)
    with pytest.raises(CapacityExceeded):
        flat.prepare_restore([row[0]] * 41, [row[1]] * 41, position=41, base=0)
    assert rows_of(both.layer) == before
    both.check()


@pytest.mark.parametrize("ringed", [False, True])
def test_a_restore_is_refused_once_rows_were_written_over_what_it_brought(host: HostDevice, ringed: bool) -> None:
    both = Both(host, plan_of(window=12), 40, ringed=ringed)
    both.append(4)
    source = Both(host, plan_of(window=12), 40)
    source.append(20)
    parts = [source.layer.keys.packed()], [source.layer.values.packed()]
    installs = [both.layer.prepare_restore(*parts, position=20, base=0) for _ in range(2)]
    both.append(3)
    both.layer.truncate_last(3)
    both.oracle.truncate(3)
    for install in installs:
        with pytest.raises(RecordError, match="since"):
            install()
    both.check()
    both.attend()
    both.layer.prepare_restore(*parts, position=20, base=0)()
    assert both.layer.position == 20 and both.layer.mirrors() == both.layer.expected_mirrors


def test_fields_are_restored_with_their_rows_or_refused(device: Device) -> None:
    plan = plan_of(RowFormat.Q8_2F, RowFormat.Q8_2F)
    source, target = made(device, plan, 80), made(device, plan, 80)
    rng = np.random.default_rng(5)
    source.append(*(rng.standard_normal((70, KV_HEADS, SIZE)).astype(np.float32) for _ in range(2)))
    planes = (source.keys, source.values)
    parts = [[plane.packed()] for plane in planes]
    with pytest.raises(RecordError, match="field of one plane"):
        target.prepare_restore(*parts, position=70, base=0, fields=(source.keys.field, None))
    target.prepare_restore(*parts, position=70, base=0, fields=(source.keys.field, source.values.field))()
    q = rng.standard_normal((HEADS, SIZE)).astype(np.float32)
    expected = device.download(source.attend(q))
    assert device.download(target.attend(q)).tobytes() == expected.tobytes()
    assert target.memory().attention == 80 * 2 * KV_HEADS * (SIZE + 4) + 20 + 2 * 4 * KV_HEADS * SIZE


# -- growing ------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", ["full", "window", "ring"])
@pytest.mark.parametrize("held", [0, 1, 45, 64, 80])
def test_a_layer_grows_with_its_rows(device: Device, shape: str, held: int) -> None:
    both = Both(device, plan_of(window=0 if shape == "full" else 12), 64, ringed=shape == "ring")
    for count in (min(held, 64), max(0, held - 64)):
        if shape == "window":
            both.layer.trim_window()
        if shape != "full":
            both.append(count)
        elif count and both.layer.rows + count <= 64:
            both.append(count)
    generation, base = both.layer.generation, both.layer.base
    with pytest.raises(RecordError, match="growth to 63 rows"):
        both.layer.prepare_grow(63)
    grow = both.layer.prepare_grow(100, Workspace.of(device, [both.layer.plan], 100))
    both.check()
    grow()
    both.check()
    assert both.layer.capacity == both.layer.keys.plane.rows == 100
    assert both.layer.base == (max(base, max(0, held - 11) // 32 * 32) if shape == "ring" else base)
    assert (both.layer.generation == generation) == (both.layer.base == base)
    both.append(30)
    both.check()
    both.attend()
    field = both.layer.keys.row_bytes + both.layer.values.row_bytes
    assert both.layer.allocated_bytes == 100 * field + 20


def test_growth_of_a_wrapped_ring_takes_its_window_only(host: HostDevice) -> None:
    """Worked numbers: a window of 32 at 8250 in rows from 4096 on."""
    plan = LayerPlan(plan_of(window=1).kind, 1, 1, SIZE, SIZE, RowFormat.FP8, RowFormat.FP8, window=32, importance=False)
    layer = made(host, plan, 4671, ringed=True)
    rows = np.random.default_rng(0).standard_normal((4096, 1, SIZE)).astype(np.float32)
    layer.append(rows, rows)
    layer.append(rows[:500], rows[:500])
    layer.rebase(4096)
    layer.append(rows[:3654], rows[:3654])
    assert (layer.position, layer.base, layer.rows) == (8250, 4096, 4154)
    newest = layer.keys.packed(4096)
    layer.prepare_grow(8250)()
    assert (layer.base, layer.rows, layer.ring.rows, layer.mirrors()) == (8192, 58, 8250, (8250, 8192))
    assert layer.keys.packed().tobytes() == newest.tobytes()


def test_growth_without_memory_for_it_changes_nothing(host: HostDevice) -> None:
    both = Both(host, plan_of(RowFormat.Q8_2F, RowFormat.Q8_2F), 80)
    rows = both.normal(70, KV_HEADS, SIZE)
    both.layer.append(rows, rows)
    before, books = rows_of(both.layer), host.allocated_bytes
    needed = 2 * 90 * KV_HEADS * (SIZE + 4) + 16 + 2 * 4 * KV_HEADS * SIZE
    for short in (1, needed // 2, needed):
        host.limit_bytes = books + needed - short
        with pytest.raises(OutOfMemory):
            both.layer.prepare_grow(90)
        assert (rows_of(both.layer), host.allocated_bytes) == (before, books)
    host.limit_bytes = books + needed
    both.layer.prepare_grow(90)()
    assert rows_of(both.layer) == before and host.allocated_bytes < books + needed
    assert host.download(both.layer.keys.plane.field).tobytes() == both.layer.keys.field.tobytes()


# -- what is refused ----------------------------------------------------------------------------


def test_plans_that_devices_have_no_part_in_are_refused(host: HostDevice) -> None:
    good = plan_of(window=8)
    workspace = Workspace.of(host, [good], 64)
    make = dict(index=3, device=host, workspace=workspace, capacity=64)
    books = host.allocated_bytes
    counted = LayerPlan(good.kind, HEADS, KV_HEADS, SIZE, SIZE, window=8)
    with pytest.raises(UnsupportedError, match="importance"):
        ResidentLayer(counted, **make)
    with pytest.raises(UnsupportedError, match="dead KV heads"):
        ResidentLayer(plan_of(alive=(True, False)), **make)
    base = host.zeros((1,), np.int32)
    for ring, given in ((Ring(64, 8), None), (None, base), (Ring(64, 9), base), (Ring(64, 8, 32), base)):
        with pytest.raises(RecordError):
            ResidentLayer(good, ring=ring, base=given, **make)
    with pytest.raises(RecordError, match="0 rows"):
        ResidentLayer(good, **{**make, "capacity": 0})
    with pytest.raises(RecordError, match="its workspace on other"):
        ResidentLayer(good, **{**make, "workspace": Workspace.of(HostDevice(name="other"), [good], 64)})
    with pytest.raises(RecordError, match="expected scratch"):
        ResidentLayer(good, **{**make, "workspace": Workspace(host, Needs())})
    del base
    assert host.allocated_bytes <= books + 8


def test_rows_that_do_not_fit_change_nothing(device: Device) -> None:
    both = Both(device, plan_of(), 64)
    both.append(3)
    before = rows_of(both.layer)
    good = np.ones((1, KV_HEADS, SIZE), np.float32)
    for bad in (good[:, :1], good.astype(np.float64), np.full_like(good, np.nan), np.full_like(good, 1e38), [1.0]):
        with pytest.raises(RecordError):
            both.layer.append(good, bad)
    with pytest.raises(RecordError, match="1 rows of keys, 2 of values"):
        both.layer.append(good, np.ones((2, KV_HEADS, SIZE), np.float32))
    with pytest.raises(RecordError):
        both.layer.attend(np.ones((HEADS, SIZE + 1), np.float32))
    with pytest.raises(RecordError, match="queries of 4 positions"):
        both.layer.attend_chunk(np.ones((4, HEADS, SIZE), np.float32))
    assert rows_of(both.layer) == before
    both.check()


def test_host_rows_are_looked_at_whatever_the_others_are(monkeypatch: pytest.MonkeyPatch) -> None:
    device = at_hand("stand-in", monkeypatch)
    both = Both(device, plan_of(), 20)
    both.append(3)
    good = np.ones((1, KV_HEADS, SIZE), np.float32)
    for k, v in (
        (good * np.nan, brought(device, good)),
        (brought(device, good), good * np.inf),
        (good * 3e38, brought(device, good)),
    ):
        with pytest.raises(RecordError):
            both.layer.append(k, v)
    both.check()
    k, v = both.normal(2, KV_HEADS, SIZE), both.normal(2, KV_HEADS, SIZE)
    both.layer.append(k, brought(device, v))
    both.oracle.append(k, v)
    both.check()


def test_device_arrays_that_kernels_cannot_read_at_once_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    device = at_hand("stand-in", monkeypatch)
    both = Both(device, plan_of(), 20)
    both.append(3)
    flat = device.zeros((HEADS * SIZE + 4,), np.float32)
    for first in (1, 2, 3):
        with pytest.raises(RecordError, match="no multiple of 16 bytes"):
            both.layer.attend(flat[first : first + HEADS * SIZE].reshape(HEADS, SIZE))
    both.layer.attend(flat[4 : 4 + HEADS * SIZE].reshape(HEADS, SIZE))
    both.check()


def test_a_window_of_one_that_was_given_up_is_not_answered(host: HostDevice) -> None:
    both = Both(host, plan_of(window=1), 20, ringed=True)
    both.append(3)
    row = both.layer.keys.packed(0, 0), both.layer.values.packed(0, 0)
    both.layer.prepare_restore([row[0]], [row[1]], position=3, base=3)()
    q = np.ones((HEADS, SIZE), np.float32)
    for ask in (lambda: both.layer.attend(q), lambda: both.layer.attend_head(q[0], 0)):
        with pytest.raises(RecordError, match="given up"):
            ask()


def test_a_row_too_large_for_its_field_fixes_none(device: Device) -> None:
    layer = made(device, plan_of(RowFormat.Q8_2F, RowFormat.Q8_2F), 80)
    tiny = np.full((64, KV_HEADS, SIZE), 1e-7, np.float32)
    layer.append(tiny, tiny)
    before = rows_of(layer)
    with pytest.raises(RecordError):
        layer.append(tiny[:1], np.full((1, KV_HEADS, SIZE), 3e38, np.float32))
    assert rows_of(layer) == before and not layer.keys.frozen
    layer.append(tiny[:1], tiny[:1])
    assert layer.keys.frozen and layer.mirrors() == (65, 0)


# -- faults -------------------------------------------------------------------------------------


class Failing(HostDevice):
    """Uploads fail from the ``left``-th on; rows are brought to it as to a GPU."""

    left = 1 << 30

    def owns(self, array: object) -> bool:
        return super().owns(array) and getattr(array, "base", None) is not None

    def upload(self, host: np.ndarray, out: np.ndarray, offset: int = 0) -> None:
        if self.left == 0:
            raise DeviceFault("upload: an illegal address")
        self.left -= 1
        super().upload(host, out, offset)


@pytest.mark.parametrize("left", [0, 1])
def test_a_failed_upload_leaves_rows_ring_and_counters(left: int) -> None:
    device = Failing(HostOperations(REFERENCE))
    both = Both(device, plan_of(window=WINDOW), ROWS, ringed=True)
    both.append(ROWS)
    before = rows_of(both.layer)
    device.left = left
    with pytest.raises(DeviceFault):
        both.layer.append(*(np.ones((1, KV_HEADS, SIZE), np.float32) for _ in range(2)))
    row = [both.layer.keys.packed(0, 1)], [both.layer.values.packed(0, 1)]
    device.left = left
    with pytest.raises(DeviceFault):
        both.layer.prepare_restore(*row, position=1, base=0)
    device.left = 1 << 30
    assert rows_of(both.layer) == before
    both.check()
    both.append(1)
    both.check()


def test_memory_that_is_refused_leaves_nothing_behind(host: HostDevice) -> None:
    """At every allocation there is."""
    plan = plan_of(RowFormat.Q8_2F, RowFormat.Q8_2F)
    workspace = Workspace.of(host, [plan], 64)
    books = host.allocated_bytes
    layer = made(host, plan, 64, workspace=workspace)
    needed = host.allocated_bytes - books
    layer.free()
    assert host.allocated_bytes == books
    refused = 0
    for short in range(1, needed + 1, 97):
        host.limit_bytes = books + needed - short
        with pytest.raises(OutOfMemory):
            made(host, plan, 64, workspace=workspace)
        refused += 1
        assert host.allocated_bytes == books
    host.limit_bytes = books + needed
    assert made(host, plan, 64, workspace=workspace).allocated_bytes == needed and refused > 50


def test_rows_picked_out_without_memory_for_it_stay(host: HostDevice) -> None:
    both = Both(host, plan_of(), 64)
    both.append(20)
    before = rows_of(both.layer)
    host.limit_bytes = host.allocated_bytes + 10
    with pytest.raises(OutOfMemory):
        both.layer.keep([0, 5, 19])
    assert rows_of(both.layer) == before
    both.layer.keep(range(4, 20))  # one run moves where it lies
    assert both.layer.rows == 16


# -- memory -------------------------------------------------------------------------------------


@pytest.mark.parametrize("ringed", [False, True])
def test_a_decode_step_of_arrays_of_the_device_can_be_captured(monkeypatch: pytest.MonkeyPatch, ringed: bool) -> None:
    device = at_hand("stand-in", monkeypatch)
    both = Both(device, plan_of(window=8), 64, ringed=ringed)
    both.append(20)
    both.attend()
    k, v, q = both.normal(1, KV_HEADS, SIZE), both.normal(1, KV_HEADS, SIZE), both.normal(HEADS, SIZE)
    rows, queries = [brought(device, array) for array in (k, v)], brought(device, q)
    device.stream.capturing = True
    both.layer.append(*rows)
    out = both.layer.attend(queries)
    device.stream.capturing = False
    both.oracle.append(k, v)
    near(device.download(out), both.oracle.attend(q))
    both.check()


@pytest.mark.parametrize("ringed", [False, True])
def test_a_decode_step_takes_no_memory_and_nothing_moves(device: Device, ringed: bool) -> None:
    steps = 1000 if isinstance(device, HostDevice) and device.name == "cpu" else 80
    both = Both(device, plan_of(window=8), 64 if ringed else steps + 1, ringed=ringed)
    layer = both.layer
    k, v, q = both.normal(1, KV_HEADS, SIZE), both.normal(1, KV_HEADS, SIZE), both.normal(HEADS, SIZE)
    layer.append(k, v)
    out = layer.attend(q)
    addresses = [_address(array) for array in _arrays(layer, out)]
    before, bytes_before = device.allocations, device.allocated_bytes
    for _ in range(steps):
        layer.append(k, v)
        out = layer.attend(q)
    assert (device.allocations, device.allocated_bytes) == (before, bytes_before)
    assert [_address(array) for array in _arrays(layer, out)] == addresses
    assert layer.mirrors() == (steps + 1, layer.base)


def _arrays(layer: ResidentLayer, out: object) -> list[object]:
    counters = layer.counters
    return [layer.keys.plane.data, layer.values.plane.data, counters.length, counters.base, layer.workspace.scratch, out]


def _address(array: object) -> int:
    return int(array.ctypes.data if isinstance(array, np.ndarray) else array.data.ptr)


def test_answers_lie_where_the_last_ones_did(host: HostDevice) -> None:
    """To be read before the next are asked for, of any layer of the workspace."""
    plan = plan_of()
    workspace = Workspace.of(host, [plan], 64)
    layers = [made(host, plan, 64, workspace=workspace) for _ in range(2)]
    row = np.ones((1, KV_HEADS, SIZE), np.float32)
    for layer in layers:
        layer.append(row, row)
    first, second = (layer.attend(np.ones((HEADS, SIZE), np.float32)) for layer in layers)
    assert np.shares_memory(first, second)


def test_queries_that_lie_where_answers_go_are_refused(device: Device) -> None:
    both = Both(device, plan_of(), 20)
    both.append(5)
    answers = both.layer.attend(brought(device, both.normal(HEADS, SIZE)))
    before = device.download(answers)
    for ask in (lambda: both.layer.attend(answers), lambda: both.layer.attend_chunk(answers.reshape(1, HEADS, SIZE))):
        with pytest.raises(RecordError, match="among the answers"):
            ask()
    near(device.download(both.layer.attend(brought(device, before))), both.oracle.attend(before))


@pytest.mark.parametrize("ringed", [False, True])
def test_a_layer_takes_its_rows_and_twenty_bytes(host: HostDevice, ringed: bool) -> None:
    """The geometry of one of eight ranks: 136 + 96 bytes a token."""
    plan = LayerPlan(
        plan_of(window=512).kind, 4, 1, 128, 128, RowFormat.Q8_0, RowFormat.Q5_1, window=512, importance=False
    )  # fmt: skip
    rows = 5151 if ringed else 10_000
    workspace = Workspace.of(host, [plan], rows)
    base = host.zeros((1,), np.int32) if ringed else None
    before = host.allocated_bytes
    ring = Ring(rows, 512) if ringed else None
    layer = ResidentLayer(plan, device=host, workspace=workspace, capacity=rows, ring=ring, base=base)
    assert host.allocated_bytes - before == layer.memory().attention == layer.allocated_bytes == 232 * rows + 20


def test_a_workspace_takes_what_it_said(device: Device) -> None:
    plans = [plan_of(), plan_of(window=8), LayerPlan(plan_of().kind, 8, 8, 64, 16, importance=False)]
    before = device.allocated_bytes
    workspace = Workspace.of(device, plans, 100, chunk=7)
    taken = device.allocated_bytes - before
    assert taken == workspace.allocated_bytes == Workspace.bytes_of(device, plans, 100, chunk=7)
    needs = workspace.needs
    assert needs.answers == 7 * max(HEADS * SIZE, 8 * 16)
    staged = 0 if device.owns(np.empty(0)) else 7
    assert (needs.queries, needs.keys, needs.values) == (staged * 8 * 64, staged * 8 * 64, staged * 8 * 16)
    workspace.release()
    assert device.allocated_bytes == before
    for capacity, chunk in ((0, 1), (1, 0)):
        with pytest.raises(RecordError):
            Workspace.of(device, plans, capacity, chunk=chunk)


def test_memory_given_back_comes_again_with_the_next_rows(device: Device) -> None:
    both = Both(device, plan_of(window=8), 64, ringed=True)
    both.append(64)
    both.append(1)
    books = device.allocated_bytes
    both.layer.release()
    assert device.allocated_bytes < books and both.layer.memory().attention == 4
    both.oracle.truncate(65)
    both.check()
    both.append(2)
    both.check()
    both.attend()
