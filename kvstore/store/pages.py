"""The page tree of an LMDB file, looked through before LMDB walks it.

LMDB trusts its pages: in a file that was cut, copied while in use or damaged, one that is not
what a parent says ends the process, by an assertion or a signal, and the next start again.

**Source:** mdb.c of LMDB 0.9, data version 1. Files of other versions are left to LMDB.
"""

from __future__ import annotations

import mmap
import struct
from pathlib import Path

from warmkv.schema.errors import FormatError

_MAGIC, _VERSION = 0xBEEFC0DE, 1
#: Of a meta page: magic, version, address, map size; last page, transaction.
_META, _META_END = struct.Struct("<IIQQ"), struct.Struct("<QQ")
#: Page size, flags, depth, branch, leaf and overflow pages, entries, root.
_TABLE = struct.Struct("<IHHQQQQQ")
#: Page number, padding, flags, end of the node pointers, begin of the nodes.
_PAGE = struct.Struct("<QHHHH")
_NODE = struct.Struct("<HHHH")
_META_AT, _TABLES_AT, _END_AT = 16, 40, 136
_BRANCH, _LEAF, _OVERFLOW, _KINDS = 1, 2, 4, 15
_BIG_VALUE, _SUBTABLE = 1, 2
_EMPTY = 2**64 - 1


def check_pages(path: Path) -> None:
    """Follow every table of the newest transaction in the LMDB file ``path``.

    Raises FormatError when a page that is needed lies beyond the end of the file, is of another
    kind or does not hold the nodes it should. Nobody may write the file meanwhile."""
    with open(path, "rb") as file:
        if file.seek(0, 2) < _END_AT + _META_END.size:
            return
        with mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as data:
            _check(data)


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
    def __init__(self, data: mmap.mmap, page_bytes: int, last: int) -> None:
        self._data = data
        self._page_bytes = page_bytes
        self._end = min(last + 1, len(data) // page_bytes)
        self._seen: set[int] = set()

    def follow(self, table_at: int) -> None:
        """Check all pages of the table whose description lies at ``table_at``."""
        depth, root = _TABLE.unpack_from(self._data, table_at)[2::5]
        pending = [(root, 1)] if root != _EMPTY else []
        while pending:
            page, level = pending.pop()
            kind = _LEAF if level == depth else _BRANCH
            for node_at in self._nodes(page, kind):
                if kind == _BRANCH:
                    low, middle, high, _ = _NODE.unpack_from(self._data, node_at)
                    pending.append((low | middle << 16 | high << 32, level + 1))
                else:
                    self._value(page, node_at)

    def _nodes(self, page: int, kind: int) -> list[int]:
        """Where the nodes of a page lie in the file."""
        self._enter(page, kind, 1)
        at = page * self._page_bytes
        lower, upper = _PAGE.unpack_from(self._data, at)[3:]
        count = (lower - _PAGE.size) // 2
        if count < 1 or not lower <= upper <= self._page_bytes:
            raise FormatError(f"page {page} holds {count} nodes from {upper} on")
        offsets = struct.unpack_from(f"<{count}H", self._data, at + _PAGE.size)
        if min(offsets) < upper or max(offsets) + _NODE.size > self._page_bytes:
            raise FormatError(f"page {page} has nodes outside of it")
        return [at + offset for offset in offsets]

    def _value(self, page: int, node_at: int) -> None:
        low, high, flags, key_bytes = _NODE.unpack_from(self._data, node_at)
        size, value_at = low | high << 16, node_at + _NODE.size + key_bytes
        if value_at + (8 if flags & _BIG_VALUE else size) > (page + 1) * self._page_bytes:
            raise FormatError(f"page {page} has a value that leaves it")
        if flags & _BIG_VALUE:
            first = int.from_bytes(self._data[value_at : value_at + 8], "little")
            self._enter(first, _OVERFLOW, -(-(size + _PAGE.size) // self._page_bytes))
        elif flags & _SUBTABLE:
            self.follow(value_at)

    def _enter(self, page: int, kind: int, count: int) -> None:
        if not 2 <= page <= self._end - count:
            raise FormatError(f"page {page} lies beyond the end of the file")
        number, _, flags, low, high = _PAGE.unpack_from(self._data, page * self._page_bytes)
        if kind == _OVERFLOW and not count <= low | high << 16 <= self._end - page:
            raise FormatError(f"page {page} claims {low | high << 16} pages for a value of {count}")
        if number != page or flags & _KINDS != kind or page in self._seen:
            raise FormatError(f"page {page} calls itself {number} with flags {flags:#x}, or is used twice")
        self._seen.add(page)
