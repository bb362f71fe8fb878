"""Layers of TurboQuant rows: plans, bytes, what is refused, and what the estimator changes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec

import numpy as np
import pytest
import turned
from dumps import dump_all, rows_of

from warmkv.kernels.dispatch import REFERENCE
from warmkv.kernels.dispatch import kernels as kernels_of
from warmkv.kernels.formats import Block, RowFormat
from warmkv.kernels.turboquant.reference import Estimator
from warmkv.kvstore.live import sizing
from warmkv.kvstore.live.evict import Mass, Recent
from warmkv.kvstore.live.layers.attention import AttentionLayer
from warmkv.kvstore.live.model import ModelCache
from warmkv.kvstore.live.plan import LayerPlan, ModelPlan, NystromPlan, TurboQuantPlan, modes
from warmkv.kvstore.live.rows.allocation import allocate
from warmkv.kvstore.live.rows.growing import GrowingRows
from warmkv.kvstore.live.rows.prefix import PrefixRows
from warmkv.kvstore.testing.allocated import allocated_bytes
from warmkv.schema.errors import CannotRewind, OutOfMemory, RecordError, UnsupportedError
from warmkv.schema.identity import LayerKind
from warmkv.schema.records import CLEAN

F32, F16, TQ_KEY, TQ_VALUE, TQ3 = RowFormat.F32, RowFormat.F16, RowFormat.TQ_KEY, RowFormat.TQ_VALUE, RowFormat.TQ3
#: What seed 42 makes of 0.01, 0.02, ... in layer 0: rows of the published blobs, without their headers.
GOLDEN_KEY = "6a6dd229e20558d485916f9d19aba53bad01b52170b6bda8fb415b35"
GOLDEN_VALUE = "6a6dd229e20558d485916f9d19aba53bfb41"
ROTATED = [pytest.param(keys, values, id=name) for name, keys, values in modes(rotated=True) if keys.rotated or values.rotated]
BACKENDS = ["reference", pytest.param("fast", marks=pytest.mark.skipif(find_spec("numba") is None, reason="needs numba"))]


def plan(keys: RowFormat = TQ_KEY, values: RowFormat = TQ_VALUE, **changes: object) -> LayerPlan:
    rotated = TurboQuantPlan() if keys.rotated or values.rotated else None
    made = LayerPlan(LayerKind.FULL, 4, 2, 64, 40, keys, values, turboquant=rotated)
    return replace(made, **changes)  # type: ignore[arg-type]


def layer(found: LayerPlan, index: int = 3) -> AttentionLayer:
    return AttentionLayer(found, index=index, kernels=REFERENCE)


def rows(found: LayerPlan, count: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    return tuple(
        rng.standard_normal((count, found.kv_heads, size)).astype(np.float32) for size in (found.key_size, found.value_size)
    )  # type: ignore[return-value]


def counted(cache: ModelCache) -> int:
    return cache.memory().total + cache.memory().weights


def codes(found: AttentionLayer) -> list[bytes]:
    return [
        b"".join(np.ascontiguousarray(block.codes).tobytes() for block in plane.blocks(head))
        for plane in (found.keys, found.values)
        for head in range(plane.heads)
    ]


@pytest.mark.parametrize(
    "changes, found",
    [
        ({"key_size": 60}, "keys as tq_key: heads of 60 channels: not a multiple of 8"),
        ({"value_size": 12}, "values as tq_value: heads of 12 channels"),
        ({"key_size": 1 << 17}, "keys as tq_key"),
        ({"key_format": TQ_VALUE}, "keys as tq_value, which stores the other side only"),
        ({"value_format": TQ_KEY}, "values as tq_key"),
        ({"value_format": TQ3}, "values as tq3"),
        ({"turboquant": None}, "expected a TurboQuant plan"),
        ({"key_format": F32, "value_format": F32}, "expected none"),
        ({"turboquant": TurboQuantPlan(seed=1 << 64)}, "seed"),
        ({"turboquant": TurboQuantPlan(seed=-1)}, "seed"),
        ({"kind": LayerKind.NYSTROM, "nystrom": NystromPlan(4, 8, 2)}, "expected f32"),
    ],
)
def test_plans_that_cannot_be_are_refused_when_made(changes: dict[str, object], found: str) -> None:
    with pytest.raises(RecordError, match=rf"layer 0 \(.*{found}"):
        ModelPlan((plan(**changes),))


@pytest.mark.parametrize(
    "keys, values, size, expected",
    [
        (TQ_KEY, TQ_VALUE, 64, 28 + 18), (TQ_KEY, TQ_VALUE, 128, 52 + 34), (TQ3, TQ_VALUE, 128, 50 + 34),
        (TQ3, F16, 128, 50 + 256), (TQ_KEY, F32, 64, 28 + 256), (F32, TQ_VALUE, 64, 256 + 18), (TQ_KEY, TQ_VALUE, 8, 7 + 4),
    ],
)  # fmt: skip
def test_a_row_takes_the_bytes_of_its_format(keys: RowFormat, values: RowFormat, size: int, expected: int) -> None:
    found = plan(keys, values, key_size=size, value_size=size, alive=(True, False))
    assert sizing.row_bytes(found) == expected
    assert sizing.stored_bytes(found, 100) == 100 * expected == sizing.layer_bytes(replace(found, importance=False), 100)
    held = layer(found)
    held.append(*rows(found, 100))
    memory = held.memory()
    assert memory.stored == 100 * expected and memory.total + memory.weights == allocated_bytes(held)


@pytest.mark.parametrize("backend", BACKENDS)
def test_stored_rows_are_the_published_bytes(backend: str) -> None:
    found = LayerPlan(LayerKind.FULL, 1, 1, 64, 64, TQ_KEY, TQ_VALUE, turboquant=TurboQuantPlan(42))
    held = AttentionLayer(found, index=0, kernels=kernels_of(backend))  # type: ignore[arg-type]
    row = (np.arange(1, 65, dtype=np.float32) * np.float32(0.01))[None, None]
    held.append(row, row)
    assert [part.hex() for part in codes(held)] == [GOLDEN_KEY, GOLDEN_VALUE]


def test_layers_and_seeds_rotate_differently_and_estimators_store_the_same() -> None:
    given = rows(plan(), 5)
    stored = {}
    for seed, index, estimator in [(5, 0, Estimator.UNBIASED), (5, 1, Estimator.UNBIASED), (4, 0, Estimator.UNBIASED),
                                   (4, 1, Estimator.CERA_COMPAT)]:  # fmt: skip
        held = layer(plan(turboquant=TurboQuantPlan(seed, estimator)), index)
        held.append(*given)
        stored[seed, index] = codes(held)
    assert stored[5, 0] == stored[4, 1]  # seed XOR layer is the same, the estimator isn't
    assert stored[5, 1] == stored[4, 0] != stored[5, 0]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("keys, values", ROTATED)
def test_rows_are_stored_alike_however_appends_are_cut(keys: RowFormat, values: RowFormat, backend: str) -> None:
    found = plan(keys, values)
    one, other = (AttentionLayer(found, index=3, kernels=kernels_of(name)) for name in (backend, "reference"))  # type: ignore[arg-type]
    k, v = rows(found, 90)
    one.append(k, v)
    generation = other.generation
    for at in range(90):
        before = codes(other)
        other.append(k[at : at + 1], v[at : at + 1])
        assert all(new.startswith(old) for new, old in zip(codes(other), before, strict=True))
    assert codes(one) == codes(other) and other.generation == generation


def test_appending_row_by_row_allocates_by_half_and_not_for_every_row() -> None:
    asked: list[int] = []

    def counting(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        asked.append(int(np.prod(shape)) * dtype.itemsize)
        return allocate(shape, dtype)

    found = plan(importance=False)
    held = AttentionLayer(found, kernels=REFERENCE, allocate=counting)
    k, v = rows(found, 1)
    for _ in range(700):
        held.append(k, v)
    assert len(asked) == 2 * 7  # of two planes: 64 rows, 96, 144, 216, 324, 486, 729
    assert sum(asked) < 6 * held.memory().stored


@pytest.mark.parametrize("keys, values", ROTATED)
@pytest.mark.parametrize("bad", ["nan", "infinity", "too long", "too long by rounding", "too long for float32"])
@pytest.mark.parametrize("side", ["keys", "values"])
def test_lengths_that_cannot_be_stored_name_layer_head_and_position(
    keys: RowFormat, values: RowFormat, bad: str, side: str
) -> None:
    found = plan(keys, values, heads=6, kv_heads=3, alive=(True, False, True))
    held = layer(found)
    held.append(*rows(found, 6))
    held.keep([0, 1, 5])
    held.attend(np.ones((6, 64), np.float32))
    k, v = rows(found, 4, seed=1)
    k[:, 1] = v[:, 1] = np.nan  # a dead head's
    row = (k if side == "keys" else v)[2, 2]
    row[:2] = {
        "nan": (0, np.nan), "infinity": (np.inf, 0), "too long": (60000, 60000), "too long by rounding": (65520, 0),
        "too long for float32": (3e38, 3e38),
    }[bad]  # fmt: skip
    if bad == "too long by rounding":
        row[1:] = 0
    before = rows_of(held)
    if not (keys if side == "keys" else values).rotated:
        held.append(k, v)
        assert held.rows == 7
        return
    with pytest.raises(RecordError, match=rf"layer 3 \(FULL\): {side}, KV head 2, row 5 \(position 8\): a length of"):
        held.append(k, v)
    assert rows_of(held) == before
    row[:] = 0
    row[0] = 65519.0  # rounds to the largest float16
    held.append(k, v)
    assert held.rows == 7


@pytest.mark.parametrize("side", ["keys", "values"])
def test_adopted_numbers_that_cannot_be_stored_are_refused_by_head_and_row(side: str) -> None:
    found, held = plan(), layer(plan())
    held.append(*rows(found, 3))
    before = rows_of(held)
    k, v = rows(found, 5, seed=1)
    (k if side == "keys" else v)[4, 1, 0] = np.inf
    with pytest.raises(RecordError, match=rf"layer 3 \(FULL\): {side}, head 1, row 4"):
        held.adopt(k, v, position=5, base=0, importance=np.zeros(5, np.float32), gapless=True)
    assert rows_of(held) == before


@pytest.mark.parametrize(
    "format_, keys, size, rotated",
    [
        (TQ_KEY, True, 64, False),
        (TQ_KEY, True, 32, True),
        (F32, True, 64, True),
        (TQ_VALUE, True, 64, True),
        (TQ3, False, 64, True),
    ],
)
def test_planes_that_cannot_be_are_refused(format_: RowFormat, keys: bool, size: int, rotated: bool) -> None:
    turn = turned.turn_of(plan(), 0, 64) if rotated else None
    with pytest.raises(RecordError, match=f"rows of {format_.value} with {size} channels"):
        GrowingRows(format_, 2, size, keys=keys, turn=turn)


@pytest.mark.parametrize("other", ["seed", "estimator", "layer", "format"])
def test_rows_rotated_otherwise_are_refused(other: str) -> None:
    found = plan()
    changed = {
        "seed": replace(found, turboquant=TurboQuantPlan(7)),
        "estimator": replace(found, turboquant=TurboQuantPlan(estimator=Estimator.MINIMUM_MSE)),
        "layer": found,
        "format": replace(found, key_format=TQ3),
    }[other]
    donor, held = layer(changed, 4 if other == "layer" else 3), layer(found)
    donor.append(*rows(found, 6))
    held.append(*rows(found, 2))
    before = rows_of(held)
    mass = np.zeros(6, np.float32)
    with pytest.raises(RecordError, match="expected"):
        held.adopt(donor.keys, donor.values, position=6, base=0, importance=mass, gapless=True)
    blocks = [donor.keys.blocks(head) for head in range(2)]
    with pytest.raises(RecordError, match="rotated as|rows of tq3"):
        PrefixRows(blocks, held.empty_planes()[0])
    with pytest.raises(RecordError, match="rotated as|rows of tq3"):
        held.empty_planes()[0].copied(blocks)
    assert rows_of(held) == before


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("keys, values", ROTATED)
def test_a_mapped_prefix_goes_on_as_rows_of_its_own(keys: RowFormat, values: RowFormat, backend: str) -> None:
    found = plan(keys, values)
    parent, child = (AttentionLayer(found, index=3, kernels=kernels_of(backend)) for _ in range(2))  # type: ignore[arg-type]
    parent.append(*rows(found, 70))
    planes = []
    for plane, empty in zip((parent.keys, parent.values), child.empty_planes(), strict=True):
        whole = np.stack([plane.blocks(head)[0].codes for head in range(2)], axis=1)
        whole.flags.writeable = False
        segments = [
            [Block(plane.format, whole[a:b, head], turn=plane.turn) for a, b in ((0, 31), (31, 32), (32, 70))]
            for head in range(2)
        ]
        copied = empty.copied(segments, room=2)
        copied.append(np.ones((2, 2, plane.size), np.float32))
        assert [len(copied.blocks(head)[0]) for head in range(2)] == [72, 72] and copied.turn == plane.turn
        assert [copied.blocks(head)[0].rows(0, 70).codes.tobytes() for head in range(2)] == [
            plane.blocks(head)[0].codes.tobytes() for head in range(2)
        ]
        planes.append(PrefixRows(segments, empty))
    child.adopt(*planes, position=70, base=0, importance=np.zeros(70, np.float32), gapless=True)
    assert child.memory().mapped == sizing.stored_bytes(found, 70) and child.memory().stored == 0
    more = rows(found, 9, seed=1)
    q = np.random.default_rng(2).standard_normal((9, 4, 64)).astype(np.float32)
    answers = []
    for held in (parent, child):
        held.append(*more)
        answers.append((held.attend_chunk(q), held.attend(q[0])))
    assert codes(child) == codes(parent)
    for one, other in zip(*answers, strict=True):
        assert np.allclose(one, other, rtol=0, atol=1e-5)
    for held in (parent, child):
        held.truncate_last(20)
    assert codes(child) == codes(parent) and child.memory().mapped == sizing.stored_bytes(found, 59)
    for held in (parent, child):
        held.keep([0, 30, 31, 32, 58])
    assert codes(child) == codes(parent) and child.memory().mapped == 0


def test_products_with_keys_themselves_show_the_bias_of_the_estimator() -> None:
    """A key is asked for itself: one value says how long it seems, the other row says nothing."""
    means = {}
    for estimator in Estimator:
        found = plan(turboquant=TurboQuantPlan(estimator=estimator), key_size=128)
        held = layer(found)
        k, v = rows(found, 200)
        k /= np.linalg.norm(k, axis=-1, keepdims=True)
        held.append(k, v)
        products = [
            np.sum(turned.numbers(held.keys.blocks(head)[0]) * k[:, head], axis=1).mean() for head in range(2)
        ]  # fmt: skip
        means[estimator] = float(np.mean(products)) - 1
    assert abs(means[Estimator.UNBIASED]) < 0.01
    assert means[Estimator.CERA_COMPAT] < -0.05 and means[Estimator.MINIMUM_MSE] < -0.02


THREE = (plan(), plan(TQ3, F16, kind=LayerKind.SLIDING, window=9), plan(F32, TQ_VALUE, alive=(False, True)))


@pytest.mark.parametrize("policy", [Recent(), Mass(2)])
def test_a_cache_evicts_as_if_only_what_stays_had_been_stored(policy: Recent | Mass) -> None:
    cache = ModelCache(ModelPlan(THREE, max_rows=40), backend="reference", policy=policy)
    given = [rows(found, 50, seed=index) for index, found in enumerate(THREE)]
    for held, (k, v) in zip(cache.own, given, strict=True):
        assert isinstance(held, AttentionLayer)
        held.append(k, v)
        held.attend_chunk(np.random.default_rng(9).standard_normal((50, 4, 64)).astype(np.float32))
    assert cache.needs_eviction and counted(cache) == allocated_bytes(cache)
    masses = [held.importance.copy() for held in cache.own]  # type: ignore[union-attr]
    generations = [held.generation for held in cache.own]
    assert cache.evict(21) == 2 * 29 and cache.lineage != CLEAN and cache.position == 50
    for held, (k, v), mass, generation in zip(cache.own, given, masses, generations, strict=True):
        assert isinstance(held, AttentionLayer) and held.importance is not None
        kept = list(range(50))
        if held.plan.kind is LayerKind.FULL:
            kept = [at for at in range(50) if mass[at] in set(held.importance.tolist())]
            assert len(kept) == held.rows == 21 and held.generation != generation
        twin = layer(held.plan, held.index)
        twin.append(k[kept], v[kept])
        assert codes(twin) == codes(held)
    cache.truncate_last(3)
    assert [held.rows for held in cache.own] == [18, 47, 18]  # type: ignore[union-attr]
    before = dump_all(cache)
    with pytest.raises(CannotRewind):
        cache.truncate_last(30)
    assert dump_all(cache) == before and counted(cache) == allocated_bytes(cache)
    cache.clear()
    assert cache.memory().stored == 0 and cache.lineage == CLEAN


def test_windows_trim_rotated_rows_by_narrowing_them() -> None:
    found = plan(TQ_KEY, TQ_VALUE, kind=LayerKind.SLIDING, window=5)
    held, twin = layer(found), layer(found)
    k, v = rows(found, 30)
    q = np.ones((4, 64), np.float32)
    held.append(k, v)
    twin.append(k, v)
    assert held.trim_window() == 25 and held.base == 25 and held.rows == 5
    assert codes(held)[0] == codes(twin)[0][25 * 28 :]
    assert held.attend(q).tobytes() == twin.attend(q).tobytes()


@pytest.mark.parametrize("act", ["append", "keep", "adopt"])
def test_refused_memory_changes_nothing(act: str) -> None:
    left = [1 << 30]

    def failing(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        if left[0] == 0:
            raise OutOfMemory("refused", 1)
        left[0] -= 1
        return allocate(shape, dtype)

    found, refused = plan(), 0
    held = AttentionLayer(found, index=3, kernels=REFERENCE, allocate=failing)
    held.append(*rows(found, 64))
    more, mass = rows(found, 200, seed=1), np.zeros(200, np.float32)
    change: dict[str, Callable[[], None]] = {
        "append": lambda: held.append(*more),
        "keep": lambda: held.keep([0, 5, 9]),
        "adopt": lambda: held.adopt(*more, position=200, base=0, importance=mass, gapless=True),
    }
    before = rows_of(held)
    for allowed in range(10):
        left[0] = allowed
        try:
            change[act]()
            break
        except OutOfMemory:
            refused += 1
            assert rows_of(held) == before
    assert refused >= 2 and rows_of(held) != before


def test_the_layer_wire_refuses_rotated_rows_by_name() -> None:
    cache = ModelCache(ModelPlan((plan(TQ3, F32),)), backend="reference")
    with pytest.raises(UnsupportedError, match="keys are tq3"):
        cache.export_layers()
