"""Lets the modules of this folder be imported by name, and fails a target that hangs."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from warmkv.kvstore.testing.bounds import bounded

HERE = str(Path(__file__).resolve().parent)
if HERE not in sys.path:
    sys.path.append(HERE)


@pytest.fixture(autouse=True)
def limit() -> Iterator[None]:
    with bounded(300):
        yield
