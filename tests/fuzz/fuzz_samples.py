"""Valid samples of everything that is read from peers, files and disks: what mutation starts from."""

from __future__ import annotations

import struct
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np

from warmkv.kernels.dispatch import REFERENCE
from warmkv.kvstore import memfd
from warmkv.kvstore.containers import Container, PlaneSource, write_segment, write_state
from warmkv.kvstore.live import wire
from warmkv.kvstore.live.layers.attention import AttentionLayer
from warmkv.kvstore.live.layers.bounded import BoundedLayer
from warmkv.kvstore.live.layers.recurrent import RecurrentLayer
from warmkv.kvstore.live.model import Layer, make_layer
from warmkv.kvstore.live.plan import LayerPlan, RingPlan
from warmkv.kvstore.rows import PlaneRows
from warmkv.kvstore.testing.samples import (
    CONV,
    FULL,
    IMAGE,
    OPAQUE,
    RECURRENT,
    TOKENS,
    chunked,
    hybrid,
    mixed_identity,
    model_logits,
    model_rows,
    model_states,
    random_identity,
    shared,
    sink_window,
    sliding,
)  # fmt: skip
from warmkv.schema import frame, ids, kvcache_file, pack_file, segment, summary
from warmkv.schema import messages as m
from warmkv.schema.identity import Identity, LayerKind, LayerSpec, PlaneFormat, PlaneRole, PlaneSpec, with_rotation
from warmkv.schema.records import CLEAN, ROOT, Anchor, AnchorKind, Attachment, NamespaceKey, RecordId, as_tokens

GOLDEN = Path(__file__).resolve().parent.parent / "golden"
if str(GOLDEN) not in sys.path:
    sys.path.append(str(GOLDEN))

import make_golden  # noqa: E402

UID = 4242
PLAIN = random_identity(layers=2, heads=1, dim=4)
BLOCKS = random_identity(layers=1, heads=1, dim=32, format=PlaneFormat.Q8_0, seed=3)
MIXED = mixed_identity(FULL, sliding(4), RECURRENT, shared(0), CONV)
KINDS = mixed_identity(chunked(3), sink_window(2, 4), hybrid(), OPAQUE)
#: Models whose records the samples hold.
IDENTITIES = (PLAIN, BLOCKS, MIXED, KINDS, make_golden.IDENTITY)
IMAGES = (Attachment(3, 4, IMAGE),)
_ATTENTION = LayerPlan(LayerKind.FULL, heads=4, kv_heads=2, key_size=3, value_size=3, wire_identity=7)
#: Layers whose records the layer wire carries: whole, with a dead head, a window, a ring, a vector.
LIVE = (
    _ATTENTION, replace(_ATTENTION, alive=(False, True)), replace(_ATTENTION, kind=LayerKind.SLIDING, window=3),
    replace(_ATTENTION, kind=LayerKind.RING, ring=RingPlan(window=4)),
    LayerPlan(LayerKind.RECURRENT, kv_heads=1, key_size=3, state_size=5, wire_identity=7),
    replace(_ATTENTION, untagged_wire=False),
)  # fmt: skip


def key_of(identity: Identity) -> NamespaceKey:
    return ids.namespace_key(UID, "", ids.fingerprint(identity))


def read_and_close(made: Container) -> bytes:
    try:
        return memfd.read(made.fd, made.total_bytes, 0)
    finally:
        made.close()


def segment_of(
    identity: Identity, tokens: list[int], start: int, parent: RecordId = ROOT, attachments: tuple[Attachment, ...] = ()
) -> bytes:
    """A container of rows [start, len(tokens)) of all layers."""
    sources = []
    for record in model_rows(identity, tokens, attachments):
        shapes = {spec.role: spec.row_shape for spec in identity.layers[record.layer].row_planes}
        for plane in record.planes:
            sources.append(PlaneSource(record.layer, shapes[plane.role], start, replace(plane, rows=plane.rows[start:])))
    made = write_segment(key_of(identity), CLEAN, parent, start, as_tokens(tokens), attachments, sources)
    return read_and_close(made)


