"""Write-behind: one thread that commits what the warm tier accepted, parents before children.

It also makes room in the cold tier and carries usage there in batches. A record that cannot
be written stays in the warm tier only, with the reason; whoever waits for it is told.
"""

from __future__ import annotations

import fcntl
import logging
import os
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from functools import partial

from warmkv.kvstore.store.cold import TRANSACTION_BYTES, ColdTier, WriteItem, stored_bytes
from warmkv.kvstore.store.faults import NO_FAULTS, Faults
from warmkv.kvstore.store.index import Cold, Index, Record
from warmkv.kvstore.store.policy import Candidate, plan_above_floors
from warmkv.kvstore.store.warm import WarmTier
from warmkv.schema.errors import Busy, ClosedError, ColdFull, WarmKVError
from warmkv.schema.lmdb_records import NamespaceRecord, Usage
from warmkv.schema.records import RecordId

log = logging.getLogger(__name__)
_ORPHAN = "what it builds on is not on disk: "
#: A batch waits so long for records that cannot give way before somebody was told they are stored.
TELL_S = 1.0
#: Times more is let go for a batch where the room there is lies in pieces that are too small.
MORE_ROOM = 3


class WriteBehind:
    """**Threading:** `enqueue`, `wait_durable` and `discard` want the index lock held."""

    def __init__(
        self, index: Index, warm: WarmTier, cold: ColdTier, usage_interval_s: float, *,
        wall_ns: Callable[[], int] = time.time_ns, uid_share: float = 1.0, floor_bytes: int = 0, faults: Faults = NO_FAULTS,
    ) -> None:  # fmt: skip
        self.evictions = 0
        self.failures = 0
        self.cold_bytes = 0
        self.user_bytes: Counter[int] = Counter()
        #: A budget below that with which the tier was opened, set while it serves.
        self.lowered_bytes: int | None = None
        self._uid_share = uid_share
        self._floor_bytes = floor_bytes
        self._faults = faults
        for record in index.cold_order:
            self._count(record)
        cold.keep_room_for(self.cold_bytes)
        self._index = index
        self._warm = warm
        self._cold = cold
        self._usage_interval_s = usage_interval_s
        self._wall_ns = wall_ns
        self._queue: deque[Record] = deque()
        self._deletions: list[RecordId] = []
        #: What a full or failing disk refused to delete; tried again with every round.
        self._undeleted: list[RecordId] = []
        self._usage_wanted = 0
        self._usage_done = 0
        self._usage_error = ""
        #: What `_fail` has to say, said once the lock is free: a log handler has a lock of its own,
        #: and a lease that the garbage collector ends while another thread logs wants both.
        self._complaints: list[str] = []
        self._busy = False
        self._rounds = 0
        self._stopping = False
        self._ended = False
        self._thread = threading.Thread(target=self._run, name="warmkv-writer", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def problem(self) -> str:
        """A health check: whether the thread is there; nothing starts it anew."""
        dead = self._thread.ident is not None and not self._thread.is_alive() and not self._stopping
        return "the thread that writes to the disk died" if dead else ""

    def stop(self) -> None:
        """Write what is queued, once more what failed, carry usage over, end the thread. The
        lock must not be held."""
        with self._index.changed:
            for record in [item for item in self._index.warm_order if item.cold_error]:
                self.enqueue(record)
            self._stopping = True
            self._index.changed.notify_all()
        if self._thread.is_alive():
            self._thread.join()
        self._faults.reached("stop.flushed")

    @property
    def limit_bytes(self) -> int:
        """What may be stored now."""
        budget_bytes = self._cold.budget_bytes
        return budget_bytes if self.lowered_bytes is None else min(self.lowered_bytes, budget_bytes)

    def enqueue(self, record: Record) -> None:
        """Queue the record and whatever it builds on that is in the warm tier only."""
        if self._stopping:
            return
        for link in self._index.chain_of(record):
            if link.cold == Cold.ABSENT and link.warm:
                link.cold_error = ""
                self._index.set_cold(link, Cold.QUEUED)
                self._queue.append(link)
        self._index.changed.notify_all()

    def discard(self, record: Record) -> None:
        """Take a record off the disk. One being written now is deleted once it was; what the disk
        refused to delete before is tried again."""
        if self._undeleted:
            self._deletions, self._undeleted = self._undeleted + self._deletions, []
        if record.cold == Cold.STORED:
            self._count(record, -1)
            self._deletions.append(record.id)
        self._index.set_cold(record, Cold.ABSENT)
        self._index.changed.notify_all()

    def trim(self, excess_bytes: int, *, dry_run: bool = False) -> list[Record]:
        """Let the worst go from the disk until ``excess_bytes`` are free, or all that can, lock held;
        what went, or would. The bytes are gone after the thread's next round, see `settle`."""
        victims = self._plan(excess_bytes, None, partly=True) or []
        if not dry_run:
            self.evict_all(victims)
        return victims

    def evict_all(self, victims: Sequence[Record]) -> None:
        """Let the victims of a plan go; lock held."""
        self._deletions += self._let_go(victims)
        self._index.changed.notify_all()

    def keeps(self, record: Record) -> bool:
        """Whether a stored record must stay: nobody was told yet that it is stored, or without this copy
        it would be gone, not while somebody wants it, nor from under children that leave the disk only
        and stay in the warm tier."""
        last = not record.warm and (record.warm_children > 0 or self._warm.leased(record))
        used = record.promotion is not None or record.awaited > 0
        return last or used or record.pinned_until_ns > self._wall_ns()

    def carry_usage(self, timeout_s: float) -> None:
        """Commit anchors and usage now instead of with the next batch. Raises Busy, ColdFull,
        ClosedError."""
        self._usage_wanted += 1
        wanted = self._usage_wanted
        self._index.changed.notify_all()
        if not self._index.changed.wait_for(lambda: self._usage_done >= wanted or self._ended, timeout_s):
            raise Busy(f"anchors were not committed within {timeout_s} s")
        if self._usage_done < wanted:
            raise ClosedError("the store was closed before the anchors were committed")
        if self._usage_error:
            raise ColdFull(self._usage_error)

    def wait_durable(self, record: Record, timeout_s: float) -> None:
        """Until the record and all it builds on are committed. Raises ColdFull, Busy, ClosedError."""

        def settled() -> bool:
            return record.cold in (Cold.STORED, Cold.ABSENT) or record.gone or self._ended

        if not self._index.changed.wait_for(settled, timeout_s):
            raise Busy(f"not committed within {timeout_s} s; the rows are held in memory")
        if record.cold != Cold.STORED or record.gone:
            if self._stopping:
                raise ClosedError("the store was closed before the save was committed")
            raise ColdFull(record.cold_error or "the record was dropped before it was committed")

    def flush(self, timeout_s: float | None) -> bool:
        """Wait until nothing is queued, written or to be deleted. The lock must not be held."""
        with self._index.changed:
            return self._index.changed.wait_for(self._idle, timeout_s)

    def settle(self, timeout_s: float | None = None) -> bool:
        """Wait until what was discarded or evicted before is deleted, or was refused, however much is
        saved meanwhile. The lock must not be held."""
        with self._index.changed:
            # One round may be under way, and write what is then to be deleted.
            wanted = self._rounds + 2
            return self._index.changed.wait_for(lambda: self._rounds >= wanted or self._idle(), timeout_s)

    def _idle(self) -> bool:
        return not (self._queue or self._busy or self._deletions) or self._ended

    def refused(self, ids: Iterable[RecordId]) -> bool:
        """Whether one of these records could not be deleted from disk yet; lock held."""
        return not set(ids).isdisjoint([*self._undeleted, *self._deletions])

    # -- the thread ----------------------------------------------------------------------

    def _run(self) -> None:
        # The first round waits for nothing: the budget may have shrunk since the last start.
        next_usage = time.monotonic()
        stopping = False
        try:
            while not stopping:
                with self._index.changed:
                    self._index.changed.wait_for(self._has_work, max(0.0, next_usage - time.monotonic()))
                    stopping = self._stopping and not self._queue and not self._deletions
                    usage_wanted = self._usage_wanted
                self._round()
                if stopping or usage_wanted > self._usage_done or time.monotonic() >= next_usage:
                    error = self._carry_usage()
                    next_usage = time.monotonic() + self._usage_interval_s
                    with self._index.changed:
                        self._usage_done, self._usage_error = usage_wanted, error
                        self._index.changed.notify_all()
        finally:
            with self._index.changed:
                self._ended = True
                self._index.changed.notify_all()

    def _round(self) -> None:
        """Delete what was dropped or must give way, then write one batch."""
        with self._index.changed:
            batch = self._take()
            doomed, self._undeleted, self._deletions = self._undeleted + self._deletions, [], []
            self._busy = True  # the lock may be given up while room is made
            doomed += self._make_room(batch)
            self._busy = bool(batch or doomed)
        try:
            if self._delete(doomed, batch) and batch:
                self._write(batch)
        finally:
            self._warm.reap()
            with self._index.changed:
                self._busy = False
                self._rounds += 1
                complaints, self._complaints = self._complaints, []
                self._index.changed.notify_all()
            for complaint in complaints:
                log.warning("%s", complaint)

    def _delete(self, doomed: list[RecordId], batch: list[Record]) -> bool:
        """Whether all of ``doomed`` is off the disk. If not, the batch fails: it has no room,
        and a record of it may bear the id of one that is still to be deleted."""
        try:
            self._cold.delete(doomed)
        except Exception as exc:  # noqa: BLE001 - the writer must live
            self.failures += 1
            log.error("%d records could not be deleted from disk, to be tried again: %s", len(doomed), exc)
            with self._index.changed:
                self._undeleted = doomed
                for record in batch:
                    self._fail(record, f"room could not be made on disk: {exc}")
            return False
        return True

    def _has_work(self) -> bool:
        return bool(self._queue or self._deletions or self._stopping or self._usage_wanted > self._usage_done)

    def _take(self) -> list[Record]:
        """Queued records up to one transaction's worth, marked as being written; lock held."""
        batch: list[Record] = []
        size = 0
        while self._queue and (not batch or size + self._queue[0].total_bytes <= TRANSACTION_BYTES):
            record = self._queue.popleft()
            if record.gone or record.cold != Cold.QUEUED or not record.warm:
                continue
            # What failed and was queued anew stands behind what builds on it.
            links, above = [record], record.parent
            while above is not None and above.cold == Cold.QUEUED:
                links.append(above)
                above = above.parent
            if above is not None and above.cold not in (Cold.STORED, Cold.WRITING):
                reason = above.cold_error.removeprefix(_ORPHAN)
                for link in links:
                    self._fail(link, f"{_ORPHAN}{reason}")
                continue
            for link in reversed(links):
                self._index.set_cold(link, Cold.WRITING)
                batch.append(link)
                size += link.total_bytes
        return batch

    def _make_room(self, batch: list[Record]) -> list[RecordId]:
        """Plan and enter cold evictions for a batch; lock held. Batch records that cannot fit
        fail and leave the batch."""
        doomed: list[RecordId] = []
        deadline = time.monotonic() + TELL_S
        while True:
            victims = self._victims(batch)
            if victims:
                doomed += self._let_go(victims)
            elif victims is not None or not batch:
                return doomed
            elif self._told_of_some(deadline - time.monotonic()):
                continue
            elif len(batch) > 1:
                for record in reversed(batch[1:]):
                    self._index.set_cold(record, Cold.QUEUED)
                    self._queue.appendleft(record)
                del batch[1:]
            else:
                alone = batch.pop()
                self._fail(alone, self._no_room_for(alone))

    def _told_of_some(self, timeout_s: float) -> bool:
        """Whether a stored record may give way now whose committing somebody waited for; the lock is
        given up meanwhile."""
        awaited = [record for record in self._index.cold_order if record.awaited]
        if not awaited or timeout_s <= 0:
            return False
        return self._index.changed.wait_for(lambda: not all(record.awaited for record in awaited), timeout_s)

    def _victims(self, batch: Sequence[Record]) -> list[Record] | None:
        """What must go next so that a batch fits, of those first who have more than their share;
        nothing once it does, None where it cannot."""
        wanted: Counter[int] = Counter()
        for record in batch:
            wanted[record.namespace.owner_uid] += stored_bytes(record.total_bytes, record.payload_bytes)
        for uid, more_bytes in wanted.items() if self._uid_share < 1 else ():
            excess = self.user_bytes[uid] + more_bytes - int(self.limit_bytes * self._uid_share)
            if excess > 0:
                return self._plan(excess, uid)
        return self._plan(self.cold_bytes + wanted.total() - self.limit_bytes, None)

    def _no_room_for(self, record: Record) -> str:
        wanted, share = stored_bytes(record.total_bytes, record.payload_bytes), int(self.limit_bytes * self._uid_share)
        held = self.user_bytes[record.namespace.owner_uid]
        if held + wanted > share and self._uid_share < 1:
            return f"{wanted} bytes do not fit beside {held} of the {share} bytes one user may hold of the cold budget"
        return f"{wanted} bytes do not fit the cold budget of {self.limit_bytes} bytes"

    def _plan(self, excess_bytes: int, uid: int | None, *, partly: bool = False) -> list[Record] | None:
        spare: dict[Hashable, int] | None = None
        if self._floor_bytes:
            spare = {item: item.cold_bytes - self._floor_bytes for item in self._index.namespaces.values()}
        return plan_above_floors(partial(self._candidates, uid), excess_bytes, spare, partial=partly)

    def _let_go(self, victims: Sequence[Record]) -> list[RecordId]:
        for record in victims:
            self._index.cold_order.age(record)
            self._count(record, -1)
            self._index.set_cold(record, Cold.ABSENT)
            self.evictions += 1
            if not record.warm:
                self._index.drop(record)
            self._faults.reached("evict.cold")
        return [record.id for record in victims]

    def _count(self, record: Record, step: int = 1) -> None:
        total_bytes = step * stored_bytes(record.total_bytes, record.payload_bytes)
        self.cold_bytes += total_bytes
        self.user_bytes[record.namespace.owner_uid] += total_bytes

    def _candidates(self, uid: int | None) -> Iterator[Candidate[Record]]:
        """What may go, worst first; with ``uid``, of that user."""
        for record in self._index.cold_order.worst_first():
            keep = (uid is not None and record.namespace.owner_uid != uid) or self.keeps(record)
            children = record.cold_children if record.warm else len(record.children)
            size = stored_bytes(record.total_bytes, record.payload_bytes)
            yield Candidate(record, record.parent, size, children, keep, record.namespace)

    def _write(self, batch: list[Record]) -> None:
        items: list[WriteItem] = []
        error = ""
        try:
            with self._index.changed:
                batch = [record for record in batch if record.warm and not record.gone]
                for record in batch:
                    items.append(self._item(record))
                counter = self._index.counter
            if items:
                self._store(items, counter)
        except WarmKVError as exc:
            error = str(exc)
        except Exception as exc:  # noqa: BLE001 - the writer must live; the save is told
            log.exception("write-behind failed")
            error = f"{type(exc).__name__}: {exc}"
        finally:
            for item in items:
                os.close(item.fd)
        with self._index.changed:
            for record in batch:
                if error:
                    self._fail(record, error)
                elif record.gone or record.cold != Cold.WRITING:
                    self._deletions.append(record.id)
                else:
                    self._index.set_cold(record, Cold.STORED)
                    self._count(record)
            if not error:
                self._restore_order(batch)
            self._index.changed.notify_all()

    def _store(self, items: Sequence[WriteItem], counter: int) -> None:
        """Commit a batch. Chunks need free pages in a row: where those that are free lie scattered more
        is let go, the worst first. Raises ColdFull."""
        wanted = sum(item.total_bytes for item in items)
        for number in range(MORE_ROOM):
            try:
                self._cold.write(items, counter)
                return
            except ColdFull as exc:
                if not self._cold.scattered(exc, wanted):
                    raise
                with self._index.changed:
                    doomed = self._let_go(self._plan(wanted << number, None, partly=True) or [])
                if not doomed or not self._delete(doomed, []):
                    raise
                log.info("%d records give way, free pages lie scattered: %s", len(doomed), exc)
        self._cold.write(items, counter)

    def _restore_order(self, batch: list[Record]) -> None:
        """Newly stored records entered the cold order last; what they build on goes behind them."""
        for record in batch:
            if record.cold != Cold.STORED:
                continue
            for link in reversed(self._index.chain_of(record)):
                if link in self._index.cold_order:
                    self._index.cold_order.use(link)

    def _item(self, record: Record) -> WriteItem:
        namespace = record.namespace
        about = NamespaceRecord(namespace.owner_uid, namespace.share, namespace.identity, namespace.created_ns)
        fd = fcntl.fcntl(record.fd, fcntl.F_DUPFD_CLOEXEC, 0)
        return WriteItem(
            record.id, record.is_state, namespace.key, about, fd, record.total_bytes, _usage(record),
            tuple(record.anchors.values()),
        )  # fmt: skip

    def _fail(self, record: Record, reason: str) -> None:
        if record.gone:
            return
        self.failures += 1
        record.cold_error = reason
        self._index.set_cold(record, Cold.ABSENT)
        self._complaints.append(f"{record.id.hex()} stays in memory only: {reason}")
        if not record.warm:
            self._index.drop(record)

    def _carry_usage(self) -> str:
        """Write usage and anchors of what was touched; the error, if it failed."""
        with self._index.changed:
            stored = [record for record in self._index.touched if record.cold == Cold.STORED]
            rows = [(record.id, _usage(record), tuple(record.anchors.values())) for record in stored]
            self._index.touched.clear()
            counter = self._index.counter
        try:
            if rows:
                self._cold.write_usage(rows, counter)
        except Exception as exc:  # noqa: BLE001 - the writer must live
            self.failures += 1
            log.error("usage could not be written, to be tried again: %s", exc)
            with self._index.changed:
                self._index.touched.update(record for record in stored if not record.gone)
            return str(exc)
        return ""


def _usage(record: Record) -> Usage:
    return Usage(record.last_used, record.hits, record.pinned_until_ns, record.prefill_us, record.used_at_s)
