"""The embedded prefix cache: what its source promised, in both tiers, on models with states and without."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from warmkv.kvstore.store import PrefixCache
from warmkv.kvstore.store.check import check
from warmkv.kvstore.testing import mixed_identity, plane_bits, random_identity
from warmkv.kvstore.testing.samples import CONV, FULL, model_states, records_at
from warmkv.schema.errors import BudgetError, Busy, RecordError
from warmkv.schema.identity import Identity, PlaneRole
from warmkv.schema.ids import lineage_after
from warmkv.schema.records import CLEAN, Anchor, AnchorKind

HYBRID, PLAIN = mixed_identity(FULL, CONV), mixed_identity(FULL, FULL)
PROMPT = [10, 20, 30, 40, 50, 60, 70]
SHIFTED = lineage_after(CLEAN, "shifted", 4)
MIB = 1 << 20
Make = Callable[..., PrefixCache]


@pytest.fixture
def cache_of(tmp_path: Path) -> Iterator[Make]:
    """Open caches; with ``disk`` in a folder of this test. Each is checked at the end."""
    opened: list[PrefixCache] = []

    def make(identity: Identity = HYBRID, *, disk: bool = False, **budgets: Any) -> PrefixCache:
        if disk:
            budgets.setdefault("cold_bytes", 64 * MIB)
        opened.append(PrefixCache(identity, tmp_path / "cache" if disk else None, **budgets))
        return opened[-1]

    yield make
    for cache in opened:
        if cache.store.engine.serving:
            problems = check(cache.store.engine)
            cache.close()
            assert problems == []


def put(
    cache: PrefixCache, tokens: Sequence[int], *, depth: int = 0, kind: AnchorKind = AnchorKind.UNSPECIFIED, **how: Any
) -> Any:
    records = records_at(cache.identity, tokens, lineage=how.get("lineage", CLEAN))
    if depth or kind:
        return cache.insert_anchor(tokens, records, depth, kind, **how)
    return cache.insert(tokens, records, **how)


def found(cache: PrefixCache, tokens: Sequence[int], *, at: str = "longest", **how: Any) -> tuple[int, str | None]:
    """Tokens and tier of what is found; its numbers are those of a model that computed them."""
    find = cache.find_longest_prefix if at == "longest" else cache.find_deepest_anchor
    with find(tokens, **how) as restored:
        wanted = records_at(cache.identity, tokens[: restored.usable], lineage=how.get("lineage", CLEAN)) if restored else []
        for record in wanted:
            layer = restored.layers[record.layer]
            for plane in record.planes:
                came = layer.planes.get(plane.role) or layer.states[plane.role]
                assert plane_bits(came) == plane.rows.tobytes()
        return restored.usable, restored.tier


# -- which prefix ------------------------------------------------------------------------------


@pytest.mark.parametrize("disk", [False, True])
def test_a_full_length_entry_does_not_shadow_a_shorter_one(cache_of: Make, disk: bool) -> None:
    cache = cache_of(disk=disk)
    put(cache, PROMPT)
    assert found(cache, PROMPT) == (0, None)
    put(cache, PROMPT[:2])
    assert found(cache, PROMPT)[0] == 2
    put(cache, PROMPT[:3])
    assert found(cache, PROMPT)[0] == 3
    assert found(cache, [*PROMPT, 1])[0] == len(PROMPT)


def test_the_cold_tier_ignores_a_full_length_entry_too(cache_of: Make) -> None:
    cache = cache_of(disk=True)
    for length in (2, len(PROMPT)):
        put(cache, PROMPT[:length])
    cache.close()
    again = cache_of(disk=True)
    assert again.warm_entries == 0
    assert found(again, PROMPT) == (2, "cold")
    assert found(again, PROMPT) == (2, "warm") and again.warm_entries == 1
    assert found(again, [*PROMPT, 1]) == (len(PROMPT), "cold")


@pytest.mark.parametrize("disk", [False, True])
def test_rows_alone_are_cut_where_the_question_leaves_them(cache_of: Make, disk: bool) -> None:
    cache = cache_of(PLAIN, disk=disk)
    put(cache, PROMPT)
    assert found(cache, PROMPT)[0] == len(PROMPT) - 1
    assert found(cache, [*PROMPT[:4], 99, 98])[0] == 4


def test_prompts_of_one_token_or_none_are_misses(cache_of: Make) -> None:
    cache = cache_of(PLAIN)
    put(cache, PROMPT[:1])
    assert found(cache, PROMPT[:1]) == found(cache, []) == (0, None)
    assert found(cache, PROMPT)[0] == 1


def test_prompts_whose_hashes_collide_are_told_apart(cache_of: Make) -> None:
    """To the source's hash they are one."""
    trap = [1404660693, 906528578]
    cache = cache_of()
    put(cache, trap)
    assert found(cache, [*trap, 0, 5])[0] == 2
    put(cache, [*trap, 0])
    assert (found(cache, [*trap, 0, 5])[0], found(cache, [*trap, 1])[0]) == (3, 2) and cache.warm_entries == 2


