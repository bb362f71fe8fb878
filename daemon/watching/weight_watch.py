"""Registered weight files, looked at by the daemon's clock."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from warmkv.daemon.watching.folders import Wanted
from warmkv.kvstore.store.weights import Weights


class WeightWatch:
    """Looks at what is registered in ``weights``; see there."""

    name = "weight files"

    def __init__(self, weights: Weights) -> None:
        self._weights = weights

    def folders(self) -> Wanted:
        return self._weights.folders()

    def hint(self, path: Path, whole: bool) -> None:
        pass

    def look(self, keep_on: Callable[[], bool]) -> None:
        self._weights.look(keep_on)
