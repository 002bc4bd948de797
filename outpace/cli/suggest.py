"""Commands that suggest a flag in place of an unknown one."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from outpace.config.nearest import nearest


def run_command(function: Callable[..., Any], ctx: typer.Context, args: Sequence[str]) -> None:
    """Run a command that parses its own arguments, without rich tables, which would cut off long names."""
    inner = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
    inner.command(cls=Command)(function)
    inner(args=list(args), prog_name=ctx.command_path)


class Group(TyperGroup):
    """A group of commands with suggestions for unknown flags."""

    def make_context(self, *args: Any, **more: Any) -> Any:
        with _suggesting():
            return super().make_context(*args, **more)

    def invoke(self, ctx: Any) -> Any:
        with _suggesting():
            return super().invoke(ctx)


class Command(TyperCommand):
    """A single command with suggestions."""

    def make_context(self, *args: Any, **more: Any) -> Any:
        with _suggesting():
            return super().make_context(*args, **more)


@contextmanager
def _suggesting() -> Iterator[None]:
    """Make the error for an unknown option suggest one flag. Typer moves the class of that error between releases."""
    try:
        yield
    except Exception as error:
        match error:
            case object(option_name=str(name), possibilities=_, ctx=ctx) if ctx is not None:
                known = [flag for param in ctx.command.get_params(ctx) for flag in (*param.opts, *param.secondary_opts)]
                meant = nearest(name, (flag for flag in known if flag.startswith("--")))
                error.message = f"No such option: {name}." + (f" Did you mean {meant}?" if meant else "")  # type: ignore[attr-defined]
                error.possibilities = None
        raise
