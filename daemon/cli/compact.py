"""``warmkv compact``: give the disk back what was dropped."""

from __future__ import annotations

from pathlib import Path

import click

from warmkv.daemon.cli import command, output
from warmkv.daemon.cli.waiting import waiting


@click.command()
@command.store_option
@command.common
def compact(as_json: bool, socket: Path | None, store: Path | None) -> int:
    """Rewrite the store without the room that dropped prefixes left in it.

    The file of a store never shrinks by itself: room is used again, not given back. The copy needs
    as much free disk as what is stored. Requests wait while it is made. For the user the daemon
    runs as, and for root.

    \b
    Examples:
      warmkv compact
      warmkv compact --store ~/.local/share/warmkv/store
    """
    with command.daemon_or_store(socket, store, command.LONG_TIMEOUT_S) as session, waiting("compacting", quiet=as_json):
        report = command.ask(session, "compact")
    if as_json:
        output.emit_json(report)
    else:
        output.pairs("compacted", report)
    return 0
