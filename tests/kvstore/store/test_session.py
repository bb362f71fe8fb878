"""What one user may do and learn: shares by their declaration, administration by who runs the
store, tenants and other users not at all."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from warmkv.kvstore.store import Store, open_store
from warmkv.kvstore.store import session as local
from warmkv.kvstore.store.options import Share
from warmkv.kvstore.store.reports import ADMIN_VERBS, FILE_VERBS, VERBS
from warmkv.kvstore.store.session import LocalSession
from warmkv.kvstore.testing import TOKENS, check_restore, model_rows, random_identity, save
from warmkv.kvstore.verbs import Verbs
from warmkv.schema import messages as m
from warmkv.schema.errors import AccessRefused, Busy, RemoteProtocolError, UnknownNamespace, UnsupportedError, WarmKVError
from warmkv.schema.identity import Identity
from warmkv.schema.records import CLEAN, Anchor, NamespaceKey

OpenStore = Callable[..., Store]
READER, WRITER, STRANGER = (os.geteuid() + number for number in (1, 2, 3))
SHARES = {"team": Share(frozenset({READER, WRITER}), frozenset({WRITER})), "öffentlich": Share(frozenset({STRANGER}))}
QUERY = np.array([*TOKENS, 1], "<u4")
HELD = np.array(TOKENS, "<u4")


class Agent(Verbs):
    """The verbs of any user."""

    def __init__(self, store: Store, uid: int, share: str = "") -> None:
        super().__init__(store.engine.session(uid), share=share)

    def _failed(self, exc: WarmKVError) -> str:
        raise exc


def told(session: LocalSession, verb: str, **arguments: Any) -> Any:
    return json.loads(session.report(m.Report(verb, json.dumps(arguments).encode())).json)


@pytest.fixture
def shared(open_store_with: OpenStore, identity: Identity) -> Store:
    """A store with something in the share and something of the writer's own."""
    store = open_store_with(True, shares=SHARES)
    save(Agent(store, WRITER, "team"), identity, TOKENS, anchors=[Anchor(3)])
    return store


def read_verbs(session: LocalSession, key: NamespaceKey) -> dict[str, Callable[[], object]]:
    def acquire() -> None:
        grant = session.acquire(m.Acquire(key, CLEAN, QUERY))
        grant.release()
        for fd in grant.fds:
            os.close(fd)

    return {
        "match": lambda: session.match(m.Match(key, CLEAN, QUERY)),
        "acquire": acquire,
        "prefetch": lambda: session.prefetch(m.Prefetch(key, CLEAN, QUERY)),
    }


def write_verbs(session: LocalSession, key: NamespaceKey) -> dict[str, Callable[[], object]]:
    return {
        "offer": lambda: session.offer(m.Offer(key, CLEAN, QUERY)),
        "annotate": lambda: session.annotate(m.Annotate(key, CLEAN, HELD)),
        "pin": lambda: session.pin(m.Pin(key, CLEAN, HELD, ttl_ms=1000)),
        "forget": lambda: session.forget(m.Forget(key, CLEAN, HELD)),
        "clear": lambda: session.clear(m.Clear(key)),
    }


# -- shares ------------------------------------------------------------------------------------


def test_readers_and_writers_see_one_namespace(shared: Store, identity: Identity) -> None:
    for uid in (READER, WRITER):
        check_restore(Agent(shared, uid, "team"), identity, [*TOKENS, 1], 9)
        assert Agent(shared, uid).match(identity, TOKENS).matched == 0
    assert len({Agent(shared, uid, "team")._namespace(identity) for uid in (READER, WRITER)}) == 1


def test_a_reader_reads_and_does_not_write(shared: Store, identity: Identity) -> None:
    session = shared.engine.session(READER)
    key = session.open(identity.canonical(), "team")
    for verb in read_verbs(session, key).values():
        verb()
    for verb in write_verbs(session, key).values():
        with pytest.raises(AccessRefused, match="may read share 'team', not write it"):
            verb()
    with pytest.raises(AccessRefused):
        Agent(shared, READER, "team").save(identity, [*TOKENS, 5], model_rows(identity, [*TOKENS, 5]))
    check_restore(Agent(shared, WRITER, "team"), identity, [*TOKENS, 1], 9)


def test_a_commit_is_refused_whatever_was_offered_before(shared: Store, identity: Identity) -> None:
    session = shared.engine.session(READER)
    key = session.open(identity.canonical(), "team")
    with open("/dev/null", "rb") as file, pytest.raises(AccessRefused):
        session.commit(m.Commit(key, shared.engine.epoch, 0), file.fileno())


def test_a_writer_writes_and_drops(shared: Store, identity: Identity) -> None:
    session = shared.engine.session(WRITER)
    key = session.open(identity.canonical(), "team")
    for verb in (*read_verbs(session, key).values(), *write_verbs(session, key).values()):
        verb()
    assert Agent(shared, READER, "team").match(identity, TOKENS).matched == 0


