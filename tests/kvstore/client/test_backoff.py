from __future__ import annotations

import pytest

from warmkv.kvstore.client.backoff import FIRST_S, LONGEST_S, Backoff
from warmkv.schema.errors import DaemonTimeout, DaemonUnavailable


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_failure_is_repeated_inside_the_window_and_not_after_it() -> None:
    clock = Clock()
    backoff = Backoff(clock=clock)
    backoff.check()
    backoff.failed(DaemonUnavailable("gone"))
    with pytest.raises(DaemonUnavailable, match="gone"):
        backoff.check()
    clock.now += FIRST_S
    backoff.check()


def test_windows_grow_while_calls_time_out_and_not_for_an_absent_daemon() -> None:
    clock = Clock()
    backoff = Backoff(clock=clock)
    for expected in (1, 2, 4, 8, 16, 30, 30):
        backoff.failed(DaemonTimeout("slow"))
        clock.now += expected - 0.01
        with pytest.raises(DaemonTimeout):
            backoff.check()
        clock.now += 0.01
        backoff.check()
    assert LONGEST_S == 30
    backoff.failed(DaemonUnavailable("gone"))
    clock.now += FIRST_S
    backoff.check()


def test_success_closes_the_window_and_starts_over() -> None:
    clock = Clock()
    backoff = Backoff(clock=clock)
    backoff.failed(DaemonTimeout("slow"))
    backoff.failed(DaemonTimeout("slow"))
    backoff.succeeded()
    backoff.check()
    backoff.failed(DaemonTimeout("slow"))
    clock.now += FIRST_S
    backoff.check()


def test_switched_off_it_remembers_nothing() -> None:
    backoff = Backoff(enabled=False)
    backoff.failed(DaemonUnavailable("gone"))
    backoff.check()
