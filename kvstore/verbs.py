"""The verbs a user calls, over any session: embedded store and client share this code.

Bad input of the caller raises here, before anything is contacted. What the other side then
answers or fails to answer goes through `_failed`: the embedded store raises, the client turns
it into a miss.
"""

from __future__ import annotations

import json
import os
import threading
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from types import TracebackType
from typing import Literal, TypeVar

from warmkv.kvstore import rows as source
from warmkv.kvstore.assembly import restore
from warmkv.kvstore.channel import close_all
from warmkv.kvstore.restored import Restored
from warmkv.kvstore.results import Forgotten, Match, Offer, Saved
from warmkv.kvstore.rows import Array, LayerRows, LayerState
from warmkv.kvstore.save_queue import SaveQueue
from warmkv.kvstore.saving import Query, Save
from warmkv.kvstore.session import Session
from warmkv.schema import messages as m
from warmkv.schema.errors import ClosedError, RecordError, WarmKVError
from warmkv.schema.identity import Identity
from warmkv.schema.records import (
    CLEAN,
    NO_FIELD,
    ROOT,
    Anchor,
    Attachment,
    Lineage,
    NamespaceKey,
    TokensLike,
    as_tokens,
    check_attachments,
    check_shifts,
    pack_anchors,
)

Ack = Literal["memory", "disk"]
At = Literal["longest", "anchor"]
_ACKS = {"memory": m.ACK_MEMORY, "disk": m.ACK_DISK}
#: A prefill that takes longer is a mistake in units.
MAX_PREFILL_S = 1e6
_ATS = {"longest": m.AT_LONGEST, "anchor": m.AT_ANCHOR}
SAVE_QUEUE = 64
Records = Sequence[LayerRows | LayerState]
T = TypeVar("T")


