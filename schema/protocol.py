"""Which message may follow which, as tables and pure objects without I/O.

A conversation is Hello/Welcome once, then requests, each answered by one reply of its kind or
a Fault. Release is one-way. There is one request in flight per connection. A Fault with id 0
concerns the connection and ends it.
"""

from __future__ import annotations

from warmkv.schema import messages as m
from warmkv.schema.errors import LocalProtocolError, RemoteProtocolError, VersionMismatch

#: 2: states, windows, parked logits, waiting for a twin. Version 1 knew rows of full attention
#: only and is refused: it would take a state for a segment.
VERSION_MIN, VERSION_MAX = 2, 2
#: Request id of a Fault about the connection itself (refused, unreadable frame): it answers
#: whatever is awaited, and the connection ends with it. Requests count from 1.
CONNECTION = 0

REPLY: dict[type[object], type[object]] = {
    m.Hello: m.Welcome,
    m.Open: m.Opened,
    m.Match: m.Matched,
    m.Acquire: m.Acquired,
    m.Prefetch: m.Matched,
    m.Offer: m.Offered,
    m.Commit: m.Committed,
    m.Annotate: m.Committed,
    m.Pin: m.Pinned,
    m.Forget: m.Forgotten,
    m.Clear: m.Forgotten,
    m.Report: m.Document,
}
ONE_WAY: tuple[type[object], ...] = (m.Release,)
#: Messages that carry descriptors, with the fewest and the most they may carry.
DESCRIPTORS: dict[type[object], tuple[int, int]] = {m.Commit: (1, 1), m.Report: (0, 1), m.Acquired: (0, m.MAX_FDS)}


def choose_version(version_min: int, version_max: int) -> int:
    """The newest version both sides speak; VersionMismatch names both ranges."""
    best = min(version_max, VERSION_MAX)
    if version_min > version_max or best < max(version_min, VERSION_MIN):
        raise VersionMismatch(f"peer speaks protocol {version_min}..{version_max}, this side {VERSION_MIN}..{VERSION_MAX}")
    return best


def check_descriptors(message: m.Message, count: int) -> None:
    """RemoteProtocolError unless a message of this kind may carry ``count`` descriptors."""
    low, high = DESCRIPTORS.get(type(message), (0, 0))
    if not low <= count <= high:
        raise RemoteProtocolError(f"{type(message).__name__} came with {count} descriptors, expected {low}..{high}")


class ClientConversation:
    """What the client side may send and must receive. Not thread-safe: one per connection."""

    def __init__(self) -> None:
        self._greeted = False
        self._waiting: tuple[int, type[object]] | None = None
        self._next_id = 0

    def send(self, message: m.Message) -> int:
        """Register a message about to be sent; its request id. Raises LocalProtocolError."""
        kind = type(message)
        if self._waiting is not None:
            raise LocalProtocolError(f"{kind.__name__} while a reply is awaited")
        if kind not in REPLY and kind not in ONE_WAY:
            raise LocalProtocolError(f"{kind.__name__} is not a request")
        if (kind is m.Hello) == self._greeted:
            raise LocalProtocolError("Hello comes first, and once")
        self._next_id += 1
        if kind in REPLY:
            self._waiting = (self._next_id, REPLY[kind])
        return self._next_id

    def receive(self, request_id: int, message: m.Message, descriptors: int) -> None:
        """Check a reply against the request it must answer. Raises RemoteProtocolError."""
        if self._waiting is None:
            raise RemoteProtocolError(f"{type(message).__name__} without a request")
        expected_id, expected = self._waiting
        if request_id == CONNECTION and isinstance(message, m.Fault):
            expected_id = CONNECTION
        if request_id != expected_id or type(message) not in (expected, m.Fault):
            got = f"{type(message).__name__} {request_id}"
            raise RemoteProtocolError(f"got {got} in answer to request {expected_id}, expected {expected.__name__}")
        check_descriptors(message, descriptors)
        if isinstance(message, m.Welcome):
            if not VERSION_MIN <= message.version <= VERSION_MAX:
                raise VersionMismatch(f"daemon chose protocol {message.version}, this side speaks {VERSION_MIN}..{VERSION_MAX}")
            self._greeted = True
        self._waiting = None


class ServerConversation:
    """What the daemon side accepts. Not thread-safe: one per connection."""

    def __init__(self) -> None:
        self._greeted = False

    def receive(self, message: m.Message, descriptors: int) -> None:
        """Raises RemoteProtocolError for a message that may not come now."""
        kind = type(message)
        if kind not in REPLY and kind not in ONE_WAY:
            raise RemoteProtocolError(f"{kind.__name__} is not a request")
        if (kind is m.Hello) == self._greeted:
            raise RemoteProtocolError(f"{kind.__name__}: Hello comes first, and once")
        check_descriptors(message, descriptors)
        self._greeted = True
