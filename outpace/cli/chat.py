"""`outpace chat`: a conversation in the terminal."""

import contextlib
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

import typer
from rich.console import Console

from outpace.cli.model import DEFAULT, KINDS, SameModel, one_model
from outpace.cli.talk import (
    ApiKey,
    Device,
    DType,
    GenerationConfig,
    MaxTokens,
    Message,
    Seed,
    Talker,
    Temperature,
    TopP,
    Url,
    given,
    talker,
)
from outpace.errors import OutpaceError

HELP = "/reset forgets the conversation · /system TEXT sets the system prompt · /exit or Ctrl-D ends · Ctrl-C stops"


def command(
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="MODEL",
            help=f"{KINDS}; with --url the name of one of the server's models.",
            show_default=f"{DEFAULT}, or the server's first",
        ),
    ] = None,
    same_model: SameModel = None,
    url: Url = None,
    api_key: ApiKey = None,
    system: Annotated[str | None, typer.Option(help="A system prompt.")] = None,
    max_tokens: MaxTokens = None,
    temperature: Temperature = None,
    top_p: TopP = None,
    seed: Seed = None,
    generation_config: GenerationConfig = None,
    dtype: DType = None,
    device: Device = None,
) -> None:
    """Chat with a model or a server. Answers are streamed; the conversation is remembered."""
    options = given(max_tokens=max_tokens, temperature=temperature, top_p=top_p, seed=seed)
    of_engine = {"dtype": dtype, "device": device, "generation_config": generation_config}
    if sys.stdin.isatty():
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  # arrow keys and earlier lines
    console = Console(stderr=True)
    chosen = one_model(model, same_model)
    with contextlib.closing(talker(chosen, url, api_key, **of_engine)) as partner:
        console.print(f"{partner.name} · {HELP}", style="dim", markup=False, highlight=False)
        talk(Conversation(partner, options, system), console)


@dataclass
class Conversation:
    """The messages so far."""

    talker: Talker
    options: Mapping[str, Any]
    system: str | None = None
    said: list[Message] = field(default_factory=list)

    def answer(self, text: str) -> None:
        """Answer on standard output. Ctrl-C stops the answer; its beginning stays in the conversation."""
        self.said.append({"role": "user", "content": text})
        head: list[Message] = [{"role": "system", "content": self.system}] if self.system else []
        pieces: list[str] = []
        try:
            for piece in self.talker.chat([*head, *self.said], self.options):
                pieces.append(piece)
                typer.echo(piece, nl=False)
        except KeyboardInterrupt:
            pass
        finally:
            typer.echo()
            if pieces:
                self.said.append({"role": "assistant", "content": "".join(pieces)})
            else:
                self.said.pop()


def talk(conversation: Conversation, console: Console) -> None:
    """Read lines until the end; answer each that is not a command."""
    while True:
        try:
            line = input("> " if sys.stdin.isatty() else "").strip()
        except EOFError:
            return
        except KeyboardInterrupt:
            console.print("\n/exit or Ctrl-D ends", style="dim", highlight=False)
            continue
        name, _, rest = line.partition(" ")
        match name:
            case "":
                continue
            case "/exit" | "/quit":
                return
            case "/reset":
                conversation.said.clear()
            case "/system":
                conversation.system = rest.strip() or None
            case _ if name.startswith("/"):
                console.print(HELP, style="dim", highlight=False)
            case _:
                _answer(conversation, line, console)


def _answer(conversation: Conversation, line: str, console: Console) -> None:
    """An answer that fails ends itself, not the program."""
    try:
        conversation.answer(line)
    except OutpaceError as error:
        console.print(f"error: {error}", style="red", markup=False, highlight=False, soft_wrap=True)
