"""``warmkv clear``: drop a namespace, or everything."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from warmkv.daemon.cli import command, output
from warmkv.schema import messages as m


@click.command()
@click.option("--namespace", metavar="HEX", help="Drop this namespace; its key, or the beginning of it.")
@click.option("--all", "everything", is_flag=True, help="Drop everything you stored.")
@click.option("--yes", is_flag=True, help="Do not ask.")
@command.store_option
@command.common
def clear(
    as_json: bool, socket: Path | None, store: Path | None, namespace: str | None, everything: bool, yes: bool
) -> int:  # fmt: skip
    """Drop a namespace, or all of yours, from both tiers. A shared one is dropped by its key only.

    Asks first, unless --yes is given; where nobody can be asked, --yes is required. Programs that
    use dropped state at this moment keep it. Exit status 4 when there is no such namespace.

    \b
    Examples:
      warmkv clear --namespace 3f9a
      warmkv clear --all --yes
    """
    if (namespace is None) == (not everything):
        raise click.UsageError("exactly one of --namespace HEX and --all is needed")
    if not yes and (as_json or not sys.stdin.isatty()):
        raise click.UsageError("nobody can be asked here; give --yes")
    with command.daemon_or_store(socket, store, command.LONG_TIMEOUT_S) as session:
        key = b"" if namespace is None else bytes(command.namespace_key(session, namespace))
        if not yes:
            what = f"namespace {key.hex()}" if key else "everything you stored"
            click.confirm(f"Drop {what}?", abort=True)
        done = session.clear(m.Clear(key, everything))
    if as_json:
        output.emit_json({"records": done.records, "bytes": done.total_bytes})
    else:
        output.emit_text(f"dropped {done.records} records, {output.size(done.total_bytes)}")
    return 0
