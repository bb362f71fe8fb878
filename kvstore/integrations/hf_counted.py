"""A cache that counts its tokens.

Where no layer has rows, nothing in the library's cache says how many tokens it holds, and a
state that is one token off gives wrong answers without an error.
"""

from __future__ import annotations

import torch
from transformers import DynamicCache


class CountedCache(DynamicCache):
    """A DynamicCache of layers with convolution states only. ``tokens`` is how many it holds: a
    layer asks for its convolution state once a forward pass, and hands in as many columns as
    there are new tokens, or, for a single one, writes into the state it was given.

    `observe` proves that a model calls it so, before anything is stored. A snapshot or a restored
    state set through the layers is not counted: whoever does that sets ``tokens``."""

    tokens: int = 0
    _asked: bool = False

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.tokens

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        if self._counts(layer_idx, state_idx):
            self.tokens += 1
            self._asked = True
        return super().get_conv_state(layer_idx, state_idx)

    def update_conv_state(self, conv_states: torch.Tensor, layer_idx: int, state_idx: int = 0, **options: object) -> torch.Tensor:
        if self._counts(layer_idx, state_idx):
            self.tokens += int(conv_states.shape[-1]) - self._asked
            self._asked = False
        return super().update_conv_state(conv_states, layer_idx, state_idx, **options)

    def reset(self) -> None:
        super().reset()
        self.tokens = 0

    def _counts(self, layer_idx: int, state_idx: int) -> bool:
        first = next((index for index, layer in enumerate(self.layers) if hasattr(layer, "conv_states")), None)
        return layer_idx == first and state_idx == 0
