"""Fixtures of the integration tests: real daemons in processes of their own."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from warmkv.daemon.testing import DaemonProcess

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def served() -> Iterator[DaemonProcess]:
    """A running daemon; the test may stop, kill and start it again."""
    directory = Path(tempfile.mkdtemp(prefix="warmkv-"))
    daemon = DaemonProcess(directory).start()
    try:
        yield daemon
    finally:
        daemon.kill()
        shutil.rmtree(directory, ignore_errors=True)


@pytest.fixture(scope="session")
def model_dir() -> Path:
    """The converted SmolLM2 of `make model`; WARMKV_TEST_MODEL names another folder."""
    path = Path(os.environ.get("WARMKV_TEST_MODEL", ROOT / ".demo" / "model"))
    if not (path / "config.json").exists():
        pytest.fail(f"no model in {path}: run `make model` (`make test` does)")
    return path
