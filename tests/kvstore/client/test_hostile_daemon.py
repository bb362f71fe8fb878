"""A daemon that hands over what it should not: the client takes nothing of it and says why.

The stand-in answers an acquire with true rows, of which each case changes one thing, over a real
socket. What the client hands out is compared bit for bit, so that rows of anything else would show.
"""

from __future__ import annotations

import fcntl
import gc
import os
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from warmkv import connect
from warmkv.kvstore import memfd
from warmkv.kvstore.containers import PlaneSource, write_segment
from warmkv.kvstore.testing import FOLDED, TOKENS, assert_rows, model_rows, random_identity
from warmkv.schema import messages as m
from warmkv.schema import segment as container
from warmkv.schema.errors import WarmKVError
from warmkv.schema.identity import Identity
from warmkv.schema.records import CLEAN, ROOT, Lineage, NamespaceKey, RecordId, as_tokens

Scripted = Callable[[Callable[[Any], None]], Any]
IDENTITY, OTHER = random_identity(), random_identity(heads=1)
KEY, OTHER_KEY = NamespaceKey(b"k" * 16), NamespaceKey(b"o" * 16)
QUERY = [*TOKENS, 1]
#: Not in the fcntl module of Python 3.11.
F_SEAL_FUTURE_WRITE = 0x10
CUT = 5


@dataclass(frozen=True)
class Part:
    """A container, and what a reply says of it."""

    data: bytes
    id: RecordId
    start: int
    end: int
    total_bytes: int


def part(
    start: int, end: int, *, tokens: Sequence[int] = TOKENS, key: NamespaceKey = KEY, lineage: Lineage = CLEAN,
    identity: Identity = IDENTITY,
) -> Part:  # fmt: skip
    """Rows [start, end) of a prompt, as an honest daemon has them."""
    ids = list(tokens[:end])
    sources = [
        PlaneSource(record.layer, plane.rows.shape[1:], start, replace(plane, rows=plane.rows[start:]))
        for record in model_rows(identity, ids, (), lineage)
        for plane in record.planes
    ]
    made = write_segment(key, lineage, ROOT, start, as_tokens(ids), (), sources)
    try:
        return Part(memfd.read(made.fd, made.total_bytes, 0), made.id, start, end, made.total_bytes)
    finally:
        made.close()


def sealed(data: bytes, seals: int = memfd.SEALS, hole: int = 0) -> int:
    fd = os.memfd_create("hostile", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, len(data))
    memfd.write(fd, data[: len(data) - hole], 0)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    return fd


def a_pipe(data: bytes) -> int:
    reading, writing = os.pipe()
    os.close(writing)
    return reading


GOOD = (part(0, CUT), part(CUT, len(TOKENS)))
REPLY = m.Acquired(matched=len(TOKENS), usable=len(TOKENS), tier=m.TIER_WARM, lease=7, epoch=9)
Grant = tuple[m.Acquired, list[int]]


def grant(parts: Sequence[Part] = GOOD, fds: Sequence[int] | None = None, **changes: Any) -> Grant:
    """A reply about these parts, with descriptors of them or others."""
    table = np.zeros(len(parts), m.SPAN_DTYPE)
    for row, item in zip(table, parts, strict=True):
        row["id"], row["start"], row["end"] = np.frombuffer(item.id, "u1"), item.start, item.end
        row["container_bytes"] = item.total_bytes
    reply = replace(REPLY, **{"spans": table.tobytes(), **changes})
    return reply, list(fds) if fds is not None else [sealed(item.data) for item in parts]


def second(make: Callable[[bytes], int]) -> Grant:
    """The first part as it should be, the second one by another descriptor."""
    return grant(fds=[sealed(GOOD[0].data), make(GOOD[1].data)])


def resized(change: int) -> Grant:
    """A container of another size than it says of itself, announced as it is."""
    data = GOOD[1].data[:change] if change < 0 else GOOD[1].data + bytes(change)
    return grant([GOOD[0], replace(GOOD[1], data=data, total_bytes=len(data))])


def claiming(**changes: Any) -> Grant:
    """The second part, of which the reply says something else than it is."""
    return grant([GOOD[0], replace(GOOD[1], **changes)], [sealed(item.data) for item in GOOD])


def flipped(at: int) -> Grant:
    data = bytearray(GOOD[1].data)
    data[at] ^= 1
    return grant([GOOD[0], replace(GOOD[1], data=bytes(data))])


