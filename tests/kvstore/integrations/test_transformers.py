"""PromptCache: restored turns equal live ones, everything else is a miss."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import peft
import pytest
import torch
from transformers import DynamicCache, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.generation.streamers import BaseStreamer

from warmkv.kvstore.admission import Admission
from warmkv.kvstore.integrations.hf_cache import cache_length, forward_argument, new_cache, to_rows
from warmkv.kvstore.integrations.transformers import Generated, PromptCache
from warmkv.kvstore.store import Store, open_store
from warmkv.schema.errors import RecordError, StoreError, UnsupportedError

MakeModel = Callable[..., LlamaForCausalLM]
MakeTokenizer = Callable[..., PreTrainedTokenizerFast]
Filled = Callable[..., DynamicCache]
Feed = Callable[..., torch.Tensor]


def answer(prompts: PromptCache, ids: list[int], tokens: int = 6, **options: object) -> Generated:
    """A greedy turn, saved when it returns."""
    result = prompts.generate(ids, max_new_tokens=tokens, do_sample=False, **options)
    result.saved.result(30)
    return result


def usable(prompts: PromptCache, ids: list[int]) -> int:
    return cache_length(prompts.load(ids))


def assert_bitwise(one: DynamicCache, other: DynamicCache) -> None:
    for ours, theirs in zip(one.layers, other.layers, strict=True):
        assert torch.equal(ours.keys, theirs.keys) and torch.equal(ours.values, theirs.values)


# -- what is restored is what was live ---------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_continuation_equals_a_live_twin_bit_for_bit(
    make_model: MakeModel,
    tokenizer: PreTrainedTokenizerFast,
    store: Store,
    filled: Filled,
    feed: Feed,
    prompt: list[int],
    dtype: torch.dtype,
) -> None:
    model = make_model(dtype=dtype)
    prompts = PromptCache(model, tokenizer, store)
    twin = filled(model, prompt)
    assert prompts.store(prompt, twin).stored
    suffix = [5, 6, 7, 8, 9]
    restored = prompts.load(prompt + suffix)
    assert cache_length(restored) == len(prompt)
    assert_bitwise(restored, twin)
    for piece in (suffix, [3], [4]):
        assert torch.equal(feed(model, restored, piece), feed(model, twin, piece))
    assert_bitwise(restored, twin)


def test_a_chain_of_several_segments_restores_bit_for_bit(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, store: Store, filled: Filled, feed: Feed, prompt: list[int]
) -> None:
    prompts = PromptCache(model, tokenizer, store)
    twin = new_cache(model)
    for start in (0, 10, 25):
        end = {0: 10, 10: 25, 25: 40}[start]
        feed(model, twin, prompt[start:end])
        saved = prompts.store(prompt[:end], twin)
        assert (saved.held, saved.start) == (end, start)
    restored = prompts.load([*prompt, 1])
    assert_bitwise(restored, twin)
    assert torch.equal(feed(model, restored, [1, 2]), feed(model, twin, [1, 2]))


def test_a_second_process_continues_where_the_first_stopped(
    make_model: MakeModel, make_tokenizer: MakeTokenizer, tmp_path: Path, prompt: list[int]
) -> None:
    with open_store(tmp_path) as store:
        first = PromptCache(make_model(), make_tokenizer(), store, ack="disk")
        one = answer(first, prompt)
        follow = [*one.ids, 11, 12, 13]
        expected = answer(first, follow)
        assert expected.source == "live"
        store.forget(first.identity(), expected.ids)
        first.release()
        answer(first, prompt)
    with open_store(tmp_path) as store:
        second = PromptCache(make_model(), make_tokenizer(), store)
        got = answer(second, follow)
    assert (got.source, got.tier, got.usable, got.suffix_tokens) == ("cold", "cold", len(one.ids) - 1, 4)
    assert got.new_ids == expected.new_ids


def test_generation_reports_its_source(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, store: Store, prompt: list[int]
) -> None:
    prompts = PromptCache(model, tokenizer, store)
    cold = answer(prompts, prompt)
    assert (cold.source, cold.tier, cold.matched, cold.usable, cold.suffix_tokens) == ("none", None, 0, 0, 40)
    assert cold.ids == (*prompt, *cold.new_ids) and len(cold.new_ids) == 6
    assert cold.text == " ".join(f"w{token}" for token in cold.new_ids)
    live = answer(prompts, [*cold.ids, 4])
    assert (live.source, live.tier, live.usable, live.suffix_tokens) == ("live", None, 45, 2)
    prompts.release()
    warm = answer(prompts, [*cold.ids, 4])
    assert (warm.source, warm.tier, warm.usable) == ("warm", "warm", 46)
    assert warm.new_ids == live.new_ids


def test_only_new_rows_are_sent(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, store: Store, prompt: list[int]
) -> None:
    prompts = PromptCache(model, tokenizer, store)
    one = answer(prompts, prompt)
    two = answer(prompts, [*one.ids, 4, 5, 6])
    assert one.saved.result().start == 0
    assert two.saved.result().start == 45
    assert two.saved.result().sent_bytes < one.saved.result().sent_bytes


# -- where a prompt meets what is held ---------------------------------------------------


@pytest.mark.parametrize("release", [True, False], ids=["store", "live"])
def test_the_same_prompt_again_leaves_one_token_to_feed(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, store: Store, prompt: list[int], release: bool
) -> None:
    prompts = PromptCache(model, tokenizer, store)
    first = answer(prompts, prompt)
    for _ in range(3):
        if release:
            prompts.release()
        again = answer(prompts, prompt)
        assert (again.usable, again.suffix_tokens, again.new_ids) == (39, 1, first.new_ids)


@pytest.mark.parametrize("length", [1, 2, 39, 40, 41, 45, 46])
@pytest.mark.parametrize("release", [True, False], ids=["store", "live"])
def test_any_part_of_a_held_sequence_resumes_before_its_end(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, store: Store, prompt: list[int], length: int, release: bool
) -> None:
    prompts = PromptCache(model, tokenizer, store)
    whole = answer(prompts, prompt).ids
    if release:
        prompts.release()
    part = answer(prompts, list(whole[:length]), tokens=2)
    assert part.usable == min(45, length - 1)
    assert part.prompt_tokens == length and len(part.ids) == length + 2


@pytest.mark.parametrize("edited", [0, 1, 20, 38, 39])
@pytest.mark.parametrize("release", [True, False], ids=["store", "live"])
def test_an_edited_prompt_resumes_at_the_edit(
    make_model: MakeModel, tokenizer: PreTrainedTokenizerFast, store: Store, prompt: list[int], edited: int, release: bool
) -> None:
    model = make_model()
    prompts = PromptCache(model, tokenizer, store)
    answer(prompts, prompt)
    changed = list(prompt)
    changed[edited] = (changed[edited] + 1) % 90
    if release:
        prompts.release()
    got = answer(prompts, changed)
    assert (got.matched, got.usable) == (edited, edited)
    assert got.source == ("none" if edited == 0 else "warm" if release else "live")
    with open_store(None) as empty:
        assert answer(PromptCache(make_model(), tokenizer, empty), changed).new_ids == got.new_ids


def test_the_store_is_used_only_where_it_holds_more(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, store: Store, prompt: list[int], monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    prompts = PromptCache(model, tokenizer, store)
    long = answer(prompts, prompt)
    answer(prompts, prompt[:10] + [1, 2, 3])
    back = answer(prompts, [*long.ids, 8])
    assert (back.source, back.usable) == ("warm", 45)
    monkeypatch.setattr(store, "restore", None)
    on = answer(prompts, [*back.ids, 8])
    assert on.source == "live"
    assert not caplog.records


def test_a_store_that_could_resume_at_the_very_end_is_not_followed_there(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, store: Store, prompt: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = PromptCache(model, tokenizer, store)
    expected = answer(prompts, prompt)
    prompts.release()
    restore = store.restore
    monkeypatch.setattr(store, "restore", lambda target, ids, **options: restore(target, [*ids, 0], **options))
    assert usable(prompts, prompt) == 39
    got = answer(prompts, prompt)
    assert (got.usable, got.new_ids) == (39, expected.new_ids)


def test_what_was_handed_out_is_not_the_live_cache(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, store: Store, feed: Feed, prompt: list[int]
) -> None:
    prompts = PromptCache(model, tokenizer, store)
    first = answer(prompts, prompt)
    one, two = prompts.load(first.ids), prompts.load(first.ids)
    feed(model, one, [1, 2, 3])
    for layer in one.layers:
        layer.keys.zero_()
    one = prompts.load(first.ids)
    for layer in one.layers:
        layer.keys.fill_(7)
    assert_bitwise(two, prompts.load(first.ids))
    assert answer(prompts, prompt).new_ids == first.new_ids


def test_messages_go_through_the_chat_template(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, store: Store) -> None:
    prompts = PromptCache(model, tokenizer, store)
    messages = [{"role": "system", "content": "w9 w8 w7"}, {"role": "user", "content": "w6"}]
    got = prompts.generate(messages, tools=[{"name": "t"}], max_new_tokens=3, do_sample=False)
    assert got.ids[: got.prompt_tokens] == (9, 8, 7, 6, 95, 1)
    longer = [*messages, {"role": "assistant", "content": got.text}, {"role": "user", "content": "w5"}]
    assert prompts.generate(longer, max_new_tokens=3, do_sample=False).usable == 4


# -- the caller's own caches -------------------------------------------------------------


def test_store_takes_the_length_of_the_cache(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, store: Store, filled: Filled, prompt: list[int]
) -> None:
    prompts = PromptCache(model, tokenizer, store)
    cache = filled(model, prompt)
    assert prompts.store([*prompt, 9], cache).held == 40
    assert usable(prompts, [*prompt, 9, 9]) == 40
    assert prompts.store(prompt, cache).duplicate


@pytest.mark.parametrize("length", [1, 38, 39, 42, 80])
def test_any_other_length_is_an_error_and_saves_nothing(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, store: Store, filled: Filled, prompt: list[int], length: int
) -> None:
    prompts = PromptCache(model, tokenizer, store)
    with pytest.raises(RecordError, match="holds rows of 40 tokens"):
        prompts.store((prompt * 2)[:length], filled(model, prompt))
    with pytest.raises(RecordError, match="0 tokens"):
        prompts.store([1], new_cache(model))
    assert usable(prompts, [*prompt, 1]) == 0


def test_load_of_a_miss_is_an_empty_cache_ready_for_use(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, store: Store, feed: Feed, filled: Filled, prompt: list[int]
) -> None:
    cache = PromptCache(model, tokenizer, store).load(prompt)
    assert cache_length(cache) == 0
    feed(model, cache, prompt)
    assert_bitwise(cache, filled(model, prompt))


# -- other models, other states of one model ---------------------------------------------


def test_models_that_differ_at_all_only_miss(
    make_model: MakeModel, make_tokenizer: MakeTokenizer, store: Store, prompt: list[int]
) -> None:
    one_weight = make_model()
    with torch.no_grad():
        one_weight.model.layers[2].mlp.down_proj.weight[0, 0] += 1e-4
    models = {
        "itself": make_model(),
        "one weight": one_weight,
        "bfloat16": make_model(dtype=torch.bfloat16),
        "float16": make_model(dtype=torch.float16),
        "through bfloat16": make_model(dtype=torch.bfloat16).float(),
        "other epsilon": make_model(rms_norm_eps=1e-5),
        "other rope": make_model(rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}),
        "eager": make_model(attn_implementation="eager"),
    }
    caches = {name: PromptCache(model, make_tokenizer(), store) for name, model in models.items()}
    caches["other template"] = PromptCache(make_model(), make_tokenizer(template="{{ messages }}"), store)
    caches["other tenant"] = PromptCache(make_model(), make_tokenizer(), store, salt="tenant")
    for name, prompts in caches.items():
        assert usable(prompts, prompt) == 0, name
        answer(prompts, prompt)
        assert usable(prompts, prompt) == 39, name
    assert usable(PromptCache(make_model(), make_tokenizer(), store), prompt) == 39


def _in_place(model: LlamaForCausalLM) -> None:
    with torch.no_grad():
        model.model.norm.weight[0] += 1e-3


def _through_data(model: LlamaForCausalLM) -> None:
    model.model.layers[0].self_attn.k_proj.weight.data[1, 1] += 1e-3


def _through_numpy(model: LlamaForCausalLM) -> None:
    model.model.layers[0].self_attn.k_proj.weight.detach().numpy()[1, 1] += 1e-3


def _toggled(model: LlamaForCausalLM) -> None:
    model.model.layers[1].self_attn.scaling *= 2


CHANGES = [_in_place, _through_data, _through_numpy, _toggled]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_a_model_changed_between_two_calls_starts_cold(
    make_model: MakeModel,
    tokenizer: PreTrainedTokenizerFast,
    store: Store,
    prompt: list[int],
    change: Callable[[LlamaForCausalLM], None],
) -> None:
    model = make_model()
    prompts = PromptCache(model, tokenizer, store)
    before = answer(prompts, prompt)
    change(model)
    after = answer(prompts, list(before.ids))
    assert (after.source, after.matched, after.usable) == ("none", 0, 0)
    assert usable(prompts, prompt) == 39


def test_lora_states_only_hit_themselves(
    make_model: MakeModel, tokenizer: PreTrainedTokenizerFast, store: Store, prompt: list[int]
) -> None:
    def wrapped(seed: int = 1, alpha: int = 4) -> peft.PeftModel:
        base = make_model()
        torch.manual_seed(seed)
        config = peft.LoraConfig(r=2, lora_alpha=alpha, target_modules=["q_proj", "k_proj", "v_proj"], init_lora_weights=False)
        return peft.get_peft_model(base, config).eval()

    plain = PromptCache(make_model(), tokenizer, store)
    answer(plain, prompt)
    lora = wrapped()
    prompts = PromptCache(lora, tokenizer, store)
    assert usable(prompts, prompt) == 0
    assert [adapter.scale for adapter in prompts.identity().adapters] == [2.0]
    first = answer(prompts, prompt)
    assert answer(prompts, prompt).source == "live"
    assert usable(PromptCache(wrapped(), tokenizer, store), prompt) == 39
    with lora.disable_adapter():
        assert answer(prompts, prompt).source == "none"
    back = answer(prompts, prompt)
    assert (back.source, back.new_ids) == ("warm", first.new_ids)
    lora.merge_adapter()
    assert usable(prompts, prompt) == 0
    for other in (wrapped(alpha=8), wrapped(seed=2)):
        assert usable(PromptCache(other, tokenizer, store), prompt) == 0


def test_a_model_changed_while_it_generates_is_not_saved(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, store: Store, prompt: list[int]
) -> None:
    class Meddler(BaseStreamer):  # type: ignore[misc]
        def put(self, value: torch.Tensor) -> None:
            with torch.no_grad():
                model.lm_head.weight[0, 0] += 1

        def end(self) -> None:
            pass

    prompts = PromptCache(model, tokenizer, store)
    result = prompts.generate(prompt, max_new_tokens=3, do_sample=False, streamer=Meddler())
    assert len(result.new_ids) == 3 and not result.saved.result().stored
    assert answer(prompts, prompt).source == "none"


# -- the store never stands in the way ---------------------------------------------------


@pytest.mark.parametrize("background", [True, False])
@pytest.mark.parametrize(
    "error", [StoreError("gone"), OSError(28, "disk full"), RuntimeError("odd")], ids=lambda error: type(error).__name__
)
def test_a_broken_store_costs_one_warning(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, prompt: list[int], broken_store: type, error: Exception,
    background: bool, caplog: pytest.LogCaptureFixture, store: Store,
) -> None:  # fmt: skip
    expected = answer(PromptCache(model, tokenizer, store), prompt)
    prompts = PromptCache(model, tokenizer, broken_store(error), background=background)
    with caplog.at_level(logging.WARNING, "warmkv.transformers"):
        first, second = answer(prompts, prompt), answer(prompts, [*expected.ids, 3])
    assert first.new_ids == expected.new_ids
    assert second.source == "live"
    assert not first.saved.result().stored and str(error) in first.saved.result().reason
    assert len(caplog.records) == 1


def test_a_save_that_fails_later_is_one_warning(
    model: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    prompt: list[int],
    broken_store: type,
    caplog: pytest.LogCaptureFixture,
) -> None:
    prompts = PromptCache(model, tokenizer, broken_store(late=True))
    result = prompts.generate(prompt, max_new_tokens=2, do_sample=False)
    assert isinstance(result.saved.exception(), StoreError)
    assert len([record for record in caplog.records if record.name == "warmkv.transformers"]) == 1


def test_a_closed_store_is_a_cold_run(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, tmp_path: Path, prompt: list[int]
) -> None:
    store = open_store(tmp_path)
    prompts = PromptCache(model, tokenizer, store)
    store.close()
    assert len(answer(prompts, prompt).new_ids) == 6


def test_a_store_with_rows_of_another_shape_is_a_cold_run(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, store: Store, prompt: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = PromptCache(model, tokenizer, store)
    expected = answer(prompts, prompt)
    prompts.release()
    restore = store.restore

    def fewer(*args: object, **kwargs: object) -> object:
        restored = restore(*args, **kwargs)  # type: ignore[arg-type]
        restored.layers = restored.layers[:-1]
        return restored

    monkeypatch.setattr(store, "restore", fewer)
    got = answer(prompts, prompt)
    assert (got.source, got.new_ids) == ("none", expected.new_ids)


def test_a_turn_that_fails_leaves_no_half_grown_cache(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, store: Store, prompt: list[int]
) -> None:
    class Failing(BaseStreamer):  # type: ignore[misc]
        calls = 0

        def put(self, value: torch.Tensor) -> None:
            self.calls += 1
            if self.calls == 4:
                raise KeyboardInterrupt

        def end(self) -> None:
            pass

    prompts = PromptCache(model, tokenizer, store)
    expected = answer(prompts, prompt)
    with pytest.raises(KeyboardInterrupt):
        prompts.generate(prompt, max_new_tokens=6, do_sample=False, streamer=Failing())
    again = answer(prompts, prompt)
    assert (again.source, again.new_ids) == ("warm", expected.new_ids)


def test_streaming_sees_the_tokens_before_anything_is_saved(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, store: Store, prompt: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[object] = []

    class Recorder(BaseStreamer):  # type: ignore[misc]
        def put(self, value: torch.Tensor) -> None:
            events.append(value.flatten().tolist())

        def end(self) -> None:
            events.append("end")

    save_async = store.save_async
    monkeypatch.setattr(store, "save_async", lambda *a, **k: events.append("save") or save_async(*a, **k))
    got = answer(PromptCache(model, tokenizer, store), prompt, streamer=Recorder())
    assert events == [prompt, *([token] for token in got.new_ids), "end", "save"]


def test_the_store_is_told_what_computing_a_prompt_takes(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, store: Store, prompt: list[int]
) -> None:
    result = answer(PromptCache(model, tokenizer, store, admission=Admission(prefill_tps=50.0)), prompt)
    told_us = sum(record.prefill_us for record in store.engine.index.records.values())
    assert told_us == result.saved.result().held / 50.0 * 1e6 > 0


@pytest.mark.parametrize("ack", ["memory", "disk"])
def test_the_acknowledgement_asked_for_is_the_one_given(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, store: Store, prompt: list[int], ack: str
) -> None:
    result = answer(PromptCache(model, tokenizer, store), prompt, ack=ack)
    assert result.saved.result().stored
    assert result.saved.result().durable or ack == "memory"


# -- refusals ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {"num_beams": 2},
        {"num_return_sequences": 2, "do_sample": True},
        {"use_cache": False},
        {"cache": DynamicCache()},
        {"position_ids": None},
    ],
)
def test_refused_options_leave_the_live_cache_usable(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, store: Store, prompt: list[int], options: dict[str, object]
) -> None:
    prompts = PromptCache(model, tokenizer, store)
    answer(prompts, prompt)
    with pytest.raises(UnsupportedError):
        prompts.generate(prompt, max_new_tokens=2, **options)
    assert answer(prompts, prompt).source == "live"


def test_refused_states_of_the_model_are_refused_by_every_verb(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, store: Store, filled: Filled, prompt: list[int]
) -> None:
    prompts = PromptCache(model, tokenizer, store)
    cache = filled(model, prompt)
    model.model.norm.register_forward_hook(lambda *_: None)
    for verb in (
        lambda: prompts.generate(prompt, max_new_tokens=2),
        lambda: prompts.load(prompt),
        lambda: prompts.store(prompt, cache),
        prompts.identity,
        lambda: PromptCache(model, tokenizer, store),
    ):
        with pytest.raises(UnsupportedError, match="hooks"):
            verb()


def test_a_restored_cache_works_with_the_librarys_own_generate(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, store: Store, prompt: list[int]
) -> None:
    prompts = PromptCache(model, tokenizer, store)
    expected = answer(prompts, prompt)
    ids = torch.tensor([prompt])
    carried = {forward_argument(model): prompts.load(prompt)}
    output = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=6, do_sample=False, **carried)
    assert tuple(output[0].tolist()) == expected.ids
    assert to_rows(carried[forward_argument(model)])[0].planes[0].rows.shape == (45, 2, 16)
