"""The prefix cache a runtime embeds: one model's prompts, budgeted by snapshots and anchors as well as bytes.

It is the store that the daemon serves, opened in this process, with another way of saying what may be held.
A snapshot is what one can resume from: of a model with states each state that is held, with the rows before
it; of one with rows alone, which can be cut anywhere, each chain of rows that no other goes on from.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from pathlib import Path
from types import TracebackType
from typing import TypeVar

from warmkv.kvstore.needs import Provides
from warmkv.kvstore.restored import Restored
from warmkv.kvstore.results import Forgotten, Match, Saved
from warmkv.kvstore.rows import Array
from warmkv.kvstore.store.engine import Engine
from warmkv.kvstore.store.index import DIRTY, Cold, Namespace, Record
from warmkv.kvstore.store.options import COLD_DEFAULT_BYTES, EMBEDDED_ANCHORS, MIB, StoreOptions
from warmkv.kvstore.store.store import Store
from warmkv.kvstore.verbs import Ack, At, Records
from warmkv.schema import ids
from warmkv.schema.errors import BudgetError, Busy, ColdFull, DescriptorLimit, OfferAgain, TooLarge
from warmkv.schema.identity import Identity
from warmkv.schema.records import CLEAN, Anchor, AnchorKind, Attachment, Lineage, TokensLike

EMBEDDED_ENTRIES = 32
EMBEDDED_WARM_BYTES = 256 * MIB
#: What others who hold memory, or budgets, do to one call.
_NO_ROOM = (Busy, DescriptorLimit, OfferAgain, TooLarge)
T = TypeVar("T", bound="PrefixCache")


class PrefixCache:
    """State of ``identity`` after prompts, in memory and, with a ``path``, on disk too.

    ``entries`` snapshots and ``warm_bytes`` are held in memory, the least recently used giving way; of a
    model with states ``anchors`` of them at named positions (0: no limit of their own), among which those
    go first. Names themselves cost nothing. On disk ``cold_bytes`` are held. What is restored and not yet
    closed, or not yet on the disk it is meant for, stays over any of these.

    **Threading:** any thread. Not usable after a fork. Raises StoreInUse, StoreTooNew, BudgetError,
    StoreError when it is made."""

    def __init__(
        self, identity: Identity, path: str | os.PathLike[str] | None = None, *, entries: int = EMBEDDED_ENTRIES,
        warm_bytes: int = EMBEDDED_WARM_BYTES, anchors: int = EMBEDDED_ANCHORS, cold_bytes: int = COLD_DEFAULT_BYTES,
    ) -> None:  # fmt: skip
        if not isinstance(entries, int) or entries < 0:
            raise BudgetError(f"entries is {entries!r}, expected a number of at least 0")
        where = None if path is None else Path(path)
        options = StoreOptions(where, warm_bytes, cold_bytes, anchors=anchors, policy="lru")
        self.identity = identity
        self.entries = entries
        self.store = Store(Engine.open(options))
        self._engine = self.store.engine
        self._key = ids.namespace_key(os.getuid(), "", ids.fingerprint(identity))

    # -- asking ------------------------------------------------------------------------------

    def find_longest_prefix(
        self, tokens: TokensLike, *, attachments: Iterable[Attachment] = (), lineage: Lineage = CLEAN
    ) -> Restored:
        """State of the longest prefix that is held, in either tier, and shorter than ``tokens``: one token is
        always left to feed. To be closed; a miss, also for want of memory, is false and has a reason."""
        return self._find(tokens, attachments, lineage, "longest")

    def find_deepest_anchor(
        self, tokens: TokensLike, *, attachments: Iterable[Attachment] = (), lineage: Lineage = CLEAN
    ) -> Restored:
        """The same at the deepest named position, see `Restored.anchor`; where none can be resumed from, what
        `find_longest_prefix` finds."""
        return self._find(tokens, attachments, lineage, "anchor")

    def _find(self, tokens: TokensLike, attachments: Iterable[Attachment], lineage: Lineage, at: At) -> Restored:
        if len(tokens) < 2:
            return Restored(Match(self.identity, reason="a prompt of one token has no shorter prefix", lineage=lineage))
        try:
            found = self.store.restore(self.identity, tokens, attachments=attachments, lineage=lineage, at=at)
        except _NO_ROOM as exc:
            return Restored(Match(self.identity, reason=str(exc), lineage=lineage))
        if found.promoted_bytes:
            self._keep()
        return found

    # -- keeping -----------------------------------------------------------------------------

    def insert(
        self, tokens: TokensLike, records: Records, *, attachments: Iterable[Attachment] = (), lineage: Lineage = CLEAN,
        anchors: Iterable[Anchor] = (), logits: Array | None = None, prefill_s: float = 0.0, ack: Ack | None = None,
    ) -> Saved:  # fmt: skip
        """Keep the state after ``tokens``; what of it is held already is not copied again.

        Returns once it is on disk where there is one (``ack`` "memory" does not wait, and then budgets by
        number are kept at the next call). Without room it is given up, with the reason; a disk that is full or too
        slow is told as one, and the state is in memory. Raises RecordError and UnsupportedError for records that do
        not fit."""
        if not self.entries and self._engine.writer is None:
            return Saved(False, reason="the cache is switched off: no entries, and no path")
        attachments = tuple(attachments)
        wanted: Ack = ack or ("memory" if self._engine.writer is None else "disk")
        try:
            saved = self.store.save(
                self.identity, tokens, records, ack=wanted, anchors=anchors, attachments=attachments, lineage=lineage,
                logits=logits, prefill_s=prefill_s,
            )  # fmt: skip
        except ColdFull as exc:
            self._keep()
            return Saved(True, reason=f"held in memory only: {exc}")
        except _NO_ROOM as exc:
            self._keep()
            # Also who waited for the disk in vain: then the state is held.
            held = isinstance(exc, Busy) and self._holds(tokens, attachments, lineage)
            return Saved(held, reason=str(exc))
        self._keep(saved)
        return saved

    def insert_anchor(
        self, tokens: TokensLike, records: Records, depth: int, kind: AnchorKind, semantic_hash: int = 0, *,
        shift_offset: int = 0, attachments: Iterable[Attachment] = (), lineage: Lineage = CLEAN, ack: Ack | None = None,
    ) -> Saved:  # fmt: skip
        """`insert` at a named position. With neither ``depth`` nor ``kind`` it is not one, and just inserted."""
        named = depth > 0 or kind != AnchorKind.UNSPECIFIED
        anchors = [Anchor(len(tokens), kind, depth, semantic_hash, shift_offset)] if named else []
        return self.insert(tokens, records, attachments=attachments, lineage=lineage, anchors=anchors, ack=ack)

    def _holds(self, tokens: TokensLike, attachments: Iterable[Attachment], lineage: Lineage) -> bool:
        """Whether one can go on after all of ``tokens``."""
        match = self.store.match(self.identity, [*map(int, tokens), 0], attachments=attachments, lineage=lineage)
        return match.usable == len(tokens)

    def clear_warm(self) -> None:
        """Give the memory back; what is on disk, or on its way there, can still be found. Without a disk that is
        `clear`, but for what is restored and not closed."""
        self.store.flush()
        self._engine.eviction.evict("warm", 0)

    def clear(self) -> Forgotten:
        """Drop everything of the model, in both tiers."""
        return self.store.clear(self.identity)

    # -- figures -----------------------------------------------------------------------------

    @property
    def warm_bytes(self) -> int:
        """Bytes of the model's containers in memory."""
        return self._asked(lambda namespace: namespace.warm_bytes)

    @property
    def warm_entries(self) -> int:
        """Snapshots in memory."""
        return self._asked(lambda namespace: len(_snapshots(namespace)))

    @property
    def warm_anchors(self) -> int:
        """Named positions in memory that can be resumed from."""
        return self._asked(_named)

    def _asked(self, count: Callable[[Namespace], int]) -> int:
        with self._engine.index.changed:
            namespace = self._engine.index.namespaces.get(self._key)
            return 0 if namespace is None else count(namespace)

    # -- life --------------------------------------------------------------------------------

    def close(self) -> None:
        """Flush to disk and let go of everything. Idempotent."""
        self.store.close()

    def __enter__(self: T) -> T:
        return self

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    # -- budgets by number -------------------------------------------------------------------

    def _keep(self, saved: Saved | None = None) -> None:
        """Let the least recently used snapshots go until as many as may be are left."""
        with self._engine.index.changed:
            namespace = self._engine.index.namespaces.get(self._key)
            if namespace is None:
                return
            newest = self._newest(saved)
            self._engine.warm.keep_anchors(namespace, self._engine.options.anchors, newest)
            while len(found := _snapshots(namespace)) > self.entries:
                victim = next((item for item in found if item not in newest and self._may_go(item)), None)
                if victim is None:
                    break
                self._let_go(victim)
        self._engine.warm.reap()

    def _newest(self, saved: Saved | None) -> list[Record]:
        """What was saved just now, and makes the others give way: rows and the states at their end."""
        if saved is None or saved.id is None or not self.entries:
            return []
        record = self._engine.index.records.get(saved.id)
        if record is None:
            return []
        return [record, *(state for state in record.states if state.end == record.end)]

    def _let_go(self, end: Record) -> None:
        """A snapshot, and the rows that nothing else in memory builds on and that were not used since."""
        used, record = end.last_used, end.parent
        self._engine.warm.evict(end)
        while record is not None and record.warm and self._may_go(record) and (end.is_state or record.last_used <= used):
            above = record.parent
            self._engine.warm.evict(record)
            record = above

    def _may_go(self, record: Record) -> bool:
        children = record.warm_children if record.cold == Cold.STORED else len(record.children)
        pinned = record.pinned_until_ns > self._engine.options.clock.wall_ns()
        return not (children or pinned or record.cold in DIRTY or self._engine.warm.leased(record))


def _snapshots(namespace: Namespace) -> list[Record]:
    """The ends of what is in memory, the least recently used first."""
    warm = [record for record in namespace.records if record.warm]
    if _stateful(namespace):
        found = [record for record in warm if record.provides & (Provides.EXACT | Provides.TRIMMABLE)]
    else:
        found = [record for record in warm if not record.is_state and not _gone_on_from(record)]
    return sorted(found, key=lambda record: record.last_used)


def _named(namespace: Namespace) -> int:
    if not _stateful(namespace):
        return sum(len({position for position, _ in record.anchors}) for record in namespace.records if record.warm)
    states = [record for record in _snapshots(namespace) if record.parent is not None]
    return sum(any(position == record.end for position, _ in record.parent.anchors) for record in states if record.parent)


def _stateful(namespace: Namespace) -> bool:
    return bool(namespace.needs.exact or namespace.needs.trimmable)


def _gone_on_from(record: Record) -> bool:
    return any(child.warm and not child.is_state for child in record.children)