def state_of(identity: Identity, tokens: list[int], parent: RecordId, *, logits: bool = False) -> bytes:
    """A container of all states after ``tokens``, or of the logits parked there."""
    sources = []
    if logits:
        row = model_logits(identity, tokens).reshape(1, -1)
        sources.append(PlaneSource(len(identity.layers), row.shape[1:], 0, PlaneRows(PlaneRole.LOGITS, PlaneFormat.F32, row)))
    for state in () if logits else model_states(identity, tokens):
        shapes = {spec.role: spec.row_shape for spec in identity.layers[state.layer].state_planes}
        for plane in state.planes:
            shape = plane.rows.shape[1:] if plane.role == PlaneRole.BLOB else shapes[plane.role]
            sources.append(PlaneSource(state.layer, shape, 0, plane))
    return read_and_close(write_state(key_of(identity), CLEAN, parent, as_tokens(tokens), (), sources))


def id_of(container: bytes) -> RecordId:
    return segment.decode_head(container).header.id


def containers() -> list[bytes]:
    """Parents before children, each of them acceptable to a store."""
    made = []
    for identity in (PLAIN, MIXED, KINDS):
        root = segment_of(identity, TOKENS[:5], 0)
        made += [root, segment_of(identity, TOKENS, 5, id_of(root))]
        if identity is not PLAIN:
            made.append(state_of(identity, TOKENS, id_of(made[-1])))
    made.append(state_of(PLAIN, TOKENS, id_of(made[1]), logits=True))
    made.append(segment_of(PLAIN, TOKENS, 0, attachments=IMAGES))
    made.append(segment_of(BLOCKS, TOKENS[:3], 0))
    return made


def heads() -> list[bytes]:
    made = [data[: segment.decode_head(data).head_bytes] for data in containers()]
    return [
        *made,
        segment.encode_head(make_golden.SEGMENT, make_golden.PAYLOAD_BYTES),
        make_golden.golden_bytes()["state_head.bin"],
    ]


def messages() -> list[bytes]:
    """One body of each kind."""
    return [data for name, data in make_golden.golden_bytes().items() if name.startswith("wire_")]


def requests() -> list[bytes]:
    """Bodies of all requests that need no descriptor, about models and prompts a store holds."""
    made: list[m.Message] = []
    for identity in (PLAIN, MIXED):
        about = (key_of(identity), CLEAN, as_tokens([*TOKENS, 1]), b"")
        made += [
            m.Open(identity.canonical()), m.Match(*about, m.AT_LONGEST, True, True, 1e5), m.Prefetch(*about),
            m.Acquire(*about, m.AT_ANCHOR, 6, True, 1e9), m.Offer(*about, bytes(16), 64, 8192, 3), m.Pin(*about, 60_000),
            m.Annotate(*about, m.ACK_MEMORY, make_golden.MESSAGES["Commit"].anchors, 0, True, 1),  # type: ignore[union-attr]
            m.Release(np.array([1, 2, 2**64 - 1], "<u8")), m.Report("ls", b'{"namespace": "ab"}'),
        ]  # fmt: skip
    made += [m.Forget(key_of(BLOCKS), CLEAN, as_tokens(TOKENS[:3])), m.Clear(key_of(KINDS)), m.Clear(b"", True)]
    return [m.encode(message, 7) for message in made]


def frames() -> list[bytes]:
    """What a socket gets: the first byte says with how many descriptors, the second where the
    stream is torn in two."""
    bodies = [data for data in messages() if len(data) < 300]
    framed = [frame.frame(body) for body in bodies]
    torn = [bytes([number % 4, 40 * number % 256]) + data for number, data in enumerate(framed)]
    announced = [b"\1\3" + struct.pack("<I", length) + bytes(20) for length in (0, 15, 16, 2**31, 2**32 - 1, 1 << 20)]
    return [*torn, b"\2\5" + b"".join(framed[:5]), *announced]


