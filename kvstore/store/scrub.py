"""Scrubbing: everything that is stored is read again now and then, slowly.

A disk forgets without a word, and memory flips a bit; a record nobody asks for would be found bad
on the day it is needed. What is bad goes: a miss from then on, and the next save stores it anew.
"""

from __future__ import annotations

import fcntl
import logging
import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass

from warmkv.kvstore import memfd
from warmkv.kvstore.store.clock import NS
from warmkv.kvstore.store.cold import ColdTier
from warmkv.kvstore.store.index import Cold, Index, Record
from warmkv.kvstore.store.options import StoreOptions
from warmkv.kvstore.store.promotion import Promotion
from warmkv.kvstore.store.warm import WarmTier
from warmkv.schema import segment as container
from warmkv.schema.errors import DigestError, FormatError, StoreError

log = logging.getLogger(__name__)

#: Slots of readers that died are freed this often.
HOUSEKEEPING_S = 300.0
#: Ids that are listed under one hold of the index lock.
SLICE = 1024
_LAST = b"scrubbed_ns"


@dataclass(slots=True)
class Pass:
    """What one reading of everything has come to."""

    checked: int = 0
    checked_bytes: int = 0
    bad: int = 0
    #: Could not be read just now: a disk that was asleep is not a bad record.
    skipped: int = 0


