"""The compiled loops of decode attention: scores, softmax, weighted sums.

Two passes over the rows with all probabilities in between, so that importance is exact and sums
depend on nothing but a row's place behind the first visible one. Runs of rows are small enough to
stay in the first-level cache, so codes come from memory once for all heads of a group.

**Threading:** no interpreter lock, no state; one thread computes a call.
"""

from __future__ import annotations

# mypy: disable-error-code="no-untyped-def, no-untyped-call, misc, untyped-decorator, call-arg, var-annotated"
import math

import numpy as np
from numba import njit

from warmkv.kernels.compiled import lanes as words
from warmkv.kernels.compiled.caching import compiled
from warmkv.kernels.compiled.tiles import GROUP, GROUP_BYTES, MANY_SCALES, MOST, ONE_SCALE, ask, score_run, weigh_run
from warmkv.kernels.compiled.vectors import WIDTH

#: Rows of a run: their weighted sum is taken in float32, runs are added in float64.
RUN = 64
#: Columns of a table of blocks, one block a line.
CODES, APART, COUNT, FORM, SCALES, SCALES_APART, STEP, FIELD, COLUMNS = range(9)
#: As `GROUP_BYTES`, in the order of forms.
_GROUP_BYTES = tuple(GROUP_BYTES[form] for form in range(len(GROUP_BYTES)))

#: Functions that are compiled with what calls them, once.
part = njit(inline="always")


