"""One daemon per store, whatever is tried: starters at once, a store that is swapped below one, a
fork of a process that has a store open. And daemons that are killed under load."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from fault_looking import look
from fault_script import Prompt

from warmkv.daemon.testing import PATIENCE_S, DaemonProcess, ServedEngine, child_environ, eventually
from warmkv.kvstore.client import Client, connect
from warmkv.kvstore.store import Store, StoreOptions
from warmkv.kvstore.store.check import check
from warmkv.kvstore.store.engine import Engine
from warmkv.kvstore.testing import records_at
from warmkv.schema.errors import ColdFull, StoreError, StoreInUse, WarmKVError

MIB = 1 << 20
IN_USE = 6
Say = Callable[[str], None]


def prompt(number: int, length: int = 40, model: int = 0) -> Prompt:
    return Prompt(model, (1000 + number, *range(5000, 5000 + length - 1)))


def saved(store: Client | Store, about: Prompt) -> bool:
    return store.save(about.identity, about.ids, records_at(about.identity, about.ids), ack="disk").durable


# -- pairs of starters -----------------------------------------------------------------------

#: Forks two starters a line, which go at once; tells their process ids, then how each ended. They
#: have a socket each when the line says so, and the same store.
STARTERS = """
import os, sys
from warmkv.daemon.cli import main
from warmkv.daemon import lifecycle, logs
from warmkv.kvstore.store import engine
path, store = sys.argv[1:3]
for line in sys.stdin:
    reading, writing = os.pipe()
    for number in range(2):
        pid = os.fork()
        if pid == 0:
            os.close(writing)
            os.read(reading, 1)
            where = f"{path}{number}" if line.strip() == "apart" else path
            os._exit(main(["serve", "--socket", where, "--store", store, "--warm-bytes", "4MiB", "--cold-bytes", "8MiB"]))
        print(pid, flush=True)
    os.close(reading), os.close(writing)
    for number in range(2):
        ended, status = os.wait()
        print(ended, os.waitstatus_to_exitcode(status), flush=True)
"""


class Pairs:
    """Starters in pairs, one of which must win."""

    def __init__(self, folder: Path) -> None:
        self.alive: set[int] = set()
        self.path, self.store = folder / "run" / "s", folder / "store"
        self._log = folder / "log"
        command = [sys.executable, "-c", STARTERS, str(self.path), str(self.store)]
        with open(self._log, "wb") as log:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True, env=child_environ()
            )

    def race(self, number: int) -> None:
        """Two go at once; the loser says that the store, or the socket, is in use, and the winner
        answers, until it is killed or stopped."""
        apart = number % 3 == 2
        self._say("apart" if apart else "together")
        pids = [int(self._hear()) for _ in range(2)]
        self.alive = set(pids)
        loser, status = map(int, self._hear().split())
        self.alive.remove(loser)
        (winner,) = self.alive
        assert status == IN_USE, self._log.read_text()[-3000:]
        path = Path(f"{self.path}{pids.index(winner)}") if apart else self.path
        assert eventually(lambda: answers(path))
        with connect(path, strict=True, timeout_s=PATIENCE_S) as client:
            assert [n for n in range(number) if client.match(prompt(n).identity, [*prompt(n).ids, 7]).usable != 40] == []
            assert saved(client, prompt(number))
        blow = (signal.SIGKILL, signal.SIGTERM)[number % 2]
        os.kill(winner, blow)
        ended, status = map(int, self._hear().split())
        self.alive.discard(ended)
        assert (ended, status) == (winner, -signal.SIGKILL if blow == signal.SIGKILL else 0)

    def close(self) -> None:
        for pid in self.alive:
            os.kill(pid, signal.SIGKILL)
        self._process.communicate(timeout=PATIENCE_S)

    def _say(self, word: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{word}\n")
        self._process.stdin.flush()

    def _hear(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline()


def answers(path: Path) -> bool:
    try:
        connect(path, strict=True, timeout_s=PATIENCE_S).close()
    except WarmKVError:
        return False
    return True


@pytest.fixture
def pairs(tmp_path: Path) -> Iterator[Pairs]:
    made = Pairs(tmp_path)
    yield made
    made.close()


def test_a_few_pairs_of_starters(pairs: Pairs) -> None:
    for number in range(4):
        pairs.race(number)


@pytest.mark.faults
def test_a_hundred_pairs_of_starters(pairs: Pairs, say: Say) -> None:
    """At one socket, or at two with one store; winners are killed and stopped in turn."""
    for number in range(100):
        pairs.race(number)
        say(f"{number + 1} pairs, one winner each, the other ends with {IN_USE}")


# -- a store that is swapped, a process that forks -------------------------------------------


@pytest.mark.parametrize("swap", ["moved", "removed", "replaced"])
def test_a_store_that_is_swapped_below_a_daemon(fast_folder: Path, swap: str) -> None:
    """What it cannot keep it does not promise, and what it holds it goes on serving; at its old place
    a store that was put there is untouched."""
    where, other = fast_folder / "store", fast_folder / "other"
    Store(Engine.open(StoreOptions(other, 4 * MIB, 8 * MIB))).close()
    engine = Engine.open(StoreOptions(where, 4 * MIB, 8 * MIB))
    with ServedEngine(fast_folder / "run" / "s", engine), connect(fast_folder / "run" / "s", strict=True) as client:
        assert saved(client, prompt(1))
        if swap == "removed":
            shutil.rmtree(where)
        else:
            where.rename(fast_folder / "elsewhere")
        if swap == "replaced":
            shutil.copytree(other, where)
        assert "store" in engine.health.problems()
        with pytest.raises((ColdFull, StoreError)):
            saved(client, prompt(2))
        assert look(client, prompt(1), verify=True)  # type: ignore[arg-type]
        with connect(fast_folder / "run" / "s", strict=False) as calm:
            assert not saved(calm, prompt(3))
    engine.close()
    if swap == "replaced":
        assert (where / "data.mdb").read_bytes() == (other / "data.mdb").read_bytes()
    if swap != "removed":
        kept = where if swap == "moved" and where.exists() else fast_folder / "elsewhere"
        again = Store(Engine.open(StoreOptions(kept, 4 * MIB, 8 * MIB)))
        assert look(again, prompt(1), verify=True) and check(again.engine) == []
        again.close()


def test_a_daemon_whose_process_forks_keeps_its_store(fast_folder: Path) -> None:
    """A child may close and try what it likes: lock, records and readers stay its parent's."""
    store = Store(Engine.open(StoreOptions(fast_folder / "store", 4 * MIB, 8 * MIB)))
    assert saved(store, prompt(0))
    for number in range(1, 6):
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                store.engine.close()
                try:
                    Engine.open(StoreOptions(fast_folder / "store", 4 * MIB, 8 * MIB))
                except StoreInUse:
                    status = 0
            finally:
                os._exit(status)
        assert saved(store, prompt(number))
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        assert all(look(store, prompt(before), verify=True) for before in range(number + 1))
    assert check(store.engine) == []
    store.close()


