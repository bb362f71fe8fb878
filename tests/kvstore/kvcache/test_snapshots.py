"""Prompts in a pack: all of them, each with its own rows and names, and nothing of a pack that is damaged."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

import pytest

from warmkv.kvstore.kvcache.snapshots import PackedPrompts
from warmkv.kvstore.store import Store, open_store
from warmkv.kvstore.testing import mixed_identity, save
from warmkv.kvstore.testing.samples import CONV, FULL, IMAGE, model_logits, records_at
from warmkv.schema import ids
from warmkv.schema import messages as m
from warmkv.schema.errors import FormatError
from warmkv.schema.identity import Identity
from warmkv.schema.records import CLEAN, Anchor, AnchorKind, Attachment

HYBRID, PLAIN = mixed_identity(FULL, CONV, FULL), mixed_identity(FULL, FULL)
PROMPT = [1, 2, 3, 4, 5, 6]
BRANCH = [1, 2, 3, 9]


@pytest.fixture
def store() -> Iterator[Store]:
    with open_store(None, warm_bytes=16 << 20) as opened:
        yield opened


@pytest.fixture
def pack(tmp_path: Path) -> Iterator[BinaryIO]:
    with open(tmp_path / "pack", "w+b") as file:
        yield file


def written(store: Store, pack: BinaryIO, identity: Identity) -> PackedPrompts:
    session = store.engine.session(os.getuid())
    key = session.open(identity.canonical(), "")
    session.report(m.Report("export", json.dumps({"namespace": key.hex()}).encode()), pack.fileno())
    return PackedPrompts(pack.fileno())


def told(prompts: PackedPrompts) -> list[tuple[list[int], str]]:
    """Tokens and reasons of all prompts, the shortest first."""
    found = [(item.tokens.tolist(), item.reason[:10]) for item in prompts.snapshots()]
    assert [len(tokens) for tokens, _ in found] == sorted(len(tokens) for tokens, _ in found)
    return sorted(found, key=lambda item: (len(item[0]), item[0]))


def require_rows(prompts: PackedPrompts, tokens: Sequence[int]) -> None:
    """Every row and state of a prompt is the one a model would compute."""
    (snapshot,) = [item for item in prompts.snapshots() if item.tokens.tolist() == list(tokens)]
    planes = prompts.planes(snapshot)
    for record in records_at(prompts.identity, tokens):
        for plane in record.planes:
            assert planes[record.layer][plane.role].tobytes() == plane.rows.tobytes()


@pytest.mark.parametrize("identity", [HYBRID, PLAIN], ids=["with states", "rows alone"])
def test_prompts_that_branch_inside_others_are_whole(store: Store, pack: BinaryIO, identity: Identity) -> None:
    for tokens in (PROMPT, BRANCH, [*BRANCH, 10, 11], [7]):
        save(store, identity, tokens)
    prompts = written(store, pack, identity)
    assert told(prompts) == [([7], ""), (BRANCH, ""), (PROMPT, ""), ([*BRANCH, 10, 11], "")]
    for tokens in (PROMPT, BRANCH, [*BRANCH, 10, 11], [7]):
        require_rows(prompts, tokens)


def test_a_name_belongs_to_its_own_prompt(store: Store, pack: BinaryIO) -> None:
    """Another prompt has as many tokens, and the rows that the name hangs on in its chain."""
    name = Anchor(4, AnchorKind.TURN, 2, 77)
    save(store, HYBRID, PROMPT, anchors=[name])
    save(store, HYBRID, BRANCH)
    save(store, HYBRID, PROMPT[:4])
    found = {tuple(item.tokens.tolist()): item.anchors for item in written(store, pack, HYBRID).snapshots()}
    assert found == {tuple(BRANCH): (), tuple(PROMPT[:4]): (name,), tuple(PROMPT): ()}


def test_states_that_hold_only_logits_are_no_prompts_end(store: Store, pack: BinaryIO) -> None:
    save(store, HYBRID, PROMPT)
    store.save(HYBRID, PROMPT, [], logits=model_logits(HYBRID, PROMPT))
    assert told(written(store, pack, HYBRID)) == [(PROMPT, "")]


def test_what_tokens_and_rows_cannot_tell_has_a_reason(store: Store, pack: BinaryIO) -> None:
    image, lineage = [Attachment(1, 2, IMAGE)], ids.lineage_after(CLEAN, "shifted", 1)
    store.save(HYBRID, [1, 1, 1, 2], records_at(HYBRID, [1, 1, 1, 2], image), attachments=image)
    store.save(HYBRID, [1, 2], records_at(HYBRID, [1, 2], lineage=lineage), lineage=lineage)
    assert told(written(store, pack, HYBRID)) == [([1, 2], "a prompt o"), ([1, 1, 1, 2], "a prompt o")]


def test_nothing_comes_of_a_pack_that_is_cut_or_flipped(store: Store, pack: BinaryIO) -> None:
    save(store, HYBRID, PROMPT)
    written(store, pack, HYBRID)
    raw = Path(pack.name).read_bytes()
    for at in range(0, len(raw), 97):
        for bad in (raw[:at], raw[:at] + bytes([raw[at] ^ 0x10]) + raw[at + 1 :]):
            pack.seek(0)
            pack.truncate()
            pack.write(bad)
            pack.flush()
            with pytest.raises(FormatError):
                PackedPrompts(pack.fileno())
