"""Turns of a conversation through PromptCache: planned anchors, dead thinking, bypass, twins."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from warmkv.kvstore.admission import Admission
from warmkv.kvstore.integrations import transformers as adapter
from warmkv.kvstore.integrations.hf_conversation import Conversation
from warmkv.kvstore.integrations.hf_first import with_first
from warmkv.kvstore.integrations.transformers import PromptCache
from warmkv.kvstore.store import Store, open_store
from warmkv.schema.records import AnchorKind

tokenizers = pytest.importorskip("tokenizers")
#: Drops the thinking of answers that are history, as many templates do.
STRIPPING = (
    "{%- for m in messages %}<r>{{ m['role'] }}\n"
    "{%- if m['role'] == 'assistant' and not loop.last %}{{ m['content'].split('</t>')[-1] }}"
    "{%- else %}{{ m['content'] }}{%- endif %}<e>{%- endfor %}"
    "{%- if add_generation_prompt %}<r>assistant\n<t>{%- endif %}"
)
SYSTEM = "You are an agent who answers in few words and never guesses. " * 4
FIRST = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": "What is the colour of the sky?"}]


@pytest.fixture(scope="module")
def words() -> PreTrainedTokenizerFast:
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(unk_token=None))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=400, special_tokens=["<r>", "<e>"], initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet()
    )
    backend.train_from_iterator([SYSTEM, "What is the colour of the sky? Blue, I think.</t>"], trainer)
    made = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<e>")
    made.chat_template = STRIPPING
    return made


def llama(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, eos_token_id=None, pad_token_id=None, bos_token_id=None,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


def recurrent(tokenizer: PreTrainedTokenizerFast) -> Any:
    from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

    torch.manual_seed(5)
    config = Qwen3NextConfig(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=48, num_hidden_layers=4, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=8,
        linear_value_head_dim=8, linear_conv_kernel_dim=4, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16,
        shared_expert_intermediate_size=16, decoder_sparse_step=1, eos_token_id=None, pad_token_id=None, bos_token_id=None,
        layer_types=["linear_attention", "linear_attention", "linear_attention", "full_attention"],
    )  # fmt: skip
    return Qwen3NextForCausalLM(config).eval()


@pytest.fixture
def store() -> Iterator[Store]:
    with open_store(warm_bytes=256 << 20) as opened:
        yield opened


def ask(cache: PromptCache, messages: list[dict[str, str]], tokens: int = 6, **options: Any) -> Any:
    got = cache.generate(messages, max_new_tokens=tokens, do_sample=False, **options)
    got.saved.result(30)
    return got


def states(store: Store) -> int:
    return int(store.stats()["states"])  # type: ignore[call-overload]


# -- planned anchors -----------------------------------------------------------------------


def test_another_user_resumes_behind_the_shared_system_prompt(words: PreTrainedTokenizerFast, store: Store) -> None:
    model = recurrent(words)
    ask(PromptCache(model, words, store), FIRST)
    other = [FIRST[0], {"role": "user", "content": "Name a fruit, please."}]
    got = ask(PromptCache(model, words, store), other)
    shared = next(i for i, pair in enumerate(zip(_ids(words, FIRST), _ids(words, other), strict=False)) if pair[0] != pair[1])
    assert got.source == "warm" and shared - 8 <= got.usable <= shared
    kinds = {anchor.kind for anchor in store.match(PromptCache(model, words, store).identity(), got.ids).anchors}
    assert AnchorKind.SYSTEM_PROMPT in kinds


def test_the_next_turn_resumes_before_what_the_template_will_not_repeat(words: PreTrainedTokenizerFast, store: Store) -> None:
    model = recurrent(words)
    first = ask(PromptCache(model, words, store), FIRST)
    turn = [*FIRST, {"role": "assistant", "content": "hm</t>Blue."}, {"role": "user", "content": "And of grass?"}]
    got = ask(PromptCache(model, words, store), turn)
    shared = next(i for i, pair in enumerate(zip(first.ids, _ids(words, turn), strict=False)) if pair[0] != pair[1])
    assert got.source == "warm" and shared - 8 <= got.usable <= shared


def test_an_exact_retry_resumes_near_its_end(words: PreTrainedTokenizerFast, store: Store) -> None:
    model = recurrent(words)
    first = ask(PromptCache(model, words, store), FIRST)
    again = ask(PromptCache(model, words, store), FIRST)
    assert again.new_ids == first.new_ids and again.suffix_tokens <= 9


def test_as_many_states_as_allowed_are_kept_of_a_prompt(words: PreTrainedTokenizerFast, store: Store) -> None:
    ask(PromptCache(recurrent(words), words, store, max_anchors=2), FIRST)
    assert 1 <= states(store) <= 3


# -- dead thinking -------------------------------------------------------------------------


@pytest.mark.parametrize("make", [llama, recurrent])
def test_what_no_later_prompt_repeats_is_not_kept(words: PreTrainedTokenizerFast, store: Store, make: Callable[..., Any]) -> None:
    cache = PromptCache(make(words), words, store)
    got = ask(cache, FIRST, tokens=30)
    kept = store.match(cache.identity(), [*got.ids, 0]).matched
    assert kept <= got.prompt_tokens, "the thinking of the answer is stored"
    assert kept >= got.prompt_tokens - 9


def test_thinking_is_kept_where_that_is_asked_for(words: PreTrainedTokenizerFast, store: Store) -> None:
    cache = PromptCache(llama(words), words, store, keep_thinking=True)
    got = ask(cache, FIRST, tokens=30)
    assert store.match(cache.identity(), [*got.ids, 0]).matched == len(got.ids) - 1


def test_without_a_template_all_of_an_answer_is_kept(words: PreTrainedTokenizerFast, store: Store) -> None:
    cache = PromptCache(llama(words), words, store)
    got = cache.generate(list(range(5, 60)), max_new_tokens=10, do_sample=False)
    got.saved.result(30)
    assert store.match(cache.identity(), [*got.ids, 0]).matched == len(got.ids) - 1


def test_a_template_that_fails_costs_nothing(words: PreTrainedTokenizerFast) -> None:
    def broken(*_: object, **__: object) -> str:
        raise RuntimeError("no template")

    conversation = Conversation(words, FIRST, None, {})
    conversation._renderer.text = broken  # type: ignore[method-assign]
    ids = _ids(words, FIRST)
    tokens = torch.tensor(ids).numpy().astype("uint32")
    assert conversation.live(tokens, "x") == len(ids)
    assert all(0 < anchor.position <= len(ids) for anchor in conversation.anchors(tokens, 0, 4))


# -- bypass --------------------------------------------------------------------------------


def test_prompts_that_are_computed_faster_than_the_store_answers_bypass_it(
    words: PreTrainedTokenizerFast, store: Store, measured: None
) -> None:
    admission = Admission(prefill_tps=1000, round_trip_s=1.0)  # up to 999 tokens are not worth a question
    cache = PromptCache(llama(words), words, store, admission=admission)
    got = ask(cache, FIRST)
    assert (got.source, store.stats()["entries"], store.stats()["misses"]) == ("none", 0, 0)
    assert not got.saved.result().stored and "faster" in got.saved.result().reason
    slower = PromptCache(llama(words), words, store, admission=Admission(prefill_tps=10, round_trip_s=1.0))
    assert ask(slower, FIRST).saved.result().stored


def test_the_speed_of_prefills_is_measured_and_told_to_the_store(
    words: PreTrainedTokenizerFast, store: Store, measured: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[float] = []
    restore = store.restore
    monkeypatch.setattr(store, "restore", lambda *a, **k: told.append(k["prefill_tps"]) or restore(*a, **k))
    admission = Admission(round_trip_s=0.0)
    cache = PromptCache(llama(words), words, store, admission=admission)
    ask(cache, FIRST)
    speed = admission.prefill_tps
    assert speed > 0
    cache.release()
    ask(cache, [FIRST[0], {"role": "user", "content": "Something else, at some length, please."}])
    assert told == [0.0, speed]


# -- twins ---------------------------------------------------------------------------------


def test_agents_with_one_prompt_compute_it_once(words: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapter, "EARLY_TOKENS", 1)
    model = llama(words)
    with open_store(warm_bytes=256 << 20) as store:
        caches = [PromptCache(model, words, store, wait_s=60) for _ in range(4)]
        got: list[Any] = []
        gate = threading.Barrier(len(caches))

        def agent(number: int) -> None:
            gate.wait()
            got.append(ask(caches[number], FIRST))

        threads = [threading.Thread(target=agent, args=(number,)) for number in range(len(caches))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
        assert sorted(item.usable > 0 for item in got) == [False, True, True, True]
        assert len({item.new_ids for item in got}) == 1
        assert store.stats()["flights"] == 0


def test_a_turn_that_fails_lets_those_who_wait_go_on(words: PreTrainedTokenizerFast, store: Store) -> None:
    def refuse(*_: object) -> bool:
        raise RuntimeError("stopped")

    cache = PromptCache(llama(words), words, store)
    with pytest.raises(RuntimeError, match="stopped"):
        cache.generate(FIRST, max_new_tokens=4, stopping_criteria=[refuse])
    assert store.stats()["flights"] == 0


def test_a_stored_id_the_tokenizer_cannot_spell_costs_no_hit(
    words: PreTrainedTokenizerFast, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = llama(words)
    ask(PromptCache(model, words, store), FIRST)

    def unknown(*_: object) -> str:
        raise OverflowError("out of range")

    cache = PromptCache(model, words, store)
    monkeypatch.setattr(cache._starts, "_decode", unknown)
    got = ask(cache, [FIRST[0], {"role": "user", "content": "Something else."}])
    assert got.usable > 0 and "differs at" in got.reason


def test_first_logits_are_seen_once_and_unchanged() -> None:
    seen: list[int] = []
    processors = with_first([lambda ids, scores: scores * 2], lambda: seen.append(1))
    scores = torch.tensor([[1.0, -2.0]])
    for _ in range(3):
        assert torch.equal(processors(torch.zeros((1, 1), dtype=torch.long), scores), scores * 2)
    assert seen == [1]


def _ids(tokenizer: PreTrainedTokenizerFast, messages: list[dict[str, str]]) -> list[int]:
    found = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"]
    return [int(item) for item in found]
