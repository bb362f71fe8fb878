"""What a store may use: budgets, time limits and where it lies."""

from __future__ import annotations

import resource
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from warmkv.kvstore.store import cgroup
from warmkv.kvstore.store.clock import Clock
from warmkv.kvstore.store.faults import NO_FAULTS, Faults
from warmkv.schema.errors import BudgetError

MIB, GIB = 1 << 20, 1 << 30
COLD_DEFAULT_BYTES = 10 * GIB
#: Anchor states a namespace keeps in memory where a cache is embedded with budgets by count
#: instead of by bytes.
EMBEDDED_ANCHORS = 16
MAX_ANCHORS = 1 << 20
POLICIES = ("lru", "gdsf")
#: Token ids the index holds in memory, four bytes each.
DEFAULT_TOKENS = 1 << 27
#: Descriptors left to connections, LMDB and the rest of the process.
SPARE_DESCRIPTORS = 64


@dataclass(frozen=True, slots=True)
class Share:
    """Users who may read, and who may also write, the namespaces of a declared share. Who may
    write is trusted for the numbers."""

    readers: frozenset[int] = frozenset()
    writers: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class StoreOptions:
    """``path`` None keeps everything in memory. Budgets of None take the defaults (a quarter of
    the memory this process may use; the lesser of 10 GiB and a quarter of the free disk); 0
    switches that tier off. ``anchors`` is the number of states at named positions that a namespace
    may keep in memory, the least recently used giving way to new ones; 0 leaves that to the byte
    budget.

    ``policy`` ranks what is evicted. The eviction service, which runs every ``evict_interval_s`` (0:
    not at all), brings a tier that is fuller than ``high_watermark`` of its budget down to
    ``low_watermark``, and drops what was not used for ``ttl_s`` (0: no limit). ``uid_share`` is what
    one user may hold of each budget, ``namespace_floor_bytes`` what a namespace keeps of a tier as
    long as others have more. ``max_dirty_bytes`` (None: half of the warm budget) may wait for the
    disk. ``shares`` are declared namespaces of several users. Every ``scrub_interval_s`` (0: never)
    all records are read again and compared with their digests, ``scrub_bytes_per_s`` at most.
    ``allow_network_store`` permits a store on a network or shared folder."""

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
    policy: str = "gdsf"
    high_watermark: float = 0.95
    low_watermark: float = 0.85
    evict_interval_s: float = 0.0
    ttl_s: float = 0.0
    uid_share: float = 1.0
    namespace_floor_bytes: int = 0
    max_tokens: int = DEFAULT_TOKENS
    max_dirty_bytes: int | None = None
    shares: Mapping[str, Share] = field(default_factory=dict)
    scrub_interval_s: float = 0.0
    scrub_bytes_per_s: int = 64 * MIB
    allow_network_store: bool = False
    faults: Faults = NO_FAULTS
    clock: Clock = field(default_factory=Clock)

    def resolved(self) -> StoreOptions:
        """The same options with every default filled in. Raises BudgetError."""
        for name in ("warm_bytes", "cold_bytes", "warm_entries", "max_dirty_bytes", "max_tokens", "namespace_floor_bytes"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or value < 0):
                raise BudgetError(f"{name} is {value!r}, expected None or a number of at least 0")
        if not isinstance(self.anchors, int) or not 0 <= self.anchors <= MAX_ANCHORS:
            raise BudgetError(f"anchors is {self.anchors!r}, expected 0 (no limit of their own) to {MAX_ANCHORS}")
        for name in ("reservation_ttl_s", "lease_ttl_s", "busy_timeout_s", "durable_timeout_s", "usage_interval_s"):
            if not getattr(self, name) > 0:
                raise BudgetError(f"{name} is {getattr(self, name)!r}, expected more than 0 seconds")
        for name in ("evict_interval_s", "ttl_s", "scrub_interval_s"):
            if not getattr(self, name) >= 0:
                raise BudgetError(f"{name} is {getattr(self, name)!r}, expected 0 (never) or more seconds")
        if self.policy not in POLICIES:
            raise BudgetError(f"policy is {self.policy!r}, expected one of {', '.join(POLICIES)}")
        if not 0 < self.low_watermark <= self.high_watermark <= 1:
            raise BudgetError(f"watermarks are {self.low_watermark} and {self.high_watermark}, expected 0 < low <= high <= 1")
        if not 0 < self.uid_share <= 1:
            raise BudgetError(f"uid_share is {self.uid_share!r}, expected more than 0 and at most 1")
        if self.scrub_bytes_per_s < 1:
            raise BudgetError(f"scrub_bytes_per_s is {self.scrub_bytes_per_s!r}, expected at least 1")
        warm = default_warm_bytes() if self.warm_bytes is None else self.warm_bytes
        cold = 0 if self.path is None else self.cold_bytes
        if cold is None:
            assert self.path is not None
            cold = default_cold_bytes(self.path)
        soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        entries = max(16, (soft - SPARE_DESCRIPTORS) // 2) if self.warm_entries is None else self.warm_entries
        dirty = max(1, warm // 2) if self.max_dirty_bytes is None else self.max_dirty_bytes
        return replace(self, warm_bytes=warm, cold_bytes=cold, warm_entries=entries, max_dirty_bytes=dirty)


def default_warm_bytes() -> int:
    """A quarter of the machine's memory, or of the cgroup's limit where that is lower."""
    return cgroup.warm_budget(None, cgroup.limit_bytes(), cgroup.machine_bytes())


def default_cold_bytes(path: Path) -> int:
    """The lesser of 10 GiB and a quarter of the free space where ``path`` will lie."""
    existing = path
    while not existing.exists():
        existing = existing.parent
    return min(COLD_DEFAULT_BYTES, shutil.disk_usage(existing).free // 4)
