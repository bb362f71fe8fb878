"""CUDA without a device: sources of programs run on the host, with every access looked at."""

from cuda_harness.barriers import barriers, survivors, without_barrier
from cuda_harness.build import compiler_missing
from cuda_harness.host import ORDERS, HostLauncher, aligned

__all__ = ["ORDERS", "HostLauncher", "aligned", "barriers", "compiler_missing", "survivors", "without_barrier"]
