from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from warmkv.daemon.notify import Notifier
from warmkv.daemon.services import Repeating, StatusText, running
from warmkv.daemon.testing import eventually
from warmkv.daemon.testing_manager import ServiceManager
from warmkv.kvstore.store.engine import Engine


class Told:
    """A service that writes down what is asked of it, and fails where it is told to."""

    def __init__(self, name: str, log: list[str], fails: str = "") -> None:
        self.name, self.log, self.fails = name, log, fails

    def start(self) -> None:
        self._do("start")

    def stop(self) -> None:
        self._do("stop")

    def _do(self, what: str) -> None:
        self.log.append(f"{what} {self.name}")
        if self.fails == what:
            raise RuntimeError(what)


def test_services_stop_in_reverse_whatever_the_others_do() -> None:
    log: list[str] = []
    with running([Told("a", log), Told("b", log, "stop"), Told("c", log)]):
        log.append("run")
    assert log == ["start a", "start b", "start c", "run", "stop c", "stop b", "stop a"]


def test_where_one_does_not_start_those_before_it_are_stopped() -> None:
    log: list[str] = []
    with pytest.raises(RuntimeError, match="start"), running([Told("a", log), Told("b", log, "start"), Told("c", log)]):
        log.append("run")
    assert log == ["start a", "start b", "stop b", "stop a"]


def test_what_ends_the_run_is_not_hidden_by_a_service_that_fails_to_stop() -> None:
    with pytest.raises(KeyError), running([Told("a", [], "stop")]):
        raise KeyError


def test_a_step_is_taken_when_asked_and_again_after_it_failed() -> None:
    steps: list[int] = []

    def step() -> None:
        steps.append(len(steps))
        if len(steps) == 1:
            raise ZeroDivisionError

    before = threading.active_count()
    service = Repeating("test", step)
    service.start()
    service.ask()
    assert eventually(lambda: len(steps) == 1)
    service.ask()
    assert eventually(lambda: len(steps) == 2)
    service.stop()
    service.stop()
    assert len(steps) == 2 and threading.active_count() == before
    Repeating("never started", step).stop()


def test_asking_may_be_interrupted_by_asking() -> None:
    """As a signal handler does that runs between any two lines, also those of the library."""
    service = Repeating("test", lambda: None)
    asked = threading.Event()

    def ask() -> None:
        for line in range(12):
            seen = iter(range(line))

            def at_line(frame: FrameType, event: str, arg: object, seen: Iterator[int] = seen) -> Callable[..., Any]:
                if event == "line" and next(seen, None) is None:
                    sys.settrace(None)
                    service.ask()
                return at_line

            sys.settrace(at_line)
            service.ask()
            sys.settrace(None)
        asked.set()

    threading.Thread(target=ask, daemon=True).start()
    assert asked.wait(20)


def test_a_step_is_taken_again_and_again() -> None:
    steps = threading.Semaphore(0)
    service = Repeating("test", steps.release, 0.001)
    service.start()
    for _ in range(5):
        assert steps.acquire(timeout=20)
    service.stop()


def test_the_status_names_what_is_wrong_and_is_told_when_it_changed(tmp_path: Path, engine: Engine) -> None:
    connections, problem = 3, ""
    engine.health.watch("tea", lambda: problem)
    with ServiceManager(tmp_path / "m") as manager:
        tell = StatusText(Notifier(manager.address), engine, lambda: connections)
        tell()
        tell()
        problem = "the kettle is cold"
        tell()
        assert manager.hears("STATUS", 2)
        first, second = manager.told("STATUS")
    assert first == "0 records, 0 B in memory, 0 B on disk, 3 connections; no problems"
    assert second.endswith("; tea: the kettle is cold")
