"""Misses teach, through the daemon too: position and both ids, nearest anchor, differing field."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from warmkv import connect
from warmkv.daemon.testing import PATIENCE_S, ServedEngine
from warmkv.kvstore.store.engine import Engine
from warmkv.kvstore.testing import TOKENS, mixed_identity, random_identity, save
from warmkv.kvstore.testing.samples import layer_of
from warmkv.schema.identity import Identity, LayerKind, RopeRegime
from warmkv.schema.records import Anchor, AnchorKind

WORDS = {99: " red", 15: " blue"}
CHANGES: dict[str, Callable[[Identity], Identity]] = {
    "tokenizer": lambda item: replace(item, tokenizer=bytes(16)),
    "rope": lambda item: replace(item, rope=RopeRegime("linear", 10000.0, 2.0, 8, 4096, b"none")),
    "parameters": lambda item: replace(item, parameters=bytes(32)),
    "compute_dtype": lambda item: replace(item, compute_dtype="bfloat16"),
    "attention": lambda item: replace(item, attention="sdpa"),
    "runtime_state_version": lambda item: replace(item, runtime_state_version="2"),
    "layers": lambda item: replace(item, layers=item.layers[:1]),
}


def test_a_miss_names_position_both_ids_and_the_nearest_anchor(served: ServedEngine) -> None:
    identity = random_identity()
    with connect(served.socket, strict=True, timeout_s=PATIENCE_S) as client:
        save(client, identity, TOKENS, anchors=[Anchor(2, AnchorKind.SYSTEM_PROMPT), Anchor(4, AnchorKind.TURN), Anchor(8)])
        match = client.match(identity, [*TOKENS[:4], 99, 100])
        difference = match.first_difference
        assert difference is not None and match.nearest_anchor is not None
        assert (difference.position, difference.query, difference.stored) == (4, 99, 15)
        assert (match.nearest_anchor.position, match.nearest_anchor.kind) == (4, AnchorKind.TURN)
        said = match.explain(lambda ids: "".join(WORDS[number] for number in ids))
        for part in ("differs at 4", "' red'", "' blue'", "nearest anchor before it at 4 (turn)"):
            assert part in said


def test_a_hybrid_that_matches_further_than_it_can_resume_says_so(served: ServedEngine) -> None:
    identity = mixed_identity(layer_of(LayerKind.FULL), layer_of(LayerKind.RECURRENT))
    with connect(served.socket, strict=True, timeout_s=PATIENCE_S) as client:
        save(client, identity, TOKENS[:3])
        save(client, identity, TOKENS)
        match = client.match(identity, [*TOKENS[:5], 99], detail=True)
        assert (match.matched, match.usable) == (5, 3)
        assert "rows and states to resume from end at 3" in match.reason
        assert sorted(group.usable for group in match.groups) == [3, 5]


@pytest.mark.parametrize("field", sorted(CHANGES))
def test_a_model_that_differs_in_one_field_is_told_which(served: ServedEngine, field: str) -> None:
    stored = random_identity()
    asked = CHANGES[field](stored)
    with connect(served.socket, strict=True, timeout_s=PATIENCE_S) as client:
        save(client, stored, TOKENS)
        save(client, replace(stored, parameters=b"p" * 32, tokenizer=b"t" * 16, settings=b"s" * 16, runtime="other"), TOKENS)
        match = client.match(asked, TOKENS)
        assert (match.matched, match.usable, match.identity_difference) == (0, 0, (field,))
        assert field in match.reason
        with client.restore(asked, TOKENS) as restored:
            assert not restored and restored.match.identity_difference == (field,)
        assert client.match(stored, TOKENS).identity_difference == ()


def test_nothing_is_said_of_other_peoples_models(socket_path: Path, engine: Engine) -> None:
    """Namespaces one may not read teach nothing."""
    stored = random_identity()
    other = engine.session(1 + 2**20)
    key = other.open(stored.canonical(), "")
    with ServedEngine(socket_path, engine), connect(socket_path, strict=True, timeout_s=PATIENCE_S) as client:
        save(client, stored, TOKENS)
        namespace = engine.index.namespaces.pop(next(iter(engine.index.namespaces)))
        namespace.owner_uid = 1 + 2**20
        engine.index.namespaces[key] = namespace
        match = client.match(replace(stored, tokenizer=bytes(16)), TOKENS)
        assert match.identity_difference == () and "differs" not in match.reason
    other.close()


def test_nothing_is_said_of_other_tenants_models(served: ServedEngine) -> None:
    """Not that one is stored, not that a salt is what differs."""
    stored = random_identity()
    with connect(served.socket, strict=True, timeout_s=PATIENCE_S) as client:
        nothing = client.match(replace(stored, tenant=bytes(16)), TOKENS)
        save(client, stored, TOKENS)
        save(client, replace(stored, tenant=b"s" * 16, tokenizer=b"t" * 16), TOKENS)
        for asked in (replace(stored, tenant=bytes(16)), replace(stored, tenant=bytes(16), runtime="other")):
            match = client.match(asked, TOKENS)
            assert match.identity_difference == () and match.reason == nothing.reason


def test_an_empty_store_names_no_field(served: ServedEngine) -> None:
    with connect(served.socket, strict=True, timeout_s=PATIENCE_S) as client:
        match = client.match(random_identity(), TOKENS)
        assert match.identity_difference == () and match.reason
