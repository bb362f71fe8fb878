"""Room for bytes that come by another way than an offered upload: from a file."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from warmkv.schema.errors import Busy
from warmkv.schema.records import NamespaceKey, RecordId

if TYPE_CHECKING:
    from warmkv.kvstore.store.engine import Engine


@contextmanager
def room(engine: Engine, wanted_bytes: int, uid: int, key: NamespaceKey, builds_on: RecordId | None = None) -> Iterator[int]:
    """A reservation of the warm tier for a user's record of a namespace, given back at the end of the
    block unless it was used. Where all that could go waits for the disk, that is waited for.

    Raises TooLarge, Busy, ClosedError."""
    reservation = _reserved(engine, wanted_bytes, uid, key, builds_on)
    try:
        yield reservation
    finally:
        engine.intake.give_back(reservation)


def _reserved(engine: Engine, wanted_bytes: int, uid: int, key: NamespaceKey, builds_on: RecordId | None) -> int:
    try:
        try:
            return _reserve(engine, wanted_bytes, uid, key, builds_on)
        except Busy:
            if not engine.flush(engine.options.durable_timeout_s):
                raise
            return _reserve(engine, wanted_bytes, uid, key, builds_on)
    finally:
        engine.warm.reap()


def _reserve(engine: Engine, wanted_bytes: int, uid: int, key: NamespaceKey, builds_on: RecordId | None) -> int:
    index, warm = engine.index, engine.warm
    with index.changed:
        namespace = index.namespaces.get(key)
        charged = namespace.owner_uid if namespace is not None else uid
        parent = index.records.get(builds_on) if builds_on is not None else None
        warm.make_room(wanted_bytes, parent, uid=charged)
        return warm.ledger.reserve(wanted_bytes, warm.clock() + engine.options.reservation_ttl_s, charged)
