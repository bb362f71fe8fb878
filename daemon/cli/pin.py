"""``warmkv pin``: keep one prefix whatever else comes."""

from __future__ import annotations

from pathlib import Path
from typing import IO

import click

from warmkv.daemon.cli import command, exits, output
from warmkv.daemon.cli.prompt import ids_of, lineage_of, prompt
from warmkv.schema import messages as m

MAX_TTL_S = 10 * 366 * 86400


@click.command()
@click.option(
    "--ttl", "ttl_s", type=click.IntRange(1, MAX_TTL_S), default=86400, metavar="S", show_default=True,
    help="Seconds until the pin ends by itself.",
)  # fmt: skip
@prompt
@command.store_option
@command.common
def pin(
    as_json: bool, socket: Path | None, store: Path | None, namespace: str, lineage: str, tokens: IO[bytes], ttl_s: int
) -> int:  # fmt: skip
    """Keep what is stored of one prompt from eviction, for a time.

    TOKENS is a file with the prompt's token ids as one JSON list, or - for standard input. Pinning
    again changes when the pin ends. Exit status 4 when nothing of the prompt is stored.

    \b
    Examples:
      warmkv pin --namespace 3f9a system-prompt.json
      warmkv pin --namespace 3f9a --ttl 604800 system-prompt.json
    """
    return set_pin(as_json, socket, store, namespace, lineage, tokens, ttl_s * 1000)


def set_pin(
    as_json: bool, socket: Path | None, store: Path | None, namespace: str, lineage: str, tokens: IO[bytes], ttl_ms: int
) -> int:  # fmt: skip
    """Pin for ``ttl_ms``, or end the pin with 0, and say how many tokens that was about."""
    ids, line = ids_of(tokens), lineage_of(lineage)
    with command.daemon_or_store(socket, store) as session:
        key = command.namespace_key(session, namespace)
        held = session.pin(m.Pin(key, line, ids, ttl_ms=ttl_ms)).held
    if as_json:
        output.emit_json({"held": held, "tokens": len(ids)})
    else:
        output.emit_text(f"{'pinned' if ttl_ms else 'unpinned'} {held} of {len(ids)} tokens")
    return exits.OK if held else exits.MISS
