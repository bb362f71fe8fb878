"""Equal tokens under equal lineages are equal rows, however tokens were taken back and rows given up before."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from warmkv.kernels.formats import F32, RowFormat
from warmkv.kvstore.live.evict import Recent
from warmkv.kvstore.live.layers.attention import AttentionLayer
from warmkv.kvstore.live.model import ModelCache
from warmkv.kvstore.live.plan import LayerPlan, ModelPlan
from warmkv.schema.errors import RecordError
from warmkv.schema.identity import LayerKind
from warmkv.schema.records import CLEAN

FULL = LayerPlan(LayerKind.FULL, heads=1, kv_heads=1, key_size=4, value_size=4, importance=False)
Q8 = replace(FULL, key_format=RowFormat.Q8_2F, value_format=RowFormat.Q8_2F)
TABLE = np.random.default_rng(0).standard_normal((3, 4), dtype=np.float32)


def made(*layers: LayerPlan) -> ModelCache:
    return ModelCache(ModelPlan(layers), backend="reference", policy=Recent())


def rows(cache: ModelCache, index: int) -> AttentionLayer:
    layer = cache.layers[index]
    assert isinstance(layer, AttentionLayer)
    return layer


def feed(cache: ModelCache, token: int, count: int) -> None:
    """Each layer stores what the one before it saw, as in a model: rows depend on all rows attended."""
    for _ in range(count):
        hidden: F32 = TABLE[token][None]
        for index in range(len(cache.layers)):
            layer = rows(cache, index)
            layer.append(hidden[None], hidden[None])
            hidden = layer.attend(hidden) + hidden


def held(cache: ModelCache) -> bytes:
    found = []
    for index in range(len(cache.layers)):
        layer = rows(cache, index)
        blocks = [block for plane in (layer.keys, layer.values) for block in plane.blocks(0)]
        found += [array.tobytes() for block in blocks for array in (block.codes, block.scales, block.field) if array is not None]
    return b"".join(found)


def test_every_short_history_tells_itself_from_those_with_other_rows() -> None:
    seen: dict[tuple[bytes, str], bytes] = {}
    met = 0
    for history in product("abe-", repeat=5):
        cache, ids = made(FULL, FULL), ""
        for act in history:
            if act == "e":
                cache.evict(6)
            elif act == "-" and len(ids) >= 4 and rows(cache, 0).rows >= 4:
                cache.truncate_last(4)
                ids = ids[:-4]
            elif act in "ab":
                feed(cache, "ab".index(act), 4)
                ids += 4 * act
        key = (cache.lineage, ids)
        met += key in seen
        assert seen.setdefault(key, held(cache)) == held(cache), history
    assert met > 500, "histories that end alike are what this is about"


def test_taking_tokens_back_that_nothing_was_decided_by_changes_nothing() -> None:
    cache = made(FULL, Q8)
    feed(cache, 0, 70)
    cache.truncate_last(6)
    assert cache.lineage == CLEAN
    cache.evict(40)
    evicted = cache.lineage
    feed(cache, 1, 9)
    cache.truncate_last(0)
    assert cache.lineage == evicted
    cache.clear()
    feed(cache, 0, 10)
    cache.truncate_last(10)
    assert cache.lineage == CLEAN


@pytest.mark.parametrize("plan", [Q8, replace(Q8, kind=LayerKind.SLIDING, window=9), replace(Q8, key_format=RowFormat.F32)])
def test_a_field_fixed_from_forgotten_rows_is_told(plan: LayerPlan) -> None:
    lineages = []
    for token in (0, 1):
        cache = made(plan)
        feed(cache, token, 65)
        cache.truncate_last(2)
        feed(cache, 2, 40)
        lineages.append(cache.lineage)
    assert CLEAN not in lineages and lineages[0] != lineages[1]


def test_what_came_from_elsewhere_is_decided_up_to_its_end() -> None:
    cache = made(FULL)
    feed(cache, 0, 20)
    found = cache.lineage = bytes(range(16))
    feed(cache, 1, 5)
    cache.truncate_last(5)
    assert cache.lineage == found
    cache.truncate_last(1)
    told = cache.lineage
    assert told not in (found, CLEAN)
    cache.truncate_last(1)
    assert cache.lineage not in (found, told)


@pytest.mark.parametrize("lineage", [b"short", bytes(17), "sixteen letters.", None])
def test_what_is_no_lineage_is_refused_before_anything_changes(lineage: object) -> None:
    cache, sender = made(FULL), made(FULL)
    feed(cache, 0, 3)
    feed(sender, 1, 5)
    before = held(cache)
    with pytest.raises(RecordError, match="a lineage of .*, expected 16 bytes"):
        cache.import_layers(sender.export_layers(), lineage=lineage)  # type: ignore[arg-type]
    with pytest.raises(RecordError, match="a lineage of .*, expected 16 bytes"):
        cache.lineage = lineage  # type: ignore[assignment]
    assert held(cache) == before and cache.lineage == CLEAN
