"""The root of every error warmkv raises, and the table of their codes.

Codes travel on the wire, so an exception raised inside the daemon arrives at the client as
the same class. A miss is never an error: it is a value with a reason.
"""

from __future__ import annotations


class WarmKVError(Exception):
    """Base class. ``code`` is stable across versions; ``retryable`` says whether the same
    call may succeed later without a change by the caller."""

    code = 1
    retryable = False


class FormatError(WarmKVError):
    """Bytes that are not what their format demands: says what, where, and what was expected."""

    code = 100


class TooNewError(FormatError):
    """A container or store of a newer major format than this program reads."""

    code = 101


class DigestError(FormatError):
    """Stored and computed digests differ: the bytes are not those that were written."""

    code = 102


class IdentityError(WarmKVError):
    """An identity with a missing, empty, unknown or path-dependent field."""

    code = 110


class RecordError(WarmKVError):
    """Rows, ids, attachments or anchors a caller handed in do not fit each other."""

    code = 111


class UnsupportedError(WarmKVError):
    """A well-formed request for something this version refuses to do."""

    code = 112


class ProtocolError(WarmKVError):
    """The conversation between client and daemon broke its rules."""

    code = 200


class LocalProtocolError(ProtocolError):
    """This side tried to send something the protocol does not allow now."""

    code = 201


class RemoteProtocolError(ProtocolError):
    """The other side sent something the protocol does not allow."""

    code = 202


class VersionMismatch(ProtocolError):
    """No protocol version is spoken by both sides."""

    code = 203


class StoreError(WarmKVError):
    """A store could not do what was asked."""

    code = 300


class StoreInUse(StoreError):
    """Another process holds the lock of this store."""

    code = 301


class StoreTooNew(StoreError):
    """The store was written by a newer major version."""

    code = 302


class TooLarge(StoreError):
    """An entry larger than the budget it would have to fit into."""

    code = 303


class Busy(StoreError):
    """Room could not be made in time; the same save may succeed later."""

    code = 304
    retryable = True


class OfferAgain(StoreError):
    """What the save builds on is no longer held: offer once more and send what is missing."""

    code = 305
    retryable = True


class ColdFull(StoreError):
    """The cold tier could not take the bytes (map or disk full); the warm tier still serves."""

    code = 306


class BudgetError(StoreError):
    """A budget that is negative, or smaller than anything could use."""

    code = 307


class UnknownNamespace(StoreError):
    """A namespace key this connection has not opened."""

    code = 308


class CorruptStore(StoreError):
    """A store that cannot be opened as what it claims to be."""

    code = 309


class DescriptorLimit(StoreError):
    """No file descriptor left for this request."""

    code = 310
    retryable = True


class AccessRefused(StoreError):
    """What this user may not do, or something that is not there: which of the two is not told."""

    code = 311


class ColdUnavailable(StoreError):
    """There can be no cold tier here: on this file system, within this process's limits."""

    code = 312


class ClientError(WarmKVError):
    """The client could not complete a call."""

    code = 400


class DaemonUnavailable(ClientError):
    """No daemon answers at the socket."""

    code = 401
    retryable = True


class DaemonTimeout(ClientError):
    """The daemon did not answer within the time-out."""

    code = 402
    retryable = True


class ClosedError(ClientError):
    """The client, store or restored state was closed before this call."""

    code = 403


class DaemonError(WarmKVError):
    """The daemon could not start or failed inside."""

    code = 500


class ConfigError(DaemonError):
    """A configuration value that is unknown or out of range: says where it came from."""

    code = 501


class AlreadyRunning(DaemonError):
    """Another daemon serves this socket."""

    code = 502


class SocketPathError(DaemonError):
    """A socket path that is too long, not ours, or taken by something else."""

    code = 503


class PeerRefused(DaemonError):
    """The daemon does not serve this user."""

    code = 504


class InternalError(DaemonError):
    """A defect inside the daemon; its log has the traceback."""

    code = 599


class LiveError(WarmKVError):
    """The live cache could not do what was asked; it is as it was before."""

    code = 600


class OutOfMemory(LiveError):
    """Memory could not be had. ``requested_bytes`` is what the refused allocation asked for."""

    code = 601

    def __init__(self, message: str, requested_bytes: int = 0) -> None:
        super().__init__(message)
        self.requested_bytes = requested_bytes


class CannotRewind(LiveError):
    """State that cannot be taken back to an earlier position: recurrent, sealed, or behind its undo rows."""

    code = 602


class SealError(LiveError):
    """A Nystroem layer could not be sealed; it stays refused until it is cleared."""

    code = 603


class DeviceMissing(LiveError):
    """A device was asked for that this machine does not have, or whose library is not installed."""

    code = 604


class DeviceFault(LiveError):
    """A device refused or failed an operation; what it says is in the message."""

    code = 605


class CapacityExceeded(LiveError):
    """Rows that do not fit a fixed capacity: of a device buffer, or of a ring and what it must keep."""

    code = 606


class TransactionError(LiveError):
    """A transaction that is nested, stale, half committed or out of its range."""

    code = 607


class ReplayDue(LiveError):
    """After a rollback recurrent layers are behind the others: their tokens have to be replayed first."""

    code = 608


def _walk(root: type[WarmKVError]) -> list[type[WarmKVError]]:
    found = [root]
    for child in root.__subclasses__():
        found.extend(_walk(child))
    return found


BY_CODE: dict[int, type[WarmKVError]] = {cls.code: cls for cls in _walk(WarmKVError)}


def error_from_code(code: int, message: str) -> WarmKVError:
    """The exception a peer meant. An unknown code becomes a plain WarmKVError that keeps it."""
    cls = BY_CODE.get(code)
    if cls is None:
        error = WarmKVError(f"error {code} of a newer peer: {message}")
        error.code = code
        return error
    return cls(message)
