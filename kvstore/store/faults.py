"""Faults as part of the code: named points at which a test may kill, stall or refuse.

Whatever touches memory, disk or another process calls `Faults.reached` with the name of the
point it has come to. The default does nothing; tests hand an engine one that ends the process
with SIGKILL at the n-th point, sleeps where an fsync would, or raises what a full or failing
disk raises. A name says what was done last: ``commit.chunk`` is reached after each chunk.
"""

from __future__ import annotations

#: Every point, in the order in which a save meets them, then the rest. `reached` is only called
#: with these names; a test walks through all of them.
POINTS = (
    "save.received", "save.copied", "save.admitted",
    "commit.begin", "commit.chunk", "commit.split", "commit.metadata", "commit.sync", "commit.done", "usage.sync", "usage.done",
    "delete.metadata", "delete.chunks", "delete.done",
    "evict.warm", "evict.cold",
    "promote.reserved", "promote.copied", "promote.done",
    "pack.reserved", "pack.written", "pack.done",
    "start.locked", "start.opened", "start.loaded", "start.swept",
    "compact.copied", "compact.renamed", "compact.done", "backup.copied", "aside.renamed",
    "stop.flushed", "stop.closed",
)  # fmt: skip


class Faults:
    """No faults. **Threading:** called from any thread, with and without the index lock."""

    def reached(self, point: str) -> None:
        """Called at a point; may raise OSError where the point stands before I/O."""


NO_FAULTS = Faults()
