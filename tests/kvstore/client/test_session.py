"""The session: pooled connections, repeated questions, leases and reservations."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from warmkv.daemon.testing import PATIENCE_S, ServedEngine, eventually
from warmkv.kvstore.client.connection import Connection
from warmkv.kvstore.client.pool import KEEP, KEEP_RESERVED
from warmkv.kvstore.client.session import RemoteSession
from warmkv.kvstore.store.engine import Engine
from warmkv.schema import errors
from warmkv.schema import messages as m
from warmkv.schema.identity import Identity

KEY = bytes(16)
TOKENS = np.arange(4, dtype="<u4")
MATCH = m.Match(KEY, KEY, TOKENS)
LONG_MS = int(PATIENCE_S * 1000)
Scripted = Callable[[Callable[[Any], None]], Any]


def answer(line: Any) -> m.Message | None:
    """Answer one request as a daemon that has nothing; the request."""
    asked = line.hear()
    replies: dict[type, m.Message] = {
        m.Match: m.Matched(usable=line.number),
        m.Open: m.Opened(KEY),
        m.Offer: m.Offered(0, KEY, 1000 + line.number, 10, 9),
        m.Commit: m.Committed(KEY, 4, 1, False, False),
        m.Annotate: m.Committed(KEY, 4, 1, False, False),
        m.Acquire: m.Acquired(lease=50 + line.number),
        m.Report: m.Document(b"{}"),
    }
    if type(asked) in replies:
        line.say(replies[type(asked)])
    return asked  # type: ignore[no-any-return]


def serve(line: Any) -> None:
    line.greet()
    while answer(line) is not None:
        pass


@pytest.fixture
def session(socket_path: Path) -> Any:
    made = RemoteSession(socket_path, timeout_s=PATIENCE_S)
    yield made
    made.close()


# -- one connection dies -------------------------------------------------------------------


def test_a_connection_is_used_again(scripted: Scripted, session: RemoteSession) -> None:
    with scripted(serve) as daemon:
        for _ in range(5):
            session.match(MATCH)
        assert daemon.connections == 1
        session.close()


def test_a_question_on_a_dead_pooled_connection_is_asked_again(scripted: Scripted, session: RemoteSession) -> None:
    gone = threading.Event()

    def script(line: Any) -> None:
        if line.number == 0:
            line.greet()
            answer(line)
            line.channel.close()
            gone.set()
        else:
            serve(line)

    with scripted(script) as daemon:
        assert session.match(MATCH).usable == 0
        assert gone.wait(PATIENCE_S)
        assert session.match(MATCH).usable == 1
        assert daemon.connections == 2
        session.close()


def test_a_question_is_asked_again_once_only(scripted: Scripted, session: RemoteSession) -> None:
    def script(line: Any) -> None:
        line.greet()
        if line.number == 0:
            answer(line)
        line.hear()

    with scripted(script) as daemon:
        session.match(MATCH)
        with pytest.raises(errors.DaemonUnavailable):
            session.match(MATCH)
        assert daemon.connections == 2


def test_a_question_on_a_fresh_connection_is_not_asked_again(scripted: Scripted, session: RemoteSession) -> None:
    def script(line: Any) -> None:
        line.greet()
        line.hear()

    with scripted(script) as daemon:
        with pytest.raises(errors.DaemonUnavailable):
            session.match(MATCH)
        assert daemon.connections == 1


def test_a_question_whose_answer_began_is_not_asked_again(scripted: Scripted, session: RemoteSession) -> None:
    def script(line: Any) -> None:
        line.greet()
        answer(line)
        line.hear()
        line.channel.socket.sendall(b"\1")

    with scripted(script) as daemon:
        session.match(MATCH)
        with pytest.raises(errors.DaemonUnavailable):
            session.match(MATCH)
        assert daemon.connections == 1


def test_a_lost_commit_is_a_failure(scripted: Scripted, session: RemoteSession) -> None:
    commits = []

    def script(line: Any) -> None:
        line.greet()
        answer(line)
        commits.append(line.hear())

    with scripted(script) as daemon, open(os.devnull, "rb") as file:
        session.match(MATCH)
        with pytest.raises(errors.DaemonUnavailable):
            session.commit(m.Commit(KEY, 9, 0), file.fileno())
        assert daemon.connections == 1
    assert len(commits) == 1


# -- namespaces ----------------------------------------------------------------------------


def test_a_namespace_is_announced_on_every_connection_that_needs_it(scripted: Scripted, session: RemoteSession) -> None:
    heard: list[tuple[int, str]] = []

    def script(line: Any) -> None:
        line.greet()
        while (asked := answer(line)) is not None:
            heard.append((line.number, type(asked).__name__))
            if len(heard) == 2:
                return

    with scripted(script):
        assert session.open(b"identity", "") == KEY
        session.match(MATCH)
        session.match(MATCH)
        session.match(MATCH)
        session.close()
    assert heard == [(0, "Open"), (0, "Match"), (1, "Open"), (1, "Match"), (1, "Match")]


def test_a_namespace_the_daemon_forgot_is_announced_again(scripted: Scripted, session: RemoteSession) -> None:
    heard: list[str] = []

    def script(line: Any) -> None:
        line.greet()
        while (asked := line.hear()) is not None:
            heard.append(type(asked).__name__)
            if heard.count("Match") == 1 and isinstance(asked, m.Match):
                line.say(m.Fault(errors.UnknownNamespace.code, "who?", False))
            else:
                line.say(m.Opened(KEY) if isinstance(asked, m.Open) else m.Matched(usable=1))

    with scripted(script):
        session.open(b"identity", "")
        assert session.match(MATCH).usable == 1
        session.close()
    assert heard == ["Open", "Match", "Open", "Match"]


def test_a_namespace_nobody_announced_stays_unknown(served: ServedEngine, session: RemoteSession) -> None:
    with pytest.raises(errors.UnknownNamespace):
        session.match(MATCH)


# -- leases --------------------------------------------------------------------------------


def acquire() -> m.Acquire:
    return m.Acquire(KEY, KEY, TOKENS)


def test_a_lease_is_given_back_while_nothing_else_is_asked(scripted: Scripted, session: RemoteSession) -> None:
    released = threading.Event()

    def script(line: Any) -> None:
        line.greet()
        answer(line)
        asked = line.hear()
        assert isinstance(asked, m.Release) and asked.leases.tolist() == [50]
        released.set()

    with scripted(script):
        session.acquire(acquire()).release()
        assert released.wait(PATIENCE_S)


def test_a_lease_that_ends_during_a_call_is_given_back_after_it(scripted: Scripted, session: RemoteSession) -> None:
    busy, go_on, released = threading.Event(), threading.Event(), threading.Event()

    def script(line: Any) -> None:
        line.greet()
        answer(line)
        assert isinstance(line.hear(), m.Match)
        busy.set()
        assert go_on.wait(PATIENCE_S)
        line.say(m.Matched())
        assert isinstance(line.hear(), m.Release)
        released.set()

    with scripted(script):
        grant = session.acquire(acquire())
        asking = threading.Thread(target=session.match, args=(MATCH,))
        asking.start()
        assert busy.wait(PATIENCE_S)
        grant.release()  # returns at once: the connection is in use
        go_on.set()
        asking.join(PATIENCE_S)
        assert released.wait(PATIENCE_S)


def test_a_lease_that_ends_in_a_finalizer_under_the_pools_lock_is_not_lost(scripted: Scripted, session: RemoteSession) -> None:
    released = threading.Event()

    def script(line: Any) -> None:
        line.greet()
        answer(line)
        assert isinstance(line.hear(), m.Release)
        released.set()
        while answer(line) is not None:
            pass

    with scripted(script):
        grant = session.acquire(acquire())
        with session._pool._lock:
            grant.release()  # must neither wait nor send
        session.match(MATCH)
        assert released.wait(PATIENCE_S)
        session.close()


def test_a_flight_is_given_back_like_a_lease(scripted: Scripted, session: RemoteSession) -> None:
    """Each by itself: the lease when the state was read, the flight when the rest was saved."""
    released: list[int] = []
    both = threading.Event()

    def script(line: Any) -> None:
        line.greet()
        assert isinstance(line.hear(), m.Acquire)
        line.say(m.Acquired(lease=50, flight=60))
        assert isinstance(line.hear(), m.Acquire)
        line.say(m.Acquired(flight=61))
        while (asked := line.hear()) is not None:
            assert isinstance(asked, m.Release)
            released.extend(asked.leases.tolist())
            if len(released) == 3:
                both.set()

    with scripted(script):
        first, second = session.acquire(acquire()), session.acquire(acquire())
        first.release_flight()
        first.release()
        second.release()  # it leased nothing
        second.release_flight()
        assert both.wait(PATIENCE_S)
        assert not any(item.leases or item.ended for item in session._pool._idle)
        session.close()
    assert released == [60, 50, 61]


def test_a_connection_with_a_flight_is_kept(scripted: Scripted, session: RemoteSession) -> None:
    """Closing it would end the promise: whoever waits would go on without what is computed here."""
    together = threading.Barrier(KEEP + 5)
    grants: list[Any] = []

    def script(line: Any) -> None:
        line.greet()
        assert isinstance(line.hear(), m.Acquire)
        together.wait(PATIENCE_S)
        line.say(m.Acquired(flight=line.number + 1))
        while line.hear() is not None:
            pass

    with scripted(script):
        threads = [threading.Thread(target=lambda: grants.append(session.acquire(acquire()))) for _ in range(KEEP + 5)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE_S)
        assert len(session._pool._idle) == KEEP + 5
        for grant in grants:
            grant.release_flight()
        assert len(session._pool._idle) == KEEP
        session.close()


@pytest.mark.parametrize("patient", [False, True])
def test_waiting_for_a_twin_is_no_silence_of_the_daemon(scripted: Scripted, socket_path: Path, patient: bool) -> None:
    """A caller's own patience comes on top of the time-out, for this call only."""

    def script(line: Any) -> None:
        line.greet()
        assert isinstance(line.hear(), m.Acquire)
        if patient:
            threading.Event().wait(0.3)
            line.say(m.Acquired(usable=0, flight=60))
        while line.hear() is not None:
            pass

    session = RemoteSession(socket_path, timeout_s=0.2, backoff=False)
    request = replace(acquire(), wait_ms=LONG_MS if patient else 0)
    with scripted(script):
        if patient:
            assert session.acquire(request).reply.flight == 60
        else:
            with pytest.raises(errors.DaemonTimeout):
                session.acquire(request)
        session.close()