def _kvcache_model() -> Identity:
    """Rows of f32, rows of f16, a convolution, and a pair of TurboQuant; heads of 8 channels."""
    sides = (PlaneRole.KEY, PlaneRole.VALUE)
    formats = [(PlaneFormat.F32,) * 2, (PlaneFormat.F16,) * 2, (PlaneFormat.TQ_KEY, PlaneFormat.TQ_VALUE)]
    seeds = ("none", "none", with_rotation(7))
    rows = [
        LayerSpec(LayerKind.FULL, tuple(PlaneSpec(*one, (2, 8), seed) for one in zip(sides, pair, strict=True)))
        for pair, seed in zip(formats, seeds, strict=True)
    ]
    conv = LayerSpec(LayerKind.CONV, (PlaneSpec(PlaneRole.CONV, PlaneFormat.F32, (1, 5)),))
    return mixed_identity(rows[0], rows[1], conv, rows[2])


#: What `kvcaches` are read as.
KVCACHE_MODEL = _kvcache_model()


def kvcaches() -> list[bytes]:
    """Files of another program: attention of both widths, a convolution, a TurboQuant pair."""
    tokens, rows = as_tokens(TOKENS[:3]), np.arange(3 * 64, dtype="u1")
    attention = kvcache_file.KvLayer(kvcache_file.Tag.ATTENTION, rows, rows[::-1].copy())
    narrow = kvcache_file.KvLayer(kvcache_file.Tag.ATTENTION_F16, rows[:96], rows[96:])
    convolution = kvcache_file.KvLayer(kvcache_file.Tag.CONV, rows[:20], rows[:0])
    heads = ((b"TQK1", 42), (b"TQV1", 24))
    blobs = (np.frombuffer(magic + struct.pack("<3I", 2, 8, 3) + bytes(range(size)), "u1") for magic, size in heads)
    pair = kvcache_file.KvLayer(kvcache_file.Tag.TURBOQUANT, *blobs)
    files = (
        kvcache_file.KvFile(1, tokens, (attention, narrow, convolution, pair)),
        kvcache_file.KvFile(2**64 - 1, tokens, (attention, narrow, convolution, pair), 2, AnchorKind.TOOL_CALL, 2**63, 5),
    )
    return [kvcache_file.encode(file) for file in files]


def tables() -> list[bytes]:
    """What is said of the model of such files."""
    about = 'model_id = "cpu:tq3kv-s7:m"\narchitecture = "a"\nhidden_size = 16\nn_heads = 2\n'
    return [(about + line).encode() for line in ('namespace = "abcd01"\n', 'identity = "m.identity"\n')]


def packs() -> list[bytes]:
    """Whole packs, each of one model: its segments, states and anchors."""
    made = []
    for identity in (PLAIN, MIXED):
        data, out = [item for item in containers() if key_of(identity) in item], bytearray()
        writer = pack_file.PackWriter(lambda piece, at, out=out: out.extend(piece), identity.canonical(), 5)  # type: ignore[misc]
        for number, item in enumerate(data):
            anchors = (Anchor(number + 1, AnchorKind.TURN),) if number < 2 else ()
            writer.record(anchors, len(item), lambda take, item=item: take(item))  # type: ignore[misc]
        writer.finish()
        made.append(bytes(out))
    return made


