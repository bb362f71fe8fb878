"""Administrative reports as JSON. They count and name; they never show tokens."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from warmkv.kvstore.needs import Provides
from warmkv.kvstore.store.check import check
from warmkv.kvstore.store.cold import stored_bytes
from warmkv.kvstore.store.index import Cold, Namespace, Record
from warmkv.schema import ids
from warmkv.schema.errors import FormatError, RecordError

if TYPE_CHECKING:
    from warmkv.kvstore.store.engine import Engine

MAX_ROWS = 1000


def report(engine: Engine, uid: int, verb: str, arguments: bytes) -> bytes:
    """The report ``verb`` as JSON bytes. Raises RecordError for unknown verbs or arguments."""
    try:
        given = json.loads(arguments or b"{}")
    except (ValueError, RecursionError) as exc:
        raise RecordError(f"arguments of report {verb!r} are not JSON") from exc
    make = _VERBS.get(verb)
    if make is None or not isinstance(given, dict):
        raise RecordError(f"unknown report {verb!r}, known: {', '.join(sorted(_VERBS))}")
    return json.dumps(make(engine, uid, given)).encode()


def status(engine: Engine, uid: int, given: dict[str, object]) -> dict[str, object]:
    with engine.index.changed:
        return {
            "epoch": f"{engine.epoch:016x}",
            "uptime_s": round(time.time() - engine.started, 3),
            "store": str(engine.options.path) if engine.cold else None,
            "records": len(engine.index.records),
            "namespaces": len(engine.index.namespaces),
            "warm_bytes": engine.warm.ledger.resident_bytes,
            "warm_budget_bytes": engine.warm.ledger.budget_bytes,
            "cold_bytes": engine.writer.cold_bytes if engine.writer else 0,
            "cold_budget_bytes": engine.cold.budget_bytes if engine.cold else 0,
        }


def stats(engine: Engine, uid: int, given: dict[str, object]) -> dict[str, object]:
    on_disk = {"quarantined": engine.cold.quarantined(), **engine.cold.info()} if engine.cold else {"quarantined": 0}
    with engine.index.changed:
        ledger, writer, cold, intake = engine.warm.ledger, engine.writer, engine.cold, engine.intake
        records = list(engine.index.records.values())
        return {
            "warm": {
                "bytes": ledger.resident_bytes,
                "entries": ledger.resident_entries,
                "budget_bytes": ledger.budget_bytes,
                "budget_entries": ledger.budget_entries,
                "reserved_bytes": ledger.reserved_bytes,
                "promoting_bytes": ledger.promoting_bytes,
                "leased_bytes": ledger.leased_bytes,
                "lent_bytes": ledger.lent_bytes,
                "peak_bytes": ledger.peak_bytes,
                "evictions": engine.warm.evictions,
            },
            "cold": {
                "bytes": writer.cold_bytes if writer else 0,
                "entries": sum(record.cold == Cold.STORED for record in records),
                "budget_bytes": cold.budget_bytes if cold else 0,
                "queued": sum(record.cold in (Cold.QUEUED, Cold.WRITING) for record in records),
                "bytes_written": cold.bytes_written if cold else 0,
                "evictions": writer.evictions if writer else 0,
                "failures": writer.failures if writer else 0,
                **on_disk,
            },
            "entries": len(records),
            "namespaces": len(engine.index.namespaces),
            "anchors": sum(len(record.anchors) for record in records),
            "leases": sum(len(record.leases) for record in records),
            "states": sum(record.is_state for record in records),
            "state_bytes": sum(record.total_bytes for record in records if record.is_state),
            "packed": sum(record.packed for record in records),
            "hits": engine.acquisition.hits,
            "misses": engine.acquisition.misses,
            "refusals": engine.acquisition.refusals,
            "tokens_usable": engine.acquisition.tokens_usable,
            "flights": len(engine.acquisition.flights),
            "waits": engine.acquisition.flights.waits,
            "saves": intake.saves,
            "duplicates": intake.duplicates,
            "received_bytes": intake.received_bytes,
            "promotions": engine.promotion.count,
            "promoted_bytes": engine.promotion.total_bytes,
            "quarantines": engine.promotion.quarantined,
            "swept": engine.swept,
        }


def ls(engine: Engine, uid: int, given: dict[str, object]) -> dict[str, object]:
    """Namespaces of the user; with ``namespace`` (hex prefix) the prefixes that end in it."""
    wanted = str(given.get("namespace", ""))
    with engine.index.changed:
        ours = [item for item in engine.index.namespaces.values() if item.owner_uid == uid and item.key.hex().startswith(wanted)]
        rows: list[dict[str, object]] = []
        if not wanted:
            rows = [_namespace_row(item) for item in ours]
        else:
            leaves = [record for item in ours for record in item.records if not record.is_state and _is_end(record)]
            leaves.sort(key=lambda record: -record.last_used)
            rows = [_record_row(record) for record in leaves]
    return {"kind": "prefixes" if wanted else "namespaces", "total": len(rows), "rows": rows[:MAX_ROWS]}


def show(engine: Engine, uid: int, given: dict[str, object]) -> dict[str, object]:
    """A prefix by the hex prefix of its record id: its chain, anchors and bytes per tier."""
    wanted = str(given.get("id", ""))
    if len(wanted) < 4:
        raise RecordError(f"id {wanted!r} is too short, at least 4 hex digits are needed")
    with engine.index.changed:
        found = [
            record for record in engine.index.records.values()
            if record.id.hex().startswith(wanted) and record.namespace.owner_uid == uid
        ]  # fmt: skip
        if len(found) != 1:
            return {"found": len(found), "ids": sorted(record.id.hex() for record in found)[:MAX_ROWS]}
        record = found[0]
        chain = engine.index.chain_of(record)
        return {
            "found": 1,
            **_record_row(record),
            "namespace": _namespace_row(record.namespace),
            "lineage": record.lineage.hex(),
            "chain": [_record_row(link) for link in chain],
            "states": [_record_row(item) for item in sorted(_states(chain), key=lambda item: item.end)],
            "anchors": [
                {"position": a.position, "kind": a.kind.name.lower(), "depth": a.depth, "semantic_hash": a.semantic_hash}
                for link in chain
                for a in sorted(link.anchors.values(), key=lambda item: item.position)
            ],
            "warm_bytes": sum(link.total_bytes for link in chain if link.warm),
            "cold_bytes": sum(stored_bytes(r.total_bytes, r.payload_bytes) for r in chain if r.cold == Cold.STORED),
        }


def verify(engine: Engine, uid: int, given: dict[str, object]) -> dict[str, object]:
    """Read every cold record of the user again and check it, quarantining what is bad. The
    invariants of index and accounts are told to the user the store belongs to."""
    with engine.index.changed:
        records = [r for r in engine.index.records.values() if r.cold == Cold.STORED and r.namespace.owner_uid == uid]
    checked = total = 0
    bad: list[dict[str, str]] = []
    for record in records:
        if engine.cold is None or record.gone or record.cold != Cold.STORED:
            continue
        try:
            engine.cold.verify(record.id)
        except FormatError as exc:
            if record.gone or record.cold != Cold.STORED:
                continue
            bad.append({"id": record.id.hex(), "reason": str(exc)})
            engine.promotion.quarantine(record, str(exc))
        checked, total = checked + 1, total + record.total_bytes
    problems = check(engine) if uid == os.geteuid() else []
    return {"checked": checked, "total_bytes": total, "bad": bad, "problems": problems}


def _states(chain: list[Record]) -> list[Record]:
    """States that hang on these segments."""
    return [child for link in chain for child in link.children if child.is_state]


def _is_end(record: Record) -> bool:
    """Whether a stored prompt ends with a segment: none that is longer builds on it, and it was
    not packed from others that are there too."""
    if record.packed and record.node is not None and any(not item.packed for item in record.node.records):
        return False
    return all(child.is_state or child.packed or child.end <= record.end for child in record.children)


def _namespace_row(item: Namespace) -> dict[str, object]:
    identity = item.identity
    return {
        "namespace": item.key.hex(),
        "fingerprint": ids.fingerprint(identity).hex(),
        "architecture": identity.architecture,
        "layers": len(identity.layers),
        "compute_dtype": identity.compute_dtype,
        "runtime": identity.runtime,
        "owner_uid": item.owner_uid,
        "records": len(item.records),
        "states": sum(record.is_state for record in item.records),
        "tokens": sum(record.end - record.start for record in item.records),
        "warm_bytes": sum(record.total_bytes for record in item.records if record.warm),
        "cold_bytes": sum(stored_bytes(r.total_bytes, r.payload_bytes) for r in item.records if r.cold == Cold.STORED),
        "last_used": max((record.last_used for record in item.records), default=0),
    }


def _record_row(record: Record) -> dict[str, object]:
    return {
        "id": record.id.hex(),
        "kind": "state" if record.is_state else "segment",
        "provides": [flag.name.lower() for flag in Provides if flag in record.provides and flag.name],
        "start": record.start,
        "end": record.end,
        "bytes": record.total_bytes,
        "warm": record.warm,
        "cold": record.cold.name.lower(),
        "hits": record.hits,
        "last_used": record.last_used,
        "pinned": record.pinned_until_ns > time.time_ns(),
        "leases": len(record.leases),
        "created_ns": record.created_ns,
        "writer": record.writer,
    }


_VERBS: dict[str, Callable[[Engine, int, dict[str, object]], dict[str, object]]] = {
    "status": status,
    "stats": stats,
    "ls": ls,
    "show": show,
    "verify": verify,
}
