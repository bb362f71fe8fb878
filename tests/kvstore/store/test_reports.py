"""Administrative reports: what they count, and what of other users they keep to themselves."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from typing import Any

import pytest

from warmkv.kvstore.store import Store
from warmkv.kvstore.store.session import LocalSession
from warmkv.kvstore.testing import TOKENS, save
from warmkv.kvstore.testing.samples import CONV, FULL, OPAQUE, mixed_identity, model_logits, sliding
from warmkv.kvstore.verbs import Verbs
from warmkv.schema import lmdb_records
from warmkv.schema import messages as m
from warmkv.schema.errors import RecordError, WarmKVError
from warmkv.schema.identity import Identity
from warmkv.schema.records import Anchor, AnchorKind, RecordId

OpenStore = Callable[..., Store]
STRANGER = os.geteuid() + 1
#: Ids nobody else writes, to look for in reports.
SECRET = [1234567891, 1987654321, 1122334455, 1555666777]


class Agent(Verbs):
    """The verbs of any user."""

    def __init__(self, store: Store, uid: int) -> None:
        super().__init__(store.engine.session(uid))

    def _failed(self, exc: WarmKVError) -> str:
        raise exc


def told(session: LocalSession, verb: str, **arguments: Any) -> Any:
    return json.loads(session.report(m.Report(verb, json.dumps(arguments).encode())).json)


@pytest.mark.parametrize("verb", ["status", "stats", "ls", "show", "verify"])
@pytest.mark.parametrize(
    "arguments",
    [b"{", b"[]", b"7", b"null", b'"x"', b"\xff\xfe", b"{}x", b"[" * 100_000, b'{"a":' * 100_000],
    ids=["cut", "list", "number", "null", "text", "no text", "more", "deep list", "deep object"],
)  # fmt: skip
def test_arguments_that_are_no_object_are_refused(open_store_with: OpenStore, verb: str, arguments: bytes) -> None:
    session = open_store_with().engine.session(STRANGER)
    with pytest.raises(RecordError):
        session.report(m.Report(verb, arguments))


@pytest.mark.parametrize("verb", ["", "Stats", "drop", "__class__", "stats "])
def test_unknown_reports_are_refused(open_store_with: OpenStore, verb: str) -> None:
    with pytest.raises(RecordError, match="unknown report"):
        open_store_with().engine.session(STRANGER).report(m.Report(verb))


def test_reports_never_show_tokens(open_store_with: OpenStore) -> None:
    store, identity = open_store_with(True), mixed_identity(FULL, CONV)
    saved = save(store, identity, SECRET, ack="disk", anchors=[Anchor(2, AnchorKind.TURN)])
    assert saved.id is not None
    session = store.engine.session(os.geteuid())
    for verb, arguments in (
        ("status", {}), ("stats", {}), ("ls", {}), ("ls", {"namespace": ""}), ("show", {"id": saved.id.hex()}), ("verify", {}),
    ):  # fmt: skip
        text = json.dumps(told(session, verb, **arguments))
        assert not any(str(token) in text for token in SECRET)


def test_verify_reads_a_users_own_records_only(open_store_with: OpenStore, identity: Identity) -> None:
    """Of somebody else's, even how many there are and which are bad is theirs to know."""
    store = open_store_with(True)
    ours, theirs = save(store, identity, TOKENS, ack="disk"), Agent(store, STRANGER)
    bad = save(theirs, identity, SECRET, ack="disk")
    assert ours.id is not None and bad.id is not None
    flip(store, bad.id)
    mine = told(store.engine.session(os.geteuid()), "verify")
    assert (mine["checked"], mine["bad"]) == (1, [])
    assert store.stats()["quarantines"] == 0
    found = told(store.engine.session(STRANGER), "verify")
    assert (found["checked"], [item["id"] for item in found["bad"]]) == (1, [bad.id.hex()])
    assert store.stats()["quarantines"] == 1
    assert told(store.engine.session(STRANGER + 1), "verify") == {"checked": 0, "total_bytes": 0, "bad": [], "problems": []}


