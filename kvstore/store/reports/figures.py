"""Status and stats: how full the tiers are and what was done.

Who runs the store gets the totals. Everybody else gets the same numbers about what they may read,
without the counters, which tell of everybody.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import TYPE_CHECKING

from warmkv.kvstore.store.access import Access, administers
from warmkv.kvstore.store.cold import stored_bytes
from warmkv.kvstore.store.index import DIRTY, Cold, Record

if TYPE_CHECKING:
    from warmkv.kvstore.store.engine import Engine

Figures = dict[str, object]


def status(engine: Engine, access: Access, given: dict[str, object]) -> Figures:
    """Is it well, how full is it: the few numbers to look at first."""
    common = {"epoch": f"{engine.epoch:016x}", "uptime_s": round(time.time() - engine.started, 3)}
    if not administers(access.uid):
        with engine.index.changed:
            records, namespaces = _ours(engine, access)
            ours = {"records": len(records), "namespaces": namespaces, **_tier_bytes(engine, records)}
            return {**common, **ours, **_own_budgets(engine)}
    problems = engine.health.problems()
    scrub = _progress(engine)
    with engine.index.changed:
        ledger = engine.warm.ledger
        return {
            **common,
            "store": str(engine.options.path) if engine.cold else None,
            "healthy": not problems,
            "problems": problems,
            "records": len(engine.index.records),
            "namespaces": len(engine.index.namespaces),
            "warm_bytes": ledger.resident_bytes,
            "warm_budget_bytes": ledger.budget_bytes,
            "warm_limit_bytes": ledger.limit_bytes,
            "cold_bytes": engine.writer.cold_bytes if engine.writer else 0,
            "cold_budget_bytes": engine.cold.budget_bytes if engine.cold else 0,
            "dirty_bytes": engine.index.dirty_bytes,
            "quarantines": engine.promotion.quarantined,
            **({"scrub": scrub} if scrub else {}),
        }


def stats(engine: Engine, access: Access, given: dict[str, object]) -> Figures:
    """Counters, sizes and budgets."""
    if not administers(access.uid):
        with engine.index.changed:
            return _own_stats(engine, access)
    on_disk = {"quarantined": engine.cold.quarantined(), **engine.cold.info()} if engine.cold else {"quarantined": 0}
    parts = {name: dict(tell()) for name, tell in list(engine.figures.items())}
    scrub = _progress(engine)
    with engine.index.changed:
        records = list(engine.index.records.values())
        writer = engine.writer
        return {
            "warm": _warm(engine, records),
            "cold": {
                "bytes": writer.cold_bytes if writer else 0,
                "entries": sum(record.cold == Cold.STORED for record in records),
                "budget_bytes": engine.cold.budget_bytes if engine.cold else 0,
                "limit_bytes": writer.limit_bytes if writer else 0,
                "queued": sum(record.cold in DIRTY for record in records),
                "bytes_written": engine.cold.bytes_written if engine.cold else 0,
                "evictions": writer.evictions if writer else 0,
                "failures": writer.failures if writer else 0,
                **on_disk,
            },
            "entries": len(records),
            "namespaces": len(engine.index.namespaces),
            "tokens": engine.index.tokens,
            "max_tokens": engine.options.max_tokens,
            "users": _users(engine, records),
            "eviction": engine.eviction.figures(),
            **_counts(records),
            **_counters(engine),
            **({"scrub": scrub} if scrub else {}),
            **parts,
        }


def _warm(engine: Engine, records: Iterable[Record]) -> Figures:
    ledger = engine.warm.ledger
    return {
        "bytes": ledger.resident_bytes,
        "entries": ledger.resident_entries,
        "budget_bytes": ledger.budget_bytes,
        "limit_bytes": ledger.limit_bytes,
        "budget_entries": ledger.budget_entries,
        "reservations": ledger.reservations,
        "reserved_bytes": ledger.reserved_bytes,
        "promoting_bytes": ledger.promoting_bytes,
        "leased_bytes": ledger.leased_bytes,
        "lent_bytes": ledger.lent_bytes,
        "peak_bytes": ledger.peak_bytes,
        "dirty_bytes": engine.index.dirty_bytes,
        "max_dirty_bytes": engine.options.max_dirty_bytes,
        "pinned_bytes": sum(record.total_bytes for record in records if record.warm and _pinned(record)),
        "evictions": engine.warm.evictions,
    }


def _counters(engine: Engine) -> Figures:
    return {
        "hits": engine.acquisition.hits,
        "misses": engine.acquisition.misses,
        "refusals": engine.acquisition.refusals,
        "tokens_usable": engine.acquisition.tokens_usable,
        "flights": len(engine.acquisition.flights),
        "waits": engine.acquisition.flights.waits,
        "saves": engine.intake.saves,
        "duplicates": engine.intake.duplicates,
        "received_bytes": engine.intake.received_bytes,
        "promotions": engine.promotion.count,
        "promoted_bytes": engine.promotion.total_bytes,
        "quarantines": engine.promotion.quarantined,
        "swept": engine.swept,
    }


def _own_stats(engine: Engine, access: Access) -> Figures:
    records, namespaces = _ours(engine, access)
    cold = [record for record in records if record.cold == Cold.STORED]
    warm = [record for record in records if record.warm]
    sizes = _tier_bytes(engine, records)
    return {
        "warm": {
            "bytes": sizes["warm_bytes"],
            "entries": len(warm),
            "dirty_bytes": _dirty_bytes(records),
            "pinned_bytes": sum(record.total_bytes for record in warm if _pinned(record)),
        },
        "cold": {
            "bytes": sizes["cold_bytes"],
            "entries": len(cold),
            "queued": sum(record.cold in DIRTY for record in records),
        },
        "entries": len(records),
        "namespaces": namespaces,
        **_counts(records),
    }


def _own_budgets(engine: Engine) -> dict[str, int]:
    """What one user may hold, as it was declared."""
    share, options = engine.options.uid_share, engine.options
    return {
        "warm_budget_bytes": int((options.warm_bytes or 0) * share),
        "cold_budget_bytes": int((options.cold_bytes or 0) * share),
    }


def _ours(engine: Engine, access: Access) -> tuple[list[Record], int]:
    namespaces = access.readable(engine.index)
    return [record for namespace in namespaces for record in namespace.records], len(namespaces)


def _counts(records: list[Record]) -> Figures:
    return {
        "anchors": sum(len(record.anchors) for record in records),
        "leases": sum(len(record.leases) for record in records),
        "states": sum(record.is_state for record in records),
        "state_bytes": sum(record.total_bytes for record in records if record.is_state),
        "packed": sum(record.packed for record in records),
    }


def _tier_bytes(engine: Engine, records: Iterable[Record]) -> dict[str, int]:
    """What records take of both budgets."""
    cold = [record for record in records if record.cold == Cold.STORED]
    return {
        "warm_bytes": sum(engine.warm.ledger.paged(record.total_bytes) for record in records if record.warm),
        "cold_bytes": sum(stored_bytes(record.total_bytes, record.payload_bytes) for record in cold),
    }


def _users(engine: Engine, records: list[Record]) -> dict[str, dict[str, int]]:
    """Bytes per tier by user and by share: who takes how much of the budgets."""
    found: dict[str, list[Record]] = {}
    for record in records:
        namespace = record.namespace
        found.setdefault(f"share {namespace.share}" if namespace.share else f"uid {namespace.owner_uid}", []).append(record)
    return {name: _tier_bytes(engine, theirs) for name, theirs in sorted(found.items())}


def _dirty_bytes(records: Iterable[Record]) -> int:
    """Bytes in memory that wait for the disk."""
    return sum(record.total_bytes for record in records if record.warm and record.cold in DIRTY)


def _pinned(record: Record) -> bool:
    return record.pinned_until_ns > time.time_ns()


def _progress(engine: Engine) -> Figures:
    return dict(engine.scrubber.progress()) if engine.scrubber is not None else {}
