"""What packed TurboQuant rows say, read bit by bit and rotated back by dense matrices in float64."""

from __future__ import annotations

import numpy as np

from warmkv.kernels.formats import Block, RowFormat
from warmkv.kernels.turboquant.attend import REFERENCE
from warmkv.kernels.turboquant.block import encode
from warmkv.kernels.turboquant.levels import levels
from warmkv.kernels.turboquant.reference import Estimator
from warmkv.kernels.turboquant.rotation import Rotation
from warmkv.kernels.turboquant.turn import Turn
from warmkv.kvstore.live.plan import LayerPlan

KAPPA = {
    Estimator.UNBIASED: lambda size: np.sqrt(np.pi / 2 / size),
    Estimator.MINIMUM_MSE: lambda size: np.sqrt(2 / np.pi / size),
    Estimator.CERA_COMPAT: lambda size: np.sqrt(np.pi / 2) / size,
}


def turn_of(plan: LayerPlan, index: int, size: int) -> Turn:
    assert plan.turboquant is not None
    return Turn(Rotation.of(plan.turboquant.seed, index, size), plan.turboquant.estimator)


def stored(row: np.ndarray, format_: RowFormat, turn: Turn) -> Block:
    """One row (size,) as a block."""
    return Block(format_, encode(REFERENCE, row[None, None], format_, turn)[0], turn=turn)


def matrix(size: int) -> np.ndarray:
    """The flat orthogonal transform of so many channels."""
    odd = size
    while odd % 2 == 0:
        odd //= 2
    index = np.arange(odd)
    angles = 2 * np.pi * np.outer(index, index) / odd
    whole = np.cos(angles) + np.sin(angles)
    while len(whole) < size:
        whole = np.kron(whole, np.array([[1.0, 1.0], [1.0, -1.0]]))
    return whole / np.sqrt(size)


def numbers(block: Block) -> np.ndarray:
    """(rows, size) float64 whose products with a query are its scores."""
    assert block.turn is not None
    size, rotation = block.turn.size, block.turn.rotation
    bits = np.unpackbits(block.codes, axis=1, bitorder="little").astype(np.int64)
    tail = [np.ascontiguousarray(block.codes[:, at:][:, :2]).view("<f2")[:, 0].astype(np.float64) for at in _norms(block)]
    turn = matrix(size)
    if block.format is RowFormat.TQ3:
        codes = bits[:, :size] + 2 * bits[:, size : 2 * size] + 4 * bits[:, 2 * size : 3 * size]
        unit = levels(size, 3).centroids[codes].astype(np.float64)
    else:
        codes = bits[:, 0 : 2 * size : 2] + 2 * bits[:, 1 : 2 * size : 2]
        unit = levels(size, 2).centroids[codes].astype(np.float64)
    if block.format is RowFormat.TQ_KEY:
        signs = 2.0 * bits[:, 2 * size : 3 * size] - 1
        unit = unit + KAPPA[block.turn.estimator](size) * tail[1][:, None] * ((signs @ turn) * rotation.jl)
    return tail[0][:, None] * ((unit @ turn) * rotation.polar)


def _norms(block: Block) -> list[int]:
    assert block.turn is not None
    size = block.turn.size
    return {
        RowFormat.TQ_KEY: [3 * size // 8, 3 * size // 8 + 2],
        RowFormat.TQ_VALUE: [size // 4],
        RowFormat.TQ3: [3 * size // 8],
    }[block.format]
