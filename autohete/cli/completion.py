"""`autohete completion`: the line that makes a shell complete commands and options."""

from __future__ import annotations

import click

_EPILOG = """\b
Examples:
  autohete completion bash >> ~/.bashrc
  autohete completion zsh >> ~/.zshrc
  autohete completion fish > ~/.config/fish/completions/autohete.fish
"""


@click.command(epilog=_EPILOG)
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@click.option("--json", "as_json", is_flag=True, help="Print the script as JSON.")
@click.pass_context
def command(context: click.Context, shell: str, as_json: bool) -> None:
    """Print the completion script for SHELL; it asks `autohete` itself what fits."""
    from click.shell_completion import get_completion_class

    found = get_completion_class(shell)
    assert found is not None
    root = context.find_root().command
    script = found(root, {}, "autohete", "_AUTOHETE_COMPLETE").source()
    if as_json:
        from autohete.cli.output import print_json

        print_json({"shell": shell, "script": script})
    else:
        print(script)
