"""A rollback keeps what was accepted and nothing else; what is behind then is told, and not saved before it is replayed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from dumps import dump_all

from warmkv.kernels.formats import RowFormat
from warmkv.kvstore.bridge import records_of
from warmkv.kvstore.live import snapshot
from warmkv.kvstore.live.checkpoint import Checkpoint, can_rollback, checkpoint, refresh, rollback
from warmkv.kvstore.live.evict import Recent
from warmkv.kvstore.live.layers.attention import AttentionLayer
from warmkv.kvstore.live.layers.recurrent import RecurrentLayer
from warmkv.kvstore.live.model import ModelCache
from warmkv.kvstore.live.plan import ConvPlan, LayerPlan, ModelPlan, NystromPlan, RingPlan
from warmkv.kvstore.live.shift import shift
from warmkv.kvstore.testing.live import contents, feed, fill, replay
from warmkv.schema.errors import CannotRewind, LiveError, OutOfMemory, RecordError, ReplayDue
from warmkv.schema.identity import LayerKind
from warmkv.schema.records import CLEAN

FULL = LayerPlan(LayerKind.FULL, heads=4, kv_heads=2, key_size=6, value_size=5, importance=False)
WINDOW = replace(FULL, kind=LayerKind.SLIDING, window=4)
HALF = replace(FULL, key_format=RowFormat.F16, value_format=RowFormat.F16)
STATE = LayerPlan(LayerKind.RECURRENT, state_size=7)
DELTA = replace(STATE, conv=ConvPlan(3, taps=2, history=0))
CONV = LayerPlan(LayerKind.CONV, conv=ConvPlan(3))
SHARED = LayerPlan(LayerKind.SHARED, shared_with=0)
PLANS = {
    "rows": ModelPlan((FULL, WINDOW, SHARED, HALF)),
    "hybrid": ModelPlan((FULL, STATE, DELTA, HALF, DELTA)),
    "convolutions": ModelPlan((CONV, FULL, replace(CONV, conv=ConvPlan(3, taps=3, history=1)))),
    "ring": ModelPlan((replace(FULL, kind=LayerKind.RING, value_size=6, ring=RingPlan(3, undo_rows=6)), STATE)),
    "nystroem": ModelPlan((replace(FULL, kind=LayerKind.NYSTROM, nystrom=NystromPlan(4, 3, 1)), DELTA)),
    "mtp": ModelPlan((FULL, DELTA, FULL, HALF), mtp=2),
}
DRAFT = 4
by_plan = pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS.keys())


def made(plan: ModelPlan, tokens: int, seed: int = 0) -> ModelCache:
    cache = ModelCache(plan, backend="reference")
    fill(cache, tokens, seed)
    return cache


@by_plan
@pytest.mark.parametrize("tokens", [0, 1, 9])
@pytest.mark.parametrize("accepted", range(DRAFT + 1))
def test_what_is_left_is_a_cache_that_never_saw_the_draft(plan: ModelPlan, tokens: int, accepted: int) -> None:
    cache, twin = made(plan, tokens), made(plan, tokens + accepted)
    taken = checkpoint(cache)
    feed(cache, DRAFT)
    assert can_rollback(cache, taken, accepted)
    rollback(cache, taken, accepted)
    assert cache.position == tokens + accepted and cache.lineage == CLEAN
    recurrent = any(layer.kind is LayerKind.RECURRENT for layer in plan.layers)
    due = range(tokens, tokens + accepted)
    assert cache.replay_due in ((due,) if recurrent else (due, range(0)))
    replay(cache)
    assert not cache.replay_due and not cache.replay.layers
    assert contents(cache) == contents(twin)
    assert feed(cache, 2, seed=1) == feed(twin, 2, seed=1) and contents(cache) == contents(twin)


@by_plan
def test_rounds_of_drafts_equal_the_sequence_that_was_accepted(plan: ModelPlan) -> None:
    # Who drafts trims windows with slack; this model does not.
    plan = replace(plan, layers=tuple(replace(layer, window=64) if layer.window else layer for layer in plan.layers))
    cache, twin = made(plan, 3), made(plan, 3)
    taken = checkpoint(cache)
    rng = np.random.default_rng(7)
    for _ in range(12):
        refresh(taken, cache)
        feed(cache, DRAFT)
        accepted = int(rng.integers(0, DRAFT + 1))
        rollback(cache, taken, accepted)
        replay(cache)
        fill(twin, accepted)
        assert contents(cache) == contents(twin)


@pytest.mark.parametrize("name", ["hybrid", "mtp"])
def test_nothing_is_saved_until_the_accepted_tokens_were_replayed(name: str) -> None:
    cache = made(PLANS[name], 9)
    taken = checkpoint(cache)
    feed(cache, DRAFT)
    rollback(cache, taken, 3)
    attempts: list[Callable[[], object]] = [
        lambda: records_of(cache, 12), lambda: snapshot.take(cache), lambda: checkpoint(cache), lambda: refresh(taken, cache),
        cache.export_layers,
    ]  # fmt: skip
    before = dump_all(cache)
    for attempt in attempts:
        with pytest.raises(ReplayDue, match=r"\[9, 12\)"):
            attempt()
    assert dump_all(cache) == before and taken.position == 9
    for layer in cache.own:
        if isinstance(layer, RecurrentLayer):
            conv = None if layer.conv is None else layer.conv.copy()
            layer.update(layer.state.copy(), 2, conv=conv)
    assert cache.replay_due == range(11, 12)
    replay(cache)
    assert not cache.replay_due
    records_of(cache, 12), snapshot.take(cache), refresh(taken, cache)
    assert taken.position == 12


def test_tokens_that_come_before_the_replay_do_not_pass_for_it() -> None:
    cache = made(PLANS["hybrid"], 9)
    taken = checkpoint(cache)
    feed(cache, DRAFT)
    rollback(cache, taken, 1)
    feed(cache, 1)
    assert cache.position == 11 and cache.replay_due == range(10, 11)
    with pytest.raises(ReplayDue):
        snapshot.take(cache)
    rollback(cache, taken, 1)
    replay(cache)
    assert contents(cache) == contents(made(PLANS["hybrid"], 10))


def test_a_rollback_that_accepts_nothing_owes_nothing() -> None:
    cache = made(PLANS["hybrid"], 9)
    before = contents(cache)
    taken = checkpoint(cache)
    feed(cache, DRAFT)
    rollback(cache, taken, 0)
    assert contents(cache) == before and not cache.replay_due
    records_of(cache, 9)


def test_where_there_are_no_rows_accepted_tokens_are_just_those_to_come() -> None:
    cache = made(ModelPlan((DELTA, STATE)), 9)
    before = contents(cache)
    taken = checkpoint(cache)
    feed(cache, DRAFT)
    rollback(cache, taken, 3)
    assert cache.position == 9 and contents(cache) == before and not cache.replay_due


def test_blocks_that_drafted_less_are_behind_and_keep_what_they_have() -> None:
    plan = PLANS["mtp"]
    cache = made(plan, 9)
    taken = checkpoint(cache)
    feed(cache, DRAFT)
    block = cache.own[3]
    block.truncate_last(2)
    rollback(cache, taken, 3)
    assert [layer.position for layer in cache.own] == [12, 9, 12, 11] and cache.replay_due == range(9, 12)
    replay(cache)
    assert contents(cache) == contents(made(plan, 12))


def test_blocks_may_lag_behind_the_trunk_in_any_case() -> None:
    plan = PLANS["mtp"]
    cache, twin = made(plan, 9), made(plan, 11)
    for each in (cache, twin):
        each.own[2].truncate_last(1), each.own[3].truncate_last(1)
    taken = checkpoint(cache)
    feed(cache, DRAFT)
    cache.own[3].truncate_last(3)
    rollback(cache, taken, 2)
    assert [layer.position for layer in cache.own] == [11, 9, 10, 9] and cache.replay_due == range(9, 11)
    replay(cache)
    assert not cache.replay_due and contents(cache) == contents(twin)
    checkpoint(cache)


def test_more_accepted_than_appended_is_refused_unchanged() -> None:
    for plan in PLANS.values():
        cache = made(plan, 9)
        taken = checkpoint(cache)
        feed(cache, 2)
        before = dump_all(cache)
        rows = any(layer.kind in (LayerKind.FULL, LayerKind.RING, LayerKind.NYSTROM) for layer in plan.layers)
        for accepted in (3, 100) if rows else ():
            assert not can_rollback(cache, taken, accepted)
            with pytest.raises((RecordError, CannotRewind), match=f"{accepted} tokens accepted behind position 9, it is at 11"):
                rollback(cache, taken, accepted)
        for nonsense in (-1, 1.0, None, True, "1"):
            assert not can_rollback(cache, taken, nonsense)  # type: ignore[arg-type]
            with pytest.raises(RecordError, match="tokens accepted, expected a whole number"):
                rollback(cache, taken, nonsense)  # type: ignore[arg-type]
        assert dump_all(cache) == before


def test_a_checkpoint_of_another_cache_is_refused_unchanged() -> None:
    cache, other = made(PLANS["hybrid"], 9), made(PLANS["hybrid"], 9)
    taken = checkpoint(other)
    before = dump_all(cache)
    assert not can_rollback(cache, taken, 0)
    for attempt in (lambda: rollback(cache, taken, 0), lambda: refresh(taken, cache)):
        with pytest.raises(RecordError, match="a checkpoint of another cache"):
            attempt()
    assert dump_all(cache) == before and taken.position == 9 and can_rollback(other, taken, 0)


def refilled(change: Callable[[ModelCache], object]) -> Callable[[ModelCache], None]:
    def then(cache: ModelCache) -> None:
        change(cache)
        fill(cache, max(0, 14 - cache.position), seed=3)

    return then


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("hybrid", refilled(lambda cache: cache.clear())),
        ("rows", refilled(lambda cache: cache.clear())),
        ("rows", refilled(lambda cache: cache.truncate_last(3))),
        ("rows", refilled(lambda cache: shift(cache, 0, 2, (None,) * 4))),
        ("hybrid", refilled(lambda cache: snapshot.prepare(cache, snapshot.take(made(PLANS["hybrid"], 11, 5)))())),
        ("hybrid", refilled(lambda cache: cache.own[1].adopt(np.zeros(7, np.float32), 11))),  # type: ignore[union-attr, call-arg, arg-type]
    ],
    ids=["cleared", "cleared rows", "taken back", "shifted", "restored", "adopted"],
)  # fmt: skip
def test_a_checkpoint_of_what_is_gone_is_refused_unchanged(name: str, change: Callable[[ModelCache], None]) -> None:
    cache = made(PLANS[name], 9)
    taken = checkpoint(cache)
    feed(cache, 2)
    change(cache)
    before = dump_all(cache)
    assert not can_rollback(cache, taken, 1)
    with pytest.raises(CannotRewind, match="since"):
        rollback(cache, taken, 1)
    assert dump_all(cache) == before
    if len({layer.position for layer in cache.own}) == 1:
        refresh(taken, cache)
        assert can_rollback(cache, taken, 0)


def test_layers_that_cannot_go_back_keep_the_others_where_they_are() -> None:
    undo = ModelPlan((FULL, replace(FULL, kind=LayerKind.RING, value_size=6, ring=RingPlan(3, undo_rows=2)), STATE))
    cache = made(undo, 9)
    taken = checkpoint(cache)
    feed(cache, DRAFT)
    before = dump_all(cache)
    assert not can_rollback(cache, taken, 1) and can_rollback(cache, taken, 2)
    with pytest.raises(CannotRewind, match="layer 1 .RING."):
        rollback(cache, taken, 1)
    assert dump_all(cache) == before
    rollback(cache, taken, 2)


def test_a_window_trimmed_beyond_a_checkpoint_is_refused() -> None:
    cache = made(PLANS["rows"], 9)
    taken = checkpoint(cache)
    fill(cache, 12)
    before = dump_all(cache)
    assert can_rollback(cache, taken, 11) and not can_rollback(cache, taken, 0)
    with pytest.raises(CannotRewind, match="layer 1 .SLIDING."):
        rollback(cache, taken, 0)
    assert dump_all(cache) == before


def test_a_seal_cannot_be_taken_back() -> None:
    plan = ModelPlan((replace(FULL, kind=LayerKind.NYSTROM, nystrom=NystromPlan(4, 3, 1, boundary=20)), STATE))
    cache = made(plan, 18)
    taken = checkpoint(cache)
    fill(cache, 3)
    before = dump_all(cache)
    assert not can_rollback(cache, taken, 0)
    with pytest.raises(LiveError):
        rollback(cache, taken, 0)
    assert dump_all(cache) == before


def test_an_inner_checkpoint_goes_with_the_tokens_behind_an_outer_one() -> None:
    cache = made(PLANS["hybrid"], 9)
    outer = checkpoint(cache)
    feed(cache, 2)
    inner = checkpoint(cache)
    feed(cache, 2)
    rollback(cache, inner, 1)
    replay(cache)
    assert can_rollback(cache, outer, 1) and can_rollback(cache, inner, 0)
    rollback(cache, outer, 1)
    assert not can_rollback(cache, inner, 0)
    replay(cache)
    feed(cache, 3, seed=2)
    with pytest.raises(CannotRewind, match="taken back to position 10 since"):
        rollback(cache, inner, 0)
    rollback(cache, outer, 0)
    assert contents(cache) == contents(made(PLANS["hybrid"], 9))


def test_an_eviction_before_the_cut_shows_in_the_lineage_as_truncation_has_it() -> None:
    plan = ModelPlan((FULL, HALF))
    cache, twin = (ModelCache(plan, backend="reference", policy=Recent()) for _ in range(2))
    for each in (cache, twin):
        fill(each, 20)
    taken = checkpoint(cache)
    for each in (cache, twin):
        fill(each, DRAFT)
        each.evict(12)
    rollback(cache, taken, 1)
    twin.truncate_last(DRAFT - 1)
    assert contents(cache) == contents(twin) and cache.lineage == twin.lineage != CLEAN
    after = cache.lineage
    fill(cache, 2)
    rollback(cache, taken, 1)
    assert cache.lineage == after


def test_fields_fixed_from_rejected_tokens_show_in_the_lineage() -> None:
    plan = ModelPlan((replace(FULL, key_format=RowFormat.Q8_2F, value_format=RowFormat.Q8_2F), STATE))
    cache = made(plan, 62)
    taken = checkpoint(cache)
    fill(cache, DRAFT)
    first = cache.own[0]
    assert isinstance(first, AttentionLayer) and first.keys.frozen
    rollback(cache, taken, 1)
    assert cache.position == 63 and cache.lineage != CLEAN


def test_refresh_asks_for_no_memory() -> None:
    asked = []

    def allocate(shape: tuple[int, ...], dtype: np.dtype[np.generic]) -> np.ndarray[tuple[int, ...], np.dtype[np.generic]]:
        asked.append(shape)
        return np.empty(shape, dtype)

    cache = ModelCache(ModelPlan((STATE, DELTA, CONV)), backend="reference", allocate=allocate)
    fill(cache, 3)
    before = len(asked)
    taken = checkpoint(cache)
    assert len(asked) > before
    count, size = len(asked), taken.nbytes
    assert size == 4 * (7 + 7 + 6 + 6)
    for _ in range(5):
        fill(cache, 1)
        refresh(taken, cache)
        fill(cache, 2)
        rollback(cache, taken, 0)
    assert len(asked) == count and taken.nbytes == size and cache.position == 8


def test_refused_memory_makes_no_checkpoint() -> None:
    granted = 4

    def allocate(shape: tuple[int, ...], dtype: np.dtype[np.generic]) -> np.ndarray[tuple[int, ...], np.dtype[np.generic]]:
        nonlocal granted
        if not granted:
            raise OutOfMemory("refused", 0)
        granted -= 1
        return np.empty(shape, dtype)

    cache = ModelCache(ModelPlan((STATE, DELTA)), backend="reference", allocate=allocate)
    before = dump_all(cache)
    with pytest.raises(OutOfMemory):
        checkpoint(cache)
    assert dump_all(cache) == before and not list(cache.checkpoints)


def test_checkpoints_do_not_keep_caches_nor_caches_checkpoints() -> None:
    cache = made(PLANS["hybrid"], 2)
    taken = checkpoint(cache)
    assert list(cache.checkpoints) == [taken]
    del taken
    assert not list(cache.checkpoints)
    kept: Checkpoint = checkpoint(cache)
    del cache
    assert not kept.is_of(made(PLANS["hybrid"], 2))
