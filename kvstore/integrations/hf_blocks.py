"""A cache layer over rows that came back in several blocks."""

from __future__ import annotations

from typing import cast

import torch
from transformers.cache_utils import DynamicLayer


class BlocksLayer(DynamicLayer):
    """A layer whose rows lie in several restored blocks until its first update joins them with
    the new rows: one copy instead of two. From then on it is a plain DynamicLayer; whoever looks
    at its tensors before joins them too."""

    _parts: tuple[list[torch.Tensor], list[torch.Tensor]]

    @classmethod
    def attach(cls, layer: DynamicLayer, keys: list[torch.Tensor], values: list[torch.Tensor]) -> None:
        """Turn an initialised, empty ``layer`` into one over these blocks."""
        layer.__class__ = cls
        cast(BlocksLayer, layer)._parts = (keys, values)

    def _join(self, *new: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        """Become a plain layer that holds the blocks, and ``new`` rows behind them."""
        keys, values = self._parts
        more_keys, more_values = [pair[0] for pair in new], [pair[1] for pair in new]
        joined = torch.cat([*keys, *more_keys], dim=-2), torch.cat([*values, *more_values], dim=-2)
        del self._parts
        self.__class__ = DynamicLayer
        self.keys, self.values = joined
        return joined

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return self._join((key_states, value_states))

    def get_seq_length(self, *args: object) -> int:
        return sum(int(block.shape[-2]) for block in self._parts[0])

    @property
    def keys(self) -> torch.Tensor | None:
        self._join()
        return cast(torch.Tensor, self.__dict__["keys"])

    @keys.setter
    def keys(self, tensor: torch.Tensor | None) -> None:
        self._join()
        self.__dict__["keys"] = tensor

    @property
    def values(self) -> torch.Tensor | None:
        self._join()
        return cast(torch.Tensor, self.__dict__["values"])

    @values.setter
    def values(self, tensor: torch.Tensor | None) -> None:
        self._join()
        self.__dict__["values"] = tensor
