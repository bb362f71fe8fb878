"""Looking at what a store holds of a prompt: all of it, less, or anything wrong."""

from __future__ import annotations

from fault_script import STRANGER, Prompt

from warmkv.kvstore.store import Store
from warmkv.kvstore.testing import assert_rows, assert_states, model_rows, model_states


def look(store: Store, prompt: Prompt, ids: tuple[int, ...] = (), *, verify: bool = False) -> bool:
    """Whether all of a prompt is held; AssertionError for any byte that is not its own, which are
    those of ``ids`` where these are given."""
    ids = ids or prompt.ids
    with store.restore(prompt.identity, [*prompt.ids, STRANGER], verify=verify) as restored:
        if restored:
            assert restored.usable <= len(prompt.ids)
            assert_rows(restored, model_rows(prompt.identity, ids))
            assert_states(restored, model_states(prompt.identity, ids[: restored.usable]))
        return restored.usable == len(prompt.ids)


def demote(store: Store) -> None:
    """Leave everything on disk alone, so that the next to ask has it promoted and packed."""
    assert store.flush(60)
    with store.engine.index.changed:
        for record in sorted(store.engine.index.warm_order, key=lambda record: -record.start):
            store.engine.warm.evict(record)
    store.engine.warm.reap()
