"""Stores with their budgets spelled out, checked against every invariant when they close."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from warmkv.kvstore.store import Store, StoreOptions
from warmkv.kvstore.store.check import check
from warmkv.kvstore.store.engine import Engine
from warmkv.kvstore.testing import random_identity
from warmkv.kvstore.testing.bounds import bounded
from warmkv.schema.identity import Identity

settings.register_profile("warmkv", deadline=None)
settings.load_profile("warmkv")

OpenStore = Callable[..., Store]
MIB = 1 << 20


@pytest.fixture
def identity() -> Identity:
    return random_identity()


@pytest.fixture
def wide() -> Identity:
    """One layer, 2 KiB a token: 100 tokens are about 200 KiB."""
    return random_identity(layers=1, heads=1, dim=256)


@pytest.fixture
def open_store_with(tmp_path: Path) -> Iterator[OpenStore]:
    """Open a store by `StoreOptions`; without ``path`` it has no cold tier. ``path=True`` is a
    directory of this test. What is still open at the end is checked and closed."""
    opened: list[Store] = []

    def make(path: Path | bool | None = None, **options: Any) -> Store:
        where = tmp_path / "store" if path is True else path or None
        store = Store(Engine.open(StoreOptions(where, **{"warm_bytes": 64 * MIB, "cold_bytes": 256 * MIB, **options})))
        opened.append(store)
        return store

    yield make
    for store in opened:
        if store.engine.serving:
            problems = check(store.engine)
            store.close()
            assert problems == []


@pytest.fixture
def descriptors() -> Callable[[], int]:
    """Counts this process's open descriptors."""
    return lambda: len(os.listdir("/proc/self/fd"))


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 48 MiB of its own."""
    mount = tmp_path / "disk"
    mount.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=48m", "tmpfs", str(mount)]
    try:
        mounted = os.geteuid() == 0 and subprocess.run(command, capture_output=True).returncode == 0
    except OSError:
        mounted = False
    if not mounted:
        pytest.skip("cannot mount a file system")
    yield mount
    subprocess.run(["umount", "-l", str(mount)], check=True)


@pytest.fixture(autouse=True)
def limit() -> Iterator[None]:
    """A test that hangs fails instead."""
    with bounded(150):
        yield
