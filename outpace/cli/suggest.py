"""Suggestions for unknown flags."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from typer.core import TyperCommand, TyperGroup

from outpace.config.nearest import nearest


class Group(TyperGroup):
    """A group of commands with suggestions for unknown flags."""

    def make_context(self, *args: Any, **more: Any) -> Any:
        """Read the options of the group."""
        with _suggesting():
            return super().make_context(*args, **more)

    def invoke(self, ctx: Any) -> Any:
        """Read the options of the command, and run it."""
        with _suggesting():
            return super().invoke(ctx)


class Command(TyperCommand):
    """A single command with suggestions."""

    def make_context(self, *args: Any, **more: Any) -> Any:
        """Read its options."""
        with _suggesting():
            return super().make_context(*args, **more)


@contextmanager
def _suggesting() -> Iterator[None]:
    """Make the error for an unknown option suggest one flag. Its class moves between releases of typer."""
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
