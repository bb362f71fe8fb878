"""A clock that tests set, an observer they kill, and what a process must hold again at the end."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from watchdog.observers import Observer
from watchdog.observers.api import BaseObserver

from warmkv.daemon.testing import eventually
from warmkv.kvstore.testing.bounds import bounded


class FakeTime:
    """Seconds that pass when told."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def time() -> FakeTime:
    return FakeTime()


class Observers:
    """Makes real observers and remembers them; or refuses, with ``error``."""

    def __init__(self) -> None:
        self.made: list[BaseObserver] = []
        self.error: OSError | None = None

    def __call__(self) -> BaseObserver:
        if self.error is not None:
            raise self.error
        self.made.append(Observer())
        return self.made[-1]

    def kill(self) -> None:
        """End the newest one behind its owner's back."""
        self.made[-1].stop()
        self.made[-1].join()


@pytest.fixture
def observers() -> Observers:
    return Observers()


def inotify_watches() -> int:
    """Directories and files this process has the kernel observe."""
    count = 0
    for name in os.listdir("/proc/self/fdinfo"):
        try:
            count += Path("/proc/self/fdinfo", name).read_text().count("inotify wd:")
        except FileNotFoundError:
            pass  # the listing's own
    return count


@pytest.fixture(autouse=True)
def flat() -> Iterator[None]:
    """Threads, descriptors and watches of the kernel are as before when a test is over."""
    held: Callable[[], tuple[int, int, int]] = lambda: (  # noqa: E731
        threading.active_count(),
        len(os.listdir("/proc/self/fd")),
        inotify_watches(),
    )
    before = held()
    with bounded(100):
        yield
    assert eventually(lambda: held() == before, 5), (before, held(), threading.enumerate())
