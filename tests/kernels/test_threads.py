"""The pool of kernel threads: every task once, errors kept in order, nothing left behind."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future

import numpy as np
import pytest

from warmkv.kernels import threads
from warmkv.kernels.attention.layer import attend_heads, attend_heads_chunk
from warmkv.kernels.dispatch import Kernels, kernels
from warmkv.kernels.errors import KernelError
from warmkv.kernels.formats import Block, RowFormat
from warmkv.kernels.quant.reference import encode
from warmkv.kernels.testing import rows


@pytest.fixture(autouse=True)
def no_threads_left() -> Iterator[None]:
    yield
    threads.close()
    assert threads.alive() == 0


@pytest.mark.parametrize("count", [0, 1, 2, 50])
@pytest.mark.parametrize("many", [1, 2, 3, 1000])
def test_every_task_is_done_once(count: int, many: int) -> None:
    done: list[int] = []
    threads.run(done.append, count, many)
    assert sorted(done) == list(range(count))


def test_one_thread_is_the_callers_own() -> None:
    seen: list[threading.Thread] = []
    threads.run(lambda index: seen.append(threading.current_thread()), 5, 1)
    assert set(seen) == {threading.current_thread()} and threads.alive() == 0


def test_threads_work_at_the_same_time_and_stay_for_the_next_call() -> None:
    together = threading.Barrier(2, timeout=20)
    threads.run(lambda index: together.wait() and None, 2, 2)
    before = threads.alive()
    threads.run(lambda index: together.wait() and None, 2, 2)
    assert before == threads.alive() == 1


def test_there_are_never_more_threads_than_the_limit() -> None:
    threads.run(lambda index: time.sleep(0.001), 3 * threads.MOST + 10, 100_000)
    assert 1 <= threads.alive() <= threads.MOST


@pytest.mark.parametrize("many", [1, 4])
def test_the_first_error_is_raised_and_no_task_begun_after_it(many: int) -> None:
    done: list[int] = []

    def task(index: int) -> None:
        if index == 3:
            raise LookupError("three")
        done.append(index)

    with pytest.raises(LookupError, match="three"):
        threads.run(task, 10_000, many)
    assert {0, 1, 2} <= set(done) and len(done) < 10_000
    threads.run(done.append, 2, many)


def test_of_two_errors_the_lower_task_counts() -> None:
    together = threading.Barrier(2, timeout=20)

    def task(index: int) -> None:
        together.wait()
        raise LookupError(str(index))

    with pytest.raises(LookupError, match="0"):
        threads.run(task, 2, 2)


def test_tasks_that_run_tasks_do_not_wait_for_each_other() -> None:
    done: list[int] = []
    threads.run(lambda outer: threads.run(lambda inner: done.append(10 * outer + inner), 10, 10), 2 * threads.MOST + 2, 1000)
    assert len(done) == 10 * (2 * threads.MOST + 2) == len(set(done))


def test_callers_on_many_threads_share_the_pool() -> None:
    done: list[int] = []
    callers = [threading.Thread(target=threads.run, args=(done.append, 200, 3)) for _ in range(6)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert sorted(done) == sorted(list(range(200)) * 6)


def test_where_no_thread_can_be_started_the_caller_works_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refused)
    done: list[int] = []
    threads.run(done.append, 20, 4)
    assert done == list(range(20))


def test_a_thread_that_was_refused_but_came_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    submit = threads._submit

    def taken_and_refused(helper: Future[None], work: threads._Work) -> None:
        submit(helper, work)
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threads, "_submit", taken_and_refused)
    begun, done = threading.Barrier(2), []

    def task(index: int) -> None:
        begun.wait(timeout=30)
        if threading.current_thread().name.startswith(threads.NAME):
            time.sleep(0.05)
        done.append(index)

    threads.run(task, 2, 2)
    assert sorted(done) == [0, 1]


def test_work_that_is_left_to_the_end_of_the_interpreter_is_done() -> None:
    program = (
        "import atexit, threading; from warmkv.kernels import threads\n"
        "def late(): done = []; threads.run(done.append, 20, 4); print(sorted(done) == list(range(20)))\n"
        "atexit.register(late)"
    )
    done = subprocess.run([sys.executable, "-c", program], env=_environment(), capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "True\n", "")


def test_no_thread_is_asked_for() -> None:
    with pytest.raises(KernelError, match="0 threads, expected at least 1"):
        threads.run(print, 3, 0)


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_child_makes_threads_of_its_own() -> None:
    threads.run(lambda index: time.sleep(0.001), 10, 2)
    child = os.fork()
    if child == 0:
        done: list[int] = []
        try:
            inherited = threads.alive()
            threads.run(done.append, 10, 2)
            threads.close()
        finally:
            os._exit(0 if inherited == 0 and sorted(done) == list(range(10)) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    threads.run(lambda index: None, 10, 2)


def test_an_interpreter_ends_with_its_pool_open() -> None:
    program = "from warmkv.kernels import threads; threads.run(lambda index: None, 20, 4); print(threads.alive())"
    done = subprocess.run([sys.executable, "-c", program], env=_environment(), capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and int(done.stdout) >= 1 and done.stderr == ""


def _environment() -> dict[str, str]:
    return os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}


@pytest.fixture(params=["reference", "fast"])
def backend(request: pytest.FixtureRequest) -> Kernels:
    if request.param == "fast":
        pytest.importorskip("numba")
    return kernels(request.param)


def layer(count: int, heads: int, format_: RowFormat) -> tuple[list[list[Block]], list[list[Block]]]:
    """Keys and values of every head, in two blocks."""
    planes = []
    for keys in (True, False):
        whole = [encode(rows(count, 24, 2 * head + keys), format_, keys=keys) for head in range(heads)]
        planes.append([[block.rows(0, count // 3), block.rows(count // 3, count)] for block in whole])
    return planes[0], planes[1]


@pytest.mark.parametrize("format_", [RowFormat.F32, RowFormat.Q8_2F])
def test_all_heads_give_the_bits_of_their_own_on_any_number_of_threads(backend: Kernels, format_: RowFormat) -> None:
    keys, values = layer(70, 3, format_)
    q, sinks = rows(6, 24, 1, 0.1), np.linspace(-3, 3, 6).astype(np.float32)
    given = {"scale": 0.2, "first": 3, "upto": 69, "softcap": 30.0}
    wanted, mass = [], np.full(70, np.float32(0.5))
    for head in range(3):
        own, mine = np.zeros(70, np.float32), slice(2 * head, 2 * head + 2)
        wanted.append(backend.attend(q[mine], keys[head], values[head], sinks=sinks[mine], importance=own, **given))
        mass += own
    for many in (1, 2, 5):
        importance = np.full(70, np.float32(0.5))
        done = attend_heads(backend, q, keys, values, sinks=sinks, importance=importance, threads=many, **given)
        assert np.array_equal(importance, mass)
        for name in ("out", "top", "total"):
            assert np.array_equal(getattr(done, name), np.concatenate([getattr(one, name) for one in wanted]))


def test_a_chunk_of_all_heads_is_its_positions(backend: Kernels) -> None:
    keys, values = layer(40, 2, RowFormat.F32)
    q = rows(5 * 4, 24, 1, 0.1).reshape(5, 4, 24)
    masses = np.zeros((2, 40), np.float32)
    for many, mass in zip((1, 2), masses, strict=True):
        done = attend_heads_chunk(backend, q, keys, values, scale=0.2, start=35, window=7, importance=mass, threads=many)
        for index in range(5):
            upto = 36 + index
            one = attend_heads(backend, q[index], keys, values, scale=0.2, first=upto - 7, upto=upto)
            np.testing.assert_allclose(done.out[index], one.out, rtol=2e-6, atol=2e-5)
            np.testing.assert_allclose(done.lse[index], one.lse, rtol=2e-6, atol=2e-6)
    assert np.array_equal(*masses) and abs(masses[0].sum() - 20) < 1e-4


def test_heads_that_do_not_fit_are_refused_and_nothing_is_observed(backend: Kernels) -> None:
    keys, values = layer(40, 2, RowFormat.F32)
    mass = np.zeros(40, np.float32)
    with pytest.raises(KernelError, match="5 query heads over 2 KV heads"):
        attend_heads(backend, rows(5, 24, 1), keys, values, scale=1.0, importance=mass)
    with pytest.raises(KernelError, match=r"sink logits of shape \(2,\) for 4 heads"):
        attend_heads(backend, rows(4, 24, 1), keys, values, scale=1.0, sinks=np.zeros(2, np.float32), importance=mass)
    with pytest.raises(KernelError, match="importance is float32 of"):
        attend_heads(backend, rows(4, 24, 1), keys, values, scale=1.0, importance=mass[:39])
    with pytest.raises(KernelError, match="40 rows of keys, 27 of values"):
        attend_heads(backend, rows(4, 24, 1), keys, [values[0], values[1][1:]], scale=1.0, importance=mass)
    with pytest.raises(KernelError, match="KV heads of 40 and of 27 rows"):
        attend_heads(backend, rows(4, 24, 1), [keys[0], keys[1][1:]], [values[0], values[1][1:]], scale=1.0, importance=mass)
    with pytest.raises(KernelError, match="expected .tokens, heads, size."):
        attend_heads_chunk(backend, rows(4, 24, 1), keys, values, scale=1.0, start=0)
    assert not mass.any()
