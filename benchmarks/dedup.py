"""Storing once what is said once: a growing conversation, agents that start together, a trace.

A conversation of 50 turns is saved turn by turn into a store with both tiers: by a model of full
attention, by one with sliding windows and by one with recurrent layers. At the end it is restored
from each tier and compared bit for bit. The limit is the last state, all that is needed to go on
at the end; the baseline, what the states of all turns take when each is kept whole. Ids are those
of a tokenizer where one is at hand; rows and states are random bits.

Twenty agents with one system prompt then start together over a daemon, waiting for whoever
computes it, and beside it without waiting. The limit is to compute and to store it once.

``--trace`` replays a recorded service, see mooncake.py.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import mooncake
import numpy as np
from harness import daemon, print_table, write_json
from synthetic import Agent, Conversation, Ids, Runtime, conversation, models

import warmkv
from warmkv import Anchor, AnchorKind, Identity, Store
from warmkv.kvstore.needs import needs_of_model
from warmkv.kvstore.rows import row_bytes_of

MODEL = Path(os.environ.get("WARMKV_BENCH_MODEL", ".demo/model"))
WARM_BYTES, COLD_BYTES = 2 << 30, 4 << 30
STORED_AIM, WRITTEN_AIM = 1.05, 1.2
#: Tokens a second that agents pretend to compute: slow enough for the others to come meanwhile.
PREFILL_TPS, WAIT_S = 4000, 60.0


# -- a growing conversation -------------------------------------------------------------------


@dataclass
class Grown:
    """Bytes a conversation takes. ``written`` went to LMDB, by ``file`` the file grew; ``whole``,
    ``windows`` and ``states`` are payload, of layers that keep all rows, the last, or states."""

    model: str
    last: int
    every: int
    warm: int
    cold: int
    written: int
    file: int
    whole: int
    windows: int
    states: int
    saves_s: float


def grow(name: str, identity: Identity, talk: Conversation, path: Path) -> Grown:
    runtime = Runtime(identity, len(talk.turns[-1]))
    more = np.append(talk.turns[-1], np.uint32(1))  # one to feed, so that all of the last state is usable
    with open_store(path) as store:
        saves_s = 0.0
        for ids in talk.turns:
            records = runtime.records(len(ids))
            began = time.perf_counter()
            saved = store.save(identity, ids, records, anchors=[Anchor(len(ids), AnchorKind.TURN)])
            saves_s += time.perf_counter() - began
            assert saved.stored, saved
        assert store.flush(120)
        stats, rows = store.stats(), payload(store, identity)
        check(store, runtime, more, "warm")
    with open_store(path) as store:
        check(store, runtime, more, "cold")
    sizes = [number(stats, *place) for place in (("warm", "bytes"), ("cold", "bytes"), ("cold", "bytes_written"))]
    positions = [len(ids) for ids in talk.turns]
    every = sum(runtime.state_bytes(position) for position in positions)
    return Grown(name, runtime.state_bytes(positions[-1]), every, *sizes, number(stats, "cold", "file_bytes"), *rows, saves_s)


def open_store(path: Path) -> Store:
    return warmkv.open_store(path, warm_bytes=WARM_BYTES, cold_bytes=COLD_BYTES)


def check(store: Store, runtime: Runtime, ids: Ids, tier: str) -> None:
    with store.restore(runtime.identity, ids) as restored:
        assert (restored.usable, restored.tier) == (len(ids) - 1, tier), restored.match
        runtime.check(restored)


def payload(store: Store, identity: Identity) -> tuple[int, int, int]:
    """Bytes of rows that are all needed, of rows in windows, and of states."""
    whole = windows = states = 0
    groups = [(group.whole, sum(row_bytes_of(identity.layers[at]) for at in group.layers)) for group in needs_of_model(identity.layers).groups]
    for record in store.engine.index.records.values():
        states += record.payload_bytes if record.is_state else 0
        for (all_rows, row_bytes), (first, last) in zip(groups, record.extents, strict=False):
            whole += (last - first) * row_bytes if all_rows else 0
            windows += 0 if all_rows else (last - first) * row_bytes
    return whole, windows, states


def number(stats: dict[str, object], *place: str) -> int:
    found: object = stats
    for key in place:
        assert isinstance(found, dict)
        found = found[key]
    assert isinstance(found, int)
    return found


def print_grown(found: list[Grown], talk: Conversation) -> None:
    columns = ["", "last state (limit)", "every turn whole", "warm", "/ last", "cold", "/ last", "written", "/ last", "all rows", "windows", "states"]
    rows = [
        [
            item.model, mb(item.last), mb(item.every), mb(item.warm), times(item.warm, item.last), mb(item.cold),
            times(item.cold, item.last), mb(item.written), times(item.written, item.last), mb(item.whole), mb(item.windows),
            mb(item.states),
        ]
        for item in found
    ]  # fmt: skip
    print_table(f"{len(talk.turns)} turns, {len(talk.turns[-1]):,} {talk.source}; MB", columns, rows)


# -- agents that start together ---------------------------------------------------------------


@dataclass
class Together:
    """What agents computed and what their store then held."""

    model: str
    waiting: bool
    agents: int
    prompt_tokens: int
    least_tokens: int
    computed_tokens: int
    computed_whole: int
    waits: int
    held: int
    one_copy: int
    took_s: float


def together(name: str, identity: Identity, agents: int, system: int, tail: int, wait_s: float) -> Together:
    """Agents with one system prompt and a question of their own, all at once."""
    rng = np.random.default_rng(0)
    shared_ids = rng.integers(0, 50_000, system, dtype=np.uint32)
    shared = Runtime(identity, system)
    prompts = [np.concatenate([shared_ids, np.full(1, index, np.uint32), rng.integers(0, 50_000, tail, dtype=np.uint32)]) for index in range(agents)]
    runtimes = [Agent(shared, len(ids), 1 + index) for index, ids in enumerate(prompts)]
    computed, failures, start = [0] * agents, list[BaseException](), threading.Barrier(agents)
    with tempfile.TemporaryDirectory(prefix="bench-", dir=Path.cwd()) as scratch, daemon(root=Path(scratch)) as served:

        def run(index: int) -> None:
            try:
                with warmkv.connect(str(served.socket), strict=True, timeout_s=WAIT_S) as client:
                    start.wait(WAIT_S)
                    computed[index] = answer(client, runtimes[index], prompts[index], system, wait_s)
            except BaseException as exc:  # noqa: BLE001 - told by the main thread
                failures.append(exc)
                start.abort()

        threads = [threading.Thread(target=run, args=(index,)) for index in range(agents)]
        began = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        took_s = time.perf_counter() - began
        if failures:
            raise failures[0]
        with warmkv.connect(str(served.socket), strict=True) as client:
            stats = client.stats()
    total = sum(len(ids) for ids in prompts)
    one_copy = shared.state_bytes(system) + sum(model.state_bytes(model.length) - shared_rows(shared) for model in runtimes)
    return Together(
        name, wait_s > 0, agents, total, system + agents * (tail + 1), sum(computed), sum(tokens >= system for tokens in computed),
        number(stats, "waits"), number(stats, "warm", "bytes"), one_copy, took_s,
    )  # fmt: skip
