"""The same verbs as coroutines: blocking calls on a few threads of their own.

A call takes tens of microseconds and carries descriptors, which asyncio's transports do not;
threads are as fast and keep one implementation.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import TracebackType
from typing import TypeVar

from warmkv.kvstore.client.client import Client, connect
from warmkv.kvstore.restored import Restored
from warmkv.kvstore.results import Forgotten, Match, Offer, Saved
from warmkv.kvstore.rows import Array
from warmkv.kvstore.verbs import Ack, At, Records
from warmkv.schema.identity import Identity
from warmkv.schema.records import CLEAN, Anchor, Attachment, Lineage, TokensLike

T = TypeVar("T")
THREADS = 4


class AsyncClient:
    """A `Client` for coroutines; see its verbs for their meaning.

    A cancelled call runs to its end on its thread and its result is dropped: a lease it got
    ends with it. Use as ``async with await AsyncClient.connect(): ...``."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._pid = os.getpid()
        self._executor = ThreadPoolExecutor(THREADS, "warmkv-async")

    @classmethod
    async def connect(
        cls, path: str | os.PathLike[str] | None = None, *, timeout_s: float = 5.0, strict: bool = False, share: str = ""
    ) -> AsyncClient:
        """`warmkv.connect` without blocking the event loop."""
        opening = partial(connect, path, timeout_s=timeout_s, strict=strict, share=share)
        return cls(await asyncio.to_thread(opening))

    async def match(
        self, identity: Identity, ids: TokensLike, *, attachments: Iterable[Attachment] = (), lineage: Lineage = CLEAN,
        at: At = "longest", logits: bool = False, detail: bool = False, prefill_tps: float = 0.0,
    ) -> Match:  # fmt: skip
        call = partial(self._client.match, identity, ids, attachments=attachments, lineage=lineage, at=at)
        return await self._run(partial(call, logits=logits, detail=detail, prefill_tps=prefill_tps))

    async def restore(
        self, target: Match | Identity, ids: TokensLike, *, attachments: Iterable[Attachment] = (), lineage: Lineage = CLEAN,
        at: At = "longest", verify: bool = False, writable: bool = False, logits: bool = False, prefill_tps: float = 0.0,
        wait_s: float = 0.0,
    ) -> Restored:  # fmt: skip
        """`Client.restore`. One that waits for others occupies one of the client's threads."""
        call = partial(self._client.restore, target, ids, attachments=attachments, lineage=lineage, at=at, verify=verify)
        return await self._run(partial(call, writable=writable, logits=logits, prefill_tps=prefill_tps, wait_s=wait_s))

    async def prefetch(
        self, identity: Identity, ids: TokensLike, *, attachments: Iterable[Attachment] = (), lineage: Lineage = CLEAN
    ) -> Match:
        return await self._run(partial(self._client.prefetch, identity, ids, attachments=attachments, lineage=lineage))

    async def offer(
        self, identity: Identity, ids: TokensLike, *, attachments: Iterable[Attachment] = (), lineage: Lineage = CLEAN,
        fields: Sequence[bytes] = (),
    ) -> Offer:  # fmt: skip
        return await self._run(
            partial(self._client.offer, identity, ids, attachments=attachments, lineage=lineage, fields=fields)
        )

    async def save(
        self, identity: Identity, ids: TokensLike, records: Records, *, ack: Ack = "memory",
        anchors: Iterable[Anchor] = (), attachments: Iterable[Attachment] = (), lineage: Lineage = CLEAN,
        fields: Sequence[bytes] = (), logits: Array | None = None, prefill_s: float = 0.0,
    ) -> Saved:  # fmt: skip
        call = partial(self._client.save, identity, ids, records, ack=ack, anchors=anchors, prefill_s=prefill_s)
        return await self._run(partial(call, attachments=attachments, lineage=lineage, fields=fields, logits=logits))

    def save_async(
        self, identity: Identity, ids: TokensLike, records: Records, *, ack: Ack = "memory",
        anchors: Iterable[Anchor] = (), attachments: Iterable[Attachment] = (), lineage: Lineage = CLEAN,
        fields: Sequence[bytes] = (), logits: Array | None = None, prefill_s: float = 0.0,
    ) -> asyncio.Future[Saved]:  # fmt: skip
        """`Client.save_async` as an awaitable future; queued when this returns."""
        future = self._client.save_async(
            identity, ids, records, ack=ack, anchors=anchors, attachments=attachments, lineage=lineage, fields=fields,
            logits=logits, prefill_s=prefill_s,
        )  # fmt: skip
        return asyncio.wrap_future(future)

    async def flush(self, timeout_s: float | None = None) -> bool:
        return await self._run(partial(self._client.flush, timeout_s))

    async def pin(
        self,
        identity: Identity,
        ids: TokensLike,
        ttl_s: float,
        *,
        attachments: Iterable[Attachment] = (),
        lineage: Lineage = CLEAN,
    ) -> int:
        return await self._run(partial(self._client.pin, identity, ids, ttl_s, attachments=attachments, lineage=lineage))

    async def unpin(
        self, identity: Identity, ids: TokensLike, *, attachments: Iterable[Attachment] = (), lineage: Lineage = CLEAN
    ) -> int:
        return await self._run(partial(self._client.unpin, identity, ids, attachments=attachments, lineage=lineage))

    async def forget(
        self, identity: Identity, ids: TokensLike, *, attachments: Iterable[Attachment] = (), lineage: Lineage = CLEAN
    ) -> Forgotten:
        return await self._run(partial(self._client.forget, identity, ids, attachments=attachments, lineage=lineage))

    async def clear(self, identity: Identity | None = None) -> Forgotten:
        return await self._run(partial(self._client.clear, identity))

    async def watch_weights(self, identity: Identity, paths: Iterable[str | os.PathLike[str]]) -> int:
        return await self._run(partial(self._client.watch_weights, identity, paths))

    async def report(self, verb: str, **arguments: object) -> dict[str, object]:
        return await self._run(partial(self._client.report, verb, **arguments))

    async def stats(self) -> dict[str, object]:
        return await self._run(self._client.stats)

    async def close(self) -> None:
        """Finish queued saves, then let go of the connections and the threads."""
        await asyncio.to_thread(self._client.close)
        self._executor.shutdown(wait=False)

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None) -> None:
        await self.close()

    async def _run(self, call: Callable[[], T]) -> T:
        if self._pid != os.getpid():  # threads do not survive a fork
            self._pid, self._executor = os.getpid(), ThreadPoolExecutor(THREADS, "warmkv-async")
        return await asyncio.get_running_loop().run_in_executor(self._executor, call)
