"""A linear layer with a quantized weight: x stays in 16 or 32 bits, and the weight is dequantized on the way."""

from collections.abc import Callable
from functools import partial
from typing import Any, TypedDict, Unpack

import torch
from torch import Tensor

from outpace.kernels.activation import gated_act_ref, gated_act_triton
from outpace.kernels.gemv import gemv_ref
from outpace.kernels.invariant import gated_act_invariant
from outpace.kernels.matmul import matmul_invariant_ref, matmul_torch
from outpace.kernels.packed import Packed
from outpace.kernels.packed_digits import digits_linear, takes_digits
from outpace.kernels.packed_gemv import packed_gemv_triton, takes_chunks
from outpace.kernels.packed_matmul import dequantize_triton, invariant_tiles, packed_matmul_triton
from outpace.kernels.packed_tiles import Tiles, tiles_linear
from outpace.kernels.rms_norm import rms_norm_ref, rms_norm_triton
from outpace.kernels.triton_stub import HAS_TRITON

MOST_ROWS = (("few", 2), ("tiles", 256))
"""The most rows of the kernel of few rows and of the one with matrix units; more: dequantized, for torch's product
(bench/results/packed_sweep_*)."""


class Options(TypedDict, total=False):
    """The keywords of every implementation, as gemv_ref has them."""

    bias: Tensor | None
    norm_weight: Tensor | None
    eps: float
    weight_offset: float
    round_before_weight: bool
    activation: str | None
    add: Tensor | None
    out: Tensor | None


Product = Callable[..., Tensor]
"""(x, bias=, add=, out=) → x @ weight.T + bias + add."""


def packed_linear_ref(x: Tensor, weight: Packed, **options: Unpack[Options]) -> Tensor:
    """gemv_ref with a quantized weight, dequantized to the dtype of x. x: [M, K], weight: [N, K] → [M, N]."""
    return gemv_ref(x, weight.dequantized(x.dtype), **options)


def packed_linear_torch(x: Tensor, weight: Packed, **options: Unpack[Options]) -> Tensor:
    """packed_linear_ref; int8 weights with a scale for each row by integer products on a CPU."""
    if not takes_digits(x, weight):
        return packed_linear_ref(x, weight, **options)
    return _around(partial(_finished, lambda x: digits_linear(x, weight)), x, (rms_norm_ref, gated_act_ref), **options)


def packed_linear_tiles(x: Tensor, weight: Packed | Tiles, **options: Unpack[Options]) -> Tensor:
    """packed_linear_torch, and weights in groups that are in tiles: products with few rows are computed in bf16."""
    if isinstance(weight, Packed):
        return packed_linear_torch(x, weight, **options)
    return _around(partial(_finished, lambda x: tiles_linear(x, weight)), x, (rms_norm_ref, gated_act_ref), **options)


def _finished(
    product: Callable[[Tensor], Tensor],
    x: Tensor,
    *,
    bias: Tensor | None = None,
    add: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """The product of x, which may be changed, + bias + add in its dtype."""
    y = product(x)
    y = y if y.dtype == torch.float32 or (bias is None and add is None) else y.float()
    for term in (bias, add):
        y = y if term is None else y.add_(term)
    return y.to(x.dtype) if out is None else out.copy_(y)


def packed_choice(rows: int, weight: Packed) -> str:
    """What computes a product of this many rows: few, tiles or dequantize."""
    for name, most in MOST_ROWS:
        if rows <= most and (name != "few" or takes_chunks(weight)):
            return name
    return "dequantize"


def packed_linear_triton(x: Tensor, weight: Packed, **options: Unpack[Options]) -> Tensor:
    """packed_linear_ref by our kernels; up to 256 rows a dequantized weight is never in memory."""
    choice = packed_choice(len(x), weight)
    if choice == "few":
        return packed_gemv_triton(x, weight, **options)

    def product(x: Tensor, **rest: Any) -> Tensor:
        if choice == "tiles":
            return packed_matmul_triton(x, weight, **rest)
        return matmul_torch(x, dequantize_triton(weight, x.dtype), **rest)

    return _around(product, x, (rms_norm_triton, gated_act_triton), **options)


def packed_linear_invariant(x: Tensor, weight: Packed, **options: Unpack[Options]) -> Tensor:
    """packed_linear_ref, each row bit for bit as if it were alone."""
    if HAS_TRITON and x.is_cuda:
        return packed_linear_invariant_triton(x, weight, **options)

    def product(x: Tensor, **rest: Any) -> Tensor:
        return matmul_invariant_ref(x, weight.dequantized(x.dtype), **rest)

    return _around(product, x, (rms_norm_ref, gated_act_invariant), **options)


def packed_linear_invariant_triton(x: Tensor, weight: Packed, **options: Unpack[Options]) -> Tensor:
    """packed_linear_invariant by Triton, with the same tiles for any number of rows."""

    def product(x: Tensor, **rest: Any) -> Tensor:
        return packed_matmul_triton(x, weight, tiles=invariant_tiles(*weight.shape), **rest)

    return _around(product, x, (rms_norm_triton, gated_act_triton), **options)


def _around(
    product: Product,
    x: Tensor,
    ops: tuple[Callable[..., tuple[Tensor, Tensor]], Callable[..., Tensor]],
    **options: Unpack[Options],
) -> Tensor:
    """The norm before a product and the activation after it, as ops of their own."""
    norm, act = ops
    weight, activation = options.get("norm_weight"), options.get("activation")
    bias, add, out = options.get("bias"), options.get("add"), options.get("out")
    if weight is not None:
        offset, first = options.get("weight_offset", 0.0), options.get("round_before_weight", True)
        x, _ = norm(x, weight, options.get("eps", 0.0), weight_offset=offset, round_before_weight=first)
    if activation is None:
        return product(x, bias=bias, add=add, out=out)
    y = act(product(x, bias=bias), activation)
    y = y if add is None else y + add
    return y if out is None else out.copy_(y)
