"""check(): every invariant of index and accounts, for tests, `warmkv verify` and the curious."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from warmkv.kvstore.needs import Provides
from warmkv.kvstore.store.cold import stored_bytes
from warmkv.kvstore.store.index import Cold, Index, Record
from warmkv.schema.errors import WarmKVError

if TYPE_CHECKING:
    from warmkv.kvstore.store.engine import Engine


def check(engine: Engine) -> list[str]:
    """What does not hold, in words; empty when all is well. Reads no payload."""
    with engine.index.changed:
        problems = check_index(engine.index)
        ledger = engine.warm.ledger
        warm = [record for record in engine.index.records.values() if record.warm]
        held = sum(ledger.paged(record.total_bytes) for record in warm)
        if ledger.resident_bytes != held:
            problems.append(f"resident bytes are {ledger.resident_bytes}, the pages of records sum to {held}")
        if ledger.resident_entries != len(warm):
            problems.append(f"resident entries are {ledger.resident_entries}, there are {len(warm)}")
        if max(ledger.used_bytes, ledger.peak_bytes) > max(ledger.budget_bytes, ledger.settling_bytes):
            problems.append(f"warm budget {ledger.budget_bytes} exceeded: {ledger.used_bytes} used, peak {ledger.peak_bytes}")
        if min(ledger.reserved_bytes, ledger.promoting_bytes, ledger.leased_bytes, ledger.lent_bytes) < 0:
            problems.append(f"an account is negative: {ledger}")
        for record in warm:
            if os.fstat(record.fd).st_size != record.total_bytes:
                problems.append(f"{record.id.hex()}: descriptor has another size than the record")
        if engine.writer is not None:
            cold = [record for record in engine.index.records.values() if record.cold == Cold.STORED]
            total = sum(stored_bytes(record.total_bytes, record.payload_bytes) for record in cold)
            if total != engine.writer.cold_bytes:
                problems.append(f"cold bytes are {engine.writer.cold_bytes}, records sum to {total}")
    return problems + _check_cold(engine)


def _check_cold(engine: Engine) -> list[str]:
    """Whether the disk has what the index says, under the lock before and after only: others go on."""
    if engine.cold is None or not engine.serving:
        return []
    with engine.index.changed:
        before = [record for record in engine.index.records.values() if record.cold == Cold.STORED]
    try:
        heads, summaries = engine.cold.stored_ids()
    except WarmKVError as exc:
        return [f"the tables on disk cannot be read: {exc}"]
    with engine.index.changed:
        stored = [record.id for record in before if record.cold == Cold.STORED and not record.gone]
    problems = [f"{id_.hex()} is not on disk" for id_ in stored if id_ not in heads]
    return problems + [f"{id_.hex()} has a summary on disk and no head" for id_ in sorted(summaries - heads)]


def check_index(index: Index) -> list[str]:
    """Invariants of trees, records and orders; the index lock is held."""
    problems: list[str] = []
    for record in index.records.values():
        name = record.id.hex()
        if not record.warm and record.cold == Cold.ABSENT:
            problems.append(f"{name} is in neither tier")
        if record.gone or record not in record.namespace.records:
            problems.append(f"{name} is listed but gone")
        if (record.parent is None) != (record.start == 0 and not record.is_state):
            problems.append(f"{name} begins at {record.start} with parent {record.parent}")
        if record.parent is not None:
            if record not in record.parent.children or not record.parent.start < record.start <= record.parent.end:
                problems.append(f"{name} does not continue its parent")
            if record.parent.id not in index.records:
                problems.append(f"{name} builds on a record that is gone")
        if record.warm_children != sum(child.warm for child in record.children):
            problems.append(f"{name} miscounts its warm children")
        if record.cold_children != sum(child.cold != Cold.ABSENT for child in record.children):
            problems.append(f"{name} miscounts its cold children")
        if record.warm != (record in index.warm_order) or (record.cold == Cold.STORED) != (record in index.cold_order):
            problems.append(f"{name} is missing from an order, or in one too many")
        problems.extend(_check_nodes(record.id.hex(), record))
    for node in index.all_nodes():
        if node.end <= node.start or len(node.edge) != 4 * (node.end - node.start):
            problems.append(f"node [{node.start}, {node.end}) has {len(node.edge)} bytes of edge")
        if not node.records and not node.children:
            problems.append(f"node [{node.start}, {node.end}) is empty")
        below = sum(child.trimmable for child in node.children.values())
        if node.trimmable != below + sum(trimmable for _, trimmable, _ in node.states):
            problems.append(f"node [{node.start}, {node.end}) miscounts the states that can be cut back")
        if [at for at, _, _ in node.states] != sorted(at for at, _, _ in node.states):
            problems.append(f"node [{node.start}, {node.end}) has states out of order")
        if any(not node.start < at <= node.end or record.id not in index.records for at, _, record in node.states):
            problems.append(f"node [{node.start}, {node.end}) has states that do not belong there")
    return problems


def _check_nodes(name: str, record: Record) -> list[str]:
    if record.is_state:
        return _check_state(name, record)
    node, reached = record.node, record.end
    if node is None or node.end != record.end:
        return [f"{name} does not end at its node"]
    while node is not None and node.parent is not None and node.end > record.start:
        if record not in node.records or node.end != reached or node.start < record.start:
            return [f"{name} is not on node [{node.start}, {node.end})"]
        reached, node = node.start, node.parent
    return [] if reached == record.start else [f"{name} begins inside a node"]


def _check_state(name: str, record: Record) -> list[str]:
    node = record.parent.node if record.parent is not None else None
    while node is not None and node.start >= record.end:
        node = node.parent
    trimmable = bool(record.provides & Provides.TRIMMABLE)
    if node is None or (record.end, trimmable, record) not in node.states:
        return [f"state {name} is not at position {record.end}"]
    return [f"state {name} has children"] if record.children else []
