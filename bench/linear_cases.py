"""The cases of `scripts/bench kernels` for linear layers: in 16 bits, quantized, batch-invariant, tuned."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.kernel_cases import DTYPE, ROUNDED, SHARED, Case, Model, Run, Way, Work, copies, randn, random_weight
from bench.report import DEVICE
from outpace.kernels.cublaslt import CublasLt, Product
from outpace.kernels.few_rows import MAX_BLOCKS, few_rows_triton
from outpace.kernels.gemv import fused_linear_torch, gemv_triton
from outpace.kernels.launch_options import MAX_ROWS
from outpace.kernels.library import TunedLinear
from outpace.kernels.matmul import MatmulTiles, chunk_depth, matmul_invariant_triton, matmul_torch
from outpace.kernels.packed import Packed
from outpace.kernels.packed_gemv import packed_gemv_triton
from outpace.kernels.packed_matmul import PackedTiles, dequantize_triton, packed_matmul_triton
from outpace.kernels.product_search import DeviceClock, Kind, tune
from outpace.kernels.quantize import quantize_rows_triton
from outpace.kernels.scaled_linear import scaled_linear_triton, scaled_matmul_triton


class Linear(NamedTuple):
    """A linear layer and the rows of its input; a gated layer has two rows of the weight for each output."""

    layer: str
    rows: int
    outputs: int
    depth: int
    kind: str
    weights: Sequence[Any]

    @property
    def gated(self) -> bool:
        """Whether gates and ups are one weight."""
        return self.layer == "gate_up"


Ways = tuple[Run, Sequence[Way], Iterator[Way]]
"""The function with the right result, the ways that are always timed, and the candidates of a sweep."""


def linears(name: str, ways: Callable[[Linear], Ways], most: int, model: Model, work: Work) -> Iterator[Case]:
    """Every linear layer of a model with every kind of weights, for up to `most` rows."""
    for kind, (layer, (outputs, depth)) in product(work.kinds or ("none",), model.linears().items()):
        shape = outputs * (1 + (layer == "gate_up")), depth
        weights = [random_weight(kind, shape)]
        weights += [random_weight(kind, shape) for _ in range(copies(weights[0].nbytes) - 1)]
        for rows in [rows for rows in work.rows if rows <= most]:
            inputs = [(randn(rows, depth), weight) for weight in weights]
            right, usual, others = ways(Linear(layer, rows, outputs, depth, kind, weights))
            bound = (float(weights[0].nbytes), "read") if rows <= 256 else (2.0 * rows * shape[0] * depth, "product")
            what = f"{layer} {rows} x {shape[0]} x {depth}{f', {kind}' * (kind != 'none')}"
            yield Case(name, what, inputs, usual, *bound, partial(right, *inputs[0]), others)


def gemv(each: Linear) -> Ways:
    """The kernel as a decode step launches it, with everything that is fused into it; torch: only the product."""
    fused: dict[str, Any] = {"norm_weight": randn(each.depth), "eps": 1e-5}
    if each.layer in ("o", "down"):
        fused = {"add": randn(each.rows, each.outputs)}
    if each.gated:
        fused["activation"] = "silu"
    run = partial(gemv_triton, **fused)
    own = run
    if each.rows > 1:  # counts: a graph that is captured here could not make them
        counts = torch.zeros(MAX_BLOCKS, dtype=torch.int32, device=DEVICE)
        own = partial(few_rows_triton, counts=counts, **fused)
    usual = [Way("own", own), Way("torch", F.linear, float("inf"))]
    return partial(fused_linear_torch, **fused), usual, _gemv_tiles(run, each.rows * (1 + each.gated), each.depth)


def _gemv_tiles(run: Run, rows: int, depth: int) -> Iterator[Way]:
    """Tiles with 16-byte loads of weight and x, and sums that fit the registers of a thread; overlapping or not."""
    widest, height = max(256, 1 << (depth - 1).bit_length()), 1 << (rows - 1).bit_length()
    sizes = product((1, 2, 4, 8), (256, 512, 1024, 2048, 4096), (1, 2, 4, 8), (1, 3), (False, True))
    for n, k, warps, stages, overlaps in sizes:
        if 256 * warps <= k <= widest and height * n * k <= 64 * 32 * warps and (stages == 1 or k < depth):
            config = {"block_n": n, "block_k": k, "num_warps": warps, "num_stages": stages}
            yield Way(f"{config}{', overlapping' * overlaps}", partial(run, config=config, pdl=overlaps))


def invariant(each: Linear) -> Ways:
    """The batch-invariant product: all tiles must give the same bits."""
    usual = [Way("own", matmul_invariant_triton, 0.0), Way("torch", F.linear, float("inf"))]
    return matmul_invariant_triton, usual, _invariant_tiles(each.rows, each.outputs * (1 + each.gated), each.depth)


def _invariant_tiles(rows: int, outputs: int, depth: int) -> Iterator[Way]:
    splits = (False, True) if rows <= 256 and depth > chunk_depth(outputs, depth) else (False,)
    heights, widths = ((64,), (16, 32, 64, 128)) if rows <= 64 else ((64, 128, 256), (64, 128, 256))
    for m, n, k, stages, split in product(heights, widths, (64, 128), (3, 4, 5), splits):
        if (m + n) * k * 2 * stages <= SHARED // (2 if rows <= 64 else 1) and m * n <= 1 << 15:
            tiles = MatmulTiles(m, n, k, 8 if m * n > 8192 else 4, stages, split)
            yield Way(str(tiles), partial(matmul_invariant_triton, tiles=tiles), 0.0)


def tuned(each: Linear) -> Ways:
    """torch, and the algorithm that a start with kernels={"linear": "tuned"} finds."""
    linear = TunedLinear()
    wanted = Product(each.rows, each.outputs * (1 + each.gated), each.depth, DTYPE, False, False)
    kind = Kind(wanted, tuple((weight, None) for weight in each.weights), (each.rows,))
    linear.use(tune([kind], CublasLt.find(), DeviceClock(), {}, seconds=20.0).plans)
    by = "cublasLt" if wanted in linear.table else "torch"
    return matmul_torch, [Way("torch", matmul_torch), Way(f"tuned: {by}", linear)], iter(())


def packed(each: Linear) -> Ways:
    """Quantized weights: the kernels for few and for many rows, dequantized weights, and quantized rows."""
    usual = [Way("dequantized", lambda x, weight: matmul_torch(x, dequantize_triton(weight, x.dtype)))]
    usual.append(Way("many", packed_matmul_triton))
    if each.rows <= MAX_ROWS:
        usual.append(Way("few", packed_gemv_triton))
    if each.kind != "int4":
        usual.append(Way("scaled", _scaled, ROUNDED))
        usual.append(Way("scaled, by the library for many rows", partial(_scaled, run=scaled_linear_triton), ROUNDED))
    return lambda x, weight: x.float() @ weight.dequantized(torch.float32).T, usual, _packed_tiles(each)


def _scaled(x: Tensor, weight: Packed, run: Run = scaled_matmul_triton, **tiles: Any) -> Tensor:
    """Quantize the rows, then multiply: all the work of a layer with quantized activations."""
    values, scales = quantize_rows_triton(x, weight.kind)
    result: Tensor = run(values, scales, weight, dtype=x.dtype, **tiles)
    return result


def _packed_tiles(each: Linear) -> Iterator[Way]:
    """Few rows: 32 to 128 bytes of weights per thread. Many: tiles that suit the rows and fit the shared memory."""
    bits = 4 if each.kind == "int4" else 8
    for n, k, warps in product((1, 2, 4, 8), (512, 1024, 2048, 4096), (1, 2, 4)):
        weights = n * k // (32 * warps)  # of a thread
        if each.rows <= MAX_ROWS and 32 <= weights * bits // 8 <= 128 and each.rows * weights <= 512:
            config = {"block_n": n, "block_k": k, "num_warps": warps}
            yield Way(f"few {config}", partial(packed_gemv_triton, config=config))
    for tiles in _matmul_tiles(each, size=2):
        yield Way(f"many {tiles}", partial(packed_matmul_triton, tiles=tiles))
    for tiles in _matmul_tiles(each, size=1) if each.kind != "int4" else ():
        yield Way(f"scaled {tiles}", partial(_scaled, tiles=tiles), ROUNDED)


def _matmul_tiles(each: Linear, size: int) -> Iterator[PackedTiles]:
    """Tiles that fit; size: bytes of an element of x."""
    heights = [m for m in (16, 32, 64, 128, 256) if min(each.rows, 64) <= m < max(32, 2 * each.rows)]
    for m, n, k, stages, warps in product(heights, (64, 128), (64, 128)[size == 1 :], (3, 4), (4, 8)):
        programs = -(-each.outputs // n) * -(-each.rows // m)
        if (m * size + n) * k * stages > SHARED or m * n > 8192 * warps // 4 or (warps == 8 and m * n < 8192):
            continue
        for split in (1, 2, 4):
            if split == 1 or (programs * split <= 800 and each.depth // split >= 512):
                yield PackedTiles(m, n, k, warps, stages, split)