def test_lineages_never_meet(cache_of: Make) -> None:
    cache = cache_of(PLAIN)
    put(cache, PROMPT, lineage=SHIFTED)
    assert found(cache, PROMPT) == (0, None)
    assert found(cache, PROMPT, lineage=SHIFTED)[0] == len(PROMPT) - 1


# -- anchors -----------------------------------------------------------------------------------


@pytest.mark.parametrize("disk", [False, True])
@pytest.mark.parametrize("identity", [HYBRID, PLAIN], ids=["with states", "rows alone"])
def test_the_deepest_anchor_is_found_with_all_that_names_it(cache_of: Make, identity: Identity, disk: bool) -> None:
    cache = cache_of(identity, disk=disk)
    put(cache, PROMPT[:2], depth=1, kind=AnchorKind.SYSTEM_PROMPT, lineage=SHIFTED)
    put(cache, PROMPT[:5], lineage=SHIFTED)
    put(cache, PROMPT[:3], depth=1, kind=AnchorKind.TURN, semantic_hash=0x12345678, shift_offset=4, lineage=SHIFTED)
    if disk:
        cache.close()
        cache = cache_of(identity, disk=True)
    with cache.find_deepest_anchor(PROMPT, lineage=SHIFTED) as restored:
        assert restored.usable == 3
        assert restored.anchor == Anchor(3, AnchorKind.TURN, 1, 0x12345678, 4)
    assert found(cache, PROMPT, lineage=SHIFTED)[0] == 5
    assert found(cache, PROMPT[:3], at="anchor", lineage=SHIFTED)[0] == 2
    assert found(cache, PROMPT, at="anchor") == (0, None)


def test_without_an_anchor_the_longest_prefix_is_found(cache_of: Make) -> None:
    cache = cache_of()
    put(cache, PROMPT[:5])
    cache.insert_anchor(PROMPT[:4], records_at(HYBRID, PROMPT[:4]), 0, AnchorKind.UNSPECIFIED, 9)
    assert cache.warm_anchors == 0
    assert found(cache, PROMPT, at="anchor")[0] == 5
    put(cache, PROMPT[:3], kind=AnchorKind.THINKING)
    assert found(cache, PROMPT, at="anchor")[0] == 3


def test_anchors_give_way_before_other_entries_do(cache_of: Make) -> None:
    cache = cache_of(anchors=3)
    put(cache, [1, 2, 3])
    for number in range(6):
        put(cache, [5 + number, 6, 7], depth=1 + number)
    assert (cache.warm_anchors, cache.warm_entries) == (3, 4)
    assert [found(cache, [5 + number, 6, 7, 8])[0] for number in range(6)] == [0, 0, 0, 3, 3, 3]
    assert found(cache, [1, 2, 3, 4])[0] == 3


def test_anchors_that_gave_way_in_memory_are_on_disk(cache_of: Make) -> None:
    cache = cache_of(anchors=2, disk=True)
    for number in range(4):
        put(cache, [5 + number, 6, 7], depth=1)
    assert cache.warm_anchors == 2
    assert [found(cache, [5 + number, 6, 7, 8], at="anchor") for number in range(4)] == [(3, "cold")] * 2 + [(3, "cold")] * 2
    assert cache.warm_anchors <= 2


# -- budgets -----------------------------------------------------------------------------------


def test_the_least_recently_used_entry_gives_way(cache_of: Make) -> None:
    cache = cache_of(entries=3)
    for number in range(3):
        put(cache, [number, 6, 7])
    assert found(cache, [0, 6, 7, 8])[0] == 3
    put(cache, [3, 6, 7])
    assert cache.warm_entries == 3
    assert [found(cache, [number, 6, 7, 8])[0] for number in range(4)] == [3, 0, 3, 3]


@pytest.mark.parametrize("identity", [HYBRID, PLAIN], ids=["with states", "rows alone"])
@pytest.mark.parametrize("disk", [False, True])
def test_no_more_entries_are_in_memory_than_may_be(cache_of: Make, identity: Identity, disk: bool) -> None:
    cache = cache_of(identity, entries=4, disk=disk)
    for number in range(9):
        put(cache, [number, 6, 7])
        assert cache.warm_entries == min(number + 1, 4)
    assert [found(cache, [number, 6, 7, 8])[0] for number in range(9)] == ([3] * 9 if disk else [0] * 5 + [3] * 4)
    assert cache.warm_entries <= 4


