"""`outpace bench throughput|latency|pipeline|serve`: measure a model on this machine, or a server."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from outpace.bench.workload import COUNT, SEED, Workload
from outpace.cli import bench_serve
from outpace.cli.bench_serve import Dataset, InputLen, Json, Lengths, OutputLen, Plot, Seed, WorkloadKind
from outpace.cli.model import DEFAULT, KINDS, SameModel, one_model
from outpace.cli.results import ResultFiles, progress, show, write_json
from outpace.cli.talk import Device, DType, given
from outpace.errors import InputError

if TYPE_CHECKING:
    from outpace.bench.subject import Subject

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Measure a model or a server. Figures of a model stand beside the limit of this machine.",
)

Model = Annotated[
    str | None,
    typer.Argument(
        metavar="MODEL",
        help=f"{KINDS}, or a shape with random weights: llama-3.1-8b, llama-3.1-70b, llama-3.1-405b, llama-3.2-1b, "
        "qwen3-0.6b, qwen3-30b-a3b, qwen3-235b-a22b, mixtral-8x7b, gpt-oss-20b, deepseek-v2-lite.",
        show_default=DEFAULT,
    ),
]
Random = Annotated[bool, typer.Option("--random", help="Use random weights for the config.json of a folder.")]
MaxSeqs = Annotated[int | None, typer.Option("--max-num-seqs", help="Most requests in a step.")]
MaxTokens = Annotated[int | None, typer.Option("--max-num-batched-tokens", help="Token budget of a step.")]
MaxLen = Annotated[int | None, typer.Option("--max-model-len", help="Most tokens of a request.")]
Eager = Annotated[bool, typer.Option("--enforce-eager", help="No CUDA graphs.")]
Deterministic = Annotated[bool, typer.Option("--deterministic", help="Tokens do not depend on the batch.")]
Prefixes = Annotated[bool, typer.Option("--prefix-caching/--no-prefix-caching", help="Share equal prefixes.")]
OF_MODELS = (
    *("random", "dtype", "device", "max_num_batched_tokens", "max_model_len", "enforce_eager", "deterministic"),
)
"""Options that are passed on to the model, by the names of their parameters."""
OF_SPLITFUSE = ("decoders", "decoder_prompt", "long_prompt", "num_long")
OF_WORKLOADS = (
    *("concurrency", "profile", "dataset", "input_len", "output_len", "workload", "num_prompts", "seed"),
    *("max_num_seqs", "max_model_len"),
)

app.command("serve")(bench_serve.command)


@app.command("throughput")
def throughput(
    context: typer.Context,
    model: Model = None,
    same_model: SameModel = None,
    num_prompts: Annotated[int | None, typer.Option(min=1, help="Requests.", show_default=str(COUNT))] = None,
    workload: WorkloadKind = Lengths.uniform,
    input_len: InputLen = None,
    output_len: OutputLen = None,
    dataset: Dataset = None,
    seed: Seed = SEED,
    concurrency: Annotated[str | None, typer.Option(help="Requests in flight, a run for each: 1,4,16,64,256.")] = None,
    random: Random = False,
    dtype: DType = None,
    device: Device = None,
    max_num_seqs: MaxSeqs = None,
    max_num_batched_tokens: MaxTokens = None,
    max_model_len: MaxLen = None,
    enforce_eager: Eager = False,
    deterministic: Deterministic = False,
    prefix_caching: Prefixes = False,
    output_json: Json = None,
    plot: Plot = None,
    profile: Annotated[Path | None, typer.Option(help="Profile decode steps into this .json file.")] = None,
    splitfuse: Annotated[
        bool, typer.Option("--splitfuse", help="Measure decodes beside long prompts, chopped and whole.")
    ] = False,
    decoders: Annotated[int, typer.Option(help="With --splitfuse: sequences that decode.")] = 32,
    decoder_prompt: Annotated[int, typer.Option(help="With --splitfuse: tokens of their prompts.")] = 64,
    long_prompt: Annotated[int, typer.Option(help="With --splitfuse: tokens of a long prompt.")] = 2600,
    num_long: Annotated[int, typer.Option(help="With --splitfuse: long prompts that arrive.")] = 24,
) -> None:
    """Measure tokens/s and latencies of many requests. All start at once; --concurrency limits how many run."""
    files, levels = ResultFiles(output_json, plot, profile), _numbers("concurrency", concurrency)
    options = _options(context, "max_num_seqs", "prefix_caching")
    _refuse_others(context, splitfuse=splitfuse)
    if splitfuse:
        sizes = {"decoders": decoders, "decoder_prompt": decoder_prompt, "prompt": long_prompt, "num_prompts": num_long}
        _splitfuse(one_model(model, same_model), sizes, options, files)
        return
    work = Workload(input_len, output_len, workload is Lengths.sharegpt, dataset)
    from outpace.bench.plot import plot_throughput
    from outpace.bench.profiling import profile_decode
    from outpace.bench.tables import profile_table, sweep_table, throughput_table
    from outpace.bench.throughput import sweep
    from outpace.bench.throughput import throughput as measure

    count, what, profiled = num_prompts or COUNT, work.describe(), None
    with _started(one_model(model, same_model), options) as (subject, say):
        source = work.source(subject.vocab_size, subject.tokenize, subject.llm.engine.max_model_len)
        if levels is None:
            say(f"{count} warm-up requests, then {count} others")
            points = [measure(subject, source.draw(count, seed), source.warm_up(count, seed))]
        else:
            points = list(sweep(subject, source, levels, seed, num_prompts, say))
        if profile is not None:
            say("profiling decode steps")
            profiled = profile_decode(subject, source.draw(count, seed))
        cost, speed = subject.cost, subject.speed
    show(throughput_table(points[0], what) if levels is None else sweep_table(points, what))
    for point in points:
        point["outpace"]["options"] = {**given(**options), "seed": seed, "workload": what}
    found = points[0] if levels is None else {"points": points}
    files.write(found, lambda path: plot_throughput(points, cost, speed, path))
    if profiled is not None:
        show(profile_table(profiled))
        write_json(profile, profiled)


@app.command("latency")
def latency(
    context: typer.Context,
    model: Model = None,
    same_model: SameModel = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Requests that run together.")] = 1,
    input_len: Annotated[int, typer.Option(min=1, help="Prompt tokens.")] = 128,
    output_len: Annotated[int, typer.Option(min=2, help="New tokens.")] = 256,
    iters: Annotated[int, typer.Option(min=1, help="Runs, whose median counts, after two warm-ups.")] = 3,
    random: Random = False,
    dtype: DType = None,
    device: Device = None,
    max_num_batched_tokens: MaxTokens = None,
    max_model_len: MaxLen = None,
    enforce_eager: Eager = False,
    deterministic: Deterministic = False,
    output_json: Json = None,
) -> None:
    """Measure the latency of one request alone: time to the first token, and tokens/s after it."""
    files, options = ResultFiles(output_json), _options(context)
    from outpace.bench.latency import latency as measure
    from outpace.bench.tables import latency_table

    with _started(one_model(model, same_model), {**options, "max_num_seqs": batch_size}) as (subject, say):
        say(f"two warm-ups and {iters} runs, of {output_len} tokens and of one")
        found = measure(subject, batch_size=batch_size, input_len=input_len, output_len=output_len, iters=iters)
    show(latency_table(found))
    found["outpace"]["options"] = given(**options)
    files.write(found)


@app.command("pipeline")
def pipeline(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help=f"{KINDS}, or a shape with random weights: small, tiny, ...")
    ] = "small",
    pp: Annotated[int, typer.Option("--pp", help="Stages, one process each.")] = 2,
    micro_batches: Annotated[int, typer.Option(help="Micro-batches: prompts as long as a step.")] = 16,
    tokens: Annotated[int, typer.Option(help="Tokens of a micro-batch.")] = 128,
    turns: Annotated[int, typer.Option(help="Runs of one process and of the pipeline; the best of each count.")] = 3,
    threads: Annotated[int, typer.Option(help="Threads of each process on a CPU.")] = 1,
    layers: Annotated[str | None, typer.Option(help="Layers of each stage: 4,4. Default: balanced.")] = None,
    random: Random = False,
    dtype: DType = None,
    device: Device = None,
    output_json: Json = None,
    plot: Annotated[Path | None, typer.Option(help="Draw when each stage computed into this .png file.")] = None,
) -> None:
    """Measure the speed-up of a pipeline over one process, and when each of its stages computes."""
    files = ResultFiles(output_json, plot)
    from outpace.bench.pipeline import Experiment
    from outpace.bench.pipeline import pipeline as measure
    from outpace.bench.plot import plot_pipeline
    from outpace.bench.tables import pipeline_table

    experiment = Experiment(pp, micro_batches, tokens, turns, threads, _numbers("layers", layers))
    with progress() as say:
        found = measure(model, experiment, random=random, say=say, dtype=dtype, device=device)
    show(pipeline_table(found))
    files.write(found, lambda path: plot_pipeline(found, path))


def _splitfuse(model: str | None, sizes: dict[str, int], options: dict[str, Any], files: ResultFiles) -> None:
    from outpace.bench.plot import plot_splitfuse
    from outpace.bench.splitfuse import Experiment, splitfuse
    from outpace.bench.tables import splitfuse_table

    experiment = Experiment(**sizes, budget=options.pop("max_num_batched_tokens"))
    with _started(model, {**options, **experiment.options()}) as (subject, say):
        say("decodes beside long prompts, chopped and whole")
        found = splitfuse(subject, experiment)
    show(splitfuse_table(found))
    found["outpace"]["options"] = given(**options)
    files.write(found, lambda path: plot_splitfuse(found, path))


@contextmanager
def _started(model: str | None, options: dict[str, Any]) -> "Iterator[tuple[Subject, Callable[[str], None]]]":
    """A started model, and a function that shows progress."""
    from outpace.bench.subject import started

    with progress() as say:
        say("starting the model")
        with started(model, **options) as subject:
            yield subject, say


def _options(context: typer.Context, *more: str) -> dict[str, Any]:
    """Options of `bench.subject.started`; None: it is not set."""
    found = {name: context.params[name] for name in (*OF_MODELS, *more)}
    return {**found, "enforce_eager": found["enforce_eager"] or None}


def _numbers(name: str, text: str | None) -> tuple[int, ...] | None:
    """1,4,16 as numbers."""
    parts = [] if text is None else text.split(",")
    if not all(part.strip().isdecimal() and int(part) for part in parts):
        raise InputError(f"{name}: expected numbers like 1,4,16, got {text!r}")
    return tuple(map(int, parts)) or None


def _refuse_others(context: typer.Context, *, splitfuse: bool) -> None:
    """Refuse options that would have no effect in this measurement."""
    for name in OF_WORKLOADS if splitfuse else OF_SPLITFUSE:
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            where = "not" if splitfuse else "only"
            raise InputError(f"{name.replace('_', '-')}: {where} with --splitfuse; remove it")
