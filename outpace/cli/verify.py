"""`outpace verify`: checks on the user's own model that fused layers change nothing."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from outpace.cli.model import Model, SameModel, one_model
from outpace.cli.results import ResultFiles, progress, show
from outpace.cli.talk import Device, DType
from outpace.errors import InputError

if TYPE_CHECKING:
    from outpace.verify import PromptReport, RanksReport, Report

COLUMNS = ("prompts", "tokens", "logits error", "first layer off", "greedy tokens equal")


def command(
    model: Model = None,
    same_model: SameModel = None,
    dtype: DType = None,
    device: Device = None,
    tp: Annotated[
        int, typer.Option("--tensor-parallel-size", "--tp", min=1, help="Compare this many ranks with one, instead.")
    ] = 1,
    plot: Annotated[Path | None, typer.Option(help="Draw the error of each layer into this .png file.")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write everything to this file.")] = None,
) -> None:
    """Check that fused layers do not change a model. Hidden states, logits and greedy tokens are compared.

    This loads the model and runs it several times, which can take minutes on a CPU. With --tp, several ranks are
    compared with one instead: log-probabilities of prompts, and greedy tokens.
    """
    name = one_model(model, same_model)
    if tp > 1 and plot is not None:
        raise InputError("plot: with --tp no layers are compared, so there is nothing to draw; remove it")
    files = ResultFiles(json_file, plot)
    from outpace.verify import RanksReport, verify, verify_ranks
    from outpace.verify.plot import plot as draw

    with progress() as say:
        options: dict[str, Any] = {"progress": say, "dtype": dtype, "device": device}
        report = verify_ranks(name, tp, **options) if tp > 1 else verify(name, **options)
    if isinstance(report, RanksReport):
        _show_ranks(report)
        files.write(report.as_dict())
    else:
        _show(report)
        files.write(report.as_dict(), lambda path: draw(report, path))
    show("[bold green]PASS[/]" if report.passed else "[bold red]FAIL[/]")
    raise typer.Exit(0 if report.passed else 1)


def _show_ranks(report: "RanksReport") -> None:
    where, tokens = report.first_difference, " + ".join(map(str, report.lengths))
    same = "equal" if where is None else f"first differ at token {where[1] + 1} of prompt {where[0] + 1}"
    show(
        f"{report.model} in {report.dtype} on {report.device}, {report.ranks} ranks beside one",
        f"log-probabilities of the prompts ({tokens} tokens): differ by {report.error:.1e} at most "
        f"(allowed {report.allowed:g})",
        f"{report.new_tokens} greedy tokens of each: {same}{'' if report.tokens_count else '; they do not count'}",
    )


def _show(report: "Report") -> None:
    from outpace.bench.tables import table

    layers = f"{report.fused_layers} fused layers" if report.fused_layers else "its own layers over pages"
    title = f"{report.model} in {report.dtype} on {report.device}, {layers}"
    rule = report.rule + ("" if report.tokens_count else "; greedy tokens do not count")
    show(table(title, COLUMNS, map(_row, report.prompts), justify="left"), rule)


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
