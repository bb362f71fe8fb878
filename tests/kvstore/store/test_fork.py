"""A store and a fork: the child is told that it has none, and can do its parent no harm."""

from __future__ import annotations

import gc
import os
import threading
import traceback
from collections.abc import Callable
from typing import Any

import pytest

from warmkv.kvstore.results import Saved
from warmkv.kvstore.save_queue import SaveQueue
from warmkv.kvstore.store import Store, open_store
from warmkv.kvstore.store.check import check
from warmkv.kvstore.testing import TOKENS, assert_rows, check_restore, model_rows, random_rows, save
from warmkv.schema import messages as m
from warmkv.schema.errors import ClosedError, StoreInUse
from warmkv.schema.identity import Identity
from warmkv.schema.records import CLEAN, as_tokens

OpenStore = Callable[..., Store]
PATIENCE_S = 60.0


def in_child(work: Callable[[], None]) -> None:
    """Run ``work`` in a forked child; fail with what it raised there."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            os.close(reading)
            threading.Timer(PATIENCE_S, os._exit, (3,)).start()
            work()
            status = 0
        except BaseException:  # noqa: BLE001 - told to the parent
            os.write(writing, traceback.format_exc().encode()[-60_000:])
        finally:
            os._exit(status)
    os.close(writing)
    told = b""
    while piece := os.read(reading, 65536):
        told += piece
    os.close(reading)
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == 0, told.decode()


def test_every_verb_of_a_childs_store_is_closed(open_store_with: OpenStore, identity: Identity) -> None:
    store = open_store_with(True)
    save(store, identity, TOKENS)
    restored = store.restore(identity, TOKENS)
    rows = random_rows(identity, 9)

    def child() -> None:
        calls: list[Callable[[], object]] = [
            lambda: store.match(identity, TOKENS), lambda: store.restore(identity, TOKENS), lambda: store.stats(),
            lambda: store.prefetch(identity, TOKENS), lambda: store.offer(identity, TOKENS), lambda: store.clear(),
            lambda: store.save(identity, TOKENS, rows), lambda: store.save_async(identity, TOKENS, rows),
            lambda: store.pin(identity, TOKENS, 1), lambda: store.unpin(identity, TOKENS), lambda: store.flush(1),
            lambda: store.forget(identity, TOKENS), lambda: store.report("verify"),
        ]  # fmt: skip
        for call in calls:
            with pytest.raises(ClosedError):
                call()
        # What was mapped before is still there to be read; ending it is the parent's business.
        assert_rows(restored, model_rows(identity, TOKENS))
        restored.close()
        store.close()
        store.engine.close()
        gc.collect()

    in_child(child)
    assert store.stats()["leases"] == 1
    assert_rows(restored, model_rows(identity, TOKENS))
    restored.close()
    check_restore(store, identity, TOKENS, 8, verify=True)


def test_sessions_below_the_verbs_are_closed_too(open_store_with: OpenStore, identity: Identity) -> None:
    store = open_store_with()
    save(store, identity, TOKENS)
    session = store.engine.session(os.getuid())
    key = session.open(identity.canonical(), "")
    query = (key, CLEAN, as_tokens(TOKENS))

    def child() -> None:
        fresh = store.engine.session(os.getuid())
        for call in (
            lambda: session.match(m.Match(*query)), lambda: session.acquire(m.Acquire(*query)),
            lambda: session.forget(m.Forget(*query)), lambda: session.clear(m.Clear(everything=True)),
            lambda: session.report(m.Report("stats")), lambda: fresh.open(identity.canonical(), ""),
        ):  # fmt: skip
            with pytest.raises(ClosedError):
                call()
        session.release([1, 2, 3])

    in_child(child)
    assert session.match(m.Match(*query)).usable == 8


def test_a_child_that_closes_the_engine_leaves_its_parents_lock(open_store_with: OpenStore, identity: Identity) -> None:
    """The lock belongs to the file both have open: a child that unlocked it would let a second
    daemon into the store, and one that closed the environment would drop its parent's readers."""
    store = open_store_with(True)
    assert save(store, identity, TOKENS, ack="disk").durable
    path = store.engine.options.path
    assert path is not None

    def child() -> None:
        store.engine.close()
        store.close()
        with pytest.raises(StoreInUse):
            open_store(path)

    for _ in range(3):
        in_child(child)
        with pytest.raises(StoreInUse):
            open_store(path)
    assert save(store, identity, [*TOKENS, 1, 2], ack="disk").durable
    assert store.report("verify")["bad"] == []
    assert check(store.engine) == []
    store.close()
    again = open_store_with(True)
    check_restore(again, identity, [*TOKENS, 1, 2, 3], 11, verify=True)


