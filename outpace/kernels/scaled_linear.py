"""Products of quantized activations with quantized weights: int8 by int8 (W8A8) and fp8 by fp8.

x = values * scales, with one scale for each row; the weight is a Packed without zeros. Sums of int8 are exact. Sums of
fp8 move to fp32 after every step: the matrix unit itself keeps only 14 bits.
"""
# mypy: disallow-untyped-decorators=False

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from outpace.kernels.launch_options import has_pdl, pdl_options, row_stride
from outpace.kernels.matmul import add_and_store, add_chunks, matmul_invariant_torch
from outpace.kernels.packed import Packed
from outpace.kernels.packed_linear import packed_linear_invariant_triton, packed_linear_triton
from outpace.kernels.packed_matmul import PackedTiles, split_for
from outpace.kernels.triton_stub import tl, triton

LIBRARY_ROWS = 256
"""With more rows torch's own product computes fp8. For int8 ours is faster (bench/results/packed_sweep_*)."""


class Scaled(NamedTuple):
    """(values * scales) @ weight.T + bias + add in dtype: the arguments of every implementation."""

    values: Tensor
    """int8 or fp8 [M, K]"""
    scales: Tensor
    """[M, 1]"""
    weight: Packed
    """[N, K]"""
    bias: Tensor | None = None
    add: Tensor | None = None
    out: Tensor | None = None
    """Gets the result. May be `add`."""
    dtype: torch.dtype = torch.float32

    def finish(self, y: Tensor) -> Tensor:
        """y + bias + add, rounded once; y is overwritten."""
        if self.bias is not None:
            y.add_(self.bias)
        if self.add is not None:
            if self.out is self.add and self.out.dtype == y.dtype:
                return self.out.add_(y)
            y.add_(self.add)
        return y.to(self.dtype) if self.out is None else self.out.copy_(y)

    @property
    def is_taken(self) -> bool:
        """Whether our kernel takes these: both of one kind, no zeros, and no step with two scales."""
        weight = self.weight
        same = self.values.dtype == weight.values.dtype and weight.zero is None
        return same and (weight.group >= weight.shape[1] or weight.group % 32 == 0)

    def as_rows(self) -> tuple[tuple[Tensor, Packed], dict[str, Any]]:
        """The arguments of a product with rows that are not quantized."""
        x = (self.values.float() * self.scales).to(self.dtype)
        return (x, self.weight), {"bias": self.bias, "add": self.add, "out": self.out}


def scaled_linear_dequantized(*operands: Any, **options: Any) -> Tensor:
    """A `Scaled` product in fp32."""
    call = Scaled(*operands, **options)
    return call.finish(F.linear(call.values.float() * call.scales, call.weight.dequantized(torch.float32)))


def scaled_linear_torch(*operands: Any, **options: Any) -> Tensor:
    """By torch's integer product on a CPU, exact in int32; others in fp32."""
    call = Scaled(*operands, **options)
    values, scales, weight = call[:3]
    if values.is_cuda or values.dtype != torch.int8 or weight.values.dtype != torch.int8 or values.numel() == 0:
        return scaled_linear_dequantized(*call)
    rows, depth = weight.shape
    if weight.group >= depth and weight.zero is None and (weight.block == 1 or weight.block >= rows):
        y = torch._int_mm(values, weight.values.t()).float().mul_(weight.scale.t())
        return call.finish(y.mul_(scales))
    group = min(weight.group, depth)
    y = torch.zeros(len(values), weight.shape[0])
    for number, start in enumerate(range(0, depth, group)):
        x, w = values[:, start : start + group], weight.values[:, start : start + group]
        part = torch._int_mm(x.contiguous(), w.t()).float()
        if weight.zero is not None:
            part -= x.sum(dim=1, keepdim=True, dtype=torch.int32).float() * _of_rows(weight, weight.zero, number)
        y += part * _of_rows(weight, weight.scale, number)
    return call.finish(y * scales)


def _of_rows(weight: Packed, per_block: Tensor, number: int) -> Tensor:
    """The scale or zero of this group for each row of the weight, [N]."""
    rows = weight.shape[0]
    return per_block[:, number].float().repeat_interleave(min(weight.block, rows))[:rows]


