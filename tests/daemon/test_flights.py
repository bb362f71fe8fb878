"""Waiting for a twin across processes: whoever computes may be killed, whoever waits may leave,
and the daemon may stop; nobody is left waiting and nothing stays promised."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from warmkv import connect
from warmkv.daemon.testing import PATIENCE_S, DaemonProcess, ServedEngine, child_environ, eventually
from warmkv.kvstore.client.client import Client
from warmkv.kvstore.rows import LayerRows
from warmkv.kvstore.store.engine import Engine
from warmkv.kvstore.testing.bounds import Task
from warmkv.schema import messages as m
from warmkv.schema.identity import Identity
from warmkv.schema.records import CLEAN, NamespaceKey

Rows = Callable[[int], list[LayerRows]]
PROMPT = list(range(300, 340))
ARRAY = np.array(PROMPT, "<u4")
LONG_MS = int(PATIENCE_S * 1000)
AGENTS = 20

#: Leads a flight until it is told to go on: "save" stores the prompt first. Says what it got.
LEADER = """
import sys
import numpy as np
from warmkv import connect
from warmkv.kvstore.rows import LayerRows
from warmkv.schema.identity import Identity
path, identity, length = sys.argv[1], Identity.from_canonical(bytes.fromhex(sys.argv[2])), int(sys.argv[3])
prompt = list(range(300, 300 + length))
client = connect(path, strict=True)
restored = client.restore(identity, prompt, wait_s=60)
print("leads" if restored.flight else "follows", flush=True)
if sys.stdin.readline() == "save\\n":
    numbers = np.arange(length * 16, dtype="<f4").reshape(length, 2, 8)
    client.save(identity, prompt, [LayerRows.kv(layer, numbers + layer * 1e6, -numbers - layer * 1e6) for layer in range(2)])
    print("saved", flush=True)
    sys.stdin.readline()
