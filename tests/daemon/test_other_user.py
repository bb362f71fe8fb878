"""Two users of one daemon, and a third who is none: what one of them has, the others never learn.

Connections are opened by a child that really became the other user, then handed to the test: the
daemon sees that user for as long as they live. Being blind is checked by comparison: what the
stranger is told where something is stored equals what is told where nothing is.
"""

from __future__ import annotations

import json
import os
import socket
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from warmkv.daemon.testing import PATIENCE_S, DaemonProcess, eventually
from warmkv.kvstore import memfd
from warmkv.kvstore.containers import PlaneSource, write_segment
from warmkv.kvstore.testing import TOKENS, model_rows, random_identity
from warmkv.schema import errors, ids, protocol
from warmkv.schema import messages as m
from warmkv.schema.identity import Identity
from warmkv.schema.records import CLEAN, ROOT, NamespaceKey, RecordId, as_tokens

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root to become somebody else")

OWNER, STRANGER, OUTSIDER, GROUP = 40_001, 40_002, 40_003, 40_000
MIB = 1 << 20
WARM_BYTES, CONNECTIONS = 8 * MIB, 12
QUERY = as_tokens([*TOKENS, 1])
NOBODY = NamespaceKey(b"n" * 16)
IDENTITY, UNHEARD_OF = random_identity(), random_identity(seed=99)


def connected_as(uid: int, path: Path) -> socket.socket:
    """A socket that a child which became user ``uid`` connected to ``path``."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            os.setgroups([])
            os.setgid(GROUP)
            os.setuid(uid)
            with socket.socket(socket.AF_UNIX) as sock:
                sock.connect(str(path))
                socket.send_fds(theirs, [b"x"], [sock.fileno()])
            status = 0
        finally:
            os._exit(status)
    theirs.close()
    try:
        _, fds, _, _ = socket.recv_fds(ours, 1, 1)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0 and len(fds) == 1
        return socket.socket(fileno=fds[0])
    finally:
        ours.close()


@dataclass
class House:
    """A daemon for two users, and its visitors."""

    daemon: DaemonProcess
    peers: type
    stack: ExitStack

    def visit(self, uid: int) -> Any:
        """A raw peer whom the daemon takes for ``uid``, not greeted yet."""
        peer: Any = object.__new__(self.peers)
        peer.socket = self.stack.enter_context(connected_as(uid, self.daemon.socket))
        peer.socket.settimeout(PATIENCE_S)
        return peer

    def welcome(self, uid: int, identity: Identity = IDENTITY) -> Any:
        """A greeted one that has opened the model; ``key`` is its namespace."""
        peer = self.visit(uid)
        welcome = peer.ask(m.Hello(protocol.VERSION_MIN, protocol.VERSION_MAX, "visitor", 1))
        assert isinstance(welcome, m.Welcome) and welcome.uid == uid
        peer.epoch, peer.key = welcome.epoch, peer.ask(m.Open(identity.canonical())).namespace
        assert peer.key == ids.namespace_key(uid, "", ids.fingerprint(identity))
        return peer

    def stats(self) -> dict[str, Any]:
        """What who runs the daemon is told."""
        with self.peers(self.daemon.socket).greet() as peer:
            told: dict[str, Any] = json.loads(peer.ask(m.Report("stats")).json)
            return told


@pytest.fixture
def house(peers: type) -> Iterator[House]:
    with tempfile.TemporaryDirectory(prefix="warmkv-test-") as name, ExitStack() as stack:
        os.chmod(name, 0o755)
        daemon = DaemonProcess(
            Path(name), "--allow-uids", f"{OWNER},{STRANGER}", "--socket-gid", str(GROUP), "--uid-share", "0.5",
            "--warm-bytes", str(WARM_BYTES), "--max-connections", str(CONNECTIONS), "--busy-timeout-s", "0.05",
            "--watch-interval-s", "0.2",
        )  # fmt: skip
        with daemon:
            yield House(daemon, peers, stack)


def container(key: NamespaceKey, tokens: list[int] = TOKENS, parent: RecordId = ROOT, start: int = 0) -> bytes:
    """Rows [start, len(tokens)) as an honest client of this namespace would send them."""
    sources = [
        PlaneSource(record.layer, plane.rows.shape[1:], start, replace(plane, rows=plane.rows[start:]))
        for record in model_rows(IDENTITY, tokens)
        for plane in record.planes
    ]
    made = write_segment(key, CLEAN, parent, start, as_tokens(tokens), (), sources)
    try:
        return memfd.read(made.fd, made.total_bytes, 0)
    finally:
        made.close()


def commit(peer: Any, data: bytes, **changes: Any) -> m.Message:
    fd = memfd.create("test", len(data))
    try:
        memfd.write(fd, data, 0)
        memfd.seal(fd)
        answer: m.Message = peer.ask(replace(m.Commit(peer.key, peer.epoch, 0), **changes), (fd,))
        return answer
    finally:
        os.close(fd)


def moved_in(house: House) -> tuple[Any, RecordId]:
    """The owner, who has stored one prompt, and its record."""
    owner = house.welcome(OWNER)
    stored = commit(owner, container(owner.key))
    assert isinstance(stored, m.Committed) and not stored.duplicate
    return owner, stored.id


def still_at_home(owner: Any) -> bool:
    matched = owner.ask(m.Match(owner.key, CLEAN, QUERY))
    return (matched.matched, matched.usable) == (len(TOKENS), len(TOKENS))


# -- the door ------------------------------------------------------------------------------


def test_who_is_not_allowed_is_turned_away_before_a_byte_is_read(house: House) -> None:
    """Though the socket's group may open it."""
    visitor = house.visit(OUTSIDER)
    assert visitor.hears_fault_and_end() == errors.PeerRefused.code
    assert isinstance(house.welcome(OWNER).ask(m.Report("status")), m.Document)


