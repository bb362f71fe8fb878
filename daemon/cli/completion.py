"""``warmkv completion``: a script that teaches the shell our verbs and options."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

from warmkv.daemon.cli import command, output


@click.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@command.as_json
def completion(as_json: bool, shell: str) -> int:
    """Print a completion script for SHELL.

    \b
    Examples:
      warmkv completion bash > ~/.local/share/bash-completion/completions/warmkv
      warmkv completion zsh > "${fpath[1]}/_warmkv"
      warmkv completion fish > ~/.config/fish/completions/warmkv.fish
    """
    from warmkv.daemon.cli.group import COMPLETE, warmkv

    made = get_completion_class(shell)
    assert made is not None
    complete = made(warmkv, {}, "warmkv", COMPLETE)
    script = complete.source_template % complete.source_vars()  # source() would run the shell to ask its version
    if as_json:
        output.emit_json({"shell": shell, "script": script})
    else:
        output.emit_text(script)
    return 0
