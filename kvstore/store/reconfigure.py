"""Other options for a store that is open: which of them its parts take at once."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from warmkv.kvstore.store.options import StoreOptions

if TYPE_CHECKING:
    from warmkv.kvstore.store.engine import Engine

#: Read where they are used, each time. Budgets in bytes are `Eviction.set_budgets`; the rest
#: of the options is settled when a store is opened.
LIVE = (
    "anchors", "reservation_ttl_s", "lease_ttl_s", "busy_timeout_s", "high_watermark", "low_watermark", "evict_interval_s",
    "ttl_s", "uid_share", "namespace_floor_bytes", "max_tokens", "max_dirty_bytes", "shares",
    "scrub_interval_s", "scrub_bytes_per_s",
)  # fmt: skip


def reconfigure(engine: Engine, wanted: StoreOptions) -> None:
    """Take the `LIVE` options from ``wanted``, whatever else it says. Raises BudgetError, and then
    everything is as it was. An eviction service is neither started by this nor ended: an interval of
    0 is not taken, nor another instead of 0."""
    taken = {name: getattr(wanted, name) for name in LIVE}
    if not (taken["evict_interval_s"] and engine.options.evict_interval_s):
        del taken["evict_interval_s"]
    options = replace(engine.options, **taken).resolved()
    with engine.index.changed:
        engine.options = options
        for part in (engine.intake, engine.acquisition, engine.eviction):
            part._options = options
        engine.acquisition.flights._ttl_s = options.lease_ttl_s
        engine.warm._busy_timeout_s = options.busy_timeout_s
        engine.warm._floor_bytes = options.namespace_floor_bytes
        engine.warm.ledger.uid_share = options.uid_share
        if engine.writer is not None:
            engine.writer._floor_bytes = options.namespace_floor_bytes
            engine.writer._uid_share = options.uid_share
        engine.index.changed.notify_all()
    if engine.scrubber is not None:
        engine.scrubber.set_pace(options.scrub_interval_s, options.scrub_bytes_per_s)
