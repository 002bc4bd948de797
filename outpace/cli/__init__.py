"""The command `outpace`: one file per subcommand."""

import sys


def main() -> None:
    """Run the command. Ctrl-C ends it quietly, even while it imports its packages."""
    try:
        from outpace.cli.app import main as run

        run()
    except KeyboardInterrupt:
        sys.exit(130)  # `exit_codes.INTERRUPTED`, which may not be imported yet
