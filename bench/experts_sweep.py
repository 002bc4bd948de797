"""Tiles of the expert kernels: each candidate checked against the reference and timed, the best first.

    python -m bench.experts_sweep --models qwen3-30b-a3b --tokens 1 8 32 512 8192 --kinds none int4 fp8

What wins goes into `tiles_for`, `up_config`, `down_config`, `few_packed_config`, `scaled_tiles`, `prefers_few` and
`prefers_rounded`. With a kind of quantized weights each candidate is beside what 16 bits take. Compiling takes longer
than timing: with --compile nothing is timed, so that several processes can fill the kernel cache at once (--part 0/8,
--part 1/8, ...).
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bench import experts, packed_sweep, report
from bench.kernels import graph_ms
from outpace.kernels import limits
from outpace.kernels.experts import Stack, experts_grouped, experts_ref, experts_triton
from outpace.kernels.experts_few import down_config, experts_few, up_config
from outpace.kernels.experts_few_packed import experts_few_packed
from outpace.kernels.experts_many import Tiles, experts_many
from outpace.kernels.packed import Packed
from outpace.kernels.packed_gemv import fitting_depth
from outpace.kernels.routing import route_ref

ERROR = 0.02  # of the largest result, in bf16
ROUNDED_ERROR = 0.1  # of that with rounded rows
LEAST_ROUNDED = 16  # rows of an expert in the mean
Named = tuple[str, Callable[..., Tensor]]
"""A candidate and what it is called."""
PLAIN = "none"  # of --kinds
LONG = 1.0  # milliseconds of a call from which on it is timed by itself and not in a graph of many


def few_candidates(model: experts.MoE) -> Iterator[Named]:
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


def packed_few_candidates(model: experts.MoE, gate_up: Packed, down: Packed) -> Iterator[Named]:
    """The same of quantized experts: tiles with 16 to 128 bytes for each thread."""
    run: Any = experts_few_packed
    yield "few", run
    bits = 4 if gate_up.kind == "int4" else 8
    whole: tuple[tuple[str, str, Packed, int], ...] = (
        ("up", "up", gate_up, 2),
        ("down", "down_tiles", down, model.routing.top_k),
    )
    for name, option, stack, rows in whole:
        for n, k, warps in itertools.product((1, 2, 4, 8), (256, 512, 1024, 2048), (1, 2, 4)):
            each = rows * n * k // (32 * warps)  # weights of a thread
            if 16 <= each * bits // 8 <= 128 and k <= 2 * stack.shape[1]:
                tiles = {"block_n": n, "block_k": fitting_depth(stack, k), "num_warps": warps}
                yield f"few {name} {n} x {k}, {warps} warps", partial(run, **{option: tiles})


def many_candidates(rows: float, size: float = 2.0) -> Iterator[Named]:
    """The default tiles, and those that fit experts of so many rows and the shared memory; size: bytes of a weight."""
    yield "many", experts_many
    heights = [m for m in (16, 32, 64, 128) if m <= max(16, 2 * rows) and 4 * m >= min(rows, 128)]
    for m, n, k, warps, stages in itertools.product(heights, (64, 128, 256), (64, 128), (4, 8), (3, 4, 5)):
        if (2 * m + size * n) * k * stages <= 220 << 10 and 8 <= m * n // (32 * warps) <= 128:
            for down, group in itertools.product((n // 2, n), (1, 8) if rows > 256 else (8,)):
                tiles = Tiles(m, n, down, k, warps, stages, group)
                yield str(tiles), partial(experts_many, tiles=tiles)


def rounded_candidates(rows: float, kind: str) -> Iterator[Named]:
    """Many tokens whose rows are rounded like the weights."""
    run = partial(experts_many, rows=packed_sweep.KINDS[kind][0])
    yield "rounded", run
    heights = [m for m in (64, 128) if 4 * m >= min(rows, 128)]
    for m, n, k, warps, stages in itertools.product(heights, (64, 128, 256), (64, 128), (4, 8), (3, 4)):
        if (m + n) * k * stages <= 220 << 10 and 8 <= m * n // (32 * warps) <= 64:
            for down, group in itertools.product((n // 2, n), (1, 8) if rows > 256 else (8,)):
                tiles = Tiles(m, n, down, k, warps, stages, group)
                yield f"rounded {tiles}", partial(run, tiles=tiles)


def took(calls: Sequence[Callable[[], Tensor]]) -> float:
    """Milliseconds of one of the calls."""
    alone = limits.gpu_ms(calls[0], warm_ups=1, repeats=3)
    return graph_ms(calls) if alone < LONG else limits.gpu_ms(calls[0], warm_ups=0, repeats=10)


def _in_bf16(gate_up: Packed, down: Packed) -> Named:
    """What the same weights take in 16 bits."""
    plain = gate_up.dequantized(torch.bfloat16), down.dequantized(torch.bfloat16)

    def run(x: Tensor, gate_up: Packed, down: Packed, weights: Tensor, chosen: Tensor, *, act: str) -> Tensor:
        return experts_triton(x, *plain, weights, chosen, act=act)

    return "bf16", run


def sweep(
    model: experts.MoE, tokens: int, rates: dict[str, float], kind: str = PLAIN, part: tuple[int, int] | None = None
) -> list[dict[str, Any]]:
    """Rows of every candidate for so many tokens, the fastest first. `part`: each so-manieth runs once, untimed."""
    make = partial(torch.randn, device="cuda", dtype=torch.bfloat16)
    shapes = (2 * model.inner, model.hidden), (model.hidden, model.inner)
    turns = [make(tokens, model.hidden) for _ in range(8 if tokens <= 512 else 2)]
    routed = [route_ref(make(tokens, model.experts), model.routing) for _ in turns]
    pairs = tokens * model.routing.top_k
    rows = pairs / min(pairs, model.experts)
    stacks: tuple[Stack, Stack]
    candidates: list[Named]
    if kind == PLAIN:
        up, down = (make(model.experts, *shape) / shape[1] ** 0.5 for shape in shapes)
        stacks = up, down
        amount, limit = experts.least(model, tokens, routed, rates)
        candidates = [("torch", experts_grouped), *many_candidates(rows)]
        candidates += few_candidates(model) if pairs <= experts.FEW_PAIRS else []
    else:
        packed = packed_sweep.make(kind, shapes[0], model.experts), packed_sweep.make(kind, shapes[1], model.experts)
        stacks = packed
        amount, limit = experts.least(model, tokens, routed, rates, sum(each.nbytes for each in packed) / model.experts)
        candidates = [_in_bf16(*packed), *many_candidates(rows, 0.5 if kind == "int4" else 1.0)]
        candidates += packed_few_candidates(model, *packed) if pairs <= experts.FEW_PAIRS else []
        candidates += rounded_candidates(rows, kind) if kind != "int4" and rows > LEAST_ROUNDED else []
    want = experts_ref(turns[0], *stacks, *routed[0], act="silu").float()
    found = []
    for name, run in candidates if part is None else candidates[part[0] :: part[1]]:
        calls = [partial(run, x, *stacks, *chosen, act="silu") for x, chosen in zip(turns, routed, strict=True)]
        try:
            error = float((calls[0]().float() - want).abs().max() / want.abs().max())
            good = error < (ROUNDED_ERROR if name.startswith("rounded") else ERROR)
            ms = took(calls) if good and part is None else float("inf")
        except Exception as problem:  # a candidate that does not fit the device is no reason to stop
            print(f"{name}: {problem!r}"[:300], flush=True)
            continue
        found.append({
            "model": model.name, "kind": kind, "tokens": tokens, "what": name, "us": ms * 1e3,
            "of limit": amount / (ms * 1e-3) / rates[limit], "error": error,
        })  # fmt: skip
    return sorted(found, key=lambda row: row["us"])


def measure(
    models: Sequence[experts.MoE], kinds: Sequence[str], tokens: Sequence[int], best: int, folder: Path
) -> None:
    """Print the best of every model, kind of weights and number of tokens, and write all."""
    rates = {"read": limits.read_bandwidth(), "product": limits.matmul_flops()}
    rows: list[dict[str, Any]] = []
    for model, kind, count in itertools.product(models, kinds, tokens):
        found = sweep(model, count, rates, kind)
        rows += found
        named = [row for row in found[best:] if row["what"] in ("bf16", "few", "many", "rounded", "torch")]
        report.show(f"{model.name}, {kind}, {count} tokens", found[:best] + named)
        report.save("experts_sweep", limits.device_name(torch.device("cuda")), rows, rates, folder)
        torch.cuda.empty_cache()


def main() -> None:
    """Sweep from the command line."""
    names = [model.name for model in experts.MODELS]
    parser = report.parser(__doc__)
    parser.add_argument("--models", nargs="+", choices=names, default=names, metavar="MODEL", help=", ".join(names))
    parser.add_argument("--tokens", nargs="+", type=int, default=[1, 8, 32, 128, 512, 2048, 8192], metavar="N")
    kinds = (PLAIN, *packed_sweep.KINDS)
    parser.add_argument("--kinds", nargs="+", choices=kinds, default=[PLAIN], metavar="KIND", help=", ".join(kinds))
    parser.add_argument("--best", type=int, default=12, metavar="N", help="rows shown of each")
    parser.add_argument("--compile", action="store_true", help="run each candidate once, time none")
    parser.add_argument("--part", default="0/1", metavar="I/N", help="with --compile: every N-th candidate from I on")
    args = parser.parse_args()
    models = [model for model in experts.MODELS if model.name in args.models]
    if args.compile:
        first, step = map(int, args.part.split("/"))
        for model, kind, count in itertools.product(models, args.kinds, args.tokens):
            sweep(model, count, {"read": 1.0, "product": 1.0}, kind, (first, step))
    else:
        measure(models, args.kinds, args.tokens, args.best, args.out)


if __name__ == "__main__":
    main()
