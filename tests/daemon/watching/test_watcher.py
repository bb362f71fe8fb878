"""Looking: by the clock always, after a hint sooner, whatever a subject does."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from warmkv.daemon.testing import PATIENCE_S, eventually
from warmkv.daemon.watching import watcher as module
from warmkv.daemon.watching.folders import Wanted
from warmkv.daemon.watching.watcher import LATE_S, Watcher
from warmkv.daemon.watching.weight_watch import WeightWatch
from warmkv.kvstore.store import Store, StoreOptions
from warmkv.kvstore.store.engine import Engine
from warmkv.kvstore.testing import TOKENS, random_identity, save
from warmkv.schema import ids

HOUR_S = 3600.0


class Subject:
    """Counts looks and hints; fails or blocks when told."""

    def __init__(self, name: str, folder: Path | None = None) -> None:
        self.name = name
        self.looks = 0
        self.hints: list[tuple[Path, bool]] = []
        self.error: Exception | None = None
        self.blocked = False
        self._folder = folder

    def folders(self) -> Wanted:
        return {} if self._folder is None else {self._folder: None}

    def hint(self, path: Path, whole: bool) -> None:
        self.hints.append((path, whole))

    def look(self, keep_on: Callable[[], bool]) -> None:
        self.looks += 1
        if self.error is not None:
            raise self.error
        while self.blocked and keep_on():
            threading.Event().wait(0.001)


@pytest.fixture
def make() -> Iterator[Callable[..., Watcher]]:
    made: list[Watcher] = []

    def watcher(*subjects: Any, interval_s: float = HOUR_S, **options: Any) -> Watcher:
        made.append(Watcher("files", subjects, interval_s, debounce_s=0.0, **options))
        return made[-1]

    yield watcher
    for item in made:
        item.stop()


def test_a_subject_that_fails_keeps_no_other_waiting_and_is_a_problem_until_it_does_not(make: Callable[..., Watcher]) -> None:
    first, second = Subject("first"), Subject("second")
    watcher = make(first, second)
    first.error = ValueError("secret text")
    watcher.look()
    assert (first.looks, second.looks) == (1, 1)
    assert watcher.problem() == "looking at first failed with ValueError"
    first.error = None
    watcher.look()
    assert watcher.problem() == ""


def test_it_looks_at_once_then_by_the_clock_and_after_a_hint(make: Callable[..., Watcher], tmp_path: Path) -> None:
    subject = Subject("subject", tmp_path)
    watcher = make(subject)
    watcher.start()
    assert eventually(lambda: watcher.looks == 1)
    (tmp_path / "file").write_bytes(b"x")
    assert eventually(lambda: watcher.looks >= 2 and (tmp_path / "file", True) in subject.hints)
    looks = watcher.looks
    watcher.wake()
    assert eventually(lambda: watcher.looks > looks)
    hurried = make(by_clock := Subject("by clock"), interval_s=0.001)
    hurried.start()
    assert eventually(lambda: by_clock.looks > 5)


def test_stopping_gives_up_what_is_being_looked_at(make: Callable[..., Watcher]) -> None:
    blocked, behind = Subject("blocked"), Subject("behind")
    blocked.blocked = True
    watcher = make(blocked, behind)
    watcher.start()
    assert eventually(lambda: blocked.looks == 1)
    stopper = threading.Thread(target=watcher.stop)
    stopper.start()
    stopper.join(PATIENCE_S)
    assert not stopper.is_alive() and behind.looks == 0
    watcher.stop()


def test_stopping_does_not_wait_for_ever_for_a_look_that_hangs(
    make: Callable[..., Watcher], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "STOP_S", 0.01)
    gone = threading.Event()

    class FileServer(Subject):
        def look(self, keep_on: Callable[[], bool]) -> None:
            self.looks += 1
            gone.wait(PATIENCE_S)

    watcher = make(subject := FileServer("file server"))
    watcher.start()
    assert eventually(lambda: subject.looks == 1)
    watcher.stop()
    assert "did not end" in caplog.text
    gone.set()


def test_a_thread_that_is_stuck_is_a_problem(make: Callable[..., Watcher], time: Any) -> None:
    stuck = threading.Event()

    class Stuck(Subject):
        def look(self, keep_on: Callable[[], bool]) -> None:
            self.looks += 1
            stuck.wait(PATIENCE_S)

    watcher = make(subject := Stuck("stuck"), monotonic=time, interval_s=10.0)
    watcher.start()
    assert eventually(lambda: subject.looks == 1)
    time.sleep(10 + LATE_S)
    assert watcher.problem() == ""
    time.sleep(1)
    assert f"{LATE_S + 1:.0f} s later than" in watcher.problem()
    stuck.set()


def test_a_first_look_under_way_is_no_problem(make: Callable[..., Watcher]) -> None:
    begun, goes_on = threading.Event(), threading.Event()

    class Slow(Subject):
        def folders(self) -> Wanted:
            begun.set()
            goes_on.wait(PATIENCE_S)
            return {}

    watcher = make(Slow("slow"))
    watcher.start()
    assert begun.wait(PATIENCE_S) and watcher.looks == 0 and watcher.problem() == ""
    goes_on.set()
    assert eventually(lambda: watcher.looks == 1) and watcher.problem() == ""


def test_one_that_works_long_is_none(make: Callable[..., Watcher], time: Any) -> None:
    working = Subject("working")
    working.blocked = True
    watcher = make(working, monotonic=time, interval_s=10.0)
    watcher.start()
    assert eventually(lambda: working.looks == 1)
    time.sleep(10 + LATE_S + 1)
    assert eventually(lambda: watcher.problem() == "")
    working.blocked = False


def test_changed_weights_retire_within_one_poll_after_the_observer_was_killed(
    make: Callable[..., Watcher], time: Any, observers: Any, tmp_path: Path
) -> None:
    """Also when it cannot be started anew: health says so, looking goes on."""
    identity, weights = random_identity(), tmp_path / "model"
    weights.write_bytes(b"old")
    store = Store(Engine.open(StoreOptions(None, warm_bytes=1 << 24)))
    try:
        save(store, identity, TOKENS)
        watcher = make(WeightWatch(store.engine.weights), observer=observers, monotonic=time)
        store.engine.health.watch("watching", watcher.problem)
        key = ids.namespace_key(os.geteuid(), "", ids.fingerprint(identity))
        store.engine.weights.register(os.geteuid(), key, [str(weights)])
        watcher.look()
        assert store.engine.health.problems() == {}
        observers.kill()
        assert "died" in store.engine.health.problems()["watching"]
        observers.error = OSError("no more instances")
        weights.write_bytes(b"new!")
        watcher.look()
        assert store.match(identity, TOKENS).matched == 0
        assert "no more instances" in store.engine.health.problems()["watching"]
        observers.error = None
        watcher.look()
        assert store.engine.health.problems() == {}
    finally:
        store.close()
