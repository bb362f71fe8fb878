"""Errors of kernels: bad arrays, and backends that are not there."""

from __future__ import annotations


class KernelError(ValueError):
    """Arrays that do not fit an operation: says what was found, what was expected and where."""


class NotFinite(KernelError):
    """A row with NaN or infinity where the storage format has no room for it. ``row`` is its index."""

    def __init__(self, message: str, row: int) -> None:
        super().__init__(message)
        self.row = row


class TooLarge(NotFinite):
    """A row of finite numbers that are too large for the storage format: a scale of theirs would be infinite."""


class BackendMissing(KernelError):
    """A backend that was asked for by name and cannot be had here."""
