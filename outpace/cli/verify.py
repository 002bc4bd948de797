"""`outpace verify`: prove on the user's own model that fused layers change nothing."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer
from rich.console import Console
from rich.table import Table

from outpace.cli.model import Model, SameModel, one_model
from outpace.cli.talk import Device, DType

if TYPE_CHECKING:
    from outpace.verify import PromptReport, Report


def command(
    model: Model = None,
    same_model: SameModel = None,
    dtype: DType = None,
    device: Device = None,
    tp: Annotated[
        int, typer.Option("--tensor-parallel-size", "--tp", min=1, help="Compare so many ranks with one, instead.")
    ] = 1,
    plot: Annotated[Path | None, typer.Option(help="Draw the error of each layer into this .png file.")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write everything into this file.")] = None,
) -> None:
    """Check that fused layers do not change a model. Hidden states, logits and greedy tokens are compared.

    This loads the model and runs it several times, which can take minutes on a CPU. With --tp, several ranks are
    compared with one instead: log-probabilities of prompts, and greedy tokens.
    """
    from outpace.errors import InputError
    from outpace.verify import verify

    if tp > 1:
        if plot is not None:
            raise InputError("plot: with --tp no layers are compared, so there is nothing to draw; leave it out")
        _compare_ranks(one_model(model, same_model), tp, json_file, dtype=dtype, device=device)
    _check_files(plot, json_file)
    with _progress(Console(stderr=True)) as say:
        report = verify(one_model(model, same_model), progress=say, dtype=dtype, device=device)
    _show(Console(), report)
    _write(report, plot, json_file)
    raise typer.Exit(0 if report.passed else 1)


def _compare_ranks(model: str | None, ranks: int, json_file: Path | None, **options: str | None) -> NoReturn:
    """Several ranks beside one."""
    from outpace.verify import verify_ranks

    _check_files(None, json_file)
    with _progress(Console(stderr=True)) as say:
        report = verify_ranks(model, ranks, progress=say, **options)
    where, console, tokens = report.first_difference, Console(), " + ".join(map(str, report.lengths))
    same = "equal" if where is None else f"first differ at token {where[1] + 1} of prompt {where[0] + 1}"
    console.print(
        f"{report.model} in {report.dtype} on {report.device}, {ranks} ranks beside one\n"
        f"log-probabilities of the prompts ({tokens} tokens): differ by {report.error:.1e} at most "
        f"(allowed {report.allowed:g})\n"
        f"{report.new_tokens} greedy tokens of each: {same}{'' if report.tokens_count else '; they do not count'}",
        highlight=False,
        soft_wrap=True,
    )
    console.print("[bold green]PASS[/]" if report.passed else "[bold red]FAIL[/]")
    if json_file is not None:
        json_file.write_text(json.dumps(report.as_dict(), indent=2) + "\n")
    raise typer.Exit(0 if report.passed else 1)


@contextmanager
def _progress(console: Console) -> Iterator[Callable[[str], None]]:
    """Shows each step: in one line that moves on a terminal, in a line each elsewhere."""
    if console.is_terminal:
        with console.status("starting") as status:
            yield status.update
    else:
        yield lambda step: console.print(step, highlight=False, markup=False)


def _check_files(plot: Path | None, json_file: Path | None) -> None:
    """What cannot be written is said before minutes have gone into it."""
    from outpace.errors import InputError
    from outpace.verify.plot import check_plot

    for path in (plot, json_file):
        if path is not None and not path.parent.is_dir():
            raise InputError(f"{path}: there is no folder {path.parent}; make it first")
    if plot is not None:
        check_plot(plot)


def _show(console: Console, report: "Report") -> None:
    layers = f"{report.fused_layers} fused layers" if report.fused_layers else "its own layers over pages"
    table = Table(title=f"{report.model} in {report.dtype} on {report.device}, {layers}", title_justify="left")
    for column in ("prompts", "tokens", "logits error", "first layer off", "greedy tokens equal"):
        table.add_column(column)
    for prompts in report.prompts:
        table.add_row(*_row(prompts))
    console.print(table)
    console.print(report.rule + ("" if report.tokens_count else "; greedy tokens do not count"), highlight=False)
    console.print("[bold green]PASS[/]" if report.passed else "[bold red]FAIL[/]")


def _row(prompts: "PromptReport") -> tuple[str, ...]:
    wrong, where = prompts.first_divergence, prompts.first_difference
    differ = "yes" if where is None else f"no: token {where[1] + 1} of prompt {where[0] + 1}"
    return (
        prompts.name,
        " + ".join(map(str, prompts.lengths)),
        "none" if prompts.logits is None else f"{prompts.logits.error:.1e}",
        "none" if wrong is None else f"{wrong.name}: {wrong.error:.1e} (allowed {wrong.allowed:.1e})",
        f"{differ} ({prompts.new_tokens} new)" if prompts.new_tokens else "it does not generate",
    )


def _write(report: "Report", plot: Path | None, json_file: Path | None) -> None:
    from outpace.verify.plot import plot as draw

    if plot is not None:
        draw(report, plot)
    if json_file is not None:
        json_file.write_text(json.dumps(report.as_dict(), indent=2) + "\n")
