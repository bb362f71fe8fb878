"""The service manager's descriptor store: warm records that outlive this process, crash included.

The manager keeps a duplicate of each sealed memfd until it is told to let go, so what it keeps is
memory: bounded in bytes, and what was evicted counts as warm until the manager was told. It takes one
name a message and may be slow to read, so all of it happens on a thread of its own that makes what
is kept follow what is warm. Listeners note ids only; by the time an id is looked at, the record may
have come and gone several times.
"""

from __future__ import annotations

import array
import fcntl
import logging
import os
import socket
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from warmkv.daemon import logs
from warmkv.daemon.activation import Inherited
from warmkv.daemon.adoption import adopt, describe, namespace_name, record_name, record_of
from warmkv.kvstore.store.index import Index, Namespace, Record
from warmkv.kvstore.store.ledger import Ledger
from warmkv.schema.errors import WarmKVError
from warmkv.schema.records import RecordId

if TYPE_CHECKING:
    from warmkv.kvstore.store.engine import Engine

log = logging.getLogger("warmkv.daemon.fdstore")
#: How long a manager that does not read is waited for before looking whether to end.
SEND_TIMEOUT_S = 1.0
PAUSE_AFTER_ERROR_S = 5.0
#: How long the end waits for what the manager is still to be told, and how often it looks.
STOP_S, STOP_LOOK_S = 3.0, 0.01


@dataclass(slots=True)
class _Kept:
    """A descriptor the manager has: which file, and how much memory it holds."""

    inode: int
    total_bytes: int


