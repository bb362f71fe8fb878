"""Where socket and store lie when nobody says otherwise: one answer for client and daemon.

The runtime directory is resolved here and not by a library, because two processes with
different library versions must arrive at the same socket, and asking must never warn or fail.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path

from warmkv.schema.errors import ConfigError, SocketPathError

#: sun_path holds 108 bytes, one of them the closing zero.
MAX_SOCKET_PATH_BYTES = 107


def default_socket_path(environ: Mapping[str, str] | None = None) -> Path:
    """``warmkv/warmkv.sock`` in the user's runtime directory: ``$XDG_RUNTIME_DIR``, else
    ``/run/user/UID`` where it exists, else ``/tmp/runtime-UID``."""
    env = os.environ if environ is None else environ
    uid = os.geteuid()
    runtime = env.get("XDG_RUNTIME_DIR", "")
    if not os.path.isabs(runtime):
        runtime = f"/run/user/{uid}"
        if not os.path.isdir(runtime):
            runtime = f"/tmp/runtime-{uid}"
    return Path(runtime, "warmkv", "warmkv.sock")


def default_store_path() -> Path:
    """``warmkv/store`` in the user's data directory (``~/.local/share`` unless configured).

    Raises ConfigError for a user without a home directory, as `default_config_path` does."""
    from platformdirs import user_data_path

    return _of_user(user_data_path) / "store"


def default_config_path() -> Path:
    """``warmkv/config.toml`` in the user's configuration directory."""
    from platformdirs import user_config_path

    return _of_user(user_config_path) / "config.toml"


def _of_user(place: Callable[..., Path]) -> Path:
    """warmkv's folder in one of the user's directories. Without a home, platformdirs either raises
    or answers with a relative path that begins with ~, depending on its version."""
    try:
        path = place("warmkv", appauthor=False)
    except RuntimeError:
        path = None
    if path is None or not path.is_absolute():
        raise ConfigError(f"uid {os.geteuid()} has no home directory: set HOME, or XDG_CONFIG_HOME and XDG_DATA_HOME")
    return path


def check_socket_path(path: Path) -> bytes:
    """The path as the kernel will see it. Raises SocketPathError if it cannot name a socket."""
    data = os.fsencode(path)
    if b"\0" in data:
        raise SocketPathError(f"socket path {os.fspath(path)!r} contains a zero byte")
    if len(data) > MAX_SOCKET_PATH_BYTES:
        raise SocketPathError(f"socket path has {len(data)} bytes, at most {MAX_SOCKET_PATH_BYTES} are possible: {path}")
    return data