@compiled()
def attend(q, size, keys, values, visible, scale, softcap, sinks, masses, out, tops, totals):
    """Attend ``q`` (heads, channels up to a multiple of GROUP, zeros behind ``size``), in equal groups over
    the KV heads of the tables ``keys`` and ``values`` (KV heads, blocks, COLUMNS). Block for block all KV
    heads have as many rows, in all ``visible``. ``masses`` (KV heads, visible) or empty. Fills ``out``
    (heads, value size), ``tops`` and ``totals`` (heads,)."""
    heads, group = q.shape[0], q.shape[0] // max(1, keys.shape[0])
    padded = (visible + WIDTH - 1) // WIDTH * WIDTH + WIDTH
    weights = np.empty((heads, padded), np.float32)
    at = 0
    for index in range(keys.shape[1]):
        blocks, queries = keys[:, index], with_fields(keys[:, index], q, size, group)
        span = stretch(blocks[0], size)
        for begin in range(0, blocks[0, COUNT], span):
            for place in range(blocks.shape[0]):
                score(blocks[place], begin, span, queries, place * group, group, size, scale, weights, at)
        at += blocks[0, COUNT]
    for head in range(heads):
        mass = masses[head // group] if masses.size else masses.ravel()
        tops[head], totals[head] = softmax(weights[head], visible, softcap, sinks[head], mass)
    wide = (out.shape[1] + WIDTH - 1) // WIDTH * WIDTH
    total = np.zeros((heads, wide), np.float64)
    own = np.empty((heads, wide), np.float64)
    at = 0
    for index in range(values.shape[1]):
        blocks = values[:, index]
        span = stretch(blocks[0], out.shape[1])
        own[:] = 0
        for begin in range(0, blocks[0, COUNT], span):
            for place in range(blocks.shape[0]):
                weigh(blocks[place], begin, span, out.shape[1], weights, place * group, group, at, own)
        for head in range(heads):
            add_block(blocks[head // group, FIELD], own[head], total[head], out.shape[1])
        at += blocks[0, COUNT]
    out[:] = total[:, : out.shape[1]]


@compiled()
def code_bytes(block, size):
    """Of the codes of a row."""
    return (size * _GROUP_BYTES[block[FORM]] + GROUP - 1) // GROUP


@compiled()
def far(block, size):
    """Whether other rows lie between these: those of other heads in a segment."""
    return abs(block[APART]) > 2 * code_bytes(block, size)


@compiled()
def stretch(block, size):
    """Rows that are done for one KV head before the next: where rows of all heads lie side by side only
    a run, so that each piece of memory is fetched once."""
    return RUN if far(block, size) else max(1, block[COUNT])


@compiled()
def ask_ahead(block, start, size):
    """Ask for the run of rows from ``start`` on, where they lie so far apart that the machine does not
    see them coming."""
    rows = min(RUN, block[COUNT] - start)
    if rows > 0 and far(block, size):
        ask(block[CODES] + start * block[APART], block[APART], rows, code_bytes(block, size))
        if block[SCALES]:
            scales_bytes = (size + 31) // 32 * 4 if block[STEP] else 4
            ask(block[SCALES] + start * block[SCALES_APART], block[SCALES_APART], rows, scales_bytes)


@compiled()
def with_fields(blocks, q, size, group):
    """The queries, those over a block with a field times it."""
    queries = q.copy()
    for head in range(q.shape[0]):
        field = blocks[head // group, FIELD]
        if field:
            for channel in range(size):
                queries[head, channel] *= words.number(field + 4 * channel)
    return queries


@compiled()
def add_block(field, own, total, size):
    """Add a block's sum to the whole, times its field where it has one."""
    for channel in range(size):
        factor = np.float64(words.number(field + 4 * channel)) if field else 1.0
        total[channel] += own[channel] * factor


@part
def score(block, begin, span, q, head, group, size, scale, logits, at):
    """Scaled scores of a block's rows [begin, begin + span) for the ``group`` heads from ``head`` on, to
    ``logits`` (heads, ...) with row 0 at column ``at``. Up to three columns more are written over."""
    apart, scales_apart = block[APART], block[SCALES_APART]
    for start in range(begin, min(block[COUNT], begin + span), RUN):
        rows = min(RUN, block[COUNT] - start)
        codes, scales = block[CODES] + start * apart, block[SCALES] + start * scales_apart
        ask_ahead(block, start + RUN, size)
        done = 0
        while done < group:
            few = MOST if done + MOST <= group else 1
            to = logits.ctypes.data + (head + done) * logits.strides[0] + 4 * (at + start)
            queries = q.ctypes.data + (head + done) * q.strides[0]
            score_run(
                few, block[FORM], codes, apart, scales, scales_apart, block[STEP], rows, queries, q.strides[0], size, scale,
                to, logits.strides[0],
            )  # fmt: skip
            done += few


@compiled()
def softmax(logits, count, softcap, sink, importance):
    """Logits (at least ``count`` up to a multiple of 16) into probabilities, in place, which are added
    to ``importance`` unless that is empty. Returns the largest logit and the sum of e^(logit - it)."""
    first = logits.ctypes.data
    wide = (count + WIDTH - 1) // WIDTH * WIDTH
    for index in range(count, wide):
        logits[index] = -np.inf
    if softcap > 0:
        cap = words.splat(softcap)
        for index in range(0, count, WIDTH):
            address = first + 4 * index
            words.store(address, words.mul(words.tanh(words.div(words.load(address), cap)), cap))
        for index in range(count, wide):
            logits[index] = -np.inf
    highest = words.splat(np.float32(-np.inf))
    for index in range(0, wide, WIDTH):
        highest = words.maximum(highest, words.load(first + 4 * index))
    top = np.float32(-np.inf)
    for index in range(WIDTH):
        value = words.lane(highest, index)
        if value > top or math.isnan(value):
            top = value
    if sink > top:
        top = sink
    lowered = words.splat(top)
    total = 0.0
    for start in range(0, wide, RUN * WIDTH):
        sums = words.splat(np.float32(0))
        for index in range(start, min(wide, start + RUN * WIDTH), WIDTH):
            address = first + 4 * index
            weights = words.exp(words.sub(words.load(address), lowered))
            words.store(address, weights)
            sums = words.add(sums, weights)
        for index in range(WIDTH):
            total += np.float64(words.lane(sums, index))
    total += math.exp(np.float64(sink - top))
    divisor = words.splat(np.float32(total))
    for index in range(0, wide, WIDTH):
        address = first + 4 * index
        weights = words.div(words.load(address), divisor)
        words.store(address, weights)
        if importance.size:
            mass, there = importance.ctypes.data + 4 * index, min(WIDTH, count - index)
            words.store_part(mass, words.add(words.load_part(mass, there), weights), there)
    return top, np.float32(total)


@part
def weigh(block, begin, span, size, weights, head, group, at, total):
    """Add the sum of weight x row over a block's rows [begin, begin + span) to ``total`` (heads, channels),
    float64, for the ``group`` heads from ``head`` on. The field is left to the caller."""
    scaled = MANY_SCALES if block[STEP] else ONE_SCALE
    apart, scales_apart = block[APART], block[SCALES_APART]
    for start in range(begin, min(block[COUNT], begin + span), RUN):
        rows = min(RUN, block[COUNT] - start)
        codes, scales = block[CODES] + start * apart, block[SCALES] + start * scales_apart
        ask_ahead(block, start + RUN, size)
        done = 0
        while done < group:
            few = MOST if done + MOST <= group else 1
            weight = weights.ctypes.data + (head + done) * weights.strides[0] + 4 * (at + start)
            to = total.ctypes.data + (head + done) * total.strides[0]
            weigh_run(
                few, block[FORM], scaled, codes, apart, scales, scales_apart, rows, weight, weights.strides[0], size,
                to, total.strides[0],
            )  # fmt: skip
            done += few


@compiled()
def soften_heads(logits, count, softcap, sinks, mass, tops, totals):
    """`softmax` of every head; ``mass`` is that of all of them."""
    for head in range(logits.shape[0]):
        tops[head], totals[head] = softmax(logits[head], count, softcap, sinks[head], mass)


@compiled()
def score_block(q, size, blocks, scale, logits, at):
    """`score` of all rows of the one block of ``blocks``, for all heads."""
    queries = with_fields(blocks, q, size, q.shape[0])
    score(blocks[0], 0, blocks[0, COUNT], queries, 0, q.shape[0], size, scale, logits, at)


@compiled()
def weigh_block(blocks, size, weights, at, total):
    """`weigh` of all rows of the one block of ``blocks``, for all heads, added to ``total`` (heads, channels up
    to a multiple of 16) float64."""
    own = np.zeros(total.shape, np.float64)
    weigh(blocks[0], 0, blocks[0, COUNT], size, weights, 0, weights.shape[0], at, own)
    for head in range(weights.shape[0]):
        add_block(blocks[0, FIELD], own[head], total[head], size)


@compiled()
def add_part(out, factors, sums):
    """Add ``out`` (heads, channels) float32 times ``factors`` (heads,) to ``sums`` (heads, channels) float64."""
    for head in range(out.shape[0]):
        for channel in range(out.shape[1]):
            sums[head, channel] += factors[head] * np.float64(out[head, channel])