def flip(store: Store, id_: RecordId) -> None:
    assert store.engine.cold is not None
    env, key = store.engine.cold._env, lmdb_records.chunk_key(id_, 0)
    with env.begin(write=True) as txn:
        value = bytearray(txn.get(key, db=env.db[b"chunks"]) or b"")
        value[3] ^= 1
        txn.put(key, bytes(value), db=env.db[b"chunks"])


def test_problems_are_told_to_the_user_the_store_belongs_to(
    open_store_with: OpenStore, identity: Identity, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They name records of everybody."""
    store = open_store_with()
    saved = save(store, identity, TOKENS)
    assert saved.id is not None
    monkeypatch.setattr("warmkv.kvstore.store.reports.checking.check", lambda engine: [f"{saved.id.hex()} is odd"])
    assert told(store.engine.session(os.geteuid()), "verify")["problems"] == [f"{saved.id.hex()} is odd"]
    assert told(store.engine.session(STRANGER), "verify")["problems"] == []


def test_what_is_not_on_disk_says_why(open_store_with: OpenStore, identity: Identity) -> None:
    store = open_store_with(True)
    saved = save(store, identity, TOKENS, ack="disk")
    assert saved.id is not None
    shown = told(store.engine.session(os.geteuid()), "show", id=saved.id.hex())
    assert (shown["cold"], shown["cold_error"]) == ("stored", "")
    with store.engine.index.changed:
        store.engine.index.records[saved.id].cold_error = "the disk is full"
    shown = told(store.engine.session(os.geteuid()), "show", id=saved.id.hex())
    assert [row["cold_error"] for row in (shown, *shown["chain"])] == ["the disk is full"] * 2


def test_states_are_counted_and_shown_beside_their_chain(open_store_with: OpenStore) -> None:
    store, identity = open_store_with(), mixed_identity(FULL, sliding(3), CONV, OPAQUE)
    first = save(store, identity, TOKENS[:4], anchors=[Anchor(4)])
    last = save(store, identity, TOKENS, logits=model_logits(identity, TOKENS))
    save(store, identity, [*TOKENS[:4], 50, 51])
    assert first.id is not None and last.id is not None
    stats = store.stats()
    with store.engine.index.changed:
        records = list(store.engine.index.records.values())
    states = [record for record in records if record.is_state]
    assert (stats["states"], stats["state_bytes"]) == (len(states), sum(record.total_bytes for record in states))
    assert stats["entries"] == len(records) and len(states) == 3
    session = store.engine.session(os.geteuid())
    shown = told(session, "show", id=last.id.hex())
    assert [(row["kind"], row["start"], row["end"]) for row in shown["chain"]] == [("segment", 0, 4), ("segment", 4, 9)]
    assert [(row["kind"], row["end"], sorted(row["provides"])) for row in shown["states"]] == [
        ("state", 4, ["exact", "trimmable"]),
        ("state", 9, ["exact", "logits", "trimmable"]),
    ]
    (state,) = [record for record in states if record.end == 4]
    assert told(session, "show", id=state.id.hex())["kind"] == "state"
    (namespace,) = told(session, "ls")["rows"]
    assert (namespace["records"], namespace["states"], namespace["tokens"]) == (6, 3, 11)
    prefixes = told(session, "ls", namespace=namespace["namespace"])["rows"]
    assert sorted(row["end"] for row in prefixes) == [6, 9] and {row["kind"] for row in prefixes} == {"segment"}


def test_a_user_sees_nothing_of_another(open_store_with: OpenStore, identity: Identity) -> None:
    store = open_store_with()
    saved = save(store, identity, TOKENS)
    assert saved.id is not None
    stranger = store.engine.session(STRANGER)
    assert told(stranger, "ls") == {"kind": "namespaces", "total": 0, "rows": []}
    for length in (4, 8, 32):
        assert told(stranger, "show", id=saved.id.hex()[:length]) == {"found": 0, "ids": []}
    with pytest.raises(RecordError, match="too short"):
        told(stranger, "show", id=saved.id.hex()[:3])
