"""Faults a kernel or a live layer could have, one a line of its code: what the tests must notice.

Each is an exact piece of a file that occurs there once, and what stands there instead.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Mutant:
    """``tests`` are the files, below tests/, that are to fail while ``file`` has ``wrong`` for ``right``."""

    name: str
    file: str
    right: str
    wrong: str
    tests: tuple[str, ...]


REFERENCE, CHUNK, SOFTEN = (f"kernels/attention/{name}.py" for name in ("reference", "chunk", "soften"))
FAST, COMPILED, LAYER = (f"kernels/attention/{name}.py" for name in ("fast", "compiled", "layer"))
ADDRESSES, FORMATS, TILES = "kernels/attention/addresses.py", "kernels/formats.py", "kernels/compiled/tiles.py"
FORMS, HOST, ROPE_COMPILED = "kernels/compiled/forms.py", "kernels/resident/host.py", "kernels/rope/compiled.py"
CU_PRELUDE, CU_GATHER = "kernels/cuda/prelude.cu", "kernels/resident/gather.cu"
CU_ROWS, CU_APPEND, CU_DECODE = (f"kernels/quant/{name}.cu" for name in ("rows", "append", "decode"))
QUANT, QUANT_FAST = "kernels/quant/reference.py", "kernels/quant/fast.py"
BLOCKS, BLOCKS_FAST, FP8 = (f"kernels/quant/{name}.py" for name in ("blocks", "blocks_fast", "fp8"))
RING, RING_FAST = "kernels/ring/reference.py", "kernels/ring/fast.py"
NYSTROM, NYSTROM_FAST = "kernels/nystrom/reference.py", "kernels/nystrom/fast.py"
PLANES, GROWING = "kvstore/live/rows/planes.py", "kvstore/live/rows/growing.py"
ATTENTION, BOUNDED, PLACES = (f"kvstore/live/layers/{name}.py" for name in ("attention", "bounded", "places"))
EVICT = "kvstore/live/evict.py"
TURBO, PACKING, COMPOSED = "kernels/turboquant/reference.py", "kernels/turboquant/packing.py", "kernels/attention/composed.py"
TURBO_LANES, ROPE = "kernels/turboquant/lanes.py", "kernels/rope/reference.py"
SHIFT, STATE, MODEL, CONV = (f"kvstore/live/{name}.py" for name in ("shift", "state", "model", "layers/conv"))

OF_REFERENCE, OF_CHUNK = ("kernels/test_attention.py",), ("kernels/test_chunk.py",)
OF_FAST, OF_QUANT = ("kernels/test_attention_fast.py",), ("kernels/test_quant.py",)
OF_QUANT_FAST = ("kernels/test_quant_fast.py",)
OF_BLOCKS, OF_HOST = ("kernels/test_attention_blocks.py",), ("kernels/test_resident_host.py",)
OF_CUDA = ("kernels/cuda/test_quant_cuda.py",)
OF_QUANT_BLOCKS, OF_FP8 = ("kernels/test_quant_blocks.py",), ("kernels/test_quant_fp8.py",)
OF_RING, OF_NYSTROM = ("kernels/test_ring.py",), ("kernels/test_nystrom.py",)
OF_ATTENTION = ("kvstore/live/test_attention_layer.py", "kvstore/live/test_attention_walk.py")
OF_ROWS = ("kvstore/live/test_growing.py", "kvstore/live/test_freeze.py")
OF_TURBO, OF_TURBO_BLOCK = ("kernels/test_turboquant.py",), ("kernels/test_turboquant_block.py",)
OF_SHIFT, OF_STATE = ("kvstore/live/test_shift.py",), ("kvstore/live/test_state.py",)

MUTANTS = (
    Mutant(
        "keys scaled by the group before", REFERENCE, "dtype=np.float32) * block.scales[:, index]",
        "dtype=np.float32) * block.scales[:, index - 1]", OF_REFERENCE,
    ),
    Mutant("a window one row too wide", REFERENCE, "max(0, upto - window) if", "max(0, upto - window - 1) if", OF_REFERENCE),
    Mutant("the sink missing in the denominator", REFERENCE, " + np.exp(np.float64(sink - top))", "", OF_REFERENCE),
    Mutant(
        "parts merged without rescaling", REFERENCE, "np.exp(np.float64(part.top - anything)) * part.total",
        "np.float64(1) * part.total", OF_REFERENCE,
    ),
    Mutant(
        "the soft cap after the maximum was taken off", REFERENCE, "np.tanh(logits / np.float32(softcap))",
        "np.tanh((logits - logits.max(initial=-np.inf)) / np.float32(softcap))", OF_REFERENCE,
    ),
    Mutant(
        "importance of rows that were masked", REFERENCE, "importance[first:last] += weights",
        "importance[: last - first] += weights", OF_REFERENCE,
    ),
    Mutant(
        "values without their field", REFERENCE, "return total if block.field is None else total * block.field",
        "return total", OF_REFERENCE,
    ),
    Mutant(
        "a chunk that sees one row ahead", CHUNK, "np.arange(first, last) // self.heads + 1",
        "np.arange(first, last) // self.heads + 2", OF_CHUNK,
    ),
    Mutant(
        "a chunk whose window is one row too wide", CHUNK, "np.maximum(high - self.window, 0)",
        "np.maximum(high - self.window - 1, 0)", OF_CHUNK,
    ),
    Mutant("a maximum that stays stale", CHUNK, "    top[:] = highest\n", "", OF_CHUNK),
    Mutant("tiles added without rescaling", CHUNK, "np.multiply(mine, faded[:, None], out=mine)", "pass", OF_CHUNK),
    Mutant("a chunk without its sinks", CHUNK, "total[:] = ~np.isneginf(top)", "total[:] = 0", OF_CHUNK),
    Mutant(
        "a chunk's importance of masked rows", CHUNK, "soften(weights, part.low, part.high, top[mine]",
        "soften(weights, np.zeros_like(part.low), part.high, top[mine]", OF_CHUNK,
    ),
    Mutant("unseen NaN multiplied by zero", CHUNK, "    if not part.whole:\n", "    if False:\n", OF_CHUNK),
    Mutant(
        "a tile of the wrong rows of values", CHUNK, "v[part.left : part.right], part)", "v[: part.right - part.left], part)",
        OF_CHUNK,
    ),
    Mutant(
        "compiled: a masked column keeps its score", SOFTEN, "row[max(end, 0) :] = 0", "row[max(end, 0) + 1 :] = 0", OF_CHUNK,
    ),
    Mutant("compiled: a maximum that stays stale", SOFTEN, "top[index] = highest", "top[index] = top[index]", OF_CHUNK),
    Mutant(
        "compiled: the sink missing in the denominator", COMPILED, "total += math.exp(np.float64(sink - top))",
        "total += 0.0", OF_FAST,
    ),
    Mutant(
        "compiled: importance overwritten", COMPILED, "words.add(words.load_part(mass, there), weights)",
        "weights", OF_FAST,
    ),
    Mutant(
        "compiled: values without their field", COMPILED,
        "factor = np.float64(words.number(field + 4 * channel)) if field else 1.0", "factor = 1.0", OF_FAST,
    ),
    Mutant(
        "compiled: halves without their sign where the machine has none", FORMS, "builder.bitcast(builder.or_(size, sign), _VEC)",
        "builder.bitcast(size, _VEC)", ("kernels/test_lanes.py",),
    ),
    Mutant(
        "compiled: scales of others", ADDRESSES, "scales = rows.ctypes.data + low * scales_apart", "scales = rows.ctypes.data",
        OF_FAST,
    ),
    Mutant(
        "compiled: importance of masked rows", FAST, "importance[first : max(first, last)]",
        "importance[: max(first, last) - first]", OF_FAST,
    ),
    Mutant(
        "a chunk with the sinks of the first heads for all", LAYER,
        "softcap=softcap, sinks=None if sinks is None else sinks[mine]",
        "softcap=softcap, sinks=None if sinks is None else sinks[:group]", (*OF_FAST, *OF_ATTENTION),
    ),
    Mutant(
        "halves rounded to even", QUANT, "np.abs(x - whole) >= np.float32(0.5)", "np.abs(x - whole) > np.float32(0.5)", OF_QUANT,
    ),
    Mutant("a field of one row too many", QUANT, "max(1, len(rows))", "len(rows) + 1", OF_QUANT),
    Mutant("rows decoded without their field", QUANT, "np.multiply(rows, block.field, out=rows)", "pass", OF_QUANT),
    Mutant(
        "compiled: halves rounded to even", QUANT_FAST, "abs(steps - whole) >= HALF", "abs(steps - whole) > HALF", OF_QUANT_FAST,
    ),
    Mutant("compiled: the field of another channel", QUANT_FAST, "row[at] / field[at]", "row[at] / field[0]", OF_QUANT_FAST),
    Mutant(
        "compiled: the scale of the first group", QUANT_FAST, "scale = scales[index, which]", "scale = scales[index, 0]",
        OF_QUANT_FAST,
    ),
    Mutant("the wrong slot of a ring", RING, "slot = (seen - 1 - distance)", "slot = (seen - distance)", OF_RING),
    Mutant("the rotary factor once only", RING, "float(rope_scale) ** 2", "float(rope_scale)", OF_RING),
    Mutant(
        "compiled: the wrong slot of a ring", RING_FAST, "ring_keys[(seen - 1 - distance) % window]",
        "ring_keys[(seen - distance) % window]", OF_RING,
    ),
    Mutant("compiled: a rotation the other way", RING_FAST, "- high[at] * sin[at]", "+ high[at] * sin[at]", OF_RING),
    Mutant("the ridge missing", NYSTROM, "ridge = RIDGE * mean", "ridge = 0.0 * mean", OF_NYSTROM),
    Mutant("landmarks added to without rescaling", NYSTROM, "far.values * kept[:, None] + ", "far.values + ", OF_NYSTROM),
    Mutant(
        "a window that skips a slot", NYSTROM, "(group.head + 1) % group.window", "(group.head + 2) % group.window", OF_NYSTROM,
    ),
    Mutant(
        "compiled: landmarks added to without rescaling", NYSTROM_FAST, "before[at] * kept + weight", "before[at] + weight",
        OF_NYSTROM,
    ),
    Mutant(
        "compiled: a negative estimate that counts", NYSTROM_FAST, "if has_far and below_far >= 0:", "if has_far:", OF_NYSTROM,
    ),
    Mutant(
        "a prompt's window turned by one", NYSTROM_FAST, "np.arange(last - sinks, len(k) - sinks) % window",
        "np.arange(last - sinks + 1, len(k) - sinks + 1) % window", OF_NYSTROM,
    ),
    Mutant("a freeze one row early", PLANES, "WARMUP_ROWS - before)", "WARMUP_ROWS - 1 - before)", OF_ROWS),
    Mutant(
        "the field of the first head for all", GROWING, "= self._field[head]\n", "= self._field[0]\n",
        (*OF_ROWS, *OF_ATTENTION),
    ),
    Mutant(
        "rows dropped in front that stay", GROWING, "self._first, self._count = self._first + rows, self._count - rows",
        "self._count = self._count - rows", OF_ROWS,
    ),
    Mutant(
        "a layer's window one row too narrow", ATTENTION, "first = last - self.plan.window if",
        "first = last - self.plan.window + 1 if", OF_ATTENTION,
    ),
    Mutant(
        "answers observed though not to be", ATTENTION,
        "importance=self.importance if observe else None, threads=self.threads,\n        ).out  # fmt: skip\n"
        "        return self._with_dead(out, 0)", "importance=self.importance, threads=self.threads,\n"
        "        ).out  # fmt: skip\n        return self._with_dead(out, 0)", OF_ATTENTION,
    ),
    Mutant(
        "the next position counted from rows", PLACES, "        self.rows = len(kept)\n",
        "        self.rows = self.position = len(kept)\n", OF_ATTENTION,
    ),
    Mutant(
        "undo rows beyond their depth", BOUNDED, "min(self._undone + 1, self._ring.undo_rows)", "self._undone + 1",
        ("kvstore/live/test_bounded.py",),
    ),
    Mutant(
        "eviction that gives up a sink", EVICT, "np.arange(sinks, rows - recent", "np.arange(max(0, sinks - 1), rows - recent",
        ("kvstore/live/test_evict.py",),
    ),
    Mutant(
        "turboquant: an estimator that is the square root of the size too small", TURBO, "        return self.gain(size)\n",
        "        return self.gain(size) / float(np.sqrt(size))\n", OF_TURBO,
    ),
    Mutant(
        "turboquant: codes of a byte the other way round", PACKING, "shifted = four << np.array([0, 2, 4, 6], np.uint8)",
        "shifted = four << np.array([6, 4, 2, 0], np.uint8)", ("kernels/test_turboquant_parts.py",),
    ),
    Mutant(
        "turboquant: signs that count the other way", TURBO, "np.where(unpack(part.signs, 1) == 1,",
        "np.where(unpack(part.signs, 1) == 0,", OF_TURBO,
    ),
    Mutant(
        "turboquant: the length of the residual missing", TURBO, "found + part.residuals.astype(np.float32) * kappa *",
        "found + kappa *", OF_TURBO,
    ),
    Mutant(
        "turboquant: sums that are not turned back", COMPOSED, "total += fast.unrotate(sums.astype(np.float32), rotation)",
        "total += sums", OF_TURBO_BLOCK,
    ),
    Mutant(
        "turboquant: scores of a block where those of the first stand", COMPOSED, "logits[:, at : at + len(block)] = found",
        "logits[:, : len(block)] = found", OF_TURBO_BLOCK,
    ),
    Mutant(
        "turboquant compiled: the length of the residual missing", TURBO_LANES,
        "left = _wide(rho[(row + index) * rho_apart]) * (rest[index] - signed_less[query])",
        "left = rest[index] - signed_less[query]", OF_TURBO,
    ),
    Mutant(
        "turboquant compiled: values of length 1", TURBO_LANES, "given[row] * _wide(norms[(begin + row) * norms_apart])",
        "given[row]", OF_TURBO,
    ),
    Mutant(
        "turboquant: all layers rotated alike", "kvstore/live/layers/makings.py",
        "Rotation.of(turboquant.seed, self.index, size)", "Rotation.of(turboquant.seed, 0, size)",
        ("kvstore/live/test_turboquant_layers.py",),
    ),
    Mutant("rope: a turn that mirrors", ROPE, "a * cos - b * sin", "a * cos + b * sin", ("kernels/test_rope.py",)),
    Mutant(
        "shift: keys turned the other way", SHIFT, "_turn(keys, still, -count, rope", "_turn(keys, still, count, rope", OF_SHIFT,
    ),
    Mutant("shift: keys turned that stay", SHIFT, "_turn(keys, still, -count, rope", "_turn(keys, 0, -count, rope", OF_SHIFT),
    Mutant(
        "shift: a convolution's states stay where they were", CONV, "self._positions[behind] -= count", "pass", OF_SHIFT,
    ),
    Mutant(
        "shift: going back behind it is not told", MODEL, "self._decided = 0 if found == CLEAN else self.position",
        "self._decided = 0", OF_SHIFT,
    ),
    Mutant(
        "state: going back behind a change is not told", STATE, "        if any(counts.values()):\n", "        if False:\n",
        OF_STATE,
    ),
    Mutant(
        "state: a restore that remembers what was", CONV, "            self.history.clear()\n            self.history.push(",
        "            self.history.push(", (*OF_STATE, "kvstore/live/test_conv.py"),
    ),
    Mutant("compiled blocks: fifth bits of the other half", FORMS, "zip((4, 6), codes", "zip((6, 4), codes", OF_BLOCKS),
    Mutant("compiled blocks: codes of 4 bits from 0 on", FORMS, "_const(8, _BYTES)", "_const(0, _BYTES)", OF_BLOCKS),
    Mutant("compiled fp8: a large number for NaN", FORMS, "_const(0x7E00, _SHORTS)", "_const(0x3F80, _SHORTS)", OF_BLOCKS),
    Mutant(
        "blocks weighed: what wide words leave taken at half the distance", TILES, "loop.index, least * WIDTH), least",
        "loop.index, WIDTH), least", OF_BLOCKS,
    ),
    Mutant("blocks: heads without channels", FORMATS, "size < BLOCK or size % BLOCK", "size % BLOCK", OF_QUANT_BLOCKS),
    Mutant(
        "blocks: 1/d that is not finite", BLOCKS, "np.where(np.isfinite(found), found, np.float32(0))", "found",
        OF_QUANT_BLOCKS,
    ),
    Mutant(
        "blocks: codes of the scale as it is stored", BLOCKS, "half_away(x * inverse(d))",
        "half_away(x * inverse(d.astype(np.float16).astype(np.float32)))", OF_QUANT_BLOCKS,
    ),
    Mutant(
        "blocks: of equal magnitudes the last", BLOCKS, "np.argmax(np.abs(x), axis=-1)",
        "BLOCK - 1 - np.argmax(np.abs(x[..., ::-1]), axis=-1)", OF_QUANT_BLOCKS,
    ),
    Mutant("compiled encoders: halves towards zero", BLOCKS_FAST, "abs(steps - whole) >= HALF", "abs(steps - whole) > HALF",
           OF_QUANT_BLOCKS),
    Mutant("compiled encoders: of equal zeros the last", BLOCKS_FAST, "x[at] < low", "x[at] <= low", OF_QUANT_BLOCKS),
    Mutant("compiled encoders: fifth bits backwards", BLOCKS_FAST, "out[4 + at] =", "out[7 - at] =", OF_QUANT_BLOCKS),
    Mutant(
        "compiled encoders: infinity as a number", BLOCKS_FAST, "if _top(x) >= INFINITY", "if _top(x) > INFINITY",
        OF_QUANT_BLOCKS,
    ),
    Mutant("compiled encoders: ties of fp8 go up", BLOCKS_FAST, "0x7FFFF + even", "0x80000", OF_FP8),
    Mutant("compiled encoders: fp8 overflows", BLOCKS_FAST, "min(magnitude, FP8_LARGEST)", "magnitude", OF_FP8),
    Mutant("fp8: what is too large overflows", FP8, "np.minimum(np.abs(rows), LARGEST)", "np.abs(rows)", OF_FP8),
    Mutant("fp8: steps of small numbers too fine", FP8, "_LOWEST), _LOWEST)", "_LOWEST), _LOWEST - 1)", OF_FP8),
    Mutant(
        "fp8: other variants read as this one", "kvstore/bridge/restoring.py", "if alike and foreign:", "if False:",
        ("kvstore/test_bridge_blocks.py",),
    ),
    Mutant(
        "resident: rows written where their positions say", HOST, "at, count = length - base, len(rows)",
        "at, count = length, len(rows)", OF_HOST,
    ),
    Mutant("resident: a window one row too wide", HOST, "max(0, last - window)", "max(0, last - window - 1)", OF_HOST),
    Mutant(
        "resident: the first row that moves forgotten", HOST, "range(still, len(kept), _MOVED)",
        "range(still + 1, len(kept), _MOVED)", OF_HOST,
    ),
    Mutant(
        "rope compiled: pairs that lie side by side not exchanged", ROPE_COMPILED, "words.mul(words.swap(a), s)",
        "words.mul(a, s)", ("kernels/test_rope_fast.py",),
    ),
    Mutant("cuda: ties of float16 go up", CU_PRELUDE, "0xfffu + ((magnitude >> 13) & 1u)", "0xfffu + 1u", OF_CUDA),
    Mutant("cuda: fp8 overflows early", CU_PRELUDE, "if (magnitude >= 0x43e00000u)", "if (magnitude >= 0x43d00000u)", OF_CUDA),
    Mutant(
        "cuda: NaN of fp8 is a number", CU_PRELUDE, "if (magnitude == 0x7fu) return",
        "if (magnitude == 0x80u) return", OF_CUDA,
    ),
    Mutant("cuda: halves rounded to even", CU_APPEND, "(u32)(int)roundf(x[i] * by)", "(u32)(int)rintf(x[i] * by)", OF_CUDA),
    Mutant(
        "cuda: of equal extremes the last", CU_APPEND, "lower ? other_key >= key : other_key > key",
        "lower ? other_key > key : other_key >= key", OF_CUDA,
    ),
    Mutant(
        "cuda: an inverse that is infinite", CU_APPEND, "return isfinite(inverted) ? inverted : 0.0f;",
        "return inverted;", OF_CUDA,
    ),
    Mutant(
        "cuda: fifth bits of the lane before", CU_APPEND, "(code >> 4) << (PER_LANE * lane + i)",
        "(code >> 4) << (PER_LANE * (lane ^ 1) + i)", OF_CUDA,
    ),
    Mutant("cuda: rows written where their positions say", CU_APPEND, "*length - *base, count", "*length, count", OF_CUDA),
    Mutant(
        "cuda: blocks written behind the plane", CU_APPEND, "at >= 0 && at < capacity;",
        "at >= 0 && at <= capacity;", OF_CUDA,
    ),
    Mutant("cuda: one scale for all keys", CU_ROWS, "(K ? 4 * (channel / GROUP) : 0), scale", "0, scale", OF_CUDA),
    Mutant("cuda: high nibbles read as low ones", CU_ROWS, "channel & 16 ? 4 : 0", "0", OF_CUDA),
    Mutant(
        "cuda: the field of the channel before", CU_DECODE, "field + within), by",
        "field + (within ? within - N : 0)), by", OF_CUDA,
    ),
    Mutant(
        "cuda: kept rows moved where they lie", CU_GATHER, "store(scratch + (size_t)at * WORD, load<T>(",
        "store((u8*)plane + (size_t)at * WORD, load<T>(", OF_CUDA,
    ),
)  # fmt: skip
