"""One rank of a model over several GPUs, measured on one GPU, without its collectives.

    scripts/bench ranks --only linears,steps --out DIR

A rank's share of each layer is a smaller model (`outpace.bench.shapes.rank_shape`), so no second GPU is needed. Parts:
linears (each linear layer of a rank at one row, as decode launches it, with the package's own tiles and with the best
of a few others, beside the time to read its weight), steps (a whole decode step through `LLM` from CUDA graphs at
contexts of 1,024 tokens, beside its floor), nccl (a step of a whole model with an all-reduce of a world of one after
each row-parallel product, captured in its graph, beside the same step without). Each part writes results of its own,
after each rank. --seconds bounds the run: what would begin later is left out and told of.
"""

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from bench import report
from bench.gemv_sweep import TILE, TOLERANCE, Case, Choice, Compiler, Operands, attempt, launch_time, model_cases
from bench.runtime import CONSOLE, Row, row
from outpace.bench.drive import Driver, Trace
from outpace.bench.shapes import SHAPES, build, rank_shape
from outpace.bench.subject import Subject, started
from outpace.bench.workload import Item, latency_prompt
from outpace.inject.ranks import SummedLinear
from outpace.inject.recipe import Recipe
from outpace.inject.shard import Shard
from outpace.kernels import limits
from outpace.kernels.gemv import GATED_OF_RANKS, OF_RANKS, gemv_config
from outpace.parallel.group import Group
from outpace.parallel.mesh import Mesh

RANKS = "llama-3.1-8b:2,llama-3.1-8b:4,llama-3.1-8b:8,llama-3.1-70b:4,llama-3.1-70b:8"
PARTS = ("linears", "steps", "nccl")
BATCHES = (1, 8, 32)
CONTEXT = 1024
STEPS, TURNS, SETTLING = 32, 3, 4  # timed together; so often; before the first of them
MAX_MODEL_LEN, MAX_TOKENS = 2048, 4096
LAUNCHES, GRAPH_BYTES = 160, 2 << 30  # of a graph, each with a weight of its own: far more than the L2 cache
PLAIN = "none"
TILES = (
    (1, 256, 1, 1), (1, 512, 1, 1), (1, 512, 2, 1), (1, 1024, 4, 1), (2, 512, 2, 1), (2, 1024, 1, 1), (2, 1024, 4, 1),
    (2, 2048, 4, 1), (4, 512, 2, 1), (4, 1024, 4, 1), (4, 2048, 4, 1), (4, 4096, 8, 1),
)  # fmt: skip
GATED_TILES = (
    (1, 512, 1, 1), (1, 1024, 2, 1), (1, 2048, 4, 1), (1, 4096, 8, 1), (2, 512, 2, 1), (2, 1024, 4, 1), (2, 2048, 8, 1),
    (2, 4096, 8, 1), (4, 1024, 8, 1),
)  # fmt: skip


@dataclass(frozen=True)
class Rank:
    """One rank of so many."""

    model: str
    ranks: int

    @classmethod
    def parse(cls, text: str) -> "Rank":
        """From NAME:RANKS."""
        model, _, ranks = text.partition(":")
        if model not in SHAPES or not ranks.isdigit():
            raise argparse.ArgumentTypeError(f"{text} is not NAME:RANKS with a name of {', '.join(SHAPES)}")
        return cls(model, int(ranks))

    @property
    def label(self) -> str:
        """A name for people."""
        return f"{self.model}, one of {self.ranks} ranks"

    @property
    def shape(self) -> dict[str, Any]:
        """What it holds of each layer."""
        return rank_shape(self.model, self.ranks)

    def cases(self) -> list[Case]:
        """Its linear layers; experts have kernels of their own."""
        shape = self.shape
        heads, keys = (shape[key] * shape["head_dim"] for key in ("num_attention_heads", "num_key_value_heads"))
        sizes = {"hidden": shape["hidden_size"], "qkv": heads + 2 * keys, "o": heads, "vocab": shape["vocab_size"]}
        found = model_cases(self.label, layers=shape["num_hidden_layers"], inner=shape["intermediate_size"], **sizes)
        return [case for case in found if "num_experts_per_tok" not in shape or case.layer not in ("gate_up", "down")]


