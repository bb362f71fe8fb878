"""evict, compact, backup, watch, reload: what changes how a store is kept."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from warmkv.kvstore.store import weights
from warmkv.kvstore.store.access import Access
from warmkv.kvstore.store.cold import ColdTier
from warmkv.kvstore.store.reports import arguments
from warmkv.schema.errors import RecordError, UnsupportedError

if TYPE_CHECKING:
    from warmkv.kvstore.store.engine import Engine

Given = dict[str, object]
Answer = dict[str, object]


def evict(engine: Engine, access: Access, given: Given) -> Answer:
    """Bring tiers down to ``to_bytes``, or to ``to_fraction`` of their budgets (neither: as the
    service would). With ``dry_run`` only tell what would go."""
    tier = arguments.one_of(given, "tier", "both", "warm", "cold")
    to_bytes, part = arguments.number(given, "to_bytes"), arguments.fraction(given, "to_fraction")
    if to_bytes is not None and part is not None:
        raise RecordError("to_bytes and to_fraction exclude each other")
    dry_run = arguments.flag(given, "dry_run")
    if part is None:
        return dict(engine.eviction.evict(tier, to_bytes, dry_run))
    budgets = {"warm": engine.warm.ledger.budget_bytes, "cold": engine.cold.budget_bytes if engine.cold else 0}
    done: Answer = {}
    for name in ("warm", "cold") if tier == "both" else (tier,):
        done.update(engine.eviction.evict(name, int(budgets[name] * part), dry_run))
    return done


def compact(engine: Engine, access: Access, given: Given) -> Answer:
    """Give the pages of what was dropped back to the file system."""
    return dict(_cold(engine).compact())


def backup(engine: Engine, access: Access, given: Given) -> Answer:
    """Copy the store into the new folder ``path``, as this process sees it."""
    target = Path(arguments.text(given, "path"))
    if not target.is_absolute():
        raise RecordError(f"argument path is {str(target)!r}, expected an absolute path")
    return dict(_cold(engine).backup(target))


def watch(engine: Engine, access: Access, given: Given) -> Answer:
    """Weight files whose change retires a namespace, see `weights.watch`."""
    return weights.watch(engine, access, given)


def reload(engine: Engine, access: Access, given: Given) -> Answer:
    """Read the settings again; the old ones stay in force where the new are not valid."""
    if engine.reload is None:
        raise UnsupportedError("this store was opened with its settings; there is nothing to read again")
    return dict(engine.reload())


def _cold(engine: Engine) -> ColdTier:
    if engine.cold is None:
        raise UnsupportedError("this store has no disk")
    return engine.cold
