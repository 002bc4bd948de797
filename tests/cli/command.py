"""The command line in this process."""

from collections.abc import Callable
from pathlib import Path

from typer.testing import CliRunner, Result

from outpace.cli.app import app

Main = Callable[..., tuple[int, str, str]]


def run(*args: str | Path, stdin: str | bytes | None = None) -> Result:
    """The command in this process, with a terminal wide enough for every line."""
    return CliRunner(env={"COLUMNS": "200", "TERM": "dumb"}).invoke(app, [str(arg) for arg in args], input=stdin)