@dataclass
class Results:
    """What has been measured of one part, and where it goes."""

    part: str
    folder: Path
    device: torch.device
    speed: limits.Speed
    deadline: float
    rows: list[Row] = field(default_factory=list)
    details: dict[str, Any] = field(default_factory=dict)

    def measure(self, what: str, run: Callable[[], tuple[list[Row], Any]]) -> None:
        """Add what `run` finds; a failure, or that it is too late to begin, is one row."""
        if time.monotonic() > self.deadline:
            return self.add(what, [self.failure(f"{what} LEFT OUT: no time")], None)
        try:
            return self.add(what, *run())
        except Exception as error:  # of one rank; the others go on
            CONSOLE.print_exception()
            return self.add(what, [self.failure(f"{what} FAILED: {type(error).__name__}")], {"error": str(error)})

    def failure(self, what: str) -> Row:
        """A row without figures."""
        return linear_row(what) if self.part == "linears" else row(what, 0.0, "ms")

    def add(self, what: str, rows: list[Row], details: Any) -> None:
        """Tell and write results."""
        for each in rows:
            CONSOLE.print("  " + ", ".join(f"{key} {report.text(value)}" for key, value in each.items()))
        self.rows += rows
        self.details[what] = details
        notes = {"read bandwidth TB/s": self.speed.bandwidth / 1e12, "bf16 TFLOP/s": self.speed.flops / 1e12}
        device = limits.device_name(self.device)
        report.save(f"ranks_{self.part}", device, self.rows, notes, self.folder, self.details)


def linear_row(what: str, **figures: Any) -> Row:
    """The columns of linears."""
    columns = ("default us", "GB/s", "of read", "default tile", "best us", "best of read", "best tile")
    return {"what": what, **{name: figures.get(name, "-") for name in columns}}


def default_choice(case: Case) -> Choice:
    """What the package launches."""
    config = gemv_config(case.rows, case.outputs, case.depth, case.fused == "gated")
    tile = (config["block_n"], config["block_k"], config["num_warps"], config["num_stages"])
    known = (GATED_OF_RANKS if case.fused == "gated" else OF_RANKS).get((case.outputs, case.depth))
    return Choice(tile, pdl=case.fused == "add" if known is None or case.rows > 1 else known.overlaps)


def choices(case: Case) -> list[Choice]:
    """The package's own and a few others, each alone and overlapping the kernel in front."""
    widest = max(256, 1 << (case.depth - 1).bit_length())
    tiles = [tile for tile in (GATED_TILES if case.fused == "gated" else TILES) if tile[1] <= widest]
    own = default_choice(case)
    return [*dict.fromkeys([own, *(Choice(tile, pdl) for tile in (own.tile, *tiles) for pdl in (False, True))])]


def measure_linears(rank: Rank, speed: limits.Speed, compiler: Compiler, deadline: float) -> tuple[list[Row], Any]:
    """Each linear of a rank."""
    found = [measure_linear(case, speed, compiler, deadline) for case in rank.cases()]
    rows = [
        linear_row(
            f"{rank.label}: {each['layer']} {each['outputs']} x {each['depth']}",
            **{"default us": each["default_us"], "GB/s": each["bytes"] / each["default_us"] / 1e3},
            **{"of read": each["floor_us"] / each["default_us"], "default tile": _name(each["default"])},
            **{"best us": each["best_us"], "best of read": each["floor_us"] / each["best_us"]},
            **{"best tile": _name(each["best"])},
        )
        for each in found
    ]
    return rows, {"model": rank.model, "ranks": rank.ranks, "linears": found}


