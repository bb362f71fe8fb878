"""What the client takes from the environment; no other module of it looks there.

``WARMKV_SOCKET`` names the daemon's socket; ``WARMKV_DISABLE=1`` turns every call into a
silent miss; ``XDG_RUNTIME_DIR`` decides where the default socket lies.
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
