"""A recorded service through the index: which share of the tokens asked for was there before?

The trace names 512-token blocks of each prompt by number and says nothing else of them; here each
becomes 512 ids of its own. Every request is asked for, then entered, and nothing is evicted. Beside
it the same through dicts of chained block hashes.

Source: the conversation trace of Mooncake (Qin et al., "Mooncake: A KVCache-centric Disaggregated
Architecture for LLM Serving", 2024).
"""

from __future__ import annotations

import gc
import json
import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from blocks import BlockHashes
from harness import alone, anonymous_bytes, microseconds, percentile, print_table, timed

from warmkv.kvstore.geometry import Coverage
from warmkv.kvstore.store.index import Cold, Index, Namespace, Record
from warmkv.kvstore.testing.samples import random_identity
from warmkv.schema.records import CLEAN, NamespaceKey, RecordId

BLOCK_TOKENS = 512
SIZES = (16, BLOCK_TOKENS)
KEY = NamespaceKey(b"benchmark/traces")


@dataclass
class Replay:
    """What one way to find prefixes found in the trace; seconds of each question."""

    name: str
    requests: int
    asked_tokens: int
    found_tokens: int
    entries: int
    private_bytes: int
    tokens_bytes: int
    times: list[float]


def requests(path: Path, limit: int) -> list[bytes]:
    """Prompts of the trace as little-endian uint32 ids."""
    within = np.arange(BLOCK_TOKENS, dtype="<u4")
    found = []
    with open(path) as lines:
        for line in lines:
            row = json.loads(line)
            blocks = np.array(row["hash_ids"], "<u4")
            found.append((blocks[:, None] * np.uint32(BLOCK_TOKENS) + within).reshape(-1)[: row["input_length"]].tobytes())
            if len(found) == limit:
                break
    return found


def through_index(path: Path, limit: int) -> Replay:
    prompts, index, times, found = requests(path, limit), Index(), [], 0
    namespace = Namespace(KEY, os.getuid(), "", random_identity(), 0)
    gc.collect()
    before, stored = anonymous_bytes(os.getpid()), 0
    for number, tokens in enumerate(prompts):
        length = len(tokens) // 4
        took, answer = timed(index.find, KEY, CLEAN, tokens, ())
        times.append(took)
        found += answer.usable
        held = answer.held
        if held < length:
            id_ = RecordId((number + 1).to_bytes(16, "little"))
            coverage = Coverage(((held, length),))
            record = Record(id_, namespace, CLEAN, held, length, 1 << 16, 1 << 16, 0, "benchmark", coverage=coverage)
            parent = answer.path.covering(held) if answer.path is not None and held else None
            index.add(record, parent, tokens, ())
            index.set_cold(record, Cold.STORED)
            stored += length - held
    gc.collect()
    used = anonymous_bytes(os.getpid()) - before
    return Replay("index, every token", len(prompts), _total(prompts), found, len(index.records), used, 4 * stored, times)


def through_blocks(path: Path, limit: int, size: int) -> Replay:
    prompts, hashes, times, found = requests(path, limit), BlockHashes(size), [], 0
    gc.collect()
    before = anonymous_bytes(os.getpid())
    for tokens in prompts:
        took, known = timed(hashes.find, tokens)
        times.append(took)
        # As with the index, one token must be left to feed: of a prompt known whole the last block.
        found += min(len(known) * size, (len(tokens) // 4 - 1) // size * size)
        hashes.enter(tokens)
    used = anonymous_bytes(os.getpid()) - before
    return Replay(f"hashes of blocks of {size}", len(prompts), _total(prompts), found, len(hashes.blocks), used, 0, times)


def _total(prompts: list[bytes]) -> int:
    return sum(len(tokens) for tokens in prompts) // 4


def replay(path: Path, limit: int) -> list[Replay]:
    """Replay the trace, print what was found and tell it."""
    found = [alone(through_index, path, limit), *(alone(through_blocks, path, limit, size) for size in SIZES)]
    columns = ["", "entries", "tokens found", "of all", "private MB", "tokens of it", "find p50 us", "p99"]
    rows = [
        [
            item.name, f"{item.entries:,}", f"{item.found_tokens:,}", f"{item.found_tokens / item.asked_tokens:.1%}",
            f"{item.private_bytes / 1e6:.1f}", f"{item.tokens_bytes / 1e6:.1f}" if item.tokens_bytes else "",
            microseconds(percentile(item.times, 50)), microseconds(percentile(item.times, 99)),
        ]
        for item in found
    ]  # fmt: skip
    title = f"{path.stem}: {found[0].requests:,} requests of {found[0].asked_tokens:,} tokens, nothing evicted"
    print_table(title, columns, rows)
    return found
