"""The moment in `generate` at which the prompt is computed: its first logits."""

from __future__ import annotations

from collections.abc import Callable

import torch
from transformers import LogitsProcessor, LogitsProcessorList


class FirstLogits(LogitsProcessor):
    """Calls ``then`` once, when the first logits are there, and changes none."""

    def __init__(self, then: Callable[[], None]) -> None:
        self._then: Callable[[], None] | None = then

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        then, self._then = self._then, None
        if then is not None:
            scores[..., :1].cpu()  # a device computes behind our back: wait for it
            then()
        return scores


def with_first(processors: object, then: Callable[[], None]) -> LogitsProcessorList:
    """The caller's ``processors`` (a list or None) with one that calls ``then`` before them."""
    return LogitsProcessorList([FirstLogits(then), *(processors if isinstance(processors, list) else [])])
