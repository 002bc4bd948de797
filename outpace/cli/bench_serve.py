"""`outpace bench serve`: put load on any OpenAI-compatible server, and measure it."""

import itertools
from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from outpace.bench.workload import COUNT, END_ID, SEED, Workload
from outpace.cli.results import ResultFiles, progress, show
from outpace.cli.talk import ApiKey, base_of, headers_of
from outpace.errors import InputError

WARM_UPS = 4

Lengths = StrEnum("Lengths", ["uniform", "sharegpt"])
Route = StrEnum("Route", ["completions", "chat"])
Arrivals = StrEnum("Arrivals", ["poisson", "fixed"])
WorkloadKind = Annotated[Lengths, typer.Option(help="How lengths are drawn.")]
InputLen = Annotated[int | None, typer.Option(help="Prompt tokens of every request.")]
OutputLen = Annotated[int | None, typer.Option(help="New tokens of every request.")]
Dataset = Annotated[Path | None, typer.Option(help="ShareGPT's JSON, or JSON lines: prompt, output_len.")]
Seed = Annotated[int, typer.Option(help="Seed of the drawn requests.")]
Json = Annotated[Path | None, typer.Option("--output-json", help="Write every figure to this file.")]
Plot = Annotated[Path | None, typer.Option(help="Draw the result into this .png file.")]


def command(
    url: Annotated[str, typer.Option(help="The server: http://host:port.")],
    model: Annotated[
        str | None,
        typer.Option("--model", "-m", metavar="MODEL", help="One of its models.", show_default="its first"),
    ] = None,
    api_key: ApiKey = None,
    endpoint: Annotated[Route, typer.Option(help="completions (prompts as token ids) or chat.")] = Route.completions,
    num_prompts: Annotated[int, typer.Option(min=1, help="Requests at each rate.")] = COUNT,
    request_rate: Annotated[float, typer.Option(help="Requests per second; inf: all at once.")] = float("inf"),
    arrival: Annotated[Arrivals, typer.Option(help="At a rate: at random, or at equal distances.")] = Arrivals.poisson,
    max_concurrency: Annotated[int | None, typer.Option(min=1, help="Most requests in flight (a closed loop).")] = None,
    sweep: Annotated[str | None, typer.Option(help="Rates, a run for each: 1,2,4,8,inf.")] = None,
    workload: WorkloadKind = Lengths.uniform,
    input_len: InputLen = None,
    output_len: OutputLen = None,
    dataset: Dataset = None,
    tokenizer: Annotated[Path | None, typer.Option(help="For a dataset.", show_default="the server's own")] = None,
    vocab_size: Annotated[int, typer.Option(min=11, help="Prompts have token ids below this.")] = END_ID,
    seed: Seed = SEED,
    num_warmups: Annotated[int, typer.Option(min=0, help="Warm-up requests before each run.")] = WARM_UPS,
    ignore_eos: Annotated[bool, typer.Option(help="Answers of full length (not in OpenAI's own API).")] = True,
    timeout: Annotated[float, typer.Option(help="Seconds per request.")] = 600.0,
    goodput: Annotated[
        list[str] | None, typer.Option(help="Count requests within: ttft:MS tpot:MS e2el:MS.", show_default=False)
    ] = None,
    more: Annotated[list[str] | None, typer.Argument(hidden=True)] = None,
    output_json: Json = None,
    plot: Plot = None,
) -> None:
    """Measure latencies, tokens/s and goodput of an OpenAI-compatible server, at a rate or a concurrency.

    The server may be Outpace or any other. Prompts are those of the other benchmarks, as token ids where the server
    takes them.
    """
    from outpace.bench import figures
    from outpace.bench.load import Pace, Target
    from outpace.bench.plot import plot_served
    from outpace.bench.serve import find, measure, parse_goodput, source_of
    from outpace.bench.tables import served_table

    if more and not goodput:
        raise InputError(f"{more[0]}: this command takes only options; see --help")
    limits, rates = parse_goodput([*(goodput or ()), *(more or ())]), _rates(sweep, request_rate)
    work = Workload(input_len, output_len, workload is Lengths.sharegpt, dataset)
    files, what, is_sweep = ResultFiles(output_json, plot), work.describe(), sweep is not None
    target = Target(base_of(url), endpoint.value, headers_of(api_key), timeout)
    with progress() as say:
        say(f"asking {target.base}")
        server = find(target, model, {"ignore_eos": True} if ignore_eos else {})
        source, draws = source_of(server, work, _tokenize(tokenizer), vocab_size), itertools.count(seed, 2)

        def one(rate: float) -> dict[str, Any]:
            draw = next(draws)  # new prompts for each rate, so that none is a cache hit
            warm_up = source.warm_up(max(num_warmups, 1), draw)[:num_warmups]

            def watch(done: int) -> None:
                if done % 16 == 0:
                    say(f"{rate:g} requests/s: {done} of {num_prompts}")

            items, pace = source.draw(num_prompts, draw), Pace(rate, arrival.value, max_concurrency)
            found = measure(server, items, pace, warm_up=warm_up, goodput=limits, seed=seed, watch=watch)
            return {**found, "workload": what}

        points = list(figures.sweep(rates, one, "requests/s", say))
    show(served_table(points, what, is_sweep=is_sweep))
    failed = next((error for point in points for error in point["errors"] if error), None)
    if failed is not None:
        Console(stderr=True).print(f"the first request that failed: {failed}", markup=False, highlight=False)
    files.write({"points": points} if is_sweep else points[0], lambda to: plot_served(points, to, is_sweep=is_sweep))


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
