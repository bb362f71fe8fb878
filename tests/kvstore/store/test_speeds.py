"""What would take longer to load than to compute is not offered: decided by injected speeds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from warmkv.kvstore.store import Store
from warmkv.kvstore.store.answers import HANDOVER_US
from warmkv.kvstore.testing import check_restore, mixed_identity, save
from warmkv.kvstore.testing.samples import layer_of
from warmkv.schema.errors import RecordError
from warmkv.schema.identity import Identity, LayerKind

OpenStore = Callable[..., Store]
IDS = list(range(1, 401))


def cold_store(open_store_with: OpenStore, identity: Identity, *lengths: int) -> Store:
    """A store that was restarted: everything is on disk only."""
    store = open_store_with(True)
    for length in lengths:
        save(store, identity, IDS[:length], ack="disk")
    store.close()
    return open_store_with(True)


def disk_speed(store: Store, bytes_per_s: float) -> None:
    store.engine.promotion.bytes_per_s = bytes_per_s


def test_a_slow_disk_is_refused_with_both_times_and_a_fast_one_is_not(open_store_with: OpenStore, wide: Identity) -> None:
    store = cold_store(open_store_with, wide, 300)
    total = store.match(wide, IDS).total_bytes
    disk_speed(store, total / 3.0)  # three seconds to load
    refused = store.match(wide, IDS, prefill_tps=200)  # one and a half to compute
    assert (refused.matched, refused.usable, refused.tier, refused.load_s) == (300, 0, None, 0)
    assert "to load 300 tokens would take about 3 s, to compute them 1.5 s" in refused.reason
    assert "resume" not in refused.reason
    with store.restore(wide, IDS, prefill_tps=200) as restored:
        assert not restored and "to load 300 tokens" in restored.reason
    assert store.stats()["warm"]["bytes"] == 0, "what was refused was loaded all the same"  # type: ignore[index]
    assert store.match(wide, IDS, prefill_tps=50).usable == 300
    assert store.stats()["refusals"] == 2


@pytest.mark.parametrize("tps", [0.0, 1.0])
def test_without_a_speed_or_with_a_low_one_everything_is_offered(open_store_with: OpenStore, wide: Identity, tps: float) -> None:
    store = cold_store(open_store_with, wide, 300)
    disk_speed(store, 1e5)
    assert store.match(wide, IDS, prefill_tps=tps).usable == 300


def test_the_speed_at_which_both_take_as_long_is_offered(open_store_with: OpenStore, wide: Identity) -> None:
    store = cold_store(open_store_with, wide, 300)
    total = store.match(wide, IDS).total_bytes
    disk_speed(store, total / 1.0)
    seconds = 1.0 + HANDOVER_US / 1e6
    assert store.match(wide, IDS, prefill_tps=300 / seconds * 0.999).usable == 300
    assert store.match(wide, IDS, prefill_tps=300 / seconds * 1.001).usable == 0


def test_what_lies_in_memory_is_offered_without_the_rest(open_store_with: OpenStore, wide: Identity) -> None:
    store = cold_store(open_store_with, wide, 100, 300)
    store.restore(wide, IDS[:101]).close()
    disk_speed(store, 1000.0)
    match = store.match(wide, IDS, prefill_tps=1000)
    assert (match.matched, match.usable, match.tier) == (300, 100, "warm")
    assert "to load 300 tokens" in match.reason
    check_restore(store, wide, IDS, 100, prefill_tps=1000)


def test_a_state_on_disk_is_not_worth_waiting_for_either(open_store_with: OpenStore) -> None:
    identity = mixed_identity(layer_of(LayerKind.FULL), layer_of(LayerKind.RECURRENT))
    store = cold_store(open_store_with, identity, 100, 300)
    store.restore(identity, IDS[:101]).close()
    disk_speed(store, 1000.0)
    assert store.match(identity, IDS, prefill_tps=1000).usable == 100
    assert store.match(identity, IDS).usable == 300


def test_the_store_measures_its_own_speed(open_store_with: OpenStore, wide: Identity) -> None:
    store = cold_store(open_store_with, wide, 300)
    before = store.engine.promotion.bytes_per_s
    store.restore(wide, IDS).close()
    assert store.engine.promotion.bytes_per_s != before


@pytest.mark.parametrize("tps", [-1.0, float("nan"), float("inf")])
def test_speeds_that_cannot_be_are_refused(open_store_with: OpenStore, wide: Identity, tps: float) -> None:
    store = open_store_with()
    with pytest.raises(RecordError, match="prefill speed"):
        store.match(wide, IDS, prefill_tps=tps)
    with pytest.raises(RecordError, match="prefill speed"):
        store.restore(wide, IDS, prefill_tps=tps)


def test_speeds_have_no_part_in_the_identity(open_store_with: OpenStore, wide: Identity) -> None:
    store = open_store_with()
    save(store, wide, IDS[:50])
    assert store.match(replace(wide), IDS, prefill_tps=7).usable == 50
