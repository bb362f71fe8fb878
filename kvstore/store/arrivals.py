"""Arrivals: a container as a peer handed it over, proven by itself before the index is asked."""

from __future__ import annotations

import fcntl
import os
from dataclasses import dataclass, replace

import numpy as np

from warmkv.kvstore import memfd
from warmkv.kvstore.digests import payload_digests
from warmkv.kvstore.geometry import Coverage, segment_coverage, state_provides
from warmkv.kvstore.needs import Provides
from warmkv.schema import ids
from warmkv.schema import segment as container
from warmkv.schema.errors import DescriptorLimit, DigestError, FormatError
from warmkv.schema.identity import Identity
from warmkv.schema.records import Attachment, NamespaceKey, coverage
from warmkv.schema.segment import SegmentHeader

#: The name stays in the index as long as the record does, in whichever tier.
MAX_WRITER_CHARACTERS = 128
#: What a peer says of the time its rows took is believed up to this: no record is worth more.
MAX_TOKEN_US = 1_000_000
_COPY_BYTES = 4 << 20


@dataclass(frozen=True, slots=True)
class Owner:
    """Whose namespace a request is about: enough to create it."""

    uid: int
    share: str
    identity: Identity


@dataclass(frozen=True, slots=True)
class Arrival:
    """What a sealed container names, and what it would add; ``fd`` is borrowed."""

    head: container.Head
    fd: int
    total_bytes: int
    coverage: Coverage
    provides: Provides
    prefill_us: int = 0

    @property
    def header(self) -> container.Header:
        return self.head.header

    @property
    def end(self) -> int:
        header = self.head.header
        return header.end if isinstance(header, SegmentHeader) else header.position

    @property
    def start(self) -> int:
        header = self.head.header
        return header.start if isinstance(header, SegmentHeader) else header.position

    @property
    def tokens(self) -> int:
        """Token ids it would add to the index."""
        return self.end - self.start

    def check_id(self, tokens: bytes, attachments: tuple[Attachment, ...]) -> None:
        """Raises FormatError where its id does not name what it holds, its whole prefix being
        ``tokens`` with ``attachments``."""
        header, covered = self.header, coverage(self.header.planes)
        whole = np.frombuffer(tokens, "<u4")
        if isinstance(header, SegmentHeader):
            expected = ids.segment_id(header.namespace, header.lineage, header.start, covered, attachments, whole)
        else:
            expected = ids.state_id(header.namespace, header.lineage, covered, attachments, whole)
        if expected != header.id:
            raise FormatError(f"id {header.id.hex()} does not name what the container holds, expected {expected.hex()}")

    def copied(self) -> Arrival:
        """The same in shared memory of this process, sealed; the caller closes the new ``fd``."""
        own = memfd.create(f"warmkv:{self.header.id.hex()}", self.total_bytes)
        try:
            for at in range(0, self.total_bytes, _COPY_BYTES):
                memfd.write(own, memfd.read(self.fd, min(_COPY_BYTES, self.total_bytes - at), at), at)
            memfd.seal(own)
        except BaseException:
            os.close(own)
            raise
        return replace(self, fd=own)


def duplicate(fd: int) -> int:
    """Another descriptor of the same container. Raises DescriptorLimit."""
    try:
        return fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 0)
    except OSError as exc:
        raise DescriptorLimit("no descriptor left to keep the record") from exc


def read_head(fd: int, total_bytes: int) -> container.Head:
    """The head of a sealed container. Raises FormatError."""
    view = memoryview(memfd.map_private(fd, total_bytes))
    return container.decode_head(view, total_bytes)


def check(fd: int, total_bytes: int, namespace: NamespaceKey, identity: Identity, prefill_us: int = 0) -> Arrival:
    """Everything that can be checked without the index. Raises FormatError, UnsupportedError."""
    view = memoryview(memfd.map_private(fd, total_bytes))
    head = container.decode_head(view, total_bytes)
    header = head.header
    if header.namespace != namespace:
        raise FormatError("the container belongs to another namespace than the commit")
    if len(header.writer) > MAX_WRITER_CHARACTERS:
        raise FormatError(f"the writer's name has {len(header.writer)} characters, expected at most {MAX_WRITER_CHARACTERS}")
    covered, provides, tokens = Coverage(()), Provides.NOTHING, 0
    if isinstance(header, SegmentHeader):
        covered, tokens = segment_coverage(header, identity), header.end - header.start
    else:
        provides = state_provides(header, identity)
    if payload_digests(view[head.payload_offset :]) != header.digests:
        raise DigestError("the payload does not match the digests in its head")
    return Arrival(head, fd, total_bytes, covered, provides, min(prefill_us, tokens * MAX_TOKEN_US, 2**32 - 1))
