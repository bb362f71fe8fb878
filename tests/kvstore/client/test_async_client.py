from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from warmkv import AsyncClient
from warmkv.daemon.testing import PATIENCE_S, ServedEngine, eventually
from warmkv.kvstore.rows import LayerRows
from warmkv.kvstore.store.engine import Engine
from warmkv.kvstore.verbs import Verbs
from warmkv.schema import errors
from warmkv.schema import messages as m
from warmkv.schema.identity import Identity

Rows = Callable[[int], list[LayerRows]]
TOKENS = list(range(20))
QUERY = [*TOKENS, 99]


def test_the_verbs_are_those_of_the_client() -> None:
    verbs = {name for name in vars(Verbs) if not name.startswith("_")}
    assert verbs <= set(dir(AsyncClient))


def test_every_verb_as_a_coroutine(served: ServedEngine, identity: Identity, rows: Rows) -> None:
    async def story() -> None:
        async with await AsyncClient.connect(served.socket, strict=True) as client:
            assert (await client.save(identity, TOKENS, rows(20))).stored
            assert (await client.save_async(identity, [1, 2, 3], rows(3))).stored
            assert await client.flush(PATIENCE_S)
            assert (await client.match(identity, QUERY)).usable == 20
            assert (await client.prefetch(identity, QUERY)).usable == 20
            assert (await client.offer(identity, QUERY)).held == 20
            with await client.restore(identity, QUERY, verify=True) as restored:
                assert restored.usable == 20
            many = await asyncio.gather(*(client.match(identity, QUERY) for _ in range(50)))
            assert all(match.usable == 20 for match in many)
            assert await client.pin(identity, TOKENS, 9) == 20
            assert await client.unpin(identity, TOKENS) == 20
            assert (await client.forget(identity, TOKENS)).records == 1
            assert (await client.clear()).records == 1
            assert (await client.stats())["entries"] == 0
            assert "epoch" in await client.report("status")
        with pytest.raises((errors.ClosedError, RuntimeError)):
            await client.match(identity, QUERY)

    asyncio.run(story())


def test_an_absent_daemon_is_a_miss(socket_path: Path, identity: Identity) -> None:
    async def story() -> None:
        async with await AsyncClient.connect(socket_path) as client:
            assert "no daemon" in (await client.match(identity, QUERY)).reason
        with pytest.raises(errors.DaemonUnavailable):
            await AsyncClient.connect(socket_path, strict=True)

    asyncio.run(story())


def test_the_loop_runs_while_the_daemon_thinks(scripted: Any, socket_path: Path, identity: Identity) -> None:
    go_on = threading.Event()

    def script(line: Any) -> None:
        line.greet()
        line.hear()
        line.say(m.Opened(bytes(16)))
        line.hear()
        assert go_on.wait(PATIENCE_S)
        line.say(m.Matched(usable=3))
        line.hear()

    async def story() -> None:
        async with await AsyncClient.connect(socket_path, timeout_s=PATIENCE_S) as client:
            asking = asyncio.ensure_future(client.match(identity, QUERY))
            await asyncio.sleep(0)
            assert not asking.done()
            go_on.set()  # set by the loop's own thread: it was not blocked
            assert (await asking).usable == 3

    with scripted(script):
        asyncio.run(story())


def test_a_cancelled_restore_keeps_no_lease(served: ServedEngine, engine: Engine, identity: Identity, rows: Rows) -> None:
    async def story() -> None:
        async with await AsyncClient.connect(served.socket, strict=True) as client:
            await client.save(identity, TOKENS, rows(20))
            for _ in range(20):
                asking = asyncio.ensure_future(client.restore(identity, QUERY))
                await asyncio.sleep(0)
                asking.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await asking
            await client.match(identity, QUERY)

    asyncio.run(story())
    assert eventually(lambda: all(not record.leases for record in engine.index.records.values()))