@pytest.mark.parametrize("share", ["team", "nobody declared it", "öffentlich", "TEAM", "team "])
def test_refusals_do_not_tell_whether_a_share_exists(shared: Store, identity: Identity, share: str) -> None:
    uid = os.geteuid()  # who runs the store is no reader for that
    with pytest.raises(AccessRefused) as refused:
        shared.engine.session(uid).open(identity.canonical(), share)
    assert str(refused.value) == f"uid {uid} may use no share {share!r}"


def test_a_key_of_a_share_is_worth_nothing_to_others(shared: Store, identity: Identity) -> None:
    key = shared.engine.session(WRITER).open(identity.canonical(), "team")
    for stored in (key, NamespaceKey(bytes(16))):
        session = shared.engine.session(STRANGER)
        for verb in (*read_verbs(session, stored).values(), *write_verbs(session, stored).values()):
            with pytest.raises(UnknownNamespace) as refused:
                verb()
            assert str(refused.value) == f"namespace {stored.hex()} was not opened on this session"


def test_a_reader_may_use_the_key_without_the_identity(shared: Store, identity: Identity) -> None:
    key = shared.engine.session(WRITER).open(identity.canonical(), "team")
    session = shared.engine.session(READER)
    assert session.match(m.Match(key, CLEAN, QUERY)).usable == 9
    for name in ("forget", "clear"):
        with pytest.raises(AccessRefused):
            write_verbs(session, key)[name]()


def test_a_share_that_is_taken_away_is_gone_at_once(shared: Store, identity: Identity) -> None:
    session = shared.engine.session(READER)
    key = session.open(identity.canonical(), "team")
    shared.engine.options = replace(shared.engine.options, shares={})
    for verb in (*read_verbs(session, key).values(), *write_verbs(session, key).values()):
        with pytest.raises(AccessRefused):
            verb()
    assert told(session, "ls")["total"] == 0


def test_clear_of_everything_leaves_shares_alone(shared: Store, identity: Identity) -> None:
    writer = Agent(shared, WRITER)
    save(writer, identity, TOKENS)
    assert writer.clear().records == 1
    assert Agent(shared, READER, "team").match(identity, TOKENS).matched == 9


def test_reports_tell_readers_of_the_share(shared: Store, identity: Identity) -> None:
    save(Agent(shared, WRITER), random_identity(seed=1), TOKENS)
    shared.flush()
    rows = {uid: told(shared.engine.session(uid), "ls")["rows"] for uid in (READER, WRITER, STRANGER, os.geteuid())}
    assert {uid: [row["share"] for row in found] for uid, found in rows.items()} == {
        READER: ["team"], WRITER: ["team", ""], STRANGER: [], os.geteuid(): [],
    }  # fmt: skip
    for uid, count in ((READER, 1), (WRITER, 2), (STRANGER, 0)):
        session = shared.engine.session(uid)
        stats, status = told(session, "stats"), told(session, "status")
        assert (stats["entries"], stats["namespaces"], status["records"]) == (count, count, count)
        assert stats["cold"]["entries"] == count == told(session, "verify")["checked"]
        for name in ("warm", "cold"):
            assert bool(stats[name]["bytes"]) == bool(count) == bool(status[f"{name}_bytes"])


def test_an_embedded_store_may_use_any_share(tmp_path: Path, identity: Identity) -> None:
    with open_store(tmp_path, cold_bytes=64 << 20, share="any name") as store:
        save(store, identity, TOKENS, ack="disk")
        assert [row["share"] for row in store.report("ls")["rows"]] == ["any name"]  # type: ignore[attr-defined]
    with open_store(tmp_path, cold_bytes=64 << 20) as store:
        assert store.match(identity, TOKENS).matched == 0
    with open_store(tmp_path, cold_bytes=64 << 20, share="any name") as store:
        check_restore(store, identity, [*TOKENS, 1], 9)


# -- other users -------------------------------------------------------------------------------


def test_the_numbers_of_a_stranger_do_not_move_when_others_work(open_store_with: OpenStore, identity: Identity) -> None:
    store = open_store_with(True)
    stranger = store.engine.session(STRANGER)

    def numbers() -> str:
        status = told(stranger, "status")
        del status["uptime_s"]
        return json.dumps([status, *(told(stranger, verb) for verb in ("stats", "ls", "verify"))])

    before = numbers()
    save(store, identity, TOKENS, ack="disk", anchors=[Anchor(2)])
    with store.restore(identity, [*TOKENS, 1]):
        store.match(identity, [7, 8])
        assert numbers() == before
    save(Agent(store, WRITER), identity, TOKENS)
    store.forget(identity, TOKENS)
    assert numbers() == before


def test_who_runs_the_store_sees_who_takes_how_much(shared: Store, identity: Identity) -> None:
    save(Agent(shared, READER), identity, TOKENS)
    stats = told(shared.engine.session(os.geteuid()), "stats")
    assert set(stats["users"]) == {"share team", f"uid {READER}"}
    assert sum(user["warm_bytes"] for user in stats["users"].values()) == stats["warm"]["bytes"]
    assert stats["tokens"] == 2 * len(TOKENS)


