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
from concurrent.futures import ThreadPoolExecutor
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
VOCABULARY = 50_000
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


def grow(name: str, identity: Identity, talk: Conversation, path: Path) -> Grown:
    runtime = Runtime(identity, len(talk.turns[-1]))
    more = np.append(talk.turns[-1], np.uint32(1))  # one to feed, so that all of the last state is usable
    with open_store(path) as store:
        for ids in talk.turns:
            saved = store.save(identity, ids, runtime.records(len(ids)), anchors=[Anchor(len(ids), AnchorKind.TURN)])
            assert saved.stored, saved
        assert store.flush(120)
        stats, rows = store.stats(), payload(store, identity)
        check(store, runtime, more, "warm")
    with open_store(path) as store:
        check(store, runtime, more, "cold")
    sizes = [number(stats, *place) for place in (("warm", "bytes"), ("cold", "bytes"), ("cold", "bytes_written"))]
    positions = [len(ids) for ids in talk.turns]
    every = [sum(runtime.record_bytes(position)) for position in positions]
    return Grown(name, every[-1], sum(every), *sizes, number(stats, "cold", "file_bytes"), *rows)


def open_store(path: Path) -> Store:
    return warmkv.open_store(path, warm_bytes=WARM_BYTES, cold_bytes=COLD_BYTES)


def check(store: Store, runtime: Runtime, ids: Ids, tier: str) -> None:
    with store.restore(runtime.identity, ids) as restored:
        assert (restored.usable, restored.tier) == (len(ids) - 1, tier), restored.match
        runtime.check(restored)


def payload(store: Store, identity: Identity) -> tuple[int, int, int]:
    """Bytes of rows that are all needed, of rows in windows, and of states."""
    whole = windows = states = 0
    found = needs_of_model(identity.layers).groups
    groups = [(group.whole, sum(row_bytes_of(identity.layers[at]) for at in group.layers)) for group in found]
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
    columns = ["payload MB", "last state (limit)", "each turn whole", "full rows", "window rows", "states"]
    rows = [[item.model, *map(mb, (item.last, item.every, item.whole, item.windows, item.states))] for item in found]
    print_table(f"A conversation of {len(talk.turns)} turns, {len(talk.turns[-1]):,} {talk.source}", columns, rows)
    columns = ["MB, and times the last state", "warm tier", "cold tier", "written to LMDB", "its file"]
    sizes = [(item, (item.warm, item.cold, item.written, item.file)) for item in found]
    print_table("What it takes", columns, [[item.model, *(share(size, item.last) for size in taken)] for item, taken in sizes])


# -- agents that start together ---------------------------------------------------------------


@dataclass
class Together:
    """Tokens agents computed, of ``prompts`` in all and ``least`` if nothing is computed twice; bytes
    their store then held, and those of one copy. ``computed_whole`` agents found no system prompt."""

    model: str
    waiting: bool
    least: int
    prompts: int
    computed: int
    computed_whole: int
    waits: int
    one_copy: int
    held: int


def together(name: str, identity: Identity, given: argparse.Namespace, wait_s: float) -> Together:
    """Agents with one system prompt and a question of their own, all at once."""
    rng = np.random.default_rng(0)
    system = rng.integers(0, VOCABULARY, given.system, dtype=np.uint32)
    shared = Runtime(identity, given.system)
    tails = [np.append(np.uint32(VOCABULARY + at), rng.integers(0, VOCABULARY, given.tail - 1)) for at in range(given.agents)]
    prompts = [np.concatenate([system, tail]).astype(np.uint32) for tail in tails]
    runtimes = [Agent(shared, len(ids), 1 + at) for at, ids in enumerate(prompts)]
    start = threading.Barrier(given.agents)
    with tempfile.TemporaryDirectory(prefix="bench-", dir=Path.cwd()) as scratch, daemon(root=Path(scratch)) as served:

        def run(at: int) -> int:
            with warmkv.connect(str(served.socket), strict=True, timeout_s=WAIT_S) as client:
                start.wait(WAIT_S)
                return answer(client, runtimes[at], prompts[at], given.system, wait_s)

        with ThreadPoolExecutor(given.agents) as pool:
            computed = list(pool.map(run, range(given.agents)))
        with warmkv.connect(str(served.socket), strict=True) as client:
            stats = client.stats()
            for runtime, ids in zip(runtimes, prompts, strict=True):
                with client.restore(identity, np.append(ids, np.uint32(0))) as restored:
                    assert restored.usable == len(ids), restored.match
                    runtime.check(restored)
    rows, states = shared.record_bytes(given.system)
    own = [runtime.record_bytes(runtime.length) for runtime in runtimes]
    one_copy = rows + states + sum(all_rows - rows + state for all_rows, state in own)
    return Together(
        name, wait_s > 0, given.system + sum(map(len, tails)), sum(map(len, prompts)), sum(computed),
        sum(tokens > given.tail for tokens in computed), number(stats, "waits"), one_copy, number(stats, "warm", "bytes"),
    )  # fmt: skip


