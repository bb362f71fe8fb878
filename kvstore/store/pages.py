"""The page tree of an LMDB file, looked through before LMDB walks it.

LMDB trusts its pages: in a file that was cut, copied while in use or damaged, one that is not
what a parent says ends the process, by an assertion or a signal, and the next start again.

**Source:** mdb.c of LMDB 0.9, data version 1. Files of other versions are left to LMDB.
"""

from __future__ import annotations

import mmap
import struct
from itertools import count
from pathlib import Path
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from warmkv.schema.errors import FormatError

_MAGIC, _VERSION = 0xBEEFC0DE, 1
#: Of a meta page: magic, version, address, map size; last page, transaction.
_META, _META_END = struct.Struct("<IIQQ"), struct.Struct("<QQ")
#: Page size, flags, depth, branch, leaf and overflow pages, entries, root.
_TABLE = struct.Struct("<IHHQQQQQ")
#: A page begins with its number, padding, flags, end of the node pointers, begin of the nodes; a
#: node with three words (size and flags, or a page) and the bytes of its key.
_PAGE_BYTES, _NODE_BYTES = 16, 8
_META_AT, _TABLES_AT, _END_AT = 16, 40, 136
#: Of kinds of pages, and of values, only these are in tables without duplicates.
_BRANCH, _LEAF, _OVERFLOW, _KINDS = 1, 2, 4, 0x6F
_BIG_VALUE, _SUBTABLE = 1, 2
_EMPTY = 2**64 - 1
#: Pages whose nodes are looked at together: what that takes of memory is a few MiB.
SLICE = 4096
Numbers: TypeAlias = npt.NDArray[np.int64]


def check_pages(path: Path) -> None:
    """Follow every table of the newest transaction in the LMDB file ``path``.

    Raises FormatError when a page that is needed lies beyond the end of the file, is of another
    kind or does not hold the nodes it should. Nobody may write the file meanwhile."""
    with open(path, "rb") as file:
        if file.seek(0, 2) < _END_AT + _META_END.size:
            return
        # Not closed: that is refused as long as an array shows it. It goes with the last of them.
        _check(mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ))


def _check(data: mmap.mmap) -> None:
    page_bytes = int(_TABLE.unpack_from(data, _TABLES_AT)[0])
    newest: tuple[int, int, int] | None = None
    for at in (0, page_bytes):
        if at + _END_AT + _META_END.size > len(data) or _META.unpack_from(data, at + _META_AT)[:2] != (_MAGIC, _VERSION):
            return
        last, transaction = _META_END.unpack_from(data, at + _END_AT)
        newest = max(newest or (-1, 0, 0), (transaction, last, at + _TABLES_AT))
    if newest is not None and page_bytes >= 512:
        pages = _Pages(data, page_bytes, newest[1])
        for at in (newest[2], newest[2] + _TABLE.size):
            pages.follow(at)


