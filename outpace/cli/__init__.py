"""The command `outpace`: one file per subcommand."""

from outpace.cli.app import main

__all__ = ["main"]