# -- blindness -----------------------------------------------------------------------------


def requests(key: NamespaceKey) -> list[m.Message]:
    """Every request that names a namespace, but the one with a descriptor."""
    about = (key, CLEAN, QUERY)
    return [
        m.Match(*about, detail=True), m.Acquire(*about), m.Acquire(*about, wait_ms=10), m.Prefetch(*about),
        m.Offer(*about, row_bytes=8), m.Annotate(*about), m.Annotate(*about, complete=True), m.Pin(*about, ttl_ms=60_000),
        m.Pin(*about), m.Forget(*about), m.Clear(key),
    ]  # fmt: skip


def test_a_namespace_that_is_somebody_elses_is_not_told_from_none(house: House) -> None:
    owner, _ = moved_in(house)
    stranger = house.welcome(STRANGER)
    for there, nowhere in zip(requests(owner.key), requests(NOBODY), strict=True):
        theirs, none = stranger.ask(there), stranger.ask(nowhere)
        assert isinstance(theirs, m.Fault) and theirs.code == errors.UnknownNamespace.code, there
        assert replace(theirs, message=theirs.message.replace(owner.key.hex(), NOBODY.hex())) == none
    data = container(owner.key)
    theirs, none = commit(stranger, data, namespace=owner.key), commit(stranger, data, namespace=NOBODY)
    assert isinstance(theirs, m.Fault) and theirs.code == errors.UnknownNamespace.code
    assert isinstance(none, m.Fault) and theirs.message.replace(owner.key.hex(), NOBODY.hex()) == none.message
    assert still_at_home(owner)


def test_the_same_model_under_another_user_is_as_empty_as_any(house: House) -> None:
    """No match, no hint how near, no reason that says more than for a model nobody has."""
    owner, _ = moved_in(house)
    for identity in (IDENTITY, random_identity(seed=1), random_identity(layers=3)):
        stranger = house.welcome(STRANGER, identity)
        unheard_of = house.welcome(STRANGER, UNHEARD_OF)
        for asked, other in zip(requests(stranger.key), requests(unheard_of.key), strict=True):
            assert _plain(stranger.ask(asked)) == _plain(unheard_of.ask(other)), asked
        told = stranger.ask(m.Match(stranger.key, CLEAN, QUERY))
        assert (told.matched, told.usable, told.diff_position, told.identity_difference) == (0, 0, -1, "")
    assert still_at_home(owner)


def _plain(answer: m.Message) -> m.Message:
    """An answer without the numbers that are new every time."""
    changes = {name: 0 for name in ("lease", "flight", "reservation", "waited_ms") if hasattr(answer, name)}
    return replace(answer, **changes)  # type: ignore[type-var, no-any-return]


def test_reports_say_the_same_whether_or_not_others_have_anything(house: House) -> None:
    stranger = house.welcome(STRANGER)
    before = reports(stranger, NOBODY, RecordId(b"r" * 16))
    owner, record = moved_in(house)
    assert owner.ask(m.Pin(owner.key, CLEAN, QUERY, ttl_ms=60_000)).held == len(TOKENS)
    assert owner.ask(m.Acquire(owner.key, CLEAN, QUERY)).lease
    after = reports(stranger, owner.key, record)
    # What the stranger asked with it may be told again.
    blank = {verb: told.replace(owner.key.hex(), NOBODY.hex()).replace(record.hex(), "72" * 16) for verb, told in after.items()}
    assert blank == before
    for told in blank.values():
        assert not any(secret.hex()[:8] in told for secret in (record, owner.key, IDENTITY.parameters))


