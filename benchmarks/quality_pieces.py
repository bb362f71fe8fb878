"""Finished pieces of a quality run: one JSON line each, so that a run that was stopped goes on.

A piece is one mode over one window of text. It counts only for the same model, text, settings and code:
all of them are in its key.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
#: Files whose text decides the numbers.
_CODE = ("kernels/**/*.py", "kvstore/live/**/*.py", "kvstore/integrations/hf_live*.py", "benchmarks/quality*.py")


@dataclass(frozen=True, slots=True)
class Key:
    """What a piece was measured with. Digests are hexadecimal; ``window`` counts windows of
    ``tokens`` tokens, of which those from ``scored_from`` on are scored."""

    model: str
    text: str
    mode: str
    window: int
    tokens: int
    chunk: int
    scored_from: int
    code: str


@dataclass(frozen=True, slots=True)
class Piece:
    """Sums over ``scored`` next tokens: negative log-likelihoods (nats) of the mode and of f32, the
    divergence KL(f32 || mode) (nats), and how often both would choose the same token. ``stored`` are the
    bytes of all layers' rows at the end, ``rows`` how many one layer holds then; ``seconds`` are the
    mode's own."""

    key: Key
    scored: int
    nll: float
    nll_f32: float
    kl: float
    agreed: int
    stored: int
    rows: int
    seconds: float


class Pieces:
    """Pieces kept in a file. A line that a stopped run left half-written is passed over."""

    def __init__(self, path: Path, *, fresh: bool = False) -> None:
        self._path = path
        self._held: dict[Key, Piece] = {}
        if fresh and path.exists():
            path.unlink()
        for line in path.read_text().splitlines() if path.exists() else ():
            try:
                found = json.loads(line)
                piece = Piece(**{**found, "key": Key(**found["key"])})
            except (ValueError, TypeError, KeyError):
                continue
            self._held[piece.key] = piece

    def __contains__(self, key: Key) -> bool:
        return key in self._held

    def add(self, piece: Piece) -> None:
        """Keep a piece, on disk when this returns."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        torn = self._path.exists() and self._path.stat().st_size and not self._path.read_bytes().endswith(b"\n")
        with self._path.open("a") as file:
            file.write(("\n" if torn else "") + json.dumps(asdict(piece)) + "\n")
            file.flush()
            os.fsync(file.fileno())
        self._held[piece.key] = piece

    def of(self, keys: Iterable[Key]) -> list[Piece]:
        """Those that are there of ``keys``."""
        return [self._held[key] for key in keys if key in self._held]


def total(pieces: Iterable[Piece]) -> Piece | None:
    """Several windows of one mode as one; None for none. Bytes and rows are the last one's."""
    found = list(pieces)
    if not found:
        return None
    sums = {
        name: sum(getattr(piece, name) for piece in found) for name in ("scored", "nll", "nll_f32", "kl", "agreed", "seconds")
    }
    return Piece(found[-1].key, stored=found[-1].stored, rows=found[-1].rows, **sums)


def code_version() -> str:
    """Digest of the code that decides the numbers."""
    digest = hashlib.blake2b(digest_size=8)
    for pattern in _CODE:
        for path in sorted(ROOT.glob(pattern)):
            digest.update(str(path.relative_to(ROOT)).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def file_digest(paths: Iterable[Path]) -> str:
    """Digest of files, their names included."""
    digest = hashlib.blake2b(digest_size=8)
    for path in paths:
        digest.update(path.name.encode() + b"\0")
        with path.open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()