"""


class Leader:
    """A client process that computes while others wait."""

    def __init__(self, path: Path, identity: Identity) -> None:
        command = [sys.executable, "-c", LEADER, str(path), identity.canonical().hex(), str(len(PROMPT))]
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, env=child_environ(), text=True)
        assert self.hear() == "leads"

    def hear(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def say(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def end(self, number: signal.Signals = signal.SIGKILL) -> None:
        self.process.send_signal(number)
        self.process.wait(PATIENCE_S)
        for stream in (self.process.stdin, self.process.stdout):
            assert stream is not None
            stream.close()


@pytest.fixture
def lead(served: ServedEngine, identity: Identity) -> Iterator[Leader]:
    leader = Leader(served.socket, identity)
    yield leader
    if leader.process.poll() is None:
        leader.end()


@pytest.fixture
def client(served: ServedEngine) -> Iterator[Client]:
    with connect(served.socket, strict=True, timeout_s=PATIENCE_S) as made:
        yield made


def asking(client: Client, identity: Identity, count: int) -> list[Task]:
    return [Task(lambda: client.restore(identity, PROMPT, wait_s=PATIENCE_S)) for _ in range(count)]


def waiting(engine: Engine, count: int) -> bool:
    return eventually(lambda: engine.acquisition.flights.waiting == count)


def settled(engine: Engine) -> bool:
    """No flight, no lease, nobody waiting."""
    flights = engine.acquisition.flights
    return eventually(lambda: not len(flights) and not flights.waiting and not engine.acquisition._leased)


# -- one computes ----------------------------------------------------------------------------


def test_twenty_clients_with_one_prompt_compute_it_once(
    served: ServedEngine, engine: Engine, identity: Identity, rows: Rows
) -> None:
    """Each over a connection of its own, as processes have."""
    clients = [connect(served.socket, strict=True, timeout_s=PATIENCE_S) for _ in range(AGENTS)]
    try:
        first = clients[0].restore(identity, PROMPT, wait_s=PATIENCE_S)
        assert not first and first.flight is not None
        tasks = [task for client in clients[1:] for task in asking(client, identity, 1)]
        assert waiting(engine, AGENTS - 1)
        clients[0].save(identity, PROMPT, rows(len(PROMPT)))
        for task in tasks:
            with task.outcome() as restored:
                assert restored.usable == len(PROMPT) - 1 and restored.flight is None
                np.testing.assert_array_equal(restored.layers[1].keys, rows(len(PROMPT))[1].planes[0].rows[:-1])
        first.flight.close()
        assert settled(engine)
        stats = clients[0].stats()
        assert (stats["saves"], stats["waits"], stats["hits"]) == (1, AGENTS - 1, AGENTS - 1)
    finally:
        for item in clients:
            item.close()


def test_what_a_process_computed_is_handed_to_those_who_waited(
    lead: Leader, client: Client, engine: Engine, identity: Identity, rows: Rows
) -> None:
    tasks = asking(client, identity, 5)
    assert waiting(engine, 5)
    lead.say("save")
    assert lead.hear() == "saved"
    for task in tasks:
        with task.outcome() as restored:
            assert restored.usable == len(PROMPT) - 1 and restored.flight is None
            np.testing.assert_array_equal(restored.layers[0].values, rows(len(PROMPT))[0].planes[1].rows[:-1])
    lead.end()
    assert settled(engine)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_the_death_of_the_process_that_computes_lets_the_others_go_on(
    lead: Leader, client: Client, engine: Engine, identity: Identity, number: signal.Signals
) -> None:
    tasks = asking(client, identity, 5)
    assert waiting(engine, 5)
    lead.end(number)
    outcomes = [task.outcome() for task in tasks]
    assert not any(outcomes) and all(restored.flight is not None for restored in outcomes)
    for restored in outcomes:
        restored.flight.close()
    assert settled(engine)


def test_killed_after_it_saved_what_it_computed_is_there(
    lead: Leader, client: Client, engine: Engine, identity: Identity
) -> None:
    lead.say("save")
    assert lead.hear() == "saved"
    lead.end()
    with client.restore(identity, PROMPT, wait_s=PATIENCE_S) as restored:
        assert restored.usable == len(PROMPT) - 1 and restored.flight is None
    assert settled(engine)


def test_a_daemon_of_its_own_survives_a_killed_leader(tmp_path: Path, identity: Identity) -> None:
    with DaemonProcess(tmp_path, "--warm-bytes", "64MiB", "--cold-bytes", "0") as daemon:
        leader = Leader(daemon.socket, identity)
        with connect(daemon.socket, strict=True, timeout_s=PATIENCE_S) as client:
            tasks = asking(client, identity, 3)
            assert eventually(lambda: client.stats()["waits"] == 3)
            assert client.stats()["flights"] == 1
            leader.end()
            outcomes = [task.outcome() for task in tasks]
            assert all(restored.flight is not None for restored in outcomes)
            for restored in outcomes:
                restored.flight.close()
            assert eventually(lambda: client.stats()["flights"] == 0)
        assert daemon.stop() == 0


# -- peers of every kind ---------------------------------------------------------------------


def opened(peer: Any, identity: Identity) -> NamespaceKey:
    return NamespaceKey(peer.ask(m.Open(identity.canonical())).namespace)


def test_a_peer_that_leaves_while_it_waits_promises_nothing(
    served: ServedEngine, engine: Engine, peers: type, identity: Identity
) -> None:
    with peers(served.socket).greet() as leader:
        key = opened(leader, identity)
        flight = leader.ask(m.Acquire(key, CLEAN, ARRAY, wait_ms=LONG_MS)).flight
        assert flight
        with peers(served.socket).greet() as peer:
            opened(peer, identity)
            peer.say(m.Acquire(key, CLEAN, ARRAY, wait_ms=LONG_MS))
            assert waiting(engine, 1)
        leader.say(m.Release(np.array([flight], np.uint64)))
        assert isinstance(leader.ask(m.Report("status")), m.Document)
        assert settled(engine)
    assert eventually(lambda: served.server.connections == 0)


def test_a_flight_ends_with_its_own_connection_only(
    served: ServedEngine, engine: Engine, peers: type, identity: Identity
) -> None:
    leader, other = peers(served.socket).greet(), peers(served.socket).greet()
    key = opened(leader, identity)
    opened(other, identity)
    flight = leader.ask(m.Acquire(key, CLEAN, ARRAY, wait_ms=LONG_MS)).flight
    other.say(m.Release(np.array([flight, flight + 1, 0, 2**64 - 1], np.uint64)))
    assert isinstance(other.ask(m.Report("status")), m.Document)
    assert len(engine.acquisition.flights) == 1
    other.close()
    assert eventually(lambda: served.server.connections == 1)
    assert len(engine.acquisition.flights) == 1
    leader.close()
    assert settled(engine)


def test_one_peer_may_lead_many_and_all_end_with_it(
    served: ServedEngine, engine: Engine, peers: type, identity: Identity
) -> None:
    with peers(served.socket).greet() as peer:
        key = opened(peer, identity)
        for first in range(10):
            tokens = np.array([first, *PROMPT], "<u4")
            assert peer.ask(m.Acquire(key, CLEAN, tokens, wait_ms=LONG_MS)).flight
        assert len(engine.acquisition.flights) == 10
        # Its own first promise is a twin of the next: it waits for itself no longer than it says.
        reply = peer.ask(m.Acquire(key, CLEAN, np.array([0, *PROMPT], "<u4"), wait_ms=10))
        assert reply.flight and reply.waited_ms >= 10
    assert settled(engine)


@pytest.mark.parametrize("wait_ms", [1, 2**31, 2**63, 2**64 - 1])
def test_any_patience_is_answered_where_nobody_computes(
    served: ServedEngine, engine: Engine, peers: type, identity: Identity, wait_ms: int
) -> None:
    with peers(served.socket).greet() as peer:
        reply = peer.ask(m.Acquire(opened(peer, identity), CLEAN, ARRAY, wait_ms=wait_ms))
        assert isinstance(reply, m.Acquired) and reply.flight and not reply.lease
    assert settled(engine)


@pytest.mark.parametrize("speed", [0.0, 5e-324, 1.0, 1e308, math.inf, -1.0, -math.inf, math.nan])
def test_any_speed_is_answered(
    served: ServedEngine, client: Client, peers: type, identity: Identity, rows: Rows, speed: float
) -> None:
    """What is no speed must neither fail inside nor keep the daemon busy; the worst is a miss."""
    client.save(identity, PROMPT, rows(len(PROMPT)))
    with peers(served.socket).greet() as peer:
        key = opened(peer, identity)
        reply = peer.ask(m.Match(key, CLEAN, ARRAY, prefill_tps=speed))
        assert isinstance(reply, m.Matched) and reply.usable in (0, len(PROMPT) - 1)
        assert reply.usable or speed not in (0.0, 5e-324, 1.0)
        acquired = peer.ask(m.Acquire(key, CLEAN, ARRAY, prefill_tps=speed))
        assert isinstance(acquired, m.Acquired) and acquired.usable == reply.usable


# -- the daemon ends -------------------------------------------------------------------------


def test_a_daemon_that_stops_answers_those_who_wait(
    served: ServedEngine, engine: Engine, identity: Identity, client: Client
) -> None:
    """With a miss, and at once: they are not what a clean stop has to wait for."""
    with connect(served.socket, strict=True, timeout_s=PATIENCE_S) as leader:
        first = leader.restore(identity, PROMPT, wait_s=PATIENCE_S)
        assert first.flight is not None
        tasks = asking(client, identity, 3)
        assert waiting(engine, 3)
        served.stop()
        for task in tasks:
            restored = task.outcome()
            assert not restored and restored.usable == 0
            if restored.flight is not None:
                restored.flight.close()
        first.flight.close()
    assert settled(engine)


def test_a_killed_daemon_fails_those_who_wait(tmp_path: Path, identity: Identity) -> None:
    """An error for who asked to be told, a miss for everybody else."""
    with DaemonProcess(tmp_path, "--warm-bytes", "1MiB", "--cold-bytes", "0") as daemon:
        leader = Leader(daemon.socket, identity)
        with connect(daemon.socket, timeout_s=PATIENCE_S) as client:
            tasks = asking(client, identity, 2)
            assert eventually(lambda: client.stats()["waits"] == 2)
            os.kill(daemon.pid, signal.SIGKILL)
            for task in tasks:
                restored = task.outcome()
                assert not restored and restored.reason and restored.flight is None
        leader.end()