def test_a_lease_that_ends_after_closing_is_nothing(scripted: Scripted, session: RemoteSession) -> None:
    with scripted(serve):
        grant = session.acquire(acquire())
        session.close()
        grant.release()
        with pytest.raises(errors.ClosedError):
            session.match(MATCH)


# -- reservations --------------------------------------------------------------------------


def offer() -> m.Offer:
    return m.Offer(KEY, KEY, TOKENS, row_bytes=1)


def test_a_commit_goes_where_its_offer_went_and_others_keep_off(scripted: Scripted, session: RemoteSession) -> None:
    heard: dict[int, list[m.Message]] = {0: [], 1: []}

    def script(line: Any) -> None:
        line.greet()
        while (asked := answer(line)) is not None:
            heard[line.number].append(asked)

    with scripted(script), open(os.devnull, "rb") as file:
        offered = session.offer(offer())
        session.match(MATCH)  # between the two, on another connection
        session.commit(m.Commit(KEY, 9, offered.reservation), file.fileno())
        session.close()
    assert [type(asked) for asked in heard[0]] == [m.Offer, m.Commit]
    assert [type(asked) for asked in heard[1]] == [m.Match]
    assert heard[0][1].reservation == offered.reservation  # type: ignore[union-attr]


def test_all_containers_of_a_save_go_where_its_offer_went(scripted: Scripted, session: RemoteSession) -> None:
    heard: dict[int, list[m.Message]] = {0: [], 1: []}

    def script(line: Any) -> None:
        line.greet()
        while (asked := answer(line)) is not None:
            heard[line.number].append(asked)

    with scripted(script), open(os.devnull, "rb") as file:
        offered = session.offer(offer())
        for _ in range(3):
            session.commit(m.Commit(KEY, 9, offered.reservation, more=True), file.fileno())
            session.match(MATCH)  # on another connection, however often
        session.annotate(m.Annotate(KEY, KEY, TOKENS, reservation=offered.reservation))
        session.match(MATCH)  # the first is free again
        session.close()
    assert [type(asked) for asked in heard[0]] == [m.Offer, *[m.Commit] * 3, m.Annotate, m.Match]
    assert [type(asked) for asked in heard[1]] == [m.Match] * 3
    assert {asked.reservation for asked in heard[0][1:5]} == {offered.reservation}  # type: ignore[union-attr]


