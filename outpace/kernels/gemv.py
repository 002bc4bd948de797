"""One row times a weight that is read exactly once: decode's linear layers, with norm, activation and sum.

One program computes a few outputs: it streams their weight rows past the caches, while x, which every program reads,
stays in them. An RMS norm before the product needs no pass of its own, since its scale is one number per row of x:
y = rstd * sum_k(x * norm_weight * W), and sum_k(x * x), which rstd needs, is added up along the way. For a layer norm
every program reads its row of x twice: first for mean and deviation, while the first weights are loaded.

The kernel takes up to 16 rows, but from two on tensor cores are faster (`few_rows`).
"""
# mypy: disallow-untyped-decorators=False

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from outpace.kernels.activation import activate, activation_kind, bias_act_torch, gated_act_torch
from outpace.kernels.launch_options import MAX_ROWS, has_pdl, pdl_options, row_stride
from outpace.kernels.layer_norm import layer_norm_torch
from outpace.kernels.rms_norm import rms_norm_torch
from outpace.kernels.triton_stub import tl, triton


class FusedAround(NamedTuple):
    """The operations around a product x @ weight.T: a norm before it; bias, activation and sum after it."""

    bias: Tensor | None = None
    """[N], or [2I] where the activation is gated."""
    norm_weight: Tensor | None = None
    """[K]; None: no norm."""
    norm_bias: Tensor | None = None
    centered: bool = False
    """True: a layer norm; False: an RMS norm."""
    eps: float = 0.0
    weight_offset: float = 0.0
    round_before_weight: bool = True
    """The norm is rounded before it is multiplied by its weight; kernels round only the product."""
    activation: str | None = None
    gated: bool = True
    """act(gate) * up: the weight is [2I, K], gate rows first, and the output [M, I]."""
    add: Tensor | None = None
    out: Tensor | None = None
    """Gets the result. May be `add`, never x."""

    @property
    def halves(self) -> int:
        """Rows of the weight for one output."""
        return 2 if self.gated and self.activation is not None else 1

    @property
    def kind(self) -> str | None:
        """The kind of activation."""
        return None if self.activation is None else activation_kind(self.activation)

    def out_for(self, x: Tensor, outputs: int) -> Tensor:
        """`out`, or new memory."""
        return torch.empty((len(x), outputs), dtype=x.dtype, device=x.device) if self.out is None else self.out


def fused_linear_torch(x: Tensor, weight: Tensor, **around: Any) -> Tensor:
    """norm(x) @ weight.T + bias, then the activation, then + add: [M, K], [N, K] → [M, N]. See `FusedAround`."""
    f = FusedAround(**around)
    if f.norm_weight is not None and f.centered:
        x = layer_norm_torch(x, f.norm_weight, f.norm_bias, f.eps)
    elif f.norm_weight is not None:
        style: dict[str, Any] = {"weight_offset": f.weight_offset, "round_before_weight": f.round_before_weight}
        x = rms_norm_torch(x, f.norm_weight, f.eps, **style)
    y = F.linear(x, weight, f.bias)
    if f.activation is not None:
        y = gated_act_torch(y, f.activation) if f.gated else bias_act_torch(y, None, f.activation)
    y = y if f.add is None else y + f.add
    return y if f.out is None else f.out.copy_(y)


@triton.jit
def _load(
    ptrs: tl.tensor, col: tl.tensor, k: tl.tensor, depth: tl.constexpr, even: tl.constexpr, policy: tl.constexpr
) -> tl.tensor:
    """The tile k columns on, zero beyond the depth."""
    if even:
        tile = tl.load(ptrs + k, eviction_policy=policy)
    else:
        tile = tl.load(ptrs + k, mask=k + col < depth, other=0.0, eviction_policy=policy)
    return tile