def reports(peer: Any, key: NamespaceKey, record: RecordId) -> dict[str, str]:
    """What a user is told, without the time of day."""
    asked: dict[str, tuple[str, dict[str, object]]] = {
        "status": ("status", {}),
        "stats": ("stats", {}),
        "ls": ("ls", {}),
        "ls of a namespace": ("ls", {"namespace": key.hex()}),
        "show": ("show", {"id": record.hex()}),
        "show of a beginning": ("show", {"id": record.hex()[:12]}),
        "verify": ("verify", {}),
        "watch": ("watch", {"action": "ls"}),
        "watch of a namespace": ("watch", {"action": "add", "namespace": key.hex(), "paths": ["/etc/hostname"]}),
        "no more watch of it": ("watch", {"action": "rm", "namespace": key.hex()}),
    }
    told = {}
    for name, (verb, given) in asked.items():
        answer = peer.ask(m.Report(verb, json.dumps(given).encode()))
        if isinstance(answer, m.Fault):
            told[name] = f"{answer.code} {answer.message}"
        else:
            document = json.loads(answer.json)
            told[name] = json.dumps({field: value for field, value in document.items() if field != "uptime_s"}, sort_keys=True)
    return told


def test_an_export_finds_nothing_of_somebody_else(house: House, tmp_path: Path) -> None:
    owner, record = moved_in(house)
    stranger = house.welcome(STRANGER)
    path = tmp_path / "stolen"
    for given in ({"id": record.hex()}, {"id": record.hex()[:8]}, {"namespace": owner.key.hex()}):
        with open(path, "wb") as file:
            answer = stranger.ask(m.Report("export", json.dumps(given).encode()), (file.fileno(),))
        assert isinstance(answer, m.Fault) and answer.code == errors.UnknownNamespace.code, answer
        assert not path.read_bytes()


def test_what_runs_the_store_is_for_who_runs_it(house: House) -> None:
    owner, _ = moved_in(house)
    stranger = house.welcome(STRANGER)
    verbs = [
        ("evict", {"tier": "both", "to_bytes": 0}),
        ("compact", {}),
        ("backup", {"path": "/tmp/x"}),
        ("scrub", {}),
        ("health", {}),
    ]
    for verb, given in verbs:
        for peer in (stranger, owner):
            answer = peer.ask(m.Report(verb, json.dumps(given).encode()))
            assert isinstance(answer, m.Fault) and answer.code == errors.AccessRefused.code, (verb, answer)
    assert still_at_home(owner)


# -- theft and damage ----------------------------------------------------------------------


def test_somebody_elses_record_is_no_parent_and_no_duplicate(house: House) -> None:
    """An id guessed right gives away nothing: it is like one of nothing at all."""
    owner, record = moved_in(house)
    stranger = house.welcome(STRANGER)
    longer = [*TOKENS, 77, 78]
    guessed = commit(stranger, container(stranger.key, longer, record, len(TOKENS)))
    invented = commit(stranger, container(stranger.key, longer, RecordId(b"i" * 16), len(TOKENS)))
    assert isinstance(guessed, m.Fault) and isinstance(invented, m.Fault)
    same = guessed.message.replace(record.hex(), (b"i" * 16).hex())
    assert (guessed.code, same) == (invented.code, invented.message)
    stolen = commit(stranger, container(owner.key))
    assert isinstance(stolen, m.Fault) and stolen.code == errors.FormatError.code
    mine = commit(stranger, container(stranger.key))
    assert isinstance(mine, m.Committed) and not mine.duplicate and mine.id != record
    assert still_at_home(owner)


def test_what_one_drops_is_only_ever_its_own(house: House) -> None:
    owner, _ = moved_in(house)
    stranger = house.welcome(STRANGER)
    assert isinstance(commit(stranger, container(stranger.key)), m.Committed)
    assert stranger.ask(m.Forget(stranger.key, CLEAN, QUERY)).records == 1
    assert isinstance(commit(stranger, container(stranger.key)), m.Committed)
    assert stranger.ask(m.Clear(b"", True)).records == 1
    assert still_at_home(owner)


def test_leases_and_reservations_of_others_are_nobodys(house: House) -> None:
    owner, _ = moved_in(house)
    stranger = house.welcome(STRANGER)
    lease = owner.ask(m.Acquire(owner.key, CLEAN, QUERY)).lease
    stranger.say(m.Release(np.arange(0, lease + 100, dtype="<u8")))
    offered = owner.ask(m.Offer(owner.key, CLEAN, as_tokens([5] * 10), row_bytes=256, fixed_bytes=8192))
    data = container(stranger.key)
    theirs = commit(stranger, data, reservation=offered.reservation)
    none = commit(stranger, data, reservation=2**62)
    assert isinstance(theirs, m.Fault) and isinstance(none, m.Fault) and theirs.code == none.code == errors.OfferAgain.code
    assert theirs.message.replace(str(offered.reservation), str(2**62)) == none.message
    assert house.stats()["leases"] == 1
    assert house.stats()["warm"]["reserved_bytes"] == offered.reserved_bytes


