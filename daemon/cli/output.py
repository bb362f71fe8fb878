"""What verbs print: one JSON value, a table for people, or plain columns for pipes.

Names that came from stored identities are printed without control characters and are never
read as markup.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Mapping, Sequence

_BINARY = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


def emit_json(value: object) -> None:
    """One JSON value and nothing else on standard output."""
    sys.stdout.write(json.dumps(value) + "\n")
    sys.stdout.flush()


def emit_text(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def table(title: str, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """A table on a terminal; elsewhere aligned columns that are never cut."""
    cells = [[clean(cell) for cell in row] for row in rows]
    if sys.stdout.isatty():
        _rich(title, columns, cells)
        return
    lines = [[name.upper() for name in columns], *cells]
    widths = [max(len(line[index]) for line in lines) for index in range(len(columns))]
    text = "\n".join("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines)
    emit_text(text)


def pairs(title: str, values: Mapping[str, object]) -> None:
    """Names and values, nested names joined by dots, sizes also in units."""
    table(title, ("name", "value"), [(name, shown(name, value)) for name, value in flat(values)])


def flat(values: Mapping[str, object], prefix: str = "") -> Iterable[tuple[str, object]]:
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from flat(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def shown(name: str, value: object) -> str:
    if isinstance(value, int) and not isinstance(value, bool) and "bytes" in name.rsplit(".", 1)[-1]:
        return f"{value} ({size(value)})" if value >= 1024 else str(value)
    if isinstance(value, (list, tuple)):
        value = ", ".join(map(str, value))
    return "-" if value is None or value == "" else str(value)


def size(count: int) -> str:
    """A number of bytes for people."""
    amount = float(count)
    for unit in _BINARY:
        if abs(amount) < 1024 or unit == _BINARY[-1]:
            return f"{count} B" if unit == "B" else f"{amount:.1f} {unit}"
        amount /= 1024
    raise AssertionError("unreachable")


def clean(value: object) -> str:
    return "".join(char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in str(value))


def discard() -> None:
    """The reader of our output is gone: what is still buffered goes nowhere, silently."""
    null = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(null, sys.stdout.fileno())
    except (OSError, ValueError):
        pass
    finally:
        os.close(null)


def _rich(title: str, columns: Sequence[str], cells: Sequence[Sequence[str]]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    drawn = Table(title=title, title_justify="left")
    for name in columns:
        drawn.add_column(name, overflow="fold")
    for row in cells:
        drawn.add_row(*(Text(cell) for cell in row))
    Console(file=sys.stdout).print(drawn)
    sys.stdout.flush()