class DescriptorStore:
    """Keeps the warm tier of ``index`` at the manager behind ``address``, up to ``max_bytes`` and
    ``max_descriptors``, the oldest first.

    **Threading:** `admitted` and `evicted` under the index lock; a thread of its own from `start`
    to `stop`, which takes the index lock for moments and never while it talks to the manager."""

    def __init__(self, address: str, index: Index, ledger: Ledger, max_bytes: int, max_descriptors: int) -> None:
        self.kept_bytes = 0
        self._ledger = ledger
        self._address = address
        self._index = index
        self._max_bytes = max_bytes
        self._max_descriptors = max_descriptors
        self._kept: dict[str, _Kept] = {}
        self._lock = threading.Lock()
        #: Records to look at, oldest first, and those for which there was no room.
        self._noted: dict[RecordId, None] = {}
        self._no_room: dict[RecordId, None] = {}
        self._busy = False
        #: The manager could not be told the last time.
        self._silent = False
        #: The record that may be on its way to the manager, and evicted bytes it keeps; index lock.
        self._handing: RecordId | None = None
        self._parting: dict[str, int] = {}
        self._wake = threading.Event()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="warmkv-fdstore", daemon=True)

    @property
    def kept(self) -> list[str]:
        """Names of what the manager has."""
        return list(self._kept)

    # -- the warm tier tells -----------------------------------------------------------------

    def admitted(self, record: Record) -> None:
        self._note(record.id)

    def evicted(self, record: Record) -> None:
        name = record_name(record.id)
        if (name in self._kept or self._handing == record.id) and not self._ended.is_set():
            held_bytes = self._ledger.paged(record.total_bytes)
            self._parting[name] = self._parting.get(name, 0) + held_bytes
            self._ledger.parting_bytes += held_bytes
        self._note(record.id)

    def _note(self, record: RecordId) -> None:
        with self._lock:
            self._noted[record] = None
        self._wake.set()

    # -- before the service starts -------------------------------------------------------------

    def adopt(self, engine: Engine, passed: Iterable[Inherited]) -> int:
        """Take back what the manager kept; what cannot be proven, or is more than may be kept, is let
        go of there as well. Owns all descriptors of ``passed``. The number of records that are warm
        again. Call it before `start`."""
        passed = list(passed)
        try:
            done = adopt(engine, passed)
            for item in done.good:
                self._enter(item.name, item.fd)
            for item, reason in done.bad:
                log.warning("descriptor %d (%r) of the service manager is not taken back: %s", item.fd, item.name[:64], reason)
                self._let_go(item.name)
        finally:
            for item in passed:
                os.close(item.fd)
        self._forget_unused_namespaces()
        for name in reversed(list(self._kept)):
            if self.kept_bytes > self._max_bytes or len(self._kept) > self._max_descriptors:
                self._let_go(name)
        return done.records

    def _let_go(self, name: str) -> None:
        """Have the manager forget everything of that name."""
        kept = self._kept.pop(name, None)
        if kept is not None:
            self.kept_bytes -= kept.total_bytes
        if name:
            self._send_now(f"FDSTOREREMOVE=1\nFDNAME={name}")

    def _enter(self, name: str, fd: int) -> None:
        found = os.fstat(fd)
        self._kept[name] = _Kept(found.st_ino, found.st_size)
        self.kept_bytes += found.st_size

    # -- the thread ---------------------------------------------------------------------------

    def start(self) -> None:
        for name in self._kept:  # what came back may have been evicted since
            if (record := record_of(name)) is not None:
                self._note(record)
        self._note_warm()
        self._thread.start()

    def _note_warm(self) -> None:
        with self._index.changed:
            warm = [record.id for record in self._index.warm_order]
        for record in warm:
            self._note(record)

    def stop(self) -> None:
        """End the thread; what the manager has it keeps, for the next process. A manager that reads is told
        of what went first: the next process would take it back. Idempotent."""
        deadline = time.monotonic() + STOP_S
        while self._thread.is_alive() and not self._silent and not self.settled() and time.monotonic() < deadline:
            self._ended.wait(STOP_LOOK_S)
        self._ended.set()
        self._part()
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join()

    def settled(self) -> bool:
        """Whether all that was noted has been told."""
        with self._lock:
            return not self._noted and not self._busy

    def problem(self) -> str:
        """For `Health`: "" or what is wrong."""
        return "" if self._thread.is_alive() or self._ended.is_set() else "the thread that keeps descriptors is dead"

    def _run(self) -> None:
        while not self._ended.is_set():
            self._wake.wait()
            self._wake.clear()
            try:
                self._follow()
                self._silent = False
                continue
            except (OSError, WarmKVError) as exc:
                if isinstance(exc, ConnectionRefusedError | FileNotFoundError):
                    self._forget_all()
                if not self._silent and not self._ended.is_set():
                    log.warning("the service manager cannot be handed descriptors: %s; trying again", exc)
                self._silent = True
            except Exception as exc:  # noqa: BLE001 - the store works without this
                logs.defect(log, "keeping descriptors", exc)
            self._ended.wait(PAUSE_AFTER_ERROR_S)
            self._wake.set()

    def _follow(self) -> None:
        """Look at everything noted until nothing is or the service ends."""
        room = False
        while not self._ended.is_set():
            with self._lock:
                if not self._noted and room:  # what did not fit before may fit now
                    self._noted, self._no_room, room = self._no_room, {}, False
                record = next(iter(self._noted), None)
                if record is None:
                    return
                del self._noted[record]
                self._busy = True
            try:
                room |= self._reconcile(record)
            except BaseException:
                self._note(record)
                raise
            finally:
                self._busy = False

    def _reconcile(self, record: RecordId) -> bool:
        """Make what is kept of one record what is warm of it; whether that made room."""
        name = record_name(record)
        fd, namespace = self._duplicate(record)
        try:
            kept = self._kept.get(name)
            gone = kept is not None and (fd < 0 or kept.inode != os.fstat(fd).st_ino)
            if gone:
                self._remove(name)
            if name not in self._kept:
                self._part(name)
            self._no_room.pop(record, None)
            if namespace is not None and not self._keep(name, fd, namespace):
                self._no_room[record] = None
            return gone
        finally:
            self._handing = None
            if fd >= 0:
                os.close(fd)

    def _duplicate(self, record: RecordId) -> tuple[int, Namespace | None]:
        """A descriptor of our own of a warm record, -1 of any other: the record's may be closed, and
        its number be another file's, as soon as the lock is free."""
        with self._index.changed:
            found = self._index.records.get(record)
            if found is None or not found.warm:
                return -1, None
            self._handing = record
            return fcntl.fcntl(found.fd, fcntl.F_DUPFD_CLOEXEC, 0), found.namespace

    def _keep(self, name: str, fd: int, namespace: Namespace) -> bool:
        """Hand over what is missing of a record and of what says whose it is; whether there was room."""
        described = namespace_name(namespace.key)
        identity = describe(namespace) if described not in self._kept else -1
        try:
            wanted = {item_name: item for item_name, item in ((described, identity), (name, fd)) if item_name not in self._kept}
            total_bytes = sum(os.fstat(item).st_size for item in wanted.values())
            if len(self._kept) + len(wanted) > self._max_descriptors or self.kept_bytes + total_bytes > self._max_bytes:
                return False
            for item_name, item in wanted.items():
                self._send(f"FDSTORE=1\nFDPOLL=0\nFDNAME={item_name}", item)
                self._enter(item_name, item)
            return True
        finally:
            if identity >= 0:
                os.close(identity)

    def _remove(self, name: str) -> None:
        self._send(f"FDSTOREREMOVE=1\nFDNAME={name}")
        self.kept_bytes -= self._kept.pop(name).total_bytes
        self._forget_unused_namespaces()

    def _part(self, name: str | None = None) -> None:
        """The manager keeps nothing of that name (None: of any) any more: what was evicted is free."""
        with self._index.changed:
            for part in [name] if name is not None else list(self._parting):
                self._ledger.parting_bytes -= self._parting.pop(part, 0)
            self._index.changed.notify_all()

    def _forget_all(self) -> None:
        """There is no manager any more, so it keeps nothing; should one come back, everything is new to it."""
        self._kept.clear()
        self.kept_bytes = 0
        self._part()
        self._note_warm()

    def _forget_unused_namespaces(self) -> None:
        """Let the descriptors of namespaces go that nothing in the index belongs to any more."""
        with self._index.changed:
            known = {namespace_name(key) for key in self._index.namespaces}
        for name in [name for name in self._kept if name.startswith("warmkv-ns-") and name not in known]:
            self._let_go(name)

    # -- messages ------------------------------------------------------------------------------

    def _send(self, text: str, fd: int = -1) -> None:
        """Send one message, however long the manager takes to read. Raises OSError, which it is too
        when the service is to end meanwhile."""
        control = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [fd]))] if fd >= 0 else []
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
            sock.settimeout(SEND_TIMEOUT_S)
            while True:
                try:
                    sock.sendmsg([text.encode()], control, socket.MSG_NOSIGNAL, self._address)
                    return
                except TimeoutError:
                    if self._ended.is_set():
                        raise InterruptedError("ended before the service manager read") from None

    def _send_now(self, text: str) -> None:
        """Send one message if that takes no long wait; what is missed is a descriptor kept too long."""
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
                sock.settimeout(SEND_TIMEOUT_S)
                sock.sendto(text.encode(), self._address)
        except OSError as exc:
            log.warning("the service manager could not be told %s: %s", text.replace("\n", " "), exc)
