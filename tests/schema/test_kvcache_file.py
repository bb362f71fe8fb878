"""cera's `.kvcache` files: bytes put together by hand from the description are read as they must
be, and nothing that is not one."""

from __future__ import annotations

import struct
from dataclasses import replace

import flatbuffers
import numpy as np
import pytest

from warmkv.schema import kvcache_file as kv
from warmkv.schema.errors import FormatError, TooNewError, WarmKVError
from warmkv.schema.kvcache_file import KvFile, KvLayer, Tag
from warmkv.schema.records import Anchor, AnchorKind


def octets(data: bytes) -> kv.Octets:
    return np.frombuffer(data, np.uint8)


def blob(magic: bytes, heads: int, channels: int, rows: int, size: int, fill: int) -> kv.Octets:
    """A TurboQuant blob with a body of any bytes."""
    body = bytes((fill + 7 * at) % 251 for at in range(size))
    return octets(magic + struct.pack("<3I", heads, channels, rows) + body)


NONE = octets(b"")
TOKENS = np.array([100, 101, 2**32 - 1], "<u4")
LAYERS = (
    KvLayer(Tag.ATTENTION, octets(bytes(range(24))), octets(bytes(range(100, 124)))),
    KvLayer(Tag.CONV, octets(bytes(range(200, 208))), NONE),
    KvLayer(Tag.ATTENTION_F16, octets(bytes(12)), octets(bytes(range(12)))),
    KvLayer(Tag.TURBOQUANT, blob(b"TQK1", 2, 8, 3, 2 * 3 * 7, 1), blob(b"TQV1", 2, 8, 3, 2 * 3 * 4, 2)),
)
FILE = KvFile(0x1122334455667788, TOKENS, LAYERS, 2, AnchorKind.TOOL_CALL, 0xDEADBEEF, 0)


class Table:
    """FlatBuffers by hand, front to back: a table with its vtable, vectors behind it."""

    def __init__(self) -> None:
        self.data = bytearray(4)

    def place(self, data: bytes, alignment: int = 4) -> int:
        self.data += bytes(-len(self.data) % alignment)
        self.data += data
        return len(self.data) - len(data)

    def vector(self, count: int, items: bytes) -> int:
        return self.place(struct.pack("<I", count) + items)

    def table(self, fields: list[tuple[int, bytes | None]]) -> tuple[int, dict[int, int]]:
        """A table of (size, value) fields, None for one to be linked later; where it and they are."""
        self.data += bytes(-len(self.data) % 8)
        vtable, at = len(self.data), 4
        offsets, body = [], b""
        for size, value in fields:
            body += bytes(-(at + len(body)) % max(1, size))
            offsets.append(at + len(body) if size else 0)
            body += (bytes(size) if value is None else value) if size else b""
        entries = struct.pack(f"<HH{len(fields)}H", 4 + 2 * len(fields), 4 + len(body), *offsets)
        self.place(entries, 8)
        start = self.place(bytes(4) + body, 8)
        struct.pack_into("<i", self.data, start, start - vtable)
        return start, {number: start + offset for number, offset in enumerate(offsets) if offset}

    def link(self, at: int, target: int) -> None:
        struct.pack_into("<I", self.data, at, target - at)


def by_hand(
    file: KvFile = FILE, *, version: bytes = struct.pack("<I", 2), seq_len: int | None = None, tags: dict[int, int] | None = None
) -> bytes:
    """The bytes of a file, made without the library."""
    made = Table()
    fields: list[tuple[int, bytes | None]] = [
        (8, struct.pack("<Q", file.fingerprint)), (4, struct.pack("<I", len(file.tokens) if seq_len is None else seq_len)),
        (4, None), (4, None), (len(version), version), (4, struct.pack("<I", file.anchor_depth)),
        (1, bytes([file.boundary_kind])), (8, struct.pack("<Q", file.semantic_hash)), (4, struct.pack("<I", file.shift_offset)),
    ]  # fmt: skip
    root, at = made.table(fields)
    made.link(0, root)
    made.link(at[2], made.vector(len(file.tokens), file.tokens.tobytes()))
    listed = made.vector(len(file.layers), bytes(4 * len(file.layers)))
    made.link(at[3], listed)
    for number, layer in enumerate(file.layers):
        tag = (tags or {}).get(number, int(layer.tag))
        conv = layer.tag == Tag.CONV
        table, inside = made.table([(1, bytes([tag])), (4, None), (0 if conv else 4, None)])
        made.link(listed + 4 + 4 * number, table)
        made.link(inside[1], made.vector(layer.keys.size, layer.keys.tobytes()))
        if not conv:
            made.link(inside[2], made.vector(layer.values.size, layer.values.tobytes()))
    return bytes(made.data)


