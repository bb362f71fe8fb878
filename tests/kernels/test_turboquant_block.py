"""TurboQuant rows as blocks: the bytes of a row, token-major views of them, and attention that mixes formats."""

from __future__ import annotations

from importlib.util import find_spec

import numpy as np
import numpy.typing as npt
import pytest

from warmkv.kernels.attention.layer import attend_heads, attend_heads_chunk
from warmkv.kernels.dispatch import Kernels, kernels
from warmkv.kernels.errors import KernelError
from warmkv.kernels.formats import Block, RowFormat, check_block
from warmkv.kernels.quant.packed import pack, packed_dtype, packed_shape, view
from warmkv.kernels.quant.reference import decode
from warmkv.kernels.quant.reference import encode as encode_plain
from warmkv.kernels.testing import poisoned, softmax_attention
from warmkv.kernels.turboquant.attend import REFERENCE
from warmkv.kernels.turboquant.blobs import write_keys, write_values
from warmkv.kernels.turboquant.block import encode, keys_of, packed, planes_of, values_of
from warmkv.kernels.turboquant.planes import KeyPlanes, ValuePlanes
from warmkv.kernels.turboquant.reference import Estimator, scores
from warmkv.kernels.turboquant.rotation import Rotation
from warmkv.kernels.turboquant.turn import Turn

F32 = npt.NDArray[np.float32]
F64 = npt.NDArray[np.float64]
ROTATED = [format_ for format_ in RowFormat if format_.rotated]
BACKENDS = ["reference", pytest.param("fast", marks=pytest.mark.skipif(find_spec("numba") is None, reason="needs numba"))]
#: Keys and values: both rotated, one of them, and formats of other kinds beside them.
MIXES = [
    (RowFormat.TQ_KEY, RowFormat.TQ_VALUE), (RowFormat.TQ3, RowFormat.TQ_VALUE), (RowFormat.TQ_KEY, RowFormat.F32),
    (RowFormat.F32, RowFormat.TQ_VALUE), (RowFormat.TQ3, RowFormat.F16), (RowFormat.TQ_KEY, RowFormat.Q8_2F),
    (RowFormat.Q8_2F, RowFormat.TQ_VALUE), (RowFormat.BF16, RowFormat.TQ_VALUE),
]  # fmt: skip


@pytest.fixture(params=BACKENDS)
def table(request: pytest.FixtureRequest) -> Kernels:
    return kernels(request.param)


def some(*shape: int, seed: int = 0) -> F32:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def turn(size: int, estimator: Estimator = Estimator.UNBIASED, seed: int = 42) -> Turn:
    return Turn(Rotation.of(seed, 1, size), estimator)


def stored(x: F32, format_: RowFormat, *, keys: bool, by: Turn | None = None) -> list[Block]:
    """A block a head of rows (n, heads, size), as segments have them: other heads' rows between."""
    if format_.rotated:
        by = by or turn(x.shape[2])
        codes = encode(REFERENCE, x, format_, by)
        return [Block(format_, codes[:, head], turn=by) for head in range(x.shape[1])]
    return [encode_plain(np.ascontiguousarray(x[:, head]), format_, keys=keys) for head in range(x.shape[1])]


@pytest.mark.parametrize("size", [8, 40, 64])
@pytest.mark.parametrize("kind, format_", [(KeyPlanes, RowFormat.TQ_KEY), (ValuePlanes, RowFormat.TQ_VALUE)])
def test_a_row_is_a_blob_of_one_row_without_its_header(kind: type, format_: RowFormat, size: int) -> None:
    x = some(1, 1, size)
    planes = (
        REFERENCE.encode_keys(x, turn(size).rotation) if kind is KeyPlanes else REFERENCE.encode_values(x, turn(size).rotation)
    )
    blob = write_keys(planes) if isinstance(planes, KeyPlanes) else write_values(planes)
    assert stored(x, format_, keys=kind is KeyPlanes)[0].codes.tobytes() == bytes(blob)[16:]


@pytest.mark.parametrize("format_", ROTATED)
@pytest.mark.parametrize("size", [8, 24, 64, 80])
def test_planes_of_a_block_are_views_that_pack_to_the_same_bytes(format_: RowFormat, size: int) -> None:
    for block in stored(some(5, 3, size), format_, keys=True):
        assert block.size == size and len(block) == 5 and block.codes.shape[1] == format_.row_bytes(size, keys=True)
        planes = planes_of(block.rows(1, 4))
        assert np.shares_memory(planes.codes, block.codes) and np.shares_memory(planes.norms, block.codes)
        assert packed(planes).tobytes() == block.codes[1:4].tobytes()
        assert type(planes).row_bytes(size) == format_.row_bytes(size, keys=True)