@pytest.mark.parametrize("verb", sorted(ADMIN_VERBS))
def test_administration_is_for_who_runs_the_store_and_root(shared: Store, verb: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(AccessRefused, match=f"uid {WRITER} is neither"):
        told(shared.engine.session(WRITER), verb)
    monkeypatch.setattr(os, "geteuid", lambda: WRITER)
    done = []
    monkeypatch.setitem(ADMIN_VERBS, verb, lambda engine, access, given: done.append(access.uid) or {})
    for uid in (WRITER, 0):
        told(shared.engine.session(uid), verb)
    with pytest.raises(AccessRefused):
        told(shared.engine.session(READER), verb)
    assert done == [WRITER, 0]


@pytest.mark.parametrize("verb", sorted({**VERBS, **ADMIN_VERBS, **FILE_VERBS}))
def test_a_report_comes_with_a_file_exactly_if_it_is_about_one(shared: Store, verb: str) -> None:
    request = m.Report(verb)
    with open("/dev/null", "rb") as file, pytest.raises(RemoteProtocolError, match="open file"):
        shared.engine.session(os.geteuid()).report(request, -1 if verb in FILE_VERBS else file.fileno())


def test_verbs_of_parts_that_are_not_there_say_so(open_store_with: OpenStore) -> None:
    session = open_store_with().engine.session(os.geteuid())
    for verb, arguments in (("compact", {}), ("backup", {"path": "/nowhere/x"}), ("scrub", {}), ("reload", {})):
        with pytest.raises(UnsupportedError):
            told(session, verb, **arguments)
    assert told(session, "health")["healthy"] is True


@contextmanager
def leases(session: LocalSession, key: NamespaceKey, count: int) -> Iterator[list[Callable[[], None]]]:
    releases = []
    for _ in range(count):
        grant = session.acquire(m.Acquire(key, CLEAN, QUERY))
        releases.append(grant.release)
        for fd in grant.fds:
            os.close(fd)
    yield releases


def test_leases_of_a_session_are_limited(open_store_with: OpenStore, identity: Identity, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "MAX_LEASES", 8)
    store = open_store_with()
    save(store, identity, TOKENS)
    session = store.engine.session(os.getuid())
    key = session.open(identity.canonical(), "")
    with leases(session, key, 8) as releases:
        with pytest.raises(Busy, match="8 leases"):
            session.acquire(m.Acquire(key, CLEAN, QUERY))
        releases[0]()
        with leases(session, key, 1):
            assert store.engine.session(os.getuid()).match(m.Match(key, CLEAN, QUERY)).usable == 9
    session.close()


# -- tenants -----------------------------------------------------------------------------------

SALTED = b"\x17salt of somebody's digest\x17"


@pytest.mark.parametrize("disk", [True, False], ids=["disk", "memory"])
def test_a_tenant_never_learns_of_another(
    open_store_with: OpenStore, identity: Identity, disk: bool, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    """Every verb answers as if nothing but its own were stored, in either tier, and no log or report
    spells the salt's digest."""
    ours, theirs = replace(identity, tenant=b"o" * 16), replace(identity, tenant=SALTED)

    def answers(store: Store) -> list[object]:
        said: list[object] = []
        for asked in (ours, replace(ours, tokenizer=b"t" * 16)):
            session = store.engine.session(os.getuid())
            key = session.open(asked.canonical(), "")
            reply = session.match(m.Match(key, CLEAN, QUERY, detail=True))
            grant = session.acquire(m.Acquire(key, CLEAN, QUERY))
            offered = session.offer(m.Offer(key, CLEAN, QUERY))
            said += [replace(reply, epoch=0), grant.fds, grant.reply.reason, offered.held]
            said += [session.pin(m.Pin(key, CLEAN, HELD, ttl_ms=5)), session.forget(m.Forget(key, CLEAN, HELD))]
            said += [session.prefetch(m.Prefetch(key, CLEAN, QUERY)).reason, session.clear(m.Clear(key))]
            session.close()
        return said

    with caplog.at_level(logging.DEBUG):
        store = open_store_with(tmp_path / "a" if disk else None)
        alone = answers(store)
        save(store, theirs, TOKENS, ack="disk" if disk else "memory", anchors=[Anchor(3)])
        assert answers(store) == alone
        if disk:
            store.close()
            store = open_store_with(tmp_path / "a")
            assert answers(store) == alone
        session = store.engine.session(os.getuid())
        texts = [json.dumps(told(session, verb)) for verb in ("status", "stats", "ls", "verify", "health")]
        (row,) = told(session, "ls")["rows"]
        texts += [json.dumps(told(session, "ls", namespace=row["namespace"])), repr(theirs), caplog.text]
        texts = [text.replace(str(tmp_path), "") for text in texts]
    for spelling in (SALTED.hex(), repr(SALTED)[2:-1], str(list(SALTED))[1:-1], "tenant"):
        assert not any(spelling in text for text in texts)


def test_a_salt_in_place_of_its_digest_is_not_repeated(identity: Identity) -> None:
    for salt in (b"secret", "secret salt"):
        with pytest.raises(WarmKVError) as refused:
            replace(identity, tenant=salt)  # type: ignore[arg-type]
        assert "secret" not in str(refused.value)
