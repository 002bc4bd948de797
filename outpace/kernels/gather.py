"""Gather of rows: the hidden states whose logits are wanted."""
# mypy: disallow-untyped-decorators=False

from collections.abc import Mapping

import torch

from outpace.kernels.triton_stub import tl, triton


def gather_rows_ref(x: torch.Tensor, rows: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
    """x[rows]: [T, H], [B] → [B, H]; rows are in [0, T)."""
    y = x.index_select(0, rows)
    return y if out is None else out.copy_(y)


@triton.jit
def _gather_rows_kernel(
    x_ptr: tl.tensor,
    rows_ptr: tl.tensor,
    out_ptr: tl.tensor,
    width: tl.tensor,
    x_stride: tl.tensor,
    out_stride: tl.tensor,
    block: tl.constexpr,
) -> None:
    index = tl.program_id(0).to(tl.int64)
    row = tl.load(rows_ptr + index).to(tl.int64)
    col = tl.program_id(1) * block + tl.arange(0, block)  # [H]
    mask = col < width
    x = tl.load(x_ptr + row * x_stride + col, mask=mask)
    tl.store(out_ptr + index * out_stride + col, x, mask=mask)


def copy_config(width: int) -> dict[str, int]:
    """Tile of the row copies: one row, up to 2048 columns."""
    return {"block": min(2048, triton.next_power_of_2(width)), "num_warps": 4}


def gather_rows_triton(
    x: torch.Tensor,
    rows: torch.Tensor,
    *,
    out: torch.Tensor | None = None,
    config: Mapping[str, int] | None = None,
) -> torch.Tensor:
    """gather_rows_ref in one kernel."""
    count, width = rows.shape[0], x.shape[1]
    out = torch.empty((count, width), dtype=x.dtype, device=x.device) if out is None else out
    if out.numel() == 0:
        return out
    assert x.stride(1) == out.stride(1) == 1, "rows must be contiguous"
    assert rows.is_contiguous()
    assert (out.shape, out.dtype) == ((count, width), x.dtype)
    meta = {**copy_config(width), **(config or {})}
    grid = (count, triton.cdiv(width, meta["block"]))
    _gather_rows_kernel[grid](x, rows, out, width, x.stride(0), out.stride(0), **meta)
    return out