def scaled_linear_invariant_torch(*operands: Any, **options: Any) -> Tensor:
    """Each row bit for bit as if it were alone."""
    call = Scaled(*operands, **options)
    if (call.values.dtype, call.weight.kind) == (torch.int8, "int8"):
        return scaled_linear_torch(*call)
    x = call.values.float() * call.scales
    return call.finish(matmul_invariant_torch(x, call.weight.dequantized(torch.float32)))


def scaled_linear_invariant_triton(*operands: Any, **options: Any) -> Tensor:
    """Each row bit for bit as if it were alone: the same tiles for any number of rows."""
    call = Scaled(*operands, **options)
    if not call.is_taken:
        rows, rest = call.as_rows()
        return packed_linear_invariant_triton(*rows, **rest)
    return scaled_matmul_triton(*call, tiles=PackedTiles(64, 64))


def scaled_linear_triton(*operands: Any, **options: Any) -> Tensor:
    """By our kernel, or by torch's for many rows; rows that neither takes are multiplied in 16 bits."""
    call = Scaled(*operands, **options)
    if not call.is_taken:
        rows, rest = call.as_rows()
        return packed_linear_triton(*rows, **rest)
    if takes_library(call.values, call.weight, call.dtype):
        return _by_library(call)
    return scaled_matmul_triton(*call)


def takes_library(values: Tensor, weight: Packed, dtype: torch.dtype) -> bool:
    """Whether torch multiplies these: many rows of fp8 in bf16, with one scale a row and widths of multiples of 16."""
    plain = weight.group >= weight.shape[1] and weight.block == 1 and all(n % 16 == 0 for n in weight.shape)
    return plain and len(values) > LIBRARY_ROWS and values.dtype != torch.int8 and dtype == torch.bfloat16


def _by_library(call: Scaled) -> Tensor:
    """The product by torch's own kernels, then `add` and `out`, which they do not support."""
    w, scale = call.weight.values.t(), call.weight.scale.float().t().contiguous()  # [K, N], [1, N]
    y = torch._scaled_mm(call.values, w, call.scales, scale, bias=call.bias, out_dtype=call.dtype)
    return call._replace(bias=None).finish(y) if call.add is not None or call.out is not None else y