class Scrubber:
    """Reads at most ``scrub_bytes_per_s`` on average, record by record. ``wait`` waits so many
    seconds, or until it is told to stop, and says whether it was.

    **Threading:** every method from any thread, the index lock free."""

    def __init__(
        self, index: Index, warm: WarmTier, cold: ColdTier, promotion: Promotion, options: StoreOptions, *,
        wait: Callable[[float], bool] | None = None,
    ) -> None:  # fmt: skip
        self.passes = 0
        self.found_bad = 0
        self._index = index
        self._warm = warm
        self._cold = cold
        self._promotion = promotion
        self._interval_s = options.scrub_interval_s
        self._bytes_per_s = options.scrub_bytes_per_s
        self._clock = options.clock
        self._stopped = threading.Event()
        self._wait = wait or self._stopped.wait
        self._woken = threading.Condition()
        self._wanted = False
        self._current: Pass | None = None
        self._thread: threading.Thread | None = None
        self._last_ns = self._noted()

    def start(self) -> None:
        """Scrub every ``interval_s``; with 0 only when asked to.

        A store that was never scrubbed begins to count now, and so does one whose note lies in the
        future: that is written down, or a machine that is switched off every night would never come
        to the end of an interval."""
        if not self._interval_s:
            return
        if not 0 < self._last_ns <= self._clock.wall_ns():
            self._note(self._clock.wall_ns())
        self._begin()

    def set_pace(self, interval_s: float, bytes_per_s: int) -> None:
        """Other settings from now on, a pass under way included."""
        with self._woken:
            self._interval_s, self._bytes_per_s = interval_s, bytes_per_s
            self._woken.notify_all()
        self.start()

    def stop(self) -> None:
        """End the thread, between two records. Idempotent."""
        with self._woken:
            self._stopped.set()
            self._woken.notify_all()
            thread = self._thread
        if thread is not None:
            thread.join()

    def scrub_now(self) -> None:
        """Begin a pass at once and at full speed, after one that is under way; does not wait for it."""
        with self._woken:
            self._wanted = True
            self._woken.notify_all()
        self._begin()

    def progress(self) -> dict[str, object]:
        """How far the pass under way has come, when the last one ended and what was found in all."""
        with self._woken:
            current, wanted = self._current, self._wanted
        return {
            "running": current is not None or wanted,
            **asdict(current or Pass()),
            "records": len(self._index.records),
            "passes": self.passes,
            "found_bad": self.found_bad,
            "completed_s": self._last_ns // NS,
            "interval_s": self._interval_s,
        }

    def problem(self) -> str:
        """For health: what is wrong with the scrub; empty when nothing."""
        if self._interval_s and not self._stopped.is_set() and not (self._thread and self._thread.is_alive()):
            return "the thread that reads everything again has ended"
        return ""

    def run_once(self, *, paced: bool = True) -> Pass:
        """One pass in this thread. Ends early, and does not count, once `stop` was called."""
        done, whole = Pass(), False
        with self._woken:
            self._current, self._wanted = done, False
        try:
            for record in self._all():
                began = self._clock.monotonic()
                read = self._check(record, done)
                rest_s = read / self._bytes_per_s - (self._clock.monotonic() - began) if paced else 0.0
                if self._wait(max(0.0, rest_s)):
                    return done
            log.info("scrubbed %d records, %d bytes: %d bad, %d not read", *asdict(done).values())
            self._note(self._clock.wall_ns())
            whole = True
        finally:
            with self._woken:
                self._current = None
                self.passes += whole
                self._woken.notify_all()
        return done

    # -- one record ----------------------------------------------------------------------

    def _all(self) -> Iterator[Record]:
        """Every record of either tier that is there when its turn comes."""
        with self._index.changed:
            ids = sorted(self._index.records)
        for at in range(0, len(ids), SLICE):
            with self._index.changed:
                records = [self._index.records.get(id_) for id_ in ids[at : at + SLICE]]
            yield from (record for record in records if record is not None)

    def _check(self, record: Record, done: Pass) -> int:
        """Read what there is of a record; bytes read."""
        read = 0
        try:
            read += self._check_warm(record)
            with self._promotion.kept(record) as stored:
                if stored:
                    self._cold.verify(record.id)
                    read += record.total_bytes
        except FormatError as exc:
            if not record.gone and record.cold == Cold.STORED:
                self._promotion.quarantine(record, f"found by the scrub: {exc}")
                done.bad += 1
                self.found_bad += 1
        except (StoreError, OSError) as exc:
            log.warning("record %s was not scrubbed: %s", record.id.hex(), exc)
            done.skipped += 1
        else:
            done.checked += 1
            done.checked_bytes += read
        return read

    def _check_warm(self, record: Record) -> int:
        """A warm copy that is bad goes; the record too where no other copy is. Bytes read."""
        with self._index.changed:
            if not record.warm:
                return 0
            fd = fcntl.fcntl(record.fd, fcntl.F_DUPFD_CLOEXEC, 0)
        try:
            reason = _wrong(fd, record)
        finally:
            os.close(fd)
        if reason:
            self.found_bad += 1
            self._drop_warm(record, reason)
        return record.total_bytes

    def _drop_warm(self, record: Record, reason: str) -> None:
        with self._index.changed:
            stored = record.cold == Cold.STORED
            if stored and record.warm:
                self._warm.evict(record)
                self._index.changed.notify_all()
        if stored:
            self._warm.reap()
            log.error("the copy in memory of record %s was bad and is dropped: %s", record.id.hex(), reason)
        else:
            self._promotion.quarantine(record, f"found by the scrub in memory: {reason}")

    # -- the thread ----------------------------------------------------------------------

    def _begin(self) -> None:
        with self._woken:
            if self._stopped.is_set() or (self._thread is not None and self._thread.is_alive()):
                return
            self._thread = threading.Thread(target=self._run, name="warmkv-scrub", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        while not self._stopped.is_set():
            with self._woken:
                if not (self._wanted or self._stopped.is_set()):  # one wait: another pace is another time to wait
                    self._woken.wait(min(HOUSEKEEPING_S, self._due_s()))
                wanted = self._wanted
            if self._stopped.is_set():
                return
            try:
                self._cold.reader_check()
                if wanted or self._due_s() <= 0:
                    self.run_once(paced=not wanted)
            except Exception:  # noqa: BLE001 - a pass that failed is not the last one
                log.exception("the scrub failed, to be tried again")
                self._wait(1.0)

    def _due_s(self) -> float:
        """Seconds to the next pass. A wall clock that was set back does not put it off for longer
        than an interval."""
        if not self._interval_s:
            return HOUSEKEEPING_S
        since_s = max(0.0, (self._clock.wall_ns() - self._last_ns) / NS)
        return max(0.0, self._interval_s - since_s)

    def _note(self, now_ns: int) -> None:
        self._last_ns = now_ns
        try:
            self._cold.note(_LAST, now_ns.to_bytes(8, "little"))
        except StoreError as exc:
            log.warning("the time of the scrub could not be noted on disk: %s", exc)

    def _noted(self) -> int:
        """When a pass ended last, in this life of the store or another; 0 where nothing tells."""
        try:
            return int.from_bytes(self._cold.noted(_LAST)[:8], "little")
        except (FormatError, StoreError):
            return 0


def _wrong(fd: int, record: Record) -> str:
    """What is wrong with a container in memory; empty when nothing."""
    try:
        view = memoryview(memfd.map_private(fd, record.total_bytes))
        head = container.decode_head(view, record.total_bytes)
        if head.header.id != record.id:
            raise FormatError(f"it is record {head.header.id.hex()}")
        if container.payload_digests(view[head.payload_offset :]) != head.header.digests:
            raise DigestError("the payload does not match the digests in its head")
    except FormatError as exc:
        return str(exc)
    return ""
