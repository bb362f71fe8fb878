"""Framing, and the conversation as tables: every state against every message."""

from __future__ import annotations

import struct
from typing import Any

import pytest
from make_golden import MESSAGES

from warmkv.schema import frame, protocol
from warmkv.schema import messages as m
from warmkv.schema.errors import LocalProtocolError, ProtocolError, RemoteProtocolError, VersionMismatch

#: Request to the reply it must get, written out a second time; None is one-way.
ANSWERS: dict[str, str | None] = {
    "Hello": "Welcome",
    "Open": "Opened",
    "Match": "Matched",
    "Acquire": "Acquired",
    "Prefetch": "Matched",
    "Release": None,
    "Offer": "Offered",
    "Commit": "Committed",
    "Annotate": "Committed",
    "Pin": "Pinned",
    "Forget": "Forgotten",
    "Clear": "Forgotten",
    "Report": "Document",
}
REQUESTS = sorted(ANSWERS)
AWAITED = [name for name, reply in sorted(ANSWERS.items()) if reply]
REPLIES = sorted(set(MESSAGES) - set(ANSWERS))
#: How many descriptors a message must and may carry.
DESCRIPTORS = {"Commit": (1, 1), "Report": (0, 1), "Acquired": (0, 250)}
KINDS = sorted(MESSAGES)


def fewest(name: str) -> int:
    return DESCRIPTORS.get(name, (0, 0))[0]


# -- framing ----------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [16, 17, 255, 256, 65536])
def test_a_frame_is_length_and_body(size: int) -> None:
    body = bytes(size)
    data = frame.frame(body)
    assert data == struct.pack("<I", size) + body
    assert frame.body_length(data[:4]) == size


@pytest.mark.parametrize("size", [0, 1, 15])
def test_tiny_bodies_are_refused_on_both_sides(size: int) -> None:
    with pytest.raises(LocalProtocolError):
        frame.frame(bytes(size))
    with pytest.raises(RemoteProtocolError):
        frame.body_length(struct.pack("<I", size))


def test_huge_bodies_are_refused_on_both_sides() -> None:
    assert frame.body_length(struct.pack("<I", m.MAX_BODY_BYTES)) == m.MAX_BODY_BYTES
    for size in (m.MAX_BODY_BYTES + 1, 2**31, 2**32 - 1):
        with pytest.raises(RemoteProtocolError):
            frame.body_length(struct.pack("<I", size))
    with pytest.raises(LocalProtocolError):
        frame.frame(bytes(m.MAX_BODY_BYTES + 1))


def test_a_receiver_may_cap_lower() -> None:
    assert frame.body_length(struct.pack("<I", 4096), 4096) == 4096
    with pytest.raises(RemoteProtocolError):
        frame.body_length(struct.pack("<I", 4097), 4096)


@pytest.mark.parametrize("kind", KINDS)
def test_every_message_fits_a_frame(kind: str) -> None:
    body = m.encode(MESSAGES[kind], 1)
    assert frame.frame(body)[4:] == body


# -- tables -----------------------------------------------------------------------------------


def test_the_tables_name_every_message_once() -> None:
    replies = {cls.__name__: reply.__name__ for cls, reply in protocol.REPLY.items()}
    assert replies == {name: reply for name, reply in ANSWERS.items() if reply}
    assert [cls.__name__ for cls in protocol.ONE_WAY] == [name for name, reply in ANSWERS.items() if reply is None]
    assert {cls.__name__: counts for cls, counts in protocol.DESCRIPTORS.items()} == DESCRIPTORS
    assert set(ANSWERS) | {reply for reply in ANSWERS.values() if reply} | {"Fault"} == set(m.CLASSES)


@pytest.mark.parametrize("kind", KINDS)
def test_descriptor_counts(kind: str) -> None:
    low, high = DESCRIPTORS.get(kind, (0, 0))
    for count in (0, 1, 2, 249, 250, 251, 253):
        if low <= count <= high:
            protocol.check_descriptors(MESSAGES[kind], count)
        else:
            with pytest.raises(RemoteProtocolError):
                protocol.check_descriptors(MESSAGES[kind], count)


@pytest.mark.parametrize(
    ("low", "high", "chosen"),
    [
        (2, 2, 2), (1, 2, 2), (0, 2, 2), (2, 9, 2), (0, 65535, 2), (0, 0, None), (1, 1, None), (0, 1, None), (3, 3, None),
        (3, 9, None), (2, 1, None), (9, 2, None),
    ],
)  # fmt: skip
def test_version_choice(low: int, high: int, chosen: int | None) -> None:
    if chosen is None:
        with pytest.raises(VersionMismatch):
            protocol.choose_version(low, high)
    else:
        assert protocol.choose_version(low, high) == chosen


# -- the client's side ------------------------------------------------------------------------


def client(state: str) -> protocol.ClientConversation:
    """A conversation in a state: fresh, idle, or waiting for the reply to the request named."""
    talk = protocol.ClientConversation()
    if state == "fresh":
        return talk
    first = talk.send(MESSAGES["Hello"])
    if state == "Hello":
        return talk
    talk.receive(first, MESSAGES["Welcome"], 0)
    if state != "idle":
        talk.send(MESSAGES[state])
    return talk


