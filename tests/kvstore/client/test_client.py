"""The client in an agent's path: never worse off than without it."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from warmkv import connect
from warmkv.daemon.testing import PATIENCE_S, ServedEngine, eventually
from warmkv.kvstore.rows import LayerRows
from warmkv.kvstore.store.engine import Engine
from warmkv.schema import errors
from warmkv.schema import messages as m
from warmkv.schema.identity import Identity

Rows = Callable[[int], list[LayerRows]]
Scripted = Callable[[Callable[[Any], None]], Any]
TOKENS = list(range(20))
QUERY = [*TOKENS, 99]


def every_verb(client: Any, identity: Identity, rows: Rows) -> list[str]:
    """Call all verbs of an agent's path; the reasons of what came back empty."""
    match = client.match(identity, QUERY)
    restored = client.restore(identity, QUERY)
    fetched = client.prefetch(identity, QUERY)
    saved = client.save(identity, TOKENS, rows(20))
    later = client.save_async(identity, TOKENS, rows(20)).result(PATIENCE_S)
    assert not (match or restored or fetched or saved.stored or later.stored)
    assert client.offer(identity, QUERY).held == 0
    assert (client.pin(identity, TOKENS, 5), client.unpin(identity, TOKENS)) == (0, 0)
    assert client.forget(identity, TOKENS).records == 0
    return [match.reason, restored.reason, fetched.reason, saved.reason, later.reason]


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


# -- absent --------------------------------------------------------------------------------


def test_an_absent_daemon_is_misses_with_a_reason_and_exactly_one_warning(
    socket_path: Path, identity: Identity, rows: Rows, caplog: pytest.LogCaptureFixture
) -> None:
    with connect(socket_path) as client, connect(socket_path) as other:
        reasons = every_verb(client, identity, rows) + every_verb(other, identity, rows)
    assert all("no daemon at" in reason for reason in reasons)
    assert len(warnings(caplog)) == 1 and str(socket_path) in warnings(caplog)[0]


def test_another_socket_gets_its_own_warning(tmp_path: Path, identity: Identity, caplog: pytest.LogCaptureFixture) -> None:
    for name in ("a", "b", "a"):
        connect(tmp_path / name).match(identity, QUERY)
    assert len(warnings(caplog)) == 2


def test_warnings_as_errors_do_not_reach_the_agent(
    socket_path: Path, identity: Identity, recwarn: pytest.WarningsRecorder
) -> None:
    assert not connect(socket_path).match(identity, QUERY)
    assert not recwarn.list


