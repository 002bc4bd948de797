"""Layer norm of rows, with the bias of the linear before it and the residual add that precede it."""
# mypy: disallow-untyped-decorators=False

from collections.abc import Mapping

import torch

from outpace.kernels.quantize import LARGEST, check_scales, quantize_into, quantize_tile
from outpace.kernels.rms_norm import MAX_WIDTH, row_config, row_counts, row_strides
from outpace.kernels.triton_stub import tl, triton


def layer_norm_ref(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    *,
    residual: torch.Tensor | None = None,
    input_bias: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    residual_out: torch.Tensor | None = None,
    scales: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Layer norm of x (+ input_bias) (+ residual): (y, the sum that was normed). x: [T, H] or [T, N, D].

    With scales [T, 1] y is written quantized: out holds int8 or fp8 (see quantize.py).
    """
    if residual is not None or input_bias is not None:
        total = x.float()
        for term in (input_bias, residual):
            total = total if term is None else total + term.float()
        x = total.to(x.dtype) if residual_out is None else residual_out.copy_(total)  # the sum rounds once
    weight = None if weight is None else weight.float()
    bias = None if bias is None else bias.float()
    y = torch.nn.functional.layer_norm(x.float(), x.shape[-1:], weight, bias, eps)
    if scales is not None:
        assert out is not None, "scales go with an out of int8 or fp8"
        return quantize_into(y.to(x.dtype), out, scales), x
    return (y.to(x.dtype) if out is None else out.copy_(y)), x


@triton.jit(do_not_specialize=["num_rows"])
def _layer_norm_kernel(
    x_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    input_bias_ptr: tl.tensor,
    residual_ptr: tl.tensor,
    out_ptr: tl.tensor,
    sum_ptr: tl.tensor,
    scales_ptr: tl.tensor,
    num_rows: tl.tensor,
    inner: tl.tensor,
    x_outer: tl.tensor,
    x_inner: tl.tensor,
    residual_outer: tl.tensor,
    residual_inner: tl.tensor,
    out_outer: tl.tensor,
    out_inner: tl.tensor,
    sum_outer: tl.tensor,
    sum_inner: tl.tensor,
    eps: tl.tensor,
    width: tl.constexpr,
    largest: tl.constexpr,
    rows: tl.constexpr,
    block: tl.constexpr,
) -> None:
    row = tl.program_id(0) * rows + tl.arange(0, rows)  # [R]
    col = tl.arange(0, block)[None, :]  # [1, H]
    mask = (row < num_rows)[:, None] & (col < width)
    outer = (row // inner).to(tl.int64)[:, None]
    head = (row % inner).to(tl.int64)[:, None]
    dtype: tl.constexpr = x_ptr.dtype.element_ty

    x = tl.load(x_ptr + outer * x_outer + head * x_inner + col, mask=mask, other=0.0).to(tl.float32)  # [R, H]
    if input_bias_ptr is not None:
        x += tl.load(input_bias_ptr + col, mask=col < width, other=0.0).to(tl.float32)
    if residual_ptr is not None:
        r = tl.load(residual_ptr + outer * residual_outer + head * residual_inner + col, mask=mask, other=0.0)
        x += r.to(tl.float32)
    if sum_ptr is not None:
        total = x.to(dtype)
        tl.store(sum_ptr + outer * sum_outer + head * sum_inner + col, total, mask=mask)
        x = total.to(tl.float32)
    mean = tl.sum(x, axis=1) / width  # [R]; columns past the width hold zero
    y = tl.where(mask, x - mean[:, None], 0.0)
    y = y * tl.rsqrt(tl.sum(y * y, axis=1) / width + eps)[:, None]
    if weight_ptr is not None:
        y *= tl.load(weight_ptr + col, mask=col < width, other=0.0).to(tl.float32)
    if bias_ptr is not None:
        y += tl.load(bias_ptr + col, mask=col < width, other=0.0).to(tl.float32)
    if scales_ptr is not None:
        y, scale = quantize_tile(tl.where(mask, y, 0.0).to(dtype).to(tl.float32), largest)
        tl.store(scales_ptr + row, scale, mask=row < num_rows)
    tl.store(out_ptr + outer * out_outer + head * out_inner + col, y.to(out_ptr.dtype.element_ty), mask=mask)


def layer_norm_triton(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    *,
    residual: torch.Tensor | None = None,
    input_bias: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    residual_out: torch.Tensor | None = None,
    scales: torch.Tensor | None = None,
    config: Mapping[str, int] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """layer_norm_ref in one kernel; out may be x, and residual_out may be residual."""
    width = x.shape[-1]
    adds = residual is not None or input_bias is not None
    if scales is not None:
        assert out is not None, "scales go with an out of int8 or fp8"
        check_scales(x.shape, out, scales)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device) if out is None else out
    if adds and residual_out is None:
        residual_out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    total = residual_out if adds else None
    num_rows, inner = row_counts(x)
    if x.numel() == 0:
        return out, x if total is None else total
    assert width <= MAX_WIDTH, f"rows of {width} are wider than {MAX_WIDTH}"
    assert all(t is None or (t.shape == (width,) and t.is_contiguous()) for t in (weight, bias, input_bias))
    plain = (residual, total) if scales is not None else (residual, out, total)
    assert all(t is None or (t.shape == x.shape and t.dtype == x.dtype) for t in plain)
    meta = {**row_config(width), **(config or {})}
    _layer_norm_kernel[(triton.cdiv(num_rows, meta["rows"]),)](
        x,
        weight,
        bias,
        input_bias,
        residual,
        out,
        total,
        scales,
        num_rows,
        inner,
        *row_strides(x),
        *row_strides(residual),
        *row_strides(out),
        *row_strides(total),
        eps,
        width=width,
        largest=None if scales is None else LARGEST[out.dtype],
        **meta,
    )
    return out, x if total is None else total