class Verbs(ABC):
    """match, restore, prefetch, offer, save, pin, forget and stats over one session.

    **Threading:** every method may be called from any thread. ``share`` names a declared shared
    namespace; empty means the caller's own."""

    def __init__(self, session: Session, *, share: str = "") -> None:
        self._session = session
        self._share = share
        self._namespaces: OrderedDict[bytes, NamespaceKey] = OrderedDict()
        self._lock = threading.Lock()
        self._queue: SaveQueue | None = None
        self._closed = False

    # -- what differs between store and client ------------------------------------------

    @abstractmethod
    def _failed(self, exc: WarmKVError) -> str:
        """Raise ``exc``, or return the reason that a miss or a given-up save carries."""

    # -- asking --------------------------------------------------------------------------

    def match(
        self, identity: Identity, ids: TokensLike, *, attachments: Iterable[Attachment] = (), lineage: Lineage = CLEAN,
        at: At = "longest", logits: bool = False, detail: bool = False, prefill_tps: float = 0.0,
    ) -> Match:  # fmt: skip
        """How many of ``ids`` are known and from how many a model could resume. Moves nothing.

        ``detail`` fills in `Match.groups`; ``logits`` and ``prefill_tps`` as in `restore`.

        Raises RecordError for ids or attachments that cannot be."""
        query, place, speed = self._query(identity, ids, attachments, lineage), _at(at), _speed(prefill_tps)
        try:
            key = self._namespace(identity)
            reply = self._session.match(m.Match(key, lineage, query.tokens, query.packed, place, detail, logits, speed))
        except WarmKVError as exc:
            return self._miss(query, exc)
        return Match.of(reply, identity, query.attachments, lineage)

    def restore(
        self, target: Match | Identity, ids: TokensLike, *, attachments: Iterable[Attachment] = (), lineage: Lineage = CLEAN,
        at: At = "longest", verify: bool = False, writable: bool = False, logits: bool = False, prefill_tps: float = 0.0,
        wait_s: float = 0.0,
    ) -> Restored:  # fmt: skip
        """State of the longest usable prefix of ``ids``, mapped into this process.

        ``target`` is an identity, or a Match of the same ids, whose attachments and lineage then
        count. ``verify`` checks every payload byte; ``writable`` maps private pages that may be
        written (the store never sees it). With ``logits`` all of ``ids`` may be usable, where the
        logits after the last were parked; else one is always left to feed. ``prefill_tps`` is the
        speed, in tokens a second, at which the caller would compute: what takes longer to load is
        a miss. With ``wait_s`` a caller whose prompt others are computing waits for them that long;
        one who finds nobody gets a `Restored.flight` while others wait for it.

        A miss comes back as a false Restored."""
        limit = 0
        if isinstance(target, Match):
            identity, attachments, lineage, limit = target.identity, target.attachments, target.lineage, target.usable
            if limit == 0:
                return Restored(target)
        else:
            identity = target
        query, place, speed = self._query(identity, ids, attachments, lineage), _at(at), _speed(prefill_tps)
        if not 0 <= wait_s < 2**32:
            raise RecordError(f"to wait {wait_s} seconds is not possible; expected at least 0")
        try:
            key = self._namespace(identity)
            about = (key, lineage, query.tokens, query.packed, place, limit, logits, speed, int(wait_s * 1000))
            grant = self._session.acquire(m.Acquire(*about))
            try:
                match = Match.of(grant.reply, identity, query.attachments, lineage)
            except BaseException:
                close_all(grant.fds)
                grant.release()
                grant.release_flight()
                raise
            return restore(grant, match, key, query.tokens, verify=verify, writable=writable, logits=logits)
        except WarmKVError as exc:
            return Restored(self._miss(query, exc))

    def prefetch(
        self, identity: Identity, ids: TokensLike, *, attachments: Iterable[Attachment] = (), lineage: Lineage = CLEAN
    ) -> Match:
        """Bring what a later restore of ``ids`` needs into the warm tier."""
        query = self._query(identity, ids, attachments, lineage)
        try:
            reply = self._session.prefetch(m.Prefetch(self._namespace(identity), lineage, query.tokens, query.packed))
        except WarmKVError as exc:
            return self._miss(query, exc)
        return Match.of(reply, identity, query.attachments, lineage)

    # -- saving --------------------------------------------------------------------------

    def offer(
        self, identity: Identity, ids: TokensLike, *, attachments: Iterable[Attachment] = (), lineage: Lineage = CLEAN,
        fields: Sequence[bytes] = (),
    ) -> Offer:  # fmt: skip
        """What of ``ids`` is held, hence need not be computed, read back or sent.

        Unlike `match` it counts rows up to len(ids), whatever else is needed to resume. ``fields`` are digests of frozen
        quantisation fields, for formats that have them."""
        packed = _pack_fields(fields)
        query = self._query(identity, ids, attachments, lineage)
        try:
            key = self._namespace(identity)
            reply = self._session.offer(m.Offer(key, query.lineage, query.tokens, query.packed, packed))
        except WarmKVError as exc:
            self._failed(exc)
            return Offer(0, ROOT, 0, 0, 0)
        return Offer(reply.held, reply.parent, reply.reservation, reply.reserved_bytes, reply.epoch)

    def save(
        self, identity: Identity, ids: TokensLike, records: Records, *, ack: Ack = "memory",
        anchors: Iterable[Anchor] = (), attachments: Iterable[Attachment] = (), lineage: Lineage = CLEAN,
        fields: Sequence[bytes] = (), logits: Array | None = None, prefill_s: float = 0.0,
    ) -> Saved:  # fmt: skip
        """Store rows and states of ``ids``; only what is not yet held is read and sent.

        ``records`` cover every layer of the model, or are none where only anchors or ``logits``
        (float32, shape (vocabulary,), those after the last id) are added to what is held.
        ``prefill_s`` tells how long computing all of ``ids`` takes; it is kept with the rows, in
        proportion, for the store to evict what is cheap to compute again first.

        **Durability:** returns once the rows are in the warm tier (``ack="memory"``: survives
        this process) or once they and all rows before them are committed to disk
        (``ack="disk"``: survives the daemon and the machine's reboot).

        Raises RecordError (layer and plane named) or UnsupportedError before anything is sent."""
        prepared = self._prepare(identity, ids, records, ack, anchors, attachments, lineage, fields, logits, prefill_s)
        return self._save(prepared)

    def save_async(
        self, identity: Identity, ids: TokensLike, records: Records, *, ack: Ack = "memory",
        anchors: Iterable[Anchor] = (), attachments: Iterable[Attachment] = (), lineage: Lineage = CLEAN,
        fields: Sequence[bytes] = (), logits: Array | None = None, prefill_s: float = 0.0,
    ) -> Future[Saved]:  # fmt: skip
        """`save` on a background thread. Never waits: when too many saves are queued this one is
        given up and says so. The arrays of ``records`` must not change until it is done."""
        prepared = self._prepare(identity, ids, records, ack, anchors, attachments, lineage, fields, logits, prefill_s)
        with self._lock:
            self._require_open()
            if self._queue is None:
                self._queue = SaveQueue(SAVE_QUEUE)
            queue = self._queue
        return queue.submit(lambda: self._save(prepared))

    def flush(self, timeout_s: float | None = None) -> bool:
        """Wait until every queued save_async is done; False when the time ran out first."""
        queue = self._queue
        return queue is None or queue.join(timeout_s)

    def _save(self, save: Save) -> Saved:
        try:
            return save.run(self._session, self._namespace(save.query.identity))
        except WarmKVError as exc:
            return Saved(False, reason=self._failed(exc))

    def _prepare(
        self, identity: Identity, ids: TokensLike, records: Records, ack: Ack, anchors: Iterable[Anchor],
        attachments: Iterable[Attachment], lineage: Lineage, fields: Sequence[bytes], logits: Array | None, prefill_s: float,
    ) -> Save:  # fmt: skip
        query = self._query(identity, ids, attachments, lineage)
        source.require_served(identity)
        named = tuple(anchors)
        check_shifts(named, lineage)
        for anchor in named:
            if not 0 < anchor.position <= len(query.tokens):
                raise RecordError(f"anchor at {anchor.position} lies outside the {len(query.tokens)} tokens")
            if any(item.start < anchor.position < item.end for item in query.attachments):
                raise RecordError(f"anchor at {anchor.position} lies inside an attachment")
        if not 0 <= prefill_s < MAX_PREFILL_S:
            raise RecordError(f"a prefill of {prefill_s} seconds is none; expected at least 0 (unknown)")
        if ack not in _ACKS:
            raise RecordError(f"ack is {ack!r}, expected 'memory' or 'disk'")
        checked = source.check_records(identity, records, len(query.tokens), query.attachments, logits)
        named_fields = {plane.field for found in checked.rows.values() for record in found for plane in record.planes}
        every = sorted({*fields, *named_fields} - {NO_FIELD})
        return Save(query, checked, _ACKS[ack], pack_anchors(named), _pack_fields(every), float(prefill_s))

    # -- keeping and dropping ------------------------------------------------------------

    def pin(
        self,
        identity: Identity,
        ids: TokensLike,
        ttl_s: float,
        *,
        attachments: Iterable[Attachment] = (),
        lineage: Lineage = CLEAN,
    ) -> int:
        """Keep what is held of ``ids`` from eviction for ``ttl_s`` seconds; tokens pinned."""
        if not 0 < ttl_s < 2**40:
            raise RecordError(f"a pin of {ttl_s} seconds is none; expected more than 0")
        return self._pin(identity, ids, max(1, int(ttl_s * 1000)), attachments, lineage)

    def unpin(
        self, identity: Identity, ids: TokensLike, *, attachments: Iterable[Attachment] = (), lineage: Lineage = CLEAN
    ) -> int:
        """End the pins along ``ids``; tokens that were held."""
        return self._pin(identity, ids, 0, attachments, lineage)

    def _pin(self, identity: Identity, ids: TokensLike, ttl_ms: int, attachments: Iterable[Attachment], lineage: Lineage) -> int:
        query = self._query(identity, ids, attachments, lineage)
        try:
            key = self._namespace(identity)
            return self._session.pin(m.Pin(key, lineage, query.tokens, query.packed, ttl_ms)).held
        except WarmKVError as exc:
            self._failed(exc)
            return 0

    def forget(
        self, identity: Identity, ids: TokensLike, *, attachments: Iterable[Attachment] = (), lineage: Lineage = CLEAN
    ) -> Forgotten:
        """Drop, in both tiers, what of ``ids`` no other stored prefix needs."""
        query = self._query(identity, ids, attachments, lineage)
        try:
            done = self._session.forget(m.Forget(self._namespace(identity), lineage, query.tokens, query.packed))
        except WarmKVError as exc:
            self._failed(exc)
            return Forgotten(0, 0)
        return Forgotten(done.records, done.total_bytes)

    def clear(self, identity: Identity | None = None) -> Forgotten:
        """Drop the namespace of ``identity``, or everything this user stored."""
        self._require_open()
        key = b"" if identity is None else self._namespace(identity)
        done = self._session.clear(m.Clear(key, identity is None))
        return Forgotten(done.records, done.total_bytes)

    def watch_weights(self, identity: Identity, paths: Iterable[str | os.PathLike[str]]) -> int:
        """Have everything of ``identity`` dropped once one of these files of the model has other
        content. Links are followed now. How many files are watched for it; 0 where none can be."""
        files = [os.path.realpath(path) for path in paths]
        try:
            done = self.report("watch", action="add", namespace=self._namespace(identity).hex(), paths=files)
        except WarmKVError as exc:
            self._failed(exc)
            return 0
        return int(str(done["files"]))

    def report(self, verb: str, **arguments: object) -> dict[str, object]:
        """An administrative report ("stats", "ls", "show", "verify", "status"). Raises on failure."""
        self._require_open()
        document = self._session.report(m.Report(verb, json.dumps(arguments).encode()))
        loaded: dict[str, object] = json.loads(document.json)
        return loaded

    def stats(self) -> dict[str, object]:
        """Counters, sizes and budgets of the store. Raises where there is no store to ask."""
        return self.report("stats")

    # -- life ----------------------------------------------------------------------------

    def close(self) -> None:
        """Finish queued saves and let go of the session. Idempotent."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            queue = self._queue
        if queue is not None:
            queue.close()
        self._session.close()

    def __enter__(self: T) -> T:
        return self

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    # -- shared pieces -------------------------------------------------------------------

    def _query(self, identity: Identity, ids: TokensLike, attachments: Iterable[Attachment], lineage: Lineage) -> Query:
        self._require_open()
        try:
            tokens = as_tokens(ids)
        except (TypeError, ValueError) as exc:
            raise RecordError(f"token ids are not one row of integers: {exc}") from exc
        if not isinstance(lineage, bytes) or len(lineage) != 16:
            raise RecordError(f"lineage is {lineage!r}, expected 16 bytes")
        return Query(identity, tokens, check_attachments(attachments, len(tokens)), lineage)

    def _namespace(self, identity: Identity) -> NamespaceKey:
        data = identity.canonical()
        key = self._namespaces.get(data)
        if key is None:
            key = self._session.open(data, self._share)
            with self._lock:
                self._namespaces[data] = key
                while len(self._namespaces) > 64:
                    self._namespaces.popitem(last=False)
        return key

    def _miss(self, query: Query, exc: WarmKVError) -> Match:
        reason = self._failed(exc)
        return replace(Match(query.identity), reason=reason, attachments=query.attachments, lineage=query.lineage)

    def _require_open(self) -> None:
        if self._closed:
            raise ClosedError(f"{type(self).__name__} is closed")


def _at(at: At) -> int:
    if at not in _ATS:
        raise RecordError(f"at is {at!r}, expected 'longest' or 'anchor'")
    return _ATS[at]


def _speed(prefill_tps: float) -> float:
    if not 0 <= prefill_tps < 1e12:
        raise RecordError(f"a prefill speed of {prefill_tps} tokens a second is none; expected at least 0 (unknown)")
    return float(prefill_tps)


def _pack_fields(fields: Sequence[bytes]) -> bytes:
    for field in fields:
        if len(field) != 16:
            raise RecordError(f"a field digest has {len(field)} bytes, expected 16")
    return b"".join(fields)
