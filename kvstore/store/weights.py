"""Weight files registered with a namespace: other content retires what was computed with the old.

A model's identity holds the digest of its parameters in memory, so state of old weights is never
handed to new ones. But it would fill the store until eviction finds it. So the files a model was
loaded from are looked at every so often: when the content of one is another, everything in the
namespace is dropped, and the entry with it. A file that is gone may be on a disk that is not
mounted: nothing is dropped until it is back.

Whoever registers must be able to read the file, then and at every look, else it might tell of files of
others. And an entry retires only what that user may write: one for the namespace of somebody else does nothing.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from warmkv.kvstore.store import atomic, weight_entries
from warmkv.kvstore.store.access import Access
from warmkv.kvstore.store.index import Index, Namespace
from warmkv.kvstore.store.removal import Removal
from warmkv.kvstore.store.weight_entries import Entry, Files
from warmkv.kvstore.store.weight_file import Signature, WeightFile, check_path, first_look, read, signature
from warmkv.schema.errors import ColdFull, RecordError
from warmkv.schema.records import NamespaceKey

if TYPE_CHECKING:
    from warmkv.kvstore.store.engine import Engine

log = logging.getLogger(__name__)

MAX_FILES = 1024
MAX_NAMESPACES = 1024
MAX_NAMESPACES_OF_A_UID = 256
#: Entries are written out and looked at as a whole: what one user, and all, may add to them. A file
#: counts as its path and some more.
MAX_BYTES_OF_A_UID = 4 << 20
MAX_BYTES = 32 << 20
FILE_BYTES = 256
ACTIONS = ("ls", "add", "rm")


@dataclass(frozen=True, slots=True)
class Retired:
    """A namespace that was dropped, and the file whose content is another."""

    namespace: NamespaceKey
    path: str
    records: int


class Weights:
    """The registry, kept in ``directory`` or, None, in memory. ``may_write`` says whether a user may
    drop a namespace.

    **Threading:** any thread; files are read and written without a lock that others wait for."""

    def __init__(
        self, index: Index, removal: Removal, directory: Path | None, may_write: Callable[[int, Namespace], bool]
    ) -> None:
        self.retired = 0
        #: Called after each registration, by the thread that made it: there is something to read.
        self.on_registered: Callable[[], None] = _nothing
        self._index = index
        self._removal = removal
        self._may_write = may_write
        self._path = directory / weight_entries.FILE_NAME if directory is not None else None
        self._lock = threading.Lock()
        self._entries = weight_entries.load(self._path) if self._path is not None else {}
        self._saved = True
        self._saving = threading.Lock()
        self._looking = threading.Lock()

    # -- registering ------------------------------------------------------------------------

    def register(self, uid: int, key: NamespaceKey, paths: Iterable[object]) -> int:
        """Watch these files too, as they are now; how many are watched for the namespace. Their
        content is read by the next `look`. Raises RecordError."""
        looked = [first_look(path, uid) for path in _at_most(paths)]
        with self._lock:
            entry = self._entries.get((uid, key), {})
            # What is watched already stays as it was known: it may have changed since.
            merged = {**{item.path: item for item in looked}, **entry}
            if merged != entry:
                self._require_room((uid, key), merged)
                self._keep((uid, key), merged)
        self._save()
        self.on_registered()
        return len(merged)

    def forget(self, uid: int, key: NamespaceKey, paths: Iterable[object] | None = None) -> int:
        """Watch these files of the namespace no longer, None: none of them; how many there were."""
        named = None if paths is None else {check_path(path) for path in _at_most(paths)}
        with self._lock:
            entry = self._entries.get((uid, key), {})
            left = {path: item for path, item in entry.items() if named is not None and path not in named}
            self._keep((uid, key), left)
        self._save()
        return len(entry) - len(left)

    def registered(self, uid: int) -> dict[NamespaceKey, tuple[WeightFile, ...]]:
        """What this user has watched."""
        with self._lock:
            return {key: tuple(files.values()) for (owner, key), files in self._entries.items() if owner == uid}

    def folders(self) -> dict[Path, frozenset[str]]:
        """Directories of all watched files, and the names watched in them."""
        found: dict[Path, set[str]] = {}
        with self._lock:
            paths = [Path(path) for files in self._entries.values() for path in files]
        for path in paths:
            found.setdefault(path.parent, set()).add(path.name)
        return {folder: frozenset(names) for folder, names in found.items()}

    # -- looking ----------------------------------------------------------------------------

    def look(self, keep_on: Callable[[], bool] = lambda: True) -> list[Retired]:
        """Compare every file with what it was, read those that seem to have changed, and retire
        their namespaces. Given up, at no harm, once ``keep_on`` says no."""
        retired = []
        known: dict[tuple[str, Signature], WeightFile] = {}
        with self._looking:
            with self._lock:
                entries = {entry: list(files.values()) for entry, files in self._entries.items()}
            known.update({(item.path, item.signature): item for files in entries.values() for item in files if item.digest})
            for entry, files in entries.items():
                changed = self._first_changed(entry, files, known, keep_on)
                if changed is not None:
                    retired.append(self._retire(entry, changed))
            self._save()
        return retired

    def _first_changed(
        self, entry: Entry, files: list[WeightFile], known: dict[tuple[str, Signature], WeightFile], keep_on: Callable[[], bool]
    ) -> str | None:
        """The first file of an entry whose content is not proven to be what it was; ``known`` is
        what was read already, of any entry."""
        for before in files:
            now = signature(before.path, entry[0])
            if now is None or not keep_on():
                continue  # gone, or no time: it is looked at again
            if now == before.signature and before.digest:
                continue
            found = known.get((before.path, now)) or read(before.path, entry[0], keep_on)
            if found is None:
                continue
            known[found.path, found.signature] = found
            same = found.digest == before.digest if before.digest else found.signature == before.signature
            if not same:
                return found.path
            self._learn(entry, found)
        return None

    def _learn(self, entry: Entry, found: WeightFile) -> None:
        with self._lock:
            files = self._entries.get(entry, {})
            if found.path in files:
                self._keep(entry, {**files, found.path: found})

    def _retire(self, entry: Entry, path: str) -> Retired:
        uid, key = entry
        with self._index.changed:
            namespace = self._index.namespaces.get(key)
            permitted = namespace is not None and self._may_write(uid, namespace)
        records = 0
        try:
            if permitted:
                records = self._removal.clear([key]).records
        except ColdFull as exc:  # gone from the index, and deleted with the next write
            log.warning("namespace %s: %s", key.hex()[:8], exc)
        with self._lock:
            self._keep(entry, {})
        self.retired += 1
        log.warning("weight file %r has other content: namespace %s retired, %d records dropped", path, key.hex()[:8], records)
        return Retired(key, path, records)

    # -- keeping ----------------------------------------------------------------------------

    def _require_room(self, entry: Entry, files: Files) -> None:
        """Raises RecordError where these files would be too many; the lock is held."""
        if len(files) > MAX_FILES:
            raise RecordError(f"{len(files)} weight files for a namespace, at most {MAX_FILES} are watched")
        others = {key: item for key, item in self._entries.items() if key != entry}
        of_uid = [item for (uid, _), item in others.items() if uid == entry[0]]
        if len(of_uid) >= MAX_NAMESPACES_OF_A_UID or len(others) >= MAX_NAMESPACES:
            raise RecordError(
                f"weight files of {MAX_NAMESPACES_OF_A_UID} namespaces a user and {MAX_NAMESPACES} are watched at most"
            )
        if _bytes([*of_uid, files]) > MAX_BYTES_OF_A_UID or _bytes([*others.values(), files]) > MAX_BYTES:
            raise RecordError(f"paths of weight files take more than {MAX_BYTES_OF_A_UID} bytes a user, or {MAX_BYTES} in all")

    def _keep(self, entry: Entry, files: Files) -> None:
        """Enter these files instead of the former ones; the lock is held."""
        if files:
            self._entries[entry] = files
        else:
            self._entries.pop(entry, None)
        self._saved = False

    def _save(self) -> None:
        """Write the entries out if they changed. What a full disk refuses is tried again by the next
        `look`."""
        with self._saving:
            with self._lock:
                if self._saved or self._path is None:
                    return
                data = weight_entries.encoded(self._entries)
                self._saved = True
            try:
                atomic.write(self._path, data)
            except OSError as exc:
                self._saved = False
                log.warning("watched weight files could not be written to %s: %s", self._path, exc.strerror)


def watch(engine: Engine, access: Access, given: Mapping[str, object]) -> dict[str, object]:
    """Report verb: ``action`` add or rm with ``namespace`` (hex, or the first digits of one that the
    user may write) and ``paths``; ls lists this user's own. Raises RecordError."""
    action = given.get("action", "ls")
    if action not in ACTIONS:
        raise RecordError(f"action is {action!r:.40}, expected one of {', '.join(ACTIONS)}")
    if action == "ls":
        rows = [_row(key, files) for key, files in engine.weights.registered(access.uid).items()]
        return {"total": len(rows), "rows": rows}
    key = _key(engine, access, given.get("namespace"))
    paths = given.get("paths")
    if paths is not None and not isinstance(paths, list):
        raise RecordError("paths is no list")
    if action == "rm":
        return {"namespace": key.hex(), "removed": engine.weights.forget(access.uid, key, paths)}
    if not paths:
        raise RecordError("paths names no weight file")
    return {"namespace": key.hex(), "files": engine.weights.register(access.uid, key, paths)}