@pytest.mark.parametrize("format_", ROTATED)
@pytest.mark.parametrize("size", [8, 40, 64])
def test_token_major_rows_are_the_heads_side_by_side_and_are_attended_where_they_lie(format_: RowFormat, size: int) -> None:
    keys = format_ is not RowFormat.TQ_VALUE
    blocks = stored(some(6, 3, size), format_, keys=keys)
    rows = pack([[block.rows(0, 2), block.rows(2, 6)] for block in blocks], format_, size, keys=keys)
    assert rows.shape == (6, *packed_shape(format_, 3, size, keys=keys)) and rows.dtype == packed_dtype(format_) == np.uint8
    assert rows[4].tobytes() == b"".join(block.codes[4].tobytes() for block in blocks)
    rows.flags.writeable = False
    for part in (slice(0, 6), slice(1, 4), slice(3, 3)):
        for head, block in enumerate(view(rows[part], format_, 3, size, keys=keys, turn=turn(size))):
            assert np.shares_memory(block.codes, rows) or part == slice(3, 3)
            assert block.codes.tobytes() == blocks[head].codes[part].tobytes() and not block.codes.flags.writeable
            assert decode(block).tobytes() == decode(blocks[head].rows(part.start, part.stop)).tobytes()


def test_views_without_their_rotation_or_with_another_one_are_refused() -> None:
    rows = np.zeros((2, 2 * 28), np.uint8)
    for by in (None, turn(32)):
        with pytest.raises(KernelError, match="rotated as"):
            view(rows, RowFormat.TQ_KEY, 2, 64, keys=True, turn=by)
    with pytest.raises(KernelError, match="rotated as"):
        view(np.zeros((2, 2, 64), np.float32), RowFormat.F32, 2, 64, keys=True, turn=turn(64))
    with pytest.raises(KernelError, match="packed rows"):
        view(rows[:, 1:], RowFormat.TQ_KEY, 2, 64, keys=True, turn=turn(64))


def test_blocks_that_do_not_fit_are_refused() -> None:
    codes = np.zeros((3, 28), np.uint8)
    check_block(Block(RowFormat.TQ_KEY, codes, turn=turn(64)), 64, "keys")
    for block, found in [
        (Block(RowFormat.TQ_KEY, codes), "rotated as None"),
        (Block(RowFormat.TQ_KEY, codes, turn=turn(32)), "rotated as"),
        (Block(RowFormat.TQ_KEY, codes[:, 1:], turn=turn(64)), r"expected \(rows, 28\)"),
        (Block(RowFormat.TQ_KEY, codes.view(np.int8), turn=turn(64)), "int8"),
        (Block(RowFormat.F32, np.zeros((3, 64), np.float32), turn=turn(64)), "rotated as"),
    ]:
        with pytest.raises(KernelError, match=found):
            check_block(block, 64, "keys")
    values = Block(RowFormat.TQ_VALUE, np.zeros((3, 18), np.uint8), turn=turn(64))
    with pytest.raises(KernelError, match="as keys"):
        keys_of(values)
    with pytest.raises(KernelError, match="as values"):
        values_of(Block(RowFormat.TQ_KEY, codes, turn=turn(64)))
    for format_ in ROTATED:
        with pytest.raises(KernelError, match="turboquant"):
            encode_plain(np.zeros((1, 64), np.float32), format_, keys=True)
    with pytest.raises(KernelError, match="not rotated"):
        encode(REFERENCE, some(1, 1, 64), RowFormat.F16, turn(64))


@pytest.mark.parametrize("estimator", Estimator)
@pytest.mark.parametrize("size", [8, 64, 96])
@pytest.mark.parametrize("format_", [RowFormat.TQ_KEY, RowFormat.TQ3])
def test_products_with_decoded_rows_are_the_scores(table: Kernels, format_: RowFormat, size: int, estimator: Estimator) -> None:
    by = turn(size, estimator)
    block = stored(some(50, 1, size), format_, keys=True, by=by)[0]
    q = some(3, size, seed=1)
    expected = scores(q, keys_of(block), by.rotation, estimator=estimator)
    found = q.astype(np.float64) @ table.decode(block).astype(np.float64).T
    assert np.allclose(found, expected, rtol=0, atol=2e-5 * np.sqrt(size))


@pytest.mark.parametrize("keys, values", MIXES)
@pytest.mark.parametrize("first, upto, softcap, sink", [(0, 37, 0.0, False), (4, 30, 2.0, True), (12, 12, 0.0, True)])
def test_attention_over_any_mix_is_one_softmax_over_what_rows_stand_for(
    table: Kernels, keys: RowFormat, values: RowFormat, first: int, upto: int, softcap: float, sink: bool
) -> None:
    k, v, q = some(37, 2, 40), some(37, 2, 24, seed=1), some(6, 40, seed=2)
    estimator = Estimator.MINIMUM_MSE if first else Estimator.UNBIASED
    stored_k, stored_v = stored(k, keys, keys=True, by=turn(40, estimator)), stored(v, values, keys=False)
    cut_k, cut_v = [[b.rows(0, 7), b.rows(7, 37)] for b in stored_k], [[b.rows(0, 20), b.rows(20, 37)] for b in stored_v]
    sinks = np.array([0.5, -np.inf if upto > first else -3, 1, 2, 0, -1], np.float32) if sink else None
    mass = np.full(37, 0.25, np.float32)
    args = {"scale": 0.2, "first": first, "upto": upto, "softcap": softcap, "sinks": sinks}
    attend_heads(table, q, cut_k, cut_v, **args)  # what is compiled when first called is compiled
    with poisoned():
        done = attend_heads(table, q, cut_k, cut_v, importance=mass, **args)
    total = np.zeros(37)
    for head in range(2):
        mine = slice(3 * head, 3 * head + 3)
        wide = (decode(stored_k[head]).astype(np.float64), decode(stored_v[head]).astype(np.float64))
        own = None if sinks is None else sinks[mine].tolist()
        out, lse, p = softmax_attention(q[mine].astype(np.float64), *wide, 0.2, first, upto, softcap, own)
        if own is not None and upto == first:
            out, p = np.zeros_like(out), np.zeros_like(p)
        assert np.allclose(done.out[mine], out, atol=1e-5)
        seen = np.isfinite(lse)
        assert np.allclose(done.lse[mine][seen], lse[seen], atol=1e-5)
        total += p.sum(axis=0)
    assert np.allclose(mass - 0.25, total, atol=1e-5)