STATES = ["fresh", "idle", *AWAITED]


def last_id(state: str) -> int:
    return {"fresh": 0, "idle": 1, "Hello": 1}.get(state, 2)


def may_send(state: str, kind: str) -> bool:
    return kind == "Hello" if state == "fresh" else state == "idle" and kind in ANSWERS and kind != "Hello"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("state", STATES)
def test_client_sends(state: str, kind: str) -> None:
    talk = client(state)
    if may_send(state, kind):
        assert talk.send(MESSAGES[kind]) == last_id(state) + 1
        return
    with pytest.raises(LocalProtocolError):
        talk.send(MESSAGES[kind])
    for other in KINDS:  # a refused message leaves the state as it was
        if may_send(state, other):
            assert talk.send(MESSAGES[other]) == last_id(state) + 1
            return


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("state", STATES)
def test_client_receives(state: str, kind: str) -> None:
    for request_id in {0, last_id(state), last_id(state) + 1, last_id(state) + 2**32}:
        talk = client(state)
        awaited = ANSWERS.get(state)
        answers = awaited is not None and kind in (awaited, "Fault") and request_id == last_id(state)
        about_connection = awaited is not None and kind == "Fault" and request_id == 0
        if not (answers or about_connection):
            with pytest.raises(RemoteProtocolError):
                talk.receive(request_id, MESSAGES[kind], fewest(kind))
            continue
        talk.receive(request_id, MESSAGES[kind], fewest(kind))
        with pytest.raises(RemoteProtocolError, match="without a request"):
            talk.receive(request_id, MESSAGES[kind], fewest(kind))


@pytest.mark.parametrize("state", AWAITED)
def test_descriptors_come_with_acquired_only(state: str) -> None:
    reply = ANSWERS[state]
    assert reply is not None
    for kind, count in ((reply, 1), (reply, 250), (reply, 251), ("Fault", 1)):
        talk = client(state)
        if kind == "Acquired" and count <= 250:
            talk.receive(last_id(state), MESSAGES[kind], count)
        else:
            with pytest.raises(RemoteProtocolError):
                talk.receive(last_id(state), MESSAGES[kind], count)


@pytest.mark.parametrize("version", [0, 1, 3, 65535])
def test_a_version_nobody_asked_for_is_refused(version: int) -> None:
    talk = client("Hello")
    with pytest.raises(VersionMismatch):
        talk.receive(1, m.Welcome(version, 1, "", 0, 0), 0)
    with pytest.raises(LocalProtocolError):
        talk.send(MESSAGES["Match"])


def test_a_refused_greeting_greets_nobody() -> None:
    talk = client("Hello")
    talk.receive(1, MESSAGES["Fault"], 0)
    with pytest.raises(LocalProtocolError):
        talk.send(MESSAGES["Match"])


def test_a_one_way_message_awaits_nothing_and_takes_an_id() -> None:
    talk = client("idle")
    assert talk.send(MESSAGES["Release"]) == 2
    assert talk.send(MESSAGES["Match"]) == 3
    with pytest.raises(RemoteProtocolError):
        talk.receive(2, MESSAGES["Matched"], 0)
    talk.receive(3, MESSAGES["Matched"], 0)


# -- the daemon's side ------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("greeted", [False, True])
def test_server_receives(greeted: bool, kind: str) -> None:
    talk = protocol.ServerConversation()
    if greeted:
        talk.receive(MESSAGES["Hello"], 0)
    if kind in ANSWERS and (kind == "Hello") != greeted:
        talk.receive(MESSAGES[kind], fewest(kind))
        with pytest.raises(RemoteProtocolError, match="once"):
            talk.receive(MESSAGES["Hello"], 0)
        return
    with pytest.raises(RemoteProtocolError):
        talk.receive(MESSAGES[kind], fewest(kind))
    talk.receive(MESSAGES["Match" if greeted else "Hello"], 0)


@pytest.mark.parametrize("count", [1, 250])
def test_a_greeting_with_descriptors_greets_nobody(count: int) -> None:
    talk = protocol.ServerConversation()
    with pytest.raises(RemoteProtocolError):
        talk.receive(MESSAGES["Hello"], count)
    with pytest.raises(RemoteProtocolError):
        talk.receive(MESSAGES["Match"], 0)


@pytest.mark.parametrize("kind", [kind for kind in REQUESTS if kind != "Hello"])
def test_requests_carry_exactly_their_descriptors(kind: str) -> None:
    for count in (0, 1, 2):
        talk = protocol.ServerConversation()
        talk.receive(MESSAGES["Hello"], 0)
        if fewest(kind) <= count <= DESCRIPTORS.get(kind, (0, 0))[1]:
            talk.receive(MESSAGES[kind], count)
        else:
            with pytest.raises(RemoteProtocolError):
                talk.receive(MESSAGES[kind], count)


@pytest.mark.parametrize("message", [None, object(), 7, "Hello"])
def test_what_is_no_message_is_refused(message: Any) -> None:
    for refused in (
        lambda: protocol.ClientConversation().send(message),
        lambda: client("Match").receive(2, message, 0),
        lambda: protocol.ServerConversation().receive(message, 0),
    ):
        with pytest.raises(ProtocolError):
            refused()
