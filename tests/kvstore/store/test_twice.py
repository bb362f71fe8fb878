"""Several clients that save the same thing at once store it once."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from warmkv.kvstore.store import Store
from warmkv.kvstore.store.index import Record
from warmkv.kvstore.testing import check_restore, mixed_identity, random_identity, save
from warmkv.kvstore.testing.samples import layer_of, sliding
from warmkv.schema import messages as m
from warmkv.schema.identity import Identity, LayerKind

OpenStore = Callable[..., Store]
SYSTEM = list(range(1, 401))
MODELS = {
    "full": random_identity(layers=1, heads=1, dim=256),
    "hybrid": mixed_identity(layer_of(LayerKind.FULL), layer_of(LayerKind.RECURRENT)),
    "windowed": mixed_identity(layer_of(LayerKind.FULL), sliding(16)),
}


def agents(store: Store, identity: Identity, prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch) -> None:
    """Save all at once: each has its offer's answer before anybody commits."""
    gate = threading.Barrier(len(prompts))
    waited = threading.local()
    offer = store._session.offer

    def offering(request: m.Offer) -> m.Offered:
        answer = offer(request)
        if not getattr(waited, "once", False):
            waited.once = True
            gate.wait(30)
        return answer

    monkeypatch.setattr(store._session, "offer", offering)
    failed: list[object] = []

    def run(ids: list[int]) -> None:
        try:
            assert save(store, identity, ids).stored
        except BaseException as exc:  # noqa: BLE001
            failed.append(exc)

    threads = [threading.Thread(target=run, args=(ids,)) for ids in prompts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    monkeypatch.undo()
    assert not failed


@pytest.mark.parametrize("model", sorted(MODELS))
def test_the_same_prompt_is_stored_once(open_store_with: OpenStore, monkeypatch: pytest.MonkeyPatch, model: str) -> None:
    identity = MODELS[model]
    alone = open_store_with()
    save(alone, identity, SYSTEM)
    together = open_store_with()
    agents(together, identity, [SYSTEM] * 6, monkeypatch)
    assert _bytes(together) == _bytes(alone)
    check_restore(together, identity, [*SYSTEM, 9], 400)


@pytest.mark.parametrize("model", sorted(MODELS))
def test_a_shared_beginning_is_stored_once_beside_different_ends(
    open_store_with: OpenStore, monkeypatch: pytest.MonkeyPatch, model: str
) -> None:
    identity = MODELS[model]
    prompts = [[*SYSTEM, *range(1000 * number, 1000 * number + 20)] for number in range(1, 7)]
    one_by_one = open_store_with()
    for ids in prompts:
        save(one_by_one, identity, ids)
    together = open_store_with()
    agents(together, identity, prompts, monkeypatch)
    assert _bytes(together) <= _bytes(one_by_one) * 1.02
    for ids in prompts:
        check_restore(together, identity, [*ids, 9], len(ids))


def test_a_few_common_tokens_are_no_reason_for_another_round(open_store_with: OpenStore, monkeypatch: pytest.MonkeyPatch) -> None:
    identity = MODELS["full"]
    store = open_store_with()
    agents(store, identity, [[1, *range(100 * n, 100 * n + 60)] for n in range(1, 4)], monkeypatch)
    assert store.stats()["saves"] == 3


def test_a_duplicate_is_durable_once_all_that_holds_its_rows_is(
    open_store_with: OpenStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between offer and commit others save the same: the rows as part of a longer prompt, and beside
    them those of the window where this one ends."""
    identity, store = MODELS["windowed"], open_store_with(True)
    session, writer = store._session, store.engine.writer
    assert writer is not None
    offer, commit, wait = session.offer, session.commit, writer.wait_durable
    waited: list[int] = []

    def others_first(request: m.Offer) -> m.Offered:
        answer = offer(request)
        with monkeypatch.context() as patch:
            patch.setattr(session, "offer", offer)
            patch.setattr(session, "commit", commit)
            save(store, identity, SYSTEM)
            save(store, identity, SYSTEM[:200])
        waited.clear()
        return answer

    def commit_to_disk(request: m.Commit, fd: int) -> m.Committed:
        done = commit(replace(request, ack=m.ACK_DISK), fd)
        assert done.duplicate and sorted(waited) == [200, 400]
        return done

    def noting(record: Record, timeout_s: float) -> None:
        waited.append(record.end)
        wait(record, timeout_s)

    monkeypatch.setattr(session, "offer", others_first)
    monkeypatch.setattr(session, "commit", commit_to_disk)
    monkeypatch.setattr(writer, "wait_durable", noting)
    assert save(store, identity, SYSTEM[:200]).stored
    assert waited, "it came to a commit"


def _bytes(store: Store) -> int:
    warm: Any = store.stats()["warm"]
    return int(warm["bytes"])
