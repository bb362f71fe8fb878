"""What the client takes from the environment; no other module of it looks there.

``WARMKV_SOCKET`` names the daemon's socket; ``WARMKV_DISABLE=1`` turns every call into a
silent miss; ``XDG_RUNTIME_DIR`` decides where the default socket lies. ``WARMKV_KV_KEYS``,
``WARMKV_KV_VALUES`` and, per class of layers, ``WARMKV_KV_ORDINARY``, ``WARMKV_KV_GLOBAL`` and
``WARMKV_KV_WINDOWED`` name the formats of resident caches.
"""

from __future__ import annotations

import os
from pathlib import Path

from warmkv.kvstore.paths import default_socket_path

_OFF = frozenset({"", "0", "false", "no", "off"})


def socket_path() -> Path:
    """Where to look for the daemon when the caller names no path."""
    named = os.environ.get("WARMKV_SOCKET", "")
    return Path(named) if named else default_socket_path(os.environ)


def disabled() -> bool:
    """Whether ``WARMKV_DISABLE`` asks for no caching at all."""
    return os.environ.get("WARMKV_DISABLE", "").strip().lower() not in _OFF


def row_formats() -> dict[str, str]:
    """The names of formats, as `live.policy.FormatPolicy.named` takes them; empty where there is none."""
    asked = {"keys": "KEYS", "values": "VALUES", "ordinary": "ORDINARY", "global_": "GLOBAL", "windowed": "WINDOWED"}
    return {name: os.environ.get(f"WARMKV_KV_{variable}", "").strip().lower() for name, variable in asked.items()}
