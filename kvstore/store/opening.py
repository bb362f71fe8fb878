"""Opening the cold tier of a store, or doing without where there can be none."""

from __future__ import annotations

import logging

from warmkv.kvstore.store.cold import ColdTier
from warmkv.kvstore.store.options import StoreOptions
from warmkv.schema.errors import ColdUnavailable

log = logging.getLogger(__name__)


def open_cold(options: StoreOptions) -> tuple[ColdTier | None, str]:
    """The cold tier of resolved options; without one, why there is none though one was wanted.

    Raises StoreInUse, StoreTooNew, StoreError."""
    if options.path is None or not options.cold_bytes:
        return None, ""
    try:
        cold = ColdTier.open(
            options.path, options.cold_bytes, options.faults,
            allow_network=options.allow_network_store, wall_ns=options.clock.wall_ns,
        )  # fmt: skip
    except ColdUnavailable as exc:
        log.error("nothing is kept on disk, only in memory: %s", exc)
        return None, f"nothing is kept on disk: {exc}"
    return cold, ""
