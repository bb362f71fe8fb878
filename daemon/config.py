"""The daemon's configuration, and the only place of the daemon that reads the environment.

A value comes from the first of: command-line flag, ``WARMKV_*`` variable, TOML file, default.
Every rejection names the value, what was expected and where the value came from.
"""

from __future__ import annotations

import grp
import math
import os
import pwd
import re
import tomllib
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from warmkv.daemon import activation, watchdog
from warmkv.kvstore.paths import default_config_path, default_socket_path, default_store_path
from warmkv.kvstore.store.options import DEFAULT_TOKENS, MIB, POLICIES, Share
from warmkv.schema.errors import ConfigError

LOG_LEVELS = ("debug", "info", "warning", "error")
MAX_BYTES = 1 << 60
MAX_FILE_BYTES = 1 << 20
MAX_SECONDS = 366 * 86400.0
MAX_SHARES = 256
#: What one of several users may hold where nothing is set: nobody can keep all others out.
SHARE_AMONG_SEVERAL = 0.5
MAX_SHARE_CHARACTERS = 64
#: Of a value that is refused, in characters.
MAX_SHOWN = 200
#: Descriptors the units of systemd/ let the manager keep; newer ones say the number themselves.
FD_STORE_MAX = 4096
_FLAGS = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}
_UNITS = {
    "": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12,
    "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40,
    "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "tib": 1 << 40,
}  # fmt: skip
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*\Z")


@dataclass(frozen=True, slots=True)
class Config:
    """What a daemon runs with. Sizes in bytes, None for the store's own default and 0 for
    "tier off"; times in seconds.

    ``allow_uids``, and members of ``allow_gids``, may connect besides the daemon's own uid;
    ``socket_gid`` owns the socket, which its members may then open (-1: nobody else). ``shares`` are
    declared namespaces. ``pressure`` shrinks memory when the machine runs short of it; ``spool`` is a
    folder whose files are imported (None: none). What a service manager said: ``notify_socket`` is
    where it awaits readiness, or empty; within every ``watchdog_s`` it wants a sign of life (0: none);
    ``inherited`` are descriptors it passed, at most ``fd_store_max`` of which it keeps.
    ``unknown_variables`` names WARMKV_* variables nothing reads. Where ``pressure_watch`` becomes
    readable, once ``pressure_write`` (base64) was written to it, memory is short. ``given`` and
    ``named`` are the options and the file it was loaded with."""

    socket: Path
    store: Path
    warm_bytes: int | None = None
    cold_bytes: int | None = None
    anchors: int = 0
    max_connections: int = 256
    allow_uids: tuple[int, ...] = ()
    frame_timeout_s: float = 30.0
    send_timeout_s: float = 30.0
    stop_timeout_s: float = 10.0
    flush_timeout_s: float = 60.0
    lease_ttl_s: float = 300.0
    reservation_ttl_s: float = 60.0
    busy_timeout_s: float = 5.0
    policy: str = "gdsf"
    high_watermark: float = 0.95
    low_watermark: float = 0.85
    evict_interval_s: float = 30.0
    ttl_s: float = 0.0
    uid_share: float = 1.0
    namespace_floor_bytes: int = 0
    max_dirty_bytes: int | None = None
    max_tokens: int = DEFAULT_TOKENS
    scrub_interval_s: float = 7 * 86400.0
    scrub_bytes_per_s: int = 64 * MIB
    allow_network_store: bool = False
    allow_gids: tuple[int, ...] = ()
    socket_gid: int = -1
    shares: Mapping[str, Share] = field(default_factory=dict)
    pressure: bool = True
    copy_foreign: bool = True
    fd_store_bytes: int | None = None
    watch_interval_s: float = 30.0
    spool: Path | None = None
    log_level: str = "info"
    source: Path | None = None
    notify_socket: str = ""
    watchdog_s: float = 0.0
    inherited: tuple[activation.Inherited, ...] = ()
    fd_store_max: int = FD_STORE_MAX
    unknown_variables: tuple[str, ...] = ()
    pressure_watch: str = ""
    pressure_write: str = ""
    given: Mapping[str, object] = field(default_factory=dict, repr=False, compare=False)
    named: Path | None = field(default=None, compare=False)


