"""Softmax of long rows: the maximum and the sum in one online pass, the probabilities in a second."""
# mypy: disallow-untyped-decorators=False

from collections.abc import Mapping

import torch

from outpace.kernels.triton_stub import tl, triton


def softmax_ref(
    x: torch.Tensor, *, scale: float = 1.0, lengths: torch.Tensor | None = None, out: torch.Tensor | None = None
) -> torch.Tensor:
    """softmax(x * scale) over the first lengths[t] columns of each row, zero past them. x: [T, N], lengths: [T]."""
    x32 = x.float() if scale == 1.0 else x.float() * scale
    if lengths is None:
        y = torch.softmax(x32, dim=1)
    else:
        beyond = torch.arange(x.shape[1], device=x.device) >= lengths[:, None]  # [T, N]
        y = torch.softmax(x32.masked_fill(beyond, float("-inf")), dim=1).masked_fill(beyond, 0.0)
    return y.to(x.dtype) if out is None else out.copy_(y)


@triton.jit
def _softmax_kernel(
    x_ptr: tl.tensor,
    lengths_ptr: tl.tensor,
    out_ptr: tl.tensor,
    width: tl.tensor,
    x_stride: tl.tensor,
    out_stride: tl.tensor,
    scale: tl.tensor,
    block: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    length = width if lengths_ptr is None else tl.minimum(tl.load(lengths_ptr + row).to(tl.int32), width)
    lane = tl.arange(0, block)  # [B]
    peak = tl.full([block], float("-inf"), tl.float32)  # each lane keeps its own maximum and sum
    total = tl.zeros([block], tl.float32)
    for start in range(0, length, block):
        col = start + lane
        x = tl.load(x_ptr + row * x_stride + col, mask=col < length, other=float("-inf")).to(tl.float32)
        x = tl.where(col < length, x * scale, float("-inf"))
        higher = tl.maximum(peak, x)
        base = tl.where(higher == float("-inf"), 0.0, higher)  # -inf - -inf would be NaN
        total = total * tl.exp(peak - base) + tl.exp(x - base)
        peak = higher

    top = tl.max(peak, axis=0)
    top = tl.where(top == float("-inf"), 0.0, top)
    denominator = tl.sum(total * tl.exp(peak - top), axis=0)
    for start in range(0, width, block):
        col = start + lane
        x = tl.load(x_ptr + row * x_stride + col, mask=col < length, other=0.0).to(tl.float32)
        y = tl.where(col < length, tl.exp(x * scale - top) / denominator, 0.0)
        tl.store(out_ptr + row * out_stride + col, y.to(out_ptr.dtype.element_ty), mask=col < width)


def softmax_config(width: int) -> dict[str, int]:
    """Tile of the softmax: one program per row, many columns at a time."""
    # H200, fp32, 64 rows of 128,256: 32 us with 16384 columns and 32 warps, 63 us with 4096 and 16.
    block = min(16384, triton.next_power_of_2(width))
    return {"block": block, "num_warps": min(32, max(1, block // 256))}


def softmax_triton(
    x: torch.Tensor,
    *,
    scale: float = 1.0,
    lengths: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    config: Mapping[str, int] | None = None,
) -> torch.Tensor:
    """softmax_ref in one kernel; out may have another dtype, and may be x."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device) if out is None else out
    if x.numel() == 0:
        return out
    assert x.stride(1) == out.stride(1) == 1, "rows must be contiguous"
    assert out.shape == x.shape
    assert lengths is None or (lengths.shape == x.shape[:1] and lengths.is_contiguous())
    meta = {**softmax_config(x.shape[1]), **(config or {})}
    _softmax_kernel[(x.shape[0],)](x, lengths, out, x.shape[1], x.stride(0), out.stride(0), scale, **meta)
    return out
