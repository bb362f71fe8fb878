"""A file or a folder of `.kvcache` files into a store, and the prompts of a pack out into a folder.

One file is one outcome: what cannot be taken is left out with its reason and the rest goes on.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from warmkv.kvstore.kvcache import fingerprint, folder, layers
from warmkv.kvstore.kvcache.about import About
from warmkv.kvstore.kvcache.snapshots import PackedPrompts, Snapshot
from warmkv.kvstore.verbs import Ack, Verbs
from warmkv.schema import kvcache_file
from warmkv.schema.errors import (
    Busy,
    ColdFull,
    FormatError,
    OfferAgain,
    RecordError,
    StoreError,
    TooLarge,
    TooNewError,
    UnsupportedError,
)
from warmkv.schema.identity import Identity
from warmkv.schema.kvcache_file import KvFile, Tag
from warmkv.schema.records import Anchor

#: What one file can be guilty of, or find no room for; anything else ends the whole.
_REFUSALS = (FormatError, TooNewError, RecordError, UnsupportedError, TooLarge, Busy, OfferAgain)
#: Told how many files are done, of how many.
Tell = Callable[[int, int], None]


@dataclass(slots=True)
class Outcome:
    """``files`` that came over with ``total_bytes`` of rows, ``duplicates`` that were there already, and by
    name why others did not; ``written`` is False where the disk did not take all."""

    files: int = 0
    duplicates: int = 0
    total_bytes: int = 0
    refused: list[tuple[str, str]] = field(default_factory=list)
    written: bool = True


def take_in(store: Verbs, identity: Identity, about: About, paths: Sequence[Path], tell: Tell, *, durable: bool) -> Outcome:
    """Save the files ``paths`` under ``identity``, the shortest prompts first, so that each keeps an end of its
    own. With ``durable`` what came over is on disk."""
    done = Outcome()
    ack: Ack = "disk" if durable else "memory"
    for number, path in enumerate(sorted(paths, key=_size)):
        tell(number, len(paths))
        try:
            file = folder.read(path)
        except (*_REFUSALS, StoreError) as exc:
            done.refused.append((path.name, str(exc)))
            continue
        try:
            _take(store, identity, about, file, ack, done)
        except ColdFull as exc:  # held in memory
            done.written = False
            done.refused.append((path.name, str(exc)))
        except _REFUSALS as exc:
            done.refused.append((path.name, str(exc)))
    tell(len(paths), len(paths))
    return done


def _take(store: Verbs, identity: Identity, about: About, file: KvFile, ack: Ack, done: Outcome) -> None:
    fingerprint.require_model(file, about, identity)
    if file.shift_offset:
        raise UnsupportedError(f"the rows were shifted by {file.shift_offset} positions, which no import can undo")
    anchors = [file.anchor] if file.anchor is not None else []
    saved = store.save(identity, file.tokens, layers.records_of(file, identity), anchors=anchors, ack=ack)
    if saved.duplicate:
        done.duplicates += 1
    else:
        done.files += 1
        done.total_bytes += saved.sent_bytes


def write_out(prompts: PackedPrompts, about: About, target: Path, tell: Tell, *, replace: bool, longest: bool = False) -> Outcome:
    """Write the prompts of a pack, or the ``longest`` only, into the folder ``target``, or that one to the file
    of this name. Raises UnsupportedError for a model whose layers these files cannot hold."""
    tags = fingerprint.layer_tags(prompts.identity, about)
    model = fingerprint.expected(prompts.identity, about, tags)
    snapshots = list(prompts.snapshots())
    snapshots, done = snapshots[-1:] if longest else snapshots, Outcome()
    for number, snapshot in enumerate(snapshots):
        tell(number, len(snapshots))
        try:
            file = file_of(prompts, snapshot, model, tags)
            new = _put(target, file, replace=replace)
        except (*_REFUSALS, StoreError) as exc:
            done.refused.append((f"prompt of {len(snapshot.tokens)} tokens", str(exc)))
            continue
        done.files += int(new)
        done.duplicates += int(not new)
        done.total_bytes += sum(layer.keys.nbytes + layer.values.nbytes for layer in file.layers)
    tell(len(snapshots), len(snapshots))
    return done


def file_of(prompts: PackedPrompts, snapshot: Snapshot, model: int, tags: Sequence[Tag]) -> KvFile:
    """A prompt as a file of the model with this fingerprint. Raises UnsupportedError for what no file can say,
    FormatError."""
    if snapshot.reason:
        raise UnsupportedError(snapshot.reason)
    planes = prompts.planes(snapshot)
    pairs = zip(prompts.identity.layers, tags, strict=True)
    made = tuple(layers.layer_of(index, layer, tag, planes[index]) for index, (layer, tag) in enumerate(pairs))
    anchor = max(snapshot.anchors, key=lambda item: (int(item.kind), item.depth), default=Anchor(0))
    if not 0 <= anchor.shift_offset < 2**32:
        raise UnsupportedError(f"its anchor is shifted by {anchor.shift_offset}, expected 0 to {2**32 - 1}")
    named = (anchor.depth, anchor.kind, anchor.semantic_hash, anchor.shift_offset)
    return KvFile(model, snapshot.tokens, made, *named)


def _put(target: Path, file: KvFile, *, replace: bool) -> bool:
    if os.path.isdir(target):
        return folder.write(target, file, replace=replace)
    if os.path.lexists(target) and not replace:
        raise StoreError(f"{target} exists")
    folder.write_whole(target, kvcache_file.encode(file))
    return True


def _size(path: Path) -> tuple[int, str]:
    """Files of one model are the larger the longer their prompt; what is gone is told of when it is read."""
    try:
        return path.lstat().st_size, path.name
    except OSError:
        return 0, path.name
