"""Caches of every kind to records and back: bit for bit, and as good as a full forward pass."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator

import pytest
import torch
from transformers import DynamicCache, LlamaForCausalLM, PreTrainedModel

from warmkv.kvstore.integrations.hf_cache import cache_length, new_cache, shorten, to_rows
from warmkv.kvstore.integrations.hf_geometry import Geometry, observe
from warmkv.kvstore.integrations.hf_records import from_restored, to_records
from warmkv.kvstore.integrations.hf_versions import continues_at_once
from warmkv.kvstore.restored import Restored
from warmkv.kvstore.rows import LayerRows, LayerState
from warmkv.schema.errors import RecordError
from warmkv.schema.identity import LayerKind, PlaneRole

AsRestored = Callable[..., Restored]
LogitsOf = Callable[..., torch.Tensor]
Filled = Callable[..., DynamicCache]
CPU = torch.device("cpu")
#: One token; around the longest kernel (4); around window and chunk (16) and their multiples.
LENGTHS = [1, 2, 3, 4, 5, 14, 15, 16, 17, 18, 31, 32, 33, 40]
SUFFIX = 7


def long_prompt() -> list[int]:
    generator = torch.Generator().manual_seed(7)
    return torch.randint(2, 94, (64,), generator=generator).tolist()


def live_cache(model: PreTrainedModel, logits_of: LogitsOf, ids: list[int]) -> DynamicCache:
    cache = new_cache(model)
    logits_of(model, ids, cache)
    return cache


def state_tensors(layer: object) -> Iterator[tuple[str, torch.Tensor]]:
    """All tensors of numbers a layer holds, by name."""
    for name, value in vars(layer).items():
        if isinstance(value, torch.Tensor):
            yield name, value
        elif isinstance(value, dict):
            yield from ((f"{name}.{number}", tensor) for number, tensor in value.items() if isinstance(tensor, torch.Tensor))


def settings(layer: object) -> dict[str, object]:
    """Everything else: flags, lengths, dtypes, devices."""
    found: dict[str, object] = {}
    for name, value in vars(layer).items():
        if isinstance(value, dict):
            found[name] = {number: item for number, item in value.items() if not isinstance(item, torch.Tensor)}
        elif not isinstance(value, torch.Tensor):
            found[name] = value
    return found


def assert_same(ours: DynamicCache, live: DynamicCache, geometry: Geometry, length: int) -> None:
    """Bit for bit; of closed chunks, which nobody sees, only the number of rows."""
    for spec, mine, theirs in zip(geometry.layers, ours.layers, live.layers, strict=True):
        assert type(mine) is type(theirs)
        assert settings(mine) == settings(theirs)
        tensors = dict(state_tensors(theirs))
        assert dict(state_tensors(mine)).keys() == tensors.keys()
        for name, tensor in state_tensors(mine):
            expected = tensors[name]
            assert (tensor.dtype, tensor.shape, tensor.device) == (expected.dtype, expected.shape, expected.device), name
            if spec.kind is LayerKind.CHUNKED and name in ("keys", "values"):
                closed = tensor.shape[2] - length % spec.chunk
                assert not tensor[:, :, :closed].any()
                tensor, expected = tensor[:, :, closed:], expected[:, :, closed:]
            assert torch.equal(tensor, expected), name


# -- every kind of layer -----------------------------------------------------------------


@pytest.mark.parametrize("length", LENGTHS)
def test_a_restored_cache_is_the_live_one(
    tiny: PreTrainedModel, logits_of: LogitsOf, as_restored: AsRestored, length: int
) -> None:
    geometry, ids = observe(tiny, CPU), long_prompt()
    live, back = live_cache(tiny, logits_of, ids[:length]), new_cache(tiny)
    from_restored(back, geometry, as_restored(geometry, to_records(live, geometry, length), length), length)
    assert cache_length(back) == cache_length(live) == length
    assert_same(back, live, geometry, length)
    twin = copy.deepcopy(live)
    for at in range(length, length + 3):
        assert torch.equal(logits_of(tiny, ids[at : at + 1], back, at), logits_of(tiny, ids[at : at + 1], twin, at))
    assert cache_length(back) == length + 3


def test_a_suffix_has_the_logits_of_a_full_forward_pass(
    kind: str, tiny: PreTrainedModel, logits_of: LogitsOf, as_restored: AsRestored, record_property: Callable[..., None]
) -> None:
    geometry, ids = observe(tiny, CPU), long_prompt()
    step = SUFFIX if not geometry.delicate or continues_at_once(tiny.config.model_type) else 1
    worst = 0.0
    full = logits_of(tiny, ids)
    for length in LENGTHS:
        live, back = live_cache(tiny, logits_of, ids[:length]), new_cache(tiny)
        from_restored(back, geometry, as_restored(geometry, to_records(live, geometry, length), length), length)
        got = logits_of(tiny, ids[length : length + SUFFIX], back, length, step)
        worst = max(worst, float((got - full[length : length + SUFFIX]).abs().max()))
    record_property("greatest_difference", worst)
    print(f"{kind}: greatest difference {worst:.1e}, logits up to {float(full.abs().max()):.1f}")
    assert worst < 1e-5


def test_records_do_not_change_when_the_cache_goes_on(tiny: PreTrainedModel, logits_of: LogitsOf) -> None:
    geometry, ids = observe(tiny, CPU), long_prompt()
    cache = live_cache(tiny, logits_of, ids[:20])
    records = to_records(cache, geometry, 20)
    before = [plane.rows.copy() for record in records for plane in record.planes]
    for at in range(20, 40):
        logits_of(tiny, ids[at : at + 1], cache, at)
    after = [plane.rows for record in records for plane in record.planes]
    assert all((one == other).all() for one, other in zip(before, after, strict=True))


def test_going_on_leaves_what_was_restored_alone(tiny: PreTrainedModel, logits_of: LogitsOf, as_restored: AsRestored) -> None:
    geometry, ids = observe(tiny, CPU), long_prompt()
    live = live_cache(tiny, logits_of, ids[:20])
    restored = as_restored(geometry, to_records(live, geometry, 20), 20)
    arrays = [b for layer in restored.layers for p in (*layer.planes.values(), *layer.states.values()) for b in p.blocks]
    before = [array.copy() for array in arrays]
    cache = new_cache(tiny)
    from_restored(cache, geometry, restored, 20)
    for at in range(20, 24):
        logits_of(tiny, ids[at : at + 1], cache, at)
    assert all((one == other).all() for one, other in zip(before, arrays, strict=True))


def test_what_was_restored_is_stored_again_unchanged(tiny: PreTrainedModel, logits_of: LogitsOf, as_restored: AsRestored) -> None:
    geometry, ids = observe(tiny, CPU), long_prompt()
    records = to_records(live_cache(tiny, logits_of, ids[:37]), geometry, 37)
    cache = new_cache(tiny)
    from_restored(cache, geometry, as_restored(geometry, records, 37), 37)
    again = to_records(cache, geometry, 37)
    for one, other in zip(records, again, strict=True):
        assert (type(one), one.layer) == (type(other), other.layer)
        if isinstance(one, LayerRows) and isinstance(other, LayerRows):
            assert one.first == other.first
        for mine, theirs in zip(one.planes, other.planes, strict=True):
            assert mine.rows.shape == theirs.rows.shape and (mine.rows == theirs.rows).all()


def test_a_cache_of_another_length_is_refused(tiny: PreTrainedModel, logits_of: LogitsOf) -> None:
    geometry, ids = observe(tiny, CPU), long_prompt()
    cache = live_cache(tiny, logits_of, ids[:20])
    for length in (0, 19, 21):
        with pytest.raises(RecordError, match=f"holds 20 tokens, {length} were given"):
            to_records(cache, geometry, length)


def test_state_of_every_layer_carries_the_position(tiny: PreTrainedModel, logits_of: LogitsOf) -> None:
    geometry, ids = observe(tiny, CPU), long_prompt()
    records = to_records(live_cache(tiny, logits_of, ids[:20]), geometry, 20)
    assert {record.layer for record in records if isinstance(record, LayerState)} == {
        index for index, layer in enumerate(geometry.layers) if layer.state_planes
    }
    assert {record.layer for record in records if isinstance(record, LayerRows)} == {
        index for index, layer in enumerate(geometry.layers) if layer.row_planes
    }
    for record in records:
        if isinstance(record, LayerState):
            assert record.position == 20 and all(len(plane.rows) == 1 for plane in record.planes)
        else:
            assert record.end == 20


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_comes_back_bit_for_bit(
    make_tiny: Callable[..., PreTrainedModel], logits_of: LogitsOf, as_restored: AsRestored, kind: str, dtype: torch.dtype
) -> None:
    if kind == "deepseek_v32" and dtype is torch.float16:
        pytest.skip("its router has no float16 kernel on the CPU")
    model = make_tiny(kind).to(dtype)
    geometry, ids = observe(model, CPU), long_prompt()
    live, back = live_cache(model, logits_of, ids[:20]), new_cache(model)
    from_restored(back, geometry, as_restored(geometry, to_records(live, geometry, 20), 20), 20)
    assert_same(back, live, geometry, 20)


# -- windows and chunks ------------------------------------------------------------------


@pytest.mark.parametrize("length", [1, 14, 15, 16, 17, 40])
def test_a_window_hands_out_what_the_library_keeps(
    make_tiny: Callable[..., PreTrainedModel], logits_of: LogitsOf, length: int
) -> None:
    model = make_tiny("gemma3")
    records = to_records(live_cache(model, logits_of, long_prompt()[:length]), observe(model, CPU), length)
    rows = records[0]
    assert isinstance(rows, LayerRows)
    assert (len(rows.planes[0].rows), rows.first) == (min(length, 15), max(0, length - 15))


@pytest.mark.parametrize("length", [1, 15, 16, 17, 31, 32, 33])
def test_a_chunk_hands_out_its_open_rows_only(
    make_tiny: Callable[..., PreTrainedModel], logits_of: LogitsOf, length: int
) -> None:
    model = make_tiny("llama4")
    records = to_records(live_cache(model, logits_of, long_prompt()[:length]), observe(model, CPU), length)
    rows = records[0]
    assert isinstance(rows, LayerRows)
    assert (len(rows.planes[0].rows), rows.first) == (length % 16, length // 16 * 16)


def test_rows_of_closed_chunks_are_never_seen(
    make_tiny: Callable[..., PreTrainedModel], logits_of: LogitsOf, as_restored: AsRestored
) -> None:
    model, ids = make_tiny("llama4"), long_prompt()
    geometry = observe(model, CPU)
    live = live_cache(model, logits_of, ids[:20])
    back = new_cache(model)
    from_restored(back, geometry, as_restored(geometry, to_records(live, geometry, 20), 20), 20)
    for layer in back.layers[:2]:
        layer.keys[:, :, :11] = 1e3
        layer.values[:, :, :11] = -1e3
    assert torch.equal(logits_of(model, ids[20:40], back, 20), logits_of(model, ids[20:40], live, 20))


def test_a_state_cannot_be_cut(make_tiny: Callable[..., PreTrainedModel], logits_of: LogitsOf, as_restored: AsRestored) -> None:
    model = make_tiny("gemma3")
    geometry = observe(model, CPU)
    restored = as_restored(geometry, to_records(live_cache(model, logits_of, long_prompt()[:20]), geometry, 20), 20)
    cache = new_cache(model)
    with pytest.raises(RecordError, match="cannot be cut to 19"):
        from_restored(cache, geometry, restored, 19)
    assert cache_length(cache) == 0


@pytest.mark.parametrize("kind", ["gemma3", "mamba2", "falcon_h1", "inkling", "deepseek_v32"], indirect=True)
def test_a_restore_that_lacks_a_plane_leaves_the_cache_empty(
    tiny: PreTrainedModel, logits_of: LogitsOf, as_restored: AsRestored
) -> None:
    geometry = observe(tiny, CPU)
    records = to_records(live_cache(tiny, logits_of, long_prompt()[:20]), geometry, 20)
    roles = {plane.role for record in records for plane in record.planes}
    for role in roles:
        restored = as_restored(geometry, records, 20)
        last = restored.layers[-1]
        (last.planes if role in last.planes else last.states).pop(role)
        cache = new_cache(tiny)
        with pytest.raises(RecordError, match=f"layer {last.layer}.*{role.name}"):
            from_restored(cache, geometry, restored, 20)
        assert cache_length(cache) == 0


# -- full attention: views, blocks, cuts -------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("cuts", [(), (1,), (5, 6, 11)])
@pytest.mark.parametrize("kind", ["llama", "deepseek_v32", "gemma3", "falcon_h1"], indirect=True)
def test_blocks_are_joined_in_order(
    kind: str, tiny: PreTrainedModel, as_restored: AsRestored, logits_of: LogitsOf, dtype: torch.dtype, cuts: tuple[int, ...]
) -> None:
    if kind == "deepseek_v32" and dtype is torch.float16:
        pytest.skip("its router has no float16 kernel on the CPU")
    model = tiny.to(dtype)
    geometry, ids = observe(model, CPU), long_prompt()
    live, back = live_cache(model, logits_of, ids[:20]), new_cache(model)
    from_restored(back, geometry, as_restored(geometry, to_records(live, geometry, 20), 20, *cuts), 20)
    assert cache_length(back) == 20
    assert torch.equal(logits_of(model, ids[20:21], back, 20), logits_of(model, ids[20:21], live, 20))
    assert_same(back, live, geometry, 21)


def test_rows_are_views_and_stay_when_the_cache_grows_or_is_cropped(
    model: LlamaForCausalLM, filled: Filled, feed: Callable[..., torch.Tensor], prompt: list[int]
) -> None:
    cache = filled(model, prompt)
    rows = to_rows(cache)
    assert rows[0].planes[0].rows.ctypes.data == cache.layers[0].keys.data_ptr()
    copies = [plane.rows.copy() for record in rows for plane in record.planes]
    shorten(cache, 7)
    feed(model, cache, [3, 4, 5])
    for plane, copied in zip((plane for record in rows for plane in record.planes), copies, strict=True):
        assert (plane.rows == copied).all()


def test_one_block_is_attached_where_it_lies(
    model: LlamaForCausalLM, filled: Filled, prompt: list[int], as_restored: AsRestored
) -> None:
    geometry = observe(model, CPU)
    restored = as_restored(geometry, to_rows(filled(model, prompt)), len(prompt))
    cache = new_cache(model)
    from_restored(cache, geometry, restored, 20)
    block = restored.layers[0].plane(PlaneRole.KEY).blocks[0]
    assert cache.layers[0].keys.data_ptr() == block.ctypes.data
    assert cache_length(cache) == 20


def test_a_failed_restore_leaves_the_cache_empty(
    model: LlamaForCausalLM, filled: Filled, prompt: list[int], as_restored: AsRestored
) -> None:
    geometry = observe(model, CPU)
    restored = as_restored(geometry, to_rows(filled(model, prompt)), len(prompt))
    cache = new_cache(model)
    with pytest.raises(RecordError, match="rows \\[0, 40\\), rows up to 41 were promised"):
        from_restored(cache, geometry, restored, 41)
    restored.layers = restored.layers[:2]
    with pytest.raises(RecordError, match="2 layers were restored, the model has 3"):
        from_restored(cache, geometry, restored, 10)
    assert cache_length(cache) == 0