def same(one: KvFile, other: KvFile) -> bool:
    head = [
        (f.fingerprint, f.tokens.tolist(), f.anchor_depth, f.boundary_kind, f.semantic_hash, f.shift_offset) for f in (one, other)
    ]
    layers = [[(item.tag, item.keys.tobytes(), item.values.tobytes()) for item in f.layers] for f in (one, other)]
    return head[0] == head[1] and layers[0] == layers[1]


def test_bytes_made_by_hand_are_read() -> None:
    assert same(kv.decode(by_hand()), FILE)


@pytest.mark.parametrize("width", [1, 2, 4, 8])
def test_the_version_may_have_any_width(width: int) -> None:
    assert same(kv.decode(by_hand(version=(2).to_bytes(width, "little"))), FILE)


def test_what_is_written_is_read_by_hand_and_by_us() -> None:
    raw = kv.encode(FILE)
    assert same(kv.decode(raw), FILE)
    (root,) = struct.unpack_from("<I", raw)
    vtable = root - struct.unpack_from("<i", raw, root)[0]
    (size,) = struct.unpack_from("<H", raw, vtable)
    offsets = struct.unpack_from(f"<{(size - 4) // 2}H", raw, vtable + 4)
    assert struct.unpack_from("<Q", raw, root + offsets[0])[0] == FILE.fingerprint
    assert struct.unpack_from("<I", raw, root + offsets[1])[0] == 3
    tokens = root + offsets[2] + struct.unpack_from("<I", raw, root + offsets[2])[0]
    assert struct.unpack_from("<4I", raw, tokens) == (3, 100, 101, 2**32 - 1)
    assert [struct.unpack_from("<I", raw, root + offsets[number])[0] for number in (4, 5)] == [2, 2]
    assert raw[root + offsets[6]] == 2 and struct.unpack_from("<Q", raw, root + offsets[7])[0] == 0xDEADBEEF


def as_its_home_writes_it(file: KvFile) -> bytes:
    """The bytes of a file through the FlatBuffers runtime alone, in the order of the generated constructor:
    vectors first, then the fields of a table by width, those declared last first."""
    builder = flatbuffers.Builder(16)
    tables = []
    for item in file.layers:
        keys = builder.CreateByteVector(item.keys.tobytes())
        values = None if item.tag == Tag.CONV else builder.CreateByteVector(item.values.tobytes())
        builder.StartObject(3)
        if values is not None:
            builder.PrependUOffsetTRelativeSlot(2, values, 0)
        builder.PrependUOffsetTRelativeSlot(1, keys, 0)
        builder.PrependUint8Slot(0, int(item.tag), 0)
        tables.append(builder.EndObject())
    builder.StartVector(4, len(tables), 4)
    for table in reversed(tables):
        builder.PrependUOffsetTRelative(table)
    layers = builder.EndVector()
    builder.StartVector(4, len(file.tokens), 4)
    for token in reversed(file.tokens.tolist()):
        builder.PrependUint32(token)
    tokens = builder.EndVector()
    builder.StartObject(9)
    builder.PrependUint64Slot(7, file.semantic_hash, 0)
    builder.PrependUint64Slot(0, file.fingerprint, 0)
    builder.PrependUint32Slot(8, file.shift_offset, 0)
    builder.PrependUint32Slot(5, file.anchor_depth, 0)
    builder.PrependUint32Slot(4, 2, 0)
    builder.PrependUOffsetTRelativeSlot(3, layers, 0)
    builder.PrependUOffsetTRelativeSlot(2, tokens, 0)
    builder.PrependUint32Slot(1, len(file.tokens), 0)
    builder.PrependUint8Slot(6, int(file.boundary_kind), 0)
    builder.Finish(builder.EndObject())
    return bytes(builder.Output())


