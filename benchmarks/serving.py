"""Serving: what a client waits for, beside the same bytes moved by plain means in the same run.

A state has the bytes a token of a model with 8 B parameters in 16 bits: 128 KiB. Parts, chosen by
name, all by default: `mapped` (from question to checked views, one client), `clients` (the same
with many clients and a busy writer), `requests` (a second), `copied` (into the caller's arrays);
and from serving_disk.py `cold`, `save` and `start`. Where an aim is set it stands in the last column.

The limits: handing over moves no bytes, so a round trip that passes a descriptor; copying moves
them once, so memcpy; disk and memory speeds are measured in the same run.
"""

from __future__ import annotations

import argparse
import itertools
import mmap
import multiprocessing
import os
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Barrier
from pathlib import Path

import numpy as np
import serving_disk
from harness import daemon, median_s, percentile, print_table, timed, write_json
from states import (
    CALL_TIMEOUT_S,
    MIB,
    MODEL,
    QUICK,
    Effort,
    Figures,
    Ids,
    blocks,
    client_of,
    made_rows,
    micro,
    milli,
    prompt,
    restored,
    save,
)

import warmkv
from warmkv.daemon.testing import DaemonProcess
from warmkv.kvstore import memfd

#: What is served beside a busy writer, and what that writer saves again and again.
SHARED_MIB = 16
FORK = multiprocessing.get_context("fork")
Action = Callable[[warmkv.Client, Ids], None]


# -- to mapped views ----------------------------------------------------------------------------


def hand_out(sock: socket.socket, fd: int) -> None:
    """Answer every byte with a descriptor."""
    while sock.recv(64):
        socket.send_fds(sock, [b"."], [fd])


@contextmanager
def plain_handover(total_bytes: int) -> Iterator[Callable[[], None]]:
    """Ask another process for a descriptor and map it: what no store can do in less."""
    ours, theirs = socket.socketpair()
    fd = memfd.create("plain", total_bytes)
    child = FORK.Process(target=_hand_out_only, args=(ours, theirs, fd))
    child.start()
    theirs.close()

    def ask() -> None:
        ours.send(b".")
        _, fds, _, _ = socket.recv_fds(ours, 64, 1)
        mmap.mmap(fds[0], total_bytes, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ).close()
        os.close(fds[0])

    try:
        yield ask
    finally:
        ours.close()
        os.close(fd)
        child.join()


def _hand_out_only(ours: socket.socket, theirs: socket.socket, fd: int) -> None:
    ours.close()
    hand_out(theirs, fd)


def times_of(action: Callable[[], object], rounds: int) -> list[float]:
    for _ in range(min(rounds, 20)):
        action()
    return [timed(action)[0] for _ in range(rounds)]


def mapped(root: Path, effort: Effort) -> Figures:
    """Match, acquire and map by one client while nobody writes."""
    figures: Figures = {}
    rows, largest = [], max(effort.sizes)
    with daemon("--warm-bytes", f"{largest + 64}MiB", "--cold-bytes", "0", root=root) as served, client_of(served) as client:
        for size in effort.sizes:
            ids = prompt(size)
            save(client, ids, made_rows(size, distinct=False))
            times: dict[str, list[float]] = {"restore": [], "match": [], "views": []}
            for _ in range(effort.rounds + 20):
                took, found = timed(restored, client, ids)
                times["restore"].append(took)
                times["views"].append(took + timed(lambda found=found: [block.shape for block in blocks(found)])[0])
                found.close()
                times["match"].append(timed(client.match, MODEL, ids)[0])
            with plain_handover(size * MIB) as ask:
                plain = times_of(ask, effort.rounds)
            both = {name: (percentile(values[20:], 50), percentile(values[20:], 99)) for name, values in times.items()}
            for name, (p50, p99) in both.items():
                figures[f"{size} MiB, {name} p50"], figures[f"{size} MiB, {name} p99"] = p50, p99
            figures[f"{size} MiB, plain p50"] = percentile(plain, 50)
            cells = [micro(value) for name in ("restore", "views", "match") for value in both[name]]
            rows.append([f"{size} MiB", *cells, micro(percentile(plain, 50)), micro(percentile(plain, 99))])
            client.forget(MODEL, ids)
    first, last = (figures[f"{size} MiB, restore p50"] for size in (effort.sizes[0], largest))
    worst = max(figures[f"{size} MiB, restore p99"] for size in effort.sizes)
    columns = [
        "us",
        "restore p50",
        "p99",
        "every view made p50",
        "p99",
        "match only p50",
        "p99",
        "descriptor passed, mapped (limit)",
        "p99",
    ]
    print_table("From question to checked, mapped state: one client, writer idle", columns, rows)
    aims = [
        ["restore p50, every size", f"{micro(max(figures[f'{s} MiB, restore p50'] for s in effort.sizes))} us", "<= 200 us"],
        ["restore p99, every size", f"{micro(worst)} us", "<= 1,000 us"],
        [f"p50 of {largest} MiB / p50 of {effort.sizes[0]} MiB", f"{last / first:.2f}", "about 1: flat"],
    ]
    print_table("Aims", ["", "measured", "aim"], aims)
    return figures


