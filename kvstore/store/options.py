"""What a store may use: budgets, time limits and where it lies."""

from __future__ import annotations

import os
import resource
import shutil
from dataclasses import dataclass, replace
from pathlib import Path

from warmkv.schema.errors import BudgetError

MIB, GIB = 1 << 20, 1 << 30
COLD_DEFAULT_BYTES = 10 * GIB
#: Anchor states a namespace keeps in memory where a cache is embedded with budgets by count
#: instead of by bytes.
EMBEDDED_ANCHORS = 16
MAX_ANCHORS = 1 << 20
#: Descriptors left to connections, LMDB and the rest of the process.
SPARE_DESCRIPTORS = 64
_CGROUP_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


@dataclass(frozen=True, slots=True)
class StoreOptions:
    """``path`` None keeps everything in memory. Budgets of None take the defaults (a quarter of
    the memory this process may use; the lesser of 10 GiB and a quarter of the free disk); 0
    switches that tier off. ``anchors`` is the number of states at named positions that a namespace
    may keep in memory, the least recently used giving way to new ones; 0 leaves that to the byte
    budget."""

    path: Path | None = None
    warm_bytes: int | None = None
    cold_bytes: int | None = None
    warm_entries: int | None = None
    anchors: int = 0
    reservation_ttl_s: float = 60.0
    lease_ttl_s: float = 300.0
    busy_timeout_s: float = 5.0
    durable_timeout_s: float = 300.0
    usage_interval_s: float = 5.0

    def resolved(self) -> StoreOptions:
        """The same options with every default filled in. Raises BudgetError."""
        for name in ("warm_bytes", "cold_bytes", "warm_entries"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or value < 0):
                raise BudgetError(f"{name} is {value!r}, expected None or a number of at least 0")
        if not isinstance(self.anchors, int) or not 0 <= self.anchors <= MAX_ANCHORS:
            raise BudgetError(f"anchors is {self.anchors!r}, expected 0 (no limit of their own) to {MAX_ANCHORS}")
        for name in ("reservation_ttl_s", "lease_ttl_s", "busy_timeout_s", "durable_timeout_s", "usage_interval_s"):
            if not getattr(self, name) > 0:
                raise BudgetError(f"{name} is {getattr(self, name)!r}, expected more than 0 seconds")
        warm = default_warm_bytes() if self.warm_bytes is None else self.warm_bytes
        cold = 0 if self.path is None else self.cold_bytes
        if cold is None:
            assert self.path is not None
            cold = default_cold_bytes(self.path)
        soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        entries = max(16, (soft - SPARE_DESCRIPTORS) // 2) if self.warm_entries is None else self.warm_entries
        return replace(self, warm_bytes=warm, cold_bytes=cold, warm_entries=entries)


def default_warm_bytes() -> int:
    """A quarter of the machine's memory, or of the cgroup's limit where that is lower."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for path in _CGROUP_LIMITS:
        try:
            text = Path(path).read_text().strip()
        except OSError:
            continue
        if text.isdigit():
            total = min(total, int(text))
    return total // 4


def default_cold_bytes(path: Path) -> int:
    """The lesser of 10 GiB and a quarter of the free space where ``path`` will lie."""
    existing = path
    while not existing.exists():
        existing = existing.parent
    return min(COLD_DEFAULT_BYTES, shutil.disk_usage(existing).free // 4)
