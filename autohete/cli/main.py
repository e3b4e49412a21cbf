"""The command group: which subcommands there are, and how errors end.

Exit codes: 0 done; 1 a check or the work itself failed (the reason is on stderr); 2 the command
line was wrong (click's own, and autohete.cli.types for values).
"""

from __future__ import annotations

import importlib
import re
import sys

import click

from autohete._version import __version__

# name -> module; imported only when called, so `autohete --help` needs no torch.
SUBCOMMANDS = {
    "compare": "autohete.cli.compare",
    "completion": "autohete.cli.completion",
    "demo": "autohete.cli.demo",
    "doctor": "autohete.cli.doctor",
    "plan": "autohete.cli.plan",
    "profile": "autohete.cli.profile",
    "report": "autohete.cli.report",
    "simulate": "autohete.cli.simulate",
    "trace": "autohete.cli.trace",
}


_EPILOG = """\b
Examples:
  autohete doctor                                 is everything here?
  autohete demo                                   train a GPT in a third of the memory it needs
  autohete plan 7b --gpu a100-40 --batch 4        would it fit, what leaves, how fast?
  autohete report 7b --gpu a100-40 --batch 4      the same as a page with figures
"""


class LazyGroup(click.Group):
    """Subcommands by module name; the module's `command` is the click command."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(SUBCOMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in SUBCOMMANDS:
            return None
        command: click.Command = importlib.import_module(SUBCOMMANDS[cmd_name]).command
        return command


@click.command(
    cls=LazyGroup,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog=_EPILOG,
)
@click.version_option(__version__, "--version", prog_name="autohete")
def group() -> None:
    """Train transformers that do not fit in accelerator memory."""


# Messages speak Python's words; on the command line the same things are called otherwise.
_WORDS = (
    (r"name smaller layers with layers=", "take a smaller --width"),
    (r'\.to\("cpu"\)', "--device host"),
    (r"\.cuda\(\)", "--device cuda"),
    (r"(?<![\w./-])(gpu|cpu)_mem(?!\.?\w|[/-])", r"--\1-mem"),
)


def in_options(text: str) -> str:
    """Return a message of the library in the command line's words."""
    for pattern, words in _WORDS:
        text = re.sub(pattern, words, text)
    return text


def main() -> None:
    """Run the command line; contract and machine errors end in one line and exit code 1."""
    try:
        group(prog_name="autohete")
    except (ImportError, OSError, ValueError, RuntimeError) as error:
        text = in_options(str(error))
        print(text if text.startswith("autohete") else f"autohete: {text}", file=sys.stderr)
        sys.exit(1)
