"""The parts of the serving benchmark that touch the disk: `cold`, `save` and `start`."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import time
from pathlib import Path

import lmdb
import numpy as np
from first import Baselines, drop
from harness import alone, arrays, daemon, percentile, print_table, smollm_like, timed
from index import TURNS, Prompts, Restart, rows_of
from index import restart as load_alone
from states import MODEL, Effort, Figures, client_of, made_rows, milli, prompt, restored
from states import save as save_state

from warmkv import Anchor, AnchorKind
from warmkv.daemon.testing import child_environ
from warmkv.kvstore import memfd
from warmkv.kvstore.store.cold import ColdTier, WriteItem
from warmkv.schema import segment as container
from warmkv.schema.ids import fingerprint, namespace_key, segment_id
from warmkv.schema.lmdb_records import NamespaceRecord, Usage
from warmkv.schema.records import CLEAN, ROOT, Plane, RecordId, Tokens, coverage

GIB = 1 << 30
#: Segments committed together when a store is made for a start.
BATCH = 2_000
START_PATIENCE_S = 600.0


def _cells(total: int, seconds: float) -> list[str]:
    """Milliseconds and GB/s."""
    return [milli(seconds), f"{total / seconds / 1e9:.2f}"]


# -- from disk ----------------------------------------------------------------------------------


def cold(root: Path, effort: Effort) -> Figures:
    """The first restore after a daemon restart, beside the same chunks out of a plain LMDB into a
    sealed memfd, and a plain file into memory."""
    records, ids = made_rows(effort.big), prompt(effort.big)
    base = Baselines(arrays(records), root)
    base.write_raw()
    env = base.fill_lmdb()
    env.close()
    arguments = ("--warm-bytes", f"{effort.big + 64}MiB", "--cold-bytes", f"{max(1024, 4 * effort.big)}MiB")
    ways = ("restore", "lmdb", "file")
    times: dict[str, list[float]] = {f"{way} {state}": [] for state in ("cached", "dropped") for way in ways}
    with daemon(*arguments, root=root) as served:
        with client_of(served) as client:
            save_state(client, ids, records, "disk")
        del records
        for state in ("cached", "dropped"):
            for _ in range(effort.copies if state == "cached" else 3):
                served.stop()
                if state == "dropped":
                    for path in (served.store / "data.mdb", root / "plain.lmdb" / "data.mdb", base.raw):
                        drop(path)
                served.start()
                with client_of(served) as client:
                    times[f"restore {state}"].append(timed(lambda client=client: restored(client, ids).close())[0])
                times[f"lmdb {state}"].append(_plain_lmdb(base, root))
                times[f"file {state}"].append(timed(_read_whole, base)[0])
    figures = {name: percentile(values, 50) for name, values in times.items()}
    rows = [
        [name, *_cells(base.total, figures[f"{way} cached"]), *_cells(base.total, figures[f"{way} dropped"]), ""]
        for way, name in (
            ("file", "plain file into memory already touched"), ("lmdb", "plain LMDB, 4 MiB values, into a sealed memfd"),
            ("restore", "first restore after a restart, digests checked"),
        )
    ]  # fmt: skip
    ratios = [f"{figures[f'lmdb {state}'] / figures[f'restore {state}']:.2f}" for state in ("cached", "dropped")]
    rows.append(["speed of restore / of plain LMDB", ratios[0], "", ratios[1], "", ">= 0.8"])
    columns = [f"{effort.big} MiB", "file cached: ms", "GB/s", "file dropped: ms", "GB/s", "aim"]
    print_table("From disk", columns, rows)
    return {f"cold, {name}": value for name, value in figures.items()}


def _plain_lmdb(base: Baselines, root: Path) -> float:
    """Opened anew each time, as after a restart: the map has no pages of this process yet."""
    with lmdb.open(str(root / "plain.lmdb"), map_size=base.total * 2, readonly=True, lock=False) as env:
        return timed(base.lmdb_to_memfd, env)[0]


def _read_whole(base: Baselines) -> None:
    view = base.target.data
    with open(base.raw, "rb", buffering=0) as file:
        while len(view):
            view = view[file.readinto(view) :]


# -- saving -------------------------------------------------------------------------------------


def save(root: Path, effort: Effort) -> Figures:
    """What the caller waits: until it is in memory, until it is on disk."""
    records = made_rows(effort.big)
    base = Baselines(arrays(records), root)
    times: dict[str, list[float]] = {name: [] for name in ("memory", "pwrite", "disk", "file", "memcpy")}
    arguments = ("--warm-bytes", f"{2 * effort.big + 64}MiB", "--cold-bytes", f"{max(1024, 6 * effort.big)}MiB")
    for ack in ("memory", "disk"):
        # For the first there is no disk to write to behind it, which would take a core from it.
        given = arguments if ack == "disk" else (*arguments[:2], "--cold-bytes", "0")
        with daemon(*given, root=root) as served, client_of(served) as client:
            for number in range(1, effort.copies + 1):
                ids = prompt(effort.big, number)
                times[ack].append(timed(save_state, client, ids, records, ack)[0])
                client.forget(MODEL, ids)
                beside = timed(base.pwrite_memfd) if ack == "memory" else timed(_write_file, base)
                times["pwrite" if ack == "memory" else "file"].append(beside[0])
    for _ in range(effort.copies):
        times["memcpy"].append(timed(base.memcpy)[0])
    figures = {name: percentile(values, 50) for name, values in times.items()}
    rows = [[name, *_cells(base.total, figures[key]), ""] for key, name in (
        ("memcpy", "memcpy, both sides touched before (limit)"), ("pwrite", "pwrite into a fresh memfd"),
        ("memory", "save, acknowledged in memory, nothing written behind it"), ("file", "write and fdatasync of a file"),
        ("disk", "save, acknowledged on disk"),
    )]  # fmt: skip
    rows.append(["save in memory / pwrite", f"{figures['memory'] / figures['pwrite']:.2f}", "", "<= 1.3"])
    rows.append(["save on disk / write and fdatasync", f"{figures['disk'] / figures['file']:.2f}", "", "reported"])
    print_table(f"Saving {effort.big} MiB", ["", "ms", "GB/s", "aim"], rows)
    return {f"save, {name}": value for name, value in figures.items()}


def _write_file(base: Baselines) -> None:
    with open(base.raw, "wb", buffering=0) as file:
        for plane in base.planes:
            file.write(plane.reshape(-1).view(np.uint8).data)
        os.fdatasync(file.fileno())


# -- starting -----------------------------------------------------------------------------------


def start(root: Path, effort: Effort) -> Figures:
    """A daemon on a store of many segments, from nothing to its first answer; and on an empty one."""
    made_s, _ = timed(alone, fill, root / "many", effort.segments)
    found: Restart = min((alone(load_alone, root / "many") for _ in range(2)), key=lambda restart: restart.load_s)
    figures = {"made": made_s, "load": found.load_s, "heads read": found.read_s, "segments": float(found.segments)}
    empty, many = [], []
    for _ in range(3):
        empty.append(ready_s(root, root / "empty"))
        many.append(ready_s(root, root / "many"))
    figures |= {"ready empty": percentile(empty, 50), "ready": percentile(many, 50)}
    rows = [
        [name, f"{took_s:.2f}", f"{took_s / found.segments * 1e6:.1f}", aim]
        for name, took_s, aim in (
            ("read all heads and nothing else (limit)", found.read_s, ""),
            ("open the store and build the index, in a process of its own", found.load_s, ""),
            ("daemon on an empty store, process start to ready", figures["ready empty"], ""),
            ("daemon on this store, process start to ready", figures["ready"], "<= 3 s"),
        )
    ]
    what = f"{found.segments:,} segments, {found.tokens:,} tokens, heads of a 30-layer model"
    title = f"Start: {what}; made in {made_s:.0f} s, file cached"
    print_table(title, ["", "seconds", "us a segment", "aim"], rows)
    return {f"start, {name}": value for name, value in figures.items()}


def ready_s(root: Path, store: Path) -> float:
    """Seconds from starting the process to its word that connections are taken."""
    command = [sys.executable, "-m", "warmkv.daemon.cli", "serve", "--json", "--log-level", "warning", "--store", str(store)]
    command += ["--socket", str(root / "start.sock"), "--warm-bytes", "64MiB", "--cold-bytes", f"{8 * GIB}"]
    began = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=child_environ()) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        took = time.perf_counter() - began
        process.terminate()
        process.wait(START_PATIENCE_S)
    assert "error" not in json.loads(line), line
    return took


class Segments:
    """Sealed containers of rows that are all zero. What they have in common but for their tokens, which
    is most of the work, is made once for every range of rows."""

    def __init__(self) -> None:
        self.identity = smollm_like(heads=1, size=1)
        self.key = namespace_key(os.getuid(), "", fingerprint(self.identity))
        self.owner = NamespaceRecord(os.getuid(), "", self.identity, time.time_ns())
        self._laid_out: dict[tuple[int, int], tuple[tuple[Plane, ...], bytes, bytes]] = {}

    def make(self, parent: RecordId, start: int, tokens: Tokens) -> tuple[RecordId, int, int]:
        """Rows [start, len(tokens)) behind a parent: id, descriptor, bytes."""
        planes, payload, digests = self._range(start, len(tokens))
        id_ = segment_id(self.key, CLEAN, start, coverage(planes), (), tokens)
        header = container.SegmentHeader(
            id_, self.key, CLEAN, parent, start, len(tokens), tokens[start:], (), planes, digests, time.time_ns(), "benchmark"
        )
        head = container.encode_head(header, len(payload))
        offset = container.align(len(head), container.PAYLOAD_ALIGNMENT)
        fd = memfd.create("benchmark", offset + len(payload))
        memfd.write(fd, head + bytes(offset - len(head)) + payload, 0)
        memfd.seal(fd)
        return id_, fd, offset + len(payload)

    def _range(self, start: int, end: int) -> tuple[tuple[Plane, ...], bytes, bytes]:
        if (start, end) not in self._laid_out:
            planes, size = container.layout([source.described for source in rows_of(self.identity, start, end)])
            self._laid_out[start, end] = planes, bytes(size), container.payload_digests(bytes(size))
        return self._laid_out[start, end]


def fill(path: Path, segments: int) -> None:
    """About so many segments of conversations, with chains and branches, committed in large batches.
    Heads are those of a 30-layer model, its rows tiny."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
    made, prompts, tier = Segments(), Prompts(), ColdTier.open(path, 8 * GIB)
    systems: dict[bytes, RecordId] = {}
    batch: list[WriteItem] = []
    count = 0
    for number in range(-(-segments // TURNS)):
        tokens, ends = prompts.conversation(number)
        first = tokens[: ends[0]].tobytes()
        parent, start = systems.get(first, ROOT), ends[0] if first in systems else 0
        for end in ends[1:] if start else ends:
            parent, fd, total = made.make(parent, start, tokens[:end])
            usage, anchors = Usage(count, 1, 0), (Anchor(end, AnchorKind.TURN),)
            batch.append(WriteItem(parent, False, made.key, made.owner, fd, total, usage, anchors))
            start, count = end, count + 1
            systems.setdefault(first, parent)
        if len(batch) >= BATCH or count >= segments:
            tier.write(batch, count)
            for item in batch:
                os.close(item.fd)
            batch.clear()
    tier.close()