def values() -> list[bytes]:
    """Values of the cold tier's tables, the kind of value in the first byte."""
    golden = make_golden.golden_bytes()
    names = ("lmdb_usage", "lmdb_namespace", "lmdb_anchor", "lmdb_format", "lmdb_chunk_key")
    made = [bytes([number]) + golden[f"{name}.bin"] for number, name in enumerate(names)]
    about = (NamespaceKey(b"n" * 16), CLEAN, ROOT, 3, 9, 8192, 4096, 5, "writer")
    plain = summary.Summary(b"h" * 16, *about, 0, 120, ((3, 9), (5, 9)), (b"f" * 16,), IMAGES)
    return [*made, b"\5" + ROOT + summary.encode(ROOT, plain), b"\5" + ROOT + summary.encode(ROOT, plain._replace(extents=()))]


def live_layer(number: int, rows: int) -> Layer:
    """The layer of a plan after so many positions."""
    layer = make_layer(LIVE[number], 0, REFERENCE, 1)
    numbers = np.random.default_rng(number)
    for _ in range(rows):
        row = numbers.standard_normal((2, 2, 3)).astype(np.float32)
        if isinstance(layer, AttentionLayer):
            layer.append(row[:1], row[1:])
            layer.trim_window()
        elif isinstance(layer, BoundedLayer):
            layer.step(np.ones((4, 3), np.float32), row[0], row[1])
        elif isinstance(layer, RecurrentLayer):
            layer.update(row.reshape(-1)[:5])
    return layer


def layer_records() -> list[bytes]:
    """Records of the layer wire, the number of their plan in the first byte: both widths, and without
    the header."""
    made = []
    for number in range(len(LIVE)):
        for rows in (0, 2, 9):
            layer = live_layer(number, rows)
            whole, half = wire.export_layer(layer), wire.export_layer(layer, f16=True)
            made += [bytes([number]) + data for data in (whole, half)]
            if number < 2:
                made.append(bytes([number]) + whole[32:])
    return made


def identities() -> list[bytes]:
    return [identity.canonical() for identity in IDENTITIES]


def configurations() -> list[bytes]:
    return [
        b'warm_bytes = "2GiB"\ncold_bytes = "auto"\nlog_level = "debug"\npolicy = "lru"\n',
        b'socket = "/run/x/s"\nstore = "~/store"\nframe_timeout_s = 1.5\nmax_connections = 12\nanchors = 3\n',
        b"allow_uids = [0, 1000]\nallow_gids = \"0, 5\"\nuid_share = 0.25\nhigh_watermark = 0.9\nlow_watermark = 0.8\n",
        b'[shares.team]\nreaders = [1, 2]\nwriters = ["root"]\n[shares."other one"]\nreaders = []\n',
        b'spool = ""\npressure = false\ncopy_foreign = "on"\nscrub_interval_s = 0\nttl_s = "86400"\nmax_tokens = 1_000_000\n',
        b'cold_bytes = "1.5 TiB"\nsocket_gid = "root"\nfd_store_bytes = 0x1000\nwatch_interval_s = 1e3\n',
        b'warm_bytes = "99999999999999999999999.5 TiB"\nttl_s = 12345678901234567890\nanchors = 0xFFFFFFFFFFFFFFFFFFFF\n',
        b"spool = '~root/x'\nallow_uids = [[[[[[[[[[[[[[[[1]]]]]]]]]]]]]]]]\n",
        b"# nothing\n", b"a = [[[1]], {b = {c = 1979-05-27T07:32:00Z}}]\nx.y.z = '''\nlong'''\n",
    ]  # fmt: skip


def arguments() -> list[bytes]:
    """Arguments of reports, the verb in the first byte."""
    texts = (
        b"{}", b'{"namespace": ""}', b'{"namespace": "%s"}' % key_of(PLAIN).hex().encode(), b'{"id": "%s"}',
        b'{"id": "%s"}' % id_of(containers()[0]).hex().encode(), b'{"id": [1, {"a": null}], "x": 1e308}', b"[]", b"null",
        b'{"limit": -1, "offset": 9223372036854775808, "all": true}', b'{"dry_run": true, "to_bytes": "1GiB", "tier": "warm"}',
    )  # fmt: skip
    return [bytes([number]) + text for number, text in enumerate(texts)]
