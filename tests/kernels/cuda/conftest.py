"""The machine that a test of CUDA programs runs on."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

HERE = str(Path(__file__).resolve().parent)
if HERE not in sys.path:
    sys.path.append(HERE)

from cuda_machines import Machine, gpu, host  # noqa: E402


@pytest.fixture(params=["host", "cupy"])
def machine(request: pytest.FixtureRequest) -> Machine:
    return gpu() if request.param == "cupy" else host()
