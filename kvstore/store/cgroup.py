"""The memory control group this process is charged to: its limits, its use, and who shares it.

Shared memory is charged to the group of whoever touches it first and cannot be dropped like file
pages, only swapped: a cache that does not know its limit is killed at it. Both versions of the
kernel's interface are read. A limit of any group above counts as well, as far as it can be seen.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

#: Limits of this size or more mean that there is none.
UNLIMITED_BYTES = 1 << 60
#: Of the memory this process may use: what the warm tier takes by itself, and at most when told to.
AUTO_FRACTION = 1 / 4
MOST_FRACTION = 3 / 4
#: Files of a group that bound what it may use; above the second one version 2 slows a group down.
_LIMITS = {1: ("memory.limit_in_bytes",), 2: ("memory.max", "memory.high")}
_USED = {1: "memory.usage_in_bytes", 2: "memory.current"}
#: Names in memory.stat of shared memory and of all pages that belong to files, shared ones among
#: them; version 1 counts those of groups below under other names.
_SHMEM = ("total_shmem", "shmem")
_FILE = ("total_cache", "cache", "file")
_OCTAL = re.compile(r"\\([0-7]{3})")


@dataclass(frozen=True, slots=True)
class Usage:
    """Bytes charged to a group: all of them, shared memory, and pages of files other than that.
    None where the kernel does not say."""

    used_bytes: int | None
    shmem_bytes: int | None
    file_bytes: int | None


@dataclass(frozen=True, slots=True)
class MemoryCgroup:
    """One group: ``directory`` below ``top``, the highest of its hierarchy that is mounted here."""

    version: int
    directory: Path
    top: Path

    def limit_bytes(self) -> int | None:
        """The tightest limit of this group and those above; None where there is none."""
        found = [value for folder in self._upward() for name in _LIMITS[self.version] if (value := _number(folder / name))]
        # Groups above a container's own are not mounted in it, but version 1 tells their limit.
        found += [value for value in (_stat(self.directory).get("hierarchical_memory_limit"),) if value]
        bounds = [value for value in found if value < UNLIMITED_BYTES]
        return min(bounds) if bounds else None

    def usage(self) -> Usage:
        stat = _stat(self.directory)
        shmem = next((stat[name] for name in _SHMEM if name in stat), None)
        files = next((stat[name] for name in _FILE if name in stat), None)
        if files is not None and shmem is not None:
            files = max(0, files - shmem)
        return Usage(_number(self.directory / _USED[self.version]), shmem, files)

    def pressure_file(self) -> Path | None:
        """Where the kernel tells this group's memory pressure; version 1 does not."""
        path = self.directory / "memory.pressure"
        return path if self.version == 2 and path.exists() else None

    def _upward(self) -> Iterator[Path]:
        folder = self.directory
        yield folder
        while folder != self.top and folder != folder.parent:
            folder = folder.parent
            yield folder


def find(pid: int | None = None, proc: Path = Path("/proc")) -> MemoryCgroup | None:
    """The memory control group of a process, None: this one. None where there are no groups, or
    this one's is not mounted here."""
    paths = _paths(proc / ("self" if pid is None else str(pid)) / "cgroup")
    # Where version 1 has the memory controller, the unified hierarchy beside it has not.
    for version in (1, 2):
        if version not in paths:
            continue
        mounts = list(_mounts(proc / "self" / "mountinfo", version))
        for root, mount in mounts:
            found = _below(paths[version], root)
            if found is not None and (mount / found).is_dir():
                return MemoryCgroup(version, mount / found, mount)
        # A container may see its own group at the top, under a path that only its host knows.
        return MemoryCgroup(version, mounts[0][1], mounts[0][1]) if pid is None and mounts else None
    return None


def limit_bytes() -> int | None:
    """What this process's group may use, None: as much as there is."""
    group = find()
    return group.limit_bytes() if group is not None else None


def machine_bytes() -> int:
    """The memory of the machine."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def warm_budget(configured: int | None, limit: int | None, machine: int) -> int:
    """Bytes the warm tier may use: without a configured number a quarter of what this process may
    use; a configured one as long as it leaves the process a quarter of its limit."""
    if configured is None:
        return int(min(machine, limit or machine) * AUTO_FRACTION)
    return configured if limit is None else min(configured, int(limit * MOST_FRACTION))


def memory() -> dict[str, int | None]:
    """Limit and use of this process's group, for reports; empty without a group."""
    group = find()
    if group is None:
        return {}
    usage = group.usage()
    return {
        "limit_bytes": group.limit_bytes(),
        "used_bytes": usage.used_bytes,
        "shmem_bytes": usage.shmem_bytes,
        "file_bytes": usage.file_bytes,
    }


def same_memory_cgroup(pid: int, proc: Path = Path("/proc")) -> bool:
    """Whether memory that process ``pid`` touches first is charged to where this process's is.

    True where no groups exist. False where that cannot be told: the process is gone, or hidden in
    another namespace (then its number is 0)."""
    ours = _paths(proc / "self" / "cgroup")
    if not ours:
        return True
    theirs = _paths(proc / str(pid) / "cgroup") if pid > 0 else {}
    version = 1 if 1 in ours else 2
    return version in theirs and ours[version] == theirs[version]


def _paths(file: Path) -> dict[int, str]:
    """Path of the memory group by version of the hierarchy, as /proc/PID/cgroup tells it."""
    found = {}
    for line in _text(file).splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if "memory" in controllers.split(","):
            found[1] = path
        elif number == "0" and not controllers:
            found[2] = path
    return found


def _mounts(file: Path, version: int) -> Iterator[tuple[str, Path]]:
    """Which group is mounted where: root within the hierarchy and mount point."""
    for line in _text(file).splitlines():
        fields, separator, after = line.partition(" - ")
        kind = after.split()
        place = fields.split()
        if not separator or len(kind) < 3 or len(place) < 5:
            continue
        memory = kind[0] == "cgroup" and "memory" in kind[2].split(",")
        if memory if version == 1 else kind[0] == "cgroup2":
            yield _unescaped(place[3]), Path(_unescaped(place[4]))


def _below(path: str, root: str) -> str | None:
    """``path`` as seen from a mount of ``root``; None where it lies outside of it."""
    parts, above = [part for part in path.split("/") if part], [part for part in root.split("/") if part]
    if ".." in parts or parts[: len(above)] != above:
        return None
    return "/".join(parts[len(above) :])


def _unescaped(field: str) -> str:
    return _OCTAL.sub(lambda found: chr(int(found[1], 8)), field)


def _number(path: Path) -> int | None:
    text = _text(path).strip()
    return int(text) if text.isdigit() else None


def _stat(directory: Path) -> dict[str, int]:
    pairs = (line.split() for line in _text(directory / "memory.stat").splitlines())
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2 and pair[1].isdigit()}


def _text(path: Path) -> str:
    try:
        return path.read_text("utf-8", "surrogateescape")
    except OSError:
        return ""
