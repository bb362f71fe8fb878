"""verify, scrub and health: is what is stored still what was stored, and does everything run?"""

from __future__ import annotations

from typing import TYPE_CHECKING

from warmkv.kvstore.store.access import Access, administers
from warmkv.kvstore.store.check import check
from warmkv.kvstore.store.index import Cold
from warmkv.kvstore.store.reports import arguments
from warmkv.schema.errors import FormatError, UnsupportedError

if TYPE_CHECKING:
    from warmkv.kvstore.store.engine import Engine


def verify(engine: Engine, access: Access, given: dict[str, object]) -> dict[str, object]:
    """Read every cold record the user may read again and check it, quarantining what is bad. The
    invariants of index and accounts are told to who runs the store."""
    with engine.index.changed:
        records = [
            record for namespace in access.readable(engine.index) for record in namespace.records if record.cold == Cold.STORED
        ]
    checked = total = 0
    bad: list[dict[str, str]] = []
    for record in records:
        if engine.cold is None:
            continue
        try:
            with engine.promotion.kept(record) as stored:
                if not stored:
                    continue
                engine.cold.verify(record.id)
        except FormatError as exc:
            if record.gone or record.cold != Cold.STORED:
                continue
            bad.append({"id": record.id.hex(), "reason": str(exc)})
            engine.promotion.quarantine(record, str(exc))
        checked, total = checked + 1, total + record.total_bytes
    problems = check(engine) if administers(access.uid) else []
    return {"checked": checked, "total_bytes": total, "bad": bad, "problems": problems}


def scrub(engine: Engine, access: Access, given: dict[str, object]) -> dict[str, object]:
    """Begin to read every record again, unless that is under way; how far it is. With ``progress``
    only that."""
    if engine.scrubber is None:
        raise UnsupportedError("this store has no disk to scrub")
    if not arguments.flag(given, "progress"):
        engine.scrubber.scrub_now()
    return engine.scrubber.progress()


def health(engine: Engine, access: Access, given: dict[str, object]) -> dict[str, object]:
    """What is not as it must be, by name of the part; empty when all is well."""
    problems = engine.health.problems()
    return {"healthy": not problems, "problems": problems, "checks": sorted(engine.health.names())}
