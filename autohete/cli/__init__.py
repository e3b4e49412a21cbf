"""The command `autohete`: one module per subcommand, imported when it is called."""

from autohete.cli.main import main

__all__ = ["main"]