def test_a_fork_while_the_index_lock_is_held_blocks_no_child(open_store_with: OpenStore, identity: Identity) -> None:
    """It is held by a thread that the child does not have."""
    store = open_store_with()
    save(store, identity, TOKENS)
    restored = store.restore(identity, TOKENS)
    held, go_on = threading.Event(), threading.Event()

    def holding() -> None:
        with store.engine.index.changed:
            held.set()
            assert go_on.wait(PATIENCE_S)

    thread = threading.Thread(target=holding)
    thread.start()
    assert held.wait(PATIENCE_S)

    def child() -> None:
        with pytest.raises(ClosedError):
            store.match(identity, TOKENS)
        restored.close()
        store.close()
        store.engine.close()

    try:
        in_child(child)
    finally:
        go_on.set()
        thread.join(PATIENCE_S)
    restored.close()
    check_restore(store, identity, TOKENS, 8)


def test_a_flight_stays_with_the_parent(open_store_with: OpenStore, identity: Identity) -> None:
    """The child's copy of the promise ends nothing, and nobody waits in a child."""
    store = open_store_with()
    restored = store.restore(identity, TOKENS, wait_s=PATIENCE_S)
    flight = restored.flight
    assert flight is not None

    def child() -> None:
        flight.close()
        with pytest.raises(ClosedError):
            store.restore(identity, TOKENS, wait_s=PATIENCE_S)

    in_child(child)
    assert len(store.engine.acquisition.flights) == 1
    flight.close()
    assert len(store.engine.acquisition.flights) == 0


def test_queued_saves_stay_with_the_parent(
    open_store_with: OpenStore, identity: Identity, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store_with()
    begun, go_on = threading.Event(), threading.Event()
    commit = store.engine.intake.commit

    def waiting(*arguments: Any, **options: Any) -> Any:
        begun.set()
        assert go_on.wait(PATIENCE_S)
        return commit(*arguments, **options)

    monkeypatch.setattr(store.engine.intake, "commit", waiting)
    futures = [store.save_async(identity, TOKENS[:n], model_rows(identity, TOKENS[:n])) for n in (3, 6, 9)]
    assert begun.wait(PATIENCE_S)

    def child() -> None:
        with pytest.raises(ClosedError):
            store.save_async(identity, TOKENS, model_rows(identity, TOKENS))
        with pytest.raises(ClosedError):
            store.flush(0)
        store.close()  # waits for nobody
        assert not any(future.done() for future in futures)

    try:
        in_child(child)
    finally:
        go_on.set()
    assert [future.result(PATIENCE_S).held for future in futures] == [3, 6, 9]
    assert store.flush(PATIENCE_S)
    check_restore(store, identity, TOKENS, 8)


def test_a_queue_starts_anew_in_the_child() -> None:
    """The client's verbs work on after a fork: with a thread of its own and none of the jobs."""
    queue, begun, go_on = SaveQueue(2), threading.Event(), threading.Event()

    def job() -> Saved:
        begun.set()
        assert go_on.wait(PATIENCE_S)
        return Saved(True, held=1)

    first, second = queue.submit(job), queue.submit(job)
    assert begun.wait(PATIENCE_S)
    assert queue.submit(job).result(0).reason

    def child() -> None:
        assert queue.join(PATIENCE_S)
        done = [queue.submit(lambda n=n: Saved(True, held=n)) for n in range(2)]  # type: ignore[misc]
        assert [future.result(PATIENCE_S).held for future in done] == [0, 1]
        queue.close()
        assert not first.done() and not second.done()

    try:
        in_child(child)
    finally:
        go_on.set()
    assert (first.result(PATIENCE_S).held, second.result(PATIENCE_S).held) == (1, 1)
    queue.close()


def test_a_grandchild_is_no_better_off(open_store_with: OpenStore, identity: Identity) -> None:
    store = open_store_with(True)
    save(store, identity, TOKENS)

    def grandchild() -> None:
        with pytest.raises(ClosedError):
            store.match(identity, TOKENS)
        store.close()

    in_child(lambda: in_child(grandchild))
    check_restore(store, identity, TOKENS, 8)


def test_a_child_may_open_a_store_of_its_own(open_store_with: OpenStore, identity: Identity, tmp_path: Any) -> None:
    store = open_store_with(True)
    save(store, identity, TOKENS)

    def child() -> None:
        with open_store(tmp_path / "own", warm_bytes=1 << 20, cold_bytes=1 << 20) as own:
            assert not own.match(identity, TOKENS)
            assert save(own, identity, TOKENS, ack="disk").durable
            check_restore(own, identity, TOKENS, 8)

    in_child(child)
    check_restore(store, identity, TOKENS, 8)
