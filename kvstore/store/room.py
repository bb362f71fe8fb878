"""Room in the index: the ids its segments name are held in memory, whichever tier has the rows."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from warmkv.kvstore.store.index import DIRTY, Cold, Index, Record, tokens_of
from warmkv.kvstore.store.policy import Candidate, plan_eviction
from warmkv.kvstore.store.warm import WarmTier
from warmkv.kvstore.store.write_behind import WriteBehind
from warmkv.schema.errors import Busy, TooLarge


def for_tokens(
    index: Index, warm: WarmTier, writer: WriteBehind | None, wanted: int, limit: int, builds_on: Record | None
) -> None:  # fmt: skip
    """Let the worst records go from both tiers until ``wanted`` token ids more fit ``limit``; the index
    lock is held. Raises TooLarge, Busy; then nothing went."""
    if wanted > limit:
        raise TooLarge(f"{wanted} tokens do not fit an index of {limit}")
    excess = index.tokens + wanted - limit
    if excess <= 0:
        return
    victims = plan_eviction(_candidates(index, warm, writer, builds_on), excess)
    if victims is None:
        raise Busy(f"the index holds {index.tokens} of {limit} tokens, and none can be dropped now for {wanted} more")
    drop(index, warm, writer, victims)


def drop(index: Index, warm: WarmTier, writer: WriteBehind | None, records: Iterable[Record]) -> None:
    """Take records, leaves first, out of both tiers and the index; lock held."""
    for record in records:
        if writer is not None:
            writer.discard(record)
        if record.warm:
            warm.evict(record)
        if not record.gone:
            index.drop(record)


def droppable(record: Record, warm: WarmTier, now_ns: int) -> bool:
    """Whether a record may leave both tiers: nobody pinned or uses it, nor is it being moved."""
    busy = record.cold in DIRTY or record.promotion is not None or record.awaited > 0
    return not (busy or record.pinned_until_ns > now_ns or warm.leased(record))


def _candidates(
    index: Index, warm: WarmTier, writer: WriteBehind | None, builds_on: Record | None
) -> Iterator[Candidate[Record]]:  # fmt: skip
    """All records, those on disk first, worst first each."""
    now_ns = index.clock.wall_ns()
    needed = set(index.chain_of(builds_on)) if builds_on is not None else set()

    def candidate(record: Record) -> Candidate[Record]:
        keep = record in needed or not droppable(record, warm, now_ns)
        return Candidate(record, record.parent, tokens_of(record), len(record.children), keep)

    yield from map(candidate, index.cold_order.worst_first())
    yield from (candidate(item) for item in index.warm_order.worst_first() if item.cold in (Cold.ABSENT, *DIRTY))
