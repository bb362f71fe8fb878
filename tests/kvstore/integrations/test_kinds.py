"""PromptCache with models of every kind: turns that resume answer as cold ones do."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import peft
import pytest
import torch
import transformers
from transformers import DynamicCache, LogitsProcessor, LogitsProcessorList, PreTrainedModel, PreTrainedTokenizerFast
from transformers.generation.streamers import BaseStreamer

from warmkv.kvstore.integrations import hf_feed, hf_versions
from warmkv.kvstore.integrations.hf_cache import cache_length, new_cache
from warmkv.kvstore.integrations.hf_saves import BACKLOG
from warmkv.kvstore.integrations.transformers import Generated, PromptCache
from warmkv.kvstore.results import Saved
from warmkv.kvstore.rows import LayerState
from warmkv.kvstore.store import Store, open_store
from warmkv.schema.errors import RecordError, UnsupportedError
from warmkv.schema.records import Anchor, AnchorKind

LogitsOf = Callable[..., torch.Tensor]
MakeTiny = Callable[..., PreTrainedModel]
ANYWHERE = ("llama", "deepseek_v32")
ALL_LINEAR = ("mamba", "mamba2")


def cold_answer(model: PreTrainedModel, ids: Iterable[int], tokens: int = 6, **options: object) -> tuple[int, ...]:
    """What the library generates from nothing."""
    prompt = torch.tensor([list(ids)])
    settings = {"max_new_tokens": tokens, "do_sample": False, **options}
    return tuple(model.generate(prompt, attention_mask=torch.ones_like(prompt), **settings)[0, prompt.shape[1] :].tolist())


def answer(prompts: PromptCache, ids: Iterable[int], tokens: int = 6, **options: object) -> Generated:
    """A greedy turn, saved when it returns."""
    result = prompts.generate(list(ids), **{"max_new_tokens": tokens, "do_sample": False, **options})
    result.saved.result(30)
    return result


def changed(ids: Iterable[int], at: int) -> list[int]:
    edited = list(ids)
    edited[at] = (edited[at] + 1) % 90
    return edited


class Seen(LogitsProcessor):  # type: ignore[misc]
    """Notes the ids and logits of every step."""

    def __init__(self) -> None:
        self.ids: list[list[int]] = []
        self.logits: list[torch.Tensor] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.ids.append(input_ids[0].tolist())
        self.logits.append(scores[0].clone())
        return scores


# -- every kind of model -----------------------------------------------------------------


def test_logits_of_every_turn_are_those_of_a_full_forward_pass(
    kind: str, tiny: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, store: Store, prompt: list[int], logits_of: LogitsOf
) -> None:
    prompts = PromptCache(tiny, tokenizer, store)
    ids, worst, sources = prompt, 0.0, []
    for edit, release in ((None, False), (33, False), (None, True), (21, True), (None, False)):
        if edit is not None:
            ids = changed(ids, edit)
        if release:
            prompts.release()
        seen = Seen()
        got = answer(prompts, ids, anchors=[5, 20, 21, 33, len(ids) - 1], logits_processor=LogitsProcessorList([seen]))
        full = logits_of(tiny, got.ids)[len(ids) - 1 : -1]
        worst = max(worst, float((torch.stack(seen.logits) - full).abs().max()))
        sources.append((got.source, got.usable))
        ids = [*got.ids, 3, 4, 5]
    print(f"{kind}: greatest difference {worst:.1e}; {sources}")
    assert worst < 1e-5
    assert [usable > 0 for _, usable in sources] == [False, True, True, True, True]


@pytest.mark.parametrize("release", [True, False], ids=["store", "live"])
@pytest.mark.parametrize("length", [1, 2, 3, 4, 5, 15, 16, 17, 18, 33, 40])
def test_the_same_prompt_again_is_a_hit(
    tiny: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, store: Store, prompt: list[int], length: int, release: bool
) -> None:
    prompts, ids = PromptCache(tiny, tokenizer, store), prompt[:length]
    expected = cold_answer(tiny, ids)
    first = answer(prompts, ids)
    assert (first.source, first.usable, first.new_ids) == ("none", 0, expected)
    for _ in range(2):
        if release:
            prompts.release()
        again = answer(prompts, ids)
        assert (again.usable, again.new_ids) == (length - 1, expected)


@pytest.mark.parametrize("more", [1, 7, 20])
@pytest.mark.parametrize("release", [True, False], ids=["store", "live"])
def test_a_conversation_goes_on_where_it_stopped(
    tiny: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, store: Store, prompt: list[int], more: int, release: bool
) -> None:
    prompts = PromptCache(tiny, tokenizer, store)
    ids = list(answer(prompts, prompt).ids)
    for turn in range(3):
        held = len(ids) - 1
        ids += [(7 * turn + index) % 90 + 2 for index in range(more)]
        if release:
            prompts.release()
        got = answer(prompts, ids)
        assert (got.source, got.usable) == ("warm" if release else "live", held)
        assert got.new_ids == cold_answer(tiny, ids)
        ids = list(got.ids)


@pytest.mark.parametrize("edited", [10, 20, 21, 25, 30, 38, 39])
def test_an_edit_resumes_at_the_anchor_before_it(
    kind: str, tiny: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, store: Store, prompt: list[int], edited: int
) -> None:
    prompts = PromptCache(tiny, tokenizer, store)
    answer(prompts, prompt, anchors=[5, 20, 30, 39])
    ids = changed(prompt, edited)
    before = max(p for p in (0, 5, 20, 30, 39) if p <= edited)
    if kind in (*ANYWHERE, "gemma3", "gemma3n") or (kind == "llama4" and edited > 16):
        before = edited  # the rows kept at the anchors around it cover its window, or its chunk
    got = answer(prompts, ids)
    assert (got.matched, got.usable) == (edited, before)
    assert got.new_ids == cold_answer(tiny, ids)
    # Where the prompt left the known one its state was kept as well.
    third = changed(prompt, edited)
    third[edited] += 1
    got = answer(prompts, third)
    assert (got.matched, got.usable) == (edited, edited)
    assert got.new_ids == cold_answer(tiny, third)


@pytest.mark.parametrize("edited", [22, 40, 50, 58])
def test_a_window_resumes_where_its_rows_were_kept(
    make_tiny: MakeTiny, tokenizer: PreTrainedTokenizerFast, store: Store, prompt: list[int], edited: int
) -> None:
    """Anchors further apart than the window of 16 leave a gap that cannot be resumed in."""
    model, ids = make_tiny("gemma3"), [*prompt, *prompt[:20]]
    prompts = PromptCache(model, tokenizer, store)
    answer(prompts, ids, anchors=[20, 59])
    got = answer(prompts, changed(ids, edited))
    assert (got.matched, got.usable) == (edited, 20)
    assert got.new_ids == cold_answer(model, changed(ids, edited))


def test_a_second_process_finds_the_anchors(
    kind: str, make_tiny: MakeTiny, make_tokenizer: Callable[..., PreTrainedTokenizerFast], tmp_path: Path, prompt: list[int]
) -> None:
    with open_store(tmp_path) as store:
        answer(PromptCache(make_tiny(kind), make_tokenizer(), store, ack="disk"), prompt, anchors=[12, 17, 39])
        assert store.flush(30)
    ids = changed(prompt, 16)
    with open_store(tmp_path) as store:
        model = make_tiny(kind)
        got = answer(PromptCache(model, make_tokenizer(), store), ids)
    assert (got.source, got.matched, got.usable) == ("cold", 16, 16 if kind in (*ANYWHERE, "gemma3", "gemma3n", "llama4") else 12)
    assert got.new_ids == cold_answer(model, ids)


@pytest.mark.parametrize("background", [True, False])
def test_state_is_saved_at_each_planned_position_in_order(
    kind: str, tiny: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, store: Store, prompt: list[int],
    monkeypatch: pytest.MonkeyPatch, background: bool,
) -> None:  # fmt: skip
    saved: list[tuple[int, tuple[Anchor, ...]]] = []
    name = "save_async" if background else "save"
    verb = getattr(store, name)

    def recording(identity: object, ids: object, records: list[object], **options: object) -> object:
        assert {record.position for record in records if isinstance(record, LayerState)} <= {len(ids)}  # type: ignore[arg-type]
        saved.append((len(ids), tuple(options["anchors"])))  # type: ignore[arg-type, call-overload]
        return verb(identity, ids, records, **options)

    monkeypatch.setattr(store, name, recording)
    named = Anchor(17, AnchorKind.SYSTEM_PROMPT, depth=1)
    answer(PromptCache(tiny, tokenizer, store, background=background), prompt, anchors=[30, named, 0, 40, 77, 3, 30])
    if kind in ANYWHERE:
        assert saved == [(45, (named,))]
    else:
        assert saved == [(3, ()), (17, (named,)), (30, ()), (45, ())]


def test_a_plan_of_ones_own_is_asked_once_a_turn(
    make_tiny: MakeTiny, tokenizer: PreTrainedTokenizerFast, store: Store, prompt: list[int]
) -> None:
    asked = []

    def plan(ids: object, matched: int, usable: int) -> Iterable[int | Anchor]:
        asked.append((len(ids), matched, usable))  # type: ignore[arg-type]
        return [usable + 4, 39]

    prompts = PromptCache(make_tiny("lfm2"), tokenizer, store, anchors=plan)
    answer(prompts, prompt)
    prompts.release()
    answer(prompts, changed(prompt, 10))
    prompts.release()
    assert answer(prompts, changed(prompt, 10)).usable == 39
    assert asked == [(40, 0, 0), (40, 10, 4), (40, 40, 39)]


def test_load_and_store_know_the_length(
    tiny: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, store: Store, prompt: list[int], logits_of: LogitsOf
) -> None:
    prompts = PromptCache(tiny, tokenizer, store)
    cache = prompts.load(prompt)
    assert cache_length(cache) == 0
    logits_of(tiny, prompt[:30], cache)
    for ids in (prompt[:29], prompt[:32], prompt):
        with pytest.raises(RecordError, match="holds rows of 30 tokens"):
            prompts.store(ids, cache)
    assert prompts.store(prompt[:31], cache).stored
    twin = prompts.load(prompt)
    assert cache_length(twin) == cache_length(cache) == 30
    assert torch.equal(logits_of(tiny, prompt[30:31], twin, 30), logits_of(tiny, prompt[30:31], cache, 30))
    assert cache_length(twin) == cache_length(cache) == 31


def test_a_failing_store_changes_no_answer(
    tiny: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, prompt: list[int], broken_store: type,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    prompts = PromptCache(tiny, tokenizer, broken_store())
    with caplog.at_level(logging.WARNING, "warmkv.transformers"):
        first = answer(prompts, prompt)
        second = answer(prompts, [*first.ids, 5, 6])
    assert first.new_ids == cold_answer(tiny, prompt)
    assert (second.source, second.new_ids) == ("live", cold_answer(tiny, [*first.ids, 5, 6]))
    assert len([record for record in caplog.records if record.name == "warmkv.transformers"]) == 1


@pytest.mark.parametrize("kind", ["gemma3", "llama4", "lfm2", "mamba2", "falcon_h1"], indirect=True)
def test_a_restore_without_its_state_is_a_cold_run(
    tiny: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, store: Store, prompt: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = PromptCache(tiny, tokenizer, store)
    expected = answer(prompts, prompt).new_ids
    prompts.release()
    restore = store.restore

    def poorer(*args: object, **options: object) -> object:
        restored = restore(*args, **options)  # type: ignore[arg-type]
        layer = restored.layers[-1] if restored.layers[-1].states else restored.layers[0]
        (layer.states or layer.planes).popitem()
        return restored

    monkeypatch.setattr(store, "restore", poorer)
    got = answer(prompts, prompt)
    assert (got.source, got.new_ids) == ("none", expected)


# -- models without attention ------------------------------------------------------------


@pytest.mark.parametrize("kind", [*ALL_LINEAR, "lfm2"], indirect=True)
@pytest.mark.parametrize(
    "options",
    [
        {"repetition_penalty": 1.7}, {"no_repeat_ngram_size": 2}, {"max_new_tokens": None, "max_length": 44},
        {"min_length": 46, "eos_token_id": list(range(48))}, {"bad_words_ids": [[3], [7, 9]]},
    ],
    ids=lambda options: "-".join(options),
)  # fmt: skip
@pytest.mark.parametrize("release", [True, False], ids=["store", "live"])
def test_options_that_look_at_the_prompt_see_all_of_it(
    tiny: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, store: Store, prompt: list[int], options: dict[str, object],
    release: bool,
) -> None:  # fmt: skip
    prompts = PromptCache(tiny, tokenizer, store)
    answer(prompts, prompt[:30])
    if release:
        prompts.release()
    processor = Seen()
    got = answer(prompts, prompt, logits_processor=LogitsProcessorList([processor]), **options)
    assert got.new_ids == cold_answer(tiny, prompt, **options)
    assert processor.ids[0] == prompt and processor.ids[-1] == list(got.ids[:-1])


@pytest.mark.parametrize("kind", ALL_LINEAR, indirect=True)
def test_limits_may_come_in_a_configuration(
    tiny: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, store: Store, prompt: list[int]
) -> None:
    prompts = PromptCache(tiny, tokenizer, store)
    config = transformers.GenerationConfig(max_length=44, do_sample=False)
    for _ in range(2):
        assert len(prompts.generate(prompt, generation_config=config).new_ids) == 4
    assert config.max_length == 44 and config.max_new_tokens is None


@pytest.mark.parametrize("kind", ALL_LINEAR, indirect=True)
def test_a_streamer_gets_the_prompt_and_each_token(
    tiny: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, store: Store, prompt: list[int]
) -> None:
    class Recorder(BaseStreamer):  # type: ignore[misc]
        def __init__(self) -> None:
            self.events: list[list[int]] = []

        def put(self, value: torch.Tensor) -> None:
            self.events.append(value.flatten().tolist())

        def end(self) -> None:
            pass

    prompts = PromptCache(tiny, tokenizer, store)
    for _ in range(2):
        recorder = Recorder()
        got = answer(prompts, prompt, streamer=recorder)
        assert recorder.events == [prompt, *([token] for token in got.new_ids)]


@pytest.mark.parametrize("kind", ALL_LINEAR, indirect=True)
@pytest.mark.parametrize("option", ["prefill_chunk_size", "encoder_no_repeat_ngram_size", "guidance_scale"])
def test_options_that_need_ids_to_be_fed_are_refused(
    tiny: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, store: Store, prompt: list[int], option: str
) -> None:
    prompts = PromptCache(tiny, tokenizer, store)
    with pytest.raises(UnsupportedError, match=option):
        prompts.generate(prompt, max_new_tokens=2, **{option: 3})


@pytest.mark.parametrize("kind", ALL_LINEAR, indirect=True)
def test_a_cache_that_does_not_count_is_not_stored(
    tiny: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, store: Store, prompt: list[int]
) -> None:
    foreign = DynamicCache(config=tiny.config)
    with torch.no_grad():
        tiny(input_ids=torch.tensor([prompt]), use_cache=True, cache=foreign)
    with pytest.raises(RecordError, match="does not tell how many tokens"):
        PromptCache(tiny, tokenizer, store).store(prompt, foreign)


# -- one token at a time where several would be wrong ------------------------------------


@pytest.mark.parametrize("kind", ["lfm2", "mamba2", "qwen3_next", "falcon_h1"], indirect=True)
@pytest.mark.parametrize("version", ["5.24.0", "5.7.0"])
def test_below_its_floor_a_family_is_fed_singly(
    tiny: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, store: Store, prompt: list[int], monkeypatch: pytest.MonkeyPatch,
    version: str,
) -> None:  # fmt: skip
    monkeypatch.setattr(hf_versions.transformers, "__version__", version)
    prompts = PromptCache(tiny, tokenizer, store)
    first = answer(prompts, prompt[:20])
    fed: list[tuple[int, int]] = []
    feed = hf_feed.feed

    def watching(model: torch.nn.Module, cache: DynamicCache, ids: torch.Tensor, start: int, **options: object) -> object:
        fed.append((start, int(ids.shape[1])))
        return feed(model, cache, ids, start, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(hf_feed, "feed", watching)
    ids = [*first.ids, *prompt[20:]]
    got = answer(prompts, ids)
    assert (got.source, got.usable, got.new_ids) == ("live", 25, cold_answer(tiny, ids))
    assert fed == ([(25, 20)] if version == "5.24.0" else [(at, 1) for at in range(25, 45)])


@pytest.mark.parametrize("kind", ["mamba", "jamba"], indirect=True)
def test_families_that_forget_are_fed_singly_after_the_first_piece(
    tiny: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, store: Store, prompt: list[int], logits_of: LogitsOf
) -> None:
    """If several at once became right, the family belongs into the table."""
    cache = new_cache(tiny)
    logits_of(tiny, prompt[:20], cache)
    wrong = logits_of(tiny, prompt[20:], cache, 20)
    assert float((wrong - logits_of(tiny, prompt)[20:]).abs().max()) > 1e-5
    prompts = PromptCache(tiny, tokenizer, store)
    got = answer(prompts, prompt, anchors=[20, 30])
    assert got.new_ids == cold_answer(tiny, prompt)
    prompts.release()
    assert answer(prompts, changed(prompt, 30), anchors=[]).usable == 30


def test_an_index_over_keys_is_fed_singly_below_its_floor(
    make_tiny: MakeTiny, tokenizer: PreTrainedTokenizerFast, store: Store, prompt: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hf_versions.transformers, "__version__", "5.15.0")
    model = make_tiny("deepseek_v32")
    prompts = PromptCache(model, tokenizer, store)
    answer(prompts, prompt)
    fed: list[int] = []
    feed = hf_feed.feed
    monkeypatch.setattr(hf_feed, "feed", lambda m, c, ids, start, **k: fed.append(start) or feed(m, c, ids, start, **k))
    got = answer(prompts, changed(prompt, 35))
    assert (got.usable, fed) == (35, [35, 36, 37, 38])
    assert got.new_ids == cold_answer(model, changed(prompt, 35))


# -- saves under way ---------------------------------------------------------------------


class SlowStore:
    """A store whose background saves take a while, one after the other."""

    def __init__(self, store: Store, delay_s: float) -> None:
        self.match, self.restore, self.save = store.match, store.restore, store.save
        self._delay_s = delay_s
        self._thread = ThreadPoolExecutor(1)
        self.waiting = self.most = 0

    def save_async(self, *args: object, **options: object) -> Future[Saved]:
        def late() -> Saved:
            time.sleep(self._delay_s)
            self.waiting -= 1
            return self.save(*args, **options)  # type: ignore[arg-type]

        self.waiting += 1
        self.most = max(self.most, self.waiting)
        return self._thread.submit(late)


def test_a_retry_waits_for_what_is_being_saved(
    make_tiny: MakeTiny, tokenizer: PreTrainedTokenizerFast, store: Store, prompt: list[int]
) -> None:
    prompts = PromptCache(make_tiny("lfm2"), tokenizer, SlowStore(store, 0.1))
    prompts.generate(prompt, max_new_tokens=6, do_sample=False)
    assert prompts.generate(prompt, max_new_tokens=6, do_sample=False).usable == 39


def test_a_prefill_does_not_run_far_ahead_of_its_saves(
    make_tiny: MakeTiny, tokenizer: PreTrainedTokenizerFast, store: Store, prompt: list[int]
) -> None:
    slow = SlowStore(store, 0.05)
    prompts = PromptCache(make_tiny("lfm2"), tokenizer, slow)
    answer(prompts, prompt, anchors=range(2, 40, 2))
    assert slow.most <= BACKLOG + 1
    for at in range(2, 40, 2):
        prompts.release()
        assert prompts.load([*prompt[: at + 1]]).get_seq_length() == at


def test_many_anchors_are_all_kept(
    make_tiny: MakeTiny, tokenizer: PreTrainedTokenizerFast, store: Store, prompt: list[int]
) -> None:
    prompts = PromptCache(make_tiny("mamba2"), tokenizer, store)
    answer(prompts, prompt, anchors=range(1, 40))
    assert [cache_length(prompts.load(prompt[: at + 1])) for at in range(1, 40)] == list(range(1, 40))


# -- adapters ----------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["lfm2", "mamba2", "gemma3", "falcon_h1"], indirect=True)
def test_adapters_are_in_force_in_every_piece(
    kind: str, make_tiny: MakeTiny, tokenizer: PreTrainedTokenizerFast, store: Store, prompt: list[int]
) -> None:
    config = peft.LoraConfig(r=2, lora_alpha=16, target_modules=["in_proj", "q_proj", "v_proj"], init_lora_weights=False)
    torch.manual_seed(1)
    model = peft.get_peft_model(make_tiny(kind), config).eval()
    prompts = PromptCache(model, tokenizer, store)
    expected = cold_answer(model, prompt)
    assert expected != cold_answer(make_tiny(kind), prompt)
    assert answer(prompts, prompt, anchors=[20, 30]).new_ids == expected
    prompts.release()
    again = answer(prompts, prompt)
    assert (again.usable, again.new_ids) == (39 if kind == "gemma3" else 30, expected)
    with model.disable_adapter():
        assert answer(prompts, prompt).usable == 0
