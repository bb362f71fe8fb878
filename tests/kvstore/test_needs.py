"""What a model needs, put together from its layers: groups of rows, and who has which state."""

from __future__ import annotations

import random

import pytest

from warmkv.kvstore import resume
from warmkv.kvstore.needs import ModelNeeds, Provides, RowGroup, needs_of_model
from warmkv.kvstore.resume import All, Chunk, Exact, Last, SinksAndLast, Trimmable
from warmkv.kvstore.testing.samples import (
    CONV,
    ENCODER,
    FULL,
    NYSTROM,
    OPAQUE,
    RECURRENT,
    RING,
    chunked,
    hybrid,
    random_mixture,
    shared,
    sink_window,
    sliding,
)
from warmkv.schema.identity import LayerSpec


def test_layers_needed_alike_form_one_group_in_order_of_the_first() -> None:
    layers = (
        sliding(4), FULL, CONV, sliding(8), hybrid(), sliding(4), chunked(4), hybrid(8), sink_window(2, 4), shared(1), OPAQUE,
        ENCODER, FULL,
    )  # fmt: skip
    assert needs_of_model(layers) == ModelNeeds(
        (
            RowGroup(Last(3), (0, 5)), RowGroup(All(), (1, 4, 12)), RowGroup(Last(7), (3, 7)), RowGroup(Chunk(4), (6,)),
            RowGroup(SinksAndLast(2, 3), (8,)),
        ),
        exact=(2, 4, 7), trimmable=(10,), constant=(11,),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("layers", "windowed", "anywhere", "count"),
    [
        ((FULL, FULL), False, True, 2), ((FULL, shared(0)), False, True, 1), ((FULL, sliding(4)), True, False, 2),
        ((sliding(1),), True, False, 1), ((FULL, CONV), False, False, 2), ((hybrid(),), False, False, 1),
        ((RING, RECURRENT, NYSTROM), False, False, 3), ((OPAQUE, FULL), False, True, 2), ((FULL, ENCODER), False, True, 2),
        ((chunked(4), hybrid(3), OPAQUE, ENCODER), True, False, 4),
    ],
)  # fmt: skip
def test_where_a_model_can_resume_in_general(layers: tuple[LayerSpec, ...], windowed: bool, anywhere: bool, count: int) -> None:
    needs = needs_of_model(layers)
    assert (needs.windowed, needs.anywhere, needs.layer_count) == (windowed, anywhere, count)


def test_states_are_needed_once_however_many_layers_have_them() -> None:
    assert needs_of_model((CONV, RECURRENT, hybrid(), OPAQUE, OPAQUE)).state_needs() == (Exact(), Trimmable())
    assert needs_of_model((FULL, ENCODER)).state_needs() == ()


def test_every_layer_is_where_its_own_needs_put_it() -> None:
    """Random mixtures, read layer by layer."""
    rng = random.Random(3)
    for _ in range(500):
        layers = random_mixture(rng, 8)
        needs = needs_of_model(layers)
        by_layer = {layer: group.need for group in needs.groups for layer in group.layers}
        assert sum(len(group.layers) for group in needs.groups) == len(by_layer)
        assert len({group.need for group in needs.groups}) == len(needs.groups)
        assert [group.layers[0] for group in needs.groups] == sorted(group.layers[0] for group in needs.groups)
        for index, layer in enumerate(layers):
            assert by_layer.get(index) == resume.row_need(layer)
            state = resume.state_need(layer)
            kinds = [index in found for found in (needs.exact, needs.trimmable, needs.constant)]
            expected = [isinstance(state, kind) for kind in (Exact, Trimmable, resume.Const)]
            assert kinds == expected
        assert all(group.whole == isinstance(group.need, All) for group in needs.groups)


def test_numbers_of_what_states_provide_are_final() -> None:
    """They travel in the reply to an offer."""
    numbers = {"EXACT": 1, "TRIMMABLE": 2, "CONSTANT": 4, "LOGITS": 8, "IMPORTANCE": 16}
    assert {flag.name: int(flag) for flag in Provides} == numbers
