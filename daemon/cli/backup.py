"""``warmkv backup``: a copy of the store that opens as one."""

from __future__ import annotations

from pathlib import Path

import click

from warmkv.daemon.cli import command, output
from warmkv.daemon.cli.waiting import waiting


@click.command()
@click.argument("directory", type=command.PLACE)
@command.store_option
@command.common
def backup(as_json: bool, socket: Path | None, store: Path | None, directory: Path) -> int:
    """Copy the store into the new folder DIRECTORY while the daemon goes on serving.

    The daemon writes it, so the folder must be one that the daemon may make. What was acknowledged
    as on disk is in the copy, which `warmkv serve --store DIRECTORY` takes like any store. For the user
    the daemon runs as, and for root.

    \b
    Examples:
      warmkv backup /var/backups/warmkv-2026-01-31
      warmkv backup --store ~/.local/share/warmkv/store /tmp/copy
    """
    target = directory.absolute()
    with command.daemon_or_store(socket, store, command.LONG_TIMEOUT_S) as session, waiting("copying", quiet=as_json):
        report = command.ask(session, "backup", path=str(target))
    if as_json:
        output.emit_json(report)
    else:
        output.pairs(f"copied to {target}", report)
    return 0