@pytest.mark.parametrize(
    "file",
    [
        FILE,
        replace(FILE, shift_offset=9),
        KvFile(1, TOKENS, LAYERS[1:2]),
        KvFile(2**64 - 1, TOKENS, LAYERS[3:], 0, AnchorKind.TURN),
    ],
)  # fmt: skip
def test_files_are_written_byte_for_byte_as_their_home_writes_them(file: KvFile) -> None:
    assert kv.encode(file) == as_its_home_writes_it(file)
    assert same(kv.decode(as_its_home_writes_it(file)), file)


def test_the_golden_blobs_of_one_row_are_read() -> None:
    """Seed 42, layer 0, k_i = (i + 1) / 100, 64 channels."""
    codes = "6a6dd229e20558d485916f9d19aba53b"
    keys = octets(bytes.fromhex("54514b31010000004000000001000000" + codes + "ad01b52170b6bda8" + "fb415b35"))
    values = octets(bytes.fromhex("54515631010000004000000001000000" + codes + "fb41"))
    file = KvFile(3, TOKENS[:1], (KvLayer(Tag.TURBOQUANT, keys, values),))
    assert same(kv.decode(kv.encode(file)), file) and same(kv.decode(by_hand(file)), file)


@pytest.mark.parametrize(
    ("side", "bad", "words"),
    [
        (0, blob(b"TQV1", 2, 8, 3, 42, 0), "begin with b'TQV1', expected b'TQK1'"),
        (1, blob(b"TQK1", 2, 8, 3, 24, 0), "begin with b'TQK1'"),
        (0, blob(b"TQK1", 0, 8, 3, 0, 0), "0 heads"),
        (0, blob(b"TQK1", 2, 0, 3, 24, 0), "0 channels"),
        (0, blob(b"TQK1", 2, 4, 3, 33, 0), "4 channels"),
        (1, blob(b"TQV1", 2, 4, 3, 18, 0), "4 channels"),
        (0, blob(b"TQK1", 2, 8, 2, 28, 0), "2 rows"),
        (0, blob(b"TQK1", 2, 8, 3, 41, 0), "57 bytes"),
        (0, blob(b"TQK1", 2, 8, 3, 43, 0), "59 bytes"),
        (1, blob(b"TQV1", 2**32 - 1, 2**32 - 8, 3, 24, 0), "take"),
        (0, octets(b"TQK1\0\0\0\0"), "8 bytes"),
        (1, NONE, "0 bytes"),
    ],
)
def test_turboquant_pairs_that_are_none_are_refused(side: int, bad: kv.Octets, words: str) -> None:
    pair = [LAYERS[3].keys, LAYERS[3].values]
    pair[side] = bad
    with pytest.raises(FormatError, match=f"layer 0, TurboQuant {('keys', 'values')[side]}.*{words}"):
        kv.decode(by_hand(replace(FILE, layers=(KvLayer(Tag.TURBOQUANT, *pair),))))


def test_a_zero_shift_and_no_anchor_are_left_out_and_read_as_zero() -> None:
    plain = KvFile(1, TOKENS, LAYERS)
    assert same(kv.decode(kv.encode(plain)), plain) and kv.decode(kv.encode(plain)).anchor is None
    assert kv.decode(by_hand()).anchor == Anchor(3, AnchorKind.TOOL_CALL, 2, 0xDEADBEEF)


# -- hashes ------------------------------------------------------------------------------------


def test_fnv1a_is_the_published_one() -> None:
    """Vectors of the authors of the hash."""
    assert [kv.fnv1a(data) for data in (b"", b"a", b"foobar")] == [0xCBF29CE484222325, 0xAF63DC4C8601EC8C, 0x85944171F73967E8]


def test_the_known_collision_of_token_hashes() -> None:
    trap = np.array([1404660693, 906528578], "<u4")
    assert kv.token_hash(trap) == 0 == kv.token_hash(np.array([*trap, 0], "<u4"))
    assert kv.token_hash(trap[::-1]) == kv.token_hash(np.array([906528578, 1404660693], ">u4")) != 0


