"""torch tensors as plane formats, and as the arrays a store takes."""

from __future__ import annotations

from typing import cast

import numpy as np
import numpy.typing as npt
import torch

from warmkv.schema.identity import PlaneFormat

FORMATS = {torch.float32: PlaneFormat.F32, torch.float16: PlaneFormat.F16, torch.bfloat16: PlaneFormat.BF16}
DTYPES = {format_: dtype for dtype, format_ in FORMATS.items()}


def as_numpy(tensor: torch.Tensor) -> npt.NDArray[np.generic]:
    """The tensor as an array: a view if it lies in host memory, else a copy; bf16 as uint16 bits."""
    if tensor.device.type != "cpu":
        tensor = tensor.contiguous().cpu()
    if tensor.dtype == torch.bfloat16:
        tensor = tensor.view(torch.uint16)
    return cast(npt.NDArray[np.generic], tensor.numpy())
