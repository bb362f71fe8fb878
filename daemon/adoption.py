"""Taking back what a service manager kept: records of a process that is gone, proven like a peer's.

A descriptor's name says what it should be; what it is, its own content has to prove. Records are
named by id, and beside them lies what says whose they are, since a record that never reached the
disk belongs to a namespace that nothing else remembers.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from warmkv.daemon.activation import Inherited
from warmkv.kvstore import memfd
from warmkv.kvstore.store.index import Namespace
from warmkv.kvstore.store.intake import Owner
from warmkv.schema import ids, lmdb_records
from warmkv.schema import segment as container
from warmkv.schema.errors import FormatError, StoreError, WarmKVError
from warmkv.schema.lmdb_records import NamespaceRecord
from warmkv.schema.records import NamespaceKey, RecordId

if TYPE_CHECKING:
    from warmkv.kvstore.store.engine import Engine

_NAME = re.compile(r"warmkv-(ns-)?([0-9a-f]{32})\Z")
#: Of an identity with the most layers and adapters; larger is no identity of ours.
MAX_IDENTITY_BYTES = 16 << 20


def record_name(record: RecordId) -> str:
    return f"warmkv-{record.hex()}"


def namespace_name(key: NamespaceKey) -> str:
    return f"warmkv-ns-{key.hex()}"


def record_of(name: str) -> RecordId | None:
    """The record a descriptor of that name should be."""
    named = _NAME.match(name)
    return RecordId(bytes.fromhex(named[2])) if named is not None and not named[1] else None


def describe(namespace: Namespace) -> int:
    """A sealed memfd that says whose namespace this is; the caller closes it. Raises StoreError."""
    record = NamespaceRecord(namespace.owner_uid, namespace.share, namespace.identity, namespace.created_ns)
    data = lmdb_records.encode_namespace(record)
    fd = memfd.create("warmkv:namespace", len(data))
    try:
        memfd.write(fd, data, 0)
        memfd.seal(fd)
    except StoreError:
        os.close(fd)
        raise
    return fd


@dataclass(slots=True)
class Adoption:
    """``good`` are descriptors that were proven, ``bad`` the others, each with the reason;
    ``records`` counts those that are warm again."""

    good: list[Inherited] = field(default_factory=list)
    bad: list[tuple[Inherited, str]] = field(default_factory=list)
    records: int = 0


def adopt(engine: Engine, passed: Iterable[Inherited]) -> Adoption:
    """Admit every record among ``passed`` that is what its name says and that `Intake.adopt` takes,
    parents before what builds on them. Descriptors stay the caller's."""
    done = Adoption()
    owners: dict[NamespaceKey, Owner] = {}
    records: list[tuple[int, Inherited, NamespaceKey]] = []
    names: set[str] = set()
    for item in passed:
        try:
            if item.name in names:
                raise FormatError("there was one of that name already")
            names.add(item.name)
            _sort(item, owners, records, done)
        except (WarmKVError, OSError) as exc:
            done.bad.append((item, str(exc)))
    # What a record builds on begins before it does.
    for _, item, key in sorted(records, key=lambda found: found[0]):
        reason = _admit(engine, item, key, owners)
        if reason is None:
            done.good.append(item)
            done.records += 1
        else:
            done.bad.append((item, reason))
    return done


def _sort(
    item: Inherited, owners: dict[NamespaceKey, Owner], records: list[tuple[int, Inherited, NamespaceKey]], done: Adoption
) -> None:
    """What a descriptor claims to be, from its name and its own head; of a record nothing more is
    believed yet. Raises FormatError, RemoteProtocolError, OSError."""
    named = _NAME.match(item.name)
    if named is None:
        raise FormatError("the name is none of ours")
    if named[1]:
        key, owner = _owner(item.fd)
        if namespace_name(key) != item.name:
            raise FormatError(f"it describes namespace {key.hex()}")
        owners[key] = owner
        done.good.append(item)
        return
    total_bytes = memfd.check_sealed(item.fd, container.MAX_PAYLOAD_BYTES)
    header = container.decode_head(memoryview(memfd.map_private(item.fd, total_bytes)), total_bytes).header
    if record_name(header.id) != item.name:
        raise FormatError(f"it holds record {header.id.hex()}")
    start = header.position if isinstance(header, container.StateHeader) else header.start
    records.append((start, item, header.namespace))


def _owner(fd: int) -> tuple[NamespaceKey, Owner]:
    """What a memfd of `describe` says, and the key that follows from it."""
    total_bytes = memfd.check_sealed(fd, MAX_IDENTITY_BYTES)
    record = lmdb_records.decode_namespace(memfd.read(fd, total_bytes, 0))
    owner = Owner(record.owner_uid, record.share, record.identity)
    return ids.namespace_key(owner.uid, owner.share, ids.fingerprint(owner.identity)), owner


def _admit(engine: Engine, item: Inherited, key: NamespaceKey, owners: dict[NamespaceKey, Owner]) -> str | None:
    """Admit one record; None, or why not. What the store knows of a namespace comes first."""
    with engine.index.changed:
        namespace = engine.index.namespaces.get(key)
    owner = Owner(namespace.owner_uid, namespace.share, namespace.identity) if namespace is not None else owners.get(key)
    if owner is None:
        return f"nothing says whose namespace {key.hex()} is"
    try:
        return engine.intake.adopt(item.fd, owner)
    except (WarmKVError, OSError) as exc:
        return str(exc)
