"""The best tiles of `gemv` for the linear layers of three models at batch 1, 2 and 4, beside cuBLAS and the read limit.

Every layer is timed in one CUDA graph of many launches, each with a weight of its own, so that the L2 cache holds none,
and with the norm, activation or residual that decode fuses into it; cuBLAS runs the bare product in the same way.
Tiles are compiled by several processes first; those that fail or come too late are skipped. Run on a GPU:

    python -m bench.gemv_sweep --out DIR

and its logic alone on a CPU: TRITON_INTERPRET=1 python -m bench.gemv_sweep --tiny --out DIR
"""

import itertools
import json
import math
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from torch import Tensor

from bench import report
from outpace.kernels import limits
from outpace.kernels.gemv import gemv_config, gemv_ref, gemv_triton
from outpace.kernels.triton_stub import triton

TILE = ("block_n", "block_k", "num_warps", "num_stages")
GRAPH_BYTES = 4 << 30  # read per graph: 1 ms, in which its own launch is lost, and far more than the L2 cache
MAX_LAUNCHES = 400  # per graph
WORST = 1.3  # a tile this much slower than the best so far is not timed again
TOLERANCE = 1e-2  # one rounding to bf16 is 4e-3 at most, and 8e-3 in the interpreter, which cuts
CONSOLE = Console(width=150, highlight=False, markup=False)

Tile = tuple[int, int, int, int]  # in the order of TILE


@dataclass(frozen=True)
class Choice:
    """How a kernel is launched."""

    tile: Tile
    pdl: bool = False

    @property
    def keywords(self) -> dict[str, Any]:
        """Keywords of gemv_triton."""
        return {"config": dict(zip(TILE, self.tile, strict=True)), "pdl": self.pdl}


@dataclass(frozen=True)
class Case:
    """One linear layer at one batch size."""

    model: str
    layer: str
    fused: str  # norm: in front; gated: that, and the activation; add: the residual
    outputs: int
    depth: int
    per_token: int  # how often a token passes through such a layer
    rows: int = 1

    @property
    def halves(self) -> int:
        """Rows of the weight per output."""
        return 2 if self.fused == "gated" else 1

    @property
    def weight_bytes(self) -> int:
        """What a launch must read."""
        return 2 * self.halves * self.outputs * self.depth

    @property
    def kernel(self) -> tuple[int, int, str]:
        """What a compiled kernel depends on, besides its tile."""
        return self.rows, self.depth, self.fused


def model_cases(model: str, layers: int, hidden: int, qkv: int, o: int, inner: int, vocab: int) -> list[Case]:
    """The linear layers of a model; `o` and `inner` are the depths of those behind the attention and the activation."""
    return [
        Case(model, "qkv", "norm", qkv, hidden, layers),
        Case(model, "o", "add", hidden, o, layers),
        Case(model, "gate_up", "gated", inner, hidden, layers),
        Case(model, "down", "add", hidden, inner, layers),
        Case(model, "head", "norm", vocab, hidden, 1),
    ]


CASES = [
    *model_cases("Llama-3.1-8B", layers=32, hidden=4096, qkv=6144, o=4096, inner=14336, vocab=128256),
    *model_cases("Llama-3.2-1B", layers=16, hidden=2048, qkv=3072, o=2048, inner=8192, vocab=128256),
    *model_cases("Qwen3-0.6B", layers=28, hidden=1024, qkv=4096, o=2048, inner=3072, vocab=151936),
]
TINY = [Case("tiny", *sizes, 2) for sizes in (("qkv", "norm", 6, 40), ("up", "gated", 4, 40), ("down", "add", 5, 300))]


def choices(case: Case) -> list[Choice]:
    """The tiles worth a try: 16-byte loads of weight and x alike, and no more sums per thread than registers hold."""
    default = gemv_config(case.rows, case.outputs, case.depth, case.fused == "gated")
    found = [tuple(default[key] for key in TILE)]
    widest = max(256, 1 << (case.depth - 1).bit_length())
    rows = (1 << (case.rows - 1).bit_length()) * case.halves
    for warps, block_k, block_n in itertools.product((1, 2, 4, 8), (256, 512, 1024, 2048, 4096), (1, 2, 4, 8)):
        if 256 * warps <= block_k <= widest and rows * block_n * block_k <= 64 * 32 * warps:
            found.append((block_n, block_k, warps, 1))
            if case.rows == 1 and block_n > 1 and block_k < case.depth:
                found.append((block_n, block_k, warps, 3))
    return [Choice(tile) for tile in dict.fromkeys(found)]  # type: ignore[arg-type]


