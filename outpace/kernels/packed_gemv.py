"""A few rows times a quantized weight that is read exactly once, with norm, activation and sum: like gemv.py."""
# mypy: disallow-untyped-decorators=False

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from outpace.kernels.activation import activate
from outpace.kernels.gemv import FusedAround
from outpace.kernels.launch_options import MAX_ROWS, has_pdl, pdl_options, row_stride
from outpace.kernels.packed import Packed
from outpace.kernels.packed_product import packed_product
from outpace.kernels.triton_stub import tl, triton

CHUNK = 8  # columns
WORDS = (4, 2)  # 32-bit words in a chunk that is read as words


@triton.jit
def _packed_gemv_kernel(
    x_ptr: tl.tensor,  # [M, K]
    values_ptr: tl.tensor,  # [N, K] or [N, ceil(K / 2)]; gated: 2N rows
    scale_ptr: tl.tensor,  # [ceil(N / shared_rows), ceil(K / group)]
    zero_ptr: tl.tensor,  # as scale, or None
    bias_ptr: tl.tensor,  # [N] or [2N], or None
    norm_ptr: tl.tensor,  # [K] or None
    add_ptr: tl.tensor,  # [M, N] or None
    out_ptr: tl.tensor,  # [M, N]
    outputs: tl.tensor, x_stride: tl.tensor, values_stride: tl.tensor, scale_stride: tl.tensor,
    zero_stride: tl.tensor, add_stride: tl.tensor, out_stride: tl.tensor, eps: tl.tensor,
    weight_offset: tl.tensor,
    rows: tl.constexpr, depth: tl.constexpr, group: tl.constexpr, shared_rows: tl.constexpr,
    default_zero: tl.constexpr, activation: tl.constexpr, pdl: tl.constexpr, block_m: tl.constexpr,
    block_n: tl.constexpr, block_k: tl.constexpr, chunk: tl.constexpr, words: tl.constexpr,
) -> None:  # fmt: skip
    # A gated tile holds gate and up rows in turn. Rows beyond the last repeat the last.
    tile_n: tl.constexpr = block_n if activation is None else 2 * block_n
    first = tl.program_id(0) * block_n
    lane = tl.arange(0, tile_n)
    if activation is None:
        row = tl.minimum(first + lane, outputs - 1)
    else:
        row = tl.minimum(first + lane // 2, outputs - 1) + lane % 2 * outputs
    m = tl.minimum(tl.arange(0, block_m), rows - 1).to(tl.int64)[:, None, None, None, None]
    n = row.to(tl.int64)[None, :, None, None]
    y, squares = packed_product(
        x_ptr + m * x_stride,
        norm_ptr,
        values_ptr + n[:, :, :, :, None] * values_stride,
        scale_ptr + n // shared_rows * scale_stride,
        None if zero_ptr is None else zero_ptr + n // shared_rows * zero_stride,
        weight_offset, depth, group, default_zero, pdl, block_k, chunk, words,
    )  # fmt: skip
    if norm_ptr is not None:
        y *= tl.rsqrt(squares + eps)[:, None]
    if bias_ptr is not None:
        y += tl.load(bias_ptr + row).to(tl.float32)[None, :]
    if activation is not None:
        gate, up = tl.split(tl.reshape(y, [block_m, block_n, 2]))
        y = activate(gate, activation) * up
    out_m = tl.arange(0, block_m)[:, None].to(tl.int64)
    out_n = first + tl.arange(0, block_n)[None, :]
    mask = (out_m < rows) & (out_n < outputs)
    if add_ptr is not None:
        y += tl.load(add_ptr + out_m * add_stride + out_n, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + out_m * out_stride + out_n, y.to(out_ptr.dtype.element_ty), mask=mask)


def packed_gemv_config(kind: str, rows: int, outputs: int, depth: int, gated: bool) -> dict[str, int]:
    """The tiles that win on an H200 with a single row (bench/results/packed_sweep_*): 128 bytes for every thread."""
    block_n, block_k, warps = (8, 2048, 2) if kind == "int4" else (8, 2048, 4)
    if kind == "fp8" and depth > 8192:
        block_k = 1024
    if rows > 1:
        block_n = 4 if rows == 2 else 2
    width: int = max(CHUNK, triton.next_power_of_2(depth))
    if width < block_k:
        block_k, warps = width, max(1, min(warps, width // 512))
    return {"block_n": max(1, block_n // 2) if gated else block_n, "block_k": block_k, "num_warps": warps}


def takes_chunks(weight: Packed) -> bool:
    """Whether every chunk of columns has one scale, which the kernel of few rows relies on."""
    return weight.group >= weight.shape[1] or weight.group % CHUNK == 0


def words_of_chunk(weight: Packed, dtype: torch.dtype) -> int:
    """How many words a chunk has if the weight is read as words, only for x of 16 bits; 0: it is read as bytes."""
    bits, group = {"int8": 8, "int4": 4}.get(weight.kind), weight.group
    if bits is None or dtype.itemsize != 2 or weight.values.data_ptr() % 16:
        return 0
    if weight.shape[1] * bits % 32 or any(
        stride * weight.values.element_size() % 4 for stride in weight.values.stride()[:-1]
    ):
        return 0
    whole = group >= weight.shape[1]
    return next((words for words in WORDS if whole or group % (words * 32 // bits) == 0), 0)


def fitting_depth(weight: Packed, block_k: int) -> int:
    """The widest tile up to block_k that holds whole groups, or lies within one."""
    if weight.group >= weight.shape[1] or weight.group & (weight.group - 1) == 0:
        return block_k
    return min(block_k, weight.group & -weight.group)  # the power of two in it


def check_packed(x: Tensor, weight: Packed, bias: Tensor | None, shape: tuple[int, int], *likes: Tensor | None) -> None:
    """Assert the shapes, dtypes and strides that the kernels rely on; likes have the shape of the output."""
    assert weight.experts is None, "a stack of experts is no linear"
    assert x.shape[1] == weight.shape[1] > 0, (x.shape, weight.shape)
    assert bias is None or (bias.shape == weight.shape[:1] and bias.is_contiguous()), "bias"
    assert all(t is None or (t.shape, t.dtype) == (shape, x.dtype) for t in likes), f"neither {shape} nor {x.dtype}"
    rows = (x, weight.values, weight.scale, weight.zero, *likes)
    assert all(t is None or t.shape[1] == 1 or t.stride(1) == 1 for t in rows), "rows must be contiguous"


def packed_gemv_triton(
    x: Tensor, weight: Packed, *, pdl: bool | None = None, config: Mapping[str, int] | None = None, **around: Any
) -> Tensor:
    """packed_linear_dequantized in one kernel for up to MAX_ROWS rows, rounded once; pdl: as gemv."""
    f = FusedAround(**around)
    rows, depth = x.shape
    assert rows <= MAX_ROWS, f"{rows} rows are more than {MAX_ROWS}"
    assert not f.centered, "a layer norm is not folded"
    assert f.gated, "only gated activations"
    assert weight.shape[0] % f.halves == 0, f"{weight.shape[0]} rows cannot be halved"
    assert takes_chunks(weight), f"groups of {weight.group} columns are no multiple of {CHUNK}"
    outputs = weight.shape[0] // f.halves
    out = f.out_for(x, outputs)
    check_packed(x, weight, f.bias, (rows, outputs), f.add, out)
    assert f.norm_weight is None or (f.norm_weight.shape == x.shape[1:] and f.norm_weight.is_contiguous())
    if out.numel() == 0:
        return out
    meta = {**packed_gemv_config(weight.kind, rows, outputs, depth, f.halves == 2), **(config or {})}
    words = meta.pop("words", words_of_chunk(weight, x.dtype))
    chunk = CHUNK if words == 0 else words * (8 if weight.kind == "int4" else 4)
    values = weight.values if words == 0 else weight.values.view(torch.int32)
    meta["block_k"] = fitting_depth(weight, max(chunk, meta["block_k"]))
    pdl = (f.activation is None and f.norm_weight is None if pdl is None else pdl) and has_pdl(x.device)
    _packed_gemv_kernel[(triton.cdiv(outputs, meta["block_n"]),)](
        *(x, values, weight.scale, weight.zero, f.bias, f.norm_weight, f.add, out, outputs),
        *(row_stride(x), row_stride(values), row_stride(weight.scale), row_stride(weight.zero)),
        *(row_stride(f.add), row_stride(out), f.eps, f.weight_offset),
        rows=rows,
        depth=depth,
        group=min(weight.group, depth),
        shared_rows=weight.block,
        default_zero=weight.default_zero,
        activation=f.kind,
        block_m=triton.next_power_of_2(rows),
        chunk=chunk,
        words=words,
        **meta,
        **pdl_options(pdl),
    )
    return out
