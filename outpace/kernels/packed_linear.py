"""A linear layer with a quantized weight: x stays in 16 or 32 bits, and the weight is dequantized as it is read."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from outpace.kernels.activation import gated_act_torch, gated_act_triton
from outpace.kernels.gemv import FusedAround, fused_linear_torch
from outpace.kernels.invariant import gated_act_invariant
from outpace.kernels.matmul import matmul_invariant_torch, matmul_torch
from outpace.kernels.packed import Packed
from outpace.kernels.packed_digits import digits_linear, takes_digits
from outpace.kernels.packed_gemv import packed_gemv_triton, takes_chunks
from outpace.kernels.packed_matmul import dequantize_triton, invariant_tiles, packed_matmul_triton
from outpace.kernels.packed_tiles import TiledWeight, tiles_linear
from outpace.kernels.rms_norm import rms_norm_torch, rms_norm_triton

MOST_ROWS = (("few", 2), ("tiles", 256))
"""The most rows of the kernel of few rows and of the one with matrix units; with more, the weight is dequantized for
torch's product (bench/results/packed_sweep_*)."""
TORCH, TRITON = (rms_norm_torch, gated_act_torch), (rms_norm_triton, gated_act_triton)
"""The norm and the gated activation around a product."""


def packed_linear_dequantized(x: Tensor, weight: Packed, **around: Any) -> Tensor:
    """fused_linear_torch with a quantized weight, dequantized to the dtype of x. x: [M, K], weight: [N, K] → [M, N]."""
    return fused_linear_torch(x, weight.dequantized(x.dtype), **around)


def packed_linear_torch(x: Tensor, weight: Packed, **around: Any) -> Tensor:
    """packed_linear_dequantized; int8 weights with a scale for each row by integer products on a CPU."""
    if not takes_digits(x, weight):
        return packed_linear_dequantized(x, weight, **around)
    return _around(partial(_finished, lambda x: digits_linear(x, weight)), x, TORCH, **around)


def packed_linear_tiles(x: Tensor, weight: Packed | TiledWeight, **around: Any) -> Tensor:
    """packed_linear_torch; for a `TiledWeight`, products with few rows are computed in bf16."""
    if isinstance(weight, Packed):
        return packed_linear_torch(x, weight, **around)
    return _around(partial(_finished, lambda x: tiles_linear(x, weight)), x, TORCH, **around)


def _finished(
    product: Callable[[Tensor], Tensor],
    x: Tensor,
    *,
    bias: Tensor | None = None,
    add: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """product(x) + bias + add in the dtype of x, which may be overwritten."""
    y = product(x)
    y = y if y.dtype == torch.float32 or (bias is None and add is None) else y.float()
    for term in (bias, add):
        y = y if term is None else y.add_(term)
    return y.to(x.dtype) if out is None else out.copy_(y)


def packed_choice(rows: int, weight: Packed) -> str:
    """How to compute a product of this many rows: few, tiles or dequantize."""
    for name, most in MOST_ROWS:
        if rows <= most and (name != "few" or takes_chunks(weight)):
            return name
    return "dequantize"


def packed_linear_triton(x: Tensor, weight: Packed, **around: Any) -> Tensor:
    """packed_linear_dequantized by our kernels; up to 256 rows without a dequantized weight in memory."""
    choice = packed_choice(len(x), weight)
    if choice == "few":
        return packed_gemv_triton(x, weight, **around)

    def product(x: Tensor, **rest: Any) -> Tensor:
        if choice == "tiles":
            return packed_matmul_triton(x, weight, **rest)
        return matmul_torch(x, dequantize_triton(weight, x.dtype), **rest)

    return _around(product, x, TRITON, **around)


def packed_linear_invariant_torch(x: Tensor, weight: Packed, **around: Any) -> Tensor:
    """packed_linear_dequantized, each row bit for bit as if it were alone."""

    def product(x: Tensor, **rest: Any) -> Tensor:
        return matmul_invariant_torch(x, weight.dequantized(x.dtype), **rest)

    return _around(product, x, (rms_norm_torch, gated_act_invariant), **around)


def packed_linear_invariant_triton(x: Tensor, weight: Packed, **around: Any) -> Tensor:
    """packed_linear_invariant_torch by Triton, with the same tiles for any number of rows."""
    product = partial(packed_matmul_triton, weight=weight, tiles=invariant_tiles(*weight.shape))
    return _around(product, x, TRITON, **around)


def _around(
    product: Callable[..., Tensor], x: Tensor, ops: tuple[Callable[..., Tensor], Callable[..., Tensor]], **around: Any
) -> Tensor:
    """A product with the norm before it and the activation after it as separate ops.

    product: (x, bias=, add=, out=) → x @ weight.T + bias + add. ops: norm and activation.
    """
    (norm, act), f = ops, FusedAround(**around)
    if f.norm_weight is not None:
        x = norm(x, f.norm_weight, f.eps, weight_offset=f.weight_offset, round_before_weight=f.round_before_weight)
    if f.activation is None:
        return product(x, bias=f.bias, add=f.add, out=f.out)
    y = act(product(x, bias=f.bias), f.activation)
    y = y if f.add is None else y + f.add
    return y if f.out is None else f.out.copy_(y)
