"""`outpace eval`: perplexity of a model, and how close it is to another; its flags are the options of `LLM`."""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from outpace.cli.model import KINDS, Model, SameModel, one_model
from outpace.cli.results import ResultFiles, show
from outpace.cli.serve import read_config
from outpace.cli.suggest import run_command
from outpace.errors import ConfigError

if TYPE_CHECKING:
    from outpace.quality import Evaluation, Perplexity
    from outpace.quality.evaluate import Progress as Report

NO_EFFECT = (
    *("seed", "generation_config", "max_logprobs", "cache.enable_prefix_caching", "cache.swap_space"),
    *("scheduler.max_num_seqs", "scheduler.max_chunk_beside_decodes", "scheduler.max_waiting"),
    *("scheduler.target_step_ms", "scheduler.policy"),
    *("scheduler.async_scheduling", "offload.kv", "offload.kv_offloading_size", "offload.kv_files"),
)
"""Options of `LLM` that have no effect here, and get no flags."""
ROWS = ("name", "runs in", "options", "perplexity", "loss", "bits per byte")

Options = Annotated[
    str | None,
    typer.Option(
        "--config",
        metavar="FILE|JSON",
        help="More options of MODEL: a .yaml or .json file, or JSON. Flags override it.",
    ),
]
AgainstOptions = Annotated[
    str | None,
    typer.Option(
        "--against-config",
        metavar="FILE|JSON",
        help="""Options of the reference, such as '{"dtype": "bf16"}'. Without --against it is MODEL itself.""",
    ),
]


def command(ctx: typer.Context) -> None:
    """Measure how well a model predicts a text."""
    run_command(make_command(), ctx, ctx.args)


def make_command() -> Any:
    """The command with all its flags."""
    from outpace.cli.flags import llm_flags, with_flags

    return with_flags(_eval, [flag for flag in llm_flags() if flag.path not in NO_EFFECT])


def _eval(
    model: Model = None,
    same_model: SameModel = None,
    against: Annotated[str | None, typer.Option(metavar="MODEL", help=f"A reference. {KINDS}.")] = None,
    against_config: AgainstOptions = None,
    text: Annotated[
        Path | None, typer.Option(metavar="FILE", help="A text file in UTF-8.", show_default="a built-in text")
    ] = None,
    max_tokens: Annotated[int | None, typer.Option(help="Most tokens of the text.", show_default="all")] = None,
    window: Annotated[
        int | None, typer.Option(help="Tokens that the model sees at once.", show_default="1024, or its positions")
    ] = None,
    stride: Annotated[
        int | None, typer.Option(help="Tokens from one window to the next.", show_default="no overlap")
    ] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write everything into this file.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw the loss of each window into this .png file.")] = None,
    config: Options = None,
    *,
    flags: Mapping[str, Any],
) -> None:
    """Measure how well a model predicts a text (perplexity), and how close it is to another model (--against).

    The model runs as `outpace serve` runs it. Two models are loaded one after the other. The flags are options of
    MODEL; the reference has defaults, on the same device, and what --against-config says.
    """
    from outpace.cli.flags import llm_flags, override
    from outpace.config import LLMConfig

    files = ResultFiles(json_file, plot)
    options = override(_options(config, "config"), flags, llm_flags(), LLMConfig)
    others = None if against_config is None else _options(against_config, "against-config")

    from outpace.quality import evaluate  # imported late: this takes seconds, and bad options should fail first
    from outpace.quality.plot import plot as draw

    with _bar(Console(stderr=True)) as report:
        found = evaluate(
            one_model(model, same_model),
            against=against,
            against_options=others,
            text=text,
            max_tokens=max_tokens,
            window=window,
            stride=stride,
            progress=report,
            **options,
        )
    _show(found)
    files.write(found.as_dict(), lambda path: draw(found, path))


def _options(given: str | None, flag: str) -> dict[str, Any]:
    """Options from a file, or written as JSON."""
    if given is None:
        return {}
    if not given.lstrip().startswith("{"):
        return read_config(Path(given))
    try:
        content = json.loads(given)
    except ValueError as error:
        raise ConfigError(f'{flag}: {given!r:.80} is not JSON ({error}); write it as \'{{"dtype": "bf16"}}\'') from None
    return {str(name).replace("-", "_"): value for name, value in content.items()}


@contextmanager
def _bar(console: Console) -> "Iterator[Report]":
    """On a terminal a progress bar per model, which ends before the next model loads; elsewhere a line per model."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    shown: list[Progress] = []

    def report(what: str, done: int, total: int) -> None:
        if not console.is_terminal:
            if not done:
                line = f"{what}: {total:,} tokens" if total else what
                console.print(line, highlight=False, markup=False, soft_wrap=True)
            return
        if total and not shown:
            shown.append(Progress(*columns, console=console, transient=True))
            shown[0].add_task(what)
            shown[0].start()
        if shown:
            shown[0].update(shown[0].task_ids[0], completed=done, total=total)
        if shown and done == total:
            shown.pop().stop()

    try:
        yield report
    finally:
        for each in shown:
            each.stop()


def _show(found: "Evaluation") -> None:
    from outpace.bench.tables import table

    both = [each for each in (found.model, found.against) if each is not None]
    title = f"{found.text}: {found.model.tokens:,} tokens, windows of {found.window:,}"
    rows = zip(ROWS, *map(_column, both), strict=True)
    show(table(title, ("", "model", "against")[: 1 + len(both)], rows, justify="left"), *found.sentences)


def _column(found: "Perplexity") -> tuple[str, ...]:
    from outpace.quality.report import number

    bits = found.bits_per_byte
    return (
        found.model,
        f"{found.dtype} on {found.device}",
        found.options or "none",
        number(found.perplexity),
        f"{found.nats:.4f} nats per token",
        "unknown" if bits is None else f"{bits:.4f}",
    )
