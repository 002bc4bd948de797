"""Many rows times a quantized weight, by matrix units; and dequantization of the weight for a library's products.

A program computes [N, M] of the outputs: as the left operand the weight goes from registers into the matrix unit. The
depth is split into parts (`split`) where there would be too few programs; a second kernel adds their sums. As only the
tiles set the order of additions, fixed tiles make a row's result independent of the other rows.
"""
# mypy: disallow-untyped-decorators=False

from dataclasses import dataclass

import torch
from torch import Tensor

from outpace.kernels.launch_options import has_pdl, pdl_options, row_stride
from outpace.kernels.matmul import add_and_store, add_chunks
from outpace.kernels.packed import Packed
from outpace.kernels.packed_gemv import check_packed
from outpace.kernels.packed_tile import packed_step, scale_form, step_depth
from outpace.kernels.triton_stub import tl, triton


@dataclass(frozen=True, slots=True)
class PackedTiles:
    """How the programs of a product work; `split`: programs that share the depth of one tile."""

    block_m: int
    block_n: int
    block_k: int = 128
    num_warps: int = 4
    num_stages: int = 4
    split: int = 1


@triton.jit(do_not_specialize=["rows"])
def _packed_matmul_kernel(
    x_ptr: tl.tensor,  # [M, K]
    values_ptr: tl.tensor,  # [N, K] or [N, ceil(K / 2)]
    scale_ptr: tl.tensor,  # [ceil(N / shared_rows), ceil(K / group)]
    zero_ptr: tl.tensor,  # as scale, or None
    bias_ptr: tl.tensor,  # [N] or None
    add_ptr: tl.tensor,  # [M, N] or None
    out_ptr: tl.tensor,  # [M, N]; when split: fp32 [split, M, N]
    rows: tl.tensor, outputs: tl.tensor, depth: tl.tensor,
    part: tl.tensor,  # the depth of a split, a multiple of block_k
    x_stride: tl.tensor, values_stride: tl.tensor, scale_stride: tl.tensor, zero_stride: tl.tensor,
    add_stride: tl.tensor, out_stride: tl.tensor,
    group: tl.constexpr, shared_rows: tl.constexpr, form: tl.constexpr, even: tl.constexpr, pdl: tl.constexpr,
    block_m: tl.constexpr, block_n: tl.constexpr, block_k: tl.constexpr,
) -> None:  # fmt: skip
    if pdl:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    half: tl.constexpr = values_ptr.dtype.element_ty == tl.uint8
    tiles_m = tl.cdiv(rows, block_m)  # programs of one weight tile run side by side, and find it in the L2 cache
    m = (tl.program_id(0) % tiles_m * block_m + tl.arange(0, block_m)).to(tl.int64)[:, None]  # [M, 1]
    n = (tl.program_id(0) // tiles_m * block_n + tl.arange(0, block_n)).to(tl.int64)  # [N]
    row = tl.minimum(n, outputs - 1)[:, None]  # rows beyond the last repeat the last
    x_ptrs = x_ptr + m * x_stride + tl.arange(0, block_k)[None, :]
    values_ptrs = values_ptr + row * values_stride + tl.arange(0, block_k // 2 if half else block_k)[None, :]
    scale_ptrs = scale_ptr + row // shared_rows * scale_stride
    zero_ptrs = None if zero_ptr is None else zero_ptr + row // shared_rows * zero_stride
    row_zero = None
    if zero_ptr is not None and form == "row":
        row_zero = tl.load(zero_ptrs).to(tl.float32)
    acc = tl.zeros([block_n, block_m], tl.float32)
    start = tl.program_id(1) * part
    for k in range(start, tl.minimum(start + part, depth), block_k):
        acc = packed_step(
            acc, x_ptrs, m < rows, values_ptrs, scale_ptrs, zero_ptrs, row_zero, k, depth, group, form, even
        )
    if form == "row":
        acc *= tl.load(scale_ptrs).to(tl.float32)
    out_ptr += tl.program_id(1).to(tl.int64) * rows * out_stride
    add_and_store(tl.trans(acc), m, n[None, :], bias_ptr, add_ptr, out_ptr, rows, outputs, add_stride, out_stride)


def packed_tiles(weight: Packed, rows: int, dtype: torch.dtype) -> PackedTiles:
    """The tiles that win on an H200 (bench/results/packed_sweep_*)."""
    outputs, depth = weight.shape
    if dtype == torch.float32:  # no matrix instruction
        return PackedTiles(32, 64, 32)
    block_m = min(64, max(16, triton.next_power_of_2(rows)))
    many = outputs >= 16384  # enough programs without splitting the depth
    if rows > 64:
        tall = rows > 128 and weight.group >= depth  # with groups there are two sums: too many registers
        return PackedTiles(256 if tall else 128, 128, 64, 8, 3, split=1 if many else split_for(outputs, 128, depth))
    if many and rows <= 32:
        return PackedTiles(block_m, 128, 128, num_stages=3, split=2 if depth >= 1024 else 1)
    if many and weight.kind != "int4":
        return PackedTiles(block_m, 128, 128, num_warps=8, num_stages=3)
    return PackedTiles(block_m, 64, 128, num_stages=3 if depth <= 4096 else 4, split=split_for(outputs, 64, depth))


def split_for(outputs: int, block_n: int, depth: int) -> int:
    """How many programs share a depth, so that there are more of them than SMs."""
    split = 1
    while -(-outputs // block_n) * split < 200 and split < 4 and depth // (2 * split) >= 512:
        split *= 2
    return split


def invariant_tiles(outputs: int, depth: int) -> PackedTiles:
    """Tiles that do not depend on the rows, so that a row's result does not either."""
    return PackedTiles(64, 64, num_stages=3, split=split_for(outputs, 64, depth))


def packed_matmul_triton(
    x: Tensor,
    weight: Packed,
    *,
    bias: Tensor | None = None,
    add: Tensor | None = None,
    out: Tensor | None = None,
    tiles: PackedTiles | None = None,
) -> Tensor:
    """x @ weight.T + bias + add in one kernel, in two when split, rounded once. out may be add, never x."""
    (rows, depth), outputs = x.shape, weight.shape[0]
    out = torch.empty((rows, outputs), dtype=x.dtype, device=x.device) if out is None else out
    check_packed(x, weight, bias, (rows, outputs), add, out)
    if out.numel() == 0:
        return out
    tiles = tiles or packed_tiles(weight, rows, x.dtype)
    block_k = step_depth(weight, tiles.block_k)
    part = triton.cdiv(triton.cdiv(depth, tiles.split), block_k) * block_k
    split = triton.cdiv(depth, part)
    pdl = rows <= 64 and has_pdl(x.device)
    assert split == 1 or rows * outputs < 2**31, "this many rows need no split"
    target = torch.empty((split * rows, outputs), device=x.device) if split > 1 else out
    _packed_matmul_kernel[(triton.cdiv(rows, tiles.block_m) * triton.cdiv(outputs, tiles.block_n), split)](
        *(x, weight.values, weight.scale, weight.zero),
        *((None, None) if split > 1 else (bias, add)),
        *(target, rows, outputs, depth, part, row_stride(x), row_stride(weight.values)),
        *(row_stride(weight.scale), row_stride(weight.zero), row_stride(add), target.stride(0)),
        group=min(weight.group, depth),
        shared_rows=weight.block,
        form=scale_form(weight, block_k),
        even=depth % block_k == 0,
        block_m=tiles.block_m,
        block_n=tiles.block_n,
        block_k=block_k,
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
        **pdl_options(pdl),
    )
    if split > 1:
        add_chunks(target, bias, add, out, split, pdl)
    return out


@triton.jit
def _dequantize_kernel(
    values_ptr: tl.tensor,  # [N, K] or [N, ceil(K / 2)]
    scale_ptr: tl.tensor, zero_ptr: tl.tensor,
    out_ptr: tl.tensor,  # [N, K]
    depth: tl.tensor, values_stride: tl.tensor, scale_stride: tl.tensor, zero_stride: tl.tensor,
    group: tl.constexpr, shared_rows: tl.constexpr, block: tl.constexpr,
) -> None:  # fmt: skip
    half: tl.constexpr = values_ptr.dtype.element_ty == tl.uint8
    row = tl.program_id(0).to(tl.int64)
    col = tl.program_id(1) * block + tl.arange(0, block)
    inside = col < depth
    w = tl.load(values_ptr + row * values_stride + (col // 2 if half else col), mask=inside, other=0.0)
    if half:
        w = (w >> (col % 2 * 4).to(tl.uint8)) & 15
    w = w.to(tl.float32)
    at = row // shared_rows
    if zero_ptr is not None:
        w -= tl.load(zero_ptr + at * zero_stride + col // group, mask=inside, other=0.0).to(tl.float32)
    elif half:
        w -= 8.0
    w *= tl.load(scale_ptr + at * scale_stride + col // group, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * depth + col, w.to(out_ptr.dtype.element_ty), mask=inside)


def dequantize_triton(weight: Packed, dtype: torch.dtype) -> Tensor:
    """weight.dequantized(dtype) in one kernel, without other tensors."""
    out = torch.empty(weight.shape, dtype=dtype, device=weight.device)
    if out.numel():
        _dequantize_kernel[(weight.shape[0], triton.cdiv(weight.shape[1], 1024))](
            *(weight.values, weight.scale, weight.zero, out, weight.shape[1]),
            *(row_stride(weight.values), row_stride(weight.scale), row_stride(weight.zero)),
            group=min(weight.group, weight.shape[1]),
            shared_rows=weight.block,
            block=1024,
        )
    return out
