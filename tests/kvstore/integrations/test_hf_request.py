"""What a caller may ask for: known options pass, everything else is one clear sentence."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from transformers import DynamicCache, GenerationConfig, PreTrainedTokenizerFast

from warmkv.kvstore.integrations.hf_request import check_options, is_messages, render, require_unpadded, token_ids
from warmkv.schema.errors import RecordError, UnsupportedError

MakeTokenizer = Callable[..., PreTrainedTokenizerFast]

REFUSED: list[tuple[str, object]] = [
    ("num_beams", 2),
    ("num_return_sequences", 2),
    ("assistant_model", object()),
    ("prompt_lookup_num_tokens", 3),
    ("assistant_early_exit", 1),
    ("use_mtp", True),
    ("cache", DynamicCache()),
    ("past_key_values", DynamicCache()),
    ("cache_params", object()),
    ("cache_implementation", "static"),
    ("cache_implementation", "quantized"),
    ("use_cache", False),
    ("inputs_embeds", torch.zeros(1, 3, 4)),
    ("custom_generate", "somewhere/else"),
    ("token_healing", True),
    ("penalty_alpha", 0.6),
    ("dola_layers", "high"),
    ("force_words_ids", [[1]]),
    ("output_attentions", True),
    ("return_dict_in_generate", True),
    ("attention_mask", torch.tensor([[0, 1, 1]])),
    ("attention_mask", torch.tensor([[1, 1]])),
    ("attention_mask", torch.ones(2, 3)),
    ("position_ids", torch.tensor([[5, 6, 7]])),
    ("token_type_ids", torch.zeros(1, 3)),
    ("pixel_values", torch.zeros(1)),
    ("adapter_names", ["a"]),
    ("logits_to_keep", 3),
    ("an_option_of_next_year", None),
]


@pytest.mark.parametrize(("name", "value"), REFUSED, ids=lambda item: item if isinstance(item, str) else "")
def test_options_that_touch_the_rows_are_refused_by_name(name: str, value: object) -> None:
    with pytest.raises(UnsupportedError, match=name) as refusal:
        check_options({name: value}, GenerationConfig(), 3)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("name", "value"), [("num_beams", 4), ("cache_implementation", "static"), ("prompt_lookup_num_tokens", 2)]
)
def test_refused_options_are_found_wherever_they_are_set(name: str, value: object) -> None:
    with pytest.raises(UnsupportedError, match=name):
        check_options({"generation_config": GenerationConfig(**{name: value})}, GenerationConfig(), 3)
    with pytest.raises(UnsupportedError, match=name):
        check_options({}, GenerationConfig(**{name: value}), 3)
    assert check_options({name: None}, GenerationConfig(**{name: value}), 3) == {name: None}


def test_harmless_options_pass_unchanged() -> None:
    options: dict[str, object] = {
        "max_new_tokens": 5, "do_sample": True, "temperature": 0.7, "eos_token_id": [1, 2], "streamer": object(),
        "stop_strings": "x", "tokenizer": object(), "repetition_penalty": 1.1, "num_beams": 1, "use_cache": True,
        "logits_processor": [],
    }  # fmt: skip
    assert check_options(options, GenerationConfig(), 3) == options
    assert check_options({**options, "attention_mask": [[1, 1, 1]]}, None, 3) == options


@pytest.mark.parametrize(
    "value",
    [
        [1, 2, 3],
        (1, 2, 3),
        [[1, 2, 3]],
        np.array([1, 2, 3]),
        torch.tensor([1, 2, 3]),
        torch.tensor([[1, 2, 3]]),
        {"input_ids": [[1, 2, 3]]},
    ],
)
def test_ids_are_taken_from_any_spelling_of_one_sequence(value: object) -> None:
    found = token_ids(value)  # type: ignore[arg-type]
    assert found.dtype == np.uint32 and found.tolist() == [1, 2, 3]


@pytest.mark.parametrize(
    "value", [[[1], [2]], np.ones((2, 3), int), torch.ones((2, 3), dtype=torch.long), [torch.tensor([1]), torch.tensor([2])]]
)
def test_batches_are_refused(value: object) -> None:
    with pytest.raises(UnsupportedError, match="batch of 2"):
        token_ids(value)  # type: ignore[arg-type]


@pytest.mark.parametrize("value", ["text", [], [-1], [1.5], [2**32]])
def test_what_are_no_ids_is_an_error(value: object) -> None:
    with pytest.raises(RecordError):
        token_ids(value)  # type: ignore[arg-type]


def test_padding_is_refused_on_either_side(make_tokenizer: MakeTokenizer) -> None:
    tokenizer = make_tokenizer(pad_token="w5", eos_token="w2")
    for padded in ([5, 1, 2], [1, 2, 5]):
        with pytest.raises(UnsupportedError, match="padded with token 5"):
            require_unpadded(token_ids(padded), tokenizer)
    require_unpadded(token_ids([1, 5, 2]), tokenizer)


def test_padding_a_tokenizer_added_is_refused(make_tokenizer: MakeTokenizer) -> None:
    tokenizer = make_tokenizer(pad_token="w0")
    plain = tokenizer(["w1 w2"], return_tensors="pt")
    assert token_ids(plain).tolist() == [1, 2]
    with pytest.raises(UnsupportedError, match="padding"):
        token_ids(tokenizer(["w1 w2"], padding="max_length", max_length=4, return_tensors="pt"))


def test_an_end_token_that_doubles_as_padding_is_no_padding(make_tokenizer: MakeTokenizer) -> None:
    require_unpadded(token_ids([2, 1, 2]), make_tokenizer(pad_token="w2", eos_token="w2"))


def test_conversations_are_rendered_for_an_answer(tokenizer: PreTrainedTokenizerFast) -> None:
    messages = [{"role": "user", "content": "w7 w8"}]
    assert is_messages(messages) and not is_messages([1, 2]) and not is_messages([])
    assert render(tokenizer, messages, None, {}).tolist() == [7, 8, 1]
    assert render(tokenizer, messages, [{"name": "tool"}], {}).tolist() == [7, 8, 95, 1]
    assert render(tokenizer, messages, None, {"add_generation_prompt": False}).tolist() == [7, 8]


def test_batches_of_conversations_are_refused(tokenizer: PreTrainedTokenizerFast) -> None:
    talk = [{"role": "user", "content": "w7"}]
    with pytest.raises(UnsupportedError, match="batch"):
        token_ids([talk, talk])  # type: ignore[arg-type]