def refinements(case: Case, best: Sequence[Choice]) -> list[Choice]:
    """What to try once the best are known: the best two with every number of stages, and all of these with overlap."""
    tiles = [choice.tile for choice in best[:3]]
    if case.rows == 1:
        tiles += [(n, k, warps, s) for n, k, warps, _ in tiles[:2] if k < case.depth for s in range(1, 6)]
    return [Choice(tile, pdl) for pdl in (False, True) for tile in dict.fromkeys(tiles)]


@dataclass(frozen=True)
class Operands:
    """The tensors of one case: copies of the weight to rotate among, and what is fused."""

    x: Tensor
    weights: list[Tensor]
    out: Tensor
    options: dict[str, Any]

    @classmethod
    def random(cls, case: Case, device: torch.device, copies: int) -> "Operands":
        """Random numbers of the size that a model has."""
        kind: dict[str, Any] = {"dtype": torch.bfloat16, "device": device}
        weights = [torch.randn(case.halves * case.outputs, case.depth, **kind) / case.depth**0.5 for _ in range(copies)]
        options: dict[str, Any] = {"norm_weight": torch.rand(case.depth, **kind) + 0.5, "eps": 1e-5}
        if case.fused == "add":
            options = {"add": torch.randn(case.rows, case.outputs, **kind)}
        if case.fused == "gated":
            options["activation"] = "silu"
        x = torch.randn(case.rows, case.depth, **kind)
        return cls(x, weights, torch.empty(case.rows, case.outputs, **kind), options)

    def gemv(self, choice: Choice, i: int) -> None:
        """Launches the kernel on the i-th weight."""
        gemv_triton(self.x, self.weights[i], **self.options, out=self.out, **choice.keywords)

    def cublas(self, i: int) -> None:
        """The bare product with the i-th weight."""
        F.linear(self.x, self.weights[i])

    def error(self, choice: Choice) -> float:
        """The largest distance from the result in fp32, in parts of it; NaN where an output was not written."""
        self.out.fill_(float("nan"))
        self.gemv(choice, 0)
        options: dict[str, Any] = {
            key: value.float() if isinstance(value, Tensor) else value for key, value in self.options.items()
        }
        y = gemv_ref(self.x.float(), self.weights[0].float(), **options)
        return float(((self.out - y).abs() / (y.abs() + y.pow(2).mean().sqrt())).max())


def launch_time(run: Callable[[int], None], launches: int, repeats: int, worst: float = math.inf) -> float:
    """Median microseconds of one of the launches of a CUDA graph; inf as soon as a repeat shows more than `worst`."""
    start = time.perf_counter()
    run(0)
    if not torch.cuda.is_available():  # only the logic is tried
        return (time.perf_counter() - start) * 1e6
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(launches):
            run(i)
    graph.replay()
    times: list[float] = []
    for _ in range(repeats):
        times.append(limits.gpu_ms(graph.replay, warm_ups=0, repeats=1) * 1e3 / launches)
        if times[-1] > worst:
            return math.inf
    return statistics.median(times)


def attempt(action: Callable[[], Any]) -> Any:
    """The result of an action, or None: whatever goes wrong with one tile must not end the sweep."""
    try:
        return action()
    except Exception as error:
        CONSOLE.print(f"skipped: {type(error).__name__}: {' '.join(str(error).split())[-200:]}", soft_wrap=True)
        return None


def compile_some(jobs: Sequence[tuple[Case, Choice]], device: torch.device) -> list[bool]:
    """Compiles into Triton's cache on disk, by launches on 64 outputs: they need the same kernel as any multiple."""

    def launch(case: Case, choice: Choice) -> bool:
        Operands.random(replace(case, outputs=64), device, 1).gemv(choice, 0)
        if device.type == "cuda":
            torch.cuda.synchronize()
        return True

    torch.set_num_threads(1)  # of many processes
    return [attempt(partial(launch, *job)) is True for job in jobs]


