"""Processes that are made to die, and those that look at what they left.

Run as a program this is the parent of all of them: it imports everything once, opens no store
itself, reads one JSON job a line and forks for each. A child that lives through a script reports
each acknowledgement through a pipe before it goes on; its blow comes from a `Faults`, at the n-th
time a point is reached, or from its parent, a while after so many reports.

Chunks and transactions are made small here, so that small records have many of them: this is no
module for a process that has other things to do.
"""

from __future__ import annotations

import json
import logging
import os
import select
import shutil
import signal
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import lmdb

from warmkv.schema import segment

segment.CHUNK_BYTES = 4 << 10  # before those who copy it are imported

from fault_looking import demote, look  # noqa: E402
from fault_script import STRANGER, WEIGHTS, Prompt, Script, script  # noqa: E402

from warmkv.kvstore.store import Store, StoreOptions  # noqa: E402
from warmkv.kvstore.store.check import check  # noqa: E402
from warmkv.kvstore.store.engine import Engine  # noqa: E402
from warmkv.kvstore.store.faults import Faults  # noqa: E402
from warmkv.kvstore.testing import records_at  # noqa: E402
from warmkv.schema.errors import ColdFull, WarmKVError  # noqa: E402

KIB, MIB = 1 << 10, 1 << 20
#: Longer than any step takes on a busy machine; only a hang reaches it.
PATIENCE_S = 120.0
Report = Callable[[str], None]
#: Warm and cold bytes. What must not be lost has more disk than it can fill.
BUDGETS = {"ample": (160 * KIB, 64 * MIB), "tight": (176 * KIB, 640 * KIB), "damaged": (160 * KIB, 64 * MIB)}
for module in [item for name, item in sys.modules.items() if name.startswith("warmkv.kvstore.store")]:
    if hasattr(module, "TRANSACTION_BYTES"):
        module.TRANSACTION_BYTES = 10 * KIB  # type: ignore[attr-defined]


class Blow(Faults):
    """Ends this process with SIGKILL when ``point`` is reached for the ``nth`` time; counts."""

    def __init__(self, point: str = "", nth: int = 0) -> None:
        self.reached_times: Counter[str] = Counter()
        self._point, self._nth, self._lock = point, nth, threading.Lock()

    def reached(self, point: str) -> None:
        with self._lock:
            self.reached_times[point] += 1
            if point == self._point and self.reached_times[point] == self._nth:
                os.kill(os.getpid(), signal.SIGKILL)


def options(path: Path, tier: str, faults: Faults) -> StoreOptions:
    warm_bytes, cold_bytes = BUDGETS[tier]
    served = 0.02 if tier == "tight" else 0.0
    # Room is waited for as long as a busy machine takes: scripts expect every save to be taken.
    times = {"usage_interval_s": 0.02, "evict_interval_s": served, "busy_timeout_s": 120.0}
    return StoreOptions(path, warm_bytes, cold_bytes, faults=faults, **times)


class Life:
    """One process's time with a store: the steps of a script, each reported once it is true."""

    def __init__(self, path: Path, tier: str, faults: Faults, report: Report) -> None:
        self._path, self._tier, self._faults, self._report = path, tier, faults, report
        self._store = self._open()

    def live(self, given: Script) -> None:
        for number, step in enumerate(given.steps):
            prompt = given.prompts[step.prompt]
            if step.verb in ("durable", "save", "copied"):
                self._save(step.prompt, prompt, step.verb)
            elif step.verb == "restore":
                look(self._store, prompt)
            elif step.verb == "forget":
                self._report(f"forgetting {step.prompt}")
                self._store.forget(prompt.identity, prompt.ids)
            elif step.verb == "backup":
                where = self._path.with_name(f"{self._path.name}.backup{given.seed}.{number}")
                self._engine.cold.backup(where)  # type: ignore[union-attr]
                self._report(f"backup {where}")
            elif step.verb == "restart":
                self._close()
                if self._tier == "damaged":
                    damage(self._path / "data.mdb")
                self._store = self._open()
            else:
                self._upkeep(step.verb, prompt)
        self._close()

    @property
    def _engine(self) -> Engine:
        return self._store.engine

    def _open(self) -> Store:
        return Store(Engine.open(options(self._path, self._tier, self._faults)))

    def _close(self) -> None:
        self._store.close()
        self._report("written")

    def _save(self, number: int, prompt: Prompt, verb: str) -> None:
        store, records = self._store, records_at(prompt.identity, prompt.ids)
        if verb == "copied":
            store = Store(self._engine)
            store._session.close()
            store._session = self._engine.session(os.getuid(), foreign=True)
        try:
            saved = store.save(prompt.identity, prompt.ids, records, ack="disk" if verb == "durable" else "memory")
        except ColdFull:
            if self._tier != "tight":
                raise
            return
        assert saved.stored
        self._report(f"{'durable' if saved.durable else 'memory'} {number}")

    def _upkeep(self, verb: str, prompt: Prompt) -> None:
        engine = self._engine
        if verb == "flush":
            assert self._store.flush(60)
            self._report("written")
        elif verb == "pin":
            self._store.pin(prompt.identity, prompt.ids, 0.05)
        elif verb == "demote":
            demote(self._store)
        elif verb == "compact":
            engine.cold.compact()  # type: ignore[union-attr]
        elif verb == "evict":
            engine.eviction.evict("both", to_bytes=100 * KIB)


