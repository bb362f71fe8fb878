"""Pieces of compiled kernels. Its modules need numba: fast twins import them, nobody else."""
