"""The command line: ``warmkv VERB``; one module a verb, loaded when it is called."""

from __future__ import annotations

import sys
from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of the console script; the exit status (see `exits`)."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if "--version" in arguments and set(arguments) <= {"--version", "--json"}:
        from warmkv import __version__

        print(f'{{"version": "{__version__}"}}' if "--json" in arguments else f"warmkv {__version__}")
        return 0
    from warmkv.daemon.cli.group import run

    return run(arguments)
