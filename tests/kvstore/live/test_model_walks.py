"""Random walks of a whole cache, all kinds of layers in it, beside twins that keep lists and attend in float64."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
from dumps import dump_all
from naive_cache import NaiveLayer, Token, kept_by_hand, naive, start_on_prefix, tokens

from warmkv.kernels.formats import RowFormat
from warmkv.kvstore.live.evict import Mass, Recent, recent_rows
from warmkv.kvstore.live.layers.attention import AttentionLayer
from warmkv.kvstore.live.layers.bounded import BoundedLayer
from warmkv.kvstore.live.layers.recurrent import RecurrentLayer
from warmkv.kvstore.live.model import Layer, ModelCache
from warmkv.kvstore.live.plan import LayerPlan, ModelPlan, NystromPlan, RingPlan
from warmkv.schema.errors import CannotRewind
from warmkv.schema.identity import LayerKind
from warmkv.schema.records import CLEAN

FULL = LayerPlan(LayerKind.FULL, heads=4, kv_heads=2, key_size=6, value_size=6)
#: All of f32, so that they can travel over the layer wire.
WIRED = (
    FULL,
    replace(FULL, kind=LayerKind.SLIDING, window=7),
    LayerPlan(LayerKind.SHARED, shared_with=0),
    replace(FULL, kind=LayerKind.RING, ring=RingPlan(window=5, inv_freq=(1.0, 0.3), undo_rows=4)),
    replace(FULL, heads=3, kv_heads=3, alive=(True, False, True)),
)
NYSTROM = replace(FULL, kind=LayerKind.NYSTROM, nystrom=NystromPlan(4, 8, 2))
#: What cannot travel, and what cannot go back.
MIXED = (
    replace(FULL, key_format=RowFormat.Q8_2F, value_format=RowFormat.Q8_2F),
    replace(FULL, key_format=RowFormat.F16, value_size=5, value_format=RowFormat.BF16),
    replace(FULL, kind=LayerKind.SLIDING, window=7, key_format=RowFormat.Q8_2F),
    NYSTROM,
)
FOR_GOOD = (FULL, LayerPlan(LayerKind.RECURRENT, state_size=6), replace(FULL, kind=LayerKind.RING, ring=RingPlan(window=5)))


class Walk:
    """A cache and its twins; every step compares what both answer."""

    def __init__(self, layers: tuple[LayerPlan, ...], seed: int, backend: str = "reference") -> None:
        self.chance = random.Random(seed)
        policy = self.chance.choice((Recent(), Mass(0), Mass(2), Mass(5)))
        self.plan = ModelPlan(layers, max_rows=30)
        self.cache = ModelCache(self.plan, backend=backend, policy=policy)  # type: ignore[arg-type]
        self.twins, self.seed, self.clean = naive(self.plan), seed, True

    def start(self, count: int) -> None:
        """Begin on rows of ``count`` tokens that lie elsewhere; layers without rows step through them."""
        for layer, twin in self.pairs():
            given = tokens(layer.plan, self.seed, count)
            q, k, v = (np.stack([getattr(token, name) for token in given]) for name in "qkv")
            for token in given:
                twin.step(token)
            if isinstance(layer, BoundedLayer):
                layer.step_chunk(q, k, v)
            else:
                assert isinstance(layer, AttentionLayer)
                start_on_prefix(layer, k, v)
                twin.mass = [0.0] * count

    def run(self, steps: int) -> None:
        moves = [self.feed, self.feed, self.feed, self.take_back, self.trim, self.evict, self.travel, self.clear]
        for _ in range(steps):
            self.chance.choices(moves, weights=(4, 4, 4, 3, 2, 2, 2, 0.3))[0]()
            self.compare()

    def pairs(self) -> list[tuple[Layer, NaiveLayer]]:
        return [(layer, self.twins[layer.index]) for layer in self.cache.own]

    def feed(self) -> None:
        """A few tokens one by one, or as one chunk."""
        count, chunk = self.chance.choice((1, 2, 5, 9)), self.chance.random() < 0.5
        self.seed += 1
        for layer, twin in self.pairs():
            given = tokens(layer.plan, self.seed + 1000 * layer.index, count)
            if isinstance(layer, RecurrentLayer):
                for number in range(count):
                    twin.state = np.full(6, self.seed + number, np.float32)
                    layer.update(twin.state)
                twin.position += count
                continue
            expected = np.stack([twin.step(token) for token in given])
            found = self.answers(layer, given, chunk)
            error = np.abs(found - expected)
            if layer.plan.quantised:
                assert error.max() < 0.25 and error.mean() < 0.03, layer.plan
            elif RowFormat.F16 in (layer.plan.key_format, layer.plan.value_format):
                assert error.max() < 0.05, layer.plan
            else:
                assert error.max() < 2e-5, layer.plan

    def answers(self, layer: Layer, given: list[Token], chunk: bool) -> np.ndarray:
        q, k, v = (np.stack([getattr(token, name) for token in given]) for name in "qkv")
        if isinstance(layer, BoundedLayer):
            return layer.step_chunk(q, k, v) if chunk else np.stack([layer.step(*one) for one in zip(q, k, v, strict=True)])
        assert not isinstance(layer, RecurrentLayer)
        if chunk:
            layer.append(k, v)
            return layer.attend_chunk(q)
        out = []
        for at in range(len(given)):
            layer.append(k[at : at + 1], v[at : at + 1])
            out.append(layer.attend(q[at]))
        return np.stack(out)

    def take_back(self) -> None:
        count = self.chance.choice((0, 1, 2, 3, 8))
        before = dump_all(self.cache)
        if count <= self.cache.position and all(twin.can_truncate(count) for twin in self.twins.values()):
            self.cache.truncate_last(count)
            for twin in self.twins.values():
                twin.truncate(count)
            # A field that was fixed from rows that are gone stays, and is told.
            quantised = [layer for layer in self.cache.own if isinstance(layer, AttentionLayer) and layer.plan.quantised]
            if count and any(layer.keys.frozen and layer.values.frozen and layer.rows < 64 for layer in quantised):
                self.clean &= any(layer.plan.window for layer in quantised) and self.cache.lineage == CLEAN
        elif count <= self.cache.position:
            with pytest.raises(CannotRewind):
                self.cache.truncate_last(count)
            assert dump_all(self.cache) == before

    def trim(self) -> None:
        for layer, twin in self.pairs():
            if isinstance(layer, AttentionLayer) and layer.plan.window:
                slack, align = self.chance.choice(((0, 1), (2, 4), (9, 3)))
                gone = layer.trim_window(slack, align)
                least = layer.plan.window + slack
                assert not gone or least <= layer.rows < least + align
                twin.keep(list(range(gone, len(twin.rows))))

    def evict(self) -> None:
        full = [pair for pair in self.pairs() if pair[0].plan.kind is LayerKind.FULL]
        assert self.cache.needs_eviction == any(len(twin.rows) >= 30 for _, twin in full)
        keep = self.chance.choice((0, 3, 12, 20, 29))
        expected, gone = {}, 0
        for layer, twin in full:
            assert isinstance(layer, AttentionLayer) and layer.importance is not None
            rows = len(twin.rows)
            if isinstance(self.cache.policy, Recent):
                kept = list(range(max(0, rows - keep), rows))
            else:
                kept = kept_by_hand(layer.importance.tolist(), keep, self.cache.policy.sinks, recent_rows(keep))
            expected[layer.index], gone = kept, gone + rows - len(kept)
        before = self.cache.lineage
        assert self.cache.evict(keep) == gone
        assert (self.cache.lineage == before) == (gone == 0)
        self.clean &= gone == 0
        for index, kept in expected.items():
            self.twins[index].keep(kept)

    def travel(self) -> None:
        """Over the layer wire into a cache that holds something else."""
        if self.plan.layers != WIRED:
            return
        other = Walk(WIRED, self.seed + 77)
        for _ in range(self.chance.randrange(3)):
            other.feed()
        records = self.cache.export_layers()
        gaps = any(twin.plan.kind is LayerKind.FULL and twin.position > len(twin.rows) for twin in self.twins.values())
        other.cache.import_layers(records, lineage=self.cache.lineage)
        assert (other.cache.lineage == self.cache.lineage) == (not gaps)
        other.cache.policy, self.cache = self.cache.policy, other.cache
        for layer, twin in self.pairs():
            twin.undo = 0
            assert layer.plan == twin.plan
            if gaps and layer.plan.kind is LayerKind.FULL and twin.position > len(twin.rows):
                twin.keep_apart()

    def clear(self) -> None:
        self.cache.clear()
        for twin in self.twins.values():
            twin.clear()
        self.clean = True

    def compare(self) -> None:
        assert (self.cache.lineage == CLEAN) == self.clean
        assert self.cache.position == max(twin.position for twin in self.twins.values())
        for layer, twin in self.pairs():
            assert layer.position == twin.position
            if isinstance(layer, RecurrentLayer):
                assert twin.state is not None and layer.state.tobytes() == twin.state.tobytes()
            elif isinstance(layer, AttentionLayer):
                self.compare_rows(layer, twin)

    def compare_rows(self, layer: AttentionLayer, twin: NaiveLayer) -> None:
        assert layer.rows == len(twin.rows)
        positions = [row[0] for row in twin.rows]
        consecutive = positions == list(range(twin.position - len(positions), twin.position))
        assert not layer.gapless or consecutive
        if layer.plan.window or layer.rows == layer.position:
            assert layer.gapless and layer.base == twin.position - len(positions)
        for number, head in enumerate(layer.plan.alive_heads):
            stored = [np.asarray(block.codes) for block in layer.keys.blocks(number)]
            if layer.plan.key_format is RowFormat.F32 and layer.rows:
                assert np.concatenate(stored).tobytes() == np.stack([row[1][head] for row in twin.rows]).tobytes()
        assert layer.importance is not None
        tolerance = 0.3 if layer.plan.quantised else 0.05 if layer.plan.key_format is RowFormat.F16 else 1e-4
        np.testing.assert_allclose(layer.importance, twin.mass, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("layers", [WIRED, MIXED, FOR_GOOD], ids=["wired", "mixed", "for-good"])
def test_a_walk_is_that_of_its_twins(layers: tuple[LayerPlan, ...], seed: int) -> None:
    Walk(layers, 100 * seed + len(layers)).run(50)


def test_a_walk_of_the_best_backend_there_is() -> None:
    Walk(WIRED, 5, "auto").run(50)


@pytest.mark.parametrize("seed", range(3))
def test_a_walk_that_begins_on_a_mapped_prefix(seed: int) -> None:
    walk = Walk(WIRED, 31 + seed)
    walk.start(23)
    walk.compare()
    walk.run(30)
