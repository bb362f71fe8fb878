"""Compiled ring attention against its reference at odd sizes, and what lies in slots nobody filled."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

pytest.importorskip("numba")

from warmkv.kernels.ring import fast, reference  # noqa: E402
from warmkv.kernels.ring.reference import Rotation  # noqa: E402
from warmkv.kernels.testing import poisoned, rows  # noqa: E402


@pytest.fixture(autouse=True)
def outputs_are_poisoned() -> Iterator[None]:
    with poisoned():
        yield


@pytest.mark.parametrize("size", [1, 7, 32, 80, 128, 192])
@pytest.mark.parametrize("part", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("seen", [0, 1, 12, 13, 14, 26, 1000])
@pytest.mark.parametrize("sinks", [None, 0, 4])
@pytest.mark.parametrize("heads", [1, 7])
def test_outputs_are_those_of_the_reference(size: int, part: float, seen: int, sinks: int | None, heads: int) -> None:
    window, value_size = 13, max(1, size - 2)
    half = int(size * part) // 2
    ring_k, ring_v = rows(window, size, 1, 0.3), rows(window, value_size, 2)
    ring_k[seen:], ring_v[seen:] = np.nan, np.nan
    for given in (ring_k, ring_v):
        given.flags.writeable = False
    rotation = Rotation.table(window + 2, 1.0 / 10.0 ** (np.arange(half) / max(1, half)), 1.2)
    more = {} if sinks is None else {"sink_keys": rows(sinks, size, 4, 0.3), "sink_values": rows(sinks, value_size, 5)}
    q = rows(heads, size, 3, 0.3)
    ours = fast.attend(q, ring_k, ring_v, seen, rotation, scale=size**-0.5, **more)
    theirs = reference.attend(q, ring_k, ring_v, seen, rotation, scale=size**-0.5, **more)
    assert ours.dtype == np.float32 and ours.shape == (heads, value_size)
    np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=5e-6 * max(1.0, float(np.abs(rows(window, value_size, 2)).max())))


def test_a_head_alone_gives_the_bits_it_gives_in_its_group() -> None:
    ring, rotation = rows(16, 32, 1, 0.3), Rotation.table(16, 1.0 / 10.0 ** (np.arange(16) / 16))
    q = rows(5, 32, 3, 0.3)
    together = fast.attend(q, ring, ring, 40, rotation, scale=0.2)
    for head in range(5):
        assert np.array_equal(fast.attend(q[head : head + 1], ring, ring, 40, rotation, scale=0.2)[0], together[head])
