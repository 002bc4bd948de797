"""Attention over pages for ragged batches: prefill chunks, several queries per sequence, decodes in between.

A tile of rows is some query tokens of one sequence times the query heads of one KV head, so that a decode among prefills
fills as many rows as its group has heads. Tiles are counted on the host by a bound and found on the device by a search.
"""
# mypy: disallow-untyped-decorators=False

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from outpace.kernels.attention_decode import LOG2E, LOWEST, kernel_constants, score_scales, shape_scores
from outpace.kernels.triton_stub import tl, triton


@dataclass(frozen=True, slots=True)
class PrefillTiles:
    """How one program of the prefill kernel works: rows (tokens x heads), keys per step, warps, steps in flight."""

    block_m: int
    block_n: int
    num_warps: int = 4
    num_stages: int = 3


def prefill_tiles(max_q: int, group: int, head_dim: int, v_head_dim: int, itemsize: int) -> PrefillTiles:
    """The default tiles: as many rows as the longest query fills, up to what the registers hold."""
    width = max(triton.next_power_of_2(head_dim), triton.next_power_of_2(v_head_dim))
    group_rows = triton.next_power_of_2(group)
    if itemsize > 2:  # no tensor cores: small tiles
        return PrefillTiles(max(16, group_rows), 32 if width <= 128 else 16, 4, 2)
    rows = max(16, group_rows, min(128, triton.next_power_of_2(max_q * group)))
    return PrefillTiles(rows, 64 if width <= 128 else 32, 8 if rows >= 128 else 4, 3)


@triton.jit
def _find_sequence(cu_q_ptr: Any, batch: Any, tile: Any, block_q: tl.constexpr) -> Any:
    """The last sequence whose first tile, cu_q[i] // block_q + i, is not after `tile`; `batch` is the padding's."""
    base = tl.load(cu_q_ptr)
    low = batch * 0
    high = batch
    while low < high:
        mid = (low + high + 1) // 2
        if (tl.load(cu_q_ptr + mid) - base) // block_q + mid <= tile:
            low = mid
        else:
            high = mid - 1
    start = tl.load(cu_q_ptr + low) - base
    return low, start, tile - (start // block_q + low)


@triton.jit
def _attend(
    acc: Any,  # [M, Dv]
    m_i: Any,  # [M]
    l_i: Any,  # [M]
    q: Any,  # [M, D]
    pos: Any,  # [M]: the position of each row's query
    k_ptr: Any,
    v_ptr: Any,
    table_ptr: Any,
    begin: Any,
    end: Any,
    length: Any,
    window: Any,
    slopes: Any,
    scale: Any,
    cap: Any,
    k_page: tl.constexpr,
    k_row: tl.constexpr,
    v_page: tl.constexpr,
    v_row: tl.constexpr,
    dim: tl.constexpr,
    v_dim: tl.constexpr,
    page_size: tl.constexpr,
    block_n: tl.constexpr,
    block_d: tl.constexpr,
    block_dv: tl.constexpr,
    has_window: tl.constexpr,
    has_cap: tl.constexpr,
    masked: tl.constexpr,
) -> Any:
    """One pass over the key tiles begin .. end. Without `masked` every row sees every key of them."""
    d = tl.arange(0, block_d)
    dv = tl.arange(0, block_dv)
    for tile in range(begin, end):
        n = tile * block_n + tl.arange(0, block_n)
        exists = n < length if masked else n >= 0
        page = tl.load(table_ptr + n // page_size, mask=exists, other=0).to(tl.int64)
        k_at = page * k_page + n % page_size * k_row
        v_at = page * v_page + n % page_size * v_row
        k = tl.load(k_ptr + k_at[:, None] + d[None, :], mask=exists[:, None] & (d < dim)[None, :], other=0.0)
        v = tl.load(v_ptr + v_at[:, None] + dv[None, :], mask=exists[:, None] & (dv < v_dim)[None, :], other=0.0)
