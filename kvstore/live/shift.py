"""Context shift: tokens behind the first ones are taken out, and what follows moves down to their place.

A key was turned by its position, and turns about the same pairs add up: R(-count) takes it to its new
position without the unturned key. Values have none. Of a convolution the buffer stays: after as many
tokens as it has taps nothing of what went is left in it. What the remaining rows say was computed in
the presence of the tokens that went, so the result is not that of a shorter prompt, and its lineage says so.

**Source:** cera `shift_kv_with_rope`.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from typing import Union

import numpy as np

from warmkv.kernels.errors import KernelError, NotFinite
from warmkv.kernels.formats import RowFormat
from warmkv.kernels.rope import reference as rotary
from warmkv.kernels.rope.reference import Rope
from warmkv.kvstore.live import lineage as lineages
from warmkv.kvstore.live.layers.attention import AttentionLayer
from warmkv.kvstore.live.layers.base import where
from warmkv.kvstore.live.layers.conv import ConvLayer
from warmkv.kvstore.live.model import Layer, ModelCache
from warmkv.kvstore.live.rows.allocation import refusals
from warmkv.kvstore.live.rows.base import PlaneRows
from warmkv.kvstore.live.rows.encoded import Codes
from warmkv.kvstore.live.rows.growing import GrowingRows
from warmkv.schema.errors import CannotRewind, RecordError, UnsupportedError
from warmkv.schema.ids import blake
from warmkv.schema.records import ID_BYTES, TokensLike, as_tokens

#: How keys of all layers were turned, or of each layer of the plan, None for one that turns none.
Ropes = Union[Rope, Sequence[Union[Rope, None]]]
_TURNABLE = frozenset({RowFormat.F32, RowFormat.F16})
#: Rows turned at once.
_CHUNK = 4096


def shift(cache: ModelCache, keep: int, count: int, ropes: Ropes, *, gone: TokensLike | None = None) -> None:
    """Take tokens [keep, keep + count) out of every layer: rows behind them move down, their keys turned to
    the new positions. The next position is ``count`` less, ``cache.shift_offset`` as much more, and the
    lineage another. Half-precision keys are turned in float32 and rounded again, which costs some 3e-4 (relative
    RMS) a shift; few large shifts cost less than many small ones.

    ``ropes`` have to be those of the forward pass. ``gone`` are the ids that go: they decide what the rows
    that stay say, so they are part of the lineage, and who takes the same ids out of the same prompt finds
    what was saved. Without them (or where attachments are among them, which ids do not tell) the lineage
    is one that nobody else has.

    All memory is taken, and every key turned, before the
    first layer changes: for that moment the kept rows are there twice. Raises, nothing changed:
    RecordError for a range that is not in the sequence, ropes that do not fit the layers, rows with gaps
    or a key too large for its format; UnsupportedError for keys of other formats than f32 and f16, and
    for layers whose state cannot forget a token; CannotRewind where a window would need rows that were
    given up; OutOfMemory."""
    position = cache.position
    for given in (keep, count):
        if not isinstance(given, (int, np.integer)):
            raise RecordError(f"a shift by {count!r} behind the first {keep!r} tokens, expected whole numbers")
    keep, count = int(keep), int(count)  # numpy's numbers are no part of a position
    if count < 1 or keep < 0 or keep + count > position:
        raise RecordError(
            f"a shift by {count} behind the first {keep} of {position} tokens, expected 1 to {max(0, position - keep)}"
        )
    turns = _ropes_of(cache, ropes)
    told = _told(gone, count)
    for layer in cache.own:
        _check(layer, position)
    changes = [_prepare(layer, keep, count, turns[layer.index]) for layer in cache.own]
    rows = [(layer.index, turns[layer.index]) for layer in cache.own if isinstance(layer, AttentionLayer)]
    after = lineages.shifted(cache.lineage, position, keep, count, told, rows)
    for change in changes:
        change()
    cache.lineage = after
    cache.shift_offset += count


def _told(gone: TokensLike | None, count: int) -> bytes:
    """What stands for the tokens that go in the lineage."""
    if gone is None:
        return secrets.token_bytes(ID_BYTES)
    if len(gone) != count:
        raise RecordError(f"{len(gone)} ids of tokens that go, expected {count}")
    return blake(as_tokens(gone).astype("<u4").tobytes())


def _ropes_of(cache: ModelCache, ropes: Ropes) -> tuple[Rope | None, ...]:
    """By layer of the plan. Raises RecordError unless each fits its layer."""
    layers = cache.plan.layers
    turns = (ropes,) * len(layers) if isinstance(ropes, Rope) else tuple(ropes)
    if len(turns) != len(layers):
        raise RecordError(f"ropes of {len(turns)} layers, the plan has {len(layers)}")
    for layer in cache.own:
        rope = turns[layer.index]
        if isinstance(layer, AttentionLayer) and rope is not None and rope.size != layer.plan.key_size:
            raise RecordError(
                f"{where(layer.plan, layer.index)}: a rope of {rope.size} channels for keys of {layer.plan.key_size}"
            )
    return turns


def _check(layer: Layer, position: int) -> None:
    """Whether a layer can be shifted at all."""
    name = where(layer.plan, layer.index)
    if not isinstance(layer, (AttentionLayer, ConvLayer)):
        raise UnsupportedError(f"{name} cannot forget tokens in its midst; clear the cache and compute those that stay again")
    if layer.position != position:
        raise RecordError(f"{name} is at position {layer.position}, others at {position}; all have to be at one")
    if isinstance(layer, AttentionLayer):
        if layer.plan.key_format not in _TURNABLE:
            raise UnsupportedError(
                f"{name}: keys stored as {layer.plan.key_format.value} cannot be turned without being decoded and written anew. "
                "Store keys as f32 or f16 (values may be of any format), or clear the cache and compute what stays again"
            )
        if not layer.gapless:
            raise RecordError(f"{name}: rows were evicted, so that the positions of those that are left are not known")


def _prepare(layer: Layer, keep: int, count: int, rope: Rope | None) -> Callable[[], None]:
    """Everything that may fail; calling what is returned cannot."""
    if isinstance(layer, ConvLayer):
        conv = layer
        return lambda: conv.shift(keep, count)
    assert isinstance(layer, AttentionLayer)
    positions = np.arange(layer.base, layer.position)
    kept = np.flatnonzero((positions < keep) | (positions >= keep + count)).astype(np.intp)
    still = int(np.count_nonzero(positions < keep))
    after = layer.position - count
    base = after - len(kept)
    if layer.plan.window and base > max(0, after - layer.plan.window + 1):
        raise CannotRewind(
            f"{where(layer.plan, layer.index)}: at position {after} a window of {layer.plan.window} starts before row {base}, "
            "the oldest that is left"
        )
    keys, values = (plane.gathered(kept, _room(plane, len(kept), count)) for plane in (layer.keys, layer.values))
    if rope is not None:
        _turn(keys, still, -count, rope, where(layer.plan, layer.index))
    importance = layer.importance
    mass = None if importance is None else importance[kept]
    return layer.prepare_adopt(keys, values, position=after, base=base, importance=mass, gapless=True)


def _room(plane: PlaneRows, kept: int, count: int) -> int:
    """Rows there is to be memory for behind ``kept``: as many in all as there was."""
    return max(count, plane.capacity - kept) if isinstance(plane, GrowingRows) else count


def _turn(keys: GrowingRows, first: int, delta: int, rope: Rope, name: str) -> None:
    """Move the keys from row ``first`` on, a copy that nobody else sees yet. All move as far, so that rows
    handed over as one need their sines once."""
    for head in range(keys.heads):
        rows = keys.writable(head)
        for at in range(first, len(rows), _CHUNK):
            part = rows[at : at + _CHUNK]
            try:
                with refusals(4 * part.size, f"{name}: {len(part)} keys on their way"):
                    part[:] = rotary.shift(part[None], delta, rope)[0]
            except NotFinite as exc:
                raise RecordError(
                    f"{name}, head {head}, row {at + _too_large(part, delta, rope)} after the shift: {exc}"
                ) from exc
            except KernelError as exc:
                raise RecordError(f"{name}, head {head}: {exc}") from exc


def _too_large(part: Codes, delta: int, rope: Rope) -> int:
    """The first row that overflows when moved."""
    for row in range(len(part)):
        try:
            rotary.shift(part[row : row + 1], delta, rope)
        except NotFinite:
            return row
    raise AssertionError("no row overflows on its own")
