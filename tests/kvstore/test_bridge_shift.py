"""Shifted caches and convolutions as records: found under their own lineage only, gone on with exactly."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest

import warmkv
from warmkv.kernels.rope.reference import Pairs, Rope
from warmkv.kvstore.bridge import anchor_of, layer_specs, on_prefix, records_of, restore_into, shift_offset_of
from warmkv.kvstore.live.compression import Compression
from warmkv.kvstore.live.layers.conv import ConvLayer
from warmkv.kvstore.live.model import ModelCache
from warmkv.kvstore.live.plan import ModelPlan
from warmkv.kvstore.live.shift import shift
from warmkv.kvstore.live.state import BlockType, InferenceState, ModelConfig
from warmkv.kvstore.store import Store
from warmkv.kvstore.testing.live import PLANS, contents, feed, fill, identity_of, prompt
from warmkv.schema.errors import CannotRewind, RecordError
from warmkv.schema.records import CLEAN, Anchor, AnchorKind

ROPE = Rope(40, 10_000.0, Pairs.NEOX)
LENGTH, KEEP, COUNT = 60, 7, 20
#: What can be shifted: keys of f32 and f16, whatever the values; convolutions.
SHIFTABLE = {
    **{name: PLANS[name] for name in ("f32", "f16", "q8v")},
    "tqv": ModelPlan(PLANS["one side rotated"].layers[1:2]),
    "convolutions": ModelPlan((PLANS["convolutions"].layers[0], PLANS["f16"].layers[0])),
}
by_plan = pytest.mark.parametrize("name", SHIFTABLE)
Ids = npt.NDArray[np.uint32]


@pytest.fixture
def store() -> Iterator[Store]:
    opened = warmkv.open_store()
    yield opened
    opened.close()


def made(plan: ModelPlan) -> ModelCache:
    return ModelCache(plan, backend="reference")


def shifted(plan: ModelPlan, ids: Ids, *, keep: int = KEEP, count: int = COUNT) -> tuple[ModelCache, Ids]:
    """A cache of ``ids`` of which some were taken out, and those that are left."""
    cache = made(plan)
    fill(cache, len(ids))
    shift(cache, keep, count, ROPE, gone=ids[keep : keep + count])
    return cache, np.delete(ids, np.arange(keep, keep + count))


def save(store: Store, cache: ModelCache, ids: Ids, anchors: Sequence[Anchor] = ()) -> None:
    saved = store.save(identity_of(cache.plan), ids, records_of(cache, len(ids)), lineage=cache.lineage, anchors=anchors)
    assert saved.stored, saved.reason


def more(ids: Ids) -> list[int]:
    return [*ids.tolist(), 60_000]


@by_plan
def test_a_shifted_cache_comes_back_as_it_was(store: Store, name: str) -> None:
    plan = SHIFTABLE[name]
    cache, left = shifted(plan, prompt(LENGTH), keep=0 if any(layer.window for layer in plan.layers) else 7)
    save(store, cache, left, [anchor_of(cache, AnchorKind.TURN, depth=2, semantic_hash=9)])
    copied, lent = made(plan), made(plan)
    fill(copied, 33, seed=4)
    with store.restore(identity_of(plan), more(left), lineage=cache.lineage) as found:
        assert found.anchor == Anchor(LENGTH - COUNT, AnchorKind.TURN, 2, 9, COUNT)
        assert restore_into(copied, found) == on_prefix(lent, found) == LENGTH - COUNT
    for one in (copied, lent):
        assert (one.position, one.shift_offset, one.lineage) == (LENGTH - COUNT, COUNT, cache.lineage)
        assert contents(one) == contents(cache)
    assert feed(copied, 16) == feed(cache, 16)
    assert contents(copied) == contents(cache)


@by_plan
def test_shifted_rows_and_those_of_the_same_tokens_never_meet(store: Store, name: str) -> None:
    plan = SHIFTABLE[name]
    cache, left = shifted(plan, prompt(LENGTH))
    assert cache.lineage != CLEAN
    save(store, cache, left, [anchor_of(cache)])
    for ids in (left, prompt(LENGTH)):
        for at in ("longest", "anchor"):
            assert store.match(identity_of(plan), more(ids), at=at).matched == 0, "no token of them is clean"
    fresh = made(plan)
    fill(fresh, len(left), seed=8)
    save(store, fresh, left)
    for lineage, own in ((cache.lineage, cache), (CLEAN, fresh)):
        used = made(plan)
        with store.restore(identity_of(plan), more(left), lineage=lineage) as found:
            assert restore_into(used, found) == len(left)
        assert contents(used) == contents(own) and used.shift_offset == own.shift_offset
    assert contents(cache) != contents(fresh)


def test_other_tokens_that_went_are_another_lineage(store: Store) -> None:
    """What is left was computed in their presence, so equal ids are not equal rows."""
    plan, ids = SHIFTABLE["f32"], prompt(LENGTH)
    other = ids.copy()
    other[KEEP + 3] += 1
    one, left = shifted(plan, ids)
    two, same = shifted(plan, other)
    again, _ = shifted(plan, ids)
    assert np.array_equal(left, same)
    assert one.lineage == again.lineage != two.lineage
    save(store, one, left)
    assert store.match(identity_of(plan), more(left), lineage=two.lineage).matched == 0
    unnamed = {made_without_names(plan).lineage for _ in range(3)}
    assert len(unnamed | {one.lineage, CLEAN}) == 5


def made_without_names(plan: ModelPlan) -> ModelCache:
    cache = made(plan)
    fill(cache, LENGTH)
    shift(cache, KEEP, COUNT, ROPE)
    return cache


def test_offsets_add_up_and_any_anchor_before_tells(store: Store) -> None:
    plan = SHIFTABLE["f16"]
    cache, left = shifted(plan, prompt(LENGTH))
    save(store, cache, left, [anchor_of(cache)])
    first = cache.lineage
    shift(cache, 3, 5, ROPE, gone=left[3:8])
    left = np.delete(left, np.arange(3, 8))
    assert cache.shift_offset == COUNT + 5 and cache.lineage != first
    middle = replace(anchor_of(cache, AnchorKind.TOOL_CALL), position=20)
    fill(cache, 10)
    ids = np.concatenate([left, prompt(10, seed=3)])
    save(store, cache, ids, [anchor_of(cache), middle])
    for position, offset in ((1, 0), (19, 0), (20, COUNT + 5), (21, COUNT + 5), (44, COUNT + 5), (len(ids), COUNT + 5)):
        used = made(plan)
        used.shift_offset = 99
        with store.restore(identity_of(plan), more(ids[:position]), lineage=cache.lineage) as found:
            assert restore_into(used, found) == position
            assert shift_offset_of(found) == used.shift_offset == offset
    with store.restore(identity_of(plan), more(ids), lineage=first) as found:
        assert found.usable == 3, "of the first shift's rows only those that stayed in front"


@by_plan
def test_going_on_short_of_the_shift_is_another_lineage(store: Store, name: str) -> None:
    """What is computed there has never seen the tokens that went, and is not what is stored for the same ids."""
    plan = SHIFTABLE[name]
    cache, left = shifted(plan, prompt(LENGTH))
    ids = np.concatenate([left, prompt(10, seed=3)])
    anchor = anchor_of(cache)
    save(store, cache, left, [anchor])
    fill(cache, 10)
    save(store, cache, ids, [])
    told = []
    for query in (ids[:21], [*ids[:20].tolist(), 60_000], left, more(left), ids[:45], ids, more(ids)):
        used = made(plan)
        with store.restore(identity_of(plan), query, lineage=cache.lineage) as found:
            taken = restore_into(used, found)
            assert taken == found.usable
        told.append((taken, used.lineage == cache.lineage))
    if name == "convolutions":
        assert told == [(0, False), (0, False), (0, False), (40, True), (40, True), (40, True), (50, True)]
    else:
        assert told == [(20, False), (20, False), (39, False), (40, True), (44, True), (49, True), (50, True)]


def test_a_clean_restore_forgets_an_old_offset(store: Store) -> None:
    plan = SHIFTABLE["f32"]
    used, _ = shifted(plan, prompt(LENGTH))
    fresh = made(plan)
    fill(fresh, 9)
    save(store, fresh, prompt(9), [anchor_of(fresh)])
    with store.restore(identity_of(plan), more(prompt(9))) as found:
        assert restore_into(used, found) == 9
    assert (used.shift_offset, used.lineage) == (0, CLEAN)
    assert contents(used) == contents(fresh)


def test_an_anchor_of_shifted_rows_is_not_saved_as_clean(store: Store) -> None:
    plan = SHIFTABLE["f32"]
    cache, left = shifted(plan, prompt(LENGTH))
    with pytest.raises(RecordError, match=f"anchor at 40: its rows were shifted by {COUNT}"):
        store.save(identity_of(plan), left, records_of(cache, len(left)), anchors=[anchor_of(cache)])
    assert store.match(identity_of(plan), more(left)).matched == 0


def test_a_field_that_was_fixed_from_more_rows_than_are_left_is_a_miss(store: Store) -> None:
    """Nobody can tell such rows from those of a sequence that fixed its field later."""
    plan = SHIFTABLE["q8v"]
    for length, taken in ((70, 0), (84, 64), (100, 80)):
        cache, left = shifted(plan, prompt(length))
        save(store, cache, left, [anchor_of(cache)])
        used = made(plan)
        fill(used, 9, seed=2)
        before = contents(used)
        with store.restore(identity_of(plan), more(left), lineage=cache.lineage) as found:
            assert found.usable == len(left) and restore_into(used, found) == taken
        assert contents(used) == (contents(cache) if taken else before)
        assert used.shift_offset == (COUNT if taken else 0)


# -- convolutions -----------------------------------------------------------------------------


def convolutions(cache: ModelCache) -> list[ConvLayer]:
    return [layer for layer in cache.own if isinstance(layer, ConvLayer)]


@pytest.mark.parametrize("length", [1, 2, 3, 70])
def test_a_restored_convolution_remembers_nothing_but_where_it_is(store: Store, length: int) -> None:
    plan = PLANS["convolutions"]
    cache, used = made(plan), made(plan)
    fill(cache, length)
    fill(used, 30, seed=2)
    save(store, cache, prompt(length))
    with store.restore(identity_of(plan), more(prompt(length))) as found:
        assert restore_into(used, found) == length
    for layer, original in zip(convolutions(used), convolutions(cache), strict=True):
        assert np.array_equal(layer.state, original.state) and layer.position == length
        assert layer.history.positions == (length,) and layer.history.has_pos(length) and layer.history.has_pos(0)
        assert not any(layer.history.has_pos(position) for position in range(1, 80) if position != length)
    if length > 1:
        with pytest.raises(CannotRewind, match="the state at position"):
            used.truncate_last(1)
    feed(used, 3)
    used.truncate_last(3)
    assert contents(used) == contents(cache)


def test_a_convolution_is_one_row_of_inputs() -> None:
    """Oldest input first, time before channels, as the CERA runtime keeps it."""
    plan = ModelPlan(PLANS["convolutions"].layers[:1])
    cache = made(plan)
    (layer,) = convolutions(cache)
    inputs = np.arange(5 * 13, dtype=np.float32).reshape(5, 13)
    layer.append(inputs)
    (record,) = records_of(cache, 5)
    (plane,) = record.planes
    assert (plane.role.name, plane.format.name, plane.rows.shape) == ("CONV", "F32", (1, 3, 13))
    assert plane.rows.tobytes() == inputs[2:].tobytes()
    layer.append(inputs + 1)
    assert plane.rows.tobytes() == inputs[2:].tobytes(), "the records are the caller's"
    (spec,) = identity_of(plan).layers
    assert (spec.kind.name, spec.planes[0].row_shape, spec.planes[0].parameters) == ("CONV", (3, 13), "none")


def test_a_convolution_resumes_where_it_was_saved_only(store: Store) -> None:
    plan = PLANS["convolutions"]
    cache, ids = made(plan), prompt(50)
    for length in (20, 41):
        fill(cache, length - cache.position)
        save(store, cache, ids[:length])
    for position, usable in ((19, 0), (20, 20), (40, 20), (41, 41)):
        assert store.match(identity_of(plan), more(ids[:position])).usable == usable


# -- the state of a config --------------------------------------------------------------------

CONFIG = ModelConfig(
    (BlockType.CONV, BlockType.ATTENTION, BlockType.CONV, BlockType.ATTENTION), heads=4, kv_heads=(0, 2, 0, 1), head_size=40,
    hidden_size=13, max_tokens=200, rope=ROPE,
)  # fmt: skip
MODES = {
    "f32": Compression(), "f16": Compression.named("f16"), "both sides": Compression.turboquant(seed=7),
    "keys": Compression.turboquant(values=False), "values": Compression.turboquant(keys=False), "tq3": Compression.named("tq3"),
}  # fmt: skip


@pytest.mark.parametrize("name", MODES)
def test_an_inference_state_is_saved_and_comes_back(store: Store, name: str) -> None:
    state, used = (InferenceState(CONFIG, MODES[name], backend="reference") for _ in range(2))
    fill(state, 90)
    fill(used, 120, seed=7)
    save(store, state, prompt(90), [anchor_of(state)])
    with store.restore(identity_of(state.plan), more(prompt(90))) as found:
        assert restore_into(used, found) == 90
    assert contents(used) == contents(state) and used.compression == MODES[name]
    allocated = used.memory().attention
    assert feed(used, 16) == feed(state, 16) and contents(used) == contents(state)
    fill(used, 94)
    assert used.position == 200 and used.memory().attention == allocated, "there is room for the whole context"
    assert used.truncate_to(190) == 190 and used.truncate_to(100) == 0


def test_modes_of_one_config_never_share_state(store: Store) -> None:
    states = [InferenceState(CONFIG, mode, backend="reference") for mode in MODES.values()]
    states.append(InferenceState(CONFIG, Compression.turboquant(seed=8), backend="reference"))
    for state in states:
        fill(state, 9)
        assert store.match(identity_of(state.plan), more(prompt(9))).matched == 0
        save(store, state, prompt(9))
        assert store.match(identity_of(state.plan), more(prompt(9))).usable == 9
    asked = Compression.turboquant(seed=7)
    odd = replace(CONFIG, head_size=36, rope=None)
    assert InferenceState(odd, asked, backend="reference").compression == Compression(), "heads of 36 channels have no bytes"
    assert layer_specs(InferenceState(odd, asked).plan) == layer_specs(InferenceState(odd).plan)


def test_a_shifted_state_is_saved_and_comes_back(store: Store) -> None:
    """Values may be rotated; the convolutions stay as they are."""
    state, used = (InferenceState(CONFIG, MODES["values"], backend="reference") for _ in range(2))
    ids = prompt(100)
    fill(state, 100)
    state.shift(12, 30, gone=ids[12:42])
    left = np.delete(ids, np.arange(12, 42))
    save(store, state, left, [anchor_of(state)])
    fill(used, 50, seed=7)
    assert store.match(identity_of(state.plan), more(left)).matched == 0
    with store.restore(identity_of(state.plan), more(left), lineage=state.lineage) as found:
        assert restore_into(used, found) == 70
    assert (used.shift_offset, used.lineage) == (30, state.lineage) and contents(used) == contents(state)
    assert feed(used, 16) == feed(state, 16)
    used.shift(5, 10, gone=left[5:15])
    state.shift(5, 10, gone=left[5:15])
    assert (used.shift_offset, used.lineage) == (40, state.lineage) and contents(used) == contents(state)
