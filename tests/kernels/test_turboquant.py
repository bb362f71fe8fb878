"""TurboQuant's rows against a float64 oracle that shares no code with it, on every backend.

The oracle rotates by a dense matrix, finds codes by searching and never leaves float64 but for the two
norms. What is random is compared with what theory says of it."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from warmkv.kernels.errors import BackendMissing, KernelError, NotFinite
from warmkv.kernels.testing import softmax_attention
from warmkv.kernels.turboquant import attend as turboquant
from warmkv.kernels.turboquant.attend import REFERENCE, Operations, attend
from warmkv.kernels.turboquant.planes import KeyPlanes, NormRefused, PlainKeyPlanes, ValuePlanes
from warmkv.kernels.turboquant.reference import Estimator, reconstruct
from warmkv.kernels.turboquant.rotation import Rotation

F32 = npt.NDArray[np.float32]
F64 = npt.NDArray[np.float64]
BACKENDS = ["reference", pytest.param("fast", marks=pytest.mark.skipif(find_spec("numba") is None, reason="needs numba"))]
#: Levels of a normal variable's marginal on the sphere, times sqrt(d): published, see test_turboquant_parts.
POSITIVE = {64: (0.45211895, 1.49997480), 128: (0.45245325, 1.50519298)}
KAPPA = {Estimator.UNBIASED: np.pi / 2, Estimator.MINIMUM_MSE: 2 / np.pi}


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> Operations:
    return REFERENCE if request.param == "reference" else turboquant.fast()


def some(rows: int, heads: int, size: int, seed: int = 0) -> F32:
    """Rows of very different lengths."""
    rng = np.random.default_rng(seed)
    return (rng.standard_normal((rows, heads, size)) * np.exp(rng.standard_normal((rows, heads, 1)))).astype(np.float32)


def dense(size: int) -> F64:
    matrix = np.ones((1, 1))
    while len(matrix) < size:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    return matrix / np.sqrt(size)


@dataclass
class Oracle:
    """Keys of one head, in float64."""

    rotated: F64
    codes: npt.NDArray[np.int64]
    bounds: F64
    levels: F64
    signs: F64
    norms: F64
    rho: F64

    @classmethod
    def of(cls, x: F32, rotation: Rotation, positive: tuple[float, float]) -> Oracle:
        size = x.shape[-1]
        inner, outer = np.array(positive) / np.sqrt(size)
        levels = np.array([-outer, -inner, inner, outer])
        bounds = (levels[1:] + levels[:-1]) / 2
        wide = x.astype(np.float64)
        norms = np.linalg.norm(wide, axis=-1)
        rotated = (wide / norms[:, None] * rotation.polar) @ dense(size)
        codes = np.searchsorted(bounds, rotated, side="right")
        left = rotated - levels[codes]
        flat = (left * rotation.jl) @ dense(size)
        rho = np.linalg.norm(left, axis=-1)
        return cls(rotated, codes, bounds, levels, np.where(flat >= 0, 1.0, -1.0), half(norms), half(rho))

    def scores(self, q: F32, rotation: Rotation, kappa: float) -> F64:
        turned = (q.astype(np.float64) * rotation.polar) @ dense(q.shape[1])
        again = (turned * rotation.jl) @ dense(q.shape[1])
        return (turned @ self.levels[self.codes].T + kappa * self.rho * (again @ self.signs.T)) * self.norms


def half(x: F64) -> F64:
    return x.astype(np.float16).astype(np.float64)


def bits(packed: npt.NDArray[np.uint8], each: int) -> npt.NDArray[np.int64]:
    """Codes of ``each`` bits, read from one long little-endian number a row."""
    numbers = [int.from_bytes(row.tobytes(), "little") for row in packed]
    count = packed.shape[1] * 8 // each
    return np.array([[(number >> (each * i)) & ((1 << each) - 1) for i in range(count)] for number in numbers])


@pytest.mark.parametrize("size", [64, 128])
def test_codes_signs_and_norms_are_the_oracle_s(backend: Operations, size: int) -> None:
    rotation = Rotation.of(42, 5, size)
    x = some(200, 2, size)
    planes = backend.encode_keys(x, rotation).head(1)
    oracle = Oracle.of(x[:, 1], rotation, POSITIVE[size])
    codes = bits(planes.codes, 2)
    near = np.abs(oracle.rotated[..., None] - oracle.bounds).min(axis=-1) < 4 * size**0.5 * 2**-24
    assert near.mean() < 1e-2 and np.array_equal(codes[~near], oracle.codes[~near])
    np.testing.assert_allclose(planes.norms, oracle.norms, rtol=1e-3)
    np.testing.assert_allclose(planes.residuals, oracle.rho, rtol=1e-3)
    signs = np.where(bits(planes.signs, 1) == 1, 1.0, -1.0)
    assert (signs != oracle.signs).mean() < 1e-4
    np.testing.assert_array_equal(backend.encode_values(x, rotation).head(1).codes, planes.codes)


@pytest.mark.parametrize("size", [64, 128])
@pytest.mark.parametrize("estimator", Estimator)
def test_scores_are_the_oracle_s(backend: Operations, size: int, estimator: Estimator) -> None:
    rotation = Rotation.of(42, 5, size)
    x, q = some(301, 2, size), some(1, 3, size, seed=9)[0]
    keys = backend.encode_keys(x, rotation).head(1)
    oracle = Oracle.of(x[:, 1], rotation, POSITIVE[size])
    oracle.codes, oracle.signs = bits(keys.codes, 2), np.where(bits(keys.signs, 1) == 1, 1.0, -1.0)
    oracle.norms, oracle.rho = keys.norms.astype(np.float64), keys.residuals.astype(np.float64)
    kappa = np.sqrt(np.pi / 2) / size if estimator is Estimator.CERA_COMPAT else np.sqrt(KAPPA[estimator] / size)
    found = backend.scores(q, keys, rotation, scale=0.3, estimator=estimator)
    expected = 0.3 * oracle.scores(q, rotation, kappa)
    bound = 2e-6 * 0.3 * np.linalg.norm(q, axis=1)[:, None] * oracle.norms
    assert found.dtype == np.float32 and np.all(np.abs(found - expected) <= bound)


@pytest.mark.parametrize("size", [64, 128])
def test_weighted_sums_are_the_oracle_s_however_many_rows(backend: Operations, size: int) -> None:
    rotation = Rotation.of(42, 5, size)
    x = some(5000, 1, size)
    values = backend.encode_values(x, rotation).head(0)
    weights = np.random.default_rng(1).random((3, 5000)).astype(np.float32) / 2500
    oracle = Oracle.of(x[:, 0], rotation, POSITIVE[size])
    rows = oracle.levels[bits(values.codes, 2)] * values.norms.astype(np.float64)[:, None]
    expected = weights.astype(np.float64) @ rows
    found = backend.weigh(weights, values)
    assert np.abs(found - expected).max() < 1e-5 * np.abs(expected).max()
    back = backend.unrotate(found, rotation).astype(np.float64)
    np.testing.assert_array_equal(backend.unrotate(found, rotation), rotation.inverse(found))
    np.testing.assert_allclose(back, expected @ dense(size) * rotation.polar, atol=1e-5 * np.abs(expected).max())


@pytest.mark.parametrize("size", [8, 40, 64, 80, 96, 128, 192])
@pytest.mark.parametrize("count", [0, 1, 15, 16, 17, 133])
def test_backends_write_the_same_bytes_and_agree_about_them(size: int, count: int) -> None:
    pytest.importorskip("numba")
    fast, rotation = turboquant.fast(), Rotation.of(7, 1, size)
    x, q = some(count, 3, size), some(1, 3, size, seed=9)[0]
    x[:1, 1] = 0
    x[1:2, 2] *= np.float32(1e-14)
    for name in ("encode_keys", "encode_values", "encode_plain_keys"):
        mine, theirs = getattr(fast, name)(x, rotation), getattr(REFERENCE, name)(x, rotation)
        for plane in mine.bits:
            np.testing.assert_array_equal(getattr(mine, plane), getattr(theirs, plane))
        head = mine.head(2)
        if name == "encode_values":
            weights = np.random.default_rng(1).random((2, count)).astype(np.float32)
            found, expected = fast.weigh(weights, head), REFERENCE.weigh(weights, head)
        else:
            found, expected = fast.scores(q, head, rotation), REFERENCE.scores(q, head, rotation)
        assert found.shape == expected.shape
        np.testing.assert_allclose(found, expected, atol=3e-6 * max(1.0, np.abs(expected).max(initial=0)))


@pytest.mark.parametrize("kind", ["encode_keys", "encode_plain_keys"])
def test_a_score_depends_on_its_row_and_query_only(backend: Operations, kind: str) -> None:
    rotation = Rotation.of(1, 0, 40)
    keys = getattr(backend, kind)(some(300, 2, 40), rotation).head(0)
    q = some(1, 3, 40, seed=2)[0]
    whole = backend.scores(q, keys, rotation)
    for first, last in ((0, 300), (1, 300), (130, 131), (3, 296)):
        np.testing.assert_array_equal(backend.scores(q[1:2], keys.rows(first, last), rotation)[0], whole[1, first:last])


def test_sums_of_heads_do_not_depend_on_each_other(backend: Operations) -> None:
    values = backend.encode_values(some(300, 2, 40), Rotation.of(1, 0, 40)).head(0)
    weights = np.random.default_rng(1).random((3, 300)).astype(np.float32)
    np.testing.assert_array_equal(backend.weigh(weights, values)[1:2], backend.weigh(weights[1:2], values))


@pytest.mark.parametrize(("kind", "bytes_128"), [("encode_keys", 52), ("encode_values", 34), ("encode_plain_keys", 50)])
def test_rows_written_one_by_one_are_those_written_at_once(backend: Operations, kind: str, bytes_128: int) -> None:
    rotation, encode = Rotation.of(1, 0, 128), getattr(backend, kind)
    x = some(37, 2, 128)
    whole = encode(x, rotation)
    assert whole.row_bytes(128) == bytes_128
    grown = type(whole).empty(50, 2, 128)
    for row in range(37):
        grown.put(row, encode(x[row : row + 1], rotation))
    for plane in whole.bits:
        np.testing.assert_array_equal(getattr(grown.rows(0, 37), plane), getattr(whole, plane))
        assert np.shares_memory(getattr(grown.rows(0, 37), plane), getattr(grown, plane))
    with pytest.raises(KernelError, match="do not fit"):
        grown.put(20, whole)
    with pytest.raises(KernelError, match="do not fit"):
        grown.put(0, type(whole).empty(1, 3, 128))


@pytest.mark.parametrize("kind", ["encode_keys", "encode_values", "encode_plain_keys"])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 1e30, 65520.0])
def test_lengths_float16_cannot_hold_are_refused_by_head_and_position(backend: Operations, kind: str, value: float) -> None:
    x = np.zeros((40, 3, 64), np.float32)
    x[17, 2, 5] = value
    with pytest.raises(NormRefused, match="head 2 at position 1017") as caught:
        getattr(backend, kind)(x, Rotation.of(1, 0, 64), position=1000)
    assert (caught.value.row, caught.value.head, caught.value.position) == (17, 2, 1017)
    assert isinstance(caught.value, NotFinite)
    x[17, 2, 5] = 65504
    getattr(backend, kind)(x, Rotation.of(1, 0, 64))


def test_rows_without_a_direction_are_zeros(backend: Operations) -> None:
    rotation = Rotation.of(1, 0, 64)
    x = np.zeros((20, 1, 64), np.float32)
    x[3, 0, 0] = 1e-13
    x[4] = -0.0
    keys, values = backend.encode_keys(x, rotation), backend.encode_values(x, rotation)
    for planes in (keys, values, backend.encode_plain_keys(x, rotation)):
        assert not any(getattr(planes, name).any() for name in planes.bits)
        assert not reconstruct(planes, rotation).any()
    assert not backend.scores(np.ones((1, 64), np.float32), keys.head(0), rotation).any()
    assert not backend.weigh(np.ones((1, 20), np.float32), values.head(0)).any()


@pytest.mark.parametrize(("size", "two", "three"), [(64, 0.114526, 0.03339), (128, 0.116000, 0.03397), (96, 0.115508, None)])
def test_the_mean_error_is_that_of_the_levels(size: int, two: float, three: float | None) -> None:
    x = np.random.default_rng(3).standard_normal((4000, 1, size)).astype(np.float32)
    rotation = Rotation.of(9, 4, size)

    def error(planes: Any, **given: Any) -> float:
        return float((((reconstruct(planes, rotation, **given) - x) ** 2).sum(axis=-1) / (x**2).sum(axis=-1)).mean())

    assert error(REFERENCE.encode_values(x, rotation)) == pytest.approx(two, rel=0.02)
    if three is not None:
        assert error(REFERENCE.encode_plain_keys(x, rotation)) == pytest.approx(three, rel=0.02)
    if size == 128:
        keys = REFERENCE.encode_keys(x, rotation)
        published = {Estimator.UNBIASED: 0.0657, Estimator.MINIMUM_MSE: 0.0418, Estimator.CERA_COMPAT: 0.0465}
        for estimator, expected in published.items():
            assert error(keys, estimator=estimator) == pytest.approx(expected, rel=0.02)


@pytest.mark.parametrize(
    ("size", "alike", "unbiased", "cera"),
    [(64, 0.0, 0.064, 0.078), (64, 0.5, 0.062, 0.244), (64, 0.9, 0.059, 0.621)]
    + [(128, 0.0, 0.066, 0.086), (128, 0.5, 0.064, 0.455), (128, 0.9, 0.060, 1.274)],
)
def test_bias_and_error_of_products_are_those_of_the_estimator(size: int, alike: float, unbiased: float, cera: float) -> None:
    """Queries whose cosine with every key is ``alike``: with unlike ones, errors of all estimators
    cancel and a wrong constant goes unseen. The errors are published ones, times the size."""
    errors: dict[Estimator, list[F32]] = {estimator: [] for estimator in Estimator}
    for seed in range(600):
        rng = np.random.default_rng(seed)
        q = rng.standard_normal(size)
        q /= np.linalg.norm(q)
        across = rng.standard_normal((40, size))
        across -= (across @ q)[:, None] * q
        keys = alike * q + np.sqrt(1 - alike**2) * across / np.linalg.norm(across, axis=1, keepdims=True)
        rotation = Rotation.of(seed, 0, size)
        planes = REFERENCE.encode_keys(keys[:, None].astype(np.float32), rotation).head(0)
        for estimator, found in errors.items():
            found.append(REFERENCE.scores(q[None].astype(np.float32), planes, rotation, estimator=estimator)[0] - alike)
    squares = {estimator: size * float(np.mean(np.square(found))) for estimator, found in errors.items()}
    bias = {estimator: float(np.mean(found)) for estimator, found in errors.items()}
    assert squares[Estimator.UNBIASED] == pytest.approx(unbiased, rel=0.05)
    assert squares[Estimator.CERA_COMPAT] == pytest.approx(cera, rel=0.05)
    assert abs(bias[Estimator.UNBIASED]) < 0.01
    if alike == 0:
        assert squares[Estimator.MINIMUM_MSE] < squares[Estimator.UNBIASED]
    if alike == 0.9:
        assert bias[Estimator.CERA_COMPAT] < -0.05


@pytest.mark.parametrize("kind", ["encode_keys", "encode_plain_keys"])
@pytest.mark.parametrize(("first", "upto", "softcap", "sunk"), [(0, None, 0, False), (3, 170, 5.0, True), (0, 0, 0, True)])
def test_attention_is_one_softmax_over_reconstructed_rows(
    backend: Operations, kind: str, first: int, upto: int | None, softcap: float, sunk: bool
) -> None:
    key_rotation, value_rotation = Rotation.of(1, 0, 64), Rotation.of(1, 0, 40)
    keys = getattr(backend, kind)(some(200, 2, 64) / 4, key_rotation).head(1)
    values = backend.encode_values(some(200, 2, 40, seed=3), value_rotation).head(1)
    q = some(1, 3, 64, seed=4)[0]
    sinks = np.array([0.5, -1.0, 2.0], np.float32) if sunk else None
    importance = np.full(200, 7, np.float32)
    found = attend(
        backend, q, keys, values, key_rotation, value_rotation, scale=0.2, first=first, upto=upto, softcap=softcap,
        sinks=sinks, importance=importance,
    )  # fmt: skip
    k = reconstruct(keys, key_rotation, estimator=Estimator.UNBIASED).astype(np.float64)
    v = reconstruct(values, value_rotation).astype(np.float64)
    last = 200 if upto is None else upto
    out, lse, p = softmax_attention(
        q.astype(np.float64), k, v, 0.2, first, last, softcap, None if sinks is None else [float(z) for z in sinks]
    )
    np.testing.assert_allclose(found.out, out, atol=2e-5 * np.abs(v).max())
    np.testing.assert_allclose(found.lse, lse, atol=2e-5)
    np.testing.assert_allclose(importance - 7, p.sum(axis=0), atol=1e-5)


def test_nothing_seen_is_nothing_attended(backend: Operations) -> None:
    rotation = Rotation.of(1, 0, 64)
    keys, values = KeyPlanes.empty(0, 1, 64).head(0), ValuePlanes.empty(0, 1, 64).head(0)
    found = attend(backend, np.ones((2, 64), np.float32), keys, values, rotation, rotation, scale=1)
    assert not found.out.any() and np.isneginf(found.lse).all()


def test_planes_queries_and_weights_that_do_not_fit_are_refused(backend: Operations) -> None:
    rotation = Rotation.of(1, 0, 64)
    keys, values = KeyPlanes.empty(4, 2, 64), ValuePlanes.empty(4, 2, 64)
    q = np.ones((2, 64), np.float32)
    for bad in (q[:, :32], q.astype(np.float64), q[0]):
        with pytest.raises(KernelError, match="queries"):
            backend.scores(bad, keys.head(0), rotation)  # type: ignore[arg-type]
    with pytest.raises(KernelError, match="one head"):
        backend.scores(q, keys, rotation)
    with pytest.raises(KernelError, match="rotation of 128"):
        backend.scores(q, keys.head(0), Rotation.of(1, 0, 128))
    with pytest.raises(KernelError, match="codes are"):
        backend.scores(
            q, KeyPlanes(64, keys.codes[:, 0, :8], *(getattr(keys.head(0), n) for n in ("norms", "signs", "residuals"))), rotation
        )
    with pytest.raises(KernelError, match="weights"):
        backend.weigh(np.ones((2, 3), np.float32), values.head(0))
    for rows in (np.ones((2, 64), np.float32), np.ones((2, 1, 32), np.float32), np.ones((2, 1, 64))):
        for encode in (backend.encode_keys, backend.encode_values, backend.encode_plain_keys):
            with pytest.raises(KernelError, match="rows are"):
                encode(rows, rotation)  # type: ignore[arg-type]
    with pytest.raises(KernelError, match="sums are"):
        backend.unrotate(q[:, :32], rotation)
    with pytest.raises(KernelError, match="keys and 2 values"):
        attend(backend, q, keys.head(0), values.head(0).rows(0, 2), rotation, rotation, scale=1)
    importance = np.zeros(3, np.float32)
    with pytest.raises(KernelError, match="importance"):
        attend(backend, q, keys.head(0), values.head(0), rotation, rotation, scale=1, importance=importance)


def test_rows_of_one_head_may_lie_anywhere(backend: Operations) -> None:
    rotation = Rotation.of(1, 0, 64)
    keys = backend.encode_keys(some(140, 3, 64), rotation)
    q = some(1, 2, 64, seed=1)[0]
    together = KeyPlanes(64, *(np.ascontiguousarray(getattr(keys.head(1), n)) for n in ("codes", "norms", "signs", "residuals")))
    spread = keys.head(1)
    assert not spread.codes.flags.c_contiguous
    np.testing.assert_array_equal(backend.scores(q, spread, rotation), backend.scores(q, together, rotation))
    raw = np.zeros(140 * 2 + 1, np.uint8)
    raw[1:] = together.norms.view(np.uint8)
    odd = KeyPlanes(64, together.codes[::-1], raw[1:].view("<f2")[::-1], together.signs[::-1], together.residuals[::-1])
    np.testing.assert_array_equal(backend.scores(q, odd, rotation), backend.scores(q, together, rotation)[:, ::-1])


def test_a_backend_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turboquant, "find_spec", lambda name: None)
    with pytest.raises(BackendMissing, match="numba"):
        turboquant.fast()
    assert PlainKeyPlanes.row_bytes(64) == 26
