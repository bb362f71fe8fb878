"""What is logged: one record is one record, whatever was in it."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from warmkv.daemon import logs

ESCAPED = r"\x0d\x1b[2J\u2028y\x85"


@contextmanager
def configured() -> Iterator[logging.Logger]:
    """The root of our loggers as a daemon has it, and afterwards as it was."""
    root = logging.getLogger("warmkv")
    before = root.handlers[:], root.level, root.propagate
    logs.configure("info")
    try:
        yield root
    finally:
        root.handlers[:], root.level, root.propagate = before


def test_a_name_in_a_message_begins_no_other_record(capsys: pytest.CaptureFixture[str]) -> None:
    forged = "x\n2026-01-01T00:00:00.000Z ERROR warmkv: all is lost\r\x1b[2J\u2028y\x85"
    with configured() as log:
        log.info("%s was imported", forged)
    said = capsys.readouterr().err
    first, second = said.removesuffix("\n").split("\n")
    assert first.endswith("INFO warmkv: x") and second == f"  {forged.splitlines()[1]}{ESCAPED} was imported"
    assert said.isascii() and said.replace("\n", "").isprintable()


def test_a_defect_tells_where_and_not_what(capsys: pytest.CaptureFixture[str]) -> None:
    with configured() as log:
        try:
            raise ValueError("it was said")
        except ValueError as exc:
            logs.defect(log, "testing", exc)
    said = capsys.readouterr().err
    assert "testing failed with ValueError\n" in said and "test_logs.py" in said
    assert not [line for line in said.splitlines()[1:] if not line.startswith("  ")]


def test_what_happens_often_is_said_seldom(caplog: pytest.LogCaptureFixture) -> None:
    now = 100.0
    seldom = logs.Seldom(logging.getLogger("warmkv.often"), 2.0, lambda: now)
    for at in (100.0, 100.5, 101.9, 102.0, 103.0, 110.0, 112.0):
        now = at
        seldom.warning("at %.1f", at)
    more = " (and {} more since the last one)"
    assert caplog.messages == ["at 100.0", "at 102.0" + more.format(2), "at 110.0" + more.format(1), "at 112.0"]
