"""Token embeddings, scaled and summed with learned positions."""
# mypy: disallow-untyped-decorators=False

from collections.abc import Mapping

import torch
from torch import Tensor

from outpace.kernels.triton_stub import tl, triton


def _rounded(scale: float, dtype: torch.dtype) -> float:
    """The scale as Hugging Face's Gemma multiplies by it: rounded to the dtype of the table."""
    return scale if scale == 1.0 else torch.tensor(scale, dtype=dtype, device="cpu").item()


def embed_torch(
    ids: Tensor,
    table: Tensor,
    *,
    positions: Tensor | None = None,
    position_table: Tensor | None = None,
    position_offset: int = 0,
    scale: float = 1.0,
    out: Tensor | None = None,
) -> Tensor:
    """table[ids] * scale (+ position_table[positions + offset]): [T] → [T, H]. Ids and positions are in range."""
    y = torch.nn.functional.embedding(ids, table)
    if scale != 1.0:
        y = (y.float() * _rounded(scale, table.dtype)).to(table.dtype)
    if position_table is not None:
        assert positions is not None, "a position table needs positions"
        y = y + torch.nn.functional.embedding(positions + position_offset, position_table)
    return y if out is None else out.copy_(y)


@triton.jit
def _embed_kernel(
    ids_ptr: tl.tensor, table_ptr: tl.tensor, positions_ptr: tl.tensor, position_table_ptr: tl.tensor,
    out_ptr: tl.tensor, width: tl.tensor, table_stride: tl.tensor, position_stride: tl.tensor,
    out_stride: tl.tensor, position_offset: tl.tensor, scale: tl.tensor,
    scaled: tl.constexpr, block: tl.constexpr,
) -> None:  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    col = tl.program_id(1) * block + tl.arange(0, block)  # [H]
    mask = col < width
    row = tl.load(ids_ptr + token).to(tl.int64)
    y = tl.load(table_ptr + row * table_stride + col, mask=mask)
    if scaled:
        y = (y.to(tl.float32) * scale).to(table_ptr.dtype.element_ty)
    if position_table_ptr is not None:
        row = tl.load(positions_ptr + token).to(tl.int64) + position_offset
        position = tl.load(position_table_ptr + row * position_stride + col, mask=mask)
        y = (y.to(tl.float32) + position.to(tl.float32)).to(table_ptr.dtype.element_ty)
    tl.store(out_ptr + token * out_stride + col, y, mask=mask)


def copy_config(width: int) -> dict[str, int]:
    """Tile of a row copy: one row, up to 2048 columns."""
    return {"block": min(2048, triton.next_power_of_2(width)), "num_warps": 4}


def embed_triton(
    ids: Tensor,
    table: Tensor,
    *,
    positions: Tensor | None = None,
    position_table: Tensor | None = None,
    position_offset: int = 0,
    scale: float = 1.0,
    out: Tensor | None = None,
    config: Mapping[str, int] | None = None,
) -> Tensor:
    """embed_torch in one kernel."""
    shape = (ids.shape[0], table.shape[1])
    out = torch.empty(shape, dtype=table.dtype, device=table.device) if out is None else out
    if out.numel() == 0:
        return out
    assert (out.shape, out.dtype) == (shape, table.dtype)
    assert table.stride(1) == out.stride(1) == 1, "rows must be contiguous"
    assert ids.is_contiguous()
    if position_table is not None:
        assert positions is not None, "a position table needs positions"
        assert positions.shape == ids.shape
        assert positions.is_contiguous()
        assert position_table.stride(1) == 1, "rows must be contiguous"
        assert (position_table.shape[1], position_table.dtype) == (shape[1], table.dtype)
    meta = {**copy_config(shape[1]), **(config or {})}
    _embed_kernel[(shape[0], triton.cdiv(shape[1], meta["block"]))](
        *(ids, table, None if position_table is None else positions, position_table, out, shape[1]),
        *(table.stride(0), 0 if position_table is None else position_table.stride(0), out.stride(0)),
        *(position_offset, _rounded(scale, table.dtype)),
        scaled=scale != 1.0,
        **meta,
    )
    return out
