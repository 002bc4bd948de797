"""An unknown flag is refused with the one that was probably meant, if there is one."""

import difflib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from typer.core import TyperCommand, TyperGroup

CLOSE = 0.72
"""How alike two names must be, as difflib counts."""


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The name that was probably meant: one that has this or its words in it, or that is spelled alike."""
    asked = _plain(name)

    def likeness(other: str) -> float:
        plain = _plain(other)
        same = difflib.SequenceMatcher(None, asked, plain).ratio()
        has_it = len(asked) > 2 and (plain.startswith(asked) or f"-{asked}" in plain)
        has_its_words = set(asked.split("-")) <= set(plain.split("-"))
        return same + (has_it or has_its_words or asked.startswith(f"{plain}-"))

    best = max(sorted(known), key=likeness, default="")
    return best if best and likeness(best) >= CLOSE else None


def _plain(name: str) -> str:
    return name.strip("-").replace("_", "-").lower()


class Group(TyperGroup):
    """Commands, with suggestions for what is unknown to them or to one of them."""

    def make_context(self, *args: Any, **more: Any) -> Any:
        """Read the options of the group."""
        with _suggesting():
            return super().make_context(*args, **more)

    def invoke(self, ctx: Any) -> Any:
        """Read the options of the command, and run it."""
        with _suggesting():
            return super().invoke(ctx)


class Command(TyperCommand):
    """A command alone, with suggestions."""

    def make_context(self, *args: Any, **more: Any) -> Any:
        """Read its options."""
        with _suggesting():
            return super().make_context(*args, **more)


@contextmanager
def _suggesting() -> Iterator[None]:
    """Have the error about an unknown option name one flag. Its class is at another place in each release of typer."""
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