@triton.jit
def _add_products(
    acc: tl.tensor,  # [M, N, K]
    squares: tl.tensor,  # [M, 1, K]
    w: tl.tensor,  # [1, N, K]
    x_ptrs: tl.tensor,  # [M, 1, K]
    norm_ptrs: tl.tensor,  # [1, 1, K] or None
    norm_bias_ptrs: tl.tensor,  # the same
    mean: tl.tensor, scale: tl.tensor, offset: tl.tensor, col: tl.tensor, k: tl.tensor,
    depth: tl.constexpr, centered: tl.constexpr, even: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """acc + x * w, and squares + x * x, element by element: sums across threads are taken at the end.

    A layer norm is applied here; of an RMS norm only its weight.
    """
    x = _load(x_ptrs, col, k, depth, even, "").to(tl.float32)
    if centered:
        x = (x - mean) * scale * _load(norm_ptrs, col, k, depth, even, "").to(tl.float32)
        if norm_bias_ptrs is not None:
            x += _load(norm_bias_ptrs, col, k, depth, even, "").to(tl.float32)
    elif norm_ptrs is not None:
        squares += x * x
        x *= _load(norm_ptrs, col, k, depth, even, "").to(tl.float32) + offset
    return acc + x * w.to(tl.float32), squares


@triton.jit
def _moments(x_ptr: tl.tensor, eps: tl.tensor, depth: tl.constexpr, whole: tl.constexpr) -> tl.tensor:
    """Mean of a row, and 1 / its standard deviation."""
    col = tl.arange(0, whole)
    x = tl.load(x_ptr + col, mask=col < depth, other=0.0).to(tl.float32)
    mean = tl.sum(x, axis=0) / depth
    off = tl.where(col < depth, x - mean, 0.0)
    return mean, tl.rsqrt(tl.sum(off * off, axis=0) / depth + eps)


@triton.jit
def _gemv_kernel(
    x_ptr: tl.tensor,  # [M, K]
    weight_ptr: tl.tensor,  # [N, K]; gated: [2N, K]
    bias_ptr: tl.tensor,  # [N] or [2N], or None
    norm_ptr: tl.tensor,  # [K] or None
    norm_bias_ptr: tl.tensor,  # [K] or None
    add_ptr: tl.tensor,  # [M, N] or None
    out_ptr: tl.tensor,  # [M, N]
    outputs: tl.tensor, x_stride: tl.tensor, weight_stride: tl.tensor, add_stride: tl.tensor,
    out_stride: tl.tensor, eps: tl.tensor, weight_offset: tl.tensor,
    rows: tl.constexpr, depth: tl.constexpr, activation: tl.constexpr, gated: tl.constexpr,
    centered: tl.constexpr,  # for one row only
    whole: tl.constexpr, block_m: tl.constexpr, block_n: tl.constexpr, block_k: tl.constexpr,
    pdl: tl.constexpr,
) -> None:  # fmt: skip
    # Tiles are [M, N, K]; a gated tile holds gate and up rows in turn. Rows beyond the last repeat the last.
    tile_n: tl.constexpr = 2 * block_n if gated else block_n
    even: tl.constexpr = depth % block_k == 0
    last: tl.constexpr = (depth - 1) // block_k * block_k  # where the last tile begins
    first = tl.program_id(0) * block_n
    lane = tl.arange(0, tile_n)
    if gated:
        row = tl.minimum(first + lane // 2, outputs - 1) + lane % 2 * outputs
    else:
        row = tl.minimum(first + lane, outputs - 1)
    col = tl.arange(0, block_k)[None, None, :]
    m = tl.minimum(tl.arange(0, block_m), rows - 1).to(tl.int64)
    weight_ptrs = weight_ptr + row.to(tl.int64)[None, :, None] * weight_stride + col
    x_ptrs = x_ptr + m[:, None, None] * x_stride + col
    norm_ptrs = None if norm_ptr is None else norm_ptr + col
    norm_bias_ptrs = None if norm_bias_ptr is None else norm_bias_ptr + col

    # The first weights are loaded before the wait: the previous kernel writes x and add, never weights. After it, the
    # next kernel may start as soon as there is room, and do the same.
    w = _load(weight_ptrs, col, 0, depth, even, "evict_first")
    if pdl:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    mean = 0.0
    scale = 1.0
    if centered:
        mean, scale = _moments(x_ptr, eps, depth, whole)
    acc = tl.zeros([block_m, tile_n, block_k], tl.float32)
    squares = tl.zeros([block_m, 1, block_k], tl.float32)
    # fmt: off
    for k in range(0, last, block_k):  # the next tile is loaded to registers while this one is used
        ahead = _load(weight_ptrs, col, k + block_k, depth, even, "evict_first")
        acc, squares = _add_products(
            acc, squares, w, x_ptrs, norm_ptrs, norm_bias_ptrs, mean, scale, weight_offset, col, k, depth, centered,
            True,
        )
        w = ahead
    acc, squares = _add_products(
        acc, squares, w, x_ptrs, norm_ptrs, norm_bias_ptrs, mean, scale, weight_offset, col, last, depth, centered,
        even,
    )
    # fmt: on

    y = tl.sum(acc, axis=2)  # [M, N]
    if norm_ptr is not None and not centered:
        y *= tl.rsqrt(tl.sum(squares, axis=2) / depth + eps)
    if bias_ptr is not None:
        y += tl.load(bias_ptr + row).to(tl.float32)[None, :]
    if gated:
        gate, up = tl.split(tl.reshape(y, [block_m, block_n, 2]))
        y = activate(gate, activation) * up
    elif activation is not None:
        y = activate(y, activation)
    at = tl.arange(0, block_m)[:, None].to(tl.int64)
    n = first + tl.arange(0, block_n)[None, :]
    mask = (at < rows) & (n < outputs)
    if add_ptr is not None:
        y += tl.load(add_ptr + at * add_stride + n, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + at * out_stride + n, y.to(out_ptr.dtype.element_ty), mask=mask)


@dataclass(frozen=True, slots=True)
class GemvTile:
    """Outputs and depth of a tile, and whether the kernel starts before the previous one ends.

    This overlap pays for short kernels with small programs. Large programs that start early take the place of the
    previous kernel's: a gated product of the 8B takes 61 us with it and 56 without.
    """

    block_n: int
    block_k: int
    num_warps: int
    overlaps: bool = True


def gemv_tile(outputs: int, depth: int, *, gated: bool = False, normed: bool = False) -> GemvTile:
    """The tile of one row, from sweeps over 34 layers of eight models, also as shards of ranks, on an H200.

    Within 3 % of the best tile of each layer on average. Depths that are multiples of 2,048 take long tiles; others
    short ones, so that the last tile exceeds the depth by little.
    """
    even = depth in (2048, 4096)
    if depth <= 1024:
        return _shallow(outputs, depth, gated)
    if gated:
        if even:
            return GemvTile(1, 2048, 4) if outputs * depth <= 2**23 else GemvTile(2, depth, depth // 512, False)
        return GemvTile(2, 1024, 4) if depth % 4096 == 0 else GemvTile(2, 256, 1)
    if outputs >= 16000:
        return GemvTile(4, 2048 if even else 1024, 4, False) if depth % 2048 == 0 else GemvTile(4, 256, 1, False)
    if depth > 6144:
        if depth % 4096 == 0 and outputs <= 2048 and not normed:
            return GemvTile(4, 4096, 8)
        if depth % 1024 == 0:
            return GemvTile(4 if normed else 2 if outputs < 4096 else 1, 1024, 4)
        return GemvTile(1, 512 if depth % 512 == 0 else 256, 1)
    if even and outputs * depth <= 2**25:
        return GemvTile(2 if depth == 4096 else 4, 1024, 4) if depth == 4096 or normed else GemvTile(1, 512, 1)
    if normed:
        return GemvTile(4, 2048, 4, False) if even else GemvTile(4, 512, 2)
    return GemvTile(1, 512, 1) if outputs <= 4096 else GemvTile(2, 512, 1)


def _shallow(outputs: int, depth: int, gated: bool) -> GemvTile:
    """The tile of one short row."""
    width: int = triton.next_power_of_2(depth)
    if gated:
        return GemvTile(2, width, 2, False)
    if outputs >= 65536:
        return GemvTile(4, width, 2, False)
    return GemvTile(4, min(512, width), 2) if outputs >= 4096 else GemvTile(1, width, 4)


def check_operands(x: Tensor, weight: Tensor, f: FusedAround, out: Tensor) -> None:
    """Assert the shapes, dtypes and strides that the kernels for few rows rely on."""
    (rows, depth), dtype = x.shape, x.dtype
    shape, likes = (rows, weight.shape[0] // f.halves), (f.add, out)
    assert rows <= MAX_ROWS, f"{rows} rows are more than {MAX_ROWS}"
    assert (weight.shape[1], weight.dtype) == (depth, dtype), (x.shape, dtype, weight.shape, weight.dtype)
    assert depth > 0, "rows must not be empty"
    assert f.bias is None or (f.bias.shape == weight.shape[:1] and f.bias.is_contiguous())
    norms = f.norm_weight, f.norm_bias
    assert all(norm is None or (norm.shape == x.shape[1:] and norm.is_contiguous()) for norm in norms)
    assert all(t is None or (t.shape, t.dtype) == (shape, dtype) for t in likes), f"neither {shape} nor {dtype}"
    assert all(t is None or t.shape[1] == 1 or t.stride(1) == 1 for t in (x, weight, *likes)), "rows must be contiguous"


def gemv_config(rows: int, outputs: int, depth: int, gated: bool = False, normed: bool = False) -> dict[str, int]:
    """The constants and options that the kernel is compiled with for this many rows."""
    if rows > 1:
        width: int = triton.next_power_of_2(depth)
        return {"block_n": 2 if rows <= 2 else 1, "block_k": min(512, width), "num_warps": 1, "num_stages": 1}
    tile = gemv_tile(outputs, depth, gated=gated, normed=normed)
    return {"block_n": tile.block_n, "block_k": tile.block_k, "num_warps": tile.num_warps, "num_stages": 1}


def gemv_triton(
    x: Tensor, weight: Tensor, *, pdl: bool | None = None, config: Mapping[str, int] | None = None, **around: Any
) -> Tensor:
    """fused_linear_torch in one kernel, rounded once.

    pdl: start before the previous kernel ends, which must not write weight, bias or norm_weight; ignored if the device
    cannot. None: as `gemv_tile` says. Only one row can have a layer norm.
    """
    f = FusedAround(**around)
    rows, depth = x.shape
    gated, normed = f.halves == 2, f.norm_weight is not None
    assert weight.shape[0] % f.halves == 0, f"{weight.shape[0]} rows cannot be halved"
    assert not f.centered or rows == 1, "a layer norm of several rows is not folded"
    outputs = weight.shape[0] // f.halves
    out = f.out_for(x, outputs)
    check_operands(x, weight, f, out)
    if out.numel() == 0:
        return out
    meta = {**gemv_config(rows, outputs, depth, gated, normed), **(config or {})}
    if pdl is None:
        pdl = gemv_tile(outputs, depth, gated=gated, normed=normed).overlaps
    _gemv_kernel[(triton.cdiv(outputs, meta["block_n"]),)](
        *(x, weight, f.bias, f.norm_weight, f.norm_bias, f.add, out, outputs),
        *(row_stride(x), weight.stride(0), row_stride(f.add), row_stride(out), f.eps, f.weight_offset),
        rows=rows,
        depth=depth,
        activation=f.kind,
        gated=gated,
        centered=f.centered and normed,
        whole=triton.next_power_of_2(depth) if f.centered else 1,
        block_m=triton.next_power_of_2(rows),
        **meta,
        **pdl_options(pdl and has_pdl(x.device)),
    )
    return out
