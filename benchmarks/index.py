"""The index: how long a question takes, what a node costs, how long a restart reads.

The same prompts lie in an index and, in the same run, in a dict of chained block hashes as the
prefix caches of serving engines keep one: the hash of a block is that of the block before it and
its own tokens. Blocks find whole blocks only; the index finds every token, where a model can
resume, and the records to resume from. The limit is comparing the question with a stored copy.

Prompts are asked in random order, so that little of what a question touches is in the processor's
caches, and then one of them again and again. Memory is private memory of a process of its own.
What is restarted is a store on disk whose heads are those of a 30-layer model, its rows tiny.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import os
import random
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median

import lmdb
import numpy as np
from blocks import BlockHashes
from harness import alone, anonymous_bytes, microseconds, percentile, print_table, smollm_like, timed, write_json

from warmkv import Anchor, AnchorKind, Identity
from warmkv.kvstore.containers import PlaneSource, write_segment
from warmkv.kvstore.geometry import Coverage
from warmkv.kvstore.needs import Provides
from warmkv.kvstore.rows import PlaneRows
from warmkv.kvstore.store.cold import ColdTier, WriteItem
from warmkv.kvstore.store.index import NOTHING_COVERED, Cold, Found, Index, Namespace, Record
from warmkv.kvstore.store.recovery import load_index
from warmkv.kvstore.testing.samples import FULL, RECURRENT, mixed_identity
from warmkv.schema.ids import fingerprint, namespace_key
from warmkv.schema.lmdb_records import NamespaceRecord, Usage
from warmkv.schema.records import CLEAN, ROOT, NamespaceKey, RecordId, Tokens

Shape = tuple[int, int]
Prompt = tuple[Tokens, list[int]]
LENGTHS, PATHS, BLOCKS = (1_000, 10_000, 100_000), (1, 20, 400), (16, 256)
#: What is aimed at: this prompt over this many nodes, in the largest index.
AIM_SHAPE, AIM_S = (10_000, 20), 25e-6
#: Conversations that fill an index: one of a few system prompts, then turns.
SYSTEM_PROMPTS, SYSTEM_TOKENS, TURNS, TURN_TOKENS, AGENTS = 32, 256, 19, 48, 20
VOCABULARY = 50_000
BUDGET_BYTES = 64 << 30
KEY = NamespaceKey(b"benchmark/index!")


class Prompts:
    """Made-up prompts and the ends of their segments."""

    def __init__(self) -> None:
        self._rng = np.random.default_rng(0)
        self._systems = [self._tokens(SYSTEM_TOKENS) for _ in range(SYSTEM_PROMPTS)]

    def shaped(self, tokens: int, nodes: int) -> Prompt:
        """A prompt that shares nothing with others, in this many segments."""
        return self._tokens(tokens), [tokens * number // nodes for number in range(1, nodes + 1)]

    def conversation(self, number: int) -> Prompt:
        ends = [SYSTEM_TOKENS + TURN_TOKENS * turn for turn in range(TURNS + 1)]
        return np.concatenate([self._systems[number % SYSTEM_PROMPTS], self._tokens(TURNS * TURN_TOKENS)]), ends

    def _tokens(self, count: int) -> Tokens:
        return self._rng.integers(0, VOCABULARY, count, dtype=np.uint32)


class Filled:
    """An index of records on disk, with an anchor at the end of each segment; with ``states`` that
    of a recurrent model, with a state there too."""

    def __init__(self, *, states: bool) -> None:
        self.index = Index()
        self.segments = 0
        self.tokens = 0
        self._states = states
        self._systems: dict[bytes, Record] = {}
        self._namespace = Namespace(KEY, os.getuid(), "", mixed_identity(FULL, *((RECURRENT,) if states else ())), 0)
        self._ids = itertools.count(1)

    @property
    def nodes(self) -> int:
        return self._namespace.trees[CLEAN].nodes

    def fill(self, prompts: Sequence[Prompt]) -> None:
        """All segments of these prompts, as so many agents at a time save them turn by turn."""
        for at in range(0, len(prompts), AGENTS):
            together = prompts[at : at + AGENTS]
            parents = [self._first(tokens[: ends[0]]) for tokens, ends in together]
            for turn in range(1, max(len(ends) for _, ends in together)):
                for number, (tokens, ends) in enumerate(together):
                    if turn < len(ends):
                        parents[number] = self._segment(parents[number], tokens[: ends[turn]], ends[turn - 1], ends[turn])

    def _first(self, tokens: Tokens) -> Record:
        """The segment at the root that holds these tokens: one for all prompts that begin so."""
        data = tokens.tobytes()
        if data not in self._systems:
            self._systems[data] = self._segment(None, tokens, 0, len(tokens))
        return self._systems[data]

    def _segment(self, parent: Record | None, tokens: Tokens, start: int, end: int) -> Record:
        record = self._record(start, end, coverage=Coverage(((start, end),)))
        record.anchors[end, AnchorKind.TURN] = Anchor(end, AnchorKind.TURN)
        self._add(record, parent, tokens.tobytes())
        if self._states:
            self._add(self._record(end, end, provides=Provides.EXACT), record)
        self.segments += 1
        self.tokens += end - start
        return record

    def _add(self, record: Record, parent: Record | None, tokens: bytes = b"") -> None:
        self.index.add(record, parent, tokens, ())
        self.index.set_cold(record, Cold.STORED)

    def _record(
        self, start: int, end: int, *, coverage: Coverage = NOTHING_COVERED, provides: Provides = Provides.NOTHING
    ) -> Record:
        id_ = RecordId(next(self._ids).to_bytes(16, "little"))
        about = (id_, self._namespace, CLEAN, start, end, 1 << 16, 1 << 16, 0, "benchmark")
        return Record(*about, coverage=coverage, provides=provides)


@dataclass
class Times:
    """Seconds of every question of one shape."""

    find: list[float] = field(default_factory=list)
    again: list[float] = field(default_factory=list)
    compare: list[float] = field(default_factory=list)
    blocks: dict[int, list[float]] = field(default_factory=lambda: {size: [] for size in BLOCKS})


@dataclass
class Run:
    """An index, what it took to build and to keep, and its times by shape."""

    segments: int
    nodes: int
    tokens: int
    build_s: float
    index_bytes: int
    block_bytes: dict[int, int]
    times: list[tuple[Shape, Times]]


def measure(segments: int, states: bool, shapes: Sequence[Shape], prompts: int, rounds: int) -> Run:
    """Fill an index with about so many segments, then ask."""
    made = Prompts()
    asked = {shape: [made.shaped(*shape) for _ in range(prompts)] for shape in shapes}
    missing = segments - prompts * sum(nodes for _, nodes in shapes)
    others = [made.conversation(number) for number in range(max(0, missing) // TURNS)]
    stored = [*itertools.chain(*asked.values()), *others]
    random.Random(0).shuffle(stored)
    gc.collect()
    before = anonymous_bytes(os.getpid())
    filled, blocks = Filled(states=states), {size: BlockHashes(size) for size in BLOCKS}
    build_s, _ = timed(filled.fill, stored)
    gc.collect()
    used = [anonymous_bytes(os.getpid())]
    for hashes in blocks.values():
        for tokens, _ in stored:
            hashes.enter(tokens.tobytes())
        used.append(anonymous_bytes(os.getpid()))
    del others
    gc.collect()
    gc.freeze()  # as a daemon does once it has loaded
    times = [(shape, ask(filled.index, blocks, [tokens for tokens, _ in asked[shape]], rounds)) for shape in shapes]
    memory = {size: after - at for size, at, after in zip(BLOCKS, used, used[1:], strict=False)}
    return Run(filled.segments, filled.nodes, filled.tokens, build_s, used[0] - before, memory, times)


def ask(index: Index, blocks: dict[int, BlockHashes], prompts: list[Tokens], rounds: int) -> Times:
    """Ask for each prompt with one token more: in every round the index, then each of the others."""
    times, rng = Times(), random.Random(0)
    stored = [tokens.tobytes() for tokens in prompts]
    asked = [np.append(tokens, np.uint32(VOCABULARY)) for tokens in prompts]

    def find(tokens: bytes) -> Found:
        with index.changed:
            return index.find(KEY, CLEAN, tokens, ())

    def in_random_order() -> Iterator[tuple[int, bytes]]:
        for number in rng.sample(range(len(prompts)), len(prompts)):
            yield number, asked[number].tobytes()  # a fresh copy, as one just received

    for _ in range(rounds):
        for number, tokens in in_random_order():
            took, found = timed(find, tokens)
            assert found.matched == found.usable == len(prompts[number]) and found.spans and found.anchors, found
            times.find.append(took)
        for number, tokens in in_random_order():
            times.compare.append(timed(tokens.startswith, stored[number])[0])
        for size, hashes in blocks.items():
            for number, tokens in in_random_order():
                took, known = timed(hashes.find, tokens)
                assert len(known) == len(prompts[number]) // size, (len(known), size)
                times.blocks[size].append(took)
    tokens = asked[0].tobytes()
    times.again = [timed(find, tokens)[0] for _ in range(rounds * len(prompts))]
    return times


# -- restart ----------------------------------------------------------------------------------


@dataclass
class Restart:
    """What a restart found, the seconds it took, and those to read all heads and nothing else."""

    segments: int
    nodes: int
    tokens: int
    load_s: float
    read_s: float
    index_bytes: int


def write_store(path: Path, segments: int) -> None:
    """About so many segments of conversations."""
    identity, made = smollm_like(heads=1, size=1), Prompts()
    key = namespace_key(os.getuid(), "", fingerprint(identity))
    owner = NamespaceRecord(os.getuid(), "", identity, time.time_ns())
    cold = ColdTier.open(path, BUDGET_BYTES)
    systems: dict[bytes, RecordId] = {}
    for number in range(-(-segments // TURNS)):
        tokens, ends = made.conversation(number)
        parent = systems.get(tokens[: ends[0]].tobytes(), ROOT)
        items: list[WriteItem] = []
        for start, end in itertools.pairwise([0, *ends]):
            if start == 0 and parent != ROOT:
                continue
            segment = write_segment(key, CLEAN, parent, start, tokens[:end], (), rows_of(identity, start, end))
            parent = segment.id
            systems.setdefault(tokens[: ends[0]].tobytes(), parent)
            usage, anchors = Usage(number, 1, 0), (Anchor(end, AnchorKind.TURN),)
            items.append(WriteItem(segment.id, False, key, owner, segment.fd, segment.total_bytes, usage, anchors))
        cold.write(items, number)
        for item in items:
            os.close(item.fd)
    cold.close()


def rows_of(identity: Identity, start: int, end: int) -> list[PlaneSource]:
    rows = np.zeros((end - start, 1, 1), np.float32)
    found = [(layer, spec) for layer, kept in enumerate(identity.layers) for spec in kept.planes]
    return [PlaneSource(layer, spec.row_shape, start, PlaneRows(spec.role, spec.format, rows)) for layer, spec in found]


def restart(path: Path) -> Restart:
    """Open the store and rebuild its index, as a daemon does when it starts."""
    with lmdb.open(str(path), readonly=True, lock=False, max_dbs=8) as env:
        table = env.open_db(b"segments", create=False)
        with env.begin() as txn:
            read_s, read_bytes = timed(lambda: sum(len(head) for _, head in txn.cursor(table)))
    assert read_bytes
    gc.collect()
    before, began = anonymous_bytes(os.getpid()), time.perf_counter()
    index, cold = Index(), ColdTier.open(path, BUDGET_BYTES)
    swept = load_index(index, cold)
    load_s = time.perf_counter() - began
    gc.collect()
    used = anonymous_bytes(os.getpid()) - before
    cold.close()
    nodes = list(index.all_nodes())
    assert swept == 0 and nodes
    return Restart(len(index.records), len(nodes), sum(node.end - node.start for node in nodes), load_s, read_s, used)


# -- telling ----------------------------------------------------------------------------------


def print_times(title: str, runs: Sequence[Run]) -> None:
    columns = ["segments", "tokens", "nodes", "find p50", "p99", "asked again", "one compare (limit)"]
    columns += [name for size in BLOCKS for name in (f"blocks of {size} p50", "p99")]
    rows = []
    for run in runs:
        for (tokens, nodes), times in run.times:
            cells = [f"{run.segments:,}", f"{tokens:,}", str(nodes), *both(times.find)]
            cells += [microseconds(median(times.again)), microseconds(median(times.compare))]
            rows.append([*cells, *itertools.chain(*(both(times.blocks[size]) for size in BLOCKS))])
    print_table(f"{title}; microseconds", columns, rows)


def both(times: Sequence[float]) -> tuple[str, str]:
    return microseconds(median(times)), microseconds(percentile(times, 99))


def print_memory(runs: Sequence[tuple[str, Run]], found: Restart) -> None:
    columns = ["bytes a node", "segments", "nodes", "tokens", "index", "its tokens", *(f"{size}-blocks" for size in BLOCKS)]
    columns += ["seconds", "us each"]
    rows = []
    for name, run in runs:
        rows.append([name, *counts(run), *(f"{run.block_bytes[size] / run.nodes:,.0f}" for size in BLOCKS)])
        rows[-1] += [f"{run.build_s:.2f}", f"{run.build_s / run.segments * 1e6:.0f}"]
    for name, took_s in (("restart from disk", found.load_s), ("  its heads read only (limit)", found.read_s)):
        rows.append([name, *counts(found), *("" for _ in BLOCKS), f"{took_s:.2f}", f"{took_s / found.segments * 1e6:.0f}"])
    rows[-1][4] = rows[-1][5] = ""
    print_table("Memory and time to load", columns, rows)


def counts(of: Run | Restart) -> list[str]:
    sizes = [f"{of.segments:,}", f"{of.nodes:,}", f"{of.tokens:,}"]
    return [*sizes, f"{of.index_bytes / of.nodes:,.0f}", f"{4 * of.tokens / of.nodes:,.0f}"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--segments", type=int, nargs="+", default=[100_000, 1_000_000])
    parser.add_argument("--states", type=int, default=100_000, help="segments of the index of a recurrent model")
    parser.add_argument("--restart", type=int, default=10_000, help="segments of the store that is restarted")
    parser.add_argument("--prompts", type=int, default=64, help="of each shape")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    shapes = [(tokens, nodes) for tokens in LENGTHS for nodes in PATHS]
    full = [alone(measure, size, False, shapes, given.prompts, given.rounds) for size in given.segments]
    hybrid = alone(
        measure, given.states, True, [shape for shape in shapes if shape[0] == AIM_SHAPE[0]], given.prompts, given.rounds
    )
    with tempfile.TemporaryDirectory(prefix="bench-", dir=Path.cwd()) as scratch:
        write_store(Path(scratch), given.restart)
        found = alone(restart, Path(scratch))
    print_times("Full attention: one question", full)
    print_times("Full attention and recurrent, a state a segment: one question", [hybrid])
    print_memory([*(("full attention, built", run) for run in full), ("with states, built", hybrid)], found)
    asked = next(times for shape, times in full[-1].times if shape == AIM_SHAPE)
    name = f"{AIM_SHAPE[0]:,} tokens over {AIM_SHAPE[1]} nodes, {full[-1].segments:,} segments, p50"
    rows = [[how, f"{microseconds(median(times))} us", f"<= {AIM_S * 1e6:.0f} us"] for how, times in (
        (f"{name}, random order", asked.find), (f"{name}, asked again", asked.again)
    )]  # fmt: skip
    print_table("Aims", ["", "measured", "aim"], rows)
    write_json(given.json, {"full": [asdict(run) for run in full], "hybrid": asdict(hybrid), "restart": asdict(found)})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
