"""Models of the library on live caches: the same logits and choices as with its own attention."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
import transformers as t
from transformers import masking_utils as masking

from warmkv.kernels.nystrom import reference as nystrom
from warmkv.kvstore.integrations import hf_live_attention as attention
from warmkv.kvstore.integrations import hf_live_layers
from warmkv.kvstore.integrations.hf_live import SLACK, LiveCache, attend_with_live, plan_of
from warmkv.kvstore.integrations.hf_live_plan import as_f32
from warmkv.kvstore.live.evict import Mass, Recent
from warmkv.kvstore.live.plan import NystromPlan, modes
from warmkv.schema.errors import CannotRewind, RecordError, UnsupportedError
from warmkv.schema.identity import LayerKind


def _live_models() -> ModuleType:
    path = Path(__file__).with_name("live_models.py")
    spec = importlib.util.spec_from_file_location("live_models", path)
    assert spec is not None and spec.loader is not None
    module = sys.modules.setdefault("live_models", importlib.util.module_from_spec(spec))
    spec.loader.exec_module(module)
    return module


live_models = _live_models()
#: Greatest difference of two logits in float32, whose sums run in another order; logits are about 1.
TOLERANCE = 2e-5
LENGTH = 90
FAMILIES = list(live_models.MODELS)


@pytest.fixture(params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def ids() -> torch.Tensor:
    return torch.randint(2, live_models.VOCABULARY, (1, LENGTH), generator=torch.Generator().manual_seed(3))


def on_live(kind: str) -> t.PreTrainedModel:
    model: t.PreTrainedModel = attend_with_live(live_models.make(kind))
    return model


def own(kind: str) -> t.PreTrainedModel:
    """The model with the library's own attention."""
    model: t.PreTrainedModel = live_models.make(kind)
    model.set_attn_implementation("eager")
    return model


def logits(model: t.PreTrainedModel, ids: torch.Tensor, cache: object = None, *, sizes: Sequence[int] = ()) -> torch.Tensor:
    """Logits of every token, fed in pieces of ``sizes`` and the rest at once."""
    found, at = [], 0
    with torch.no_grad():
        for size in (*sizes, ids.shape[1]):
            piece = ids[:, at : at + size]
            at += size
            if piece.shape[1]:
                found.append(model(input_ids=piece, cache=cache, use_cache=cache is not None).logits[0])
    return torch.cat(found)


def greedy(model: t.PreTrainedModel, ids: torch.Tensor, cache: object = None, tokens: int = 12, **options: object) -> list[int]:
    out = model.generate(ids, cache=cache, max_new_tokens=tokens, do_sample=False, **options)
    new: list[int] = out[0, ids.shape[1] :].tolist()
    return new


def test_logits_equal_the_librarys_own_attention_in_any_pieces(family: str, ids: torch.Tensor) -> None:
    expected = logits(own(family), ids)
    model = on_live(family)
    for sizes in ((), (1, 2, 17, 1, 40), (70,)):
        found = logits(model, ids, LiveCache(model), sizes=sizes)
        assert (found - expected).abs().max() < TOLERANCE


def test_the_models_of_these_tests_depend_on_what_attention_sees(family: str, ids: torch.Tensor) -> None:
    """Else equal logits would prove nothing."""
    changed = ids.clone()
    changed[0, LENGTH - 5] += 1
    model = own(family)
    assert (logits(model, ids)[-1] - logits(model, changed)[-1]).abs().max() > 100 * TOLERANCE


def test_greedy_generation_chooses_the_same_tokens(family: str, ids: torch.Tensor) -> None:
    expected = greedy(own(family), ids)
    model = on_live(family)
    cache = LiveCache(model)
    assert greedy(model, ids, cache) == expected
    assert cache.get_seq_length() == LENGTH + len(expected) - 1