def test_an_absent_daemon_is_found_once_it_is_there(
    socket_path: Path, engine: Engine, identity: Identity, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = connect(socket_path)
    with ServedEngine(socket_path, engine):
        monkeypatch.setattr(client._remote._backoff, "_clock", lambda: 1e12)  # type: ignore[union-attr]
        assert "no daemon" not in client.match(identity, QUERY).reason
        assert client.stats()
        client.close()


def test_strict_raises_at_connecting_and_in_every_verb(
    socket_path: Path, engine: Engine, identity: Identity, rows: Rows, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(errors.DaemonUnavailable):
        connect(socket_path, strict=True)
    with ServedEngine(socket_path, engine):
        client = connect(socket_path, strict=True)
    calls: list[Callable[[], object]] = [
        lambda: client.match(identity, QUERY),
        lambda: client.restore(identity, QUERY),
        lambda: client.prefetch(identity, QUERY),
        lambda: client.offer(identity, QUERY),
        lambda: client.save(identity, TOKENS, rows(20)),
        lambda: client.save_async(identity, TOKENS, rows(20)).result(PATIENCE_S),
        lambda: client.pin(identity, TOKENS, 5),
        lambda: client.forget(identity, TOKENS),
        client.stats,
    ]
    for call in calls:
        with pytest.raises(errors.DaemonUnavailable):
            call()
    with ServedEngine(socket_path, engine):
        assert client.stats()  # strict clients try every time
        client.close()
    assert not warnings(caplog)


def test_bad_input_raises_with_or_without_a_daemon(socket_path: Path, identity: Identity, rows: Rows) -> None:
    client = connect(socket_path)
    for call in (
        lambda: client.match(identity, []),
        lambda: client.match(identity, [-1]),
        lambda: client.save(identity, TOKENS, rows(19)),
        lambda: client.pin(identity, TOKENS, 0),
    ):
        with pytest.raises(errors.RecordError):
            call()
    client.close()
    with pytest.raises(errors.ClosedError):
        client.match(identity, QUERY)


def test_reports_raise_since_no_answer_waits_for_them(socket_path: Path) -> None:
    with pytest.raises(errors.DaemonUnavailable):
        connect(socket_path).stats()


def test_a_path_too_long_is_misses_too(tmp_path: Path, identity: Identity, caplog: pytest.LogCaptureFixture) -> None:
    client = connect(tmp_path / ("x" * 120))
    assert "SocketPathError" in client.match(identity, QUERY).reason
    assert len(warnings(caplog)) == 1
    with pytest.raises(errors.SocketPathError):
        connect(tmp_path / ("x" * 120), strict=True)


# -- switched off, and found by the environment --------------------------------------------


def test_switched_off_everything_is_a_silent_miss(
    served: ServedEngine, identity: Identity, rows: Rows, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("WARMKV_DISABLE", "1")
    for strict in (False, True):
        with connect(served.socket, strict=strict) as client:
            assert all("WARMKV_DISABLE" in reason for reason in every_verb(client, identity, rows))
            assert not client.enabled
    assert served.server.connections == 0
    assert not warnings(caplog)
    for value in ("0", "", "false", "no"):
        monkeypatch.setenv("WARMKV_DISABLE", value)
        with connect(served.socket, strict=True) as client:
            assert client.enabled and client.stats()


def test_the_socket_is_found_by_the_environment(
    served: ServedEngine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, engine: Engine
) -> None:
    monkeypatch.setenv("WARMKV_SOCKET", str(served.socket))
    with connect(strict=True) as client:
        assert client.path == served.socket
    monkeypatch.delenv("WARMKV_SOCKET")
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "x"))
    with ServedEngine(tmp_path / "x" / "warmkv" / "warmkv.sock", engine), connect(strict=True) as client:
        assert client.stats()
    monkeypatch.setenv("XDG_RUNTIME_DIR", "relative")
    assert connect().path.is_absolute()


# -- slow, dying, misbehaving --------------------------------------------------------------


def test_a_daemon_that_never_answers_costs_one_timeout_and_one_warning(
    scripted: Scripted, socket_path: Path, identity: Identity, rows: Rows, caplog: pytest.LogCaptureFixture
) -> None:
    over = threading.Event()

    def script(line: Any) -> None:
        line.greet()
        line.hear()
        assert over.wait(PATIENCE_S)

    with scripted(script) as daemon:
        client = connect(socket_path, timeout_s=0.1)
        assert "DaemonTimeout" in client.match(identity, QUERY).reason
        assert all("not asked again yet" in reason for reason in every_verb(client, identity, rows))
        assert daemon.connections == 1
        client.close()
        over.set()
    assert len(warnings(caplog)) == 1


def test_a_daemon_that_does_not_even_greet(scripted: Scripted, socket_path: Path, identity: Identity) -> None:
    with scripted(lambda line: (line.hear(), line.hear())) as daemon:
        client = connect(socket_path, timeout_s=0.05)
        assert "not asked again yet" in client.match(identity, QUERY).reason
        assert daemon.connections == 1
        client.close()


@pytest.mark.parametrize("verb", ["match", "restore", "offer", "save", "prefetch"])
def test_a_daemon_that_dies_during_a_call_is_a_miss(
    scripted: Scripted, socket_path: Path, identity: Identity, rows: Rows, caplog: pytest.LogCaptureFixture, verb: str
) -> None:
    def script(line: Any) -> None:
        line.greet()
        assert isinstance(line.hear(), m.Open)
        line.say(m.Opened(bytes(16)))
        assert line.hear() is not None
        line.channel.socket.sendall(b"\1\0")

    with scripted(script):
        client = connect(socket_path)
        result = client.save(identity, TOKENS, rows(20)) if verb == "save" else getattr(client, verb)(identity, QUERY)
        if verb == "offer":
            assert result.held == 0
        else:
            assert "DaemonUnavailable" in result.reason
        client.close()
    assert len(warnings(caplog)) == 1


def test_a_daemon_that_dies_between_offer_and_commit_gives_the_save_up(
    scripted: Scripted, socket_path: Path, identity: Identity, rows: Rows, descriptors: Callable[[], int]
) -> None:
    before = descriptors()

    def script(line: Any) -> None:
        line.greet()
        line.hear()
        line.say(m.Opened(bytes(16)))
        line.hear()
        line.say(m.Offered(0, bytes(16), 1, 1, 1))
        assert isinstance(line.hear(), m.Commit)

    with scripted(script):
        client = connect(socket_path)
        saved = client.save(identity, TOKENS, rows(20))
        assert not saved.stored and "DaemonUnavailable" in saved.reason
        client.close()
    assert descriptors() == before


def hostile_grants() -> dict[str, Callable[[Any], None]]:
    def spans(*rows: tuple[int, int, int]) -> bytes:
        table = np.zeros(len(rows), m.SPAN_DTYPE)
        for row, (start, end, size) in zip(table, rows, strict=True):
            row["start"], row["end"], row["container_bytes"] = start, end, size
        return table.tobytes()

    def with_file(reply: m.Acquired, size: int = 0, count: int = 1) -> Callable[[Any], None]:
        def say(line: Any) -> None:
            fd = os.memfd_create("hostile")
            os.truncate(fd, size)
            line.say(reply, fds=(fd,) * count)
            os.close(fd)

        return say

    good = m.Acquired(matched=4, usable=4, lease=1, tier=m.TIER_WARM, spans=spans((0, 4, 4096)))
    return {
        "unsealed memory": with_file(good, 4096),
        "more descriptors than spans": with_file(good, 4096, 3),
        "fewer descriptors than spans": lambda line: line.say(good),
        "no spans": with_file(m.Acquired(matched=4, usable=4, lease=1, tier=m.TIER_WARM), 4096),
        "more usable than asked": with_file(m.Acquired(matched=99, usable=99, lease=1, spans=spans((0, 99, 4096))), 4096),
        "rows that overlap": with_file(m.Acquired(usable=4, lease=1, spans=spans((0, 3, 4096), (2, 4, 4096))), 4096, 2),
        "an unknown tier": with_file(m.Acquired(usable=4, lease=1, tier=9, spans=spans((0, 4, 4096))), 4096),
        "spans of an odd size": with_file(m.Acquired(usable=4, lease=1, spans=b"xyz"), 4096),
        "anchors of an odd size": with_file(m.Acquired(usable=4, lease=1, anchors=b"xyz"), 4096),
    }


@pytest.mark.parametrize("name", hostile_grants())
def test_a_grant_that_cannot_be_is_a_miss_and_leaves_nothing_open(
    scripted: Scripted, socket_path: Path, identity: Identity, descriptors: Callable[[], int], name: str
) -> None:
    before = descriptors()

    def script(line: Any) -> None:
        line.greet()
        while (asked := line.hear()) is not None:
            if isinstance(asked, m.Open):
                line.say(m.Opened(bytes(16)))
            elif isinstance(asked, m.Acquire):
                hostile_grants()[name](line)

    with scripted(script):
        client = connect(socket_path)
        restored = client.restore(identity, QUERY)
        assert not restored and restored.reason
        client.close()
    assert descriptors() == before


# -- the real thing ------------------------------------------------------------------------


def test_what_is_saved_comes_back(served: ServedEngine, identity: Identity, rows: Rows) -> None:
    with connect(served.socket, strict=True) as client:
        assert client.save(identity, TOKENS, rows(20)).stored
        match = client.match(identity, QUERY)
        assert (match.matched, match.usable, match.tier) == (20, 20, "warm")
        with client.restore(match, QUERY, verify=True) as restored:
            np.testing.assert_array_equal(restored.layers[0].keys, rows(20)[0].planes[0].rows)
            assert not restored.layers[0].keys.flags.writeable
        assert client.save(identity, TOKENS, rows(20)).duplicate
        assert client.pin(identity, TOKENS, 60) == 20
        client.unpin(identity, TOKENS)
        assert client.forget(identity, TOKENS).records == 1
        assert client.match(identity, QUERY).usable == 0


def test_leases_end_with_close_with_collection_and_with_the_client(
    served: ServedEngine, engine: Engine, identity: Identity, rows: Rows
) -> None:
    def leases() -> int:
        return sum(len(record.leases) for record in engine.index.records.values())

    with connect(served.socket, strict=True) as client:
        client.save(identity, TOKENS, rows(20))
        restored = client.restore(identity, QUERY)
        assert leases() == 1
        restored.close()
        assert eventually(lambda: leases() == 0)
        restored = client.restore(identity, QUERY)
        del restored
        assert eventually(lambda: leases() == 0)
        kept = client.restore(identity, QUERY)
        keys = kept.layers[0].keys
        client.close()
        assert eventually(lambda: leases() == 0)
        np.testing.assert_array_equal(keys, rows(20)[0].planes[0].rows)  # views outlive all of it


def test_a_restarted_daemon_is_found_without_a_miss(socket_path: Path, engine: Engine, identity: Identity, rows: Rows) -> None:
    with ServedEngine(socket_path, engine):
        client = connect(socket_path, strict=True)
        client.save(identity, TOKENS, rows(20))
    with ServedEngine(socket_path, engine):
        assert client.match(identity, QUERY).usable == 20
        with client.restore(identity, QUERY) as restored:
            assert restored.usable == 20
        assert client.save(identity, QUERY, rows(21)).stored
        client.close()


def test_eight_threads_share_a_client(
    served: ServedEngine, engine: Engine, identity: Identity, rows: Rows, descriptors: Callable[[], int]
) -> None:
    client = connect(served.socket, strict=True, timeout_s=PATIENCE_S)
    client.save(identity, TOKENS, rows(20))
    wrong: list[object] = []
    expected = rows(20)[1].planes[0].rows
    before = descriptors()

    def work(number: int) -> None:
        try:
            for index in range(200):
                kind = (index + number) % 5
                if kind == 0 and client.match(identity, QUERY).usable != 20:
                    wrong.append("match")
                elif kind == 1:
                    with client.restore(identity, QUERY) as restored:
                        if not np.array_equal(restored.layers[1].keys, expected):
                            wrong.append("rows")
                elif kind == 2 and not client.save(identity, [7, number, index], rows(3)).stored:
                    wrong.append("save")
                elif kind == 3 and client.offer(identity, TOKENS).held != 20:
                    wrong.append("offer")
                elif kind == 4:
                    client.restore(identity, QUERY)  # dropped without closing
        except BaseException as exc:  # noqa: BLE001
            wrong.append(exc)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert eventually(lambda: all(not record.leases for record in engine.index.records.values()))
    assert engine.warm.ledger.reserved_bytes == 0
    held = len(engine.index.records) - 1  # one descriptor for each record saved meanwhile
    client.close()
    assert eventually(lambda: descriptors() <= before + held)


# -- forks ---------------------------------------------------------------------------------


def in_child(work: Callable[[], str]) -> str:
    """Fork, run ``work`` in the child, and hand its words over."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.write(writing, work().encode())
        except BaseException as exc:  # noqa: BLE001 - told to the parent
            os.write(writing, repr(exc).encode())
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as said:
        words = said.read()
    os.waitpid(pid, 0)
    return words


def test_a_forked_child_has_its_own_connections_and_leaves_the_parents_alone(
    served: ServedEngine, engine: Engine, identity: Identity, rows: Rows
) -> None:
    with connect(served.socket, strict=True) as client:
        client.save(identity, TOKENS, rows(20))
        held = client.restore(identity, QUERY)
        ours = client._remote._pool._idle[-1]  # type: ignore[union-attr]
        connected = served.server.connections

        def child() -> str:
            if ours.usable:
                return "the parent's connection is still open here"
            held.close()  # the lease is the parent's
            with client.restore(identity, QUERY) as restored:
                first = restored.usable
            saved = client.save(identity, [5, 6, 7], rows(3)).stored
            later = client.save_async(identity, [5, 6, 7, 8], rows(4)).result(PATIENCE_S).stored
            client.close()
            return f"{first} {saved} {later}"

        assert in_child(child) == "20 True True"
        assert eventually(lambda: served.server.connections == connected)
        assert sum(len(record.leases) for record in engine.index.records.values()) == 1
        assert ours.usable and client.match(identity, [5, 6, 7, 8, 9]).usable == 4
        held.close()


def test_a_fork_during_calls_of_other_threads_is_survived(served: ServedEngine, identity: Identity, rows: Rows) -> None:
    with connect(served.socket, strict=True, timeout_s=PATIENCE_S) as client:
        client.save(identity, TOKENS, rows(20))
        stop = threading.Event()

        def busy() -> None:
            while not stop.is_set():
                client.match(identity, QUERY)

        threads = [threading.Thread(target=busy) for _ in range(4)]
        for thread in threads:
            thread.start()
        said = [in_child(lambda: str(client.match(identity, QUERY).usable)) for _ in range(20)]
        stop.set()
        for thread in threads:
            thread.join()
        assert said == ["20"] * 20
        assert client.match(identity, QUERY).usable == 20


def test_a_child_gets_its_own_warning(socket_path: Path, identity: Identity, caplog: pytest.LogCaptureFixture) -> None:
    client = connect(socket_path)
    client.match(identity, QUERY)

    def child() -> str:
        caplog.clear()
        client._remote._backoff.succeeded()  # type: ignore[union-attr]
        client.match(identity, QUERY)
        client.match(identity, QUERY)
        return str(len(warnings(caplog)))

    assert in_child(child) == "1"
    assert len(warnings(caplog)) == 1