STRANGE = [*TOKENS[:3], 99, *TOKENS[4:]]
HOSTILE: dict[str, Callable[[], Grant]] = {
    "not sealed": lambda: second(lambda data: sealed(data, 0)),
    "free to be written": lambda: second(lambda data: sealed(data, memfd.SEALS & ~fcntl.F_SEAL_WRITE | F_SEAL_FUTURE_WRITE)),
    "free to shrink": lambda: second(lambda data: sealed(data, memfd.SEALS & ~fcntl.F_SEAL_SHRINK)),
    "a hole instead of rows": lambda: second(lambda data: sealed(data, hole=len(data) - 4096)),
    "a pipe": lambda: second(a_pipe),
    "a directory": lambda: second(lambda data: os.open("/", os.O_RDONLY | os.O_DIRECTORY)),
    "a socket": lambda: second(lambda data: socket.socket(socket.AF_UNIX).detach()),
    "a device": lambda: second(lambda data: os.open("/dev/zero", os.O_RDONLY)),
    "shorter than said": lambda: second(lambda data: sealed(data[:-1])),
    "longer than said": lambda: second(lambda data: sealed(data + bytes(4096))),
    "cut": lambda: resized(-1),
    "cut behind its head": lambda: resized(4096 - len(GOOD[1].data)),
    "with more behind it": lambda: resized(4096),
    "of no length": lambda: claiming(total_bytes=0),
    "of a giant length": lambda: claiming(total_bytes=2**63),
    "of the greatest length": lambda: claiming(total_bytes=2**64 - 1),
    "of another id": lambda: claiming(id=RecordId(b"x" * 16)),
    "the first part twice": lambda: grant([GOOD[0], GOOD[0]]),
    "the first part as the second": lambda: grant(fds=[sealed(GOOD[0].data), sealed(GOOD[0].data)]),
    "in the wrong places": lambda: grant(fds=[sealed(GOOD[1].data), sealed(GOOD[0].data)]),
    "the second part only": lambda: grant([GOOD[1]]),
    "the first part only": lambda: grant([GOOD[0]]),
    "rows of other tokens": lambda: grant([part(0, CUT, tokens=STRANGE), GOOD[1]]),
    "rows behind other tokens": lambda: grant([GOOD[0], part(CUT, len(TOKENS), tokens=STRANGE)]),
    "rows of another namespace": lambda: grant([GOOD[0], part(CUT, len(TOKENS), key=OTHER_KEY)]),
    "rows of another lineage": lambda: grant([GOOD[0], part(CUT, len(TOKENS), lineage=FOLDED)]),
    "rows of another model": lambda: grant([GOOD[0], part(CUT, len(TOKENS), identity=OTHER)]),
    "more than was asked about": lambda: grant(usable=len(QUERY) + 1, matched=len(QUERY) + 1),
    "more than any prompt": lambda: grant(usable=2**64 - 1),
    "all of it, without logits": lambda: grant(usable=len(QUERY), matched=len(QUERY)),
    "fewer descriptors than spans": lambda: grant(fds=[sealed(GOOD[0].data)]),
    "more descriptors than spans": lambda: grant(fds=[sealed(item.data) for item in (*GOOD, *GOOD)]),
    "as many descriptors as may be": lambda: grant(fds=[sealed(b"x") for _ in range(m.MAX_FDS)]),
    "no spans": lambda: grant(spans=b""),
    "half a span": lambda: grant(spans=bytes(20)),
    "spans without end": lambda: grant(spans=bytes(40 * 70_000)),
    "an unknown tier": lambda: grant(tier=9),
    "anchors that are none": lambda: grant(anchors=b"xyz"),
    "layers that are none": lambda: grant(groups=bytes(range(16))),
    "a flipped magic": lambda: flipped(0),
    "a flipped head": lambda: flipped(container.PREAMBLE.size + 40),
}


def scene(scripted: Scripted, grants: Sequence[Callable[[], Grant]], heard: list[m.Message]) -> Any:
    """A stand-in that answers one acquire after the other with these."""
    left = list(grants)

    def script(line: Any) -> None:
        line.greet()
        while (asked := line.hear()) is not None:
            heard.append(asked)
            if isinstance(asked, m.Open):
                line.say(m.Opened(KEY))
            elif isinstance(asked, m.Acquire):
                reply, fds = left.pop(0)()
                line.say(reply, fds=tuple(fds))
                for fd in fds:
                    os.close(fd)

    return scripted(script)


def leases_ended(heard: list[m.Message]) -> list[int]:
    return [lease for asked in heard if isinstance(asked, m.Release) for lease in asked.leases.tolist()]


@pytest.mark.parametrize("name", HOSTILE)
def test_what_cannot_be_right_is_a_miss_that_keeps_nothing(
    scripted: Scripted, socket_path: Path, descriptors: Callable[[], int], name: str
) -> None:
    """And the next answer, which is right, is taken."""
    before, heard = descriptors(), list[m.Message]()
    with scene(scripted, [HOSTILE[name], grant], heard):
        with connect(socket_path) as client:
            missed = client.restore(IDENTITY, QUERY)
            assert not missed and not missed.layers and missed.reason
            with client.restore(IDENTITY, QUERY) as restored:
                assert restored.usable == len(TOKENS)
                assert_rows(restored, model_rows(IDENTITY, QUERY))
    assert leases_ended(heard)[:1] == [REPLY.lease]
    del missed, restored
    assert descriptors() == before


@pytest.mark.parametrize("name", HOSTILE)
def test_a_strict_client_says_what_is_wrong(
    scripted: Scripted, socket_path: Path, descriptors: Callable[[], int], name: str
) -> None:
    before = descriptors()
    with scene(scripted, [HOSTILE[name]], []), connect(socket_path, strict=True) as client:
        with pytest.raises(WarmKVError):
            client.restore(IDENTITY, QUERY)
    gc.collect()  # the error remembers the frames it came through
    assert descriptors() == before


@pytest.mark.parametrize("at", [4096, -1])
def test_flipped_rows_are_seen_where_they_are_looked_for(scripted: Scripted, socket_path: Path, at: int) -> None:
    with scene(scripted, [lambda: flipped(at)], []), connect(socket_path) as client:
        missed = client.restore(IDENTITY, QUERY, verify=True)
        assert not missed and "DigestError" in missed.reason


def test_rows_handed_over_cannot_be_changed_by_who_handed_them_over(scripted: Scripted, socket_path: Path) -> None:
    kept: list[int] = []

    def keeping() -> Grant:
        reply, fds = grant()
        kept.extend(os.dup(fd) for fd in fds)
        return reply, fds

    with scene(scripted, [keeping], []), connect(socket_path) as client, client.restore(IDENTITY, QUERY) as restored:
        for fd in kept:
            changes: list[Callable[[], object]] = [lambda: os.ftruncate(fd, 0), lambda: os.pwrite(fd, bytes(64), 4096)]  # noqa: B023
            for change in changes:
                with pytest.raises(PermissionError):
                    change()
            os.close(fd)
        assert_rows(restored, model_rows(IDENTITY, QUERY))