def parse_size(value: object) -> int:
    """Bytes of ``2GiB``, ``500 MB``, ``4096`` or 4096. Raises ValueError with what was expected."""
    if isinstance(value, int) and not isinstance(value, bool):
        size = value
    elif isinstance(value, str) and value.lstrip().startswith("-"):
        raise ValueError("a size is not negative")
    elif isinstance(value, str) and (found := _SIZE.match(value)) and found[2].lower() in _UNITS:
        size = int(float(found[1]) * _UNITS[found[2].lower()]) if "." in found[1] else int(found[1]) * _UNITS[found[2].lower()]
    else:
        raise ValueError("expected a number of bytes, or a number with KiB, MiB, GiB, TiB, kB, MB, GB or TB")
    if not 0 <= size <= MAX_BYTES:
        raise ValueError(f"expected 0 to {MAX_BYTES} bytes")
    return size


def _budget(value: object) -> int | None:
    return None if value == "auto" else parse_size(value)


def _number(low: int, high: int) -> Callable[[object], int]:
    def parse(value: object) -> int:
        if isinstance(value, str) and value.strip().isdigit():
            value = int(value)
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
            raise ValueError(f"expected a whole number from {low} to {high}")
        return value

    return parse


def _seconds(value: object) -> float:
    try:
        number = float(value) if isinstance(value, (str, int, float)) and not isinstance(value, bool) else math.nan
    except ValueError:
        number = math.nan
    if not 0 < number <= MAX_SECONDS:
        raise ValueError(f"expected more than 0 and at most {MAX_SECONDS:.0f} seconds")
    return number


def _seconds_or_never(value: object) -> float:
    if value in (0, "0", "0.0") and not isinstance(value, bool):
        return 0.0
    try:
        return _seconds(value)
    except ValueError as exc:
        raise ValueError(f"expected 0, or at most {MAX_SECONDS:.0f} seconds") from exc


def _fraction(value: object) -> float:
    try:
        number = float(value) if isinstance(value, (str, int, float)) and not isinstance(value, bool) else math.nan
    except ValueError:
        number = math.nan
    if not 0 < number <= 1:
        raise ValueError("expected a number more than 0 and at most 1")
    return number


def _flag(value: object) -> bool:
    if isinstance(value, bool):
        return value
    if isinstance(value, str) and value.lower() in _FLAGS:
        return _FLAGS[value.lower()]
    raise ValueError("expected true or false")


def _one_of(*words: str) -> Callable[[object], str]:
    def parse(value: object) -> str:
        if not isinstance(value, str) or value.lower() not in words:
            raise ValueError(f"expected one of {', '.join(words)}")
        return value.lower()

    return parse


def _optional_path(value: object) -> Path | None:
    return None if value == "" else _path(value)


def _path(value: object) -> Path:
    if not isinstance(value, (str, os.PathLike)) or not os.fspath(value) or "\0" in os.fspath(value):
        raise ValueError("expected a path")
    return Path(value).expanduser().absolute()


def _accounts(number_of: Callable[[str], int], what: str) -> Callable[[object], tuple[int, ...]]:
    """Parser of a list of users or groups, each a number or a name."""

    def one(item: object) -> int:
        if isinstance(item, str) and not item.strip().isdigit():
            try:
                return number_of(item)
            except (KeyError, ValueError) as exc:
                raise ValueError(f"there is no {what} {item!r}") from exc
        return _number(0, 2**32 - 2)(item)

    def parse(value: object) -> tuple[int, ...]:
        items: object = [part for part in value.replace(",", " ").split() if part] if isinstance(value, str) else value
        if not isinstance(items, (list, tuple)):
            raise ValueError(f"expected a list of {what}s, by number or name")
        return tuple(sorted({one(item) for item in items}))

    return parse


_users = _accounts(lambda name: pwd.getpwnam(name).pw_uid, "user")
_groups = _accounts(lambda name: grp.getgrnam(name).gr_gid, "group")


