"""Rows on their way into a plane, and which rows of one are meant."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from warmkv.kernels.formats import F32

Indices = npt.NDArray[np.intp]
Codes = npt.NDArray[np.generic]


@dataclass(frozen=True, slots=True)
class Encoded:
    """Rows as they will be stored: ``codes`` (heads, n, columns) and ``scales`` (heads, n, groups) or None.
    Views of the rows they were made from where the format stores numbers as they are."""

    codes: Codes
    scales: F32 | None
