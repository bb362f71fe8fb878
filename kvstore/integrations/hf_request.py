"""What a caller may ask `generate` for: one sequence, no padding, one cache, and that ours.

Arguments are let through by name. One that is not known to leave the numbers of the rows alone
is refused, so that a new option of the library is a clear sentence and never a wrong row.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias, cast

import numpy as np
import torch
from transformers import GenerationConfig, PreTrainedTokenizerBase

from warmkv.schema.errors import RecordError, UnsupportedError
from warmkv.schema.records import Tokens, TokensLike, as_tokens

Message: TypeAlias = Mapping[str, object]
Messages: TypeAlias = Sequence[Message]
Options: TypeAlias = dict[str, object]

_LATER = "until a later version"
_ARGUMENTS = frozenset(
    "generation_config logits_processor stopping_criteria prefix_allowed_tokens_fn streamer tokenizer attention_mask".split()
)


def _given(value: object) -> bool:
    return value is not None and value is not False


def _several(value: object) -> bool:
    return isinstance(value, int) and value > 1


#: Option, when it is refused, and why.
_REFUSED: tuple[tuple[str, Callable[[object], bool], str], ...] = (
    ("num_beams", _several, f"beam search keeps several sequences; one is served {_LATER}"),
    ("num_return_sequences", _several, f"several return sequences are a batch; one sequence is served {_LATER}"),
    ("assistant_model", _given, f"assistant models feed and roll back tokens; they are refused {_LATER}"),
    ("prompt_lookup_num_tokens", _given, f"prompt lookup feeds and rolls back tokens; it is refused {_LATER}"),
    ("assistant_early_exit", _given, f"early-exit assistance feeds and rolls back tokens; it is refused {_LATER}"),
    ("use_mtp", _given, f"multi-token prediction feeds and rolls back tokens; it is refused {_LATER}"),
    ("speculation_type", _given, f"speculative decoding feeds and rolls back tokens; it is refused {_LATER}"),
    ("cache", _given, "the cache is PromptCache's own; a caller's cache cannot be passed"),
    ("past_key_values", _given, "the cache is PromptCache's own; a caller's cache cannot be passed"),
    ("cache_params", _given, "the cache is PromptCache's own; a caller's cache cannot be passed"),
    ("cache_implementation", lambda value: value not in (None, "dynamic"), "static, offloaded and quantised caches are refused"),
    ("use_cache", lambda value: value is False, "use_cache=False leaves nothing to keep"),
    ("inputs_embeds", _given, f"embeddings have no token ids to be found by; pass ids {_LATER}"),
    ("custom_generate", _given, "a custom decoding loop may feed other tokens than it returns"),
    ("token_healing", _given, "token healing rewrites the prompt"),
    ("penalty_alpha", lambda value: isinstance(value, (int, float)) and value > 0, "contrastive search reorders the cache"),
    ("dola_layers", _given, "DoLa decoding is a custom decoding loop"),
    ("constraints", _given, "constrained decoding is a beam search"),
    ("force_words_ids", _given, "constrained decoding is a beam search"),
    ("output_attentions", _given, "collecting attentions changes how attention is computed"),
    ("return_dict_in_generate", _given, "generate returns a Generated; scores and states of the library are not handed through"),
)  # fmt: skip


def check_options(options: Mapping[str, object], defaults: GenerationConfig | None, length: int) -> Options:
    """``options`` without the attention mask, once every one of them is known to be harmless.

    ``defaults`` are the model's own, which count where an option is not given. Raises
    UnsupportedError with the one reason."""
    given = options.get("generation_config")
    known = {name for name in vars(cast(Callable[[], object], GenerationConfig)()) if not name.startswith("_")}
    for name, refused, reason in _REFUSED:
        if name in options:
            value = options[name]
        else:
            value = getattr(given, name, None)
            if value is None and name != "return_dict_in_generate":
                value = getattr(defaults, name, None)
        if refused(value):
            raise UnsupportedError(f"{name}: {reason}")
    for name in sorted(set(options) - known - _ARGUMENTS - {name for name, _, _ in _REFUSED}):
        raise UnsupportedError(f"{name}: this argument reaches the model's forward pass and may change its numbers")
    _check_mask(options.get("attention_mask"), length)
    dropped = {
        "attention_mask",
        "cache",
        "past_key_values",
        "cache_params",
        "assistant_model",
        "inputs_embeds",
        "custom_generate",
    }
    return {name: value for name, value in options.items() if name not in dropped}


def setting(name: str, options: Options, defaults: GenerationConfig | None) -> object:
    """What is in force for an option of `generate`: as passed, as in the configuration passed, as
    in the model's own; None where it is set nowhere."""
    for value in (options.get(name), getattr(options.get("generation_config"), name, None), getattr(defaults, name, None)):
        if value is not None:
            return value
    return None