def _group(value: object) -> int:
    if value == "":
        return -1
    groups = _groups([value])
    return groups[0]


def _shares(value: object) -> dict[str, Share]:
    """``{name = {readers = [...], writers = [...]}}``; who may write may read."""
    if not isinstance(value, dict) or len(value) > MAX_SHARES:
        raise ValueError(f"expected a table of at most {MAX_SHARES} shares, each with readers and writers")
    shares = {}
    for name, given in value.items():
        if not name or len(name) > MAX_SHARE_CHARACTERS or not name.isprintable():
            raise ValueError(f"share {name!r} has no name of 1 to {MAX_SHARE_CHARACTERS} printable characters")
        if not isinstance(given, dict) or set(given) - {"readers", "writers"}:
            raise ValueError(f"share {name!r} is no table of readers and writers")
        writers = frozenset(_users(given.get("writers", [])))
        shares[name] = Share(frozenset(_users(given.get("readers", []))) | writers, writers)
    return shares


#: Every setting: its parser. Flags, variables and keys of the file share these names.
SETTINGS: dict[str, Callable[[object], object]] = {
    "socket": _path,
    "store": _path,
    "warm_bytes": _budget,
    "cold_bytes": _budget,
    "anchors": _number(0, 1 << 20),
    "max_connections": _number(1, 100_000),
    "allow_uids": _users,
    "allow_gids": _groups,
    "socket_gid": _group,
    "shares": _shares,
    "policy": _one_of(*POLICIES),
    "high_watermark": _fraction,
    "low_watermark": _fraction,
    "evict_interval_s": _seconds_or_never,
    "ttl_s": _seconds_or_never,
    "uid_share": _fraction,
    "namespace_floor_bytes": parse_size,
    "max_dirty_bytes": _budget,
    "max_tokens": _number(1, 1 << 40),
    "scrub_interval_s": _seconds_or_never,
    "scrub_bytes_per_s": parse_size,
    "allow_network_store": _flag,
    "pressure": _flag,
    "copy_foreign": _flag,
    "fd_store_bytes": _budget,
    "watch_interval_s": _seconds,
    "spool": _optional_path,
    "frame_timeout_s": _seconds,
    "send_timeout_s": _seconds,
    "stop_timeout_s": _seconds,
    "flush_timeout_s": _seconds,
    "lease_ttl_s": _seconds,
    "reservation_ttl_s": _seconds,
    "busy_timeout_s": _seconds,
    "log_level": _one_of(*LOG_LEVELS),
}
#: Variables that belong to the client, to the search for the file, or to shell completion.
_OTHER_VARIABLES = frozenset(
    {
        "WARMKV_DISABLE", "WARMKV_CONFIG", "WARMKV_KV_KEYS", "WARMKV_KV_VALUES", "WARMKV_KV_ORDINARY", "WARMKV_KV_GLOBAL",
        "WARMKV_KV_WINDOWED",
    }
)  # fmt: skip
_MANAGER_VARIABLES = (
    "NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID", "LISTEN_FDS", "LISTEN_PID", "LISTEN_FDNAMES", "FDSTORE",
    "MEMORY_PRESSURE_WATCH", "MEMORY_PRESSURE_WRITE",
)  # fmt: skip


def variable(name: str) -> str:
    """Name of the environment variable of a setting."""
    return f"WARMKV_{name.upper()}"


