"""`outpace plan`: shows where a model's layers should live, in which precision, and how fast that is."""

import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from outpace.cli.model import SameModel, one_model
from outpace.cli.plan_machine import Machine, machine
from outpace.cli.plan_report import advice, as_data, plan_table
from outpace.cli.results import ResultFiles
from outpace.errors import ConfigError, InputError
from outpace.offload.cards import CARDS
from outpace.offload.numbers import PERFECT, Numbers, Work
from outpace.offload.plan import Plan, plans, relief
from outpace.offload.predict import predict

if TYPE_CHECKING:
    import torch

GBS = "in GB/s, instead of the measured or known rate"


def command(
    model: Annotated[
        str | None,
        typer.Argument(metavar="MODEL", help="A config.json, a folder with one, or a shape of `outpace bench`."),
    ] = None,
    same_model: SameModel = None,
    gpu: Annotated[
        str | None,
        typer.Option("--gpu", metavar="NAME", help=f"Plan for {', '.join(CARDS)} or cpu.", show_default="this machine"),
    ] = None,
    gpu_memory: Annotated[
        str | None,
        typer.Option("--gpu-memory", metavar="SIZE", help="Such as 24GB.", show_default="0.9 of what there is"),
    ] = None,
    ram: Annotated[
        str | None,
        typer.Option("--ram", metavar="SIZE", help="Host memory for layers.", show_default="0.8 of what is free"),
    ] = None,
    nvme: Annotated[Path | None, typer.Option("--nvme", metavar="DIR", help="Folder for layers on disk.")] = None,
    prompt: Annotated[int, typer.Option(help="Tokens of a prompt.")] = 512,
    gen: Annotated[int, typer.Option(help="New tokens of a request.")] = 32,
    requests: Annotated[int, typer.Option(help="Number of requests; as many run at once as is fastest.")] = 96,
    dtype: Annotated[
        str | None, typer.Option(help="fp32, fp16 or bf16.", show_default="the config's own, or bf16")
    ] = None,
    precision: Annotated[
        list[str] | None,
        typer.Option(help="Consider only these precisions: the dtype, int8, int4, fp8. May be given several times."),
    ] = None,
    layers: Annotated[int | None, typer.Option(metavar="N", help="Plan with only the first N layers.")] = None,
    link_gbs: Annotated[float | None, typer.Option(help=f"Host memory to the device, {GBS}.")] = None,
    disk_gbs: Annotated[float | None, typer.Option(help=f"Reads from disk, {GBS}.")] = None,
    device_gbs: Annotated[float | None, typer.Option(help=f"Reads of the device's memory, {GBS}.")] = None,
    tflops: Annotated[
        float | None, typer.Option(help="Products of the device, in TFLOP/s, instead of that rate.")
    ] = None,
    every: Annotated[bool, typer.Option("--all", help="Show every batch, not the fastest of each placement.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print every plan as JSON.")] = False,
    plot: Annotated[Path | None, typer.Option(metavar="FILE.png", help="Draw the table into this file.")] = None,
) -> None:
    """Show where a model's layers should live, and how fast that is.

    For models larger than the device: which layers live where, in which precision, how many requests run at once, how
    many tokens per second that gives, and what limits it. Needs neither weights nor a GPU: rates are those that
    `outpace probe` measures here, or those of a usual device.
    """
    work = Work(prompt, gen, requests)
    name = one_model(model, same_model)
    if name is None:
        raise InputError("model: name a config.json, a folder with one, or a shape such as llama-3.1-70b")
    files = ResultFiles(plot=plot)
    there = machine(
        gpu, gpu_memory, ram, nvme, link_gbs=link_gbs, disk_gbs=disk_gbs, device_gbs=device_gbs, tflops=tflops
    )
    numbers, names = _numbers(name, dtype, layers)
    if there.rates.link is None:
        numbers = replace(numbers, workspace=0)  # it is CUDA's
    wanted = _chosen(names, precision, there.fp8)
    found = plans(numbers, there.budgets, there.rates, work, precisions=wanted)
    best = max(found, key=lambda plan: plan.tokens_per_second)
    shown = found if every else _fastest(found)
    limits = [_limit(plan, numbers, there, work) for plan in shown]
    helps = relief(numbers, there.budgets, there.rates, work, precisions=[best.precision])
    lines = advice(name, nvme, found, names[0], work, numbers.page, there)
    missing = _missing(wanted, found, numbers, there, work)
    if as_json:
        rows = [as_data(plan, limit) for plan, limit in zip(shown, limits, strict=True)]
        typer.echo(
            json.dumps(
                {
                    "machine": there.data,
                    "work": asdict(work),
                    "plans": rows,
                    "relief": helps,
                    "no_room": missing,
                    **lines,
                }
            )
        )
    else:
        _print(name, there, work, plan_table(shown, limits, best), helps, lines, missing)
    if files.plot is not None:
        from outpace.offload.picture import draw

        draw(_title(name, there, work), shown, limits, files.plot)


