"""Reports and administrative verbs of a store: questions in JSON, answers in JSON.

They count and name; they never show tokens, and never what belongs to somebody the asking user
may not read.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from warmkv.kvstore.store.access import Access, require_administrator
from warmkv.kvstore.store.reports import checking, figures, listing, packs, running
from warmkv.schema.errors import RecordError, RemoteProtocolError

if TYPE_CHECKING:
    from warmkv.kvstore.store.engine import Engine

Given = dict[str, object]
Verb = Callable[["Engine", Access, Given], Mapping[str, object]]
FileVerb = Callable[["Engine", Access, Given, int], Mapping[str, object]]

#: For every user, each about what that user may read.
VERBS: dict[str, Verb] = {
    "status": figures.status,
    "stats": figures.stats,
    "identity": listing.identity,
    "ls": listing.ls,
    "show": listing.show,
    "verify": checking.verify,
    "watch": running.watch,
}
#: For the user the store's process runs as, and for root.
ADMIN_VERBS: dict[str, Verb] = {
    "backup": running.backup,
    "compact": running.compact,
    "evict": running.evict,
    "health": checking.health,
    "reload": running.reload,
    "scrub": checking.scrub,
}
#: For every user; they come with one open file of that user's own.
FILE_VERBS: dict[str, FileVerb] = {"export": packs.export, "import": packs.import_}


def report(engine: Engine, access: Access, verb: str, arguments: bytes, fd: int = -1) -> bytes:
    """The report ``verb`` as JSON bytes; ``fd`` is the file of a verb that has one, borrowed.

    Raises RecordError for unknown verbs or arguments, RemoteProtocolError for a file too many or
    too few, AccessRefused for what only administrators may do, and what the verb itself raises."""
    try:
        given = json.loads(arguments or b"{}")
    except (ValueError, RecursionError) as exc:
        raise RecordError(f"arguments of report {verb!r} are not JSON") from exc
    known = {**VERBS, **ADMIN_VERBS, **FILE_VERBS}
    if verb not in known or not isinstance(given, dict):
        raise RecordError(f"unknown report {verb!r}, known: {', '.join(sorted(known))}")
    if (verb in FILE_VERBS) != (fd >= 0):
        raise RemoteProtocolError(f"report {verb!r} came {'with' if fd >= 0 else 'without'} an open file")
    if verb in FILE_VERBS:
        return json.dumps(FILE_VERBS[verb](engine, access, given, fd)).encode()
    if verb in ADMIN_VERBS:
        require_administrator(access.uid, verb)
    make = VERBS.get(verb) or ADMIN_VERBS[verb]
    return json.dumps(make(engine, access, given)).encode()