@triton.jit(do_not_specialize=["rows"])
def _scaled_matmul_kernel(
    x_ptr: tl.tensor,  # int8 or fp8 [M, K]
    scales_ptr: tl.tensor,  # fp32 [M]
    weight_ptr: tl.tensor,  # as x, [N, K]
    scale_ptr: tl.tensor,  # [ceil(N / shared_rows), ceil(K / group)]
    bias_ptr: tl.tensor,  # [N] or None
    add_ptr: tl.tensor,  # [M, N] or None
    out_ptr: tl.tensor,  # [M, N]; when split: fp32 [split, M, N]
    rows: tl.tensor, outputs: tl.tensor, depth: tl.tensor,
    part: tl.tensor,  # the depth of a split, a multiple of block_k
    x_stride: tl.tensor, weight_stride: tl.tensor, scale_stride: tl.tensor, add_stride: tl.tensor,
    out_stride: tl.tensor,
    group: tl.constexpr, grouped: tl.constexpr, shared_rows: tl.constexpr, even: tl.constexpr,
    pdl: tl.constexpr, block_m: tl.constexpr, block_n: tl.constexpr, block_k: tl.constexpr,
) -> None:  # fmt: skip
    if pdl:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    whole: tl.constexpr = x_ptr.dtype.element_ty == tl.int8
    sums: tl.constexpr = tl.int32 if whole else tl.float32
    tiles_m = tl.cdiv(rows, block_m)
    m = (tl.program_id(0) % tiles_m * block_m + tl.arange(0, block_m)).to(tl.int64)[:, None]  # [M, 1]
    n = (tl.program_id(0) // tiles_m * block_n + tl.arange(0, block_n)).to(tl.int64)  # [N]
    row = tl.minimum(n, outputs - 1)[:, None]  # rows beyond the last repeat the last
    col = tl.arange(0, block_k)[None, :]
    x_ptrs = x_ptr + m * x_stride + col
    weight_ptrs = weight_ptr + row * weight_stride + col
    scale_ptrs = scale_ptr + row // shared_rows * scale_stride
    acc = tl.zeros([block_n, block_m], sums if whole and not grouped else tl.float32)
    start = tl.program_id(1) * part
    for k in range(start, tl.minimum(start + part, depth), block_k):
        if even:
            x = tl.load(x_ptrs + k, mask=m < rows, other=0.0)
            w = tl.load(weight_ptrs + k)
        else:
            x = tl.load(x_ptrs + k, mask=(m < rows) & (k + col < depth), other=0.0)
            w = tl.load(weight_ptrs + k, mask=k + col < depth, other=0.0)
        if whole and not grouped:
            acc = tl.dot(w, tl.trans(x), acc, out_dtype=sums)
        elif grouped:
            acc += tl.dot(w, tl.trans(x), out_dtype=sums).to(tl.float32) * tl.load(scale_ptrs + k // group).to(
                tl.float32
            )
        else:
            acc += tl.dot(w, tl.trans(x), out_dtype=sums)
    y = acc.to(tl.float32)
    if not grouped:
        y *= tl.load(scale_ptrs).to(tl.float32)
    y = tl.trans(y) * tl.load(scales_ptr + m, mask=m < rows, other=0.0)
    out_ptr += tl.program_id(1).to(tl.int64) * rows * out_stride
    add_and_store(y, m, n[None, :], bias_ptr, add_ptr, out_ptr, rows, outputs, add_stride, out_stride)


def scaled_tiles(dtype: torch.dtype, rows: int, outputs: int, depth: int) -> PackedTiles:
    """The tiles that win on an H200 (bench/results/packed_sweep_*)."""
    many = outputs >= 16384  # enough programs without splitting the depth
    if rows <= 64:
        split = 1 if many else split_for(outputs, 64, depth)
        return PackedTiles(max(16, triton.next_power_of_2(rows)), 64, 128, num_stages=3 if many else 4, split=split)
    if rows > 512 or many:
        return PackedTiles(128, 128 if dtype == torch.int8 else 64, 128, num_warps=8, num_stages=3)
    split = split_for(outputs, 128, depth) if rows <= 128 else 2
    return PackedTiles(64, 128, 128, num_warps=8, num_stages=4, split=split if depth >= 1024 else 1)


def scaled_matmul_triton(*operands: Any, tiles: PackedTiles | None = None, **options: Any) -> Tensor:
    """A `Scaled` product in one kernel, in two when split, rounded once."""
    call = Scaled(*operands, **options)
    values, scales, weight, bias, add, out, dtype = call
    (rows, depth), outputs = values.shape, weight.shape[0]
    out = torch.empty((rows, outputs), dtype=dtype, device=values.device) if out is None else out
    assert call.is_taken, "one kind, no zeros, groups of a multiple of 32 columns"
    assert weight.experts is None, "a stack of experts is no linear"
    assert depth == weight.shape[1] > 0, (values.shape, weight.shape)
    assert (scales.shape, scales.dtype) == ((rows, 1), torch.float32), (scales.shape, scales.dtype)
    assert scales.is_contiguous(), "scales must be contiguous"
    assert bias is None or (bias.shape == (outputs,) and bias.is_contiguous()), "bias"
    assert all(t is None or t.shape == (rows, outputs) for t in (add, out)), (rows, outputs)
    every = (values, weight.values, weight.scale, add, out)
    assert all(t is None or t.shape[1] == 1 or t.stride(1) == 1 for t in every), "rows must be contiguous"
    if out.numel() == 0:
        return out
    tiles = tiles or scaled_tiles(values.dtype, rows, outputs, depth)
    grouped = weight.group < depth
    block_k = min(tiles.block_k, weight.group & -weight.group) if grouped else tiles.block_k
    part = -(-depth // (tiles.split * block_k)) * block_k
    split = -(-depth // part)
    pdl = rows <= 64 and has_pdl(values.device)
    assert split == 1 or rows * outputs < 2**31, "this many rows need no split"
    target = torch.empty((split * rows, outputs), device=values.device) if split > 1 else out
    _scaled_matmul_kernel[(-(-rows // tiles.block_m) * -(-outputs // tiles.block_n), split)](
        *(values, scales, weight.values, weight.scale),
        *((None, None) if split > 1 else (bias, add)),
        *(target, rows, outputs, depth, part, row_stride(values), row_stride(weight.values)),
        *(row_stride(weight.scale), row_stride(add), target.stride(0)),
        group=min(weight.group, depth),
        grouped=grouped,
        shared_rows=weight.block,
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
