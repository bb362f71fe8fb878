"""Summaries of heads: made when a record is written, and for stores that have none yet."""

from __future__ import annotations

from warmkv.kvstore.geometry import segment_coverage, state_provides
from warmkv.schema import segment as container
from warmkv.schema.identity import Identity
from warmkv.schema.segment import SegmentHeader
from warmkv.schema.summary import Summary


def summarize(raw: bytes, identity: Identity) -> Summary:
    """What the head ``raw`` says about a record of a model. Raises FormatError for a head that is
    not readable or does not fit the model."""
    head = container.decode_head(raw)
    header, digest = head.header, container.head_digest(raw)
    if isinstance(header, SegmentHeader):
        covered = segment_coverage(header, identity)
        # Wherever these bytes lie in the head: what is read there are the tokens.
        at = raw.index(header.tokens.tobytes(), container.PREAMBLE.size)
        start, end, provides, extents, fields = header.start, header.end, 0, covered.extents, tuple(sorted(covered.fields))
    else:
        at, extents, fields = 0, (), ()
        start = end = header.position
        provides = int(state_provides(header, identity))
    return Summary(
        digest, header.namespace, header.lineage, header.parent, start, end, head.container_bytes, head.payload_bytes,
        header.created_ns, header.writer, provides, at, extents, fields, header.attachments,
    )  # fmt: skip
