"""`outpace bench throughput|latency|pipeline|serve`: figures of a model on this machine, or of a server."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from outpace.bench.workload import COUNT, SEED, Source, Workload
from outpace.cli import bench_serve
from outpace.cli.bench_serve import Lengths
from outpace.cli.model import DEFAULT, KINDS, SameModel, one_model
from outpace.cli.results import Files, progress, write_json
from outpace.cli.talk import Device, DType
from outpace.errors import InputError

if TYPE_CHECKING:
    from outpace.bench.splitfuse import Experiment
    from outpace.bench.subject import Subject

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Measure a model or a server. Figures of a model are beside the limit of this machine.",
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
Random = Annotated[bool, typer.Option("--random", help="Random weights for the config.json of a folder.")]
MaxSeqs = Annotated[int | None, typer.Option("--max-num-seqs", help="Most requests in a step.")]
MaxTokens = Annotated[int | None, typer.Option("--max-num-batched-tokens", help="Most tokens in a step.")]
MaxLen = Annotated[int | None, typer.Option("--max-model-len", help="Most tokens of a request.")]
Eager = Annotated[bool, typer.Option("--enforce-eager", help="No CUDA graphs.")]
Deterministic = Annotated[bool, typer.Option("--deterministic", help="No token depends on its batch.")]
Prefixes = Annotated[bool, typer.Option("--prefix-caching/--no-prefix-caching", help="Share equal prefixes.")]
Json = Annotated[Path | None, typer.Option("--output-json", help="Write every figure into this file.")]
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
    workload: Annotated[Lengths, typer.Option(help="How lengths are drawn.")] = Lengths.UNIFORM,
    input_len: Annotated[int | None, typer.Option(help="Prompt tokens of every request.")] = None,
    output_len: Annotated[int | None, typer.Option(help="New tokens of every request.")] = None,
    dataset: Annotated[Path | None, typer.Option(help="ShareGPT's JSON, or JSON lines: prompt, output_len.")] = None,
    seed: Annotated[int, typer.Option(help="Of the draw.")] = SEED,
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
    plot: Annotated[Path | None, typer.Option(help="Draw the result into this .png file.")] = None,
    profile: Annotated[Path | None, typer.Option(help="Profile decode steps into this .json file.")] = None,
    splitfuse: Annotated[bool, typer.Option("--splitfuse", help="Decodes beside long prompts, in two ways.")] = False,
    decoders: Annotated[int, typer.Option(help="With --splitfuse: sequences that decode.")] = 32,
    decoder_prompt: Annotated[int, typer.Option(help="With --splitfuse: tokens of their prompts.")] = 64,
    long_prompt: Annotated[int, typer.Option(help="With --splitfuse: tokens of a long prompt.")] = 2600,
    num_long: Annotated[int, typer.Option(help="With --splitfuse: long prompts that arrive.")] = 24,
) -> None:
    """Many requests at once (or, with --concurrency, so many at a time): tokens/s, latencies, and their limit."""
    model = one_model(model, same_model)
    files = Files(output_json, plot, profile)
    options = _llm_options(random, dtype, device, max_num_batched_tokens, max_model_len, enforce_eager, deterministic)
    options |= {"max_num_seqs": max_num_seqs, "prefix_caching": prefix_caching}
    _refuse_others(context, splitfuse=splitfuse)
    if not splitfuse:
        chat = workload is Lengths.SHAREGPT
        work = Workload(input_len=input_len, output_len=output_len, chat=chat, dataset=dataset)
        _throughput(model, work, num_prompts, seed, _levels("concurrency", concurrency), options, files)
        return
    from outpace.bench.splitfuse import Experiment

    budget = options.pop("max_num_batched_tokens")
    sizes = {"decoders": decoders, "decoder_prompt": decoder_prompt, "prompt": long_prompt, "num_prompts": num_long}
    _splitfuse(model, Experiment(**sizes, budget=budget), options, files)


@app.command("latency")
def latency(
    model: Model = None,
    same_model: SameModel = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Requests that run together.")] = 1,
    input_len: Annotated[int, typer.Option(min=1, help="Prompt tokens.")] = 128,
    output_len: Annotated[int, typer.Option(min=2, help="New tokens.")] = 256,
    iters: Annotated[int, typer.Option(min=1, help="Turns, of which the median counts; two more to warm up.")] = 3,
    random: Random = False,
    dtype: DType = None,
    device: Device = None,
    max_num_batched_tokens: MaxTokens = None,
    max_model_len: MaxLen = None,
    enforce_eager: Eager = False,
    deterministic: Deterministic = False,
    output_json: Json = None,
) -> None:
    """One request alone: time to the first token, tokens/s after it, and their limits."""
    model = one_model(model, same_model)
    files = Files(output_json)
    options = _llm_options(random, dtype, device, max_num_batched_tokens, max_model_len, enforce_eager, deterministic)
    from outpace.bench.latency import latency as measure
    from outpace.bench.subject import started
    from outpace.bench.tables import latency_table

    with progress() as say:
        say("starting the model")
        with started(model, **options, max_num_seqs=batch_size) as subject:
            say(f"two warm-ups and {iters} turns, of {output_len} tokens and of one")
            found = measure(subject, batch_size=batch_size, input_len=input_len, output_len=output_len, iters=iters)
    Console().print(latency_table(found))
    found["outpace"]["options"] = _given(options)
    write_json(files.json, found)


@app.command("pipeline")
def pipeline(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help=f"{KINDS}, or a shape with random weights: small, tiny, ...")
    ] = "small",
    pp: Annotated[int, typer.Option("--pp", help="Stages, a process each.")] = 2,
    micro_batches: Annotated[int, typer.Option(help="Micro-batches: prompts as long as a step.")] = 16,
    tokens: Annotated[int, typer.Option(help="Tokens of a micro-batch.")] = 128,
    turns: Annotated[int, typer.Option(help="Turns of one process and of the pipeline; the best of each count.")] = 3,
    threads: Annotated[int, typer.Option(help="Threads of each process on a CPU.")] = 1,
    layers: Annotated[str | None, typer.Option(help="Layers of each stage: 4,4. Default: balanced.")] = None,
    random: Random = False,
    dtype: DType = None,
    device: Device = None,
    output_json: Json = None,
    plot: Annotated[Path | None, typer.Option(help="Draw when each stage computed into this .png file.")] = None,
) -> None:
    """A pipeline of stages against one process: the speed-up beside the ideal one, and the timeline of the stages."""
    files = Files(output_json, plot)
    from outpace.bench.pipeline import Experiment
    from outpace.bench.pipeline import pipeline as measure
    from outpace.bench.plot import plot_pipeline
    from outpace.bench.tables import pipeline_table

    stages = _levels("layers", layers)
    experiment = Experiment(pp, micro_batches, tokens, turns, threads, None if stages is None else tuple(stages))
    with progress() as say:
        found = measure(model, experiment, random=random, say=say, dtype=dtype, device=device)
    Console().print(pipeline_table(found))
    write_json(files.json, found)
    if files.plot is not None:
        plot_pipeline(found, files.plot)


def _throughput(
    model: str | None,
    workload: Workload,
    num_prompts: int | None,
    seed: int,
    levels: list[int] | None,
    options: dict[str, Any],
    files: Files,
) -> None:
    from outpace.bench.plot import plot_throughput
    from outpace.bench.profiling import profile_decode
    from outpace.bench.subject import started
    from outpace.bench.tables import profile_table, sweep_table, throughput_table

    profiled = None
    with progress() as say:
        say("starting the model")
        with started(model, **options) as subject:
            source = workload.source(subject.vocab_size, subject.tokenize, subject.llm.engine.max_model_len)
            points = list(_points(subject, source, levels, num_prompts, seed, say))
            if files.profile is not None:
                say("profiling decode steps")
                profiled = profile_decode(subject, source.draw(num_prompts or COUNT, seed))
            cost, speed = subject.cost, subject.speed
    console = Console()
    what = workload.describe()
    console.print(throughput_table(points[0], what) if levels is None else sweep_table(points, what))
    for point in points:
        point["outpace"]["options"] = {**_given(options), "seed": seed, "workload": what}
    write_json(files.json, points[0] if levels is None else {"points": points})
    if files.plot is not None:
        plot_throughput(points, cost, speed, files.plot)
    if profiled is not None:
        console.print(profile_table(profiled))
        write_json(files.profile, profiled)


def _points(
    subject: "Subject",
    source: Source,
    levels: list[int] | None,
    num_prompts: int | None,
    seed: int,
    say: Callable[[str], None],
) -> Iterator[dict[str, Any]]:
    """The figures of one run, or of each level of a sweep."""
    from outpace.bench.throughput import sweep, throughput

    if levels is None:
        count = num_prompts or COUNT
        say(f"{count} requests to warm up, and {count} others")
        yield throughput(subject, source.draw(count, seed), source.warm_up(count, seed))
        return
    for level, point in zip(levels, sweep(subject, source, levels, seed, num_prompts), strict=True):
        say(f"{level} in flight: {point['output_throughput']:,.0f} output tokens/s")
        yield point


def _splitfuse(model: str | None, experiment: "Experiment", options: dict[str, Any], files: Files) -> None:
    from outpace.bench.plot import plot_splitfuse
    from outpace.bench.splitfuse import splitfuse
    from outpace.bench.subject import started
    from outpace.bench.tables import splitfuse_table

    with progress() as say:
        say("starting the model")
        with started(model, **{**options, **experiment.options()}) as subject:
            say("decodes beside long prompts, chopped and whole")
            found = splitfuse(subject, experiment)
    Console().print(splitfuse_table(found))
    found["outpace"]["options"] = _given(options)
    write_json(files.json, found)
    if files.plot is not None:
        plot_splitfuse(found, files.plot)


def _llm_options(
    random: bool,
    dtype: str | None,
    device: str | None,
    max_num_batched_tokens: int | None,
    max_model_len: int | None,
    enforce_eager: bool,
    deterministic: bool,
) -> dict[str, Any]:
    """Options of `bench.subject.started` that both commands have."""
    return {
        "random": random,
        "dtype": dtype,
        "device": device,
        "max_num_batched_tokens": max_num_batched_tokens,
        "max_model_len": max_model_len,
        "enforce_eager": enforce_eager or None,
        "deterministic": deterministic,
    }


def _given(options: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if value is not None}


def _levels(name: str, text: str | None) -> list[int] | None:
    """1,4,16 as numbers."""
    if text is None:
        return None
    parts = text.split(",")
    if not all(part.strip().isdecimal() and int(part) for part in parts):
        raise InputError(f"{name}: expected numbers like 1,4,16, got {text!r}")
    return [int(part) for part in parts]


def _refuse_others(context: typer.Context, *, splitfuse: bool) -> None:
    """Options of the other experiment would do nothing."""
    for name in OF_WORKLOADS if splitfuse else OF_SPLITFUSE:
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            remedy = "not with --splitfuse" if splitfuse else "only with --splitfuse"
            raise InputError(f"{name.replace('_', '-')}: {remedy}; leave it out")