def answer(client: warmkv.Client, runtime: Agent, ids: Ids, system: int, wait_s: float) -> int:
    """Take what is there, compute the rest, save it; tokens computed."""
    with client.restore(runtime.identity, ids, wait_s=wait_s) as restored:
        if restored:
            runtime.check(restored)
        usable, flight = restored.usable, restored.flight
    try:
        time.sleep((len(ids) - usable) / PREFILL_TPS)
        # A model with recurrent layers stops at the anchors its client planned.
        stops = [system, len(ids)] if needs_of_model(runtime.identity.layers).exact else [len(ids)]
        for stop in stops:
            if stop > usable:
                assert client.save(runtime.identity, ids[:stop], runtime.records(stop)).stored
    finally:
        if flight is not None:
            flight.close()
    return len(ids) - usable


def print_together(found: list[Together], given: argparse.Namespace) -> None:
    columns = ["", "tokens computed", "of", "least (limit)", "agents without it", "waits", "MB held", "one copy (limit)"]
    rows = [
        [
            f"{item.model}{', waiting' if item.waiting else ', not waiting'}", f"{item.computed:,}", f"{item.prompts:,}",
            f"{item.least:,}", str(item.computed_whole), str(item.waits), share(item.held, item.one_copy), mb(item.one_copy),
        ]
        for item in found
    ]  # fmt: skip
    print_table(f"{given.agents} agents at once, {given.system:,} tokens in common and {given.tail} of their own", columns, rows)


# -- telling ----------------------------------------------------------------------------------


def mb(size: int) -> str:
    return f"{size / 1e6:.1f}"


def share(size: int, limit: int) -> str:
    return f"{mb(size)}  {ratio(size, limit)}"


def ratio(size: int, limit: int) -> str:
    return f"{size / limit:.3f}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=50)
    parser.add_argument("--model", type=Path, default=MODEL, help="whose tokenizer spells the conversation")
    parser.add_argument("--agents", type=int, default=20)
    parser.add_argument("--system", type=int, default=4096, help="tokens of the agents' system prompt")
    parser.add_argument("--tail", type=int, default=200, help="tokens of each agent's question")
    parser.add_argument("--trace", type=Path, help="a trace of Mooncake's form to replay")
    parser.add_argument("--requests", type=int, default=0, help="of the trace; 0: all")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    talk = conversation(given.turns, given.model)
    identities = models()
    with tempfile.TemporaryDirectory(prefix="bench-", dir=Path.cwd()) as scratch:
        grown = [grow(name, identity, talk, Path(scratch) / str(at)) for at, (name, identity) in enumerate(identities.items())]
    print_grown(grown, talk)
    anywhere = {name: identity for name, identity in identities.items() if not any(layer.window for layer in identity.layers)}
    started = [together(name, identity, given, wait_s) for name, identity in anywhere.items() for wait_s in (WAIT_S, 0.0)]
    print_together(started, given)
    full, first = grown[0], started[0]
    rows = [
        [f"{full.model}: warm / last state", ratio(full.warm, full.last), f"<= {STORED_AIM}"],
        [f"{full.model}: cold / last state", ratio(full.cold, full.last), f"<= {STORED_AIM}"],
        [f"{full.model}: written to LMDB / last state", ratio(full.written, full.last), f"<= {WRITTEN_AIM}"],
        ["agents, waiting: computed / least", ratio(first.computed, first.least), "1.000"],
        ["agents, waiting: held / one copy", ratio(first.held, first.one_copy), "reported"],
    ]
    print_table("Aims", ["", "measured", "aim"], rows)
    replayed = mooncake.replay(given.trace, given.requests) if given.trace else []
    told = {"grown": grown, "together": started, "trace": replayed}
    write_json(given.json, {name: [asdict(item) for item in items] for name, items in told.items()})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
