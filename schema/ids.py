"""Digests that name things: fingerprints, namespaces, segments and states.

All are BLAKE2b-128 over canonical bytes. An id is a name, never a proof: whoever finds a
record by id still compares its tokens.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import NewType

from warmkv.schema import canonical
from warmkv.schema.errors import RecordError
from warmkv.schema.identity import Identity
from warmkv.schema.records import Attachment, Lineage, NamespaceKey, RecordId, Tokens, pack_attachments

Fingerprint = NewType("Fingerprint", bytes)


def blake(*parts: bytes | memoryview) -> bytes:
    digest = hashlib.blake2b(digest_size=16)
    for part in parts:
        digest.update(part)
    return digest.digest()


def fingerprint(identity: Identity) -> Fingerprint:
    """16 bytes that stand for an identity, equal across processes, machines and versions."""
    return Fingerprint(blake(identity.canonical()))


def namespace_key(owner_uid: int, share: str, print_: Fingerprint) -> NamespaceKey:
    """Key of the namespace of a uid, or of a declared share when ``share`` is not empty."""
    owner = ("share", share) if share else ("uid", owner_uid)
    return NamespaceKey(blake(canonical.encode(("namespace", owner, print_))))


def lineage_after(lineage: Lineage, operation: str, *parameters: canonical.Value) -> Lineage:
    """Lineage of rows after one more lossy or position-changing operation."""
    if not operation:
        raise RecordError("a lineage needs the name of its operation")
    return Lineage(blake(canonical.encode(("lineage", lineage, operation, parameters))))


def segment_id(
    namespace: NamespaceKey, lineage: Lineage, start: int, coverage: bytes, attachments: Sequence[Attachment], tokens: Tokens
) -> RecordId:
    """Id of rows [start, len(tokens)); ``tokens`` is the whole prefix, ``attachments`` those
    beginning before its end."""
    head = canonical.encode(("segment", namespace, lineage, start, len(tokens), coverage, pack_attachments(attachments)))
    return RecordId(blake(head, tokens.data.cast("B")))


def state_id(
    namespace: NamespaceKey, lineage: Lineage, coverage: bytes, attachments: Sequence[Attachment], tokens: Tokens
) -> RecordId:
    """Id of the states at position len(tokens)."""
    head = canonical.encode(("state", namespace, lineage, len(tokens), coverage, pack_attachments(attachments)))
    return RecordId(blake(head, tokens.data.cast("B")))
