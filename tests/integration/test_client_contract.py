"""The contract of the verbs over a socket: to a server in this process, and to a real daemon."""

from __future__ import annotations

import gc
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import warmkv
from warmkv.daemon.testing import PATIENCE_S, DaemonProcess, ServedEngine, eventually
from warmkv.kvstore.client import Client
from warmkv.kvstore.store.check import check
from warmkv.kvstore.store.engine import Engine
from warmkv.kvstore.store.options import StoreOptions
from warmkv.kvstore.testing import TOKENS, StoreContract, save
from warmkv.kvstore.testing.bounds import bounded
from warmkv.kvstore.verbs import Verbs
from warmkv.schema.identity import Identity

MIB = 1 << 20


@pytest.fixture(autouse=True)
def limit() -> Iterator[None]:
    """A test that hangs fails instead."""
    with bounded(150):
        yield


def client_of(socket: Path) -> Client:
    return warmkv.connect(socket, timeout_s=PATIENCE_S, strict=True)


class TestServedEngine(StoreContract):
    """A fresh engine for each test; when its client has left, nothing of it remains."""

    @pytest.fixture
    def opened(self, tmp_path: Path) -> Iterator[Verbs]:
        before = len(os.listdir("/proc/self/fd"))
        engine = Engine.open(StoreOptions(tmp_path / "store", warm_bytes=64 * MIB, cold_bytes=256 * MIB))
        with ServedEngine(tmp_path / "run" / "s", engine) as served:
            with client_of(served.socket) as client:
                yield client
            assert eventually(lambda: served.server.connections == 0)
            assert engine.flush(PATIENCE_S)
            assert check(engine) == []
            with engine.index.changed:
                ledger = engine.warm.ledger
                assert (ledger.reserved_bytes, ledger.leased_bytes, ledger.lent_bytes, len(engine.acquisition._leased)) == (
                    0,
                    0,
                    0,
                    0,
                )
        engine.close()
        gc.collect()
        assert len(os.listdir("/proc/self/fd")) == before


@pytest.fixture(scope="module")
def daemon() -> Iterator[DaemonProcess]:
    """One daemon for all tests of the contract: starting ninety takes a minute."""
    directory = Path(tempfile.mkdtemp(prefix="warmkv-"))
    try:
        with DaemonProcess(directory, "--warm-bytes", "64MiB", "--cold-bytes", "256MiB") as running:
            yield running
            assert "Traceback" not in running.log
            assert running.stop() == 0
    finally:
        shutil.rmtree(directory, ignore_errors=True)


class TestDaemonProcess(StoreContract):
    """A daemon in its own process, emptied before each test and looked through after it."""

    @pytest.fixture
    def opened(self, daemon: DaemonProcess) -> Iterator[Verbs]:
        with client_of(daemon.socket) as client:
            client.clear()
            yield client
        with client_of(daemon.socket) as observer:
            assert eventually(lambda: observer.stats()["leases"] == 0)
            stats: Any = observer.stats()
            assert (stats["warm"]["reserved_bytes"], stats["warm"]["leased_bytes"], stats["warm"]["lent_bytes"]) == (0, 0, 0)
            found = observer.report("verify")
            assert (found["bad"], found["problems"]) == ([], [])

    def test_stats_count(self, opened: Verbs, identity: Identity) -> None:
        """Counters are those of the daemon, not of a connection or a store file: they go on from
        the tests before, so what they grow by is compared."""
        before: Any = opened.stats()
        save(opened, identity, TOKENS)
        opened.restore(identity, TOKENS).close()
        opened.restore(identity, [99]).close()
        after: Any = opened.stats()
        grown = {name: after[name] - before[name] for name in ("entries", "hits", "misses", "saves")}
        assert grown == {"entries": 1, "hits": 1, "misses": 1, "saves": 1} and after["leases"] == 0