def test_a_growing_conversation_of_rows_alone_is_one_entry(cache_of: Make) -> None:
    cache = cache_of(PLAIN, entries=2)
    for length in range(1, 8):
        put(cache, PROMPT[:length])
    assert cache.warm_entries == 1
    put(cache, [*PROMPT[:3], 99])
    assert cache.warm_entries == 2
    put(cache, [7, 7, 7])
    assert cache.warm_entries == 2 and found(cache, [*PROMPT, 1])[0] == 3
    assert found(cache, [*PROMPT[:3], 99, 1])[0] == 4


def test_rows_used_on_their_own_outlive_what_went_on_from_them(cache_of: Make) -> None:
    cache = cache_of(PLAIN, entries=2)
    put(cache, PROMPT[:3])
    put(cache, PROMPT)
    put(cache, [7, 7, 7])
    assert found(cache, [*PROMPT[:3], 99])[0] == 3
    put(cache, [8, 8, 8])
    assert cache.warm_entries == 2 and found(cache, PROMPT)[0] == 3


def test_states_that_give_way_take_rows_of_their_own_along(cache_of: Make) -> None:
    cache = cache_of(entries=1)
    put(cache, PROMPT)
    put(cache, [1, 2, 3])
    assert len(cache.store.engine.index.records) == 2 and cache.warm_entries == 1


def test_bytes_are_a_budget_in_memory_and_on_disk(cache_of: Make) -> None:
    wide = random_identity(layers=1, heads=1, dim=256)
    cache = cache_of(wide, warm_bytes=256 << 10, cold_bytes=4 * MIB, disk=True)
    for number in range(40):
        assert put(cache, [number, *range(60)]).stored
        assert cache.warm_bytes <= 256 << 10
    assert 0 < cache.store.engine.writer.cold_bytes <= 4 * MIB  # type: ignore[union-attr]
    assert found(cache, [39, *range(60), 1])[0] == 61


def test_what_fits_no_budget_is_given_up_with_a_reason(cache_of: Make) -> None:
    wide = random_identity(layers=1, heads=1, dim=256)
    cache = cache_of(wide, warm_bytes=64 << 10)
    saved = put(cache, list(range(100)))
    assert not saved.stored and "warm budget" in saved.reason and cache.warm_entries == 0


def test_no_entries_and_no_disk_is_a_cache_switched_off(cache_of: Make) -> None:
    cache = cache_of(entries=0)
    assert not put(cache, PROMPT).stored and found(cache, [*PROMPT, 1]) == (0, None)


def test_no_entries_with_a_disk_keep_nothing_in_memory(cache_of: Make) -> None:
    cache = cache_of(entries=0, disk=True)
    put(cache, PROMPT)
    assert (cache.warm_entries, cache.warm_bytes) == (0, 0)
    assert found(cache, [*PROMPT, 1]) == (len(PROMPT), "cold")


def test_what_is_restored_and_not_closed_stays(cache_of: Make) -> None:
    cache = cache_of(entries=1)
    put(cache, PROMPT)
    with cache.find_longest_prefix([*PROMPT, 1]) as restored:
        put(cache, [1, 2, 3])
        assert restored.usable == len(PROMPT) and cache.warm_entries == 2
        expected = model_states(HYBRID, PROMPT)[0].planes[0].rows.tobytes()
        assert plane_bits(restored.layers[1].states[PlaneRole.CONV]) == expected
    put(cache, [4, 5, 6])
    assert cache.warm_entries == 1


def test_what_is_on_its_way_to_disk_stays_until_it_is_there(cache_of: Make) -> None:
    cache = cache_of(entries=1, disk=True)
    with cache.store.engine.index.changed:  # nothing gets to the disk meanwhile
        for number in range(3):
            put(cache, [number, 6, 7], ack="memory")
        assert cache.warm_entries == 3
    assert cache.store.flush(30)
    put(cache, [3, 6, 7])
    assert cache.warm_entries == 1
    assert [found(cache, [number, 6, 7, 8])[0] for number in range(4)] == [3] * 4