def damage(path: Path) -> None:
    """Make a store's file unreadable: both of its first pages, which say where the tables are."""
    with open(path, "r+b") as file:
        file.write(b"\xff" * 8192)


# -- jobs ------------------------------------------------------------------------------------


def run(job: dict[str, Any], report: Report) -> None:
    """Live through the script of a seed. ``told`` names a file that the reports are written to as
    well; ``unsynced`` leaves out every sync, for a test of those who look for them."""
    if told := job.get("told"):
        also = os.open(told, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        piped = report

        def report(line: str) -> None:
            os.write(also, f"{line}\n".encode())
            piped(line)

    if job.get("unsynced"):
        lmdb.open = partial(lmdb.open, sync=False)  # type: ignore[assignment]
    faults = Blow(job.get("point", ""), job.get("nth", 0))
    Life(Path(job["store"]), job["tier"], faults, report).live(script(job["seed"], WEIGHTS[job["tier"]]))
    report(f"reached {json.dumps(faults.reached_times)}")


def examine(job: dict[str, Any], report: Report) -> None:
    """Open what a dead process left; each line says what is wrong with it: ``failed`` to start or
    to answer, a ``problem`` of the index, a ``bad`` record, ``lost`` and ``corrupt`` prompts."""
    where = Path(job["store"])
    try:
        store = Store(Engine.open(options(where, job["tier"], Faults())))
    except (WarmKVError, OSError):
        report(f"failed {traceback.format_exc()}")
        return
    for problem in check(store.engine):
        report(f"problem {problem}")
    required = {(seed, number) for seed, number in job["required"]}
    for seed in job["seeds"]:
        for number, prompt in enumerate(script(seed, WEIGHTS[job["tier"]]).prompts):
            # A test of this test compares with rows of other prompts, none of which fit.
            ids = (prompt.ids[0] ^ 1, *prompt.ids[1:]) if job.get("swapped") else prompt.ids
            try:
                if not look(store, prompt, ids, verify=True) and (seed, number) in required:
                    match = store.match(prompt.identity, [*prompt.ids, STRANGER])
                    report(f"lost {seed} {number}: {match.usable} of {len(ids)} tokens, {match.reason}")
            except AssertionError:
                report(f"corrupt {seed} {number}: {traceback.format_exc()}"[:800])
    for bad in store.report("verify")["bad"]:  # type: ignore[attr-defined]
        report(f"bad {bad}")
    for problem in check(store.engine):
        report(f"problem {problem}")
    store.close()
    for left in sorted(path.name for path in where.iterdir()):
        report(f"left {left}")


def _forked(work: Callable[[dict[str, Any], Report], None], job: dict[str, Any]) -> dict[str, Any]:
    """Do a job in a child; its lines and how it ended, both as far as it came."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(reading)
        status = 1
        try:
            work(job, lambda line: _tell(writing, line))
            status = 0
        except BaseException:  # noqa: BLE001 - told to the parent
            _tell(writing, f"failed {traceback.format_exc()}")
        finally:
            os._exit(status)
    os.close(writing)
    told, killed_at = b"", 1e18
    while True:
        if "after_s" in job and killed_at == 1e18 and told.count(b"\0") >= job["after_lines"]:
            killed_at = time.monotonic() + job["after_s"]
        ready, _, _ = select.select([reading], [], [], min(PATIENCE_S, max(0.0, killed_at - time.monotonic())))
        if not ready:  # the blow, or the end of what hangs
            told += b"" if time.monotonic() >= killed_at else b"failed: nothing was heard for long\0"
            os.kill(pid, signal.SIGKILL)
            killed_at = 2e18
        elif piece := os.read(reading, 1 << 16):
            told += piece
        else:
            break
    os.close(reading)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return {"status": status, "lines": [line.decode() for line in told.split(b"\0")[:-1]]}


def _tell(fd: int, line: str) -> None:
    data = line.encode() + b"\0"
    while data:
        data = data[os.write(fd, data) :]


def main() -> None:
    logging.disable(logging.CRITICAL)  # stores set aside are what this is about
    jobs = {"run": run, "examine": examine}
    for line in sys.stdin:
        job = json.loads(line)
        if job["do"] == "examine" and job.get("copied"):
            # The store itself goes on as the blow left it, never healed by a start in between.
            copy = Path(job["store"] + ".copy")
            shutil.copytree(job["store"], copy)
            try:
                answer = _forked(jobs[job["do"]], {**job, "store": str(copy)})
            finally:
                shutil.rmtree(copy)
        else:
            answer = _forked(jobs[job["do"]], job)
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
