"""`dynamic-cp completion`: click's completion script for a shell."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

from dynamic_cp.decide.cli.parameters import Argument, Command


@click.command(
    "completion",
    cls=Command,
    short_help="Print the script that completes options in your shell.",
    epilog="""\b
Examples:
  eval "$(dynamic-cp completion bash)"                               # in ~/.bashrc
  eval "$(dynamic-cp completion zsh)"                                # in ~/.zshrc
  dynamic-cp completion fish > ~/.config/fish/completions/dynamic-cp.fish
""",
)
@click.argument("shell", cls=Argument, type=click.Choice(("bash", "zsh", "fish")), help="Shell to write it for.")
@click.pass_context
def command(ctx: click.Context, shell: str) -> None:
    """Print the script that completes commands, options and bundled names in SHELL."""
    completion = get_completion_class(shell)
    assert completion is not None
    click.echo(completion(ctx.find_root().command, {}, "dynamic-cp", "_DYNAMIC_CP_COMPLETE").source())
