"""What a power cut would leave: folders rebuilt from recorded writes, the synced ones alone or with
some of the others.

A write counts as kept once a sync of its file began after it and is over, or if its descriptor
writes through. A rename counts once its folder was synced. Whatever else was written may be there or
not, each page for itself: that is up to the disk.
"""

from __future__ import annotations

import os
import random
import shutil
import struct
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path

PAGE_BYTES = 4096
_EVENT = struct.Struct("<IIQQ")


class Kind(IntEnum):
    WRITE = 1
    DSYNC_WRITE = 2
    SYNC_BEGIN = 3
    SYNC_END = 4
    RENAME = 5
    SEND = 6
    NAME = 7
    FOLDER_SYNC = 8


@dataclass(frozen=True, slots=True)
class Event:
    kind: Kind
    file: int
    offset: int
    data: bytes

    @property
    def names(self) -> tuple[str, str]:
        before, _, after = self.data.decode().partition("\0")
        return before, after


def build_recorder(folder: Path) -> Path | None:
    """The library to preload; None where there is no compiler."""
    compiler = next((path for path in map(shutil.which, ("gcc", "cc", "clang")) if path), None)
    if compiler is None:
        return None
    library = folder / "recorder.so"
    source = Path(__file__).with_name("fault_recorder.c")
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", library, source, "-ldl", "-lpthread"], check=True)
    return library


def environ(library: Path, log: Path, under: Path) -> dict[str, str]:
    """What makes a process record what it writes below a folder."""
    return {"LD_PRELOAD": str(library), "FAULT_RECORDER_LOG": str(log), "FAULT_RECORDER_UNDER": os.path.realpath(under)}


def events(log: Path) -> list[Event]:
    data, at, found = log.read_bytes(), 0, []
    while at < len(data):
        kind, length, file, offset = _EVENT.unpack_from(data, at)
        at += _EVENT.size
        found.append(Event(Kind(kind), file, offset, data[at : at + length]))
        at += length
    return found


@dataclass
class _File:
    kept: bytearray = field(default_factory=bytearray)
    pending: list[Event] = field(default_factory=list)
    #: How many of the pending writes the syncs under way cover; syncs of a file may overlap.
    covered: list[int] = field(default_factory=list)

    def keep(self, writes: Sequence[Event]) -> None:
        for write in writes:
            put(self.kept, write.offset, write.data)


def put(content: bytearray, offset: int, data: bytes) -> None:
    content.extend(bytes(max(0, offset + len(data) - len(content))))
    content[offset : offset + len(data)] = data


class Disk:
    """A folder as its events left it so far. Take them one by one with `apply`."""

    def __init__(self) -> None:
        self._files: dict[int, _File] = {}
        self._names: dict[str, int] = {}
        self._renames: list[Event] = []

    def apply(self, event: Event) -> None:
        file = self._files.setdefault(event.file, _File())
        if event.kind == Kind.WRITE:
            file.pending.append(event)
        elif event.kind == Kind.DSYNC_WRITE:
            file.keep([event])
        elif event.kind == Kind.SYNC_BEGIN:
            file.covered.append(len(file.pending))
        elif event.kind == Kind.SYNC_END and file.covered:
            done = file.covered.pop(0)
            file.keep(file.pending[:done])
            del file.pending[:done]
            file.covered = [max(0, count - done) for count in file.covered]
        elif event.kind == Kind.NAME:
            self._name(event)
        elif event.kind == Kind.RENAME:
            self._renames.append(event)
        elif event.kind == Kind.FOLDER_SYNC:
            self._move(self._names, self._renames)
            self._renames = []

    def _name(self, event: Event) -> None:
        """A file that was opened. One that replaces another by a rename is no new name yet."""
        name = event.names[0]
        if all(rename.file != event.file for rename in self._renames):
            self._names[name] = event.file

    @staticmethod
    def _move(names: dict[str, int], renames: Sequence[Event]) -> None:
        for rename in renames:
            before, after = rename.names
            names.pop(before, None)
            names[after] = rename.file

    def pending(self) -> int:
        """Writes and renames that a power cut may lose."""
        return len(self._renames) + sum(len(file.pending) for file in self._files.values())

    def rebuild(self, folder: Path, under: Path, wanted: Sequence[str], rng: random.Random | None = None) -> None:
        """Write the files ``wanted`` below ``folder`` as they would be found, with ``rng`` some of
        the unsynced pages and renames among them."""
        names = dict(self._names)
        if rng is not None:
            self._move(names, self._renames[: rng.randint(0, len(self._renames))])
        for name, number in names.items():
            path = Path(name)
            if path.parent != under or path.name not in wanted:
                continue
            file = self._files[number]
            content = bytearray(file.kept)
            for write in file.pending if rng is not None else ():
                assert rng is not None
                for offset, page in _pages(write):
                    if rng.random() < 0.5:
                        put(content, offset, page)
            (folder / path.name).write_bytes(content)


def _pages(write: Event) -> Iterator[tuple[int, bytes]]:
    at = 0
    while at < len(write.data):
        size = PAGE_BYTES - (write.offset + at) % PAGE_BYTES
        yield write.offset + at, write.data[at : at + size]
        at += size
