"""How much of an address space and of a disk LMDB's map may take.

The map is as large as the file may ever become, and is taken whole when it is opened: of a disk that
is nearly full, or of a process with a limit, less of it than the budget asks for.
"""

from __future__ import annotations

import logging
import resource
import shutil
from pathlib import Path

import lmdb

from warmkv.kvstore.store.folder import READERS, Folder, allocate
from warmkv.schema import lmdb_records
from warmkv.schema.errors import ColdUnavailable

log = logging.getLogger(__name__)

PAGE_BYTES = 4096
#: LMDB needs free pages to delete and to find runs for chunks: the map is never fuller.
FILL = 0.8
MAP_SLACK_BYTES = 4 << 20
#: A chunk takes 1,025 pages in a row. In a small store small records leave few such holes between
#: them; where there is none the file may grow by this much more.
RUNS_BYTES = 128 << 20
MIN_MAP_BYTES = 1 << 20
MAX_READERS = 1024
#: A slot is a cache line; the table's head takes less than a page.
READER_TABLE_BYTES = 64 * MAX_READERS + PAGE_BYTES


def open_map(folder: Folder, budget_bytes: int) -> tuple[lmdb.Environment, int]:
    """The environment in ``folder``, with as much of the map as disk and process allow, and how much
    of the budget that has room for. Raises lmdb.Error, OSError, ColdUnavailable."""
    # LMDB writes its reader slots through a mapping: on a full disk the first touch of a page
    # that has no place there yet would be a SIGBUS.
    allocate(folder.path / READERS, READER_TABLE_BYTES)
    wanted_bytes, least_bytes = _map_bytes(folder.data, budget_bytes), _least_map_bytes(folder.data)
    size = max(least_bytes, min(wanted_bytes, _whole_pages(_address_bytes() // 2)))
    while True:
        try:
            env = _open(folder.path, size)
        except lmdb.MemoryError as exc:
            if size <= least_bytes:
                raise ColdUnavailable(f"no address space for a map of {size} bytes of {folder.data}: {exc}") from exc
            size = max(least_bytes, _whole_pages(size // 2))
            continue
        if size < wanted_bytes:
            log.warning("this process may map %d bytes of %s instead of %d", size, folder.data, wanted_bytes)
        return env, int(size * FILL)


def _open(path: Path, map_bytes: int) -> lmdb.Environment:
    return lmdb.open(str(path), map_size=map_bytes, max_dbs=len(lmdb_records.TABLES), max_readers=MAX_READERS, mode=0o600)


def _whole_pages(size: int) -> int:
    return size // PAGE_BYTES * PAGE_BYTES


def _address_bytes() -> int:
    soft = resource.getrlimit(resource.RLIMIT_AS)[0]
    return 1 << 46 if soft == resource.RLIM_INFINITY else int(soft)


def _least_map_bytes(data: Path) -> int:
    """Always some more than the file: deletions need pages."""
    existing = data.stat().st_size if data.exists() else 0
    return _whole_pages(max(MIN_MAP_BYTES, existing + MAP_SLACK_BYTES))


def _map_bytes(data: Path, budget_bytes: int) -> int:
    """Budget / 0.8 and room for runs of pages, as far as the disk has it beside a reserve."""
    existing = data.stat().st_size if data.exists() else 0
    free = shutil.disk_usage(data.parent).free
    reserve = min(256 << 20, free // 10)
    wanted = min(int(budget_bytes / FILL) + RUNS_BYTES, existing + free - reserve)
    return max(_least_map_bytes(data), _whole_pages(wanted))
