"""Digests of tensors: equal exactly when name, dtype, shape and values are."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from warmkv.kvstore.integrations.hf_tensors import LINE_BYTES, SAMPLE_LINES, TensorDigests, content_digest
from warmkv.schema.errors import UnsupportedError

#: Larger than the sample, so that nothing is read whole by chance.
LARGE = 8 * SAMPLE_LINES * LINE_BYTES // 4
#: A value between the lines of the sample: only counters and content can tell it changed.
SPOT = LARGE // 2 + 4 * LINE_BYTES // 4


def test_digest_does_not_depend_on_strides_or_order() -> None:
    digests = TensorDigests()
    base = torch.arange(12.0).reshape(3, 4)
    strided = base.t().contiguous().t()
    assert not strided.is_contiguous()
    assert digests.digest([("a", base), ("b", base)]) == digests.digest([("b", strided), ("a", base)])


@pytest.mark.parametrize(
    "other",
    [
        ("b", torch.zeros(4)),
        ("a", torch.zeros(2, 2)),
        ("a", torch.zeros(4, dtype=torch.int32)),
        ("a", torch.tensor([0.0, 0.0, 0.0, 1e-45])),
        ("a", torch.tensor([0.0, 0.0, 0.0, -0.0])),
    ],
    ids=["name", "shape", "dtype", "least value", "sign of zero"],
)
def test_any_difference_is_another_digest(other: tuple[str, torch.Tensor]) -> None:
    digests = TensorDigests()
    assert digests.digest([("a", torch.zeros(4))]) != digests.digest([other])


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int64, torch.float16, torch.bfloat16, torch.complex64])
@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (5, 7)])
def test_every_dtype_and_shape_has_a_digest(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    assert len(content_digest(torch.ones(shape).to(dtype))) == 16


def _in_place(tensor: torch.Tensor) -> None:
    with torch.no_grad():
        tensor[SPOT] += 1


def _through_data(tensor: torch.Tensor) -> None:
    tensor.data[SPOT] += 1


def _through_numpy(tensor: torch.Tensor) -> None:
    tensor.detach().numpy()[SPOT] += 1


WRITES = [_in_place, _through_data, _through_numpy]


@pytest.mark.parametrize("write", WRITES, ids=lambda write: write.__name__)
def test_content_notices_one_value_however_it_was_written(write: Callable[[torch.Tensor], None]) -> None:
    digests, tensor = TensorDigests("content"), torch.nn.Parameter(torch.zeros(LARGE))
    before = digests.digest([("w", tensor)])
    write(tensor)
    assert digests.digest([("w", tensor)]) != before


def test_auto_reads_content_of_small_models() -> None:
    digests, tensor = TensorDigests(), torch.nn.Parameter(torch.zeros(LARGE))
    before = digests.digest([("w", tensor)])
    _through_data(tensor)
    assert digests.digest([("w", tensor)]) != before


def test_version_notices_one_value_written_in_place() -> None:
    digests, tensor = TensorDigests("version"), torch.nn.Parameter(torch.zeros(LARGE))
    before = digests.digest([("w", tensor)])
    _in_place(tensor)
    assert digests.digest([("w", tensor)]) != before


def test_version_notices_a_whole_tensor_written_behind_its_counter() -> None:
    digests, tensor = TensorDigests("version"), torch.nn.Parameter(torch.zeros(LARGE))
    before, version = digests.digest([("w", tensor)]), tensor._version
    tensor.data += 1e-3
    assert tensor._version == version
    assert digests.digest([("w", tensor)]) != before


def test_version_notices_replaced_storage_at_the_same_address() -> None:
    digests = TensorDigests("version")
    parameter = torch.nn.Parameter(torch.zeros(LARGE))
    before = digests.digest([("w", parameter)])
    for value in range(1, 20):
        parameter.data = torch.full((LARGE,), 0.0)
        parameter.data[SPOT] = float(value)
        now = digests.digest([("w", parameter)])
        assert now != before
        before = now


def test_version_reads_inference_tensors_each_time() -> None:
    digests = TensorDigests("version")
    with torch.inference_mode():
        tensor = torch.zeros(LARGE)
        before = digests.digest([("w", tensor)])
        tensor[SPOT] += 1
        assert digests.digest([("w", tensor)]) != before


def test_unchanged_tensors_keep_their_digest_in_every_mode() -> None:
    tensor = torch.randn(LARGE)
    found = {TensorDigests(mode).digest([("w", tensor)]) for mode in ("auto", "version", "content")}
    digests = TensorDigests("version")
    found |= {digests.digest([("w", tensor)]) for _ in range(3)}
    found.add(digests.digest([("w", tensor)], trust_version=True))
    assert len(found) == 1


def test_tensors_without_plain_content_are_refused() -> None:
    class Wrapped(torch.nn.Parameter):
        pass

    for tensor in (torch.empty(3, device="meta"), torch.eye(3).to_sparse(), Wrapped(torch.zeros(3))):
        with pytest.raises(UnsupportedError, match="layer.w"):
            TensorDigests().digest([("layer.w", tensor)])


def test_unknown_mode_is_refused() -> None:
    with pytest.raises(ValueError, match="sometimes"):
        TensorDigests("sometimes")  # type: ignore[arg-type]
