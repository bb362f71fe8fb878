"""What reads rotated rows has to know beside their bytes."""

from __future__ import annotations

from dataclasses import dataclass

from warmkv.kernels.turboquant.reference import Estimator
from warmkv.kernels.turboquant.rotation import Rotation


@dataclass(frozen=True, slots=True)
class Turn:
    """What rows were rotated by, and how the signs of keys are counted by whoever reads them."""

    rotation: Rotation
    estimator: Estimator = Estimator.UNBIASED

    @property
    def size(self) -> int:
        """Channels of a row."""
        return self.rotation.size

    @property
    def kappa(self) -> float:
        """What signs of residuals are weighed by."""
        return self.estimator.kappa(self.size)
