"""A copy of the environment without its free pages: in place of it, or somewhere else.

LMDB's file never shrinks by itself. A copy is whole on the disk before it gets its name, so that a
crash leaves the store, or the copy, and never half of either.
"""

from __future__ import annotations

import logging
import os
import shutil
from pathlib import Path

import lmdb

from warmkv.kvstore.store import folder as folders
from warmkv.kvstore.store.environment import Environment
from warmkv.kvstore.store.pages import check_pages
from warmkv.schema import lmdb_records
from warmkv.schema.errors import FormatError, StoreError

log = logging.getLogger(__name__)


def compact(env: Environment) -> dict[str, int]:
    """Put a copy without free pages in the place of the environment; file bytes before and after.

    Reads go on while it is copied, changes wait; both wait for the moment in which the files are
    exchanged. Raises StoreError, and then the store is what it was.

    **Durability:** what was acknowledged is in both files, and on the disk in the one that has the
    name, at every point."""
    folder, copy = env.folder, env.folder.path / folders.COPY
    with env.writing:
        if problem := env.problem():
            raise StoreError(problem)
        before = folder.data.stat().st_size
        _write_copy(env, copy)
        try:
            env.faults.reached("compact.copied")
            env.replace(lambda: _exchange(env, copy))
        except OSError as exc:
            copy.unlink(missing_ok=True)
            raise StoreError(f"store {folder.path} was not compacted: {exc}") from exc
        after = folder.data.stat().st_size
    env.faults.reached("compact.done")
    log.info("store %s compacted from %d to %d bytes", folder.path, before, after)
    return {"before_bytes": before, "after_bytes": after, "freed_bytes": before - after}


def _exchange(env: Environment, copy: Path) -> None:
    os.rename(copy, env.folder.data)
    env.folder.note_opened()
    try:
        env.faults.reached("compact.renamed")
        env.folder.sync()
    except OSError as exc:
        # Either file holds all that was acknowledged so far; nothing more is until it is known
        # which of them a power loss would leave (`Folder.problem`).
        env.folder.unsynced()
        log.error("the folder %s cannot be synchronised: %s", env.folder.path, exc)


def backup(env: Environment, target: Path) -> dict[str, object]:
    """Copy the store as it is now into the directory ``target`` (0700, its file 0600), which must not
    exist; `open_store` opens it. What is written meanwhile is not in it. The copy is opened and
    looked through before it gets its name. Raises StoreError."""
    target = target.absolute()
    if target.exists() or target.is_symlink():
        raise StoreError(f"{target} exists already; a backup goes to a new directory")
    partial = target.with_name(f".{target.name}.partial")
    try:
        # What a backup that did not end left behind, under a name only we give.
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(mode=0o700)
        _write_copy(env, partial / folders.DATA)
        entries = _look_through(partial)
        folders.sync(partial)
        env.faults.reached("backup.copied")
        if target.exists():
            raise StoreError(f"{target} was made meanwhile")
        os.rename(partial, target)
        folders.sync(target.parent)
    except (OSError, lmdb.Error, FormatError) as exc:
        shutil.rmtree(partial, ignore_errors=True)
        raise StoreError(f"no backup was made at {target}: {exc}") from exc
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    size = (target / folders.DATA).stat().st_size
    return {"path": str(target), "bytes": size, "records": entries[b"segments"] + entries[b"states"]}


def _write_copy(env: Environment, path: Path) -> None:
    """A copy of the environment at ``path``, on the disk. Raises StoreError; then there is none."""
    needed, free = env.live_bytes(), shutil.disk_usage(path.parent).free
    if needed > free:
        raise StoreError(f"a copy of {env.folder.path} may need {needed} bytes, the disk of {path} has {free}")
    path.unlink(missing_ok=True)
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            env.copy(fd)
            os.fsync(fd)
        finally:
            os.close(fd)
    except BaseException as exc:
        path.unlink(missing_ok=True)
        if isinstance(exc, OSError):
            raise StoreError(f"a copy of {env.folder.path} could not be written to {path}: {exc}") from exc
        raise


def _look_through(path: Path) -> dict[bytes, int]:
    """Open a copy as a stranger would; how many values each table has. Raises FormatError, lmdb.Error."""
    check_pages(path / folders.DATA)
    with lmdb.open(str(path), readonly=True, lock=False, max_dbs=len(lmdb_records.TABLES)) as env:
        tables = {name: env.open_db(name, create=False) for name in lmdb_records.TABLES}
        with env.begin() as txn:
            lmdb_records.decode_format(bytes(txn.get(b"format", db=tables[b"meta"]) or b""))
            return {name: int(txn.stat(db)["entries"]) for name, db in tables.items()}
