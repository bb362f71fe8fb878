"""What a record is worth: frequency, prefill time of its own rows, bytes; kept through a restart."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import islice

import pytest

from warmkv.kvstore.store import Store
from warmkv.kvstore.store.arrivals import MAX_TOKEN_US
from warmkv.kvstore.store.index import Record
from warmkv.kvstore.store.worth import UNKNOWN_US, worth_of
from warmkv.kvstore.testing import model_rows, save
from warmkv.kvstore.testing.samples import FULL, RECURRENT, mixed_identity
from warmkv.schema.errors import RecordError
from warmkv.schema.identity import Identity

OpenStore = Callable[..., Store]
KIB = 1 << 10


def ids(seed: int, length: int = 100) -> list[int]:
    return [seed * 1000 + at for at in range(length)]


def records(store: Store) -> list[Record]:
    return sorted(store.engine.index.records.values(), key=lambda record: (record.start, record.is_state))


def test_prefill_time_is_split_by_own_rows_and_kept(open_store_with: OpenStore, wide: Identity) -> None:
    store = open_store_with(True)
    save(store, wide, ids(1), prefill_s=0.5)
    save(store, wide, ids(1, 300), prefill_s=3.0, ack="disk")
    assert [record.prefill_us for record in records(store)] == [500_000, 2_000_000]
    store.restore(wide, ids(1, 300) + [7]).close()
    hits = [record.hits for record in records(store)]
    used = [record.used_at_s for record in records(store)]
    store.close()
    store = open_store_with(True)
    assert [record.prefill_us for record in records(store)] == [500_000, 2_000_000]
    assert [record.hits for record in records(store)] == hits and max(hits) == 1
    assert [record.used_at_s for record in records(store)] == used and min(used) > 1_500_000_000


def test_what_cannot_be_a_time_is_refused_and_what_nobody_believes_is_capped(open_store_with: OpenStore, wide: Identity) -> None:
    store = open_store_with()
    for odd in (-1.0, float("nan"), float("inf"), 1e9):
        with pytest.raises(RecordError):
            store.save(wide, ids(1), model_rows(wide, ids(1)), prefill_s=odd)
    save(store, wide, ids(1), prefill_s=900_000.0)
    assert records(store)[0].prefill_us == 100 * MAX_TOKEN_US


def test_unknown_times_are_those_of_the_namespace_then_of_any(
    open_store_with: OpenStore, wide: Identity, identity: Identity
) -> None:
    store = open_store_with()
    worth = partial(worth_of, store.engine.index.prefill)
    save(store, wide, ids(1))
    first = records(store)[0]
    assert worth(first) == pytest.approx(100 * UNKNOWN_US / first.total_bytes)
    save(store, wide, ids(2), prefill_s=0.2)
    save(store, wide, ids(3), prefill_s=0.4)
    assert worth(first) == pytest.approx(100 * 3000 / first.total_bytes)
    save(store, identity, ids(4))
    other = next(record for record in records(store) if record.namespace is not first.namespace)
    assert worth(other) == pytest.approx(100 * 3000 / other.total_bytes)
    before = worth(first)
    store.restore(wide, ids(1) + [7]).close()
    assert worth(first) == pytest.approx(2 * before)


def test_what_was_dear_to_compute_outlives_what_was_cheap(open_store_with: OpenStore, wide: Identity) -> None:
    store = open_store_with(warm_bytes=700 * KIB)
    save(store, wide, ids(1), prefill_s=10.0)
    for seed in range(2, 12):
        save(store, wide, ids(seed), prefill_s=0.1)
    assert store.match(wide, ids(1) + [7]).usable == 100
    assert [seed for seed in range(2, 12) if store.match(wide, ids(seed) + [7]).usable] == [10, 11]
    # It ages all the same: each that goes lifts the clock.
    for seed in range(12, 150):
        save(store, wide, ids(seed, 60), prefill_s=1.0)
    assert store.match(wide, ids(1) + [7]).usable == 0


def test_a_state_is_worth_the_way_from_the_one_before(open_store_with: OpenStore) -> None:
    identity = mixed_identity(FULL, RECURRENT)
    store = open_store_with()
    for length, seconds in ((100, 1.0), (150, 1.5), (400, 4.0)):
        save(store, identity, ids(1, length), prefill_s=seconds)
    worth = partial(worth_of, store.engine.index.prefill)
    states = [record for record in records(store) if record.is_state]
    assert [state.end for state in states] == [100, 150, 400]
    ways = [round(worth(state) * state.total_bytes / (1 + state.hits)) for state in states]
    assert ways == [1_000_000, 500_000, 2_500_000]
    # With the middle one gone the last saves the way from the first.
    store.engine.warm.evict(states[1])
    assert round(worth(states[2]) * states[2].total_bytes) == 3_000_000
    store.engine.warm.reap()


def test_states_that_save_little_go_before_rows(open_store_with: OpenStore) -> None:
    """Two states of one prompt, one token apart: the second saves next to nothing."""
    identity = mixed_identity(FULL, RECURRENT)
    store = open_store_with(high_watermark=1.0)
    for length in (200, 201):
        save(store, identity, ids(1, length), prefill_s=length / 100)
    before = store.engine.warm.ledger.resident_bytes
    gone = store.engine.eviction.evict("warm", before - 1)
    assert gone["warm_records"] == 1
    left = records(store)
    assert [record.end for record in left if record.is_state] == [200]
    assert [record.end for record in left if not record.is_state] == [200, 201]


def test_plans_do_not_read_past_what_waits_for_its_leaves(open_store_with: OpenStore, wide: Identity) -> None:
    """Cheap trunks under dear leaves: nothing of a trunk can go, and none is looked at."""
    store = open_store_with(policy="gdsf")
    for seed in range(20):
        save(store, wide, ids(seed, 20), prefill_s=0.001)
        save(store, wide, ids(seed, 30), prefill_s=30.0)
    first = list(islice(store.engine.index.warm_order.worst_first(), 5))
    assert sum(bool(record.children) for record in first) <= 2
    gone = store.engine.warm.trim(1)
    assert len(gone) == 1 and not gone[0].children
    store.engine.warm.reap()


@pytest.mark.parametrize("policy", ["lru", "gdsf"])
def test_a_branch_within_a_long_segment_goes_before_it_and_ranks_for_itself(
    open_store_with: OpenStore, wide: Identity, policy: str
) -> None:
    store = open_store_with(policy=policy)
    save(store, wide, ids(1, 200))
    save(store, wide, ids(3))
    for _ in range(5):
        store.restore(wide, ids(1, 200) + [7]).close()
    save(store, wide, [*ids(1, 20), *ids(2, 30)])
    trunk, other, branch = sorted(store.engine.index.records.values(), key=lambda record: record.created_ns)
    assert branch.parent is trunk and branch.end < trunk.end
    order = list(store.engine.index.warm_order.worst_first())
    assert order.index(branch) < order.index(trunk)
    assert order.index(other) < order.index(trunk)
    save(store, wide, ids(4))
    if policy == "gdsf":
        # Used five times, the trunk is worth more than all that came once.
        assert list(store.engine.index.warm_order.worst_first())[-1] is trunk
