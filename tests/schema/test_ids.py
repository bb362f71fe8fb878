"""Ids: recomputed with hashlib by hand, sensitive to each ingredient, the same everywhere."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import struct
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from make_golden import (
    ATTACHMENTS,
    IDENTITY,
    LINEAGE,
    NAMESPACE,
    OWNER_UID,
    PLANES,
    SEGMENT,
    SHARE,
    STATE,
    STATE_PLANES,
    TOKENS,
    golden_ids,
)

from warmkv.schema import ids
from warmkv.schema.errors import RecordError
from warmkv.schema.records import CLEAN, Attachment, Lineage, NamespaceKey, coverage, pack_attachments

GOLDEN = Path(__file__).resolve().parent.parent / "golden"


def text(value: str) -> bytes:
    return struct.pack("<BI", 4, len(value.encode())) + value.encode()


def octets(value: bytes) -> bytes:
    return struct.pack("<BI", 5, len(value)) + value


def integer(value: int) -> bytes:
    return struct.pack("<BIq", 2, 8, value)


def listed(*items: bytes) -> bytes:
    body = b"".join(items)
    return struct.pack("<BI", 6, len(body)) + body


def blake(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=16).digest()


def test_golden_ids() -> None:
    assert golden_ids() == json.loads((GOLDEN / "ids.json").read_text())


def test_golden_ids_by_hand() -> None:
    golden = {name: bytes.fromhex(value) for name, value in json.loads((GOLDEN / "ids.json").read_text()).items()}
    print_ = blake((GOLDEN / "identity.bin").read_bytes())
    assert golden["fingerprint"] == print_
    owner = listed(text("uid"), integer(OWNER_UID))
    assert golden["namespace_of_uid"] == blake(listed(text("namespace"), owner, octets(print_)))
    share = listed(text("share"), text(SHARE))
    assert golden["namespace_of_share"] == blake(listed(text("namespace"), share, octets(print_)))
    parameters = listed(integer(3), text("kept"))
    assert golden["lineage"] == blake(listed(text("lineage"), octets(bytes(16)), text("evict"), parameters))

    packed = b"".join(struct.pack("<QQ32s", item.start, item.length, item.digest) for item in ATTACHMENTS)
    tokens = struct.pack(f"<{len(TOKENS)}I", *TOKENS.tolist())
    rows = (octets(coverage(PLANES)), octets(packed))
    head = listed(text("segment"), octets(NAMESPACE), octets(LINEAGE), integer(3), integer(8), *rows)
    assert golden["segment"] == blake(head + tokens)
    at = (octets(coverage(STATE_PLANES)), octets(packed))
    head = listed(text("state"), octets(NAMESPACE), octets(bytes(16)), integer(8), *at)
    assert golden["state"] == blake(head + tokens)


def test_every_ingredient_of_an_id_counts() -> None:
    other, cover = bytes(15) + b"\1", coverage(PLANES)
    moved = (Attachment(2, 2, ATTACHMENTS[0].digest), ATTACHMENTS[1])
    changed = (replace(ATTACHMENTS[0], digest=bytes(32)), ATTACHMENTS[1])
    first, last = TOKENS.copy(), TOKENS.copy()
    first[0], last[-1] = 1, 1
    ids_ = [
        ids.segment_id(NAMESPACE, LINEAGE, 3, cover, ATTACHMENTS, TOKENS),
        ids.segment_id(NamespaceKey(other), LINEAGE, 3, cover, ATTACHMENTS, TOKENS),
        ids.segment_id(NAMESPACE, Lineage(other), 3, cover, ATTACHMENTS, TOKENS),
        ids.segment_id(NAMESPACE, CLEAN, 3, cover, ATTACHMENTS, TOKENS),
        ids.segment_id(NAMESPACE, LINEAGE, 2, cover, ATTACHMENTS, TOKENS),
        ids.segment_id(NAMESPACE, LINEAGE, 3, cover[:-1] + b"\1", ATTACHMENTS, TOKENS),
        ids.segment_id(NAMESPACE, LINEAGE, 3, b"", ATTACHMENTS, TOKENS),
        ids.segment_id(NAMESPACE, LINEAGE, 3, cover, ATTACHMENTS[:1], TOKENS),
        ids.segment_id(NAMESPACE, LINEAGE, 3, cover, (), TOKENS),
        ids.segment_id(NAMESPACE, LINEAGE, 3, cover, moved, TOKENS),
        ids.segment_id(NAMESPACE, LINEAGE, 3, cover, changed, TOKENS),
        ids.segment_id(NAMESPACE, LINEAGE, 3, cover, ATTACHMENTS, TOKENS[:-1]),
        ids.segment_id(NAMESPACE, LINEAGE, 3, cover, ATTACHMENTS, first),
        ids.segment_id(NAMESPACE, LINEAGE, 3, cover, ATTACHMENTS, last),
        ids.state_id(NAMESPACE, LINEAGE, cover, ATTACHMENTS, TOKENS),
        ids.state_id(NAMESPACE, CLEAN, cover, ATTACHMENTS, TOKENS),
        ids.state_id(NAMESPACE, LINEAGE, b"", ATTACHMENTS, TOKENS),
        ids.state_id(NAMESPACE, LINEAGE, cover, (), TOKENS),
        ids.state_id(NAMESPACE, LINEAGE, cover, ATTACHMENTS, TOKENS[:-1]),
        ids.state_id(NAMESPACE, LINEAGE, cover, ATTACHMENTS, last),
        ids.state_id(NAMESPACE, LINEAGE, cover, ATTACHMENTS, np.zeros(0, "<u4")),
    ]
    assert all(len(id_) == 16 for id_ in ids_)
    for (index, one), (other_index, two) in itertools.combinations(enumerate(ids_), 2):
        assert one != two, f"ids {index} and {other_index} are equal"


def test_bytes_cannot_wander_from_one_ingredient_to_the_next() -> None:
    """Coverage, attachments and tokens are separated by lengths, not by luck."""
    packed, tokens = pack_attachments(ATTACHMENTS), np.frombuffer(bytes(48), "<u4")
    seen = {
        ids.segment_id(NAMESPACE, CLEAN, 0, packed, (), tokens),
        ids.segment_id(NAMESPACE, CLEAN, 0, b"", ATTACHMENTS, tokens),
        ids.segment_id(NAMESPACE, CLEAN, 0, packed[:48], ATTACHMENTS[1:], tokens),
        ids.segment_id(NAMESPACE, CLEAN, 0, b"", (), np.frombuffer(packed + bytes(48), "<u4")),
    }
    assert len(seen) == 4


def test_namespaces_of_uids_and_shares_never_meet() -> None:
    print_, other = ids.fingerprint(IDENTITY), ids.fingerprint(replace(IDENTITY, tenant=bytes(16)))
    keys = [ids.namespace_key(uid, "", key) for uid in (0, 1, 1000) for key in (print_, other)]
    keys += [ids.namespace_key(0, share, key) for share in ("0", "1000", "uid", "team") for key in (print_, other)]
    assert len(set(keys)) == len(keys)
    assert ids.namespace_key(1, "team", print_) == ids.namespace_key(2, "team", print_)


def test_lineage_depends_on_order_operation_and_parameters() -> None:
    evict = ids.lineage_after(CLEAN, "evict", 3)
    shift = ids.lineage_after(CLEAN, "shift", 3)
    seen = [
        CLEAN,
        evict,
        shift,
        ids.lineage_after(evict, "shift", 3),
        ids.lineage_after(shift, "evict", 3),
        ids.lineage_after(CLEAN, "evict"),
        ids.lineage_after(CLEAN, "evict", 4),
        ids.lineage_after(CLEAN, "evict", 3.0),
        ids.lineage_after(CLEAN, "evict", 3, 3),
        ids.lineage_after(CLEAN, "evict", (3, 3)),
    ]
    assert len(set(seen)) == len(seen)
    with pytest.raises(RecordError):
        ids.lineage_after(CLEAN, "")


@given(st.binary(max_size=200), st.lists(st.integers(0, 200), max_size=4))
def test_blake_does_not_see_how_its_input_is_cut(data: bytes, cuts: list[int]) -> None:
    edges = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
    parts = [data[start:end] for start, end in itertools.pairwise(edges)]
    assert ids.blake(*parts) == blake(data)


@pytest.mark.parametrize("seed", ["0", "12345"])
def test_ids_are_the_same_in_another_process(seed: str) -> None:
    program = "import sys, json; sys.path[:0] = sys.argv[1:]\nfrom make_golden import golden_ids\nprint(json.dumps(golden_ids()))"
    done = subprocess.run(
        [sys.executable, "-c", program, str(Path(ids.__file__).parents[2]), str(GOLDEN)],
        env={**os.environ, "PYTHONHASHSEED": seed},
        capture_output=True,
        text=True,
        check=True,
    )
    assert json.loads(done.stdout) == json.loads((GOLDEN / "ids.json").read_text())


def test_samples_carry_the_golden_ids() -> None:
    golden = json.loads((GOLDEN / "ids.json").read_text())
    assert (SEGMENT.id.hex(), STATE.id.hex()) == (golden["segment"], golden["state"])
