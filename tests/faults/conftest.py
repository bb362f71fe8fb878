"""What proofs of survival share. The long ones carry the marker ``faults``: `make faults` runs
them, a plain test run only their short samples."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

# The modules beside this one are also programs, and are found by their plain names.
sys.path.insert(0, str(Path(__file__).parent))

from fault_nursery import Nursery  # noqa: E402

from warmkv.kvstore.testing.bounds import bounded  # noqa: E402


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what takes minutes unless the marker is asked for."""
    if "faults" in config.option.markexpr:
        return
    long = [item for item in items if item.get_closest_marker("faults")]
    if long:
        items[:] = [item for item in items if item not in long]
        config.hook.pytest_deselected(items=long)


@pytest.fixture(autouse=True)
def limit(request: pytest.FixtureRequest) -> Iterator[None]:
    """A test that hangs fails instead."""
    with bounded(6000 if request.node.get_closest_marker("faults") else 400):
        yield


@pytest.fixture
def fast_folder() -> Iterator[Path]:
    """A folder in memory where there is one: a killed process leaves its writes in the page cache,
    whatever lies behind it."""
    shared = Path("/dev/shm")
    usable = shared.is_dir() and os.access(shared, os.W_OK) and shutil.disk_usage(shared).free > 1 << 30
    where = Path(tempfile.mkdtemp(prefix="warmkv-faults-", dir=shared if usable else None))
    yield where
    shutil.rmtree(where)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 12 MiB of its own."""
    mount = tmp_path / "disk"
    mount.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=12m", "tmpfs", str(mount)]
    try:
        mounted = os.geteuid() == 0 and subprocess.run(command, capture_output=True).returncode == 0
    except OSError:
        mounted = False
    if not mounted:
        pytest.skip("a file system of its own needs root and the permission to mount")
    yield mount
    subprocess.run(["umount", "-l", str(mount)], check=True)


@pytest.fixture
def nursery() -> Iterator[Nursery]:
    made = Nursery()
    yield made
    made.close()


@pytest.fixture
def say(capsys: pytest.CaptureFixture[str]) -> Iterator[Callable[[str], None]]:
    """Prints a line of progress now and then, whatever is captured, and the last one."""
    last, since = "", 0.0

    def line(text: str) -> None:
        nonlocal last, since
        last = text
        if time.monotonic() - since > 5:
            since = time.monotonic()
            with capsys.disabled():
                print(f"\n  {text}", end="", flush=True)

    yield line
    with capsys.disabled():
        print(f"\n  {last}", flush=True)