def _key(engine: Engine, access: Access, wanted: object) -> NamespaceKey:
    """The one namespace these digits can mean. Written out whole it need not be stored yet."""
    digits = wanted.lower() if isinstance(wanted, str) else ""
    if not 4 <= len(digits) <= 2 * weight_entries.KEY_BYTES or set(digits) - set("0123456789abcdef"):
        raise RecordError(f"namespace is {wanted!r:.40}, expected 4 to {2 * weight_entries.KEY_BYTES} hex digits")
    if len(digits) == 2 * weight_entries.KEY_BYTES:
        return NamespaceKey(bytes.fromhex(digits))
    with engine.index.changed:
        known = {key for key, item in engine.index.namespaces.items() if access.writes(item)}
    found = [key for key in {*known, *engine.weights.registered(access.uid)} if key.hex().startswith(digits)]
    if len(found) != 1:
        raise RecordError(f"namespace {digits} is the beginning of {len(found)} namespaces, expected of 1")
    return found[0]


def _row(key: NamespaceKey, files: Iterable[WeightFile]) -> dict[str, object]:
    shown = [{"path": item.path, "bytes": item.signature.size, "digest": item.digest} for item in files]
    return {"namespace": key.hex(), "files": shown}


def _bytes(entries: Iterable[Files]) -> int:
    return sum(len(os.fsencode(path)) + FILE_BYTES for files in entries for path in files)


def _nothing() -> None:
    pass


def _at_most(paths: Iterable[object]) -> list[object]:
    listed = list(paths)
    if len(listed) > MAX_FILES:
        raise RecordError(f"{len(listed)} weight files given, at most {MAX_FILES} are watched for a namespace")
    return listed