def test_the_last_container_of_a_save_frees_its_connection(scripted: Scripted, session: RemoteSession) -> None:
    with scripted(serve) as daemon, open(os.devnull, "rb") as file:
        offered = session.offer(offer())
        session.commit(m.Commit(KEY, 9, offered.reservation, more=True), file.fileno())
        session.commit(m.Commit(KEY, 9, offered.reservation), file.fileno())
        session.match(MATCH)
        assert daemon.connections == 1
        session.close()


def test_a_reservation_whose_connection_is_lost_is_not_claimed(scripted: Scripted, session: RemoteSession) -> None:
    claimed: list[int] = []

    def script(line: Any) -> None:
        line.greet()
        while (asked := answer(line)) is not None:
            if isinstance(asked, m.Commit | m.Annotate):
                claimed.append(asked.reservation)
            if line.number == 0:
                return

    with scripted(script), open(os.devnull, "rb") as file:
        offered = session.offer(offer())
        session._pool.drop_idle()
        session.commit(m.Commit(KEY, 9, offered.reservation), file.fileno())
        again = session.offer(offer())
        session.annotate(m.Annotate(KEY, KEY, TOKENS, reservation=again.reservation))
        session.close()
    assert claimed == [0, again.reservation]


def test_a_lease_that_ends_does_not_take_the_connection_of_an_upload(
    scripted: Scripted, session: RemoteSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    swept: list[bool] = []
    end_leases = Connection.end_leases

    def watched(connection: Connection) -> None:
        swept.append(connection.reserved)
        end_leases(connection)

    with scripted(serve):
        grant = session.acquire(acquire())
        offered = session.offer(offer())
        with monkeypatch.context() as patched:
            patched.setattr(Connection, "end_leases", watched)
            grant.release()
        assert not any(swept), "the connection was away while its upload might have come"
        session.annotate(m.Annotate(KEY, KEY, TOKENS, reservation=offered.reservation))
        assert not any(item.ended or item.leases for item in session._pool._idle)
        session.close()


@pytest.mark.parametrize("verb", ["commit", "annotate"])
def test_an_upload_that_is_refused_frees_its_connection(scripted: Scripted, session: RemoteSession, verb: str) -> None:
    """Else every failed save would keep a connection for a minute, and many all of the daemon's."""

    def script(line: Any) -> None:
        line.greet()
        while True:
            asked = line.hear()
            if asked is None:
                return
            if isinstance(asked, m.Offer):
                line.say(m.Offered(0, KEY, 1000 + line.number, 10, 9))
            else:
                line.say(m.Fault(errors.OfferAgain.code, "evicted meanwhile", True))

    with scripted(script) as daemon, open(os.devnull, "rb") as file:
        for _ in range(5):
            offered = session.offer(offer())
            with pytest.raises(errors.OfferAgain):
                if verb == "commit":
                    session.commit(m.Commit(KEY, 9, offered.reservation), file.fileno())
                else:
                    session.annotate(m.Annotate(KEY, KEY, TOKENS, reservation=offered.reservation))
        assert daemon.connections == 1
        session.close()


def test_offers_without_an_upload_keep_few_connections(scripted: Scripted, session: RemoteSession) -> None:
    """Each waits a minute for its upload: an agent that only asks would soon have all of the daemon's."""
    with scripted(serve) as daemon:
        grant = session.acquire(acquire())
        for _ in range(3 * KEEP_RESERVED):
            offered = session.offer(offer())
        idle = session._pool._idle
        assert len([item for item in idle if item.reserved and not item.leases]) <= KEEP_RESERVED < daemon.connections
        assert any(item.reservation == offered.reservation for item in idle), "the latest is kept"
        assert sum(len(item.leases) for item in idle) == 1, "what is leased is kept"
        grant.release()
        session.close()


def test_uploads_from_many_threads_all_find_their_reservation(
    served: ServedEngine, engine: Engine, identity: Identity, rows: Any
) -> None:
    """The daemon refuses a reservation made on another connection."""
    from warmkv import connect

    failed: list[object] = []

    def save(number: int) -> None:
        for index in range(20):
            saved = client.save(identity, [number, index, 1, 2], rows(4))
            if not saved.stored:
                failed.append(saved)

    with connect(served.socket, strict=True, timeout_s=PATIENCE_S) as client:
        threads = [threading.Thread(target=save, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE_S)
    assert not failed
    assert engine.warm.ledger.reserved_bytes == 0


# -- the pool ------------------------------------------------------------------------------


def test_few_idle_connections_are_kept(scripted: Scripted, session: RemoteSession) -> None:
    together = threading.Barrier(KEEP + 5)

    def script(line: Any) -> None:
        line.greet()
        assert isinstance(line.hear(), m.Match)
        together.wait(PATIENCE_S)
        line.say(m.Matched())
        while line.hear() is not None:
            pass

    with scripted(script) as daemon:
        threads = [threading.Thread(target=session.match, args=(MATCH,)) for _ in range(KEEP + 5)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE_S)
        assert daemon.connections == KEEP + 5
        assert len(session._pool._idle) == KEEP
        session.close()


def test_connections_with_leases_are_kept_beyond_that(scripted: Scripted, session: RemoteSession) -> None:
    together = threading.Barrier(KEEP + 5)
    grants: list[Any] = []

    def script(line: Any) -> None:
        line.greet()
        assert isinstance(line.hear(), m.Acquire)
        together.wait(PATIENCE_S)
        line.say(m.Acquired(lease=line.number + 1))
        while line.hear() is not None:
            pass

    with scripted(script):
        threads = [threading.Thread(target=lambda: grants.append(session.acquire(acquire()))) for _ in range(KEEP + 5)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE_S)
        assert len(session._pool._idle) == KEEP + 5
        for grant in grants:
            grant.release()
        assert len(session._pool._idle) == KEEP
        session.close()


def test_closing_ends_every_connection(served: ServedEngine, session: RemoteSession) -> None:
    session.greet()
    session.greet()
    assert eventually(lambda: served.server.connections >= 1)
    session.close()
    assert eventually(lambda: served.server.connections == 0)
