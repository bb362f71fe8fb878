"""Token-major rows: the bytes they are, and blocks over them that copy nothing."""

from __future__ import annotations

import struct

import numpy as np
import pytest

from warmkv.kernels.errors import KernelError
from warmkv.kernels.formats import Block, RowFormat
from warmkv.kernels.quant.packed import pack, packed_dtype, packed_shape, view
from warmkv.kernels.quant.reference import encode
from warmkv.kernels.testing import rows

SIZES = [1, 4, 7, 32, 33, 64, 80]
by_format_and_size = pytest.mark.parametrize(
    "format_, size",
    [(format_, size) for format_ in RowFormat if not format_.rotated for size in SIZES if format_.refusal(size) is None],
)
by_side = pytest.mark.parametrize("keys", [True, False])


def made(format_: RowFormat, heads: int, size: int, *, keys: bool, count: int = 5) -> list[list[Block]]:
    """Blocks of ``heads`` heads, each in two parts, with a field where the format has one."""
    built = []
    for head in range(heads):
        field = np.linspace(0.5, 2, size, dtype=np.float32) if format_.quantised else None
        block = encode(rows(count, size, seed=head + size), format_, keys=keys, field=field)
        built.append([block.rows(0, 2), block.rows(2, count)])
    return built


@by_side
def test_q8_rows_are_scales_then_codes_head_after_head(keys: bool) -> None:
    heads, size, groups = 3, 40, 2 if keys else 1
    blocks = made(RowFormat.Q8_2F, heads, size, keys=keys)
    packed = pack(blocks, RowFormat.Q8_2F, size, keys=keys)
    for row in range(5):
        wanted = b""
        for parts in blocks:
            block, at = (parts[0], row) if row < 2 else (parts[1], row - 2)
            assert block.scales is not None
            wanted += struct.pack(f"<{groups}f{size}b", *block.scales[at].tolist(), *block.codes[at].tolist())
        assert packed[row].tobytes() == wanted


@by_format_and_size
@by_side
def test_a_view_of_packed_rows_is_the_rows(format_: RowFormat, size: int, keys: bool) -> None:
    blocks = made(format_, 3, size, keys=keys)
    field = None if blocks[0][0].field is None else np.stack([parts[0].field for parts in blocks])
    packed = pack(blocks, format_, size, keys=keys)
    assert packed.shape == (5, *packed_shape(format_, 3, size, keys=keys)) and packed.dtype == packed_dtype(format_)
    assert packed.nbytes == 5 * 3 * format_.row_bytes(size, keys=keys)
    for part in (slice(0, 5), slice(1, 4), slice(2, 2)):
        for head, block in enumerate(view(packed[part], format_, 3, size, keys=keys, field=field)):
            codes = np.concatenate([item.codes for item in blocks[head]])[part]
            assert block.codes.dtype == format_.code_dtype and block.codes.tobytes() == codes.tobytes()
            assert (block.scales is None) == (not format_.quantised)
            if block.scales is not None:
                scales = np.concatenate([item.scales for item in blocks[head]])[part]
                assert block.scales.flags.aligned and np.array_equal(block.scales, scales)
                assert block.field is not None and np.array_equal(block.field, blocks[head][0].field)


@by_format_and_size
def test_a_view_copies_nothing_but_scales_at_odd_addresses(format_: RowFormat, size: int) -> None:
    packed = pack(made(format_, 2, size, keys=True), format_, size, keys=True)
    packed.flags.writeable = False
    for block in view(packed, format_, 2, size, keys=True):
        assert np.shares_memory(block.codes, packed) and not block.codes.flags.writeable
        if block.scales is not None:
            assert np.shares_memory(block.scales, packed) == (size % 4 == 0)


def test_packed_again_rows_keep_their_bytes() -> None:
    packed = np.frombuffer(np.random.default_rng(0).bytes(6 * 2 * (7 + 4)), np.uint8).reshape(6, -1)
    viewed = view(packed, RowFormat.Q8_2F, 2, 7, keys=True)
    assert pack([[block] for block in viewed], RowFormat.Q8_2F, 7, keys=True).tobytes() == packed.tobytes()


@pytest.mark.parametrize("format_", [format_ for format_ in RowFormat if format_.blocked])
def test_blocked_rows_are_their_heads_blocks_one_after_the_other(format_: RowFormat) -> None:
    x = rows(4, 3 * 64, seed=1).reshape(4, 3, 64)
    heads = [[encode(np.ascontiguousarray(x[:, head]), format_, keys=False)] for head in range(3)]
    packed = pack(heads, format_, 64, keys=False)
    whole = encode(x.reshape(4, -1), format_, keys=False).codes
    assert packed.dtype == np.uint8 and packed.tobytes() == whole.tobytes(), "no block straddles two heads"
    moved = view(packed[1:3], format_, 3, 64, keys=False)
    assert [block.codes.strides for block in moved] == [(packed.shape[1], 1)] * 3
    for size in (40, 48):
        with pytest.raises(KernelError, match=f"heads of {size} channels"):
            view(np.zeros((4, 3 * format_.row_bytes(size, keys=True)), np.uint8), format_, 3, size, keys=True)
        with pytest.raises(KernelError, match=f"heads of {size} channels"):
            pack(heads, format_, size, keys=False)


def test_no_rows_pack_to_none() -> None:
    blocks = [[encode(np.empty((0, 8), np.float32), RowFormat.Q8_2F, keys=True)] for _ in range(2)]
    assert pack(blocks, RowFormat.Q8_2F, 8, keys=True).shape == (0, 24)
    assert pack([[Block(RowFormat.F16, np.empty((0, 8), "<f2"))]], RowFormat.F16, 8, keys=False).shape == (0, 1, 8)


def test_rows_that_do_not_fit_are_refused() -> None:
    blocks = made(RowFormat.Q8_2F, 2, 40, keys=True)
    for heads, format_, size, keys in (
        (blocks, RowFormat.F32, 40, True), (blocks, RowFormat.Q8_2F, 39, True), (blocks, RowFormat.Q8_2F, 40, False),
        ([blocks[0], blocks[1][:1]], RowFormat.Q8_2F, 40, True), ([], RowFormat.Q8_2F, 40, True),
    ):  # fmt: skip
        with pytest.raises(KernelError):
            pack(heads, format_, size, keys=keys)
    packed = pack(blocks, RowFormat.Q8_2F, 40, keys=True)
    with pytest.raises(KernelError, match="expected uint8 of \\(96,\\)"):
        view(packed[:, 1:], RowFormat.Q8_2F, 2, 40, keys=True)
    with pytest.raises(KernelError, match="packed rows are int8"):
        view(packed.view(np.int8), RowFormat.Q8_2F, 2, 40, keys=True)
    with pytest.raises(KernelError, match="field"):
        view(packed, RowFormat.Q8_2F, 2, 40, keys=True, field=np.ones((2, 39), np.float32))
    with pytest.raises(KernelError, match="field"):
        view(np.zeros((1, 2, 4), np.float32), RowFormat.F32, 2, 4, keys=True, field=np.ones((2, 4), np.float32))
