"""Tiles of the expert kernels: each candidate checked against the reference and timed, the best first.

    python -m bench.experts_sweep --models qwen3-30b-a3b --tokens 1 8 32 512 8192

What wins goes into `tiles_for`, `up_config`, `down_config` and `prefers_few`. Compiling takes longer than timing: with
--compile nothing is timed, so that several processes can fill the kernel cache at once (--part 0/8, --part 1/8, ...).
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bench import experts, report
from bench.kernels import graph_ms
from outpace.bench import limits
from outpace.kernels.experts import experts_grouped, experts_ref
from outpace.kernels.experts_few import down_config, experts_few, up_config
from outpace.kernels.experts_many import Tiles, experts_many
from outpace.kernels.routing import route_ref

ERROR = 0.02  # of the largest result, in bf16
LONG = 1.0  # milliseconds of a call from which on it is timed by itself and not in a graph of many


def few_candidates(model: experts.MoE) -> Iterator[tuple[str, Callable[..., Tensor]]]:
    """The default tiles, and each kernel's others with the default of the other kernel."""
    yield "few", experts_few
    default = up_config(model.inner, model.hidden, True)
    for n, k, warps in itertools.product((1, 2, 4, 8), (512, 1024, 2048, 4096), (2, 4, 8)):
        if 8 <= 2 * n * k // (32 * warps) <= 128 and k <= 2 * model.hidden:  # weights of a thread
            up = {**default, "block_n": n, "block_k": k, "num_warps": warps}
            yield f"few up {n} x {k}, {warps} warps", partial(experts_few, up=up)
    usual = down_config(model.routing.top_k, model.inner)
    for n, k, warps in itertools.product((1, 2, 4, 8), (128, 256, 512, 1024), (2, 4, 8)):
        if 8 <= model.routing.top_k * n * k // (32 * warps) <= 128 and k <= 2 * model.inner:
            down = {**usual, "block_n": n, "block_k": k, "num_warps": warps}
            yield f"few down {n} x {k}, {warps} warps", partial(experts_few, down_tiles=down)


def many_candidates(rows: float) -> Iterator[tuple[str, Callable[..., Tensor]]]:
    """The default tiles, and those that fit experts of so many rows and the shared memory."""
    yield "many", experts_many
    heights = [m for m in (16, 32, 64, 128) if m <= max(16, 2 * rows) and 4 * m >= min(rows, 128)]
    for m, n, k, warps, stages in itertools.product(heights, (64, 128, 256), (64, 128), (4, 8), (3, 4, 5)):
        if (m + n) * k * 2 * stages <= 220 << 10 and 8 <= m * n // (32 * warps) <= 128:
            for down, group in itertools.product((n // 2, n), (1, 8) if rows > 256 else (8,)):
                tiles = Tiles(m, n, down, k, warps, stages, group)
                yield str(tiles), partial(experts_many, tiles=tiles)


def took(calls: Sequence[Callable[[], Tensor]]) -> float:
    """Milliseconds of one of the calls."""
    alone = limits.gpu_ms(calls[0], warm_ups=1, repeats=3)
    return graph_ms(calls) if alone < LONG else limits.gpu_ms(calls[0], warm_ups=0, repeats=10)


def sweep(
    model: experts.MoE, tokens: int, rates: dict[str, float], part: tuple[int, int] | None = None
) -> list[dict[str, Any]]:
    """Rows of every candidate for so many tokens, the fastest first. `part`: each so-manieth runs once, untimed."""
    make = partial(torch.randn, device="cuda", dtype=torch.bfloat16)
    gate_up = make(model.experts, 2 * model.inner, model.hidden) / model.hidden**0.5
    down = make(model.experts, model.hidden, model.inner) / model.inner**0.5
    turns = [make(tokens, model.hidden) for _ in range(8 if tokens <= 512 else 2)]
    routed = [route_ref(make(tokens, model.experts), model.routing) for _ in turns]
    amount, limit = experts.least(model, tokens, routed, rates)
    pairs = tokens * model.routing.top_k
    candidates = [("torch", experts_grouped), *many_candidates(pairs / min(pairs, model.experts))]
    candidates += few_candidates(model) if pairs <= experts.FEW_PAIRS else []
    want = experts_ref(turns[0], gate_up, down, *routed[0], act="silu").float()
    rows = []
    if part is not None:
        candidates = candidates[part[0] :: part[1]]
    for name, run in candidates:
        calls = [partial(run, x, gate_up, down, *chosen, act="silu") for x, chosen in zip(turns, routed, strict=True)]
        try:
            error = float((calls[0]().float() - want).abs().max() / want.abs().max())
            ms = took(calls) if error < ERROR and part is None else float("inf")
        except Exception as problem:  # a candidate that does not fit the device is no reason to stop
            print(f"{name}: {problem!r}"[:300], flush=True)
            continue
        rows.append({
            "model": model.name, "tokens": tokens, "what": name, "us": ms * 1e3,
            "of limit": amount / (ms * 1e-3) / rates[limit], "error": error,
        })  # fmt: skip
    return sorted(rows, key=lambda row: row["us"])


def measure(models: Sequence[experts.MoE], tokens: Sequence[int], best: int, folder: Path) -> None:
    """Print the best of every model and number of tokens, and write all."""
    rates = {"read": limits.read_bandwidth(), "product": limits.matmul_flops()}
    rows: list[dict[str, Any]] = []
    for model, count in itertools.product(models, tokens):
        found = sweep(model, count, rates)
        rows += found
        report.show(f"{model.name}, {count} tokens", found[:best])
        report.save("experts_sweep", limits.device_name(torch.device("cuda")), rows, rates, folder)
        torch.cuda.empty_cache()


def main() -> None:
    """Sweep from the command line."""
    names = [model.name for model in experts.MODELS]
    parser = report.parser(__doc__)
    parser.add_argument("--models", nargs="+", choices=names, default=names, metavar="MODEL", help=", ".join(names))
    parser.add_argument("--tokens", nargs="+", type=int, default=[1, 8, 32, 128, 512, 2048, 8192], metavar="N")
    parser.add_argument("--best", type=int, default=12, metavar="N", help="rows shown of each")
    parser.add_argument("--compile", action="store_true", help="run each candidate once, time none")
    parser.add_argument("--part", default="0/1", metavar="I/N", help="with --compile: every N-th candidate from I on")
    args = parser.parse_args()
    models = [model for model in experts.MODELS if model.name in args.models]
    if args.compile:
        first, step = map(int, args.part.split("/"))
        for model, count in itertools.product(models, args.tokens):
            sweep(model, count, {"read": 1.0, "product": 1.0}, (first, step))
    else:
        measure(models, args.tokens, args.best, args.out)


if __name__ == "__main__":
    main()
