"""``warmkv stats``: counters, sizes and budgets."""

from __future__ import annotations

from pathlib import Path

import click

from warmkv.daemon.cli import command, output


@click.command()
@command.store_option
@command.common
def stats(as_json: bool, socket: Path | None, store: Path | None) -> int:
    """Print counters, sizes and budgets of both tiers.

    \b
    Examples:
      warmkv stats
      warmkv stats --json
      warmkv stats --store ~/.local/share/warmkv/store
    """
    with command.daemon_or_store(socket, store) as session:
        report = command.ask(session, "stats")
    if as_json:
        output.emit_json(report)
    else:
        output.pairs("warmkv stats", report)
    return 0