class Compiler:
    """Processes that compile kernels ahead of their timing."""

    def __init__(self, workers: int, device: torch.device) -> None:
        self.device = device
        self.ready: set[tuple[Any, Choice]] = set()
        self.works = True
        self.pool = ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"))

    def prepare(self, jobs: Sequence[tuple[Case, Choice]], seconds: float) -> None:
        """Compiles what is new; what is not done in so many seconds is left out."""
        new = list({(c.kernel, choice): (c, choice) for c, choice in jobs if not self.has(c, choice)}.values())
        futures: dict[Future[list[bool]], Sequence[tuple[Case, Choice]]] = {}
        before = len(self.ready)
        try:
            for start in range(0, len(new), 4):
                part = new[start : start + 4]
                futures[self.pool.submit(compile_some, part, self.device)] = part
            for future in as_completed(futures, timeout=seconds):
                done = zip(futures[future], future.result(), strict=True)
                self.ready |= {(case.kernel, choice) for (case, choice), good in done if good}
        except Exception as error:  # late, or a process died: go on with what there is
            CONSOLE.print(f"compiling stopped early: {type(error).__name__} {error}")
        for future in futures:
            future.cancel()
        CONSOLE.print(f"compiled {len(self.ready) - before} of {len(new)} kernels")
        self.works = len(self.ready) > 0  # else they are compiled one by one as they are timed

    def has(self, case: Case, choice: Choice) -> bool:
        """Whether this kernel can be timed at once."""
        return not self.works or (case.kernel, choice) in self.ready


