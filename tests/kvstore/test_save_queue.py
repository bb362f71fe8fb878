"""The queue behind save_async: in order, bounded, never in the way."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, Future

import pytest

from warmkv.kvstore.results import Saved
from warmkv.kvstore.save_queue import SaveQueue

#: Longer than anything here takes; only a hang reaches it.
PATIENCE_S = 60.0


def saved(number: int = 0) -> Saved:
    return Saved(True, held=number)


class Gate:
    """A job that says when it runs and ends when it may."""

    def __init__(self) -> None:
        self.running, self.open = threading.Event(), threading.Event()

    def __call__(self) -> Saved:
        self.running.set()
        assert self.open.wait(PATIENCE_S)
        return saved()


@pytest.fixture
def gate() -> Iterator[Gate]:
    made = Gate()
    yield made
    made.open.set()


@pytest.fixture
def queue(gate: Gate) -> Iterator[SaveQueue]:
    """A queue of three places."""
    made = SaveQueue(3)
    yield made
    gate.open.set()
    made.close()


def occupied(queue: SaveQueue, gate: Gate) -> Future[Saved]:
    future = queue.submit(gate)
    assert gate.running.wait(PATIENCE_S)
    return future


def test_no_thread_before_the_first_job(queue: SaveQueue) -> None:
    before = threading.active_count()
    assert queue.join(0)
    assert threading.active_count() == before
    assert queue.submit(saved).result(PATIENCE_S).stored
    assert threading.active_count() == before + 1


def test_jobs_run_in_order_one_at_a_time(queue: SaveQueue, gate: Gate) -> None:
    occupied(queue, gate)
    order: list[int] = []

    def job(number: int) -> Callable[[], Saved]:
        def work() -> Saved:
            order.append(number)
            return saved(number)

        return work

    waiting = [queue.submit(job(number)) for number in (1, 2)]
    assert order == [] and not any(future.running() for future in waiting)
    gate.open.set()
    assert [future.result(PATIENCE_S).held for future in waiting] == [1, 2]
    assert order == [1, 2]


def test_full_queue_gives_up_instead_of_waiting(queue: SaveQueue, gate: Gate) -> None:
    """The running job counts: at most three sets of rows are kept alive."""
    first = occupied(queue, gate)
    waiting = [queue.submit(lambda: saved(1)) for _ in range(2)]
    refused = queue.submit(lambda: pytest.fail("it was given up"))
    assert refused.done()
    assert not refused.result(0).stored and "3 saves" in refused.result(0).reason
    assert not first.done()
    gate.open.set()
    assert all(future.result(PATIENCE_S).stored for future in [first, *waiting])
    assert queue.join(PATIENCE_S)
    assert queue.submit(saved).result(PATIENCE_S).stored


def test_queue_of_no_places_takes_nothing() -> None:
    queue = SaveQueue(0)
    assert not queue.submit(saved).result(0).stored
    queue.close()


@pytest.mark.parametrize("error", [ValueError("rows"), MemoryError(), SystemExit(3), KeyboardInterrupt()])
def test_what_a_job_raises_goes_to_its_future(queue: SaveQueue, error: BaseException) -> None:
    def fail() -> Saved:
        raise error

    future = queue.submit(fail)
    assert future.exception(PATIENCE_S) is error
    assert queue.submit(lambda: saved(5)).result(PATIENCE_S).held == 5


def test_cancelled_job_does_not_run(queue: SaveQueue, gate: Gate) -> None:
    occupied(queue, gate)
    cancelled = queue.submit(lambda: pytest.fail("it was cancelled"))
    after = queue.submit(lambda: saved(2))
    assert cancelled.cancel()
    gate.open.set()
    assert after.result(PATIENCE_S).held == 2
    with pytest.raises(CancelledError):
        cancelled.result(0)


def test_job_under_way_cannot_be_cancelled(queue: SaveQueue, gate: Gate) -> None:
    running = occupied(queue, gate)
    assert not running.cancel()
    gate.open.set()
    assert running.result(PATIENCE_S).stored


def test_join_tells_whether_all_is_done(queue: SaveQueue, gate: Gate) -> None:
    occupied(queue, gate)
    assert not queue.join(0)
    gate.open.set()
    assert queue.join(PATIENCE_S) and queue.join(None)


def test_close_runs_what_is_queued_and_ends_the_thread(queue: SaveQueue, gate: Gate) -> None:
    before = threading.active_count()
    occupied(queue, gate)
    waiting = [queue.submit(lambda n=n: saved(n)) for n in (1, 2)]  # type: ignore[misc]
    closing = threading.Thread(target=queue.close)
    closing.start()
    assert not any(future.done() for future in waiting)
    gate.open.set()
    closing.join(PATIENCE_S)
    assert not closing.is_alive()
    assert [future.result(0).held for future in waiting] == [1, 2]
    assert threading.active_count() == before


def test_closed_queue_takes_nothing(queue: SaveQueue) -> None:
    queue.submit(saved)
    queue.close()
    queue.close()
    refused = queue.submit(saved)
    assert refused.done() and not refused.result(0).stored and refused.result(0).reason


def test_close_of_an_unused_queue(queue: SaveQueue) -> None:
    before = threading.active_count()
    queue.close()
    assert threading.active_count() == before


def test_a_callback_may_close_the_queue(queue: SaveQueue, gate: Gate) -> None:
    """It runs on the queue's own thread, which cannot wait for itself."""
    closed = threading.Event()
    future = occupied(queue, gate)

    def close(_: Future[Saved]) -> None:
        queue.close()
        closed.set()

    future.add_done_callback(close)
    last = queue.submit(lambda: saved(9))
    gate.open.set()
    assert closed.wait(PATIENCE_S)
    assert last.result(PATIENCE_S).held == 9


def test_rows_are_let_go_as_soon_as_a_job_is_done(queue: SaveQueue) -> None:
    """An idle queue must not keep the last prompt's rows alive."""

    class Rows:
        pass

    def submitted() -> tuple[Future[Saved], weakref.ref[Rows]]:
        rows = Rows()
        return queue.submit(lambda: saved(bool(rows))), weakref.ref(rows)

    future, gone = submitted()
    assert future.result(PATIENCE_S).held == 1
    assert queue.join(PATIENCE_S)
    assert gone() is None


def test_many_threads_submit_at_once(gate: Gate) -> None:
    queue = SaveQueue(50)
    start = threading.Barrier(8)
    futures: list[Future[Saved]] = []

    def submit() -> None:
        start.wait(PATIENCE_S)
        for number in range(20):
            futures.append(queue.submit(lambda n=number: saved(n)))  # type: ignore[misc]

    threads = [threading.Thread(target=submit) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert len(futures) == 160
    assert queue.join(PATIENCE_S)
    results = [future.result(0) for future in futures]
    assert all(result.stored or result.reason for result in results) and sum(result.stored for result in results) >= 50
    queue.close()
