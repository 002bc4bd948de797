"""Tiles of the products with quantized weights: each candidate checked against the formula and timed, the best first.

    python -m bench.packed_sweep --layers qkv down --kinds int8 int4 --rows 1 8 64

What wins goes into `packed_gemv_config`, `packed_tiles`, `scaled_tiles`, `MOST_ROWS` and `LIBRARY_ROWS`. Compiling
takes longer than timing: with --compile nothing is timed, so that several processes can fill the kernel cache at once
(--part 0/8, --part 1/8, ...).
"""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from bench import report
from bench.kernels import graph_ms
from outpace.kernels import limits
from outpace.kernels.gemv import MAX_ROWS
from outpace.kernels.matmul import matmul_torch
from outpace.kernels.packed import Packed
from outpace.kernels.packed_gemv import packed_gemv_triton
from outpace.kernels.packed_matmul import PackedTiles, dequantize_triton, packed_matmul_triton
from outpace.kernels.quantize import quantize_rows_triton
from outpace.kernels.scaled_linear import scaled_linear_triton, scaled_matmul_triton

LAYERS: Mapping[str, tuple[int, int]] = MappingProxyType(
    {"qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (28672, 4096), "down": (4096, 14336), "head": (128256, 4096)}
)
"""(N, K) of Llama-3.1-8B."""
KINDS: Mapping[str, tuple[str, int | None, int]] = MappingProxyType(
    {"int8": ("int8", None, 1), "int4": ("int4", 128, 1), "fp8": ("fp8", None, 1), "fp8-blocks": ("fp8", 128, 128)}
)
"""Kind, group and block of each scheme; a group of None is a whole row."""
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
ERROR = 0.02  # of the largest result, in bf16; of quantized activations 0.1
COLD = 200 << 20  # bytes of weights that are read in turn: more than the L2 cache holds
Run = Callable[[Tensor, Packed], Tensor]


def make(kind: str, shape: tuple[int, int], experts: int | None = None) -> Packed:
    """A random weight of this scheme on the GPU, or a stack of them."""
    name, group, block = KINDS[kind]
    kept = torch.float16 if name == "int4" else torch.float32
    weight = Packed.empty(name, shape, group or shape[1], block, experts=experts, scale_dtype=kept, device="cuda")
    if name == "fp8":
        weight.values.copy_(torch.randn(weight.values.shape, device="cuda") * 60)
    else:
        low, high = (-127, 128) if name == "int8" else (0, 256)
        weight.values.copy_(torch.randint(low, high, weight.values.shape, device="cuda"))
    size = {"int8": 73.0, "int4": 4.6, "fp8": 60.0}[name] * shape[1] ** 0.5
    weight.scale.uniform_(0.5 / size, 1.5 / size)
    return weight


def few_candidates(kind: str, rows: int) -> Iterator[tuple[str, Run]]:
    """The kernel of few rows: tiles with 16 to 128 bytes for each thread."""
    bits = 4 if kind == "int4" else 8
    for n, k, warps in itertools.product((1, 2, 4, 8), (512, 1024, 2048, 4096), (1, 2, 4)):
        each = n * k // (32 * warps)  # weights of a thread
        wide = k >= (8 if kind == "fp8" else 128 // bits) * 32 * warps
        if 32 <= each * bits // 8 <= 128 and wide and rows * each <= 512:
            config = {"block_n": n, "block_k": k, "num_warps": warps}
            yield f"few {n} x {k}, {warps} warps", partial(packed_gemv_triton, config=config)


def tiles_for(rows: int, outputs: int, depth: int, size: int) -> Iterator[PackedTiles]:
    """Tiles that fit so many rows and the shared memory; `size`: bytes of a number of x."""
    heights = [m for m in (16, 32, 64, 128, 256) if m >= min(rows, 64) and m < max(32, 2 * rows)]
    depths = (128,) if size == 1 else (64, 128)
    for m, n, k, stages, warps in itertools.product(heights, (64, 128), depths, (3, 4), (4, 8)):
        programs = -(-outputs // n) * -(-rows // m)
        if (m * size + n) * k * stages > 220 << 10 or m * n > 8192 * warps // 4 or (warps == 8 and m * n < 8192):
            continue
        for split in (1, 2, 4):
            if split == 1 or (programs * split <= 800 and depth // split >= 512):
                yield PackedTiles(m, n, k, warps, stages, split)


def scaled(x: Tensor, weight: Packed, tiles: PackedTiles | None = None, library: bool = False) -> Tensor:
    """Rows quantized, then multiplied: what a layer with quantized activations takes in all."""
    values, scales = quantize_rows_triton(x, weight.kind)
    if library:
        return scaled_linear_triton(values, scales, weight, dtype=x.dtype)
    return scaled_matmul_triton(values, scales, weight, dtype=x.dtype, tiles=tiles)


def candidates(kind: str, rows: int, shape: tuple[int, int]) -> Iterator[tuple[str, Run]]:
    """Every way to multiply so many rows."""
    yield "dequantized", lambda x, weight: matmul_torch(x, dequantize_triton(weight, x.dtype))
    if rows <= MAX_ROWS:
        yield "few", packed_gemv_triton
        yield from few_candidates(kind, rows)
    yield "tiles", packed_matmul_triton
    for tiles in tiles_for(rows, *shape, size=2):
        yield f"tiles {tiles}", partial(packed_matmul_triton, tiles=tiles)
    if kind != "int4":
        yield "scaled", scaled
        yield "scaled, by the library for many rows", partial(scaled, library=True)
        for tiles in tiles_for(rows, *shape, size=1):
            yield f"scaled {tiles}", partial(scaled, tiles=tiles)


def sweep(
    layer: str,
    kind: str,
    rows: int,
    rates: Mapping[str, float],
    only: Sequence[str] = (),
    part: tuple[int, int] | None = None,
) -> list[dict[str, Any]]:
    """Rows of every candidate, the fastest first. `only`: how names begin; `part`: every so many run once, untimed."""
    shape = LAYERS[layer]
    weights = [make(kind, shape)]
    weights += [make(kind, shape) for _ in range(0 if part else COLD // weights[0].nbytes)]
    x = torch.randn(rows, shape[1], device="cuda").bfloat16()
    want = x.float() @ weights[0].dequantized(torch.float32).T
    found, plain = [], [weight.dequantized(torch.bfloat16) for weight in weights]
    wanted = (each for each in candidates(kind, rows, shape) if each[0].startswith(tuple(only) or ""))
    listed: list[tuple[str, Any]] = [("bf16", None), *wanted]
    for name, run in listed if part is None else listed[part[0] :: part[1]]:
        calls: list[Callable[[], Tensor]]
        if run is None:
            calls = [partial(matmul_torch, x, weight) for weight in plain]
        else:
            calls = [partial(run, x, weight) for weight in weights]
        try:
            error = float((calls[0]().float() - want).abs().max() / want.abs().max())
            good = error < (0.1 if name.startswith("scaled") else ERROR)
            ms = graph_ms(calls) if good and part is None else float("inf")
        except Exception as problem:  # a candidate that does not fit the device is no reason to stop
            print(f"{name}: {problem!r}"[:300], flush=True)
            continue
        size = plain[0].nbytes if run is None else weights[0].nbytes
        found.append({
            "layer": layer, "kind": kind, "rows": rows, "what": name, "us": ms * 1e3,
            "of read limit": size / (ms * 1e-3) / rates["read"], "error": error,
        })  # fmt: skip
    return sorted(found, key=lambda row: row["us"])


def measure(
    layers: Sequence[str], kinds: Sequence[str], counts: Sequence[int], only: Sequence[str], best: int, folder: Path
) -> None:
    """Print the best of every layer, scheme and number of rows, and write all."""
    rates = {"read": limits.read_bandwidth(), "product": limits.matmul_flops()}
    rows: list[dict[str, Any]] = []
    for layer, kind, count in itertools.product(layers, kinds, counts):
        found = sweep(layer, kind, count, rates, only)
        rows += found
        plain = [row for row in found[best:] if row["what"] in ("bf16", "few", "tiles", "dequantized", "scaled")]
        report.show(f"{layer}, {kind}, {count} rows", found[:best] + plain)
        report.save("packed_sweep", limits.device_name(torch.device("cuda")), rows, rates, folder)
        torch.cuda.empty_cache()


def main() -> None:
    """Sweep from the command line."""
    parser = report.parser(__doc__)
    parser.add_argument("--layers", nargs="+", choices=LAYERS, default=list(LAYERS), metavar="LAYER")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS), metavar="KIND")
    parser.add_argument("--rows", nargs="+", type=int, default=list(ROWS), metavar="N")
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="how the names of candidates begin")
    parser.add_argument("--best", type=int, default=8, metavar="N", help="rows shown of each")
    parser.add_argument("--compile", action="store_true", help="run each candidate once, time none")
    parser.add_argument("--part", default="0/1", metavar="I/N", help="with --compile: every N-th candidate from I on")
    args = parser.parse_args()
    if args.compile:
        first, step = map(int, args.part.split("/"))
        for layer, kind, count in itertools.product(args.layers, args.kinds, args.rows):
            sweep(layer, kind, count, {"read": 1.0, "product": 1.0}, args.only, (first, step))
    else:
        measure(args.layers, args.kinds, args.rows, args.only, args.best, args.out)


if __name__ == "__main__":
    main()
