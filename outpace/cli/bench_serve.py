"""`outpace bench serve`: load on any OpenAI-compatible server, and what comes of it."""

from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from outpace.bench.workload import COUNT, END_ID, SEED, Source, Workload
from outpace.cli.results import Files, progress, write_json
from outpace.cli.talk import ApiKey, base_of
from outpace.errors import InputError

if TYPE_CHECKING:
    from outpace.bench.load import Pace
    from outpace.bench.serve import Figures, Server

WARM_UPS = 4


class Lengths(StrEnum):
    """How lengths are drawn."""

    UNIFORM = "uniform"
    SHAREGPT = "sharegpt"


class Route(StrEnum):
    """Which route is asked."""

    COMPLETIONS = "completions"
    CHAT = "chat"


class Arrivals(StrEnum):
    """How requests arrive at a rate."""

    POISSON = "poisson"
    FIXED = "fixed"


def command(
    url: Annotated[str, typer.Option(help="The server: http://host:port.")],
    model: Annotated[
        str | None,
        typer.Option("--model", "-m", metavar="MODEL", help="One of its models.", show_default="its first"),
    ] = None,
    api_key: ApiKey = None,
    endpoint: Annotated[Route, typer.Option(help="completions (prompts as token ids) or chat.")] = Route.COMPLETIONS,
    num_prompts: Annotated[int, typer.Option(min=1, help="Requests, of each rate.")] = COUNT,
    request_rate: Annotated[float, typer.Option(help="Requests a second; inf: all at once.")] = float("inf"),
    arrival: Annotated[Arrivals, typer.Option(help="At a rate: at random, or at equal distances.")] = Arrivals.POISSON,
    max_concurrency: Annotated[int | None, typer.Option(min=1, help="Most requests in flight (a closed loop).")] = None,
    sweep: Annotated[str | None, typer.Option(help="Rates, a run for each: 1,2,4,8,inf.")] = None,
    workload: Annotated[Lengths, typer.Option(help="How lengths are drawn.")] = Lengths.UNIFORM,
    input_len: Annotated[int | None, typer.Option(help="Prompt tokens of every request.")] = None,
    output_len: Annotated[int | None, typer.Option(help="New tokens of every request.")] = None,
    dataset: Annotated[Path | None, typer.Option(help="ShareGPT's JSON, or JSON lines: prompt, output_len.")] = None,
    tokenizer: Annotated[Path | None, typer.Option(help="For a dataset.", show_default="the server's own")] = None,
    vocab_size: Annotated[int, typer.Option(min=11, help="Prompts have token ids below this.")] = END_ID,
    seed: Annotated[int, typer.Option(help="Of the draw.")] = SEED,
    num_warmups: Annotated[int, typer.Option(min=0, help="Other requests beforehand.")] = WARM_UPS,
    ignore_eos: Annotated[bool, typer.Option(help="Answers of full length (not in OpenAI's own API).")] = True,
    timeout: Annotated[float, typer.Option(help="Seconds for one request.")] = 600.0,
    goodput: Annotated[
        list[str] | None, typer.Option(help="Count requests within: ttft:MS tpot:MS e2el:MS.", show_default=False)
    ] = None,
    more: Annotated[list[str] | None, typer.Argument(hidden=True)] = None,
    output_json: Annotated[Path | None, typer.Option(help="Write every figure into this file.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw the result into this .png file.")] = None,
) -> None:
    """Load on an OpenAI-compatible server: time to the first token, tokens/s, goodput, at a rate or so many at a time.

    The server may be Outpace or any other. Prompts are the ones of the other benchmarks, as token ids where the server
    takes them.
    """
    from outpace.bench.load import Pace, Target
    from outpace.bench.serve import find, parse_goodput, source_of

    if more and not goodput:
        raise InputError(f"{more[0]}: there is nothing to give but options; see --help")
    limits = parse_goodput([*(goodput or ()), *(more or ())])
    paces = [Pace(rate, arrival.value, max_concurrency) for rate in _rates(sweep, request_rate)]
    work = Workload(input_len=input_len, output_len=output_len, chat=workload is Lengths.SHAREGPT, dataset=dataset)
    files = Files(output_json, plot)
    headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
    target = Target(base_of(url), endpoint.value, headers, timeout)
    with progress() as say:
        say(f"asking {target.base}")
        server = find(target, model, {"ignore_eos": True} if ignore_eos else {})
        source = source_of(server, work, _tokenize(tokenizer), vocab_size)
        points = _points(server, source, paces, num_prompts, num_warmups, limits, seed, say)
    _report(points, work, files, is_sweep=sweep is not None)


def _points(
    server: "Server",
    source: Source,
    paces: "list[Pace]",
    count: int,
    warm_ups: int,
    limits: dict[str, float] | None,
    seed: int,
    say: Callable[[str], None],
) -> "list[Figures]":
    """The figures of each pace. Each has prompts of its own: no cache knows them from the run before."""
    from outpace.bench.serve import measure

    points = []
    for number, pace in enumerate(paces):
        items = source.draw(count, seed + 2 * number)
        warm_up = source.warm_up(max(warm_ups, 1), seed + 2 * number)[:warm_ups]
        label = f"{pace.rate:g} requests/s"
        found = measure(
            server, items, pace, warm_up=warm_up, goodput=limits, seed=seed,
            watch=lambda done, label=label: say(f"{label}: {done} of {count}") if done % 16 == 0 else None,  # type: ignore[misc]
        )  # fmt: skip
        say(f"{label}: {found['output_throughput']:,.0f} output tokens/s")
        points.append(found)
    return points


def _report(points: "list[Figures]", work: Workload, files: Files, *, is_sweep: bool) -> None:
    from outpace.bench.serve_report import plot_run, plot_sweep, run_table, sweep_table

    what = work.describe()
    Console().print(sweep_table(points, what) if is_sweep else run_table(points[0], what))
    failed = [error for point in points for error in point["errors"] if error]
    if failed:
        Console(stderr=True).print(f"the first that failed: {failed[0]}", markup=False, highlight=False)
    for point in points:
        point["workload"] = what
    write_json(files.json, {"points": points} if is_sweep else points[0])
    if files.plot is not None:
        (plot_sweep(points, files.plot) if is_sweep else plot_run(points[0], files.plot))


def _rates(sweep: str | None, one: float) -> list[float]:
    """The rates of a sweep, or the only one."""
    try:
        rates = [one] if sweep is None else [float(part) for part in sweep.split(",")]
    except ValueError:
        raise InputError(f"sweep: expected rates like 1,2,4,8, got {sweep!r}") from None
    if not all(rate > 0 for rate in rates):
        raise InputError(f"{'request-rate' if sweep is None else 'sweep'}: a rate must be above 0")
    return rates


def _tokenize(folder: Path | None) -> Callable[[str], list[int]] | None:
    if folder is None:
        return None
    from outpace.loading.read_tokenizer import load_tokenizer

    found: Any = load_tokenizer(str(folder))
    if found is None:
        raise InputError(f"tokenizer: {folder} has none")
    return lambda text: list(found(text)["input_ids"])