def test_a_disk_that_is_too_slow_is_told_and_the_state_is_held(cache_of: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = cache_of(entries=1, disk=True)
    writer = cache.store.engine.writer
    assert writer is not None

    def late(*_: object, **__: object) -> None:
        raise Busy("not committed in time")

    monkeypatch.setattr(writer, "wait_durable", late)
    for number in range(3):
        saved = put(cache, [number, 6, 7])
        assert (saved.stored, saved.durable, saved.reason) == (True, False, "not committed in time")
        assert found(cache, [number, 6, 7, 8])[0] == 3
        assert cache.store.flush(30)
    assert cache.warm_entries <= 2
    monkeypatch.setattr(cache.store, "save", late)
    assert not put(cache, [9, 9, 9]).stored
    assert cache.warm_entries == 1


@pytest.mark.parametrize("budget", [{"entries": -1}, {"entries": 1.5}, {"warm_bytes": -1}, {"anchors": -1}, {"cold_bytes": -1}])
def test_budgets_that_are_none_are_refused(budget: dict[str, Any]) -> None:
    with pytest.raises(BudgetError):
        PrefixCache(HYBRID, **budget)


def test_the_budgets_of_the_source_are_the_defaults(cache_of: Make) -> None:
    options = cache_of().store.engine.options
    assert (options.warm_bytes, options.anchors, cache_of().entries) == (256 * MIB, 16, 32)
    assert PrefixCache.__init__.__kwdefaults__["cold_bytes"] == 10 * 1024 * MIB


@pytest.mark.parametrize("identity", [HYBRID, PLAIN], ids=["with states", "rows alone"])
def test_any_walk_finds_what_a_list_of_prompts_says(cache_of: Make, identity: Identity) -> None:
    """With a disk nothing is lost, whatever gives way in memory."""
    rng, cache, kept, named = random.Random(3), cache_of(identity, entries=3, anchors=2, disk=True), [], []
    for _ in range(60):
        tokens = [rng.randint(1, 2) for _ in range(rng.randint(1, 9))]
        if rng.random() < 0.4:
            depth = rng.randint(0, 1)
            put(cache, tokens, depth=depth)
            kept.append(tokens)
            named += [tokens] * depth
        elif rng.random() < 0.1:
            cache.clear_warm()
        usable = longest(kept, tokens, cut=identity is PLAIN)
        assert found(cache, tokens)[0] == usable
        anchor = longest(named, tokens)
        assert found(cache, tokens, at="anchor")[0] == (anchor or usable)
        assert cache.warm_entries <= 3 and (identity is PLAIN or cache.warm_anchors <= 2)


def longest(prompts: list[list[int]], tokens: list[int], *, cut: bool = False) -> int:
    """How much of ``tokens``, but for the last, the best of ``prompts`` is a beginning of, or with ``cut``
    begins with."""
    lengths = [0]
    for item in prompts:
        common = next((at for at, pair in enumerate(zip(item, tokens)) if pair[0] != pair[1]), min(len(item), len(tokens)))  # noqa: B905
        common = min(common, len(tokens) - 1)
        lengths.append(common if cut or common == len(item) else 0)
    return max(lengths)


# -- clearing and counting ---------------------------------------------------------------------


def test_clear_warm_keeps_what_is_on_disk(cache_of: Make) -> None:
    cache = cache_of(disk=True)
    for length in (3, 5):
        put(cache, PROMPT[:length], depth=1)
    assert cache.warm_bytes > 0 and (cache.warm_entries, cache.warm_anchors) == (2, 2)
    cache.clear_warm()
    assert (cache.warm_bytes, cache.warm_entries, cache.warm_anchors) == (0, 0, 0)
    assert found(cache, PROMPT) == (5, "cold")
    assert found(cache, PROMPT) == (5, "warm")


def test_clear_warm_without_a_disk_drops_everything(cache_of: Make) -> None:
    cache = cache_of()
    put(cache, PROMPT)
    cache.clear_warm()
    assert found(cache, [*PROMPT, 1]) == (0, None) and not cache.store.engine.index.records


@pytest.mark.parametrize("disk", [False, True])
def test_clear_drops_both_tiers(cache_of: Make, disk: bool) -> None:
    cache = cache_of(disk=disk)
    put(cache, PROMPT[:3], depth=2)
    assert cache.clear().records == 2
    assert (cache.warm_bytes, cache.warm_entries, cache.warm_anchors) == (0, 0, 0)
    assert found(cache, PROMPT) == (0, None)
    if disk:
        cache.close()
        assert found(cache_of(disk=True), PROMPT) == (0, None)


def test_what_is_there_already_is_not_entered_twice(cache_of: Make) -> None:
    cache = cache_of()
    first, second = put(cache, PROMPT), put(cache, PROMPT)
    assert not first.duplicate and second.duplicate and cache.warm_entries == 1


def test_records_that_do_not_fit_change_nothing(cache_of: Make) -> None:
    cache = cache_of()
    with pytest.raises(RecordError):
        cache.insert(PROMPT, records_at(HYBRID, PROMPT[:3]))
    assert cache.warm_entries == 0
