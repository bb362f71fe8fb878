"""Sample values, and the writer of the golden files beside this module.

Tests import the samples and compare them with the files; they never write them. Run this
script by hand, and only when a format changes on purpose: golden bytes that change without a
new version number mean that every store and every peer out there has stopped fitting.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np

HERE = Path(__file__).resolve().parent
if __name__ == "__main__":
    sys.path.insert(0, str(HERE.parent / "_ns"))

from warmkv.schema import errors, ids, lmdb_records, segment, summary  # noqa: E402
from warmkv.schema import messages as m  # noqa: E402
from warmkv.schema.identity import (  # noqa: E402
    AdapterRef,
    Identity,
    LayerKind,
    LayerSpec,
    PlaneFormat,
    PlaneRole,
    PlaneSpec,
    RopeRegime,
    Topology,
)
from warmkv.schema.records import (  # noqa: E402
    CLEAN,
    ROOT,
    Anchor,
    AnchorKind,
    Attachment,
    Lineage,
    NamespaceKey,
    Plane,
    RecordId,
    Tokens,
    coverage,
    pack_anchors,
    pack_attachments,
)

KEY, VALUE = PlaneRole.KEY, PlaneRole.VALUE
OWNER_UID, SHARE, REQUEST_ID = 1000, "team", 0x0102030405060708
CREATED_NS = 1_700_000_000_123_456_789
WRITER = "golden 1"

IDENTITY = Identity(
    architecture="GoldenForCausalLM",
    parameters=bytes(range(32)),
    settings=bytes(range(32, 48)),
    adapters=(AdapterRef(bytes(range(16)), 1.0), AdapterRef(bytes(range(16, 32)), 0.5)),
    layers=(
        LayerSpec(
            LayerKind.FULL,
            (PlaneSpec(KEY, PlaneFormat.F32, (3, 64)), PlaneSpec(VALUE, PlaneFormat.Q8_0, (3, 64), "group=32")),
        ),
        LayerSpec(LayerKind.SLIDING, (PlaneSpec(KEY, PlaneFormat.BF16, (1, 8)),), window=128),
        LayerSpec(LayerKind.CHUNKED, (PlaneSpec(KEY, PlaneFormat.F16, (1, 8)),), chunk=512),
        LayerSpec(LayerKind.SINK_WINDOW, (PlaneSpec(KEY, PlaneFormat.F16, (1, 8)),), window=64, sinks=4),
        LayerSpec(LayerKind.SHARED, (), shared_with=0),
        LayerSpec(LayerKind.RECURRENT, (PlaneSpec(PlaneRole.RECURRENT, PlaneFormat.F32, (2, 4, 8)),)),
    ),
    compute_dtype="bfloat16",
    attention="eager",
    layout="token-major",
    rope=RopeRegime("yarn", 1_000_000.0, 1.25, 64, 4096, bytes(range(16, 32))),
    tokenizer=bytes(range(64, 96)),
    runtime="golden",
    runtime_state_version="état 3",
    topology=Topology(1, 2, 0, 3),
    tenant=b"none",
)

NAMESPACE = NamespaceKey(bytes(range(0xA0, 0xB0)))
LINEAGE = Lineage(bytes(range(0xB0, 0xC0)))
PARENT = RecordId(bytes(range(0xC0, 0xD0)))
ID = RecordId(bytes(range(0xD0, 0xE0)))
#: The whole prefix: extreme ids included, none of which may be normalised.
TOKENS: Tokens = np.array([0, 1, 2**31, 2**32 - 1, 7, 7, 0x01020304, 49152], dtype="<u4")
ATTACHMENTS = (Attachment(1, 2, bytes(range(32))), Attachment(5, 1, bytes(range(32, 64))))
ANCHOR = Anchor(5, AnchorKind.TOOL_OUTPUT, 3, 0xFEDCBA9876543210, -17)
ANCHORS = (Anchor(1), ANCHOR, Anchor(8, AnchorKind.SYSTEM_PROMPT, 0, 0, 2**62))

_PLANES = (
    Plane(0, KEY, PlaneFormat.F32, (3, 5), 3, 5, 60),
    Plane(0, VALUE, PlaneFormat.BF16, (3, 5), 3, 5, 30),
    Plane(1, KEY, PlaneFormat.Q8_0, (1, 32), 5, 3, 34, field=bytes(range(16))),
)
PLANES, PAYLOAD_BYTES = segment.layout(_PLANES)
STATE_PLANES, STATE_PAYLOAD_BYTES = segment.layout(
    (
        Plane(5, PlaneRole.RECURRENT, PlaneFormat.F32, (2, 4, 8), 7, 1, 256),
        Plane(5, PlaneRole.CONV, PlaneFormat.F16, (3, 4), 7, 1, 24),
    )
)


def payload(size: int) -> bytes:
    """Bytes that repeat nowhere near a power of two, so that a shifted piece is another piece."""
    return (np.arange(size, dtype=np.uint32) % 251).astype(np.uint8).tobytes()


SEGMENT = segment.SegmentHeader(
    id=ids.segment_id(NAMESPACE, LINEAGE, 3, coverage(PLANES), ATTACHMENTS, TOKENS),
    namespace=NAMESPACE,
    lineage=LINEAGE,
    parent=PARENT,
    start=3,
    end=8,
    tokens=TOKENS[3:],
    attachments=ATTACHMENTS[1:],
    planes=PLANES,
    digests=segment.payload_digests(payload(PAYLOAD_BYTES)),
    created_ns=CREATED_NS,
    writer=WRITER,
)
STATE = segment.StateHeader(
    id=ids.state_id(NAMESPACE, CLEAN, coverage(STATE_PLANES), ATTACHMENTS, TOKENS),
    namespace=NAMESPACE,
    lineage=CLEAN,
    parent=PARENT,
    position=8,
    attachments=ATTACHMENTS,
    planes=STATE_PLANES,
    digests=segment.payload_digests(payload(STATE_PAYLOAD_BYTES)),
    created_ns=CREATED_NS,
    writer=WRITER,
)


#: Rows that were rotated: one of 64 channels, x_i = (i + 1) / 100, by the seed 42 in layer 0, as published.
ROTATED_IDENTITY = replace(
    IDENTITY,
    layers=(
        LayerSpec(
            LayerKind.FULL,
            (
                PlaneSpec(KEY, PlaneFormat.TQ_KEY, (1, 64), "rotation seed 42"),
                PlaneSpec(VALUE, PlaneFormat.TQ_VALUE, (1, 64), "rotation seed 42"),
            ),
        ),
        LayerSpec(
            LayerKind.SLIDING,
            (PlaneSpec(KEY, PlaneFormat.TQ3, (2, 24), f"KV heads 0,2 of 4; rotation seed {2**64 - 1}"),),
            window=9,
        ),
        LayerSpec(LayerKind.CONV, (PlaneSpec(PlaneRole.CONV, PlaneFormat.F32, (2, 24)),)),
    ),
)
ROTATED_KEY = bytes.fromhex("6a6dd229e20558d485916f9d19aba53bad01b52170b6bda8fb415b35")
ROTATED_VALUE = bytes.fromhex("6a6dd229e20558d485916f9d19aba53bfb41")
ROTATED_PLANES, ROTATED_BYTES = segment.layout(
    (
        Plane(0, KEY, PlaneFormat.TQ_KEY, (1, 64), 0, 1, 28),
        Plane(0, VALUE, PlaneFormat.TQ_VALUE, (1, 64), 0, 1, 18),
        Plane(1, KEY, PlaneFormat.TQ3, (2, 24), 0, 1, 22),
    )
)
ROTATED_PAYLOAD = (ROTATED_KEY.ljust(64, b"\0") + ROTATED_VALUE.ljust(64, b"\0") + payload(22)).ljust(ROTATED_BYTES, b"\0")
ROTATED_SEGMENT = replace(
    SEGMENT,
    id=ids.segment_id(NAMESPACE, CLEAN, 0, coverage(ROTATED_PLANES), (), TOKENS[:1]),
    lineage=CLEAN,
    parent=ROOT,
    start=0,
    end=1,
    tokens=TOKENS[:1],
    attachments=(),
    planes=ROTATED_PLANES,
    digests=segment.payload_digests(ROTATED_PAYLOAD),
)


def container(header: segment.Header, body: bytes) -> bytes:
    """Head, padding and payload as they lie in a sealed memfd or an export file."""
    header = replace(header, digests=segment.payload_digests(body))
    head = segment.encode_head(header, len(body))
    return head.ljust(segment.align(len(head), segment.PAYLOAD_ALIGNMENT), b"\0") + body


_PACKED = pack_attachments(ATTACHMENTS)
_ANCHORS = pack_anchors(ANCHORS)
_SPANS = bytes(range(40)) * 2
#: One message of each kind; no field has the value an absent field would have.
MESSAGES: dict[str, m.Message] = {
    type(message).__name__: message
    for message in (
        m.Hello(1, 3, "golden client", 4242),
        m.Welcome(2, 2**64 - 1, "golden server", 2**32 - 1, OWNER_UID),
        m.Open(IDENTITY.canonical(), SHARE),
        m.Opened(NAMESPACE),
        m.Match(NAMESPACE, LINEAGE, TOKENS, _PACKED, m.AT_ANCHOR, True, True, 812.5),
        m.Matched(
            7, 5, m.TIER_COLD, 2, 2**40, 1234, _ANCHORS, 7, 49152, 2**32 - 1, "différent", 99, bytes(range(32)), "rope,tokenizer"
        ),
        m.Acquire(NAMESPACE, LINEAGE, TOKENS, _PACKED, m.AT_ANCHOR, 6, True, 812.5, 30_000),
        m.Acquired(
            7, 5, m.TIER_WARM, 2, 2**40, 1234, _ANCHORS, 7, 49152, 2**32 - 1, "none", 99, bytes(range(32)), "rope",
            11, 2**33, _SPANS, 12, 2500,
        ),
        m.Prefetch(NAMESPACE, LINEAGE, TOKENS, _PACKED, m.AT_ANCHOR),
        m.Release(np.array([1, 2**64 - 1, 3], dtype="<u8")),
        m.Offer(NAMESPACE, LINEAGE, TOKENS, _PACKED, bytes(range(48)), 46080, 512, 3),
        m.Offered(5, PARENT, 17, 2**35, 99, bytes(range(24)), ID, 9),
        m.Commit(NAMESPACE, 99, 17, m.ACK_DISK, _ANCHORS, True, 2**40),
        m.Annotate(NAMESPACE, LINEAGE, TOKENS, _PACKED, m.ACK_DISK, _ANCHORS, 17, True, 9),
        m.Committed(ID, 8, 2**34, True, True),
        m.Pin(NAMESPACE, LINEAGE, TOKENS, _PACKED, 60_000),
        m.Pinned(5),
        m.Forget(NAMESPACE, LINEAGE, TOKENS, _PACKED),
        m.Clear(NAMESPACE, True),
        m.Forgotten(3, 2**36),
        m.Report("stats", b'{"reset": true}'),
        m.Document(b'{"hits": 1}'),
        m.Fault(304, "voll", True),
    )
}  # fmt: skip

USAGE = lmdb_records.Usage(2**40, 12, CREATED_NS)
SUMMARY = summary.Summary(
    bytes(range(0x40, 0x50)), NAMESPACE, LINEAGE, PARENT, 3, 8, 2**40, 2**39, CREATED_NS, "écrit", 3, 812, ((3, 8), (5, 8)),
    (bytes(range(16)),), ATTACHMENTS[1:],
)  # fmt: skip
NAMESPACE_RECORD = lmdb_records.NamespaceRecord(OWNER_UID, SHARE, IDENTITY, CREATED_NS)


def golden_ids() -> dict[str, str]:
    """Every kind of digest that names something, in hexadecimal."""
    print_ = ids.fingerprint(IDENTITY)
    return {
        "fingerprint": print_.hex(),
        "namespace_of_uid": ids.namespace_key(OWNER_UID, "", print_).hex(),
        "namespace_of_share": ids.namespace_key(OWNER_UID, SHARE, print_).hex(),
        "lineage": ids.lineage_after(CLEAN, "evict", 3, "kept").hex(),
        "segment": SEGMENT.id.hex(),
        "state": STATE.id.hex(),
    }


def error_table() -> dict[str, list[object]]:
    """Code to class name and whether the call may be repeated."""
    return {str(code): [cls.__name__, cls.retryable] for code, cls in sorted(errors.BY_CODE.items())}


def golden_bytes() -> dict[str, bytes]:
    """File name to content of the binary golden files."""
    files = {
        "identity.bin": IDENTITY.canonical(),
        "identity_rotated.bin": ROTATED_IDENTITY.canonical(),
        "segment_rotated.bin": container(ROTATED_SEGMENT, ROTATED_PAYLOAD),
        "segment.bin": container(SEGMENT, payload(PAYLOAD_BYTES)),
        "state_head.bin": segment.encode_head(STATE, STATE_PAYLOAD_BYTES),
        "lmdb_usage.bin": lmdb_records.encode_usage(USAGE),
        "lmdb_namespace.bin": lmdb_records.encode_namespace(NAMESPACE_RECORD),
        "lmdb_anchor.bin": lmdb_records.encode_anchor(ANCHOR),
        "lmdb_format.bin": lmdb_records.encode_format(),
        "lmdb_summary.bin": summary.encode(ID, SUMMARY),
        "lmdb_chunk_key.bin": lmdb_records.chunk_key(ID, 0x01020304),
        "lmdb_anchor_key.bin": lmdb_records.anchor_key(ID, ANCHOR),
    }
    for name, message in MESSAGES.items():
        files[f"wire_{name.lower()}.bin"] = m.encode(message, REQUEST_ID)
    return files


def main() -> int:
    for name, data in golden_bytes().items():
        (HERE / name).write_bytes(data)
    for name, table in (("ids.json", golden_ids()), ("errors.json", error_table())):
        (HERE / name).write_text(json.dumps(table, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