def _numbers(model: str, dtype: str | None, layers: int | None) -> tuple[Numbers, tuple[str, ...]]:
    """The numbers of a model and the names of its precisions, its own dtype first."""
    from outpace.cli.shard import float_dtype

    asked = None if dtype is None else float_dtype(dtype)

    from outpace.bench.shapes import config_of
    from outpace.errors import ModelError
    from outpace.loading.numbers import numbers_of, precisions
    from outpace.loading.problems import LOAD_ERRORS, line
    from outpace.loading.skeleton import skeleton

    path = Path(model)
    config = config_of(path.parent if path.name == "config.json" else model)
    own = asked or _own_dtype(config)
    try:
        made = skeleton(config, own)
    except LOAD_ERRORS as error:
        raise ModelError(f"model: no decoder can be made of the config of {model} ({line(error)})") from error
    numbers = numbers_of(made, own)
    if layers is not None:
        if not 1 <= layers <= len(numbers.layers):
            raise ConfigError(f"layers: {model} has {len(numbers.layers)}, got {layers}")
        numbers = replace(numbers, layers=numbers.layers[:layers])
    return numbers, precisions(own)


def _own_dtype(config: Any) -> "torch.dtype":
    import torch

    own = config.dtype
    return own if own in (torch.float32, torch.float16, torch.bfloat16) else torch.bfloat16


def _chosen(names: tuple[str, ...], asked: Sequence[str] | None, fp8: bool) -> list[str]:
    """The precisions asked for, or all that the device runs fast."""
    unknown = [name for name in asked or () if name not in names]
    if unknown:
        raise ConfigError(f"precision: expected some of {', '.join(names)}, got {unknown[0]!r}")
    return list(dict.fromkeys(asked or (name for name in names if fp8 or name != "fp8")))


def _missing(
    wanted: Sequence[str], found: Sequence[Plan], numbers: Numbers, there: Machine, work: Work
) -> dict[str, str]:
    """Why some precisions are not in the table."""
    why = {}
    for precision in wanted:
        if not any(plan.precision == precision for plan in found):
            try:
                plans(numbers, there.budgets, there.rates, work, precisions=[precision])
            except ConfigError as error:
                why[precision] = str(error)
    return why


def _fastest(found: Sequence[Plan]) -> list[Plan]:
    """The fastest batch of each precision and placement, without duplicates."""
    best: dict[tuple[str, str], Plan] = {}
    for plan in found:
        key = (plan.precision, plan.kind)
        if key not in best or plan.tokens_per_second > best[key].tokens_per_second:
            best[key] = plan
    mixed = {(plan.precision, plan.placement) for (_, kind), plan in best.items() if kind == "mixed"}
    return [
        plan for (_, kind), plan in best.items() if kind == "mixed" or (plan.precision, plan.placement) not in mixed
    ]


def _limit(plan: Plan, numbers: Numbers, there: Machine, work: Work) -> float:
    found = predict(numbers, plan.precision, plan.placement, plan.schedule, there.rates, work, PERFECT)
    return found.tokens_per_second


def _title(model: str, there: Machine, work: Work) -> str:
    return f"{model} on {there.name}: {work.requests} requests of {work.prompt} + {work.new} tokens"


def _print(
    model: str,
    there: Machine,
    work: Work,
    table: Table,
    helps: dict[Any, float],
    lines: dict[str, str],
    missing: dict[str, str],
) -> None:
    console = Console()
    console.print(_title(model, there, work), highlight=False)
    for line in there.lines():
        console.print(f"  {line}", highlight=False)
    console.print(table)
    for precision, why in missing.items():
        console.print(f"No room with {precision} weights: {why}", highlight=False, soft_wrap=True)
    times = ", ".join(f"{name} {times:.2f} times" for name, times in helps.items())
    console.print(f"Twice as much of one thing makes the fastest faster: {times or 'none does'}.", highlight=False)
    for name, text in lines.items():
        console.print(f"{name.replace('_', ' ')}:\n  {text}", highlight=False, soft_wrap=True)
