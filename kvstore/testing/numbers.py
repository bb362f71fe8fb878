"""Rows come back bit for bit, as views that nobody can change for others."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest

from warmkv.kvstore.rows import LayerRows
from warmkv.kvstore.testing.comparison import assert_rows, row_bits
from warmkv.kvstore.testing.opened import Opened, check_restore, save
from warmkv.kvstore.testing.samples import (
    TOKENS,
    model_rows,
    random_identity,
    random_rows,
)
from warmkv.kvstore.verbs import Verbs
from warmkv.schema.errors import ClosedError
from warmkv.schema.identity import Identity, LayerKind, LayerSpec, PlaneFormat


class NumberContract(Opened):
    @pytest.mark.parametrize("format_", [PlaneFormat.F32, PlaneFormat.F16, PlaneFormat.BF16, PlaneFormat.RAW])
    @pytest.mark.parametrize(("heads", "dim"), [(1, 1), (3, 5), (2, 64), (1, 127)])
    def test_rows_come_back_bit_for_bit(self, opened: Verbs, format_: PlaneFormat, heads: int, dim: int) -> None:
        identity = random_identity(3, heads, dim, format_)
        ids = list(range(40))
        rows = random_rows(identity, 40, seed=heads * dim)
        opened.save(identity, ids, rows)
        for verify in (False, True):
            with opened.restore(identity, ids + [1], verify=verify) as restored:
                assert restored.usable == 40
                assert_rows(restored, rows)

    @pytest.mark.parametrize("strided", ["head-major", "every second", "reversed", "broadcast", "read-only", "fortran"])
    def test_rows_as_they_lie(self, opened: Verbs, strided: str) -> None:
        identity = random_identity(1, 3, 5)
        rng = np.random.default_rng(3)
        big = rng.random((3, 200, 10), np.float32)
        make: dict[str, Callable[[], npt.NDArray[np.float32]]] = {
            "head-major": lambda: big[:, :100, :5].transpose(1, 0, 2),
            "every second": lambda: big[:, ::2, ::2].transpose(1, 0, 2),
            "reversed": lambda: big[::-1, 99::-1, 4::-1].transpose(1, 0, 2),
            "broadcast": lambda: np.broadcast_to(big[:, :1, :5].transpose(1, 0, 2), (100, 3, 5)),
            "read-only": lambda: np.frombuffer(rng.bytes(100 * 3 * 5 * 4), np.float32).reshape(100, 3, 5),
            "fortran": lambda: np.asfortranarray(big[:, :100, :5].transpose(1, 0, 2)),
        }
        keys, values = make[strided](), make[strided]()
        assert keys.shape == (100, 3, 5)
        ids = list(range(100))
        opened.save(identity, ids[:50], [LayerRows.kv(0, keys[:50], values[:50])])
        opened.save(identity, ids, [LayerRows.kv(0, keys, values)])
        with opened.restore(identity, ids + [1], verify=True) as restored:
            assert_rows(restored, [LayerRows.kv(0, keys, values)])

    def test_rows_larger_than_a_digest_chunk(self, opened: Verbs) -> None:
        identity = random_identity(2, 8, 64)
        ids = list(range(1100))  # 2 layers x 2 planes x 2.25 MB: planes cross 4 MiB boundaries
        rows = random_rows(identity, len(ids), seed=9)
        opened.save(identity, ids, rows)
        with opened.restore(identity, ids + [1], verify=True) as restored:
            assert_rows(restored, rows)

    def test_shared_layers_show_the_rows_they_share(self, opened: Verbs) -> None:
        plain = random_identity(3)
        shared = LayerSpec(LayerKind.SHARED, (), shared_with=0)
        identity = replace(plain, layers=(plain.layers[0], shared, plain.layers[2]))
        save(opened, identity, TOKENS)
        check_restore(opened, identity, TOKENS, 8)
        with opened.restore(identity, TOKENS) as restored:
            assert [layer.layer for layer in restored.layers] == [0, 1, 2]
            assert np.shares_memory(restored.layers[0].keys, restored.layers[1].keys)

    def test_views_are_read_only(self, opened: Verbs, identity: Identity) -> None:
        save(opened, identity, TOKENS)
        with opened.restore(identity, TOKENS) as restored:
            keys = restored.layers[0].keys
            assert not keys.flags.writeable
            with pytest.raises(ValueError, match="read-only"):
                keys[0] = 0
            with pytest.raises(ValueError, match="WRITEABLE"):
                keys.flags.writeable = True

    def test_writable_views_are_private(self, opened: Verbs, identity: Identity) -> None:
        save(opened, identity, TOKENS)
        with opened.restore(identity, TOKENS, writable=True) as one, opened.restore(identity, TOKENS, writable=True) as other:
            one.layers[0].keys[:] = 0
            assert_rows(other, model_rows(identity, TOKENS))
        check_restore(opened, identity, TOKENS, 8, verify=True)

    def test_views_outlive_close(self, opened: Verbs, identity: Identity) -> None:
        save(opened, identity, TOKENS)
        restored = opened.restore(identity, TOKENS)
        keys = restored.layers[0].keys
        restored.close()
        restored.close()
        opened.clear()
        opened.close()
        assert row_bits(keys, 8) == row_bits(model_rows(identity, TOKENS)[0].planes[0].rows, 8)
        with pytest.raises(ClosedError):
            restored.__enter__()