def test_somebody_elses_computation_is_not_waited_for(house: House) -> None:
    """Whether a twin is at work is a secret as well: each user is the first of its own."""
    owner, stranger = house.welcome(OWNER), house.welcome(STRANGER)
    ours = owner.ask(m.Acquire(owner.key, CLEAN, QUERY, wait_ms=60_000))
    theirs = stranger.ask(m.Acquire(stranger.key, CLEAN, QUERY, wait_ms=60_000))
    assert ours.flight and theirs.flight and theirs.flight != ours.flight
    assert theirs.waited_ms < 60_000


def test_watching_a_file_retires_nothing_of_somebody_else(house: House) -> None:
    """A key guessed right may be named; what its file does concerns only the own."""
    owner, _ = moved_in(house)
    stranger = house.welcome(STRANGER)
    assert isinstance(commit(stranger, container(stranger.key)), m.Committed)
    file = house.daemon.store.with_name("weights")
    file.write_bytes(b"old")
    file.chmod(0o644)

    def watched(action: str, **given: object) -> dict[str, Any]:
        answer = stranger.ask(m.Report("watch", json.dumps({"action": action, **given}).encode()))
        assert isinstance(answer, m.Document), answer
        told: dict[str, Any] = json.loads(answer.json)
        return told

    for key in (owner.key, stranger.key):
        assert watched("add", namespace=key.hex(), paths=[str(file)])["files"] == 1
    assert eventually(lambda: all(row["files"][0]["digest"] for row in watched("ls")["rows"]))
    file.write_bytes(b"something else")
    assert eventually(lambda: watched("ls")["total"] == 0)
    assert stranger.ask(m.Match(stranger.key, CLEAN, QUERY)).matched == 0
    assert still_at_home(owner)


# -- shares --------------------------------------------------------------------------------


def wide(key: NamespaceKey, number: int) -> bytes:
    """About 128 KiB of rows, different for each number."""
    return container(key, [number, *range(1000)])


def test_a_user_who_fills_the_memory_fills_its_own_part(house: House) -> None:
    owner, _ = moved_in(house)
    stranger = house.welcome(STRANGER)
    size = len(wide(stranger.key, 1))
    for number in range(2 * WARM_BYTES // size):
        answer = commit(stranger, wide(stranger.key, number))
        assert isinstance(answer, m.Committed) or answer.code in (errors.Busy.code, errors.TooLarge.code), answer  # type: ignore[union-attr]
    told = house.stats()
    assert told["users"][f"uid {STRANGER}"]["warm_bytes"] <= WARM_BYTES // 2
    # Not only what the owner has is there: there is room for the rest of its part.
    for number in range((WARM_BYTES // 2 - 2 * MIB) // size):
        assert isinstance(commit(owner, wide(owner.key, number)), m.Committed)
    assert still_at_home(owner)


def test_a_user_who_announces_everything_keeps_nobody_from_announcing(house: House) -> None:
    owner, stranger = house.welcome(OWNER), house.welcome(STRANGER)
    offer = m.Offer(stranger.key, CLEAN, as_tokens([5] * 10), fixed_bytes=256 << 10)
    answers = [stranger.ask(offer) for _ in range(2 * WARM_BYTES // (256 << 10))]
    assert any(isinstance(item, m.Fault) for item in answers)
    assert house.stats()["warm"]["reserved_bytes"] <= WARM_BYTES // 2
    assert isinstance(owner.ask(replace(offer, namespace=owner.key, fixed_bytes=2 * MIB)), m.Offered)
    assert isinstance(commit(owner, container(owner.key)), m.Committed)


def test_a_user_who_connects_without_end_keeps_nobody_from_connecting(house: House) -> None:
    crowd = [house.visit(STRANGER) for _ in range(2 * CONNECTIONS)]
    served = 0
    for peer in crowd:
        peer.say(m.Hello(protocol.VERSION_MIN, protocol.VERSION_MAX, "crowd", 1)) if served < CONNECTIONS // 2 else None
        answer = peer.hear()[1]
        assert isinstance(answer, m.Welcome) or answer.code == errors.Busy.code
        served += isinstance(answer, m.Welcome)
    assert served == CONNECTIONS // 2
    owner = house.welcome(OWNER)
    assert isinstance(commit(owner, container(owner.key)), m.Committed)
    for peer in crowd:
        peer.close()
    assert eventually(lambda: _may_enter(house))


def _may_enter(house: House) -> bool:
    with house.visit(STRANGER) as peer:
        try:
            peer.say(m.Hello(protocol.VERSION_MIN, protocol.VERSION_MAX, "again", 1))
        except OSError:
            return False
        heard = peer.hear()
        return heard is not None and isinstance(heard[1], m.Welcome)
