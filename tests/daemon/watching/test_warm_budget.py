"""The warm budget and the limit of the control group, which moves."""

from __future__ import annotations

import pytest

from warmkv.daemon.watching.warm_budget import WarmBudget


class Group:
    """A control group with a limit, and the budgets that were set because of it."""

    def __init__(self, configured: int | None, now: int, limit: int | None) -> None:
        self.configured = configured
        self.limit = limit
        self.budgets: list[int] = []
        self.budget = WarmBudget(
            now, lambda: self.configured, self.budgets.append, limit=lambda: self.limit, machine=lambda: 4000
        )

    def look(self) -> list[int]:
        """What is set by looking twice."""
        self.budgets.clear()
        self.budget.look(lambda: True)
        self.budget.look(lambda: True)
        return list(self.budgets)


def test_an_automatic_budget_follows_the_limit_down_and_up() -> None:
    group = Group(None, 1000, None)
    assert group.look() == []
    group.limit = 800
    assert group.look() == [200]
    group.limit = 400
    assert group.look() == [100]
    group.limit = None
    assert group.look() == [1000]


def test_a_configured_budget_gives_way_to_a_limit_and_comes_back(caplog: pytest.LogCaptureFixture) -> None:
    group = Group(900, 900, 2000)
    assert group.look() == [] and not caplog.records
    group.limit = 800
    assert group.look() == [600]
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "900" in caplog.text and "800" in caplog.text
    group.limit = 2000
    assert group.look() == [900]


def test_a_budget_above_the_limit_is_warned_of_at_the_start(caplog: pytest.LogCaptureFixture) -> None:
    assert Group(1024, 1024, 512).look() == [384]
    assert len(caplog.records) == 1


def test_another_setting_takes_the_place_of_the_first() -> None:
    group = Group(900, 900, 2000)
    group.configured = 50
    assert group.look() == [50]
    group.configured = None
    assert group.look() == [500]
