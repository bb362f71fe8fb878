"""A ring of raw keys against absolute rotations in float64, and against a twin that replays its history."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt
import pytest

from warmkv.kernels.dispatch import Kernels, kernels
from warmkv.kernels.errors import BackendMissing
from warmkv.kernels.ring.reference import Rotation
from warmkv.kvstore.live.layers.bounded import BoundedLayer, RingSnapshot
from warmkv.kvstore.live.plan import LayerPlan, RingPlan
from warmkv.kvstore.testing.allocated import allocated_bytes
from warmkv.schema.errors import CannotRewind, OutOfMemory, RecordError
from warmkv.schema.identity import LayerKind

F32, F64 = npt.NDArray[np.float32], npt.NDArray[np.float64]
INV_FREQ = (1.0, 0.21)


@pytest.fixture(params=["reference", "fast"])
def backend(request: pytest.FixtureRequest) -> Kernels:
    try:
        return kernels(request.param)
    except BackendMissing as exc:
        pytest.skip(str(exc))


def plan(
    window: int = 8, sinks: int = 0, undo: int = 5, heads: int = 4, kv_heads: int = 2, size: int = 6, value_size: int = 3,
    inv_freq: tuple[float, ...] = INV_FREQ, rope_scale: float = 1.0,
) -> LayerPlan:  # fmt: skip
    ring = RingPlan(window, sinks, inv_freq, rope_scale, undo)
    return LayerPlan(LayerKind.RING, heads, kv_heads, size, value_size, scale=0.4, ring=ring)


def numbers(seed: int, *shape: int) -> F32:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


@dataclass
class Tokens:
    """Queries, keys and values of positions, one draw a seed."""

    plan: LayerPlan
    q: list[F32] = field(default_factory=list)
    k: list[F32] = field(default_factory=list)
    v: list[F32] = field(default_factory=list)

    def draw(self, seed: int) -> tuple[F32, F32, F32]:
        drawn = (
            numbers(3 * seed, self.plan.heads, self.plan.key_size),
            numbers(3 * seed + 1, self.plan.kv_heads, self.plan.key_size),
            numbers(3 * seed + 2, self.plan.kv_heads, self.plan.value_size),
        )
        for kept, one in zip((self.q, self.k, self.v), drawn, strict=True):
            kept.append(one)
        return drawn


def sinks_of(plan: LayerPlan) -> tuple[F32, F32]:
    assert plan.ring is not None
    count = plan.ring.sinks
    return numbers(91, plan.kv_heads, count, plan.key_size), numbers(92, plan.kv_heads, count, plan.value_size)


def layer_of(plan: LayerPlan, backend: Kernels | None = None) -> BoundedLayer:
    layer = BoundedLayer(plan, index=3, kernels=backend or kernels("reference"))
    assert plan.ring is not None
    if plan.ring.sinks:
        layer.set_sinks(*sinks_of(plan))
    return layer


def turned(x: F64, position: int, inv_freq: tuple[float, ...]) -> F64:
    """Rotated by an absolute position, as complex numbers."""
    half = len(inv_freq)
    pairs = (x[..., :half] + 1j * x[..., half : 2 * half]) * np.exp(1j * position * np.asarray(inv_freq))
    return np.concatenate([pairs.real, pairs.imag, x[..., 2 * half :]], axis=-1)


def attended(plan: LayerPlan, q: F32, k: list[F32], v: list[F32]) -> F64:
    """What the newest position sees: both sides rotated by where they stand, one softmax in float64."""
    ring = plan.ring
    assert ring is not None
    sink_k, sink_v = sinks_of(plan)
    first, last = max(0, len(k) - ring.window), len(k)
    out = np.zeros((plan.heads, plan.value_size))
    for head in range(plan.heads):
        kv_head, query = head // plan.group, q[head].astype(np.float64)
        rotary = np.ones(plan.key_size)
        rotary[: 2 * len(ring.inv_freq)] = ring.rope_scale**2
        logits = [query @ key * 0.4 for key in sink_k[kv_head].astype(np.float64)]
        for position in range(first, last):
            key = turned(k[position][kv_head].astype(np.float64), position, ring.inv_freq)
            logits.append(turned(query, last - 1, ring.inv_freq) * rotary @ key * 0.4)
        weights = np.exp(np.asarray(logits) - max(logits))
        rows = [*sink_v[kv_head], *(v[position][kv_head] for position in range(first, last))]
        out[head] = (weights / weights.sum()) @ np.asarray(rows, np.float64)
    return out


def contents(layer: BoundedLayer) -> tuple[bytes, bytes, int]:
    return layer.keys.tobytes(), layer.values.tobytes(), layer.position


@pytest.mark.parametrize("rope_scale", [1.0, 1.3])
@pytest.mark.parametrize("sinks", [0, 1, 3])
@pytest.mark.parametrize(("heads", "kv_heads", "size", "inv_freq"), [(4, 2, 6, INV_FREQ), (7, 1, 7, (0.5,)), (3, 3, 1, ())])
def test_distances_stand_for_absolute_positions(
    backend: Kernels, sinks: int, rope_scale: float, heads: int, kv_heads: int, size: int, inv_freq: tuple[float, ...]
) -> None:
    window = 8
    made = plan(window, sinks, 5, heads, kv_heads, size, 3, inv_freq, rope_scale)
    layer, tokens = layer_of(made, backend), Tokens(made)
    assert layer.rows == 0
    for position in range(3 * window + 1):
        q, k, v = tokens.draw(position)
        out = layer.step(q, k, v)
        assert out.shape == (heads, 3) and out.dtype == np.float32
        assert layer.position == position + 1 and layer.rows == min(position + 1, window)
        np.testing.assert_allclose(out, attended(made, q, tokens.k, tokens.v), rtol=0, atol=2e-6)


def test_identity_of_rotations_holds_far_from_the_start(backend: Kernels) -> None:
    made = plan(window=5)
    layer, tokens = layer_of(made, backend), Tokens(made)
    far = 1_000_003
    keys, values = np.zeros_like(layer.keys), np.zeros_like(layer.values)
    for position in range(far - 5, far):
        _, k, v = tokens.draw(position)
        keys[:, position % 5], values[:, position % 5] = k, v
    layer.restore(RingSnapshot(keys, values, far))
    q, k, v = tokens.draw(far)
    out = layer.step(q, k, v)
    shifted = [np.zeros_like(k)] * (far - 5) + tokens.k
    np.testing.assert_allclose(out, attended(made, q, shifted, [np.zeros_like(v)] * (far - 5) + tokens.v), rtol=0, atol=2e-6)


@pytest.mark.parametrize("count", [0, 1, 7, 8, 9, 30])
def test_chunk_is_so_many_steps(backend: Kernels, count: int) -> None:
    made = plan(sinks=2)
    one, other, tokens = layer_of(made, backend), layer_of(made, backend), Tokens(made)
    for seed in range(3):
        q, k, v = tokens.draw(1000 + seed)
        one.step(q, k, v)
        other.step(q, k, v)
    drawn = [tokens.draw(seed) for seed in range(count)]
    steps = [one.step(*each) for each in drawn]
    q, k, v = (
        np.asarray([each[part] for each in drawn], np.float32).reshape(count, *shape)
        for part, shape in enumerate([(4, 6), (2, 6), (2, 3)])
    )
    out = other.step_chunk(q, k, v)
    assert out.shape == (count, 4, 3) and out.tobytes() == b"".join(step.tobytes() for step in steps)
    assert contents(one) == contents(other) and one.undo_rows == other.undo_rows
    other.truncate_last(other.undo_rows)
    one.truncate_last(one.undo_rows)
    assert contents(one) == contents(other)


def replayed(made: LayerPlan, tokens: Tokens) -> tuple[bytes, bytes, int]:
    """The ring a layer has that was only ever given these tokens."""
    assert made.ring is not None
    keys = np.zeros((made.kv_heads, made.ring.window, made.key_size), np.float32)
    values = np.zeros((made.kv_heads, made.ring.window, made.value_size), np.float32)
    for position, (k, v) in enumerate(zip(tokens.k, tokens.v, strict=True)):
        keys[:, position % made.ring.window], values[:, position % made.ring.window] = k, v
    return keys.tobytes(), values.tobytes(), len(tokens.k)


@pytest.mark.parametrize("length", [1, 4, 5, 6, 8, 9, 20, 64])
@pytest.mark.parametrize(("window", "undo"), [(8, 5), (8, 8), (3, 5), (1, 2), (8, 64)])
def test_rollback_brings_back_every_bit_within_the_undo_rows(length: int, window: int, undo: int) -> None:
    made = plan(window, 1, undo)
    depth = min(length, undo)
    for count in sorted({0, 1, depth - 1, depth}):
        layer, tokens = layer_of(made), Tokens(made)
        for seed in range(length):
            layer.step(*tokens.draw(seed))
        generation = layer.generation
        layer.check_truncate(count)
        layer.truncate_last(count)
        kept = Tokens(made, *(part[: length - count] for part in (tokens.q, tokens.k, tokens.v)))
        assert contents(layer) == replayed(made, kept)
        assert layer.undo_rows == depth - count and layer.generation == generation
        q, k, v = kept.draw(777)
        np.testing.assert_allclose(layer.step(q, k, v), attended(made, q, kept.k, kept.v), rtol=0, atol=2e-6)


@pytest.mark.parametrize(
    ("undo", "length", "count"), [(5, 6, 6), (5, 20, 6), (5, 20, 20), (0, 3, 1), (64, 65, 65), (64, 200, 65)]
)
def test_rollback_beyond_the_undo_rows_is_refused_and_names_the_depth(undo: int, length: int, count: int) -> None:
    made = plan(undo=undo)
    layer, tokens = layer_of(made), Tokens(made)
    for seed in range(length):
        layer.step(*tokens.draw(seed))
    before, held = contents(layer), layer.undo_rows
    for attempt in (layer.check_truncate, layer.truncate_last):
        with pytest.raises(CannotRewind, match=f"layer 3 .RING.: {count} positions .* {undo} undo rows .* at most {undo}$"):
            attempt(count)
    assert contents(layer) == before and layer.undo_rows == held == undo
    layer.truncate_last(undo)
    kept = Tokens(made, *(part[: length - undo] for part in (tokens.q, tokens.k, tokens.v)))
    assert contents(layer) == replayed(made, kept)
    layer.truncate_last(0)
    with pytest.raises(CannotRewind, match=" 0 undo rows"):
        layer.truncate_last(1)


@pytest.mark.parametrize("count", [-1, 4, 1 << 70])
def test_rollback_past_the_start_is_a_mistake(count: int) -> None:
    layer, tokens = layer_of(plan()), Tokens(plan())
    for seed in range(3):
        layer.step(*tokens.draw(seed))
    before = contents(layer)
    with pytest.raises(RecordError, match="layer 3 .RING.: .* expected 0 to 3"):
        layer.truncate_last(count)
    assert contents(layer) == before and layer.undo_rows == 3


def test_snapshot_is_restored_bit_for_bit_without_undo_history() -> None:
    made = plan(sinks=1)
    layer, other, tokens = layer_of(made), layer_of(made), Tokens(made)
    for seed in range(11):
        q, k, v = tokens.draw(seed)
        k[0, 0], v[1, 1] = np.nan, -0.0
        layer.step(q, k, v)
    snapshot, before = layer.snapshot(), contents(layer)
    for seed in range(50, 53):
        layer.step(*Tokens(made).draw(seed))
        other.step(*Tokens(made).draw(seed))
    assert snapshot.keys.tobytes() == before[0] and snapshot.seen == 11
    for target in (layer, other):
        generation = target.generation
        target.restore(snapshot)
        assert contents(target) == before and target.undo_rows == 0 and target.generation > generation
        with pytest.raises(CannotRewind, match=" 0 undo rows"):
            target.truncate_last(1)
        assert contents(target) == before
    layer.step(*tokens.draw(60))
    other.step(*Tokens(made).draw(60))
    layer.truncate_last(1)
    assert contents(layer) == before and contents(other) != before
    snapshot.keys[:] = 5
    assert contents(layer) == before


def test_snapshots_that_do_not_fit_are_refused_unchanged() -> None:
    layer, tokens = layer_of(plan()), Tokens(plan())
    for seed in range(4):
        layer.step(*tokens.draw(seed))
    good, before = layer.snapshot(), contents(layer)
    bad = [
        replace(good, keys=good.keys[:, :7]), replace(good, values=good.values[:1]), replace(good, seen=-1),
        replace(good, keys=good.keys.astype(np.float16)), replace(good, values=good.values[..., None]),
    ]  # fmt: skip
    for snapshot in bad:
        with pytest.raises(RecordError, match="layer 3 .RING.: .*ring"):
            layer.restore(snapshot)
        assert contents(layer) == before and layer.undo_rows == 4


def test_clear_zeroes_the_ring_and_keeps_size_and_sinks() -> None:
    made = plan(sinks=2)
    layer, tokens = layer_of(made), Tokens(made)
    for seed in range(12):
        layer.step(*tokens.draw(seed))
    memory, generation, keys = layer.memory(), layer.generation, layer.keys
    layer.clear()
    assert layer.keys is keys and not layer.keys.any() and not layer.values.any()
    assert layer.position == layer.rows == layer.undo_rows == 0
    assert layer.memory() == memory and layer.generation > generation
    fresh, again = layer_of(made), Tokens(made)
    for seed in range(3):
        drawn = again.draw(100 + seed)
        assert layer.step(*drawn).tobytes() == fresh.step(*drawn).tobytes()
    layer.truncate_last(3)
    assert not layer.keys.any()


def test_sink_rows_are_copied_weights_that_rings_of_other_sizes_refuse() -> None:
    made = plan(sinks=2)
    layer = BoundedLayer(made, index=3, kernels=kernels("reference"))
    drawn = Tokens(made).draw(1)
    with pytest.raises(RecordError, match="layer 3 .RING.: its 2 sink rows were never set"):
        layer.step(*drawn)
    assert layer.position == 0
    keys, values = sinks_of(made)
    for bad in [(keys[:, :1], values), (keys, values[:1]), (keys.astype(np.float64), values), (values, keys)]:
        with pytest.raises(RecordError, match="sink (keys|values)"):
            layer.set_sinks(*bad)
    layer.set_sinks(keys, values)
    keys[:] = 0
    np.testing.assert_allclose(layer.step(*drawn), attended(made, drawn[0], [drawn[1]], [drawn[2]]), rtol=0, atol=2e-6)
    with pytest.raises(RecordError, match=r"expected float32 \(2, 0, 6\)"):
        layer_of(plan()).set_sinks(*sinks_of(made))


def test_rows_that_do_not_fit_are_refused_before_anything_is_inserted() -> None:
    layer, tokens = layer_of(plan()), Tokens(plan())
    layer.step(*tokens.draw(0))
    before = contents(layer)
    q, k, v = Tokens(plan()).draw(1)
    steps = [
        (q[:3], k, v), (q, k[:1], v), (q, k, v[:, :2]), (q, v, k), (q.astype(np.float64), k, v), (q[None], k[None], v[None]),
    ]  # fmt: skip
    for bad in steps:
        with pytest.raises(RecordError, match="layer 3 .RING.: (queries|keys|values)"):
            layer.step(*bad)
    for bad in [
        (q[None], k[None], np.stack([v, v])),
        (q, k, v),
        (np.float32(1), k[None], v[None]),
        (q[None], np.stack([k, k]), v[None]),
    ]:
        with pytest.raises(RecordError, match="layer 3 .RING.: (queries|keys|values)"):
            layer.step_chunk(*bad)
    assert contents(layer) == before and layer.undo_rows == 1


def test_rows_that_are_not_finite_are_kept_as_they_are() -> None:
    layer, tokens = layer_of(plan(window=3)), Tokens(plan())
    q, k, v = tokens.draw(0)
    k[0, 1] = np.inf
    v[1, 2] = np.nan
    with np.errstate(invalid="ignore"):
        out = layer.step(q, k, v)
    assert np.isnan(out).any() and layer.keys[:, 0].tobytes() == k.tobytes() and layer.values[:, 0].tobytes() == v.tobytes()


@pytest.mark.parametrize("seed", range(12))
def test_random_walk_equals_a_twin_that_keeps_everything(backend: Kernels, seed: int) -> None:
    rng = random.Random(seed)
    window, undo = rng.choice([1, 3, 8]), rng.choice([0, 2, 5, 11])
    made = plan(window, rng.choice([0, 2]), undo)
    layer, tokens, held = layer_of(made, backend), Tokens(made), 0
    taken: list[tuple[RingSnapshot, Tokens]] = []
    for turn in range(120):
        match rng.randrange(10):
            case 0 | 1 | 2 | 3 | 4:
                q, k, v = tokens.draw(10_000 * seed + turn)
                out = layer.step(q, k, v)
                np.testing.assert_allclose(out, attended(made, q, tokens.k, tokens.v), rtol=0, atol=2e-6)
                held = min(held + 1, undo)
            case 5 | 6 | 7:
                count = rng.randrange(8)
                if count <= held:
                    layer.truncate_last(count)
                    kept = len(tokens.k) - count
                    tokens, held = Tokens(made, tokens.q[:kept], tokens.k[:kept], tokens.v[:kept]), held - count
                else:
                    with pytest.raises((CannotRewind, RecordError)):
                        layer.truncate_last(count)
            case 8:
                taken.append((layer.snapshot(), Tokens(made, tokens.q[:], tokens.k[:], tokens.v[:])))
            case 9 if taken:
                snapshot, old = rng.choice(taken)
                layer.restore(snapshot)
                tokens, held = Tokens(made, old.q[:], old.k[:], old.v[:]), 0
            case 9 if rng.random() < 0.3:
                layer.clear()
                tokens, held = Tokens(made), 0
        assert contents(layer) == replayed(made, tokens) and layer.undo_rows == held


def test_report_is_what_was_allocated_undo_rows_included() -> None:
    made = plan(window=128, sinks=4, undo=64, kv_heads=2, heads=8, size=128, value_size=128, inv_freq=tuple([0.1] * 64))
    layer = layer_of(made)
    assert layer.keys.nbytes + layer.values.nbytes == 262_144
    memory = layer.memory()
    assert memory.bounded == memory.total == 262_144 + 64 * 2 * 2 * 128 * 4
    assert memory.weights == 2 * 4 * 2 * 128 * 4 + 2 * 128 * 64 * 4
    assert memory.total + memory.weights == allocated_bytes(layer)
    for seed in range(200):
        layer._insert(*Tokens(made).draw(seed)[1:])
    assert layer.memory() == memory and memory.total + memory.weights == allocated_bytes(layer)


def test_memory_that_cannot_be_had_names_its_bytes() -> None:
    with pytest.raises(OutOfMemory) as refused:
        BoundedLayer(plan(window=1 << 20, kv_heads=1 << 20, heads=1 << 20, size=1 << 20))
    assert refused.value.requested_bytes == 1 << 62


def test_a_table_of_rotations_that_cannot_be_had_names_its_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*given: object) -> Rotation:
        raise MemoryError

    monkeypatch.setattr(Rotation, "table", refused)
    with pytest.raises(OutOfMemory, match="layer 4 .RING.: its table of rotations") as caught:
        BoundedLayer(plan(window=4099, inv_freq=(1.0, 0.5, 0.25)), index=4)
    assert caught.value.requested_bytes == 2 * 4099 * 3 * 4


def test_other_plans_are_refused() -> None:
    with pytest.raises(RecordError, match="layer 1 .FULL.: the plan has no ring"):
        BoundedLayer(LayerPlan(LayerKind.FULL, 1, 1, 4, 4), index=1)
    for bad in (
        plan(window=0), plan(sinks=-1), plan(undo=-1), plan(undo=1 << 21), plan(inv_freq=(1.0,) * 4),
        plan(inv_freq=(1.0, float("nan"))), plan(rope_scale=float("inf")),
    ):  # fmt: skip
        with pytest.raises(RecordError, match="layer 1 .RING.: "):
            BoundedLayer(bad, index=1)
    with pytest.raises(RecordError, match="a soft cap of 30.0"):
        BoundedLayer(replace(plan(), softcap=30.0))
