"""``warmkv evict``: make room now."""

from __future__ import annotations

from pathlib import Path

import click

from warmkv.daemon import config
from warmkv.daemon.cli import command, output
from warmkv.daemon.cli.waiting import waiting


def _target(_: click.Context, __: click.Parameter, given: str | None) -> dict[str, object]:
    """``--to`` as arguments of the report: bytes, or a part of the budget."""
    if given is None:
        return {}
    try:
        if given.strip().endswith("%"):
            part = float(given.strip()[:-1]) / 100
            if not 0 <= part <= 1:
                raise ValueError("expected 0% to 100%")
            return {"to_fraction": part}
        return {"to_bytes": config.parse_size(given)}
    except ValueError as exc:
        raise click.BadParameter(f"{given!r}: {exc}") from exc


@click.command()
@click.option(
    "--tier", type=click.Choice(["warm", "cold", "both"]), default="both", show_default=True, help="Where to make room."
)
@click.option(
    "--to", metavar="SIZE|PERCENT", callback=_target, help="Leave at most this much, such as 2GiB, or 50% of the budget."
)
@click.option("--dry-run", is_flag=True, help="Tell what would go, and let it stay.")
@command.store_option
@command.common
def evict(as_json: bool, socket: Path | None, store: Path | None, tier: str, to: dict[str, object], dry_run: bool) -> int:
    """Drop what is worth least, until the tiers are down to the size given.

    Without --to, down to the low watermark, if they are above it. What is pinned, in use or not yet
    on disk stays. What goes from memory and is on disk is still found there. For the user the
    daemon runs as, and for root.

    \b
    Examples:
      warmkv evict
      warmkv evict --tier cold --to 20GiB --dry-run
      warmkv evict --tier warm --to 50%
    """
    with command.daemon_or_store(socket, store, command.LONG_TIMEOUT_S) as session, waiting("evicting", quiet=as_json):
        report = command.ask(session, "evict", tier=tier, dry_run=dry_run, **to)
    if as_json:
        output.emit_json(report)
    else:
        told = "would go" if dry_run else "gone"
        for name, where in (("warm", "memory"), ("cold", "disk")):
            if f"{name}_records" in report:
                count, size = report[f"{name}_records"], output.size(report[f"{name}_bytes"])
                output.emit_text(f"{told} from {where}: {count} records, {size}")
    return 0
