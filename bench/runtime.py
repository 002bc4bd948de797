"""The runtime (`LLM`): throughput, latency, full load, SplitFuse, each beside its limit. docs/benchmarks.md says what.

Parts: throughput, latency and profile of each model, full-load and splitfuse of the first, and if named (--only) sweep
and deterministic. One that fails is told of and leaves the others alone; results are written after each.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from bench import report
from outpace.bench.latency import latency
from outpace.bench.plot import plot_splitfuse, plot_throughput
from outpace.bench.profiling import profile_decode
from outpace.bench.splitfuse import SPLIT, WHOLE, Experiment, splitfuse
from outpace.bench.subject import Subject, started
from outpace.bench.throughput import sweep, throughput
from outpace.bench.workload import COUNT, SEED, Item, Workload
from outpace.kernels import limits

MODELS = ("llama-3.1-8b", "qwen3-0.6b")
DEFAULT = ("throughput", "latency", "profile", "full-load", "splitfuse")
PARTS = (*DEFAULT, "sweep", "deterministic")
MAX_MODEL_LEN = 4096
FULL_LOAD = 1000  # prompt and new tokens
LEVELS = (1, 4, 16, 64, 256)
DETERMINISTIC_BATCH = 64
OTHERS = {
    ("llama-3.1-8b", "throughput"): ("vLLM 0.26.0", 8709.0),
    ("llama-3.1-8b", "latency"): ("SGLang 0.5.17", 211.4),
    ("qwen3-0.6b", "throughput"): ("vLLM 0.26.0", 24520.0),
    ("qwen3-0.6b", "latency"): ("nano-vllm", 486.5),
}
"""The best that others reach on an H200 with the same work (docs/benchmarks.md)."""
CONSOLE = Console(width=150, highlight=False, markup=False)
Row = dict[str, Any]


def row(what: str, figure: float, unit: str, limit: float | None = None, other: tuple[str, float] | None = None) -> Row:
    """A figure, its limit and how near it is, and the best of others."""
    ratio = None if limit is None else figure / limit if unit.endswith("/s") else limit / figure
    return {
        "what": what, "figure": figure, "unit": unit, "limit": "-" if limit is None else limit,
        "of limit": "-" if ratio is None else ratio,
        "best other": "-" if other is None else f"{other[1]:g} ({other[0]})",
        "times other": "-" if other is None else figure / other[1] if unit.endswith("/s") else other[1] / figure,
    }  # fmt: skip


@dataclass
class Measured:
    """What has been measured so far, and where it goes."""

    folder: Path
    device: str
    speed: limits.Speed
    parts: Sequence[str]
    max_model_len: int = MAX_MODEL_LEN
    what: str = "runtime"
    """The name of the results."""
    rows: list[Row] = field(default_factory=list)
    details: dict[str, Any] = field(default_factory=dict)
    begin: float = field(default_factory=time.perf_counter)

    def part(self, model: str, name: str, measure: Callable[[], tuple[list[Row], Any]]) -> None:
        """Measure a part, if it is wanted; its failure is told and written, and is no more than that."""
        if name not in self.parts:
            return
        what = f"{model}: {name}"
        CONSOLE.print(f"[{time.perf_counter() - self.begin:6.1f} s] {what}")
        try:
            self.add(what, *measure())
        except Exception as error:
            self.failed(what, error)

    def failed(self, what: str, error: Exception) -> None:
        """Tell and write that something could not be measured."""
        CONSOLE.print_exception()
        self.add(what, [row(f"{what} FAILED: {type(error).__name__}", 0.0, "")], {"error": str(error)})

    def add(self, what: str, rows: list[Row], details: Any) -> None:
        """Tell and write results."""
        for each in rows:
            CONSOLE.print("  " + ", ".join(f"{key} {report.text(value)}" for key, value in each.items()))
        self.rows += rows
        self.details[what] = details
        notes = {"read bandwidth TB/s": self.speed.bandwidth / 1e12, "bf16 TFLOP/s": self.speed.flops / 1e12}
        report.save(self.what, self.device, self.rows, notes, self.folder, self.details)


def measure_throughput(subject: Subject) -> tuple[list[Row], Any]:
    """The workload that others were measured with."""
    source = _source(subject, Workload())
    found = throughput(subject, source.draw(COUNT, SEED), source.warm_up(COUNT, SEED))
    return _throughput_rows(subject.name, "throughput", found), found


def measure_latency(subject: Subject) -> tuple[list[Row], Any]:
    """One request alone."""
    found, name = latency(subject), subject.name
    limit = found["outpace"]["limit"]
    rows = [
        row(f"{name}: decode of one", found["decode_tokens_per_second"], "tok/s", limit["decode_tokens_per_second"],
            _other(found, "latency")),
        row(f"{name}: first token", found["median_ttft_ms"], "ms", limit["ttft_ms"]),
    ]  # fmt: skip
    return rows, found


def measure_profile(subject: Subject) -> tuple[list[Row], Any]:
    """Decode steps of a full batch."""
    found = profile_decode(subject, _source(subject, Workload()).draw(COUNT, SEED))
    what = f"{subject.name}: decode step of {found['batch_size']}"
    rows = [row(f"{what}, host", found["host_us_per_step"], "us")]
    return [*rows, row(f"{what}, GPU busy", found["gpu_busy"] or 0.0, "of the time")], found


def measure_full_load(subject: Subject) -> tuple[list[Row], Any]:
    """1000 prompt and 1000 new tokens for every place of the batch."""
    source = _source(subject, Workload(input_len=FULL_LOAD, output_len=FULL_LOAD))
    warm_up = [Item(item.prompt, 32) for item in source.warm_up(COUNT, SEED)]
    found = throughput(subject, source.draw(COUNT, SEED), warm_up)
    return _throughput_rows(subject.name, f"{FULL_LOAD}/{FULL_LOAD}", found), found


def measure_sweep(subject: Subject, path: Path) -> tuple[list[Row], Any]:
    """Throughput against latency."""
    points = list(sweep(subject, _source(subject, Workload()), LEVELS, SEED))
    plot_throughput(points, subject.cost, subject.speed, path)
    rows = []
    for level, point in zip(LEVELS, points, strict=True):
        rows += _throughput_rows(subject.name, f"{level} in flight", point)
    return rows, points


def measure_splitfuse(model: str, measured: Measured) -> tuple[list[Row], Any]:
    """Decodes beside long prompts, in a runtime of its own."""
    experiment = Experiment()
    with started(model, speed=measured.speed, **experiment.options()) as subject:
        found = splitfuse(subject, experiment)
    model = found["outpace"]["model"]
    plot_splitfuse(found, report.picture("runtime", measured.device, "splitfuse", measured.folder))
    rows = [
        row(f"{model}: {way}, {name}", found[way][key], unit)
        for way in (SPLIT, WHOLE)
        for name, key, unit in (
            *((f"P{percent} between tokens", f"p{percent}_itl_ms", "ms") for percent in (50, 95, 99)),
            ("output tokens", "output_throughput", "tok/s"),
        )
    ]
    rows.append(row(f"{model}: P95 of whole prompts to that of SplitFuse", found["p95_itl_ratio"], "times"))
    return [*rows, row(f"{model}: tokens/s of SplitFuse to whole", found["throughput_ratio"], "times")], found


def measure_deterministic(model: str, measured: Measured) -> tuple[list[Row], Any]:
    """What it costs that no token depends on its batch."""
    rates, details = {}, {}
    for deterministic in (False, True):
        options: dict[str, Any] = {"max_num_seqs": DETERMINISTIC_BATCH, "max_model_len": measured.max_model_len}
        with started(model, speed=measured.speed, deterministic=deterministic, **options) as subject:
            source = _source(subject, Workload())
            items = [draw(DETERMINISTIC_BATCH, SEED) for draw in (source.draw, source.warm_up)]
            details[f"deterministic={deterministic}"] = found = throughput(subject, *items)
        rates[deterministic] = found["output_throughput"]
    what = f"{model}: {DETERMINISTIC_BATCH} at a time"
    rows = [row(f"{what}, deterministic", rates[True], "tok/s"), row(f"{what}, not", rates[False], "tok/s")]
    return [*rows, row(f"{what}, deterministic to not", rates[True] / rates[False], "times")], details


def measure_model(model: str, measured: Measured, *, full_load: bool) -> None:
    """The parts that share one start of the runtime."""
    wanted: list[tuple[str, Callable[[Subject], tuple[list[Row], Any]]]] = [
        ("throughput", measure_throughput), ("latency", measure_latency), ("profile", measure_profile),
    ]  # fmt: skip
    if full_load:
        wanted.append(("full-load", measure_full_load))
    picture = report.picture("runtime", measured.device, f"{model}_sweep", measured.folder)
    wanted.append(("sweep", lambda subject: measure_sweep(subject, picture)))
    if not any(name in measured.parts for name, _ in wanted):
        return
    CONSOLE.print(f"[{time.perf_counter() - measured.begin:6.1f} s] {model}: starting")
    with started(model, speed=measured.speed, max_num_seqs=COUNT, max_model_len=measured.max_model_len) as subject:
        took = subject.startup_seconds
        ready = row(f"{subject.name}: ready, without making weights", took["all"] - took["load"], "s")
        measured.add(f"{model}: start", [ready], took)
        for name, measure in wanted:
            measured.part(model, name, partial(measure, subject))


def _source(subject: Subject, workload: Workload) -> Any:
    return workload.source(subject.vocab_size, subject.tokenize, subject.llm.engine.max_model_len)


def _other(found: dict[str, Any], what: str) -> tuple[str, float] | None:
    facts = found["outpace"]
    return OTHERS.get((facts["model"], what)) if facts["device"] == "h200" else None


def _throughput_rows(model: str, what: str, found: dict[str, Any]) -> list[Row]:
    limit = found["outpace"]["limit"]["output_throughput"]
    return [
        row(f"{model}: {what}", found["output_throughput"], "tok/s", limit, _other(found, what)),
        row(f"{model}: {what}, median between tokens", found["median_itl_ms"], "ms"),
    ]


def main() -> None:
    """Measure what is asked for."""
    options = report.parser(__doc__)
    options.add_argument("--models", default=",".join(MODELS), help="shapes, or models")
    options.add_argument("--only", default=",".join(DEFAULT), help=f"parts: {', '.join(PARTS)}")
    options.add_argument("--max-model-len", type=int, default=MAX_MODEL_LEN, help="most tokens of a request")
    chosen = options.parse_args()
    parts = chosen.only.split(",")
    if unknown := sorted(set(parts) - set(PARTS)):
        options.error(f"--only: there is no part {', '.join(unknown)}; there are {', '.join(PARTS)}")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    speed = limits.measure_speed(device, dtype)
    measured = Measured(chosen.out, limits.device_name(device), speed, parts, chosen.max_model_len)
    models = chosen.models.split(",")
    for model in models:
        try:
            measure_model(model, measured, full_load=model == models[0])
        except Exception as error:  # it could not be started; each part looks after itself
            measured.failed(f"{model}: start", error)
        if model == models[0]:
            measured.part(model, "splitfuse", partial(measure_splitfuse, model, measured))
        measured.part(model, "deterministic", partial(measure_deterministic, model, measured))
    report.show("runtime", measured.rows)


if __name__ == "__main__":
    main()