def measure_linear(case: Case, speed: limits.Speed, compiler: Compiler, deadline: float) -> dict[str, Any]:
    """Microseconds of one linear with each choice; the best is timed once more beside the package's own."""
    device = compiler.device
    copies = max(3, min(LAUNCHES, GRAPH_BYTES // case.weight_bytes)) if device.type == "cuda" else 1
    operands, own = Operands.random(case, device, copies), default_choice(case)
    launch_time(operands.cublas, copies, 10)  # the clocks rise
    times: dict[Choice, float] = {}
    for choice in choices(case):
        if choice != own and (time.monotonic() > deadline or not compiler.has(case, choice)):
            continue
        took = attempt(partial(launch_time, partial(operands.gemv, choice), copies, 3))
        if took is not None:
            times[choice] = took
    order = sorted(times, key=lambda choice: times[choice])
    best = next((choice for choice in order[:4] if operands.error(choice) < TOLERANCE), own)
    own_us, best_us = (launch_time(partial(operands.gemv, each), copies, 9) for each in (own, best))
    if best_us > own_us:
        best, best_us = own, own_us
    return {
        "layer": case.layer, "fused": case.fused, "outputs": case.outputs, "depth": case.depth,
        "bytes": case.weight_bytes, "floor_us": case.weight_bytes / speed.bandwidth * 1e6,
        "default": own.keywords, "default_us": own_us, "best": best.keywords, "best_us": best_us,
        "timed": [{**choice.keywords, "us": times[choice]} for choice in order],
    }  # fmt: skip


def _name(launch: dict[str, Any]) -> str:
    return "/".join(str(launch["config"][key]) for key in TILE) + (" overlapping" if launch["pdl"] else "")


def measure_steps(rank: Rank, scheme: str, speed: limits.Speed, device: torch.device) -> tuple[list[Row], Any]:
    """A decode step of each batch, beside the time to read its weights, keys and values."""
    weights, _, pages = scheme.partition("+")
    options: dict[str, Any] = {"quantization": None if weights == PLAIN else weights, "kv_cache_dtype": pages or None}
    options |= {"max_num_seqs": max(BATCHES), "max_model_len": MAX_MODEL_LEN, "max_num_batched_tokens": MAX_TOKENS}
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    with started(build(rank.shape, dtype, device), speed=speed, device=device.type, **options) as subject:
        found = {str(batch): step_time(subject, batch) for batch in BATCHES}
        seconds = subject.startup_seconds
    rows = [
        row(f"{rank.label}, {scheme}: step of {batch}", each["step_ms"], "ms", each["floor_ms"])
        for batch, each in found.items()
    ]
    about = {"model": rank.model, "ranks": rank.ranks, "scheme": scheme, "startup_seconds": seconds}
    return rows, {**about, "batches": found}


class _OneRank(Group):
    """A world of one that tells itself everything."""

    __slots__ = ()

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """Through NCCL, for nothing."""
        dist.all_reduce(x, group=self.handle)
        return x


def measure_nccl(model: str, speed: limits.Speed, device: torch.device) -> tuple[list[Row], Any]:
    """A decode step at batch 1, with and without the collectives of tensor parallelism."""
    with tempfile.TemporaryDirectory() as folder:
        where = f"file://{folder}/world"
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo", where, rank=0, world_size=1)
        try:
            return _measure_nccl(model, speed, device)
        finally:
            dist.destroy_process_group()


def _measure_nccl(model: str, speed: limits.Speed, device: torch.device) -> tuple[list[Row], Any]:
    shard = Shard(Mesh(tp=_OneRank(handle=dist.group.WORLD)), {})
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    options: dict[str, Any] = {"max_num_seqs": 8, "max_model_len": MAX_MODEL_LEN, "max_num_batched_tokens": MAX_TOKENS}
    found = {}
    for name, patched in (("without", False), ("with", True)):
        with ExitStack() as stack:
            if patched:
                stack.enter_context(mock.patch("outpace.inject.start.shard_of", return_value=shard))
                stack.enter_context(mock.patch.object(Shard, "adds_up", _is_row_parallel))
            subject = stack.enter_context(
                started(build(model, dtype, device), speed=speed, device=device.type, **options)
            )
            found[name] = step_time(subject, 1)
            sums = [each for each in subject.llm.engine._parts.module.modules() if isinstance(each, SummedLinear)]
            if bool(sums) != patched:
                raise RuntimeError(f"{len(sums)} linears are added up over ranks, {name} collectives")
    more = found["with"]["step_ms"] / found["without"]["step_ms"] - 1
    rows = [
        row(f"{model}: step of 1, {name} collectives", each["step_ms"], "ms", each["floor_ms"])
        for name, each in found.items()
    ]
    rows.append(row(f"{model}: what they add", 100 * more, "%", None))
    return rows, {"model": model, **found, "share": more}


def _is_row_parallel(shard: Shard, recipe: Recipe) -> bool:
    return recipe.parts[0].name.endswith(("o_proj.weight", "down_proj.weight"))


def step_time(subject: Subject, batch: int) -> dict[str, float]:
    """Milliseconds of a step in which all requests of the batch decode: the median of a few turns of many steps."""
    engine = subject.llm.engine
    chunks = -(-CONTEXT // engine.scheduler.max_chunk_beside_decodes)
    new = min(TURNS * STEPS + 3 * SETTLING + batch * chunks, engine.max_model_len - CONTEXT)
    driver = Driver(engine)
    try:
        prompts = [latency_prompt(subject.vocab_size, CONTEXT, number) for number in range(batch)]
        traces = [driver.add(Item(prompt, new)) for prompt in prompts]
        while driver.live and not all(len(trace.times) >= SETTLING for trace in traces):
            driver.step()
        context = CONTEXT + _mean_length(traces) + TURNS * STEPS / 2
        took = [_turn(driver) for _ in range(TURNS)]
        if len(driver.live) < batch:
            raise RuntimeError(f"requests of {new} new tokens ended before {TURNS * STEPS} steps were timed")
    finally:
        driver.close()
    floor = 0.0 if subject.cost is None else subject.cost.decode_seconds(batch, context, subject.speed)
    return {"step_ms": statistics.median(took) * 1e3, "floor_ms": floor * 1e3, "context": context}


def _turn(driver: Driver) -> float:
    """Seconds of a step; the next is launched before one is read, so many are timed together."""
    begin = time.perf_counter()
    for _ in range(STEPS):
        driver.step()
    return (time.perf_counter() - begin) / STEPS


def _mean_length(traces: Sequence[Trace]) -> float:
    return statistics.fmean(len(trace.times) for trace in traces)


def run_linears(ranks: Sequence[Rank], results: Results, compile_seconds: float) -> None:
    """Compile what all ranks need with several processes, then time it."""
    on_gpu = results.device.type == "cuda"
    compiler = Compiler(max(2, min(14, (os.cpu_count() or 4) - 2)), results.device)
    try:
        if on_gpu:
            work = [(case, choice) for rank in ranks for case in rank.cases() for choice in choices(case)]
            compiler.prepare(work, compile_seconds)
        compiler.works &= on_gpu
        for rank in ranks:
            call = partial(measure_linears, rank, results.speed, compiler, results.deadline)
            results.measure(f"{rank.label}: linears", call)
    finally:
        compiler.pool.shutdown(wait=False, cancel_futures=True)


def main() -> None:
    """Measure what is asked for."""
    options = report.parser(__doc__)
    options.add_argument("--ranks", default=RANKS, help="NAME:RANKS, several with commas")
    options.add_argument("--only", default=",".join(PARTS), help=f"parts, of {', '.join(PARTS)}")
    options.add_argument("--schemes", default=PLAIN, help="of steps, as of scripts/bench quantization: none,fp8+fp8")
    options.add_argument("--seconds", type=float, default=140.0, help="when to begin nothing more")
    options.add_argument("--compile-seconds", type=float, default=35.0, help="limit of compiling tiles")
    asked = options.parse_args()
    if unknown := sorted({*asked.only.split(",")} - {*PARTS}):
        options.error(f"--only: there is no {', '.join(unknown)}; there are {', '.join(PARTS)}")
    try:
        ranks = [Rank.parse(text) for text in asked.ranks.split(",")]
    except argparse.ArgumentTypeError as error:
        options.error(f"--ranks: {error}")
    begin = time.monotonic()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    speed = limits.measure_speed(device, torch.bfloat16 if device.type == "cuda" else torch.float32)
    for part in asked.only.split(","):
        results = Results(part, asked.out, device, speed, begin + asked.seconds)
        if part == "linears":
            run_linears(ranks, results, asked.compile_seconds)
        elif part == "nccl":
            for model in dict.fromkeys(rank.model for rank in ranks[:1]):
                results.measure(f"{model}: nccl", partial(measure_nccl, model, speed, device))
        else:
            for scheme in asked.schemes.split(","):
                for rank in ranks:
                    call = partial(measure_steps, rank, scheme, speed, device)
                    results.measure(f"{rank.label}, {scheme}: steps", call)
                    if device.type == "cuda":
                        torch.cuda.empty_cache()
        CONSOLE.print(f"{part} done after {time.monotonic() - begin:.0f} s")
        report.show(f"ranks_{part}", results.rows)


if __name__ == "__main__":
    main()