# -- many clients -------------------------------------------------------------------------------


def restore_and_release(client: warmkv.Client, ids: Ids) -> None:
    restored(client, ids).close()


def match_only(client: warmkv.Client, ids: Ids) -> None:
    assert client.match(MODEL, ids).usable == len(ids) - 1


def _load(path: Path, ids: Ids, action: Action, seconds: float, gate: Barrier, answer: Connection) -> None:
    """One client process: wait for the others, then ask for so many seconds."""
    with warmkv.connect(str(path), timeout_s=CALL_TIMEOUT_S, strict=True) as client:
        for _ in range(3):
            action(client, ids)
        gate.wait(CALL_TIMEOUT_S)
        until, times = time.perf_counter() + seconds, []
        while time.perf_counter() < until:
            times.append(timed(action, client, ids)[0])
    answer.send(times)


def together(served: DaemonProcess, ids: Ids, action: Action, clients: int, seconds: float) -> list[float]:
    """Seconds of every call that so many client processes made side by side."""
    gate = FORK.Barrier(clients)
    pipes = [FORK.Pipe(duplex=False) for _ in range(clients)]
    workers = [FORK.Process(target=_load, args=(served.socket, ids, action, seconds, gate, theirs)) for _, theirs in pipes]
    for worker in workers:
        worker.start()
    for _, theirs in pipes:
        theirs.close()
    times = list(itertools.chain(*(ours.recv() for ours, _ in pipes)))
    for worker in workers:
        worker.join()
    return times


class Writer:
    """A process that saves a state of its own to disk again and again while a `with` lasts."""

    def __init__(self, served: DaemonProcess) -> None:
        self._ours, theirs = FORK.Pipe()
        self._process = FORK.Process(target=self._run, args=(served.socket, theirs))
        self.bytes_per_s = 0.0

    def _run(self, path: Path, answer: Connection) -> None:
        rows, total = made_rows(SHARED_MIB, 1), 0
        with warmkv.connect(str(path), timeout_s=CALL_TIMEOUT_S, strict=True) as client:
            began = time.perf_counter()
            for number in itertools.count(1):
                ids = prompt(SHARED_MIB, number)
                save(client, ids, rows, "disk")
                client.forget(MODEL, ids)
                total += SHARED_MIB * MIB
                if answer.poll():
                    break
            answer.send(total / (time.perf_counter() - began))

    def __enter__(self) -> Writer:
        self._process.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ours.send(None)
        self.bytes_per_s = self._ours.recv()
        self._process.join()


def clients(root: Path, effort: Effort) -> Figures:
    """The same by many clients, beside a writer that is busy and one that is idle."""
    figures: Figures = {}
    rows = []
    with daemon("--warm-bytes", "256MiB", "--cold-bytes", "1GiB", root=root) as served, client_of(served) as client:
        ids = prompt(SHARED_MIB)
        save(client, ids, made_rows(SHARED_MIB), "disk")
        for count in effort.clients:
            idle = together(served, ids, restore_and_release, count, effort.seconds)
            with Writer(served) as writer:
                busy = together(served, ids, restore_and_release, count, effort.seconds)
            row = [str(count)]
            for name, times in (("idle", idle), ("busy", busy)):
                p50, p99, rate = percentile(times, 50), percentile(times, 99), len(times) / effort.seconds
                figures |= {f"{count} clients, writer {name} {key}": v for key, v in (("p50", p50), ("p99", p99), ("rate", rate))}
                row += [micro(p50), micro(p99), f"{rate:,.0f}"]
            figures[f"{count} clients, written bytes/s"] = writer.bytes_per_s
            rows.append([*row, f"{writer.bytes_per_s / 1e6:,.0f}"])
    columns = ["clients", "idle: p50 us", "p99 us", "a second", "busy: p50 us", "p99 us", "a second", "written MB/s"]
    print_table(
        f"Restore and release of {SHARED_MIB} MiB; a writer that is idle, and one that saves {SHARED_MIB} MiB to disk",
        columns,
        rows,
    )
    return figures


