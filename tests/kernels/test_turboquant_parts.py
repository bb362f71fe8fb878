"""Rotations, levels and packing of TurboQuant against published numbers, dense matrices and quadrature."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest

from warmkv.kernels.errors import KernelError
from warmkv.kernels.turboquant.levels import SHIPPED, levels, lloyd_max
from warmkv.kernels.turboquant.packing import pack, packed_bytes, unpack
from warmkv.kernels.turboquant.rotation import Rotation, odd_part, xoshiro

F64 = npt.NDArray[np.float64]
#: Head sizes of models, powers of two and others.
SIZES = (8, 16, 40, 64, 80, 96, 112, 128, 160, 192, 256, 320, 576)


def dense(size: int) -> F64:
    """The flat transform as a matrix, built from its definition: signs of the bits two indices share,
    and cosines plus sines over the odd part."""
    odd = odd_part(size)
    run = size // odd
    shared = np.arange(run)[:, None] & np.arange(run)
    hadamard = np.array([[1 - 2 * (int(bits).bit_count() & 1) for bits in row] for row in shared], np.float64)
    angle = 2 * np.pi * np.outer(np.arange(odd), np.arange(odd)) / odd
    return np.kron(np.cos(angle) + np.sin(angle), hadamard) / np.sqrt(size)


def packed_signs(signs: npt.NDArray[np.float32]) -> str:
    return np.packbits(signs > 0, bitorder="little").tobytes().hex()


def test_the_generator_gives_the_published_numbers() -> None:
    outputs = [f"{value:016x}" for value, _ in zip(xoshiro(42), range(4), strict=False)]
    assert outputs == ["15780b2e0c2ec716", "6104d9866d113a7e", "ae17533239e499a1", "ecb8ad4703b360a1"]


@pytest.mark.parametrize(
    ("seed", "size", "polar", "jl"),
    [
        (42, 64, "8c4ef540b0b78765", "214a6aeddb53fcc7"),
        (42, 128, "8c4ef540b0b78765ea2012c39b44f632", "214a6aeddb53fcc7bea18073342b5f21"),
        (0, 64, "902b08fa9b1e406c", "99f57b74c3ba3e75"),
        (7, 64, "20b65d3c22bcd108", "76e4510301bccfab"),
    ],
)
def test_signs_are_those_of_their_seed_and_of_seed_and_layer_together(seed: int, size: int, polar: str, jl: str) -> None:
    for layer in (0, 1, 5):
        rotation = Rotation.of(seed ^ layer, layer, size)
        assert (packed_signs(rotation.polar), packed_signs(rotation.jl)) == (polar, jl)
        assert rotation == Rotation.of(seed, 0, size) != Rotation.of(seed, 1 + layer, size)


@pytest.mark.parametrize("size", SIZES)
def test_rotations_are_their_dense_matrices_and_come_back(size: int) -> None:
    rotation = Rotation.of(3, 1, size)
    matrix = dense(size)
    np.testing.assert_allclose(matrix @ matrix.T, np.eye(size), atol=1e-12)
    x = np.random.default_rng(size).standard_normal((5, 3, size)).astype(np.float32)
    for forward, inverse, signs in (
        (rotation.forward, rotation.inverse, rotation.polar),
        (rotation.forward_jl, rotation.inverse_jl, rotation.jl),
    ):
        turned = forward(x)
        np.testing.assert_allclose(turned, (x.astype(np.float64) * signs) @ matrix.T, atol=1e-5)
        np.testing.assert_allclose(inverse(turned), x, atol=1e-5)
        np.testing.assert_allclose(np.linalg.norm(turned, axis=-1), np.linalg.norm(x, axis=-1), rtol=1e-5)


def test_transforming_leaves_what_was_handed_in_alone() -> None:
    rotation = Rotation.of(3, 1, 64)
    x = np.ones((2, 64), np.float32)
    rotation.forward(x), rotation.inverse(x)
    assert np.all(x == 1) and not rotation.polar.flags.writeable


@pytest.mark.parametrize("size", [0, -8, 4, 12, 65, 1 << 17])
def test_sizes_without_a_rotation_are_refused_with_the_reason(size: int) -> None:
    with pytest.raises(KernelError, match=f"{size} channels"):
        Rotation.of(42, 0, size)


@pytest.mark.parametrize("seed", [-1, 1 << 64])
def test_seeds_of_more_than_64_bits_are_refused(seed: int) -> None:
    with pytest.raises(KernelError, match="64 bits"):
        Rotation.of(seed, 0, 64)


@pytest.mark.parametrize(("bits", "size"), SHIPPED)
def test_shipped_levels_are_what_the_generator_makes(bits: int, size: int) -> None:
    centroids, bounds = lloyd_max(size, bits)
    table = levels(size, bits)
    assert table.bits == bits
    assert np.array_equal(table.centroids, centroids.astype(np.float32))
    middle = len(bounds) // 2
    assert table.bounds[middle] == 0 and abs(bounds[middle]) < 1e-12
    np.testing.assert_array_equal(np.delete(table.bounds, middle), np.delete(bounds, middle).astype(np.float32))


@pytest.mark.parametrize("size", [4, 8, 16, 80, 96, 128, 576])
@pytest.mark.parametrize("bits", [2, 3])
def test_levels_are_means_of_their_cells_and_bounds_lie_between_them(size: int, bits: int) -> None:
    centroids, bounds = lloyd_max(size, bits)
    t = np.linspace(-1, 1, 400_001)
    density = np.maximum(1 - t * t, 0) ** ((size - 3) / 2)
    cells = np.searchsorted(bounds, t)
    for index, centroid in enumerate(centroids):
        inside = cells == index
        assert (t * density)[inside].sum() / density[inside].sum() == pytest.approx(centroid, rel=1e-3)
    np.testing.assert_allclose(bounds, (centroids[1:] + centroids[:-1]) / 2, atol=1e-14)
    np.testing.assert_allclose(centroids, -centroids[::-1], atol=1e-14)


@pytest.mark.parametrize(
    ("size", "inner", "outer", "bound"),
    [
        (8, 0.44667115, 1.42785966, 0.93726540),
        (96, 0.45234265, 1.50345285, 0.97789775),
        (256, 0.45261758, 1.50780451, 0.98021105),
    ],
)
def test_levels_are_the_published_ones(size: int, inner: float, outer: float, bound: float) -> None:
    table = levels(size, 2)
    found = np.array([table.centroids[2], table.centroids[3], table.bounds[2]], np.float64) * np.sqrt(size)
    np.testing.assert_allclose(found, [inner, outer, bound], rtol=1e-6)


def test_what_equals_a_bound_goes_up() -> None:
    table = levels(64, 2)
    x = np.array([*table.bounds, -0.0, np.nextafter(table.bounds[0], np.float32(-1)), -1, 1], np.float32)
    assert table.codes(x).tolist() == [1, 2, 3, 2, 0, 0, 3]


@pytest.mark.parametrize(("size", "bits"), [(3, 2), (64, 1), (64, 4)])
def test_levels_that_do_not_exist_are_refused(size: int, bits: int) -> None:
    with pytest.raises(KernelError, match=f"{bits} bits of {size}"):
        levels(size, bits)


def test_bits_lie_where_the_layout_says() -> None:
    assert pack(np.array([1, 2, 3, 0], np.uint8), 2).tolist() == [1 | 2 << 2 | 3 << 4]
    assert pack(np.array([1, 0, 0, 0, 0, 0, 0, 1], np.uint8), 1).tolist() == [0x81]
    codes = np.array([1, 2, 4, 7, 0, 0, 0, 6], np.uint8)
    assert pack(codes, 3).tolist() == [0b1001, 0b10001010, 0b10001100]


@pytest.mark.parametrize("bits", [1, 2, 3])
@pytest.mark.parametrize("shape", [(0, 8), (3, 2, 40), (5, 128)])
def test_packed_codes_come_back(bits: int, shape: tuple[int, ...]) -> None:
    codes = np.random.default_rng(1).integers(0, 1 << bits, shape, dtype=np.uint8)
    packed = pack(codes, bits)
    assert packed.shape == (*shape[:-1], packed_bytes(bits, shape[-1])) and packed.nbytes * 8 == codes.size * bits
    np.testing.assert_array_equal(unpack(packed, bits), codes)


@pytest.mark.parametrize(("bits", "size"), [(1, 4), (2, 6), (3, 4), (4, 8), (1, -8)])
def test_codes_that_do_not_fill_bytes_are_refused(bits: int, size: int) -> None:
    with pytest.raises(KernelError, match=f"{size} codes of {bits} bits"):
        packed_bytes(bits, size)
