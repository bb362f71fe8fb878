"""Lengths in transactions: the cases of their source, and what it leaves open."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from warmkv.kvstore.live.transaction import LAST_GENERATION, Transaction, TransactionState
from warmkv.schema.errors import CapacityExceeded, LiveError, RecordError, TransactionError

CAPACITY = 8


def begun(state: TransactionState) -> tuple[TransactionState, Transaction]:
    state = state.begun()
    assert state.active is not None
    return state, state.active


def staged(state: TransactionState, transaction: Transaction, count: int) -> TransactionState:
    return state.appended(transaction, state.append_target(transaction, count, CAPACITY))


def test_a_partial_commit_publishes_the_accepted_prefix_only() -> None:
    state, transaction = begun(TransactionState())
    state = staged(state, transaction, 3)
    assert (state.committed, state.staged) == (0, 3)
    state = state.finished(transaction, state.commit_target(transaction, 2))
    assert (state.committed, state.staged, state.active) == (2, 2, None)
    with pytest.raises(TransactionError):
        state.check(transaction)


def test_a_rollback_restores_the_committed_length() -> None:
    state, first = begun(TransactionState())
    state = staged(state, first, 1)
    state = state.finished(first, state.commit_target(first, 1))
    state, draft = begun(state)
    state = staged(state, draft, 2)
    assert (state.committed, state.staged) == (1, 3)
    state = state.finished(draft, draft.base)
    assert (state.committed, state.staged) == (1, 1)
    assert (first.generation, draft.generation) == (1, 2)
    with pytest.raises(TransactionError):
        state.check(draft)


def test_nested_stale_and_out_of_range_actions_are_refused() -> None:
    state, transaction = begun(TransactionState())
    with pytest.raises(TransactionError):
        state.begun()
    with pytest.raises(RecordError):
        state.append_target(transaction, 0, 2)
    with pytest.raises(CapacityExceeded):
        state.append_target(transaction, 3, 2)
    state = state.appended(transaction, state.append_target(transaction, 2, 2))
    with pytest.raises(TransactionError):
        state.commit_target(transaction, 3)
    for target in (1, 2):
        with pytest.raises(TransactionError):
            state.appended(transaction, target)
    state = state.finished(transaction, 0)
    for act in (lambda: state.appended(transaction, 1), lambda: state.finished(transaction, 0)):
        with pytest.raises(TransactionError):
            act()


def test_an_end_outside_the_transaction_is_refused() -> None:
    state, first = begun(TransactionState().hydrated(3))
    state = staged(state, first, 2)
    for target in (2, 6):
        with pytest.raises(TransactionError):
            state.finished(first, target)
    with pytest.raises(RecordError):
        state.commit_target(first, -1)
    assert [state.finished(first, target).committed for target in (3, 4, 5)] == [3, 4, 5]


def test_a_rewind_ends_the_open_transaction() -> None:
    state, transaction = begun(TransactionState())
    state = staged(state, transaction, 3)
    back = state.rewound(1)
    assert (back.committed, back.staged, back.active) == (1, 1, None)
    with pytest.raises(TransactionError):
        back.check(transaction)
    with pytest.raises(TransactionError):
        back.rewound(2)
    with pytest.raises(RecordError):
        back.rewound(-1)
    assert back.begun().active == Transaction(2, 1)


def test_a_transaction_of_another_base_or_number_is_refused() -> None:
    state, transaction = begun(TransactionState().hydrated(5))
    for other in (replace(transaction, base=4), replace(transaction, generation=7)):
        for act in (state.check, lambda t: state.append_target(t, 1, 8), lambda t: state.commit_target(t, 0)):
            with pytest.raises(TransactionError):
                act(other)
    moved = replace(state, committed=4)
    with pytest.raises(TransactionError):
        moved.check(transaction)


def test_half_committed_states_and_used_up_generations_do_not_begin() -> None:
    with pytest.raises(TransactionError):
        TransactionState(committed=2, staged=3).begun()
    assert TransactionState(next_generation=LAST_GENERATION - 1).begun().next_generation == LAST_GENERATION
    with pytest.raises(TransactionError):
        TransactionState(next_generation=LAST_GENERATION).begun()


def test_only_a_fresh_state_is_hydrated() -> None:
    assert TransactionState().hydrated(7) == TransactionState(7, 7)
    used, transaction = begun(TransactionState())
    for state in (TransactionState().hydrated(0).hydrated(1), used, used.finished(transaction, 0)):
        with pytest.raises(TransactionError):
            state.hydrated(3)


Move = st.tuples(st.sampled_from(["begin", "append", "finish", "rewind"]), st.integers(-1, 10), st.booleans())


@given(moves=st.lists(Move, max_size=60))
@settings(deadline=None, max_examples=150)
def test_any_sequence_of_actions_keeps_lengths_in_order_and_generations_apart(moves: list[tuple[str, int, bool]]) -> None:
    state, used = TransactionState(), [Transaction(0, 0)]
    for name, number, stale in moves:
        before, transaction = state, used[0 if stale else -1]
        try:
            if name == "begin":
                state, opened = begun(state)
                assert opened.generation not in {found.generation for found in used}
                used.append(opened)
            elif name == "append":
                state = staged(state, transaction, number)
            elif name == "finish":
                state = state.finished(transaction, state.commit_target(transaction, number))
            else:
                state = state.rewound(number)
        except (LiveError, RecordError):
            assert state is before
        assert 0 <= state.committed <= state.staged <= CAPACITY
        assert state.active in (None, used[-1])
        assert state.active is not None or state.quiescent
