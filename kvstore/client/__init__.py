"""The client of the daemon: the store's verbs over a Unix socket.

The names load on first use: who calls `connect` does not pay for asyncio.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from warmkv.kvstore.client.async_client import AsyncClient as AsyncClient
    from warmkv.kvstore.client.client import Client as Client
    from warmkv.kvstore.client.client import connect as connect

__all__ = ["AsyncClient", "Client", "connect"]
_HOMES = {"AsyncClient": "async_client", "Client": "client", "connect": "client"}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value
