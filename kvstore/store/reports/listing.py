"""ls and show: what is stored, as far as the asking user may read it. Tokens are never shown."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from warmkv.kvstore.needs import Provides
from warmkv.kvstore.store.access import Access
from warmkv.kvstore.store.cold import stored_bytes
from warmkv.kvstore.store.index import Cold, Namespace, Record
from warmkv.kvstore.store.reports import arguments
from warmkv.schema import ids
from warmkv.schema.errors import RecordError, UnknownNamespace

if TYPE_CHECKING:
    from warmkv.kvstore.store.engine import Engine

MAX_ROWS = 1000


def ls(engine: Engine, access: Access, given: dict[str, object]) -> dict[str, object]:
    """Namespaces the user may read; with ``namespace`` (hex prefix) the prefixes that end in it."""
    wanted = str(given.get("namespace", ""))
    with engine.index.changed:
        ours = [item for item in access.readable(engine.index) if item.key.hex().startswith(wanted)]
        rows: list[dict[str, object]] = []
        if not wanted:
            rows = [_namespace_row(item) for item in ours]
        else:
            leaves = [record for item in ours for record in item.records if not record.is_state and _is_end(record)]
            leaves.sort(key=lambda record: -record.last_used)
            rows = [_record_row(record) for record in leaves]
    return {"kind": "prefixes" if wanted else "namespaces", "total": len(rows), "rows": rows[:MAX_ROWS]}


def identity(engine: Engine, access: Access, given: dict[str, object]) -> dict[str, object]:
    """The model of the one namespace that begins with ``namespace`` (at least 4 hex digits), as the hex of its
    identity's canonical bytes. Raises RecordError, UnknownNamespace."""
    wanted = arguments.text(given, "namespace").lower()
    if len(wanted) < 4:
        raise RecordError(f"namespace {wanted!r} is too short, at least 4 hex digits are needed")
    with engine.index.changed:
        found = [item for item in access.readable(engine.index) if item.key.hex().startswith(wanted)]
    if len(found) != 1:
        raise UnknownNamespace(f"namespace {wanted} is the beginning of {len(found)} that you may read, expected of 1")
    return {"namespace": found[0].key.hex(), "share": found[0].share, "identity": found[0].identity.canonical().hex()}


def show(engine: Engine, access: Access, given: dict[str, object]) -> dict[str, object]:
    """A prefix by the hex prefix of its record id: its chain, anchors and bytes per tier."""
    wanted = str(given.get("id", ""))
    if len(wanted) < 4:
        raise RecordError(f"id {wanted!r} is too short, at least 4 hex digits are needed")
    with engine.index.changed:
        ours = access.readable(engine.index)
        found = [record for item in ours for record in item.records if record.id.hex().startswith(wanted)]
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
        "share": item.share,
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
        "cold_error": record.cold_error,
        "hits": record.hits,
        "last_used": record.last_used,
        "pinned": record.pinned_until_ns > time.time_ns(),
        "leases": len(record.leases),
        "created_ns": record.created_ns,
        "writer": record.writer,
    }