def echo_rate(rounds: int) -> float:
    """Round trips a second over a plain socket between two threads: the limit of one client."""
    ours, theirs = socket.socketpair()

    def echo() -> None:
        while data := theirs.recv(4096):
            theirs.send(data)

    thread = threading.Thread(target=echo)
    thread.start()
    took = median_s(lambda: (ours.send(bytes(256)), ours.recv(4096)), rounds)
    ours.close()
    thread.join()
    theirs.close()
    return 1 / took


def requests(root: Path, effort: Effort) -> Figures:
    """Requests a second: questions alone, and with hand-over and release."""
    figures: Figures = {"echo a second": echo_rate(effort.rounds)}
    rows = [["plain echo over a socket, one client (limit)", f"{figures['echo a second']:,.0f}", ""]]
    with daemon("--warm-bytes", "256MiB", "--cold-bytes", "0", root=root) as served, client_of(served) as client:
        ids = prompt(SHARED_MIB)
        save(client, ids, made_rows(SHARED_MIB))
        for count in effort.clients:
            row = [f"{count} clients"]
            for name, action in (("match", match_only), ("match, acquire, release", restore_and_release)):
                rate = len(together(served, ids, action, count, effort.seconds)) / effort.seconds
                figures[f"{count} clients, {name} a second"] = rate
                row.append(f"{rate:,.0f}")
            rows.append(row)
    print_table(f"Requests a second, {len(ids) - 1} tokens", ["", "match", "match, acquire, map, release"], rows)
    return figures


# -- to a copy ----------------------------------------------------------------------------------


def copied(root: Path, effort: Effort) -> Figures:
    """Into arrays of the caller, beside mapping and copying the same bytes of a sealed memfd."""
    records = made_rows(effort.big)
    targets = [np.zeros_like(plane.rows) for record in records for plane in record.planes]
    total, ids = sum(target.nbytes for target in targets), prompt(effort.big)
    plain, at = memfd.create("plain", total), 0
    for record in records:
        for plane in record.planes:
            memfd.write(plain, plane.rows.view(np.uint8).reshape(-1).data, at)
            at += plane.rows.nbytes
    memfd.seal(plain)

    def from_plain() -> None:
        memory = memfd.map_private(plain, total)
        everything = np.frombuffer(memory, np.float32)
        at = 0
        for target in targets:
            np.copyto(target, everything[at : at + target.size].reshape(target.shape))
            at += target.size

    flat = np.zeros(total, np.uint8)
    source = np.ones(total, np.uint8)
    ours, beside, memcpy = [], [], []
    with daemon("--warm-bytes", f"{effort.big + 64}MiB", "--cold-bytes", "0", root=root) as served, client_of(served) as client:
        save(client, ids, records)

        def from_store() -> None:
            with restored(client, ids) as found:
                for target, block in zip(targets, blocks(found), strict=True):
                    np.copyto(target, block)

        for _ in range(effort.copies):
            ours.append(timed(from_store)[0])
            beside.append(timed(from_plain)[0])
            memcpy.append(timed(np.copyto, flat, source)[0])
    os.close(plain)
    best = {name: percentile(times, 50) for name, times in (("restore", ours), ("plain", beside), ("memcpy", memcpy))}
    rows = [
        ["memcpy, both sides touched before (limit)", milli(best["memcpy"]), f"{total / best['memcpy'] / 1e9:.1f}", ""],
        ["map a sealed memfd and copy", milli(best["plain"]), f"{total / best['plain'] / 1e9:.1f}", ""],
        ["restore and copy", milli(best["restore"]), f"{total / best['restore'] / 1e9:.1f}", ""],
        ["speed of restore and copy / of map and copy", f"{best['plain'] / best['restore']:.2f}", "", ">= 0.8"],
    ]
    print_table(f"{effort.big} MiB into arrays of the caller", ["", "ms", "GB/s", "aim"], rows)
    return {f"copied, {name}": value for name, value in best.items()}


def main() -> int:
    parts: dict[str, Callable[[Path, Effort], Figures]] = {
        part.__name__: part
        for part in (mapped, clients, requests, copied, serving_disk.cold, serving_disk.save, serving_disk.start)
    }
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(parts)}; default: all")
    parser.add_argument("--quick", action="store_true", help="small sizes, to see that it works")
    parser.add_argument("--segments", type=int, help="of the store that is started")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    if unknown := set(given.parts) - set(parts):
        parser.error(f"unknown part {min(unknown)!r}; there are: {', '.join(parts)}")
    effort = QUICK if given.quick else Effort()
    effort = replace(effort, segments=given.segments or effort.segments)
    figures: dict[str, Figures] = {}
    with tempfile.TemporaryDirectory(prefix="bench-", dir=Path.cwd()) as scratch:
        for name in given.parts or parts:
            figures[name] = parts[name](Path(scratch), effort)
    write_json(given.json, figures)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