@pytest.mark.parametrize("nystrom", [None, NystromPlan(landmarks=8, window=16, sinks=2, boundary=48)], ids=["rows", "constant"])
def test_long_calls_are_attended_in_pieces(
    nystrom: NystromPlan | None, ids: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    for kind in ("llama",) if nystrom else ("gemma3", "gpt_oss"):
        model = on_live(kind)
        whole = logits(model, ids, LiveCache(model, nystrom=nystrom))
        with monkeypatch.context() as patch:
            patch.setattr(hf_live_layers, "PIECE", 11)
            cache = LiveCache(model, nystrom=nystrom)
            assert (logits(model, ids, cache) - whole).abs().max() < TOLERANCE
        assert cache.get_seq_length() == LENGTH


def test_a_second_turn_goes_on_where_the_first_ended(ids: torch.Tensor) -> None:
    model, cache = on_live("llama"), None
    cache = LiveCache(model)
    first = torch.tensor([[*ids[0, :40].tolist(), *greedy(model, ids[:, :40], cache)]])
    turn = torch.cat([first, ids[:, 40:50]], dim=1)
    assert greedy(model, turn, cache) == greedy(own("llama"), turn)


@pytest.mark.parametrize("mode", [name for name, _, _ in modes() if name != "f32"])
def test_each_storage_mode_stays_close_and_stores_what_its_formats_say(mode: str, ids: torch.Tensor) -> None:
    expected = logits(own("llama"), ids)
    model = on_live("llama")
    cache = LiveCache(model, mode)
    found = logits(model, ids, cache, sizes=(30, 1, 1, 40))
    near = 0.5 if mode == "fp8" else 0.1  # it has a sixteenth of the precision of bf16
    assert 0 < (found - expected).abs().max() < near * expected.abs().max()
    layer = cache.live.plan.layers[0]
    row = layer.key_format.row_bytes(16, keys=True) + layer.value_format.row_bytes(16, keys=False)
    fields = 4 * 16 * (layer.key_format.quantised + layer.value_format.quantised)
    assert cache.memory().stored == 3 * 4 * (LENGTH * row + fields)


def test_plans_tell_kinds_windows_scales_and_caps() -> None:
    gemma = plan_of(live_models.make("gemma2"))
    assert [layer.kind for layer in gemma.layers] == [LayerKind.SLIDING, LayerKind.FULL, LayerKind.SLIDING]
    assert [layer.window for layer in gemma.layers] == [live_models.WINDOW, 0, live_models.WINDOW]
    assert {(layer.logit_scale, layer.softcap) for layer in gemma.layers} == {(1 / 3, 1.5)}
    assert {layer.softcap for layer in plan_of(live_models.make("gemma3")).layers} == {0.0}
    assert {(layer.heads, layer.kv_heads) for layer in plan_of(live_models.make("qwen3")).layers} == {(4, 1)}


def test_windowed_layers_keep_their_window_and_some_slack(ids: torch.Tensor) -> None:
    model = on_live("gemma3")
    cache = LiveCache(model)
    logits(model, torch.cat([ids, ids, ids], dim=1), cache, sizes=[7] * 38)
    sliding, full = cache.live.layers[0], cache.live.layers[1]
    assert full.rows == 3 * LENGTH and sliding.position == 3 * LENGTH
    assert live_models.WINDOW - 1 <= sliding.rows <= 2 * (live_models.WINDOW + SLACK)


def test_learned_sinks_come_from_the_model_and_follow_it(ids: torch.Tensor) -> None:
    model, twin = on_live("gpt_oss"), own("gpt_oss")
    cache = LiveCache(model)
    logits(model, ids[:, :20], cache)
    for changed in (model, twin):
        with torch.no_grad():
            changed.model.layers[1].self_attn.sinks += 3.0
    cache.reset()
    assert (logits(model, ids, cache) - logits(twin, ids)).abs().max() < TOLERANCE


def test_half_precision_models_get_their_dtype_back(ids: torch.Tensor) -> None:
    model = attend_with_live(live_models.make("llama").to(torch.bfloat16))
    cache = LiveCache(model, "bf16")
    found = logits(model, ids, cache)
    assert found.dtype == torch.bfloat16
    expected = logits(live_models.make("llama").to(torch.bfloat16), ids)
    assert (found.float() - expected.float()).abs().max() < 0.1


def test_views_of_float32_tensors_share_their_memory() -> None:
    tensor = torch.zeros((1, 2, 3, 4))
    assert np.shares_memory(as_f32(tensor), tensor.numpy())
    assert as_f32(tensor.half()).dtype == np.float32


# -- taking back -------------------------------------------------------------------------


def test_cropping_leaves_what_was_there_before(family: str, ids: torch.Tensor) -> None:
    model = on_live(family)
    cache = LiveCache(model)
    logits(model, ids[:, :60], cache, sizes=(50, 1, 1))
    cache.crop(-20)
    assert cache.get_seq_length() == 40
    other = ids.flip(1)[:, :15]
    found = logits(model, other, cache)
    expected = logits(own(family), torch.cat([ids[:, :40], other], dim=1))[40:]
    assert (found - expected).abs().max() < TOLERANCE


def test_a_crop_that_a_window_cannot_follow_changes_no_layer(ids: torch.Tensor) -> None:
    model = on_live("gemma3")
    cache = LiveCache(model)
    logits(model, torch.cat([ids, ids, ids], dim=1), cache, sizes=[9] * 29)
    before = [(layer.position, layer.rows) for layer in cache.live.layers]
    with pytest.raises(CannotRewind):
        cache.crop(-200)
    with pytest.raises(ValueError, match="negative"):
        cache.crop(5)
    assert [(layer.position, layer.rows) for layer in cache.live.layers] == before


def test_drafts_of_the_library_are_taken_back(ids: torch.Tensor) -> None:
    """Prompt lookup proposes tokens and crops those that were wrong."""
    doubled = torch.cat([ids[:, :30], ids[:, :30]], dim=1)
    model = on_live("llama")
    found = greedy(model, doubled, LiveCache(model), tokens=20, prompt_lookup_num_tokens=3)
    assert found == greedy(own("llama"), doubled, tokens=20)


def test_reset_forgets_the_conversation(ids: torch.Tensor) -> None:
    model = on_live("gpt_oss")
    cache = LiveCache(model)
    logits(model, ids, cache)
    cache.reset()
    assert cache.get_seq_length() == 0
    assert (logits(model, ids.flip(1), cache) - logits(own("gpt_oss"), ids.flip(1))).abs().max() < TOLERANCE


# -- eviction ----------------------------------------------------------------------------


def test_recent_eviction_equals_the_librarys_attention_under_a_mask(ids: torch.Tensor) -> None:
    """A row that went is one that no later query sees."""
    budget, keep, step = 24, 16, 8
    model = on_live("llama")
    cache = LiveCache(model, policy=Recent(), max_rows=budget, keep_rows=keep)
    found = logits(model, ids, cache, sizes=[step] * (LENGTH // step))
    seen = torch.zeros((LENGTH, LENGTH), dtype=torch.bool)
    held: list[int] = []
    for at in range(0, LENGTH, step):
        held = held[-keep:] if len(held) >= budget else held
        for token in range(at, min(at + step, LENGTH)):
            held.append(token)
            seen[token, held] = True
    mask = torch.zeros((1, 1, LENGTH, LENGTH)).masked_fill(~seen, torch.finfo(torch.float32).min)
    with torch.no_grad():
        expected = own("llama")(input_ids=ids, attention_mask=mask, use_cache=False).logits[0]
    assert (found - expected).abs().max() < TOLERANCE
    assert all(layer.rows <= budget for layer in cache.live.layers)
    assert cache.get_seq_length() == LENGTH


def test_mass_eviction_keeps_the_first_rows_within_the_budget(ids: torch.Tensor) -> None:
    model = on_live("llama")
    cache = LiveCache(model, "q8", policy=Mass(sinks=2), max_rows=40, keep_rows=30)
    whole = logits(model, ids[:, :20], LiveCache(model, "q8"))
    found = logits(model, ids, cache, sizes=(20, *[5] * 14))
    assert torch.equal(found[:20], whole)
    assert all(layer.rows <= 40 for layer in cache.live.layers)
    assert cache.live.lineage != LiveCache(model).live.lineage
    assert torch.isfinite(found).all()


# -- constant memory ---------------------------------------------------------------------


def test_nystrom_is_exact_up_to_the_boundary_and_constant_behind_it(ids: torch.Tensor) -> None:
    plan = NystromPlan(landmarks=8, window=16, sinks=2, boundary=48)
    model = on_live("llama")
    cache = LiveCache(model, nystrom=plan)
    exact = logits(own("llama"), ids)
    found = logits(model, ids[:, :48], cache, sizes=(20, 1, 27))
    assert (found - exact[:48]).abs().max() < TOLERANCE
    logits(model, ids[:, 48:60], cache, sizes=(1, 5))
    held = cache.memory().total
    logits(model, ids[:, 60:], cache, sizes=(1, 1))
    assert cache.memory().total == held
    with pytest.raises(CannotRewind):
        cache.crop(-1)


def test_a_prefill_is_sealed_on_demand(ids: torch.Tensor) -> None:
    model = on_live("llama")
    cache = LiveCache(model, nystrom=NystromPlan(landmarks=8, window=16, sinks=2))
    logits(model, ids[:, :60], cache)
    rows = cache.memory().attention
    assert cache.seal() and cache.memory().attention == 0 < rows
    assert torch.isfinite(logits(model, ids[:, 60:], cache)).all()
    assert cache.get_seq_length() == LENGTH


def test_what_follows_a_seal_equals_the_formulas_applied_to_the_whole_sequence(ids: torch.Tensor) -> None:
    """The library runs all tokens at once through an attention that knows only the reference formulas."""
    sealed = 48

    def formulas(module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: object, **__: object) -> Any:
        queries, keys, values = (tensor[0].double().numpy() for tensor in (query, key, value))
        out = np.empty((LENGTH, *queries.shape[::2]))
        share = len(queries) // len(keys)
        for head, (k, v) in enumerate(zip(keys, values, strict=True)):
            mine = slice(head * share, (head + 1) * share)
            scores = queries[mine] @ k.T / 4 + np.triu(np.full((LENGTH, LENGTH), -np.inf), 1)
            weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
            out[:, mine] = (weights / weights.sum(axis=-1, keepdims=True) @ v).transpose(1, 0, 2)
            q32, k32, v32 = (array.astype(np.float32) for array in (queries[mine], k, v))
            group = nystrom.prefill(q32[:, :sealed], k32[:sealed], v32[:sealed], landmarks=8, window=16, sinks=2)
            for token in range(sealed, LENGTH):
                out[token, mine] = nystrom.step(group, q32[:, token], k32[token], v32[token])
        return torch.from_numpy(out.astype(np.float32))[None], None

    t.AttentionInterface.register("formulas", formulas)
    try:
        twin = own("qwen3")
        twin.set_attn_implementation("formulas")
        expected = logits(twin, ids)
    finally:
        del t.AttentionInterface._global_mapping["formulas"]
    model, plan = on_live("qwen3"), NystromPlan(landmarks=8, window=16, sinks=2, boundary=sealed)
    for sizes in ((48, *[1] * 42), (50, 30), ()):
        assert (logits(model, ids, LiveCache(model, nystrom=plan), sizes=sizes) - expected).abs().max() < 5 * TOLERANCE


# -- what is refused ---------------------------------------------------------------------


def test_batches_padding_and_masks_are_refused(ids: torch.Tensor) -> None:
    model = on_live("llama")
    with pytest.raises(UnsupportedError, match="batch of 2"):
        logits(model, ids.repeat(2, 1), LiveCache(model))
    padded = torch.ones_like(ids)
    padded[0, :3] = 0
    with pytest.raises(UnsupportedError, match="3 of 90 tokens are padding"):
        model(input_ids=ids, attention_mask=padded, cache=LiveCache(model))
    with pytest.raises(UnsupportedError, match="mask of shape"):
        model(input_ids=ids, attention_mask=torch.zeros((1, 1, LENGTH, LENGTH)), cache=LiveCache(model))
    with pytest.raises(UnsupportedError, match="one sequence"):
        model.generate(ids, cache=LiveCache(model), num_beams=2, max_new_tokens=2)


def test_a_refused_call_leaves_the_cache_empty(ids: torch.Tensor) -> None:
    model = on_live("llama")
    cache = LiveCache(model)
    with pytest.raises(UnsupportedError):
        logits(model, ids.repeat(2, 1), cache)
    assert cache.get_seq_length() == 0
    assert (logits(model, ids, cache) - logits(own("llama"), ids)).abs().max() < TOLERANCE


def test_no_mask_is_built(ids: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    model, masks = on_live("gemma3"), []
    spied = attention.attend

    def attend(*arguments: Any, **given: Any) -> Any:
        masks.append(arguments[4])
        return spied(*arguments, **given)

    monkeypatch.setitem(t.AttentionInterface._global_mapping, attention.NAME, attend)
    logits(model, ids, LiveCache(model), sizes=(5, 1))
    assert masks == [None] * 9


def test_attention_without_a_live_cache_is_refused(ids: torch.Tensor) -> None:
    model = on_live("llama")
    for cache in (None, t.DynamicCache(config=model.config)):
        with pytest.raises(UnsupportedError, match="LiveCache"):
            model(input_ids=ids, cache=cache, use_cache=cache is not None)


def test_a_model_that_attends_otherwise_is_told_how_to_switch() -> None:
    with pytest.raises(UnsupportedError, match="attend_with_live"):
        LiveCache(own("llama"))


def test_layers_that_are_no_attention_are_named() -> None:
    sizes = dict(vocab_size=32, hidden_size=32, intermediate_size=32, num_attention_heads=4, num_key_value_heads=2)
    config = t.Lfm2Config(**sizes, num_hidden_layers=2, layer_types=["full_attention", "conv"], pad_token_id=0)
    with pytest.raises(UnsupportedError, match="layer 1"):
        plan_of(t.Lfm2ForCausalLM(config))


def test_settings_that_contradict_each_other_are_refused() -> None:
    model = on_live("llama")
    with pytest.raises(RecordError, match="storage mode 'q7'"):
        LiveCache(model, "q7")
    with pytest.raises(RecordError, match="keep_rows"):
        LiveCache(model, max_rows=10, keep_rows=10)
    with pytest.raises(RecordError, match="keep_rows is 10 without max_rows"):
        LiveCache(model, keep_rows=10)


def test_another_models_cache_is_refused(ids: torch.Tensor) -> None:
    with pytest.raises(RecordError, match="layer 0"):
        logits(on_live("llama"), ids, LiveCache(on_live("qwen3")))


def test_a_cache_goes_on_with_the_model_that_began_it(ids: torch.Tensor) -> None:
    """Another one of the same sizes would attend over rows it never made."""
    model, other = on_live("llama"), attend_with_live(live_models.make("llama", seed=1))
    cache = LiveCache(model)
    before = logits(model, ids[:, :40], cache)
    with pytest.raises(RecordError, match="layer 0: the cache is another model's"):
        logits(other, ids[:, 40:], cache)
    assert torch.equal(torch.cat([before, logits(model, ids[:, 40:], cache)]), logits(model, ids, LiveCache(model), sizes=(40,)))


def test_tokens_that_are_not_the_next_ones_are_refused(ids: torch.Tensor) -> None:
    model = on_live("llama")
    cache = LiveCache(model)
    for places in (torch.arange(1, LENGTH + 1), torch.arange(LENGTH) // 2):
        with pytest.raises(RecordError, match="the next one is 0"):
            model(input_ids=ids, position_ids=places[None], cache=cache)
    logits(model, ids, cache)
    with pytest.raises(RecordError, match="the next one is 90"):
        model.generate(ids, cache=cache, use_cache=False, max_new_tokens=3)  # feeds everything once more
    assert cache.get_seq_length() == LENGTH


@pytest.mark.parametrize(
    "masked",
    [
        lambda model, rows, cache: masking.create_causal_mask(
            model.config, rows, None, cache, block_sequence_ids=torch.zeros((1, 8), dtype=torch.long)
        ),
        lambda model, rows, cache: masking.create_causal_mask(
            model.config, rows, None, cache, or_mask_function=lambda b, h, q, kv: kv < 4
        ),
        lambda model, rows, cache: masking.create_causal_mask(
            model.config, rows, None, None, position_ids=torch.arange(8)[None] % 4
        ),
        lambda model, rows, cache: masking.create_bidirectional_mask(model.config, rows, None),
    ],
    ids=["blocks", "overlay", "packed", "bidirectional"],
)
def test_masks_that_are_not_causal_are_refused(masked: Any) -> None:
    model = on_live("llama")
    rows, cache = torch.zeros((1, 8, 48)), LiveCache(model)
    assert masking.create_causal_mask(model.config, rows, None, cache) is None
    with pytest.raises(UnsupportedError, match="causal only"):
        masked(model, rows, cache)


def test_windows_are_masks_live_caches_have() -> None:
    model = on_live("gemma3")
    assert masking.create_sliding_window_causal_mask(model.config, torch.zeros((1, 8, 48)), None, LiveCache(model)) is None


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"position_bias": torch.zeros(1)}, "attention with position_bias"),
        ({"sinks": torch.zeros(4)}, "attention with sinks"),
        ({"is_causal": False}, "looks ahead"),
    ],
)
def test_attention_that_is_asked_for_more_than_it_knows_refuses(
    asked: dict[str, Any], said: str, ids: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, spied = on_live("llama"), attention.attend
    monkeypatch.setitem(t.AttentionInterface._global_mapping, attention.NAME, lambda *a, **given: spied(*a, **given, **asked))
    cache = LiveCache(model)
    with pytest.raises(UnsupportedError, match=said):
        logits(model, ids, cache)
    assert cache.get_seq_length() == 0


def test_values_that_change_behind_the_cache_are_refused(ids: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    model, spied = on_live("llama"), attention.attend

    def scaled(module: Any, query: Any, key: Any, value: Any, *arguments: Any, **given: Any) -> Any:
        return spied(module, query, key, value * 2, *arguments, **given)

    monkeypatch.setitem(t.AttentionInterface._global_mapping, attention.NAME, scaled)
    with pytest.raises(UnsupportedError, match="changes its values"):
        logits(model, ids, LiveCache(model))


@pytest.mark.skipif(not hasattr(t, "Gemma4TextConfig"), reason="this version of the library has no such model")
def test_layers_of_different_head_sizes_are_planned_each_for_itself(ids: torch.Tensor) -> None:
    config = t.Gemma4TextConfig(
        vocab_size=96, hidden_size=48, intermediate_size=64, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2,
        num_global_key_value_heads=1, attention_k_eq_v=True, head_dim=16, global_head_dim=32, sliding_window=16,
        layer_types=["sliding_attention", "full_attention"] * 2, vocab_size_per_layer_input=96, hidden_size_per_layer_input=8,
    )  # fmt: skip
    torch.manual_seed(0)
    model = t.Gemma4ForCausalLM(config).eval()
    expected = logits(model, ids)
    attend_with_live(model)
    cache = LiveCache(model)
    assert [(layer.kv_heads, layer.key_size) for layer in cache.live.plan.layers] == [(2, 16), (1, 32)] * 2
    assert (logits(model, ids, cache, sizes=(33, 1)) - expected).abs().max() < TOLERANCE


def test_a_cache_whose_layers_disagree_asks_to_be_reset(ids: torch.Tensor) -> None:
    model = on_live("llama")
    cache = LiveCache(model)
    with pytest.raises(ZeroDivisionError), pytest.MonkeyPatch.context() as patch:
        patch.setattr(cache.layers[2], "attend", lambda _: 1 // 0)
        logits(model, ids, cache)
    with pytest.raises(RecordError, match="cut short"):
        logits(model, ids, cache)
    cache.reset()
    assert (logits(model, ids, cache) - logits(own("llama"), ids)).abs().max() < TOLERANCE