@dataclass(frozen=True)
class Sweep:
    """Times the kernels of cases until a deadline."""

    device: torch.device
    compiler: Compiler
    bandwidth: float
    deadline: float

    def operands(self, case: Case) -> Operands:
        """As many weights as a graph has launches."""
        launches = max(3, min(MAX_LAUNCHES, GRAPH_BYTES // case.weight_bytes)) if self.device.type == "cuda" else 1
        return Operands.random(case, self.device, launches)

    def times(self, case: Case, work: Sequence[Choice], known: Mapping[Choice, float]) -> dict[Choice, float]:
        """Microseconds of what is known and of every choice that runs and is not far slower, best first."""
        operands, times = self.operands(case), dict(known)
        attempt(partial(launch_time, operands.cublas, len(operands.weights), 30))  # the clocks rise
        for choice in work:
            if choice in times or not self.compiler.has(case, choice) or time.monotonic() > self.deadline:
                continue
            worst = WORST * min(times.values(), default=math.inf)
            us = attempt(partial(launch_time, partial(operands.gemv, choice), len(operands.weights), 3, worst))
            if us is not None and us < math.inf:
                times[choice] = us
        return dict(sorted(times.items(), key=lambda item: item[1]))

    def row(self, case: Case, times: Mapping[Choice, float]) -> dict[str, Any]:
        """The best right kernels of a case, plain and with overlap, timed once more and beside cuBLAS."""
        operands = self.operands(case)
        launches = len(operands.weights)
        row = {**asdict(case), "cublas_us": launch_time(operands.cublas, launches, 9), "wrong": []}
        for pdl, name in ((False, "plain"), (True, "pdl")):
            best, tile = math.nan, None
            for choice in [choice for choice in times if choice.pdl is pdl][:3]:
                if not operands.error(choice) < TOLERANCE:
                    row["wrong"].append(choice.keywords)
                    continue
                us = launch_time(partial(operands.gemv, choice), launches, 9)
                if not us >= best:
                    best, tile = us, choice.tile
            row |= {f"{name}_us": best, f"{name}_tile": tile}
        us = min((us for us in (row["plain_us"], row["pdl_us"]) if us > 0), default=math.nan)
        row |= {
            "us": us,
            "GB/s": case.weight_bytes / us / 1e3,
            "of_read": case.weight_bytes / us * 1e6 / self.bandwidth,
        }
        return row | {"timed": [{**choice.keywords, "us": us} for choice, us in times.items()]}


def run(cases: Sequence[Case], sweep: Sweep, compile_s: float, save: Callable[[dict[str, Any]], None]) -> None:
    """Compiles and times every choice of every case, then refines the best."""
    sweep.compiler.prepare([(case, choice) for case in cases for choice in choices(case)], compile_s)
    times = {case: attempt(partial(sweep.times, case, choices(case), {})) or {} for case in cases}
    finer = {case: refinements(case, list(times[case])) for case in cases}
    sweep.compiler.prepare([(case, choice) for case in cases for choice in finer[case]], compile_s)
    for case in cases:
        every = attempt(partial(sweep.times, case, finer[case], times[case])) or times[case]
        row = attempt(partial(sweep.row, case, every))
        if row is not None:
            save(row)


def chains(rows: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    """Milliseconds per token that the layers of each model take together."""
    sums: dict[str, dict[str, float]] = {}
    for row, key in itertools.product(rows, ("plain", "pdl", "cublas")):
        model = sums.setdefault(f"{row['model']} M={row['rows']}", {})
        model[key] = model.get(key, 0.0) + row["per_token"] * row[f"{key}_us"] / 1e3
    return sums


HEADER = "model        layer    M outputs     K n/k/warps/st       us with overlap       us   cuBLAS   GB/s of read"


def line(row: Mapping[str, Any]) -> str:
    """One line of the table."""
    plain, pdl = ("/".join(map(str, row[key] or "-")) for key in ("plain_tile", "pdl_tile"))
    return (
        f"{row['model']:12} {row['layer']:7} {row['rows']:2} {row['outputs']:7} {row['depth']:5} {plain:>12} "
        f"{row['plain_us']:8.2f} {pdl:>12} {row['pdl_us']:8.2f} {row['cublas_us']:8.2f} {row['GB/s']:6.0f} "
        f"{row['of_read']:7.3f}{'  WRONG: ' + str(row['wrong']) if row['wrong'] else ''}"
    )


def main() -> None:
    """Sweep every case and write gemv_sweep.json."""
    parser = report.parser(__doc__)
    parser.add_argument("--seconds", type=float, default=90.0, help="when to begin no more timings")
    parser.add_argument("--compile-seconds", type=float, default=45.0, help="limit of each round of compiling")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 4], help="batch sizes")
    parser.add_argument("--tiny", action="store_true", help="tiny shapes on the CPU under TRITON_INTERPRET=1")
    options = parser.parse_args()
    if options.tiny and os.environ.get("TRITON_INTERPRET") != "1":
        parser.error("--tiny needs TRITON_INTERPRET=1")
    start = time.monotonic()
    device = torch.device("cpu" if options.tiny else "cuda")
    bandwidth = 1e9 if options.tiny else limits.read_bandwidth()
    CONSOLE.print(f"read bandwidth {bandwidth / 1e12:.3f} TB/s")
    compiler = Compiler(1 if options.tiny else max(2, min(14, (os.cpu_count() or 4) - 2)), device)
    sweep = Sweep(device, compiler, bandwidth, start + options.seconds)
    rows: list[dict[str, Any]] = []

    def save(row: dict[str, Any]) -> None:  # at every row, so that a run that is cut off leaves what it has
        rows.append(row)
        notes = {"device": limits.device_name(device), "torch": torch.__version__, "triton": triton.__version__}
        content = {**notes, "read_bandwidth": bandwidth, "chains_ms": chains(rows), "rows": rows}
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / "gemv_sweep.json").write_text(json.dumps(content, indent=1) + "\n")

    try:
        for m in options.rows:
            cases = [replace(case, rows=m) for case in (TINY if options.tiny else CASES)]
            run(cases, sweep, options.compile_seconds, save)
            CONSOLE.print(f"batch {m} done after {time.monotonic() - start:.0f} s")
    finally:
        compiler.pool.shutdown(wait=False, cancel_futures=True)
        CONSOLE.print(HEADER)
        for row in rows:
            CONSOLE.print(line(row), soft_wrap=True)
        for name, sums in chains(rows).items():
            CONSOLE.print(f"{name:20}", "  ".join(f"{key} {ms:.3f}" for key, ms in sums.items()))


if __name__ == "__main__":
    main()
