"""Attention over pages for ragged batches: prefill chunks, several queries per sequence, decodes in between.

The rows of a tile are some query tokens of one sequence times the query heads of one KV head, so a decode among
prefills fills as many rows as its group has heads. The host launches an upper bound of tiles, and each program finds
its tile by a binary search.

Invariant launches give a query the same bits in every batch, chunk and row of a tile. Tiles have one size, and a key
has one place in them: key n is column n % block_n of key tile n // block_n, and tiles are added in ascending order.
Where a row sees no key of a tile, before its window or after its diagonal, its scores are -inf: the maximum stays,
alpha is exp2(0) = 1, every probability 0, and adding zeros to `l_i` and `acc` is exact (a zero may lose its sign). A
masked column next to visible ones gives zeros in the same way, whatever its key and value. Until the first visible key
`l_i` and `acc` are 0, or the sink's, so it does not matter how many tiles went before. The phases with and without a
mask round alike only if no product is fused with a sum: `s * scale - m_new` could become one fma where no mask comes in
between. So these launches are compiled without fma's of that kind.
"""
# mypy: disallow-untyped-decorators=False

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from outpace.kernels.attention_tile import LOG2E, LOWEST, Scoring, attend, kernel_constants
from outpace.kernels.triton_stub import tl, triton

INVARIANT_ROWS = 64  # rows of a tile in every batch: the fewest that Hopper's wide matrix instructions take


@dataclass(frozen=True, slots=True)
class PrefillTiles:
    """How one program of the prefill kernel works: rows (tokens x heads), keys per step, warps, steps in flight."""

    block_m: int
    block_n: int
    num_warps: int = 4
    num_stages: int = 3


def prefill_tiles(
    max_q: int, group: int, head_dim: int, v_head_dim: int, itemsize: int, quantized: bool = False
) -> PrefillTiles:
    """The default tiles: as many rows as the longest query fills, up to what the registers hold."""
    width = max(triton.next_power_of_2(head_dim), triton.next_power_of_2(v_head_dim))
    group_rows = triton.next_power_of_2(group)
    if itemsize > 2:  # no tensor cores: small tiles
        return PrefillTiles(max(16, group_rows), 32 if width <= 128 else 16, 4, 2)
    most = 128 if quantized or width > 128 else 64
    rows = max(16, group_rows, min(most, triton.next_power_of_2(max_q * group)))
    if width > 128 and rows >= 128 and not quantized:
        return PrefillTiles(rows, 64, 8, 2)
    many_warps = rows >= 128 or (quantized and width > 128)  # keys are converted in registers
    return PrefillTiles(rows, 64 if width <= 128 else 32, 8 if many_warps else 4, 3)


