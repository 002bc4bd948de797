"""The model argument of commands: --model in all, and MODEL where the model comes first."""

from typing import Annotated

import typer

from outpace.errors import InputError

KINDS = "A folder, a .gguf file or a Hugging Face id"
DEFAULT = "SmolLM2-135M-Instruct"

Model = Annotated[str | None, typer.Argument(metavar="MODEL", help=f"{KINDS}.", show_default=DEFAULT)]
SameModel = Annotated[
    str | None, typer.Option("--model", "-m", metavar="MODEL", help="The same as MODEL.", show_default=False)
]
OnlyModel = Annotated[
    str | None, typer.Option("--model", "-m", metavar="MODEL", help=f"{KINDS}.", show_default=DEFAULT)
]


def one_model(model: str | None, same: str | None) -> str | None:
    """The model, whichever way it was given."""
    if model is not None and same is not None:
        raise InputError(f"model: given twice, {model!r} and --model {same!r}; give it once")
    return same if model is None else model
