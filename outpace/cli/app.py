"""The command line: subcommands, version, and how errors are shown."""

import logging
import sys
from typing import Annotated

import typer
from rich.console import Console
from rich.logging import RichHandler
from rich.markup import escape

from outpace._version import __version__
from outpace.cli import (
    bench,
    chat,
    complete,
    deploy,
    eval,
    generate,
    info,
    models,
    plan,
    probe,
    quantize,
    run_batch,
    serve,
    shard,
    verify,
)
from outpace.cli.suggest import Group
from outpace.errors import ConfigError, InputError, NotSupportedYet, OutpaceError
from outpace.server.exit_codes import INTERRUPTED, WRONG_OPTION

app = typer.Typer(
    cls=Group,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
    rich_markup_mode=None,  # rich tables would cut off long names and show <bool> after flags
    help="Run and serve PyTorch models near the speed of the hardware.",
)
app.add_typer(bench.app, name="bench")
app.command("chat")(chat.command)
app.command("complete")(complete.command)
app.command("deploy", add_help_option=False, context_settings=dict(serve.CONTEXT))(deploy.command)
app.command("eval", add_help_option=False, context_settings=dict(serve.CONTEXT))(eval.command)
app.command("generate")(generate.command)
app.command("info")(info.command)
app.command("models")(models.command)
app.command("plan")(plan.command)
app.command("probe")(probe.command)
app.command("quantize")(quantize.command)
app.command("run-batch")(run_batch.command)
app.command("serve", add_help_option=False, context_settings=dict(serve.CONTEXT))(serve.command)
app.command("shard")(shard.command)
app.command("verify")(verify.command)


def _show_version(asked: bool) -> None:
    if asked:
        typer.echo(f"outpace {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    ctx: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version.")
    ] = False,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="Log every automatic choice and its reason.")
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
) -> None:
    if verbose or debug:
        handler = RichHandler(console=Console(stderr=True), show_path=False, show_time=False)
        logging.basicConfig(level=logging.INFO, handlers=[handler], format="%(message)s")


def main() -> None:
    """Run the command. An error is printed as one line (with --debug as a traceback); the exit code is 2 or 1."""
    try:
        app()
    except OutpaceError as error:
        if "--debug" in sys.argv:
            raise
        Console(stderr=True).print(f"[bold red]error:[/] {escape(str(error))}", highlight=False, soft_wrap=True)
        sys.exit(WRONG_OPTION if isinstance(error, ConfigError | InputError | NotSupportedYet) else 1)
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
