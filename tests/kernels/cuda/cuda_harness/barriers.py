"""Programs that lack one barrier: whatever needs it must be seen to fail without."""

from __future__ import annotations

import re
from collections.abc import Callable

from cuda_harness.host import ORDERS, HostLauncher
from warmkv.kernels.cuda.source import read
from warmkv.kernels.errors import KernelError

_BARRIER = re.compile(r"\b__sync(?:threads|warp)\s*\([^()]*\)")
_COMMENT = re.compile(r"//[^\n]*")


def barriers(path: str) -> list[int]:
    """Lines of a source, counted from 1, that have a barrier each."""
    lines = [_COMMENT.sub("", line) for line in read(path).splitlines()]
    found = [number for number, line in enumerate(lines, 1) for _ in _BARRIER.findall(line)]
    if len(set(found)) != len(found):
        raise AssertionError(f"{path} has two barriers in one line")
    return found


def without_barrier(path: str, line: int) -> Callable[[str], str]:
    """An ``edit`` of joined sources for `HostLauncher` that drops the barrier in that line of that source.
    Programs that do not have the source stay as they are."""
    text = read(path)
    rows = text.splitlines(keepends=True)
    rows[line - 1] = _BARRIER.sub("(void)0", rows[line - 1], count=1)
    mutant = "".join(rows)
    if mutant == text:
        raise AssertionError(f"{path} has no barrier in line {line}")
    return lambda whole: whole.replace(text, mutant)


def survivors(path: str, exercise: Callable[[HostLauncher], None]) -> list[int]:
    """Lines of barriers in a source that ``exercise`` does without: it runs programs and compares, for each barrier
    with that one dropped, in every order until it fails."""
    return [line for line in barriers(path) if not any(_noticed(path, line, order, exercise) for order in ORDERS)]


def _noticed(path: str, line: int, order: str, exercise: Callable[[HostLauncher], None]) -> bool:
    try:
        exercise(HostLauncher(order, edit=without_barrier(path, line)))
    except (AssertionError, KernelError):
        return True
    return False
