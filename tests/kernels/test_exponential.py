"""The exponential of compiled loops against float64."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("numba")

from warmkv.kernels.compiled.exponential import exp_below  # noqa: E402


def test_it_is_the_exponential_to_the_last_bits_and_nothing_below_what_float32_holds() -> None:
    x = np.concatenate([-np.geomspace(1e-8, 86.9, 3000), [0.0, -0.0]]).astype(np.float32)
    ours = np.array([exp_below(item) for item in x])
    np.testing.assert_allclose(ours, np.exp(x.astype(np.float64)), rtol=2.5e-7)
    assert [exp_below(np.float32(item)) for item in (0.0, -87.5, -104.0, -1e30, -np.inf)] == [1, 0, 0, 0, 0]
    assert np.isnan(exp_below(np.float32(np.nan)))
