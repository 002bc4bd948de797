"""Kernels at the sizes of models, each as a share of the device's limit: `scripts/bench kernels`.

The limit of kernels that move bytes is the read bandwidth (or that of a copy, if they write as much as they read); that
of kernels that multiply is the rate of a large bf16 product. Each is timed in a CUDA graph of many launches over
different data, so that neither launch gaps nor the L2 cache are measured. --sweep also tries other tiles, checks their
results and shows the fastest; these go into the tile tables of outpace/kernels.
"""

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import product
from typing import Any

import torch

from bench import kernel_cases, linear_cases, report
from bench.expert_cases import experts
from bench.kernel_cases import KINDS, Case, Model, Way, Work
from bench.linear_cases import linears
from bench.report import DEVICE
from outpace.kernels import limits
from outpace.kernels.compile_ahead import compile_ahead
from outpace.kernels.launch_options import MAX_ROWS

MODELS = ("llama-3.2-1b", "llama-3.1-8b", "llama-3.1-70b", "mixtral-8x7b", "qwen3-30b-a3b")
PARTS: Mapping[str, Callable[[Model, Work], Iterator[Case]]] = {
    "streaming": kernel_cases.streaming, "attention": kernel_cases.attention, "experts": experts,
    "gemv": partial(linears, "gemv", linear_cases.gemv, MAX_ROWS),
    "packed": partial(linears, "packed", linear_cases.packed, 1 << 20),
    "invariant": partial(linears, "invariant", linear_cases.invariant, 1 << 20),
    "tuned": partial(linears, "tuned", linear_cases.tuned, 1 << 20),
}  # fmt: skip
ROWS: Mapping[str, Sequence[int]] = {
    "gemv": (1,), "experts": (1, 2, 4, 8, 16, 32, 64, 128, 512, 2048, 8192), "packed": (1, 4, 16, 64, 256),
    "invariant": (1, 16, 64, 256, 2048), "tuned": (32, 64, 128, 192, 232, 256, 512, 2048),
}  # fmt: skip
SCHEMES: Mapping[str, tuple[str, ...]] = {"experts": ("none", *KINDS), "packed": tuple(KINDS)}
"""Kinds of weights that a part can measure. Other parts have plain weights alone."""
BEST = 8  # fastest rows of each case of a sweep that are shown
GRAPH_MS = 2.0  # least milliseconds of work in a graph, so that its own launch does not matter

Calls = Sequence[Callable[[], object]]


def kinds_of(part: str, asked: Sequence[str]) -> list[str]:
    """The kinds of weights to measure: those that were asked for, as far as the part has them."""
    usual = KINDS if part == "packed" else ("none",)
    return [kind for kind in asked or usual if kind in SCHEMES.get(part, ())]


def seconds_of(calls: Calls) -> float:
    """Mean seconds of a call, in a CUDA graph of many; on a CPU, seconds of the first call."""
    if DEVICE.type == "cpu":
        return limits.seconds_of(calls[0], DEVICE)
    for call in calls:
        call()
    torch.cuda.synchronize()
    alone = limits.gpu_ms(calls[0], warm_ups=1, repeats=3)
    turns = max(1, math.ceil(GRAPH_MS / alone / len(calls)))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in [*calls] * turns:
            call()
    return limits.gpu_ms(graph.replay, warm_ups=2, repeats=20) * 1e-3 / (turns * len(calls))


def error_of(way: Way, case: Case, want: torch.Tensor) -> float:
    """The largest error of a result, relative to the largest number; NaN if something was not written."""
    torch.use_deterministic_algorithms(True, warn_only=True)  # this fills new memory with NaN
    try:
        got = way.run(*case.inputs[0])
    finally:
        torch.use_deterministic_algorithms(False)
    return float((got.float() - want).abs().max() / want.abs().max())


def time_way(way: Way, case: Case, want: torch.Tensor | None, rates: Mapping[str, float]) -> dict[str, Any] | None:
    """A row; None: the result is wrong or the kernel does not fit the device, which is printed."""
    try:
        error = 0.0 if want is None or way.tolerance == math.inf else error_of(way, case, want)
        if not error <= way.tolerance:
            raise ArithmeticError(f"error {error:.3g} relative to the largest result, allowed: {way.tolerance}")
        took = seconds_of([partial(way.run, *each) for each in case.inputs])
    except Exception as problem:
        report.CONSOLE.print(f"{case.kernel}, {case.what}: {way.name}: {problem!r}"[:300], soft_wrap=True)
        return None
    rate = case.amount / took
    return {
        "kernel": case.kernel, "what": case.what, "way": way.name, "us": took * 1e6, "T/s": rate / 1e12,
        "limit": case.limit, "of limit": rate / rates[case.limit],
    }  # fmt: skip


@torch.no_grad()
def time_case(case: Case, rates: Mapping[str, float], *, sweep: bool) -> list[dict[str, Any]]:
    """Rows for the ways of a case; in a sweep also for all candidates, the fastest first."""
    ways, want = [*case.ways, *(case.candidates if sweep else ())], None
    if sweep:
        compile_ahead(partial(_tried, way, case) for way in ways)
    if case.want is not None:
        want = case.want().float()
    found = [row for way in ways if (row := time_way(way, case, want, rates)) is not None]
    return sorted(found, key=lambda row: row["us"]) if sweep else found


def _tried(way: Way, case: Case) -> None:
    with contextlib.suppress(Exception):  # the same error is printed when it is timed
        way.run(*case.inputs[0])


def main(arguments: Sequence[str] | None = None) -> None:
    """Time the requested parts and write the table; show the fastest ways of each case of a sweep."""
    parser = report.parser(__doc__)
    models = [Model.of(name) for name in MODELS]
    parser.add_argument(
        "--models", nargs="+", type=Model.of, default=models, metavar="NAME[:RANKS]", help="shapes, or one rank of them"
    )
    usual = ["streaming", "attention", "gemv", "experts"]
    parser.add_argument("--only", nargs="+", choices=PARTS, default=usual, metavar="PART", help=", ".join(PARTS))
    parser.add_argument("--rows", nargs="+", type=int, default=[], metavar="N", help="tokens of a product")
    parser.add_argument("--kinds", nargs="+", choices=("none", *KINDS), default=[], metavar="KIND", help="of weights")
    parser.add_argument("--sweep", action="store_true", help="try other tiles too")
    asked = parser.parse_args(arguments)
    rates = {"read": 1e10, "copy": 1e10, "product": 1e11}
    if DEVICE.type == "cuda":
        rates = {"read": limits.read_bandwidth(), "copy": limits.copy_bandwidth(), "product": limits.matmul_flops()}
    found, device = list[dict[str, Any]](), limits.device_name(DEVICE)
    notes = {f"{name} T/s": rate / 1e12 for name, rate in rates.items()}
    for model, part in product(asked.models, asked.only):
        work = Work(asked.rows or ROWS.get(part, ()), kinds_of(part, asked.kinds))
        if asked.kinds and part in SCHEMES and not work.kinds:
            continue  # it has none of them
        for case in PARTS[part](model, work):
            new = [{"model": model.name, **row} for row in time_case(case, rates, sweep=asked.sweep)]
            found += new
            if asked.sweep and new:
                usual = [way.name for way in case.ways]
                rest = [row for row in new[BEST:] if row["way"] in usual]
                report.show(f"{model.name}, {case.kernel}", new[:BEST] + rest)
            report.save("kernels", device, found, notes, asked.out)
            torch.cuda.empty_cache()
    report.show("kernels", found)


if __name__ == "__main__":
    main()