def require_absent(names: Sequence[str], options: Options, defaults: GenerationConfig | None, reason: str) -> None:
    """UnsupportedError if one of the numbers ``names`` is in force and not the 1 that does nothing."""
    for name in names:
        value = setting(name, options, defaults)
        if value is not None and (name == "prefill_chunk_size" or value not in (0, 1)):
            raise UnsupportedError(f"{name}: {reason}; it is refused {_LATER}")


def _check_mask(mask: object, length: int) -> None:
    if mask is None:
        return
    found = torch.as_tensor(mask)
    if tuple(found.shape) not in ((1, length), (length,)):
        raise UnsupportedError(
            f"attention_mask has shape {tuple(found.shape)}, expected (1, {length}): it must cover the whole prompt"
        )
    if not bool((found == 1).all()):
        raise UnsupportedError(f"attention_mask masks tokens out; padding is refused {_LATER}")


def is_messages(value: object) -> bool:
    """Whether ``value`` is a conversation: a sequence of messages, each a mapping."""
    return isinstance(value, Sequence) and not isinstance(value, (str, bytes)) and bool(value) and isinstance(value[0], Mapping)


def token_ids(value: TokensLike | torch.Tensor) -> Tokens:
    """Ids of one sequence as uint32, from a list, array or tensor with or without a batch
    dimension of 1, or from what a tokenizer returns. Raises UnsupportedError for a batch or for
    padding, RecordError for what are no ids."""
    if isinstance(value, Mapping) and "input_ids" in value:
        tokens = token_ids(value["input_ids"])
        _check_mask(value.get("attention_mask"), len(tokens))
        return tokens
    if isinstance(value, str):
        raise RecordError("a prompt is a list of messages or of token ids, not text")
    if isinstance(value, torch.Tensor):
        value = value.detach().cpu().numpy()
    if isinstance(value, Sequence) and value and isinstance(value[0], (Sequence, np.ndarray, torch.Tensor)):
        if len(value) > 1:
            raise UnsupportedError(f"a batch of {len(value)} was passed; one sequence is served {_LATER}")
        return token_ids(cast(TokensLike, value[0]))
    array = np.asarray(value)
    if array.ndim == 2:
        if len(array) != 1:
            raise UnsupportedError(f"a batch of {len(array)} was passed; one sequence is served {_LATER}")
        array = array[0]
    return as_tokens(array)


def require_unpadded(tokens: Tokens, tokenizer: PreTrainedTokenizerBase) -> None:
    """UnsupportedError if ``tokens`` begin or end with a token that is there for padding only."""
    pad = tokenizer.pad_token_id
    if pad is None or pad in (tokenizer.eos_token_id, tokenizer.bos_token_id):
        return
    if tokens[0] == pad or tokens[-1] == pad:
        raise UnsupportedError(f"the prompt is padded with token {pad}; padding is refused {_LATER}")


def render(
    tokenizer: PreTrainedTokenizerBase, messages: Messages, tools: Sequence[object] | None, template: Mapping[str, object]
) -> Tokens:
    """Ids of a conversation under the tokenizer's chat template, ready for an answer."""
    if not all(isinstance(message, Mapping) for message in messages):
        raise UnsupportedError(f"a batch of conversations was passed; one sequence is served {_LATER}")
    apply = cast(Callable[..., Mapping[str, TokensLike]], tokenizer.apply_chat_template)
    options = {"add_generation_prompt": True, **template, "tokenize": True, "return_dict": True}
    return token_ids(apply(list(messages), tools=None if tools is None else list(tools), **options)["input_ids"])