class _Pages:
    """All of a level of a table at once: page numbers and places of nodes are arrays."""

    def __init__(self, data: mmap.mmap, page_bytes: int, last: int) -> None:
        self._data = data
        self._page_bytes = page_bytes
        self._end = min(last + 1, len(data) // page_bytes)
        self._bytes = np.frombuffer(data, np.uint8, self._end * page_bytes)
        self._words = self._bytes.view("<u2").reshape(self._end, page_bytes // 2)
        self._seen = np.zeros(self._end, np.bool_)

    def follow(self, table_at: int) -> None:
        """Check all pages of the table whose description lies at ``table_at``."""
        depth, root = _TABLE.unpack_from(self._data, table_at)[2::5]
        if root == _EMPTY:
            return
        pages = np.array([root if root < 2**63 else -1], np.int64)
        for level in count(1):
            kind = _LEAF if level == depth else _BRANCH
            below = [self._level(pages[at : at + SLICE], kind) for at in range(0, len(pages), SLICE)]
            if kind == _LEAF:
                return
            pages = np.concatenate(below)

    def _level(self, pages: Numbers, kind: int) -> Numbers:
        """Check pages of one kind and their nodes; of branches, the pages below."""
        heads = self._enter(pages, kind)
        lower, upper = heads[:, 6], heads[:, 7]
        counts = (lower - _PAGE_BYTES) // 2
        wrong = (counts < 1) | (lower > upper) | (upper > self._page_bytes)
        self._refuse(pages, wrong, "has no nodes, or says they lie outside of it")
        owner = np.repeat(np.arange(len(pages)), counts)
        turn = np.arange(len(owner)) - np.repeat(np.cumsum(counts) - counts, counts)
        holders = pages[owner]
        offsets = self._words[holders, _PAGE_BYTES // 2 + turn].astype(np.int64)
        wrong = (offsets < upper[owner]) | (offsets + _NODE_BYTES > self._page_bytes) | (offsets % 2 != 0)
        self._refuse(holders, wrong, "has nodes outside of it")
        nodes = self._words[holders[:, None], (offsets // 2)[:, None] + np.arange(4)].astype(np.int64)
        self._refuse_gaps(holders, offsets, upper[owner], _node_bytes(nodes, kind))
        if kind == _BRANCH:
            return np.asarray(nodes[:, 0] | nodes[:, 1] << 16 | nodes[:, 2] << 32)
        self._values(holders, offsets, nodes)
        return pages[:0]

    def _refuse_gaps(self, holders: Numbers, offsets: Numbers, upper: Numbers, sizes: Numbers) -> None:
        """Nodes lie one behind the other up to the end of their page. One of another size than it
        says is no harm to who reads it, but deleting it would tear its neighbours."""
        order = np.lexsort((offsets, holders))
        pages, begins = holders[order], offsets[order]
        ends = begins + sizes[order]
        same = pages[1:] == pages[:-1]
        wrong = np.concatenate((ends[:-1] != np.where(same, begins[1:], self._page_bytes), ends[-1:] != self._page_bytes))
        first = np.concatenate((np.ones(min(1, len(pages)), np.bool_), ~same))
        self._refuse(pages, wrong | (first & (begins != upper[order])), "has nodes that overlap, or room between them")

    def _values(self, holders: Numbers, offsets: Numbers, nodes: Numbers) -> None:
        sizes, flags = nodes[:, 0] | nodes[:, 1] << 16, nodes[:, 2]
        self._refuse(holders, (flags & ~_SUBTABLE != 0) & (flags != _BIG_VALUE), "has a value of an unknown kind")
        starts, big = offsets + _NODE_BYTES + nodes[:, 3], (flags & _BIG_VALUE) != 0
        self._refuse(holders, starts + np.where(big, 8, sizes) > self._page_bytes, "has a value that leaves it")
        at = holders * self._page_bytes + starts
        numbers = self._bytes[at[big][:, None] + np.arange(8)].view("<u8")[:, 0]
        first = np.where(numbers < 2**63, numbers, 0).astype(np.int64)
        for piece in range(0, len(first), SLICE):
            self._overflow(first[piece : piece + SLICE], sizes[big][piece : piece + SLICE])
        for node in np.flatnonzero(((flags & _SUBTABLE) != 0) & ~big):
            if sizes[node] < _TABLE.size:
                raise FormatError(f"page {holders[node]} describes a table in {sizes[node]} bytes")
            self.follow(int(at[node]))

    def _overflow(self, pages: Numbers, sizes: Numbers) -> None:
        needed = -(-(sizes + _PAGE_BYTES) // self._page_bytes)
        heads = self._enter(pages, _OVERFLOW, needed)
        claimed = heads[:, 6] | heads[:, 7] << 16
        self._refuse(pages, (claimed < needed) | (claimed > self._end - pages), "claims other pages than its value needs")

    def _enter(self, pages: Numbers, kind: int, needed: Numbers | int = 1) -> Numbers:
        """The first words of these pages, each of which is there, of the kind, and nobody else's."""
        self._refuse(pages, (pages < 2) | (pages > self._end - needed), "lies beyond the end of the file")
        heads = self._words[pages, : _PAGE_BYTES // 2].astype(np.int64)
        numbers = heads[:, 0] | heads[:, 1] << 16 | heads[:, 2] << 32
        wrong = (numbers != pages) | (heads[:, 3] != 0) | (heads[:, 5] & _KINDS != kind) | self._seen[pages]
        self._refuse(pages, wrong, "is of another kind than it should be, or used twice")
        self._seen[pages] = True
        if len(np.unique(pages)) != len(pages):
            raise FormatError("a page is used twice")
        return heads

    @staticmethod
    def _refuse(pages: Numbers, wrong: npt.NDArray[np.bool_], why: str) -> None:
        if wrong.any():
            raise FormatError(f"page {pages[int(np.argmax(wrong))]} {why}")


def _node_bytes(nodes: Numbers, kind: int) -> Numbers:
    """What each node takes of its page: its head, its key, a value or where that lies; even."""
    values = np.where((nodes[:, 2] & _BIG_VALUE) != 0, 8, nodes[:, 0] | nodes[:, 1] << 16) if kind == _LEAF else 0
    return np.asarray((_NODE_BYTES + nodes[:, 3] + values + 1) & ~1)