def load(flags: Mapping[str, object], config: Path | None = None, environ: Mapping[str, str] | None = None) -> Config:
    """The configuration in force. ``flags`` holds settings given on the command line (None: not
    given), ``config`` a file that must exist; without it ``$WARMKV_CONFIG``, then the user's
    configuration directory is looked at. Raises ConfigError."""
    env = os.environ if environ is None else environ
    source, table = _file(config, env)
    values: dict[str, object] = {"socket": default_socket_path(env), "store": default_store_path()}
    for name, parse in SETTINGS.items():
        if flags.get(name) is not None:
            values[name] = _parsed(parse, flags[name], f"option --{name.replace('_', '-')}")
        elif env.get(variable(name), "") != "":
            values[name] = _parsed(parse, env[variable(name)], f"environment variable {variable(name)}")
        elif name in table:
            values[name] = _parsed(parse, table[name], f"key {name} of {source}")
    known = {variable(name) for name in SETTINGS} | _OTHER_VARIABLES
    unknown = tuple(sorted(name for name in env if name.startswith("WARMKV_") and name not in known))
    how = {"source": source, "given": dict(flags), "named": config}
    loaded = Config(**values, **_manager(env), **how, unknown_variables=unknown)  # type: ignore[arg-type]
    several = bool(set(loaded.allow_uids) - {os.geteuid()} or loaded.allow_gids)
    return replace(loaded, uid_share=SHARE_AMONG_SEVERAL) if several and "uid_share" not in values else loaded


def again(config: Config) -> Config:
    """The configuration as it is now, from the same places. Raises ConfigError."""
    return load(config.given, config.named)


def file_of(config: Config) -> Path:
    """The file that a configuration comes from, or would if it existed."""
    return config.source or config.named or default_config_path()


def forget_manager(environ: MutableMapping[str, str] | None = None) -> None:
    """Take what a service manager said to this process out of the environment, so that no child
    takes it for its own."""
    env = os.environ if environ is None else environ
    for name in _MANAGER_VARIABLES:
        env.pop(name, None)


def _manager(env: Mapping[str, str]) -> dict[str, object]:
    """What a service manager said to this process."""
    pid = os.getpid()
    told = {name: env.get(name, "") for name in _MANAGER_VARIABLES}
    return {
        "notify_socket": told["NOTIFY_SOCKET"],
        "watchdog_s": watchdog.interval_s(told["WATCHDOG_USEC"], told["WATCHDOG_PID"], pid),
        "inherited": activation.inherited(told["LISTEN_FDS"], told["LISTEN_PID"], told["LISTEN_FDNAMES"], pid),
        "fd_store_max": int(told["FDSTORE"]) if told["FDSTORE"].isdecimal() else FD_STORE_MAX,
        "pressure_watch": told["MEMORY_PRESSURE_WATCH"],
        "pressure_write": told["MEMORY_PRESSURE_WRITE"],
    }


def _parsed(parse: Callable[[object], object], value: object, where: str) -> object:
    try:
        return parse(value)
    except (ValueError, OverflowError, RuntimeError) as exc:  # too long for a float, "~" of nobody
        raise ConfigError(f"{where} is {_shown(value)}: {exc}") from exc


def _shown(value: object) -> str:
    """The value as it was given, or how it begins."""
    try:
        text = repr(value)
    except ValueError:  # Python spells no integer of more than 4300 digits
        return "a very long number"
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}..."


def _text(path: Path) -> str:
    """Raises OSError, and ValueError for what is too large or no text."""
    with path.open("rb") as file:
        data = file.read(MAX_FILE_BYTES + 1)
    if len(data) > MAX_FILE_BYTES:
        raise ValueError(f"it has more than {MAX_FILE_BYTES} bytes")
    return data.decode("utf-8")


def _file(config: Path | None, env: Mapping[str, str]) -> tuple[Path | None, dict[str, object]]:
    """The configuration file in force and its top-level table."""
    named = config or (Path(env["WARMKV_CONFIG"]) if env.get("WARMKV_CONFIG") else None)
    path = named or default_config_path()
    try:
        table = tomllib.loads(_text(path))
    except (FileNotFoundError, NotADirectoryError) as exc:
        if named is None:
            return None, {}
        raise ConfigError(f"configuration file {path} does not exist") from exc
    except OSError as exc:
        raise ConfigError(f"configuration file {path} cannot be read: {exc.strerror}") from exc
    except (ValueError, RecursionError) as exc:  # undecodable, not TOML, numbers or nesting without end
        raise ConfigError(f"configuration file {path} is not TOML: {exc}") from exc
    unknown = sorted(set(table) - set(SETTINGS))
    if unknown:
        raise ConfigError(f"configuration file {path}: unknown key {unknown[0]!r}; known: {', '.join(SETTINGS)}")
    return path, table
