"""Exit statuses: an interface that scripts rely on. Numbers are final."""

from __future__ import annotations

from warmkv.schema.errors import (
    AlreadyRunning,
    ConfigError,
    CorruptStore,
    DaemonTimeout,
    DaemonUnavailable,
    DigestError,
    StoreInUse,
    StoreTooNew,
    TooNewError,
    UnknownNamespace,
    WarmKVError,
)

OK = 0
FAILURE = 1
USAGE = 2
NO_DAEMON = 3
MISS = 4
CORRUPTION = 5
IN_USE = 6
TOO_NEW = 7

_BY_CLASS: dict[type[WarmKVError], int] = {
    ConfigError: USAGE,
    DaemonUnavailable: NO_DAEMON,
    DaemonTimeout: NO_DAEMON,
    UnknownNamespace: MISS,
    DigestError: CORRUPTION,
    CorruptStore: CORRUPTION,
    StoreInUse: IN_USE,
    AlreadyRunning: IN_USE,
    StoreTooNew: TOO_NEW,
    TooNewError: TOO_NEW,
}


def status_of(exc: BaseException) -> int:
    """Exit status for an error that ended a verb."""
    for cls in type(exc).__mro__:
        if cls in _BY_CLASS:
            return _BY_CLASS[cls]
    return FAILURE
