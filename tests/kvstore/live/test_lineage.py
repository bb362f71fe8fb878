"""Equal lineages mean equal operations; whatever decides the rows is part of them."""

from __future__ import annotations

import hashlib
import struct

import numpy as np

from warmkv.kernels.formats import RowFormat
from warmkv.kernels.nystrom.reference import Rectifier
from warmkv.kvstore.live import lineage
from warmkv.kvstore.live.evict import Mass, Recent
from warmkv.kvstore.live.lineage import CLEAN
from warmkv.kvstore.live.plan import NystromPlan


def kept(*rows: int) -> np.ndarray:
    return np.asarray(rows, np.intp)


def test_it_is_the_digest_of_the_canonical_operation() -> None:
    """Assembled by hand: a list of name, lineage before, operation and parameters."""

    def item(kind: int, body: bytes) -> bytes:
        return struct.pack("<BI", kind, len(body)) + body

    integers = [item(2, struct.pack("<q", number)) for number in (3, 9, 5)]
    half = item(1, b"\1")
    spelled = item(6, item(4, b"lineage") + item(5, bytes(16)) + item(4, b"wired") + item(6, b"".join([*integers, half])))
    assert lineage.wired(CLEAN, 3, 9, 5, True) == hashlib.blake2b(spelled, digest_size=16).digest()


def test_everything_that_decides_the_rows_decides_the_lineage() -> None:
    other = lineage.after(CLEAN, "anything")
    plan = NystromPlan(landmarks=8, window=16, sinks=2)
    formats = (RowFormat.F32, RowFormat.Q8_2F)
    found = [
        CLEAN,
        other,
        lineage.evicted(CLEAN, Recent(), 9, [(0, kept(4, 5))]),
        lineage.evicted(CLEAN, Mass(0), 9, [(0, kept(4, 5))]),
        lineage.evicted(CLEAN, Mass(1), 9, [(0, kept(4, 5))]),
        lineage.evicted(CLEAN, Mass(1), 10, [(0, kept(4, 5))]),
        lineage.evicted(CLEAN, Mass(1), 9, [(1, kept(4, 5))]),
        lineage.evicted(CLEAN, Mass(1), 9, [(0, kept(3, 5))]),
        lineage.evicted(CLEAN, Mass(1), 9, [(0, kept(4)), (1, kept(5))]),
        lineage.evicted(other, Mass(1), 9, [(0, kept(4, 5))]),
        lineage.sealed(CLEAN, 0, plan, 40),
        lineage.sealed(CLEAN, 1, plan, 40),
        lineage.sealed(CLEAN, 0, plan, 41),
        lineage.sealed(CLEAN, 0, NystromPlan(8, 16, 2, Rectifier.FM), 40),
        lineage.requantised(CLEAN, 0, 9, formats, formats),
        lineage.requantised(CLEAN, 0, 8, formats, formats),
        lineage.requantised(CLEAN, 0, 9, formats, formats[::-1]),
        lineage.rewound(CLEAN, 9, []),
        lineage.rewound(CLEAN, 8, []),
        lineage.rewound(CLEAN, 9, [(0, b"field")]),
        lineage.rewound(CLEAN, 9, [(1, b"field")]),
        lineage.rewound(other, 9, []),
        lineage.wired(CLEAN, 0, 9, 0, True),
        lineage.wired(CLEAN, 0, 9, 2, False),
    ]
    assert len(set(found)) == len(found)
    assert all(len(item) == 16 for item in found)


def test_equal_operations_give_equal_lineages_whatever_the_indices_are_kept_as() -> None:
    one = lineage.evicted(CLEAN, Mass(), 9, [(0, kept(1, 3, 5)[::-1][::-1])])
    assert one == lineage.evicted(CLEAN, Mass(4), 9, [(0, np.arange(1, 7, 2))])


def test_order_counts() -> None:
    first = lineage.after(lineage.after(CLEAN, "a"), "b")
    assert first != lineage.after(lineage.after(CLEAN, "b"), "a")
