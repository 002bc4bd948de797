"""Layer norm of rows."""
# mypy: disallow-untyped-decorators=False

from collections.abc import Mapping

import torch
from torch import Tensor

from outpace.kernels.launch_options import few_overlap, pdl_options
from outpace.kernels.rms_norm import MAX_WIDTH, row_config, row_counts, row_strides
from outpace.kernels.triton_stub import tl, triton


def layer_norm_torch(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, *, out: Tensor | None = None
) -> Tensor:
    """Layer norm of x: [T, H] or [T, N, D]."""
    weight = None if weight is None else weight.float()
    bias = None if bias is None else bias.float()
    y = torch.nn.functional.layer_norm(x.float(), x.shape[-1:], weight, bias, eps)
    return y.to(x.dtype) if out is None else out.copy_(y)


@triton.jit(do_not_specialize=["num_rows"])
def _layer_norm_kernel(
    x_ptr: tl.tensor, weight_ptr: tl.tensor, bias_ptr: tl.tensor, out_ptr: tl.tensor, num_rows: tl.tensor,
    inner: tl.tensor, x_outer: tl.tensor, x_inner: tl.tensor, out_outer: tl.tensor, out_inner: tl.tensor,
    eps: tl.tensor,
    width: tl.constexpr, rows: tl.constexpr, block: tl.constexpr, pdl: tl.constexpr,
) -> None:  # fmt: skip
    if pdl:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(0) * rows + tl.arange(0, rows)  # [R]
    col = tl.arange(0, block)[None, :]  # [1, H]
    mask = (row < num_rows)[:, None] & (col < width)
    outer = (row // inner).to(tl.int64)[:, None]
    head = (row % inner).to(tl.int64)[:, None]
    x = tl.load(x_ptr + outer * x_outer + head * x_inner + col, mask=mask, other=0.0).to(tl.float32)  # [R, H]
    mean = tl.sum(x, axis=1) / width  # [R]; columns past the width hold zero
    y = tl.where(mask, x - mean[:, None], 0.0)
    y = y * tl.rsqrt(tl.sum(y * y, axis=1) / width + eps)[:, None]
    if weight_ptr is not None:
        y *= tl.load(weight_ptr + col, mask=col < width, other=0.0).to(tl.float32)
    if bias_ptr is not None:
        y += tl.load(bias_ptr + col, mask=col < width, other=0.0).to(tl.float32)
    tl.store(out_ptr + outer * out_outer + head * out_inner + col, y.to(out_ptr.dtype.element_ty), mask=mask)


def layer_norm_triton(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    *,
    out: Tensor | None = None,
    config: Mapping[str, int] | None = None,
) -> Tensor:
    """layer_norm_torch in one kernel; out may be x."""
    width = x.shape[-1]
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device) if out is None else out
    num_rows, inner = row_counts(x)
    if x.numel() == 0:
        return out
    assert width <= MAX_WIDTH, f"rows of {width} are wider than {MAX_WIDTH}"
    assert all(t is None or (t.shape == (width,) and t.is_contiguous()) for t in (weight, bias))
    assert (out.shape, out.dtype) == (x.shape, x.dtype)
    meta = {**row_config(width), **(config or {})}
    _layer_norm_kernel[(triton.cdiv(num_rows, meta["rows"]),)](
        *(x, weight, bias, out, num_rows, inner, *row_strides(x), *row_strides(out), eps),
        width=width,
        **meta,
        **pdl_options(few_overlap(len(x), x)),
    )
    return out
