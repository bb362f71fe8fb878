"""The soak: a real daemon with small budgets under 64 clients of four kinds for half an hour.

Agents extend chats; savers write big records to disk; readers hold what they got and vanish;
breakers send half frames and are killed in the middle. Everything handed out is compared bit for
bit. Once a second the daemon is looked at from outside and asked about itself. It fails when an
answer was wrong, an error was not planned, a budget was exceeded at any sample, a number that
should be flat rises, or anything is left when all clients are gone.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import signal
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from multiprocessing import get_context
from multiprocessing.process import BaseProcess
from pathlib import Path

from harness import daemon, print_table, write_json
from soak_clients import COUNTERS, KINDS, Board, Worker
from soak_sampler import COLD_BYTES, CONNECTIONS, MIB, TOKENS, WARM_BYTES, Sampler, rises

import warmkv
from warmkv.daemon.testing import DaemonProcess, eventually

FORK = get_context("fork")
LEASE_S = 3.0
#: Background services run often, budgets are small and time limits short, so that all of it happens.
SETTINGS = {
    "warm-bytes": WARM_BYTES, "cold-bytes": COLD_BYTES, "max-connections": CONNECTIONS, "max-tokens": TOKENS,
    "evict-interval-s": 1, "ttl-s": 120, "scrub-interval-s": 10, "scrub-bytes-per-s": 16 * MIB, "watch-interval-s": 1,
    "lease-ttl-s": LEASE_S, "reservation-ttl-s": 3, "busy-timeout-s": 2, "frame-timeout-s": 5,
    "namespace-floor-bytes": 4 * MIB, "uid-share": 1,
}  # fmt: skip
#: Seconds between kills of a client, on average.
KILL_EVERY_S = 0.5
SETTLE_S = 60.0


@dataclass
class Crowd:
    """The client processes. One that ended by itself or was killed is followed by another."""

    counts: dict[str, int]
    path: Path
    errors: Path
    seed: int
    pause_s: float
    board: Board = field(init=False)
    kinds: list[str] = field(init=False)
    processes: list[BaseProcess] = field(init=False)
    started: int = 0

    def __post_init__(self) -> None:
        self.kinds = [kind for kind, count in self.counts.items() for _ in range(count)]
        self.board = Board(len(self.kinds))
        self.processes = [self._start(number) for number in range(len(self.kinds))]

    def pids(self) -> list[int]:
        return [process.pid for process in self.processes if process.pid is not None]

    def of(self, kind: str) -> list[int]:
        return [number for number, name in enumerate(self.kinds) if name == kind]

    def _start(self, number: int) -> BaseProcess:
        self.started += 1
        worker = Worker(number, self.path, self.board, self.seed * 1_000_003 + self.started, self.errors, self.pause_s)
        process = FORK.Process(target=worker.run, args=(KINDS[self.kinds[number]],), daemon=True)
        process.start()
        return process

    def kill_one(self, rng: random.Random) -> None:
        """SIGKILL for a breaker, wherever it is."""
        number = rng.choice(self.of("breakers"))
        process = self.processes[number]
        if process.is_alive() and process.pid is not None:
            os.kill(process.pid, signal.SIGKILL)
            process.join()
            self.board.add(number, "killed")
            self.processes[number] = self._start(number)

    def replace_ended(self) -> None:
        for number, process in enumerate(self.processes):
            if not process.is_alive():
                if process.exitcode:
                    self.board.add(number, "unexpected")
                    with open(self.errors, "a") as file:
                        file.write(f"unexpected: client {number} ended with {process.exitcode}\n")
                self.processes[number] = self._start(number)

    def stop(self) -> None:
        self.board.stop()
        for process in self.processes:
            process.join(SETTLE_S)
            if process.is_alive():
                process.kill()
                process.join()


@dataclass
class Soak:
    """A run and what came of it."""

    minutes: float
    clients: int
    kills: int
    seed: int
    pause_s: float
    failures: list[str] = field(default_factory=list)
    after_restart: int = 0

    def run(self, root: Path) -> dict[str, object]:
        share = max(1, self.clients // len(KINDS))
        arguments = [word for name, value in SETTINGS.items() for word in (f"--{name}", str(value))]
        (root / "spool").mkdir()
        errors = root / "errors.log"
        errors.touch()
        with daemon(*arguments, "--spool", str(root / "spool"), root=root) as served:
            sampler = Sampler(served)
            crowd = Crowd(dict.fromkeys(KINDS, share), served.socket, errors, self.seed, self.pause_s)
            sampler.clients = crowd.pids
            try:
                self._watch(served, sampler, crowd)
            finally:
                crowd.stop()
            left, problems = self._settled(served, sampler)
            status = served.stop()
            log = served.log
        return self._told(sampler, crowd, left, problems, status, errors.read_text(), log)

    def _watch(self, served: DaemonProcess, sampler: Sampler, crowd: Crowd) -> None:
        """Sample, kill and replace until the time is over."""
        rng, began = random.Random(self.seed), time.monotonic()
        ends = began + self.minutes * 60
        restarts = [began + (number + 1) * self.minutes * 20 for number in range(self.kills)]
        client = _asker(served)
        while (now := time.monotonic()) < ends:
            if restarts and now >= restarts[0]:
                restarts.pop(0)
                client.close()
                self._restart(served, crowd.board)
                client, self.after_restart = _asker(served), len(sampler.samples)
            sampler.take(client)
            crowd.replace_ended()
            until = now + 1.0
            while (left := until - time.monotonic()) > 0:
                time.sleep(min(left, rng.expovariate(1 / KILL_EVERY_S)))
                if time.monotonic() < until:
                    crowd.kill_one(rng)
        client.close()

    @staticmethod
    def _restart(served: DaemonProcess, board: Board) -> None:
        board.outage(over=False)
        served.kill()
        served.start()
        board.outage(over=True)

    @staticmethod
    def _settled(served: DaemonProcess, sampler: Sampler) -> tuple[dict[str, float], list[str]]:
        """What is still held once all clients are gone and their leases ran out; what `verify` says."""
        with _asker(served) as client:

            def left() -> dict[str, float]:
                sample = sampler.look(client)
                sample["connections"] -= 2  # this one, and the listening socket
                return {
                    name: sample[name]
                    for name in ("leases", "leased", "reserved", "promoting", "queued", "connections")
                    if sample[name] > 0
                }

            eventually(lambda: not left(), SETTLE_S)
            found = client.report("verify")
            return left(), [*map(str, found["bad"]), *map(str, found["problems"])]  # type: ignore[call-overload]

    def _told(
        self, sampler: Sampler, crowd: Crowd, left: dict[str, float], problems: list[str], status: int, errors: str, log: str
    ) -> dict[str, object]:  # fmt: skip
        counts = {kind: {name: crowd.board.total(name, crowd.of(kind)) for name in COUNTERS} for kind in KINDS}
        found_rises = rises(sampler.samples[self.after_restart :])
        for name in ("wrong", "unexpected"):
            found = sum(of[name] for of in counts.values())
            if found:
                self.failures.append(f"{found} {name}: {[line for line in errors.splitlines() if line.startswith(name)][:5]}")
        self.failures += [f"budget exceeded {item}" for item in sampler.exceeded[:10]]
        self.failures += [
            f"{name} rose by {rise:,.0f} over the second half, allowed are {most:,.0f}"
            for name, rise, most in found_rises
            if rise > most
        ]
        self.failures += [f"left when all were gone: {name} {value:,.0f}" for name, value in left.items()]
        self.failures += [f"verify: {item}" for item in problems[:10]]
        self.failures += [f"the daemon ended with {status}"] if status else []
        self.failures += [
            f"in the log of the daemon: {line}" for line in log.splitlines() if "Traceback" in line or " ERROR " in line
        ][:5]
        return {
            "samples": sampler.samples, "counts": counts, "rises": found_rises, "left": left, "problems": problems,
            "status": status, "exceeded": sampler.exceeded, "started": crowd.started, "failures": self.failures,
            "reasons": Counter(re.sub(r"[0-9a-f]{32}|\d+", "#", line)[:140] for line in errors.splitlines()).most_common(12),
        }  # fmt: skip


def _asker(served: DaemonProcess) -> warmkv.Client:
    return warmkv.connect(str(served.socket), timeout_s=SETTLE_S, strict=True)


def print_result(result: dict[str, object], minutes: float) -> None:
    samples, counts = result["samples"], result["counts"]
    assert isinstance(samples, list) and isinstance(counts, dict) and isinstance(result["rises"], list)
    rises = {name: (rise, most) for name, rise, most in result["rises"]}
    budgets = {"used": WARM_BYTES, "held": WARM_BYTES, "warm": WARM_BYTES, "cold": COLD_BYTES, "connections": CONNECTIONS}
    rows = []
    for name in samples[0]:
        values = [sample[name] for sample in samples]
        rise, most = rises.get(name, (None, None))
        cells = [f"{value:,.0f}" for value in (values[0], values[len(values) // 2], values[-1], min(values), max(values))]
        cells += ["" if value is None else f"{value:,.0f}" for value in (budgets.get(name), rise, most)]
        rows.append([name, *cells])
    columns = ["", "first", "half", "last", "least", "most", "budget", "rise, 2nd half", "allowed"]
    print_table(f"The daemon in {len(samples)} samples over {minutes:g} minutes", columns, rows)
    shown = [name for name in COUNTERS if any(of[name] for of in counts.values()) or name in ("wrong", "unexpected")]
    print_table(
        "What the clients did and met", ["", *counts], [[name, *(f"{of[name]:,}" for of in counts.values())] for name in shown]
    )
    failures, reasons = result["failures"], result["reasons"]
    assert isinstance(failures, list) and isinstance(reasons, list)
    print_table("What they were told", ["", "times"], [[said, f"{count:,}"] for said, count in reasons])
    print(
        "\n".join(["FAILED", *map(str, failures)]) if failures else "passed: nothing wrong, unplanned, exceeded, rising or left"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--clients", type=int, default=64, help="processes, a quarter of each kind")
    parser.add_argument("--kills", type=int, default=0, help="times the daemon is killed and started again (0-2)")
    parser.add_argument("--pause", type=float, default=0.05, help="seconds between the steps of a client, on average")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    soak = Soak(given.minutes, given.clients, given.kills, given.seed, given.pause)
    with tempfile.TemporaryDirectory(prefix="soak-", dir=Path.cwd()) as scratch:
        result = soak.run(Path(scratch))
    print_result(result, given.minutes)
    write_json(given.json, result)
    return 1 if result["failures"] else 0


if __name__ == "__main__":
    raise SystemExit(main())
