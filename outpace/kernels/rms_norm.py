"""Root-mean-square norm of rows; also the per-head norm of queries and keys."""
# mypy: disallow-untyped-decorators=False

from collections.abc import Mapping

import torch
from torch import Tensor

from outpace.kernels.launch_options import few_overlap, pdl_options
from outpace.kernels.quantize import LARGEST, check_row_scales, quantize_tile, write_rows
from outpace.kernels.triton_stub import tl, triton

MAX_WIDTH = 65536  # a program holds whole rows in registers


def rms_norm_torch(
    x: Tensor,
    weight: Tensor | None,
    eps: float,
    *,
    weight_offset: float = 0.0,
    round_before_weight: bool = True,
    out: Tensor | None = None,
    scales: Tensor | None = None,
    add: Tensor | None = None,
) -> Tensor:
    """Norm of x times offset + weight, plus `add`. x: [T, H] or [T, N, D].

    With scales [T, 1] the result is written quantized: out holds int8 or fp8 (see quantize.py).
    """
    x32 = x.float()
    y = x32 * torch.rsqrt(x32.pow(2).mean(-1, keepdim=True) + eps)
    if weight is not None:
        y = (y.to(x.dtype) if round_before_weight else y) * (
            weight.float() + weight_offset if weight_offset else weight
        )
    return write_rows(y.to(x.dtype) if add is None else y.to(x.dtype) + add, out, scales)


@triton.jit
def scale_normed(
    y: tl.tensor, weight: tl.tensor, offset: tl.tensor, dtype: tl.constexpr, round_first: tl.constexpr
) -> tl.tensor:
    """y * (offset + weight) in dtype, rounding y first (Llama) or only the product (Gemma). y, weight: [R, H]."""
    if round_first:
        y = y.to(dtype).to(tl.float32)
    return (y * (offset + weight.to(tl.float32))).to(dtype)


@triton.jit(do_not_specialize=["num_rows"])
def _rms_norm_kernel(
    x_ptr: tl.tensor, weight_ptr: tl.tensor, out_ptr: tl.tensor, scales_ptr: tl.tensor, add_ptr: tl.tensor,
    num_rows: tl.tensor, inner: tl.tensor, x_outer: tl.tensor, x_inner: tl.tensor, out_outer: tl.tensor,
    out_inner: tl.tensor, add_outer: tl.tensor, add_inner: tl.tensor, eps: tl.tensor,
    weight_offset: tl.tensor,
    width: tl.constexpr, round_first: tl.constexpr, largest: tl.constexpr, rows: tl.constexpr,
    block: tl.constexpr, pdl: tl.constexpr,
) -> None:  # fmt: skip
    if pdl:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(0) * rows + tl.arange(0, rows)  # [R]
    col = tl.arange(0, block)[None, :]  # [1, H]
    mask = (row < num_rows)[:, None] & (col < width)
    outer = (row // inner).to(tl.int64)[:, None]
    head = (row % inner).to(tl.int64)[:, None]
    dtype: tl.constexpr = x_ptr.dtype.element_ty

    x = tl.load(x_ptr + outer * x_outer + head * x_inner + col, mask=mask, other=0.0).to(tl.float32)  # [R, H]
    y = x * tl.rsqrt(tl.sum(x * x, axis=1) / width + eps)[:, None]
    if weight_ptr is not None:
        weight = tl.load(weight_ptr + col, mask=col < width, other=0.0)  # [1, H]
        y = scale_normed(y, weight, weight_offset, dtype, round_first)
    if add_ptr is not None:
        a = tl.load(add_ptr + outer * add_outer + head * add_inner + col, mask=mask, other=0.0)
        y = y.to(dtype).to(tl.float32) + a.to(tl.float32)
    if scales_ptr is not None:
        y, scale = quantize_tile(y.to(dtype).to(tl.float32), largest)
        tl.store(scales_ptr + row, scale, mask=row < num_rows)
    tl.store(out_ptr + outer * out_outer + head * out_inner + col, y.to(out_ptr.dtype.element_ty), mask=mask)


def row_config(width: int) -> dict[str, int]:
    """Tile of the row norms: whole rows, several per program when they are narrow."""
    block = triton.next_power_of_2(width)
    rows = max(1, 1024 // block)
    return {"rows": rows, "block": block, "num_warps": min(16, max(1, rows * block // 512))}


def row_counts(x: Tensor) -> tuple[int, int]:
    """(rows in all, rows per step of the outer index) of x: [T, H] or [T, N, D]."""
    rows = x.shape[0] if x.dim() == 2 else x.shape[0] * x.shape[1]
    return rows, 1 if x.dim() == 2 or x.shape[0] == 1 else x.shape[1]


def row_strides(x: Tensor | None) -> tuple[int, int]:
    """(outer, inner) row strides of x, matching row_counts."""
    if x is None:
        return 0, 0
    assert x.dim() in (2, 3), f"rows of shape {tuple(x.shape)}"
    assert x.stride(-1) == 1 or x.shape[-1] == 1, "the last dimension must be contiguous"
    if x.dim() == 3 and x.shape[0] > 1:
        return x.stride(0), x.stride(1)
    return x.stride(-2), 0


def rms_norm_triton(
    x: Tensor,
    weight: Tensor | None,
    eps: float,
    *,
    weight_offset: float = 0.0,
    round_before_weight: bool = True,
    out: Tensor | None = None,
    scales: Tensor | None = None,
    add: Tensor | None = None,
    config: Mapping[str, int] | None = None,
) -> Tensor:
    """rms_norm_torch in one kernel; out may be x or add."""
    width = x.shape[-1]
    if scales is not None:
        assert out is not None, "scales go with an out of int8 or fp8"
        check_row_scales(x.shape, out, scales)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device) if out is None else out
    num_rows, inner = row_counts(x)
    if x.numel() == 0:
        return out
    assert width <= MAX_WIDTH, f"rows of {width} are wider than {MAX_WIDTH}"
    assert weight is None or (weight.shape == (width,) and weight.is_contiguous())
    plain = (add,) if scales is not None else (out, add)
    assert all(t is None or (t.shape == x.shape and t.dtype == x.dtype) for t in plain)
    meta = {**row_config(width), **(config or {})}
    _rms_norm_kernel[(triton.cdiv(num_rows, meta["rows"]),)](
        *(x, weight, out, scales, add, num_rows, inner),
        *(*row_strides(x), *row_strides(out), *row_strides(add), eps, weight_offset),
        width=width,
        round_first=round_before_weight,
        largest=None if scales is None else LARGEST[out.dtype],
        **meta,
        **pdl_options(few_overlap(len(x), x)),
    )
    return out