# -- daemons killed under load ---------------------------------------------------------------


class Load:
    """Agents of a daemon, each in a thread, who save and look until it is gone."""

    def __init__(self, path: Path, first: int) -> None:
        self.durable: list[Prompt] = []
        self.wrong: list[str] = []
        self._path = path
        self._threads = [threading.Thread(target=self._agent, args=(first + 1000 * n,), daemon=True) for n in range(4)]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def join(self) -> None:
        for thread in self._threads:
            thread.join(PATIENCE_S)
            assert not thread.is_alive()

    def _agent(self, number: int) -> None:
        try:
            with connect(self._path, strict=True, timeout_s=PATIENCE_S) as client:
                for turn in range(1000):
                    about = prompt(number + turn // 3, 20 * (turn % 3 + 1), number // 1000 % 2)
                    if saved(client, about):
                        self.durable.append(about)
                    look(client, about)  # type: ignore[arg-type]
        except WarmKVError:
            pass  # it was killed
        except BaseException as exc:  # noqa: BLE001 - told to the test
            self.wrong.append(f"{type(exc).__name__}: {exc}")


def kill_under_load(folder: Path, rounds: int, say: Say) -> None:
    rng, compared = random.Random(rounds), 0
    held: list[Prompt] = []
    daemon = DaemonProcess(folder, "--warm-bytes", "2MiB", "--cold-bytes", "512MiB")
    try:
        for number in range(rounds):
            daemon.start()
            with connect(daemon.socket, strict=True, timeout_s=PATIENCE_S) as client:
                # All of the last round, and some from before.
                for about in held[-200:] + rng.sample(held, min(50, len(held))):
                    assert look(client, about, verify=True), about  # type: ignore[arg-type]
                    compared += 1
            load = Load(daemon.socket, 10_000 * number)
            load.start()
            wanted = rng.randint(1, 60)
            assert eventually(lambda: len(load.durable) >= wanted)  # noqa: B023
            daemon.kill()
            load.join()
            assert load.wrong == []
            held += load.durable
            say(f"{number + 1} daemons killed under load, {len(held)} durable saves, {compared} compared: 0 lost, 0 corrupt")
        daemon.start()
        with connect(daemon.socket, strict=True, timeout_s=PATIENCE_S) as client:
            assert [about for about in held if not look(client, about, verify=True)] == []  # type: ignore[arg-type]
            verified = client.report("verify")
            assert (verified["bad"], verified["problems"]) == ([], [])
        assert daemon.stop() == 0
    finally:
        daemon.kill()


def test_daemons_killed_under_load(tmp_path: Path, say: Say) -> None:
    kill_under_load(tmp_path, 2, say)


@pytest.mark.faults
def test_many_daemons_killed_under_load(tmp_path: Path, say: Say) -> None:
    kill_under_load(tmp_path, 30, say)
