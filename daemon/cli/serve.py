"""``warmkv serve``: run the daemon in the foreground."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from warmkv.daemon.cli import command, output

_OPTIONS = {
    "store": ("PATH", "Directory of the cold tier. Default: warmkv/store in the data directory."),
    "warm_bytes": ("SIZE", "Shared memory to use at most, such as 2GiB; 0: none. Default: a quarter of memory."),
    "cold_bytes": ("SIZE", "Disk to use at most; 0: none. Default: 10GiB or a quarter of what is free."),
    "anchors": ("N", "States at named positions a model keeps in memory. Default: 0, as many as fit."),
    "max_connections": ("N", "Connections served at a time. Default: 256."),
    "allow_uids": ("UIDS", "Users allowed besides your own, such as 0,1001. Default: none."),
    "frame_timeout_s": ("S", "Seconds a peer has to finish a message it began. Default: 30."),
    "send_timeout_s": ("S", "Seconds a peer has to take a reply in. Default: 30."),
    "stop_timeout_s": ("S", "Seconds requests have to finish when the daemon stops. Default: 10."),
    "flush_timeout_s": ("S", "Seconds writing may take when the daemon stops. Default: 60."),
    "lease_ttl_s": ("S", "Seconds a restored prefix is kept from eviction at most. Default: 300."),
    "reservation_ttl_s": ("S", "Seconds room is kept for an announced upload. Default: 60."),
    "busy_timeout_s": ("S", "Seconds a save waits for room before it is told to come again. Default: 5."),
    "policy": ("NAME", "What is evicted first: gdsf or lru. Default: gdsf."),
    "high_watermark": ("F", "A tier fuller than this part of its budget is brought down. Default: 0.95."),
    "low_watermark": ("F", "Down to this part. Default: 0.85."),
    "evict_interval_s": ("S", "Seconds between looks of the eviction service; 0: never. Default: 30."),
    "ttl_s": ("S", "What was not used for so long is dropped; 0: nothing is. Default: 0."),
    "uid_share": ("F", "Part of each budget that one user may hold. Default: 1, or 0.5 where others may connect."),
    "namespace_floor_bytes": ("SIZE", "What a model keeps of a tier while others have more. Default: 0."),
    "max_dirty_bytes": ("SIZE", "What may wait for the disk at most. Default: half of the warm budget."),
    "max_tokens": ("N", "Token ids in the index at most, 4 bytes each. Default: 134217728."),
    "scrub_interval_s": ("S", "Everything is read again and checked so often; 0: never. Default: 604800."),
    "scrub_bytes_per_s": ("SIZE", "Speed of that at most. Default: 64MiB."),
    "allow_network_store": ("BOOL", "Permit a store on a network or shared folder. Default: false."),
    "allow_gids": ("GROUPS", "Groups whose members are allowed. Default: none."),
    "socket_gid": ("GROUP", "Group that may open the socket. Default: none."),
    "pressure": ("BOOL", "Give memory back when the machine runs short of it. Default: true."),
    "copy_foreign": ("BOOL", "Copy uploads charged to another control group. Default: true."),
    "fd_store_bytes": ("SIZE", "Memory the service manager keeps over a restart. Default: the warm budget."),
    "watch_interval_s": ("S", "Seconds between looks at watched files. Default: 30."),
    "spool": ("PATH", "Folder whose files are imported. Default: none."),
    "log_level": ("LEVEL", "debug, info, warning or error. Default: info."),
}


def _settings(function: Any) -> Any:
    for name, (metavar, text) in reversed(_OPTIONS.items()):
        function = click.option(f"--{name.replace('_', '-')}", name, metavar=metavar, help=text)(function)
    return function


@click.command()
@_settings
@click.option("--config", type=click.Path(path_type=Path), metavar="PATH", help="TOML file to read instead of the default one.")
@command.common
def serve(as_json: bool, socket: Path | None, config: Path | None, **flags: object) -> int:
    """Run the daemon in the foreground until SIGTERM or Ctrl-C, then write everything out.

    A setting is taken from its option, else from WARMKV_<SETTING> in the environment, else from
    the configuration file, else from its default. Logs go to standard error; with --json one
    value goes to standard output once connections are taken.

    Exit status 6 when another daemon has the socket or the store, 7 when the store is newer.

    \b
    Examples:
      warmkv serve
      warmkv serve --store /var/cache/warmkv --warm-bytes 4GiB --cold-bytes 50GiB
      WARMKV_LOG_LEVEL=debug warmkv serve
    """
    from warmkv.daemon import config as configuration
    from warmkv.daemon import lifecycle, logs

    loaded = configuration.load({"socket": socket, **flags}, config)
    logs.configure(loaded.log_level)

    def ready(started: lifecycle.Started) -> None:
        if as_json:
            output.emit_json({name: str(value) if isinstance(value, Path) else value for name, value in asdict(started).items()})

    lifecycle.serve(loaded, ready if as_json else None)
    return 0
