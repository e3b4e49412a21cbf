"""`python -m autohete` is the command `autohete`."""

from autohete.cli import main

main()
