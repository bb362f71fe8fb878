"""A layer that collects, is sealed once and is of constant size from then on, against formulas over the
whole sequence in float64 and a twin that keeps everything."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from warmkv.kernels.dispatch import Kernels, kernels
from warmkv.kernels.errors import BackendMissing
from warmkv.kernels.formats import RowFormat
from warmkv.kernels.nystrom.reference import Group, Rectifier
from warmkv.kvstore.live.evict import Mass, Policy, Recent
from warmkv.kvstore.live.layers.attention import AttentionLayer
from warmkv.kvstore.live.layers.nystrom import NystromLayer
from warmkv.kvstore.live.model import ModelCache
from warmkv.kvstore.live.plan import LayerPlan, ModelPlan, NystromPlan
from warmkv.kvstore.live.rows.base import PlaneRows
from warmkv.kvstore.testing.allocated import allocated_bytes
from warmkv.schema.errors import CannotRewind, OutOfMemory, RecordError, SealError
from warmkv.schema.identity import LayerKind

F32, F64 = npt.NDArray[np.float32], npt.NDArray[np.float64]
WINDOW, SINKS, FLOOR = 8, 2, 19


@pytest.fixture(params=["reference", "fast"])
def backend(request: pytest.FixtureRequest) -> Kernels:
    try:
        return kernels(request.param)
    except BackendMissing as exc:
        pytest.skip(str(exc))


def plan(
    window: int = WINDOW, sinks: int = SINKS, boundary: int = 0, landmarks: int = 4, rectifier: Rectifier = Rectifier.AGGREGATE,
    heads: int = 4, kv_heads: int = 2, size: int = 8, value_size: int = 3,
) -> LayerPlan:  # fmt: skip
    nystrom = NystromPlan(landmarks, window, sinks, rectifier, boundary)
    return LayerPlan(LayerKind.NYSTROM, heads, kv_heads, size, value_size, scale=0.3, nystrom=nystrom)


@dataclass
class Tokens:
    """Everything a sequence ever had: queries, keys and values of its positions."""

    plan: LayerPlan
    q: list[F32] = field(default_factory=list)
    k: list[F32] = field(default_factory=list)
    v: list[F32] = field(default_factory=list)

    def draw(self, count: int, seed: int = 0) -> tuple[F32, F32, F32]:
        """Rows of so many more positions, near one of four atoms in turns of six."""
        drawn = []
        for part, (heads, size) in enumerate(self.shapes):
            centres = np.random.default_rng(part).standard_normal((4, heads, size))
            atoms = (len(self.k) + np.arange(count)) // 6 % 4
            noise = np.random.default_rng((seed, part, len(self.k))).standard_normal((count, heads, size))
            drawn.append((centres[atoms] + 0.1 * noise).astype(np.float32))
        for kept, rows in zip((self.q, self.k, self.v), drawn, strict=True):
            kept.extend(rows)
        return drawn[0], drawn[1], drawn[2]

    @property
    def shapes(self) -> list[tuple[int, int]]:
        plan = self.plan
        return [(plan.heads, plan.key_size), (plan.kv_heads, plan.key_size), (plan.kv_heads, plan.value_size)]

    def cut(self, rows: int) -> None:
        for kept in (self.q, self.k, self.v):
            del kept[rows:]

    def softmax(self, back: int = 0) -> F64:
        """What the position ``back`` before the newest sees: all rows up to its own."""
        last = len(self.k) - back
        out = np.zeros((self.plan.heads, self.plan.value_size))
        for head in range(self.plan.heads):
            k, v = self.of(head, last)
            weights = np.exp(k @ self.q[last - 1][head].astype(np.float64) * 0.3)
            out[head] = weights / weights.sum() @ v
        return out

    def of(self, head: int, last: int) -> tuple[F64, F64]:
        kv_head = head // self.plan.group
        return tuple(np.asarray([row[kv_head] for row in rows[:last]], np.float64) for rows in (self.k, self.v))  # type: ignore[return-value]

    def estimate(self, prompt: int) -> F64:
        """What the newest position sees of a state sealed at ``prompt`` rows: the formulas over all rows at
        once, without running maxima."""
        nystrom = self.plan.nystrom
        assert nystrom is not None
        count = min(max(prompt // 8, 4), nystrom.landmarks)
        bounds = [prompt * index // count for index in range(count + 1)]
        out = np.zeros((self.plan.heads, self.plan.value_size))
        for head in range(self.plan.heads):
            k, v = self.of(head, len(self.k))
            queries = np.asarray([row[head] for row in self.q], np.float64)
            mean_k = np.stack([k[low:high].mean(axis=0) for low, high in zip(bounds, bounds[1:], strict=False)])
            mean_q = np.stack([queries[low:high].mean(axis=0) for low, high in zip(bounds, bounds[1:], strict=False)])
            a = np.exp(0.3 * mean_q @ mean_k.T)
            gram = a.T @ a
            solve = np.linalg.solve(gram + 1e-6 * np.trace(gram) / count * np.eye(count), a.T)
            weights = np.exp(0.3 * queries[-1] @ mean_k.T) @ solve
            if nystrom.rectifier is Rectifier.FM:
                weights = np.maximum(weights, 0)
            far = slice(nystrom.sinks, max(nystrom.sinks, len(k) - nystrom.window))
            spread = np.exp(0.3 * mean_q @ k[far].T)
            near = np.r_[0 : nystrom.sinks, far.stop : len(k)]
            exact = np.exp(0.3 * k[near] @ queries[-1])
            above, below = exact @ v[near], exact.sum()
            if (mass := weights @ spread.sum(axis=1)) >= 0:
                above, below = above + weights @ (spread @ v[far]), below + mass
            out[head] = above / below
        return out


def layer_of(made: LayerPlan, backend: Kernels | None = None, **more: Any) -> NystromLayer:
    return NystromLayer(made, index=5, kernels=backend or kernels("reference"), **more)


def fed(made: LayerPlan, rows: int, backend: Kernels | None = None) -> tuple[NystromLayer, Tokens]:
    layer, tokens = layer_of(made, backend), Tokens(made)
    q, k, v = tokens.draw(rows)
    layer.append(k, v)
    layer.push_queries(q)
    return layer, tokens


def everything(layer: NystromLayer) -> tuple[object, ...]:
    rows = [] if layer.attention is None else [layer.attention.keys.blocks(0), layer.attention.values.blocks(1)]
    stored = [block.codes.tobytes() for blocks in rows for block in blocks]
    return (
        stored, layer.trace.tobytes(), layer.position, layer.rows, layer.pending_boundary, layer.generation, layer.failure,
        layer.sealed_rows, layer.groups,
    )  # fmt: skip


# Collecting.


def test_floor_is_that_of_the_formula() -> None:
    assert NystromPlan(4, 8, 2).floor == 19 and NystromPlan().floor == 128 + 4 + 8 + 1
    assert NystromPlan(4, 8, 2, boundary=5).target == 19 and NystromPlan(4, 8, 2, boundary=30).target == 30


@pytest.mark.parametrize("length", [0, 1, FLOOR - 1, FLOOR, FLOOR + 1, 40])
def test_collecting_is_exact_attention_bit_for_bit(backend: Kernels, length: int) -> None:
    made = plan()
    layer, tokens = layer_of(made, backend), Tokens(made)
    twin = AttentionLayer(made, kernels=backend)
    assert layer.collecting and not layer.sealed and layer.position == 0
    for position in range(length):
        q, k, v = tokens.draw(1)
        layer.append(k, v)
        twin.append(k, v)
        out = layer.attend(q[0])
        assert out.tobytes() == twin.attend(q[0]).tobytes()
        np.testing.assert_allclose(out, tokens.softmax(), rtol=0, atol=2e-6)
        assert layer.position == layer.rows == position + 1 and len(layer.trace) == position + 1
    assert layer.trace.tobytes() == np.asarray(tokens.q, np.float32).tobytes()
    assert layer.attention is not None and layer.attention.importance is not None and twin.importance is not None
    assert layer.attention.importance.tobytes() == twin.importance.tobytes()


@pytest.mark.parametrize("pieces", [(40,), (18, 22), (19, 21), (1, 38, 1), (20, 0, 20)])
def test_chunks_collect_the_same_trace_as_single_positions(backend: Kernels, pieces: tuple[int, ...]) -> None:
    made = plan()
    layer, tokens = layer_of(made, backend), Tokens(made)
    for count in pieces:
        q, k, v = tokens.draw(count)
        layer.append(k, v)
        out = layer.attend_chunk(q)
        for back in range(count):
            np.testing.assert_allclose(out[count - 1 - back], tokens.softmax(back), rtol=0, atol=2e-6)
    assert layer.trace.tobytes() == np.asarray(tokens.q, np.float32).tobytes() and layer.trace.shape == (40, 4, 8)


@pytest.mark.parametrize("length", [63, 64, 65, 66, 96, 97, 145])
def test_trace_keeps_its_queries_while_its_memory_grows(length: int) -> None:
    def poisoned(shape: tuple[int, ...], dtype: np.dtype[np.generic]) -> npt.NDArray[np.generic]:
        return np.full(shape, np.nan, dtype)

    layer, tokens = layer_of(plan(), allocate=poisoned), Tokens(plan())
    for _ in range(length):
        layer.push_queries(tokens.draw(1)[0])
    assert layer.trace.tobytes() == np.asarray(tokens.q, np.float32).tobytes()
    layer.append(np.stack(tokens.k), np.stack(tokens.v))
    assert layer.seal()
    q, k, v = tokens.draw(1)
    np.testing.assert_allclose(layer.step(q[0], k[0], v[0]), tokens.estimate(length), rtol=0, atol=1e-4)


def test_asking_again_collects_nothing_twice() -> None:
    layer, tokens = fed(plan(), 20)
    before = layer.trace.tobytes()
    layer.attend(tokens.q[-1])
    layer.attend_chunk(np.stack(tokens.q[-3:]))
    assert layer.trace.tobytes() == before and layer.seal()


def test_queries_may_come_before_their_rows() -> None:
    layer, tokens = layer_of(plan()), Tokens(plan())
    for _ in range(FLOOR):
        q, k, v = tokens.draw(1)
        layer.push_queries(q[0])
        layer.append(k, v)
        layer.attend(q[0])
    assert len(layer.trace) == FLOOR and layer.seal()


@pytest.mark.parametrize("count", [0, 1, 7, 20])
def test_truncating_forgets_rows_and_their_queries(count: int) -> None:
    layer, tokens = fed(plan(), 20)
    layer.check_truncate(count)
    layer.truncate_last(count)
    tokens.cut(20 - count)
    assert layer.position == layer.rows == len(layer.trace) == 20 - count
    q, k, v = tokens.draw(30, seed=1)
    layer.append(k, v)
    layer.push_queries(q)
    assert layer.trace.tobytes() == np.asarray(tokens.q, np.float32).tobytes()
    assert layer.seal()
    q, k, v = tokens.draw(1, seed=2)
    np.testing.assert_allclose(layer.step(q[0], k[0], v[0]), tokens.estimate(50 - count), rtol=0, atol=1e-4)


@pytest.mark.parametrize("count", [-1, 21, 1 << 70])
def test_truncating_past_the_start_is_refused(count: int) -> None:
    layer, _ = fed(plan(), 20)
    before = everything(layer)
    with pytest.raises(RecordError, match="layer 5 .NYSTROM.: .* expected 0 to 20"):
        layer.truncate_last(count)
    assert everything(layer) == before


# The boundary.


@pytest.mark.parametrize(("boundary", "target"), [(0, FLOOR), (5, FLOOR), (FLOOR, FLOOR), (30, 30)])
def test_a_seal_that_comes_too_early_names_the_boundary_and_changes_nothing_else(boundary: int, target: int) -> None:
    made = plan(boundary=boundary)
    layer = layer_of(made)
    assert layer.pending_boundary == (target if boundary else None)
    for rows in (0, 1, target - 2, target - 1):
        layer, tokens = fed(made, rows)
        stored, *rest = everything(layer)
        assert layer.seal() is False and layer.seal() is False
        assert layer.pending_boundary == target and layer.collecting and not layer.take_transition()
        now, *after = everything(layer)
        assert now == stored and after[:3] == rest[:3] and after[4:] == rest[4:]
    q, k, v = tokens.draw(1)
    layer.append(k, v)
    np.testing.assert_allclose(layer.attend(q[0]), tokens.softmax(), rtol=0, atol=2e-6)
    assert layer.rows == target and layer.seal() is True


def test_crossing_is_asked_of_rows_to_come() -> None:
    layer = layer_of(plan())
    assert not layer.crosses(10**6)
    layer, _ = fed(plan(boundary=FLOOR), 10)
    assert not layer.crosses(0) and not layer.crosses(8)
    assert layer.crosses(9) and layer.crosses(10) and layer.crosses(1 << 64)
    layer, _ = fed(plan(boundary=FLOOR), FLOOR)
    assert layer.crosses(0)
    layer, _ = fed(plan(boundary=FLOOR), FLOOR + 5)
    assert layer.crosses(0) and layer.crosses(1)
    layer, _ = fed(plan(), 10)
    assert not layer.crosses(9)
    layer.seal()
    assert not layer.crosses(8) and layer.crosses(9)
    with pytest.raises(RecordError, match="layer 5 .NYSTROM.: -1 rows"):
        layer.crosses(-1)
    layer, _ = fed(plan(boundary=FLOOR), FLOOR)
    layer.seal()
    assert not layer.crosses(0) and not layer.crosses(1 << 64) and layer.pending_boundary is None


@pytest.mark.parametrize("size", [1 << 20, (1 << 20) + 1, 1 << 63, 1 << 64])
def test_windows_and_sinks_no_machine_could_count_are_refused_by_the_plan(size: int) -> None:
    for nystrom in (NystromPlan(4, size, 2), NystromPlan(4, 8, size), NystromPlan(size, 8, 2)):
        made = replace(plan(), nystrom=nystrom)
        if size > 1 << 20:
            with pytest.raises(RecordError, match="at most 1048576"):
                layer_of(made)
        else:
            assert not layer_of(made).seal()


# The seal and what follows.


@pytest.mark.parametrize("rectifier", list(Rectifier))
@pytest.mark.parametrize(("prompt", "landmarks"), [(FLOOR, 4), (FLOOR + 1, 4), (47, 6), (48, 6), (97, 32)])
def test_sealed_steps_follow_the_formulas(backend: Kernels, prompt: int, landmarks: int, rectifier: Rectifier) -> None:
    made = plan(landmarks=landmarks, rectifier=rectifier)
    layer, tokens = fed(made, prompt, backend)
    assert layer.seal() and layer.sealed and not layer.collecting
    assert layer.position == layer.sealed_rows == prompt and layer.rows == 0
    for turn in range(2 * WINDOW + 1):
        q, k, v = tokens.draw(1)
        out = layer.step(q[0], k[0], v[0])
        assert out.shape == (4, 3) and out.dtype == np.float32
        np.testing.assert_allclose(out, tokens.estimate(prompt), rtol=0, atol=1e-4)
        assert layer.position == prompt + turn + 1 and layer.sealed_rows == prompt
        assert all(far.rows == prompt - SINKS - WINDOW + turn + 1 for group in layer.groups for far in group.far)


@pytest.mark.parametrize("rectifier", list(Rectifier))
@pytest.mark.parametrize(("window", "sinks"), [(1, 0), (1, 3), (5, 0), (33, 1)])
def test_other_windows_and_sinks_follow_the_formulas(backend: Kernels, window: int, sinks: int, rectifier: Rectifier) -> None:
    made = plan(window, sinks, rectifier=rectifier, heads=3, kv_heads=1, size=7, value_size=1)
    layer, tokens = fed(made, window + sinks + 9, backend)
    assert layer.seal()
    for _ in range(window + 3):
        q, k, v = tokens.draw(1)
        np.testing.assert_allclose(layer.step(q[0], k[0], v[0]), tokens.estimate(layer.sealed_rows), rtol=0, atol=1e-4)


@pytest.mark.parametrize("rectifier", list(Rectifier))
def test_group_output_is_that_of_states_for_single_heads_bit_for_bit(backend: Kernels, rectifier: Rectifier) -> None:
    made = plan(rectifier=rectifier, heads=6, kv_heads=2, landmarks=5)
    layer, tokens = fed(made, 41, backend)
    singles = []
    for head in range(6):
        q = np.stack([row[head] for row in tokens.q])[None]
        k, v = (np.ascontiguousarray(np.stack(rows)[:, head // 3]) for rows in (tokens.k, tokens.v))
        singles.append(backend.nystrom_prefill(q, k, v, landmarks=5, window=WINDOW, sinks=SINKS, rectifier=rectifier, scale=0.3))
    layer.seal()
    for _ in range(12):
        q, k, v = (rows[0] for rows in tokens.draw(1))
        out = layer.step(q, k, v)
        for head, single in enumerate(singles):
            assert out[head].tobytes() == backend.nystrom_step(single, q[head : head + 1], k[head // 3], v[head // 3]).tobytes()


@pytest.mark.parametrize("count", [0, 1, WINDOW, 20])
def test_chunk_of_steps_is_so_many_steps(backend: Kernels, count: int) -> None:
    one, tokens = fed(plan(), 25, backend)
    other, _ = fed(plan(), 25, backend)
    one.seal()
    other.seal()
    q, k, v = tokens.draw(count)
    out = other.step_chunk(q, k, v)
    assert out.shape == (count, 4, 3)
    assert out.tobytes() == b"".join(one.step(q[at], k[at], v[at]).tobytes() for at in range(count))
    assert one.position == other.position == 25 + count


def test_transition_is_told_once_and_sealing_again_disturbs_nothing() -> None:
    layer, tokens = fed(plan(), 25)
    generation = layer.generation
    assert not layer.take_transition() and layer.seal() and layer.generation > generation
    groups, generation = layer.groups, layer.generation
    assert layer.take_transition() and not layer.take_transition()
    q, k, v = tokens.draw(1)
    layer.step(q[0], k[0], v[0])
    assert layer.seal() and layer.groups is groups and layer.generation == generation and layer.position == 26
    assert not layer.take_transition()


def test_sealed_layers_take_no_rows_and_cannot_go_back() -> None:
    layer, tokens = fed(plan(), 25)
    layer.seal()
    q, k, v = tokens.draw(1)
    layer.step(q[0], k[0], v[0])
    before = everything(layer)
    with pytest.raises(RecordError, match="layer 5 .NYSTROM.: sealed at 25 rows, cannot append; expected step"):
        layer.append(k, v)
    for attempt in (lambda: layer.attend(q[0]), lambda: layer.attend_chunk(q)):
        with pytest.raises(RecordError, match="cannot attend"):
            attempt()
    layer.push_queries(q)
    for count in (1, 26):
        with pytest.raises(CannotRewind, match=f"layer 5 .NYSTROM.: {count} positions to forget, expected 0: sealed at 25 rows"):
            layer.truncate_last(count)
    with pytest.raises(RecordError, match="expected 0 to 26"):
        layer.truncate_last(27)
    layer.truncate_last(0)
    assert everything(layer) == before


def test_steps_that_do_not_fit_change_nothing() -> None:
    layer, tokens = fed(plan(), 25)
    q, k, v = (rows[0] for rows in Tokens(plan()).draw(1))
    with pytest.raises(RecordError, match="layer 5 .NYSTROM.: not sealed, cannot step"):
        layer.step(q, k, v)
    layer.seal()
    before = [group.keys.tobytes() for group in layer.groups]
    for bad in [(q[:3], k, v), (q, k[:1], v), (q, k, v[:, :2]), (q, v, k), (q.astype(np.float64), k, v), (q[None], k, v)]:
        with pytest.raises(RecordError, match="layer 5 .NYSTROM.: (queries|keys|values)"):
            layer.step(*bad)
    with pytest.raises(RecordError, match="keys"):
        layer.step_chunk(q[None], np.stack([k, k]), v[None])
    with pytest.raises(RecordError, match="queries"):
        layer.step_chunk(q[0, 0], k[None], v[None])
    assert layer.position == 25 and before == [group.keys.tobytes() for group in layer.groups]


# A seal that fails.


def test_learned_sinks_refuse_the_seal_and_outlive_it_and_everything_else() -> None:
    layer, _ = fed(plan(), 25)
    assert layer.attention is not None
    layer.attention.sinks = sinks = np.linspace(-1, 1, layer.plan.heads, dtype=np.float32)
    for _ in range(2):
        layer.clear()
        assert layer.attention is not None and layer.attention.sinks is not None
        assert layer.attention.sinks.tobytes() == sinks.tobytes()
    donor, _ = fed(plan(), 25)
    assert donor.attention is not None
    rows = [np.stack([plane.blocks(head)[0].codes for head in range(plane.heads)], axis=1) for plane in planes(donor)]
    layer.prepare_collecting(rows[0], rows[1], donor.trace, importance=donor.attention.importance, boundary=None)()
    with pytest.raises(SealError, match="learned sinks"):
        layer.seal()
    layer.clear()
    assert layer.attention.sinks is not None and layer.attention.sinks.tobytes() == sinks.tobytes()


def planes(layer: NystromLayer) -> tuple[PlaneRows, PlaneRows]:
    assert layer.attention is not None
    return layer.attention.keys, layer.attention.values


def short_trace(layer: NystromLayer) -> None:
    layer.append(np.zeros((1, 2, 8), np.float32), np.zeros((1, 2, 3), np.float32))


def long_trace(layer: NystromLayer) -> None:
    layer.push_queries(np.zeros((4, 8), np.float32))


def holes(layer: NystromLayer) -> None:
    assert layer.attention is not None and layer._rows is not None
    layer.attention.keep(np.delete(np.arange(25), [7, 8]))
    layer._rows.trace.truncate(23)


def lost_front(layer: NystromLayer) -> None:
    assert layer.attention is not None and layer._rows is not None
    layer.attention.keep(np.arange(2, 25))
    layer._rows.trace.truncate(23)


def learned_sinks(layer: NystromLayer) -> None:
    assert layer.attention is not None
    layer.attention.sinks = np.zeros(4, np.float32)


def nan_key(layer: NystromLayer) -> None:
    k = np.zeros((1, 2, 8), np.float32)
    k[0, 1, 3] = np.nan
    layer.append(k, np.zeros((1, 2, 3), np.float32))
    layer.push_queries(np.zeros((4, 8), np.float32))


def too_large(layer: NystromLayer) -> None:
    k = np.full((20, 2, 8), 1e4, np.float32)
    layer.append(k, np.zeros((20, 2, 3), np.float32))
    layer.push_queries(np.full((20, 4, 8), 1e4, np.float32))


FAILURES = [
    (short_trace, "queries of 25 positions, expected 26"), (long_trace, "queries of 26 positions, expected 25"),
    (holes, "23 rows at position 25"), (lost_front, "23 rows at position 25"), (learned_sinks, "learned sinks"),
    (nan_key, "landmarks of KV head 1"), (too_large, "landmarks of KV head 0 .* too large"),
]  # fmt: skip


@pytest.mark.parametrize(("spoil", "reason"), FAILURES, ids=[spoil.__name__ for spoil, _ in FAILURES])
def test_failed_seal_refuses_everything_until_the_layer_is_cleared(backend: Kernels, spoil: Any, reason: str) -> None:
    layer, _ = fed(plan(boundary=20), 25, backend)
    spoil(layer)
    generation = layer.generation
    with pytest.raises(SealError, match=f"layer 5 .NYSTROM.: .*{reason}"):
        layer.seal()
    assert layer.failure is not None and not layer.sealed and not layer.collecting
    assert layer.position == layer.rows == layer.memory().total == 0
    assert allocated_bytes(layer) == layer.memory().weights == (4 * layer.plan.heads if spoil is learned_sinks else 0)
    assert layer.generation > generation and not layer.take_transition() and layer.device_views() is None
    assert layer.pending_boundary is None and not layer.crosses(100)
    q, k, v = Tokens(plan()).draw(3)
    attempts = [
        layer.seal, lambda: layer.append(k, v), lambda: layer.push_queries(q), lambda: layer.attend(q[0]),
        lambda: layer.attend_chunk(q), lambda: layer.step(q[0], k[0], v[0]), lambda: layer.step_chunk(q, k, v),
    ]  # fmt: skip
    for attempt in attempts:
        with pytest.raises(SealError, match=f"{reason}.*; clear the layer"):
            attempt()
    layer.truncate_last(0)
    assert layer.failure is not None and layer.position == 0
    layer.clear()
    assert layer.failure is None and layer.attention is not None and layer.pending_boundary == 20
    layer.attention.sinks = None  # a weight, which clear keeps
    tokens = Tokens(plan(boundary=20))
    q, k, v = tokens.draw(20)
    layer.append(k, v)
    layer.attend_chunk(q)
    assert layer.seal() and layer.take_transition()
    q, k, v = tokens.draw(1)
    np.testing.assert_allclose(layer.step(q[0], k[0], v[0]), tokens.estimate(20), rtol=0, atol=1e-4)


def test_memory_that_cannot_be_had_for_a_seal_leaves_the_layer_collecting() -> None:
    refused = 1

    def scarce(*args: Any, **more: Any) -> Group:
        nonlocal refused
        if refused:
            refused -= 1
            raise MemoryError
        return kernels("reference").nystrom_prefill(*args, **more)

    layer, tokens = fed(plan(), 25, replace(kernels("reference"), nystrom_prefill=scarce))
    before = everything(layer)
    with pytest.raises(OutOfMemory, match="layer 5 .NYSTROM.: the seal of 25 rows") as refusal:
        layer.seal()
    assert refusal.value.requested_bytes > 0 and everything(layer) == before and layer.collecting
    assert layer.seal()
    q, k, v = tokens.draw(1)
    np.testing.assert_allclose(layer.step(q[0], k[0], v[0]), tokens.estimate(25), rtol=0, atol=1e-4)


@pytest.mark.parametrize("what", ["append", "attend", "attend_chunk", "push_queries"])
def test_memory_that_cannot_be_had_while_collecting_changes_nothing(what: str) -> None:
    scarce = False

    def allocate(shape: tuple[int, ...], dtype: np.dtype[np.generic]) -> npt.NDArray[np.generic]:
        if scarce:
            raise OutOfMemory("refused", int(np.prod(shape)) * dtype.itemsize)
        return np.full(shape, 77, dtype)

    layer, tokens = layer_of(plan(), allocate=allocate), Tokens(plan())
    q, k, v = tokens.draw(64)
    layer.append(k, v)
    layer.push_queries(q)
    more = tokens.draw(1)
    if what.startswith("attend"):
        layer.append(*more[1:])
    assert layer.attention is not None and layer.attention.importance is not None
    before, mass = everything(layer), layer.attention.importance.tobytes()
    scarce = True
    attempts = {
        "append": lambda: layer.append(*more[1:]),
        "attend": lambda: layer.attend(more[0][0]),
        "attend_chunk": lambda: layer.attend_chunk(more[0]),
        "push_queries": lambda: layer.push_queries(more[0]),
    }
    with pytest.raises(OutOfMemory):
        attempts[what]()
    assert everything(layer) == before and layer.attention.importance.tobytes() == mass


# Eviction, devices, adoption, memory.


@pytest.mark.parametrize("policy", [Recent(), Mass(sinks=2)], ids=["recent", "mass"])
def test_eviction_and_trimming_leave_it_alone_in_both_phases(policy: Policy) -> None:
    made = LayerPlan(LayerKind.NYSTROM, 2, 1, 4, 4, nystrom=NystromPlan(4, 8, 2, boundary=19))
    cache = ModelCache(ModelPlan((made,), max_rows=6), backend="reference", policy=policy)
    layer = cache.layers[0]
    assert isinstance(layer, NystromLayer) and layer.attention is not None
    q, k, v = np.full((2, 4), 0.1, np.float32), np.full((1, 1, 4), 0.2, np.float32), np.full((1, 1, 4), 0.3, np.float32)
    for position in range(19):
        assert layer.crosses(1) is (position == 18)
        layer.push_queries(q)
        layer.append(k, v)
        assert not cache.needs_eviction
        cache.evict(3)
        assert layer.attention.trim_window() == 0
        assert cache.position == layer.rows == position + 1 and len(layer.trace) == position + 1
    assert layer.attention.keys.blocks(0)[0].codes.shape == (19, 4)
    assert layer.seal()
    before = [array.tobytes() for array in _arrays(layer.groups[0])]
    cache.evict(3)
    assert layer.position == 19 and not cache.needs_eviction and layer.attention is None
    assert before == [array.tobytes() for array in _arrays(layer.groups[0])]
    np.testing.assert_allclose(layer.step(q, k[0], v[0]), np.full((2, 4), 0.3), rtol=0, atol=1e-6)


def _arrays(group: Group) -> list[F32]:
    shared = [group.keys, group.values, group.sink_keys, group.sink_values, group.landmarks]
    return shared + [array for far in group.far for array in (far.landmarks, far.solve, far.values, far.mass, far.top)]


def exact_groups(made: LayerPlan, tokens: Tokens) -> tuple[Group, ...]:
    groups = []
    for head in range(made.kv_heads):
        q = np.stack([row[2 * head : 2 * head + 2] for row in tokens.q], axis=1)
        k, v = (np.ascontiguousarray(np.stack(rows)[:, head]) for rows in (tokens.k, tokens.v))
        groups.append(kernels("reference").nystrom_prefill(q, k, v, landmarks=4, window=WINDOW, sinks=SINKS, scale=0.3))
    return tuple(groups)


@pytest.mark.parametrize("length", [1, 7, FLOOR - 1])
def test_device_view_is_refused_where_a_state_is_exact(length: int) -> None:
    made = plan()
    layer, tokens = fed(made, 25)
    assert layer.device_views() is None
    layer.seal()
    assert layer.device_views() is layer.groups
    tokens.cut(length)
    groups = exact_groups(made, tokens)
    assert all(group.exact for group in groups)
    layer.prepare_sealed(groups, position=length, sealed_rows=length)()
    assert layer.sealed and layer.device_views() is None
    for _ in range(30):
        q, k, v = tokens.draw(1)
        np.testing.assert_allclose(layer.step(q[0], k[0], v[0]), tokens.softmax(), rtol=0, atol=2e-6)
    assert layer.device_views() is None and layer.memory().constant == allocated_bytes(layer)


def test_adopted_state_goes_on_where_it_was(backend: Kernels) -> None:
    made = plan(boundary=30)
    layer, tokens = fed(made, 25, backend)
    other, _ = fed(made, 7, backend)
    assert layer.attention is not None and layer.attention.importance is not None
    generation = other.generation
    k, v = np.stack(tokens.k), np.stack(tokens.v)
    other.prepare_collecting(k, v, layer.trace, importance=layer.attention.importance, boundary=layer.pending_boundary)()
    assert other.position == other.rows == 25 and other.pending_boundary == 30 and other.generation > generation
    q, k, v = tokens.draw(5)
    for each in (layer, other):
        each.append(k, v)
        each.push_queries(q)
        assert each.seal() and each.take_transition()
    q, k, v = tokens.draw(1)
    assert layer.step(q[0], k[0], v[0]).tobytes() == other.step(q[0], k[0], v[0]).tobytes()
    third, _ = fed(made, 7, backend)
    third.prepare_sealed(other.groups, position=31, sealed_rows=30)()
    assert third.sealed and third.position == 31 and third.sealed_rows == 30 and not third.take_transition()
    q, k, v = tokens.draw(1)
    assert layer.step(q[0], k[0], v[0]).tobytes() == third.step(q[0], k[0], v[0]).tobytes()
    third.clear()
    assert third.collecting and third.position == 0 and third.pending_boundary == 30


def fixed(array: F32) -> F32:
    copy = array.copy()
    copy.flags.writeable = False
    return copy


def test_failed_layer_may_adopt_and_is_whole_again() -> None:
    layer, _ = fed(plan(), 25)
    long_trace(layer)
    with pytest.raises(SealError):
        layer.seal()
    good, tokens = fed(plan(), 25)
    good.seal()
    layer.prepare_sealed(good.groups, position=25, sealed_rows=25)()
    q, k, v = tokens.draw(1)
    assert layer.failure is None
    np.testing.assert_allclose(layer.step(q[0], k[0], v[0]), tokens.estimate(25), rtol=0, atol=1e-4)


def test_states_that_do_not_fit_are_not_adopted() -> None:
    layer, _ = fed(plan(), 7)
    good, tokens = fed(plan(), 25)
    good.seal()
    group = good.groups[0]
    far = group.far[0]
    bad: list[tuple[dict[str, Any], str]] = [
        ({"window": 9}, "window"), ({"scale": 1.0}, "scale"), ({"rectifier": Rectifier.FM}, "rectifier"),
        ({"far": group.far[:1]}, "query heads"), ({"filled": 9}, "9 rows"), ({"head": 8}, "slot 8"), ({"head": -1}, "slot -1"),
        ({"keys": group.keys[:7]}, "window keys"), ({"values": group.values[:, :2]}, "window values"),
        ({"sink_keys": group.sink_keys[:1]}, "sink keys"), ({"sink_values": group.sink_values[:1]}, "sink values"),
        ({"landmarks": group.landmarks[:3]}, "3 landmarks"), ({"landmarks": group.landmarks[:, :7]}, "mean keys"),
        ({"exact": True}, "exact|slot|far|rows|sink"), ({"filled": 7}, "expected 25 in all"),
        ({"keys": group.keys.astype(np.float64)}, "window keys"), ({"values": fixed(group.values)}, "cannot be written"),
        ({"landmarks": np.asfortranarray(group.landmarks)}, "mean keys: an array with gaps"),
        *(
            ({"far": [far, replace(far, **{name: value})]}, what)
            for name, value, what in [
                ("landmarks", far.landmarks[:3], "mean queries"), ("solve", far.solve[:3], "solved matrix"),
                ("values", far.values[:, :1], "far values"), ("mass", far.mass[:3], "far mass"), ("top", far.top[:3], "maxima"),
                ("mass", np.stack([far.mass, far.mass], axis=1)[:, 0], "far mass: an array with gaps"),
                ("rows", 14, "14 far rows"), ("rows", -1, "-1 far rows"),
            ]
        ),
    ]  # fmt: skip
    before = everything(layer)
    for change, what in bad:
        with pytest.raises(RecordError, match=f"layer 5 .NYSTROM., KV head 1.*({what})"):
            layer.prepare_sealed((good.groups[0], replace(group, **change)), position=25, sealed_rows=25)()
    with pytest.raises(RecordError, match="states of 1 KV heads, expected 2"):
        layer.prepare_sealed(good.groups[:1], position=25, sealed_rows=25)()
    for position, sealed_rows in [(25, 26), (25, 0), (24, 24)]:
        with pytest.raises(RecordError, match="layer 5 .NYSTROM."):
            layer.prepare_sealed(good.groups, position=position, sealed_rows=sealed_rows)()
    k, v, q, mass = np.stack(tokens.k), np.stack(tokens.v), np.stack(tokens.q), np.zeros(25, np.float32)
    collecting: list[tuple[Any, Any, Any, Any, Any]] = [
        (k[:24], v, q, mass, None), (k, v, q[:, :3], mass, None), (k, v, q, mass[:24], None), (k, v, q, None, None),
        (k, v, q, mass, FLOOR - 1), (k[..., :7], v, q, mass, None),
    ]  # fmt: skip
    for keys, values, queries, importance, boundary in collecting:
        with pytest.raises(RecordError, match="layer 5 .NYSTROM."):
            layer.prepare_collecting(keys, values, queries, importance=importance, boundary=boundary)()
    assert everything(layer) == before


def test_other_plans_are_refused() -> None:
    with pytest.raises(RecordError, match="layer 1 .FULL.: the plan has no landmarks"):
        NystromLayer(LayerPlan(LayerKind.FULL, 1, 1, 4, 4), index=1)
    for bad in (
        plan(landmarks=3), plan(window=0), plan(sinks=-1), plan(boundary=-1), replace(plan(), softcap=2.0),
        replace(plan(), key_format=RowFormat.Q8_2F), replace(plan(), alive=(True, False)), plan(heads=3),
    ):  # fmt: skip
        with pytest.raises(RecordError, match="layer 5 .NYSTROM.: "):
            layer_of(bad)


def test_report_has_rows_and_queries_before_the_seal_and_the_state_alone_after_it(backend: Kernels) -> None:
    made = plan(window=128, sinks=4, landmarks=32, heads=6, kv_heads=2, size=128, value_size=128)
    layer, tokens = fed(made, 256, backend)
    memory = layer.memory()
    assert memory.stored == 256 * 2 * (128 + 128) * 4 and memory.attention >= memory.stored
    assert memory.constant >= 256 * 6 * 128 * 4 and memory.importance >= 256 * 4
    assert memory.total == allocated_bytes(layer)
    assert layer.seal()
    memory = layer.memory()
    assert memory.attention == memory.stored == memory.importance == 0
    assert memory.constant == memory.total == allocated_bytes(layer) == 2 * 151_552 + 6 * 37_120
    for _ in range(130):
        q, k, v = tokens.draw(1)
        layer.step(q[0], k[0], v[0])
    assert layer.memory() == memory and allocated_bytes(layer) == memory.total
    layer.clear()
    assert layer.memory().total == allocated_bytes(layer) == 0


@pytest.mark.parametrize("seed", range(10))
def test_random_walk_equals_a_twin_that_keeps_everything(backend: Kernels, seed: int) -> None:
    rng = random.Random(seed)
    made = plan(boundary=rng.choice([0, 5, 24]), rectifier=rng.choice(list(Rectifier)), landmarks=rng.choice([4, 6]))
    assert made.nystrom is not None
    layer, tokens, prompt = layer_of(made, backend), Tokens(made), 0
    for turn in range(60):
        match rng.randrange(8):
            case 0 | 1 | 2 | 3 if not prompt:
                count = rng.randrange(5)
                q, k, v = tokens.draw(count, seed=turn)
                layer.append(k, v)
                if rng.random() < 0.5:
                    layer.push_queries(q)
                out = layer.attend_chunk(q)
                for back in range(count):
                    np.testing.assert_allclose(out[count - 1 - back], tokens.softmax(back), rtol=0, atol=2e-6)
            case 0 | 1 | 2 | 3:
                q, k, v = tokens.draw(1, seed=turn)
                np.testing.assert_allclose(layer.step(q[0], k[0], v[0]), tokens.estimate(prompt), rtol=0, atol=1e-4)
            case 4:
                count = rng.randrange(4)
                if prompt and 0 < count:
                    with pytest.raises(CannotRewind):
                        layer.truncate_last(count)
                elif count <= len(tokens.k):
                    layer.truncate_last(count)
                    tokens.cut(len(tokens.k) - count)
            case 5 | 6:
                due = len(tokens.k) >= made.nystrom.target
                assert layer.seal() is (due or prompt > 0)
                if due and not prompt:
                    prompt = len(tokens.k)
            case 7 if rng.random() < 0.2:
                layer.clear()
                tokens, prompt = Tokens(made), 0
        assert layer.position == len(tokens.k) and layer.sealed is (prompt > 0)
        assert layer.rows == (0 if prompt else len(tokens.k)) == len(layer.trace)
        assert layer.memory().total == allocated_bytes(layer)
