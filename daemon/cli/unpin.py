"""``warmkv unpin``: let one prefix go like any other."""

from __future__ import annotations

from pathlib import Path
from typing import IO

import click

from warmkv.daemon.cli import command
from warmkv.daemon.cli.pin import set_pin
from warmkv.daemon.cli.prompt import prompt


@click.command()
@prompt
@command.store_option
@command.common
def unpin(as_json: bool, socket: Path | None, store: Path | None, namespace: str, lineage: str, tokens: IO[bytes]) -> int:
    """End the pins along one prompt.

    TOKENS is a file with the prompt's token ids as one JSON list, or - for standard input.
    Exit status 4 when nothing of the prompt is stored.

    \b
    Examples:
      warmkv unpin --namespace 3f9a system-prompt.json
    """
    return set_pin(as_json, socket, store, namespace, lineage, tokens, 0)
