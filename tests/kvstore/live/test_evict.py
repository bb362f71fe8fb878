"""Which rows stay: against an oracle that sorts by hand, and the survivors of the source's own tests."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from naive_cache import kept_by_hand

from warmkv.kvstore.live import evict
from warmkv.kvstore.live.evict import Mass, Recent
from warmkv.schema.errors import RecordError

NAN = float("nan")
INF = float("inf")


def mass(*values: float) -> np.ndarray:
    return np.asarray(values, np.float32)


def test_sinks_recents_and_the_heaviest_between_stay() -> None:
    """Eight rows, one sink, a budget of four: the source's survivors."""
    importance = np.full(8, 0.05, np.float32)
    importance[3] = 5.0
    kept = evict.plan(Mass(sinks=1), 8, 4, importance)
    assert kept is not None and kept.tolist() == [0, 3, 6, 7]


@pytest.mark.parametrize("rows", [0, 3, 4])
@pytest.mark.parametrize("policy", [Recent(), Mass(0), Mass(9)])
def test_rows_within_the_budget_all_stay(policy: evict.Policy, rows: int) -> None:
    assert evict.plan(policy, rows, 4, np.ones(rows, np.float32)) is None


def test_recent_keeps_the_newest_and_asks_for_no_importance() -> None:
    kept = evict.plan(Recent(), 8, 4, None)
    assert kept is not None and kept.tolist() == [4, 5, 6, 7]


@pytest.mark.parametrize(("keep", "recent"), [(0, 1), (1, 1), (2, 1), (3, 1), (4, 2), (5, 2), (20, 10)])
def test_half_of_the_budget_and_at_least_one_row_goes_to_the_newest(keep: int, recent: int) -> None:
    assert evict.recent_rows(keep) == recent


@pytest.mark.parametrize(
    ("keep", "sinks", "kept"),
    [
        (0, 4, []), (1, 4, [0]), (4, 4, [0, 1, 2, 3]), (5, 4, [0, 1, 2, 3, 9]), (6, 9, [0, 1, 2, 3, 4, 5]),
        (1, 0, [9]), (2, 0, [0, 9]), (9, 0, [0, 1, 2, 3, 4, 6, 7, 8, 9]),
    ],
)  # fmt: skip
def test_the_budget_is_kept_sinks_first_recents_next(keep: int, sinks: int, kept: list[int]) -> None:
    importance = mass(9, 8, 7, 6, 5, 0, 4, 3, 2, 1)
    found = evict.plan(Mass(sinks), 10, keep, importance)
    assert found is not None and found.tolist() == kept


def test_ties_go_to_the_lower_index() -> None:
    assert evict.kept_by_mass(np.zeros(9, np.float32), 5, 1, 2).tolist() == [0, 1, 2, 7, 8]
    assert evict.kept_by_mass(mass(0, 1, 2, 2, 1, 2, 0, 0), 4, 0, 1).tolist() == [2, 3, 5, 7]
    assert evict.kept_by_mass(mass(0.0, -0.0, 0.0, -0.0), 2, 0, 0).tolist() == [0, 1]


def test_a_nan_is_equal_to_what_stands_beside_it() -> None:
    """Nothing passes it, so the rows before it come first, and it before the heavier ones behind it."""
    assert evict.kept_by_mass(mass(1, 2, NAN, 9, 8), 3, 0, 0).tolist() == [0, 1, 2]
    assert evict.kept_by_mass(mass(NAN, NAN, 7, 9, 8), 3, 0, 0).tolist() == [0, 1, 3]
    assert evict.kept_by_mass(mass(1, INF, NAN, INF, 8), 4, 0, 0).tolist() == [0, 1, 2, 3]


_mass = st.lists(st.sampled_from([0.0, -0.0, 0.25, 1.0, 3.0, -1.0, 1e30, NAN, INF, -INF]), min_size=0, max_size=24)


@settings(deadline=None, max_examples=400)
@given(values=_mass, keep=st.integers(0, 26), sinks=st.integers(0, 9), recent=st.integers(0, 14))
def test_kept_rows_are_those_of_the_oracle(values: list[float], keep: int, sinks: int, recent: int) -> None:
    kept = evict.kept_by_mass(np.asarray(values, np.float32), keep, sinks, recent)
    assert kept.tolist() == kept_by_hand(values, keep, sinks, recent)
    assert len(kept) == min(keep, len(values))


def test_many_rows_without_nan_are_those_of_a_plain_stable_sort() -> None:
    importance = np.random.default_rng(5).integers(0, 40, 5000).astype(np.float32)
    kept = evict.plan(Mass(4), 5000, 1000, importance)
    between = sorted(range(4, 4500), key=lambda row: -float(importance[row]))[:496]
    assert kept is not None and kept.tolist() == sorted([*range(4), *between, *range(4500, 5000)])


def test_what_cannot_be_planned_is_refused() -> None:
    with pytest.raises(RecordError, match="down to -1 rows"):
        evict.plan(Recent(), 3, -1, None)
    with pytest.raises(RecordError, match=r"shape \(3,\), found none"):
        evict.plan(Mass(), 3, 2, None)
    with pytest.raises(RecordError, match=r"shape \(3,\), found shape \(2,\)"):
        evict.plan(Mass(), 3, 2, np.zeros(2, np.float32))
    with pytest.raises(RecordError, match="-1 sinks"):
        Mass(-1)