def test_the_fingerprint_is_over_the_bytes_described() -> None:
    data = b"cpu:f16:m\0lfm2\0" + struct.pack("<QQQ", 3, 64, 4) + b"\0\1\0" + struct.pack("<QQQ", 2, 0, 2)
    assert kv.model_fingerprint("cpu:f16:m", "lfm2", 64, 4, [False, True, False], [2, 0, 2]) == kv.fnv1a(data)
    assert kv.file_name(0xAB, TOKENS) == f"00000000000000ab_{kv.token_hash(TOKENS):016x}.kvcache"


# -- what is none ------------------------------------------------------------------------------


def test_versions() -> None:
    for version in (0, 1):
        with pytest.raises(FormatError, match=f"version {version}, expected 2"):
            kv.decode(by_hand(version=bytes([version])))
    with pytest.raises(TooNewError):
        kv.decode(by_hand(version=b"\3\0\0\0"))


def layer(tag: Tag, keys: int, values: int) -> KvLayer:
    return KvLayer(tag, octets(bytes(keys)), octets(bytes(values)))


@pytest.mark.parametrize(
    "bad",
    [
        layer(Tag.ATTENTION, 0, 12), layer(Tag.ATTENTION, 12, 0), layer(Tag.ATTENTION, 13, 12), layer(Tag.ATTENTION, 12, 14),
        layer(Tag.ATTENTION_F16, 8, 12), layer(Tag.CONV, 0, 0), layer(Tag.CONV, 6, 0),
    ],
)  # fmt: skip
def test_bytes_that_are_no_rows_of_the_tokens_are_refused(bad: KvLayer) -> None:
    with pytest.raises(FormatError, match="layer 0"):
        kv.decode(by_hand(replace(FILE, layers=(bad,))))


@pytest.mark.parametrize(
    "change", [{"seq_len": 2}, {"seq_len": 2**32 - 1}, {"tags": {0: 4}}, {"tags": {2: 255}}, {"tags": {0: 1}}]
)
def test_fields_that_contradict_each_other_are_refused(change: dict[str, object]) -> None:
    with pytest.raises(FormatError):
        kv.decode(by_hand(**change))  # type: ignore[arg-type]


def test_files_without_tokens_or_layers_are_refused() -> None:
    for bad in (replace(FILE, layers=()), replace(FILE, tokens=np.zeros(0, "<u4")), replace(FILE, layers=LAYERS[:1] * 4097)):
        with pytest.raises(FormatError):
            kv.decode(by_hand(bad))
    for size in (0, 4, 15):
        with pytest.raises(FormatError):
            kv.decode(bytes(size))


def test_layers_that_lie_upon_each_other_do_not_multiply() -> None:
    """A small file whose layers all are the same table would cost many times its size."""
    made = Table()
    root, at = made.table([(8, bytes(8)), (4, struct.pack("<I", 3)), (4, None), (4, None), (4, struct.pack("<I", 2))])
    made.link(0, root)
    made.link(at[2], made.vector(3, TOKENS.tobytes()))
    listed = made.vector(40, bytes(160))
    made.link(at[3], listed)
    table, inside = made.table([(1, b"\0"), (4, None), (4, None)])
    for number in range(1, 3):
        made.link(inside[number], made.vector(1200, bytes(1200)))
    for number in range(40):
        made.link(listed + 4 + 4 * number, table)
    with pytest.raises(FormatError, match="96000 bytes of layers in a file of"):
        kv.decode(bytes(made.data))


def test_every_cut_is_refused_or_read_the_same() -> None:
    """There is no digest: what is behind the last byte that counts may go."""
    for raw in (by_hand(), kv.encode(FILE)):
        for end in range(len(raw)):
            try:
                assert same(kv.decode(raw[:end]), FILE)
            except WarmKVError:
                continue


def test_every_flipped_byte_is_refused_or_read_within_bounds() -> None:
    for raw in (by_hand(), kv.encode(FILE)):
        for at in range(len(raw)):
            for flip in (0x01, 0x80, 0xFF):
                bad = bytearray(raw)
                bad[at] ^= flip
                try:
                    found = kv.decode(bytes(bad))
                except WarmKVError:
                    continue
                assert sum(item.keys.nbytes + item.values.nbytes for item in found.layers) <= len(raw)