@pytest.mark.parametrize("keys, values", MIXES)
@pytest.mark.parametrize("window", [0, 9])
def test_a_chunk_is_its_positions_one_by_one_and_the_float64_softmax(
    table: Kernels, keys: RowFormat, values: RowFormat, window: int
) -> None:
    """Tiles of decoded rows and scores of packed ones are two roads to the same numbers."""
    start, count = 21, 16
    k, v, q = some(37, 2, 40), some(37, 2, 24, seed=1), some(count, 6, 40, seed=2)
    estimator = Estimator.CERA_COMPAT if window else Estimator.UNBIASED
    stored_k, stored_v = stored(k, keys, keys=True, by=turn(40, estimator)), stored(v, values, keys=False)
    cut_k, cut_v = [[b.rows(0, 7), b.rows(7, 37)] for b in stored_k], [[b] for b in stored_v]
    mass, apart = np.zeros(37, np.float32), np.zeros(37, np.float32)
    done = attend_heads_chunk(table, q, cut_k, cut_v, scale=0.2, start=start, window=window, importance=mass)
    for at in range(count):
        upto = start + at + 1
        first = max(0, upto - window) if window else 0
        one = attend_heads(table, q[at], cut_k, cut_v, scale=0.2, first=first, upto=upto, importance=apart)
        assert np.allclose(done.out[at], one.out, atol=1e-5)
        for head in range(2):
            mine = slice(3 * head, 3 * head + 3)
            wide = (decode(stored_k[head]).astype(np.float64), decode(stored_v[head]).astype(np.float64))
            out, _, _ = softmax_attention(q[at, mine].astype(np.float64), *wide, 0.2, first, upto, 0.0, None)
            assert np.allclose(done.out[at, mine], out, atol=1e-5)
    assert np.allclose(mass, apart, atol=1e-5)


@pytest.mark.parametrize("keys, values", MIXES)
def test_a_head_has_the_same_bits_in_any_group_on_any_threads_and_whatever_it_does_not_see(
    table: Kernels, keys: RowFormat, values: RowFormat
) -> None:
    k, v, q = some(150, 3, 64), some(150, 3, 40, seed=1), some(15, 64, seed=2)
    all_k, all_v = ([[b] for b in stored(x, f, keys=side)] for x, f, side in ((k, keys, True), (v, values, False)))
    done = attend_heads(table, q, all_k, all_v, scale=0.2, first=5, upto=140)
    on_two = attend_heads(table, q, all_k, all_v, scale=0.2, first=5, upto=140, threads=2)
    assert done.out.tobytes() == on_two.out.tobytes() and done.top.tobytes() == on_two.top.tobytes()
    for head in range(15):
        group = head // 5
        seen_k, seen_v = [all_k[group][0].rows(5, 140)], [all_v[group][0].rows(5, 140)]
        alone = table.attend(q[head : head + 1], seen_k, seen_v, scale=0.2)
        assert alone.out[0].tobytes() == done.out[head].tobytes()
        assert (alone.top[0], alone.total[0]) == (done.top[head], done.total[head])


def test_sums_of_values_rotated_differently_are_turned_back_apart(table: Kernels) -> None:
    v, q = some(20, 1, 64), some(2, 64, seed=1)
    keys = [encode_plain(np.ascontiguousarray(some(20, 64, seed=2)), RowFormat.F32, keys=True)]
    one, other = (stored(v, RowFormat.TQ_VALUE, keys=False, by=turn(64, seed=seed))[0] for seed in (3, 4))
    done = table.attend(q, keys, [one.rows(0, 8), other.rows(8, 20)], scale=0.1)
    wide = np.concatenate([decode(one.rows(0, 8)), decode(other.rows(8, 20))]).astype(np.float64)
    out, _, _ = softmax_attention(q.astype(np.float64), keys[0].codes.astype(np.float64), wide, 0.1, 0, 20, 0.0, None)
    assert np.allclose(done.out, out, atol=1e-5)