@triton.jit
def _find_sequence(cu_q_ptr: tl.tensor, batch: tl.tensor, tile: tl.tensor, block_q: tl.constexpr) -> tl.tensor:
    """The last sequence whose first tile, cu_q[i] // block_q + i, is not after `tile` (`batch`: padding); its first
    row, and the number of the tile in it."""
    low = batch * 0
    high = batch
    while low < high:
        mid = (low + high + 1) // 2
        if tl.load(cu_q_ptr + mid) // block_q + mid <= tile:
            low = mid
        else:
            high = mid - 1
    start = tl.load(cu_q_ptr + low)
    return low, start, tile - (start // block_q + low)


@triton.jit(do_not_specialize=["rows", "batch", "num_tiles", "table_stride", "window"])
def _prefill_kernel(
    out_ptr: tl.tensor,  # [T, Hq, Dv]
    q_ptr: tl.tensor,  # [T, Hq, D]
    k_ptr: tl.tensor,  # [N, page_size, Hkv, D]
    v_ptr: tl.tensor,  # [N, page_size, Hkv, Dv]
    s_ptr: tl.tensor,  # [N, 2, Hkv, page_size] or None
    table_ptr: tl.tensor,  # [B, M]
    lens_ptr: tl.tensor,  # [B]
    cu_q_ptr: tl.tensor,  # [B + 1]
    slopes_ptr: tl.tensor,  # [Hq] or None
    sinks_ptr: tl.tensor,  # [Hq] or None
    rows: tl.tensor, batch: tl.tensor, num_tiles: tl.tensor, table_stride: tl.tensor, window: tl.tensor,
    scale: tl.tensor, cap: tl.tensor,
    q_row: tl.constexpr, q_head: tl.constexpr, out_row: tl.constexpr, out_head: tl.constexpr,
    k_page: tl.constexpr, k_row: tl.constexpr, k_head: tl.constexpr, v_page: tl.constexpr,
    v_row: tl.constexpr, v_head: tl.constexpr, s_page: tl.constexpr, s_value: tl.constexpr, dim: tl.constexpr,
    v_dim: tl.constexpr, page_size: tl.constexpr, kv_heads: tl.constexpr, group: tl.constexpr,
    block_q: tl.constexpr, block_m: tl.constexpr, block_n: tl.constexpr, block_d: tl.constexpr,
    block_dv: tl.constexpr, has_window: tl.constexpr, has_cap: tl.constexpr, mixed: tl.constexpr,
) -> None:  # fmt: skip
    kv_head = tl.program_id(0) % kv_heads
    tile = num_tiles - 1 - tl.program_id(0) // kv_heads  # the late tiles of a sequence see most keys: they start first
    seq, start, tile = _find_sequence(cu_q_ptr, batch, tile, block_q)
    padding = seq == batch  # rows after the last sequence, treated as a sequence without keys
    stop = tl.where(padding, rows, tl.load(cu_q_ptr + seq + 1, mask=seq < batch, other=0))
    length = tl.load(lens_ptr + seq, mask=seq < batch, other=0)
    token_0 = start + tile * block_q
    if token_0 >= stop:
        return
    if mixed and (stop - start == 1) & (seq < batch):
        return  # the decode kernel computes it

    m = tl.arange(0, block_m)
    d = tl.arange(0, block_d)
    dv = tl.arange(0, block_dv)
    token = token_0 + m // group
    heads = kv_head * group + m % group
    real = (m < block_q * group) & (token < stop)
    q_at = token.to(tl.int64)[:, None] * q_row + heads[:, None] * q_head + d[None, :]
    q = tl.load(q_ptr + q_at, mask=real[:, None] & (d < dim)[None, :], other=0.0)  # [M, D]

    slopes = None
    if slopes_ptr is not None:
        slopes = tl.load(slopes_ptr + heads).to(tl.float32) * LOG2E
    m_i = tl.full([block_m], LOWEST, tl.float32)
    l_i = tl.zeros([block_m], tl.float32)
    if sinks_ptr is not None:  # a sink is one more key that adds no value
        m_i = tl.load(sinks_ptr + heads).to(tl.float32) * LOG2E
        l_i += 1.0
    acc = tl.zeros([block_m, block_dv], tl.float32)

    shift = length - stop  # from a token's row to its position
    pos = token + shift
    pos_0 = token_0 + shift
    last = tl.where(length > 0, tl.minimum(token_0 + block_q, stop) + shift, 0)  # after the newest query of the tile
    first = tl.maximum(pos_0 - window + 1, 0) if has_window else last * 0
    # Key tiles: lead .. begin cross the window's edge, begin .. end are seen whole by every row, end .. tail cross the
    # diagonal.
    lead = first // block_n
    tail = tl.cdiv(last, block_n)
    begin = tl.minimum(tl.cdiv(tl.maximum(last - window, 0), block_n), tail) if has_window else lead
    end = tl.maximum((pos_0 + 1) // block_n, begin)
    table_ptr += seq.to(tl.int64) * table_stride
    k_ptr += kv_head * k_head
    v_ptr += kv_head * v_head
    if s_ptr is not None:
        s_ptr += kv_head * page_size
    for phase in tl.static_range(0 if has_window else 1, 3):
        # fmt: off
        acc, m_i, l_i = attend(
            acc, m_i, l_i, q, pos, slopes, k_ptr, v_ptr, s_ptr, table_ptr, first, last,
            lead if phase == 0 else begin if phase == 1 else end,
            begin if phase == 0 else end if phase == 1 else tail,
            window, scale, cap, k_page, k_row, v_page, v_row, s_page, s_value, dim, v_dim, page_size,
            block_n, block_d, block_dv, has_window, has_cap, phase != 1, False,
        )
        # fmt: on
    acc = acc / tl.where(l_i > 0.0, l_i, 1.0)[:, None]
    out_at = token.to(tl.int64)[:, None] * out_row + heads[:, None] * out_head + dv[None, :]
    tl.store(out_ptr + out_at, acc.to(out_ptr.dtype.element_ty), mask=real[:, None] & (dv < v_dim)[None, :])


def paged_attention_prefill(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    cu_q: Tensor,
    max_q: int,
    *,
    out: Tensor | None = None,
    scales: Tensor | None = None,
    mixed: bool = False,
    invariant: bool = False,
    tiles: PrefillTiles | None = None,
    **scoring: Any,
) -> Tensor:
    """`paged_attention` for any mix of query lengths. `max_q` only affects the choice of tiles, and not if `invariant`.

    `mixed`: the rows of sequences with one query are not written.
    """
    (rows, num_heads, dim), (_, _, kv_heads, v_dim), batch = q.shape, v_pages.shape, seq_lens.shape[0]
    how = Scoring(**scoring)
    out = q.new_empty(rows, num_heads, v_dim) if out is None else out
    if rows == 0:
        return out
    constants = kernel_constants(q, k_pages, v_pages, out, scales)
    group = constants["group"]
    filled = max(1, INVARIANT_ROWS // group) if invariant else max_q
    tiles = tiles or prefill_tiles(filled, group, dim, v_dim, q.element_size(), scales is not None)
    block_q = tiles.block_m // group
    num_tiles = rows // block_q + batch + 1  # each sequence, and the padding, may end in a partial tile
    _prefill_kernel[(num_tiles * kv_heads,)](
        *(out, q, k_pages, v_pages, scales, block_table, seq_lens, cu_q, how.alibi_slopes, how.sinks),
        *(rows, batch, num_tiles, block_table.stride(0), how.window, *how.in_log2),
        **constants,
        kv_heads=kv_heads,
        block_q=block_q,
        block_m=tiles.block_m,
        block_n=tiles.block_n,
        has_window=how.window > 0,
        has_cap=how.softcap > 0,
        mixed=mixed,
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
        enable_fp_fusion=not invariant,
    )
    return out
