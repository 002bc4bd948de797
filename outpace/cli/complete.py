"""`outpace complete`: continue a text."""

from contextlib import closing
from typing import Annotated

import typer

from outpace.cli.generate import text_of
from outpace.cli.model import DEFAULT, KINDS
from outpace.cli.talk import ApiKey, Device, DType, GenerationConfig, Seed, Temperature, TopP, Url, given, talker


def command(
    prompt: Annotated[str, typer.Argument(help="The beginning; '-' reads it from standard input.")],
    model: Annotated[
        str | None,
        typer.Option(
            "--model",
            "-m",
            metavar="MODEL",
            help=f"{KINDS}; with --url the name of one of the server's models.",
            show_default=f"{DEFAULT}, or the server's first",
        ),
    ] = None,
    url: Url = None,
    api_key: ApiKey = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Most new tokens.")] = 256,
    temperature: Temperature = None,
    top_p: TopP = None,
    seed: Seed = None,
    generation_config: GenerationConfig = None,
    dtype: DType = None,
    device: Device = None,
) -> None:
    """Continue a text, without a chat template. The text is streamed to standard output."""
    text, options = text_of(prompt), given(max_tokens=max_tokens, temperature=temperature, top_p=top_p, seed=seed)
    of_engine = {"dtype": dtype, "device": device, "generation_config": generation_config}
    with closing(talker(model, url, api_key, **of_engine)) as partner:
        for piece in partner.complete(text, options):
            typer.echo(piece, nl=False)
    typer.echo()
