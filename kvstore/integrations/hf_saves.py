"""Saving what a cache holds, without ever making a turn fail for it."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from concurrent.futures import Future, wait
from dataclasses import replace

from transformers import DynamicCache

from warmkv.kvstore.admission import Admission
from warmkv.kvstore.integrations import hf_records
from warmkv.kvstore.integrations.hf_identity import ModelIdentity
from warmkv.kvstore.integrations.hf_start import PrefixStore, Records
from warmkv.kvstore.results import Saved
from warmkv.kvstore.rows import LayerRows
from warmkv.kvstore.verbs import Ack
from warmkv.schema.errors import RecordError, WarmKVError
from warmkv.schema.identity import Identity
from warmkv.schema.records import Anchor, Tokens

log = logging.getLogger("warmkv.transformers")
#: Saves of one prompt that may be under way before its prefill waits for the oldest, and for how long:
#: a queue that is full would give up the state at an anchor.
BACKLOG, BACKLOG_S = 4, 1.0
#: How long a prompt that the live cache cannot serve waits for the saves of the turn before it.
SETTLE_S = 2.0


class Saves:
    """Saves of one model's states, in the ``background`` or not.

    **Threading:** one caller at a time; what is saved in the background may end on any thread."""

    def __init__(self, prefixes: PrefixStore, model: ModelIdentity, *, background: bool, admission: Admission) -> None:
        self._admission = admission
        self._prefixes = prefixes
        self._model = model
        self._background = background
        self._pending: list[Future[Saved]] = []
        self._warned = False

    def put(
        self, identity: Identity, tokens: Tokens, cache: DynamicCache, *, ack: Ack, anchors: Sequence[Anchor] = (),
        kept: int | None = None,
    ) -> Future[Saved]:  # fmt: skip
        """Save the state ``cache`` holds of ``tokens``, of which ``kept`` are worth it (None: all);
        never raises for the store. Nothing is saved of a state that cannot be cut back to them."""
        length = len(tokens)
        try:
            # The state was computed while others could write to the model: look again, cheaply.
            if self._model.now(trust_version=True) != identity:
                raise RecordError("the model changed while it generated; the new state fits neither of the two")
            if kept is not None and kept < length and not self._model.geometry.resumes_anywhere:
                return settled(Saved(False, reason=f"no later prompt goes on behind {kept} of {length} tokens"))
            kept = length if kept is None else min(kept, length)
            records = _cut(hf_records.to_records(cache, self._model.geometry, length), kept, length)
            named = [anchor for anchor in anchors if anchor.position <= kept]
            verb = self._prefixes.save_async if self._background else self._prefixes.save
            speed = self._admission.prefill_tps
            prefill_s = kept / speed if speed else 0.0
            outcome = verb(identity, tokens[:kept], records, ack=ack, anchors=named, prefill_s=prefill_s)
        except Exception as exc:  # noqa: BLE001 - whatever a store does, the answer stands
            self.failed("saved to", exc)
            outcome = Saved(False, reason=str(exc))
        if isinstance(outcome, Saved):
            return settled(outcome)
        outcome.add_done_callback(self._saved)
        self._pending = [*(future for future in self._pending if not future.done()), outcome]
        return outcome

    def settle(self) -> None:
        """Wait, a short time, for what is still being saved."""
        wait(self._pending, SETTLE_S)

    def hold_back(self, saves: Sequence[Future[Saved]]) -> None:
        """Wait, a short time, where too many of these are under way."""
        wait(saves[-BACKLOG:][:1] if len(saves) >= BACKLOG else (), BACKLOG_S)

    def failed(self, verb: str, exc: BaseException) -> None:
        """Say, once loudly and then quietly, that the store could not be ``verb``."""
        level = logging.DEBUG if self._warned else logging.WARNING
        self._warned = True
        known = isinstance(exc, WarmKVError)
        log.log(level, "state was not %s the store: %s: %s", verb, type(exc).__name__, exc, exc_info=None if known else exc)

    def _saved(self, done: Future[Saved]) -> None:
        if not done.cancelled() and (exc := done.exception()) is not None:
            self.failed("saved to", exc)


def settled(outcome: Saved) -> Future[Saved]:
    """A future of a save that is over."""
    done: Future[Saved] = Future()
    done.set_result(outcome)
    return done


def _cut(records: Records, kept: int, length: int) -> Records:
    """The first ``kept`` rows of records of ``length`` tokens, which have no other state."""
    if kept == length:
        return records
    return [
        replace(record, planes=tuple(replace(plane, rows=plane.rows[: kept - record.first]) for plane in record.planes))
        for record in records
        if isinstance(record, LayerRows)
    ]
