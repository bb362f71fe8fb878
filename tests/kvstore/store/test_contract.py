"""The contract over the embedded store: without and with a cold tier."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from warmkv.kvstore.store import Store, open_store
from warmkv.kvstore.store.check import check
from warmkv.kvstore.testing import StoreContract

MIB = 1 << 20


def _checked(store: Store) -> Iterator[Store]:
    with store:
        yield store
        if store.engine.serving:
            store.flush()
            assert check(store.engine) == []


class TestWarm(StoreContract):
    cold = False

    @pytest.fixture
    def opened(self) -> Iterator[Store]:
        yield from _checked(open_store(warm_bytes=64 * MIB))


class TestWarmAndCold(StoreContract):
    @pytest.fixture
    def opened(self, tmp_path: Path) -> Iterator[Store]:
        yield from _checked(open_store(tmp_path / "store", warm_bytes=64 * MIB, cold_bytes=256 * MIB))
