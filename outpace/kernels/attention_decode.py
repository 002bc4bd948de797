"""Decode attention over pages: one query per sequence, the keys of a sequence split over programs, then combined.

The grid depends on (batch, KV heads, splits) alone and each program reads its sequence's length on the device, so that
a CUDA graph can hold the launch while sequences grow. In a mixed batch it also reads there whether the sequence has one
query, at whatever row, and leaves the others alone.
"""
# mypy: disallow-untyped-decorators=False

from dataclasses import dataclass, replace
from functools import cache

import torch
from torch import Tensor

from outpace.kernels.attention_prefill import LOG2E, LOWEST, attend, kernel_constants, score_scales
from outpace.kernels.gemv import has_pdl
from outpace.kernels.triton_stub import tl, triton

COMBINE_CHUNK = 16  # splits combined at a time
MIN_SPLIT = 64  # tokens


@dataclass(frozen=True, slots=True)
class DecodeTiles:
    """How one program of the decode kernel works: keys per step, warps, and steps in flight."""

    block_n: int
    num_warps: int = 4
    num_stages: int = 3


def decode_tiles(group: int, head_dim: int, v_head_dim: int, itemsize: int, quantized: bool = False) -> DecodeTiles:
    """The default tiles: a step holds about 32 KiB of keys and values, so that two or more programs share an SM.

    Quantized ones are converted in registers: two warps take 43 us for 64 x 1,088 keys of 128 in fp8 on an H200, four
    take 56 at best, and bf16 takes 69.
    """
    width: int = triton.next_power_of_2(max(head_dim, v_head_dim))
    keys, num_warps = min(128, 16384 // (width * itemsize)), 4 if group <= 64 else 8
    if quantized and itemsize == 2 and head_dim == v_head_dim == width <= 128 and group <= 16:
        return DecodeTiles(64, num_warps=2, num_stages=3)
    return DecodeTiles(max(16, keys // 2), num_warps, 4) if quantized else DecodeTiles(max(16, keys), num_warps)


def decode_splits(batch: int, num_kv_heads: int, max_len: int, num_sms: int) -> int:
    """How many programs share one (sequence, KV head): together at most two programs per SM, and at least 1.

    Two against four on an H200, 8 KV heads of 128: 70 us against 83 for one sequence of 64k keys, 69 against 79 for
    eight of 8k.
    """
    wanted = 2 * num_sms // max(1, batch * num_kv_heads)
    return max(1, min(wanted, -(-max_len // MIN_SPLIT)))


@cache
def sm_count(device: torch.device) -> int:
    """The number of SMs of a device; 1 where there are none (Triton's interpreter)."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


@triton.jit
def _key_tiles(length: tl.tensor, window: tl.tensor, has_window: tl.constexpr, block_n: tl.constexpr) -> tl.tensor:
    """First visible key, the tile it is in, and the number of tiles from there to the end."""
    first = tl.maximum(length - window, 0) if has_window else length * 0
    return first, first // block_n, tl.cdiv(length, block_n) - first // block_n


@triton.jit
def _find_query(cu_q_ptr: tl.tensor, lens_ptr: tl.tensor, seq: tl.tensor) -> tl.tensor:
    """The row of a sequence's query, whether it has just one, and its keys: none where it has not."""
    row = tl.load(cu_q_ptr + seq)
    has_query = tl.load(cu_q_ptr + seq + 1) == row + 1
    return row, has_query, tl.where(has_query, tl.load(lens_ptr + seq), 0)


@triton.jit(do_not_specialize=["batch", "table_stride", "num_splits", "window"])
def _decode_kernel(
    out_ptr: tl.tensor,  # [T, Hq, Dv]; when partial: fp32 [B, Hq, S, Dv]
    lse_ptr: tl.tensor,  # when partial: fp32 [B, Hq, S]
    q_ptr: tl.tensor,  # [T, Hq, D]
    k_ptr: tl.tensor,  # [N, page_size, Hkv, D]
    v_ptr: tl.tensor,  # [N, page_size, Hkv, Dv]
    s_ptr: tl.tensor,  # [N, 2, Hkv, page_size] or None
    table_ptr: tl.tensor,  # [B, M]
    lens_ptr: tl.tensor,  # [B]
    cu_q_ptr: tl.tensor,  # [B + 1]
    slopes_ptr: tl.tensor,  # [Hq] or None
    sinks_ptr: tl.tensor,  # [Hq] or None
    batch: tl.tensor,
    table_stride: tl.tensor,
    num_splits: tl.tensor,
    window: tl.tensor,
    scale: tl.tensor,
    cap: tl.tensor,
    q_row: tl.constexpr,
    q_head: tl.constexpr,
    out_row: tl.constexpr,
    out_head: tl.constexpr,
    k_page: tl.constexpr,
    k_row: tl.constexpr,
    k_head: tl.constexpr,
    v_page: tl.constexpr,
    v_row: tl.constexpr,
    v_head: tl.constexpr,
    s_page: tl.constexpr,
    s_value: tl.constexpr,
    dim: tl.constexpr,
    v_dim: tl.constexpr,
    page_size: tl.constexpr,
    group: tl.constexpr,
    block_m: tl.constexpr,
    block_n: tl.constexpr,
    block_d: tl.constexpr,
    block_dv: tl.constexpr,
    has_window: tl.constexpr,
    has_cap: tl.constexpr,
    mixed: tl.constexpr,
    partial: tl.constexpr,
    pdl: tl.constexpr,
) -> None:
    kv_head = tl.program_id(0)
    split = tl.program_id(1)
    seq = tl.program_id(2)
    if pdl:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    row, has_query, length = _find_query(cu_q_ptr, lens_ptr, seq)
    first, tile_0, tiles = _key_tiles(length, window, has_window, block_n)
    parts = tl.minimum(tiles, num_splits)  # the splits that have work: the first ones
    begin = split * tiles // tl.maximum(parts, 1)
    end = (split + 1) * tiles // tl.maximum(parts, 1)
    if (split >= parts) & partial:
        return  # the combine kernel reads no split past the parts
    if mixed and not has_query:
        return

    m = tl.arange(0, block_m)
    d = tl.arange(0, block_d)
    dv = tl.arange(0, block_dv)
    heads = kv_head * group + m
    real = m < tl.where(has_query, group, 0)
    q_at = row.to(tl.int64) * q_row + heads[:, None] * q_head + d[None, :]
    q = tl.load(q_ptr + q_at, mask=real[:, None] & (d < dim)[None, :], other=0.0)  # [M, D]

    slopes = None
    if slopes_ptr is not None:
        slopes = tl.load(slopes_ptr + heads, mask=real, other=0.0).to(tl.float32) * LOG2E
    m_i = tl.full([block_m], LOWEST, tl.float32)
    l_i = tl.zeros([block_m], tl.float32)
    if sinks_ptr is not None:  # a sink is one more key, seen by the first split, that adds no value
        sinks = tl.load(sinks_ptr + heads, mask=real, other=0.0).to(tl.float32) * LOG2E
        m_i = tl.where(split == 0, sinks, m_i)
        l_i += 1.0  # vanishes in the other splits, next to any real key
    acc = tl.zeros([block_m, block_dv], tl.float32)

    table_ptr += seq.to(tl.int64) * table_stride
    k_ptr += kv_head * k_head
    v_ptr += kv_head * v_head
    if s_ptr is not None:
        s_ptr += kv_head * page_size
    # fmt: off
    acc, m_i, l_i = attend(
        acc, m_i, l_i, q, length - 1 + m * 0, slopes, k_ptr, v_ptr, s_ptr, table_ptr, first, length,
        tile_0 + begin, tile_0 + end, window, scale, cap, k_page, k_row, v_page, v_row, s_page, s_value, dim, v_dim,
        page_size, block_n, block_d, block_dv, has_window, has_cap, True,
        s_ptr is not None and v_dim % 2 == 0,
    )
    # fmt: on
    acc = acc / tl.where(l_i > 0.0, l_i, 1.0)[:, None]
    columns = (dv < v_dim)[None, :]
    if partial:
        at = (seq.to(tl.int64) * tl.num_programs(0) * group + heads) * num_splits + split
        tl.store(lse_ptr + at, m_i + tl.log2(l_i), mask=real)
        tl.store(out_ptr + at[:, None] * v_dim + dv[None, :], acc, mask=real[:, None] & columns)
    else:
        out_ptr += heads[:, None] * out_head + dv[None, :]
        tl.store(out_ptr + row.to(tl.int64) * out_row, acc.to(out_ptr.dtype.element_ty), mask=real[:, None] & columns)
        if not mixed and seq >= tl.load(cu_q_ptr + batch):  # a padding row, of no sequence
            zeros = tl.zeros([block_m, block_dv], out_ptr.dtype.element_ty)
            tl.store(out_ptr + seq.to(tl.int64) * out_row, zeros, mask=(m < group)[:, None] & columns)


@triton.jit(do_not_specialize=["batch", "num_splits", "window"])
def _combine_kernel(
    out_ptr: tl.tensor,  # [T, Hq, Dv]
    part_ptr: tl.tensor,  # [B, Hq, S, Dv]
    lse_ptr: tl.tensor,  # [B, Hq, S]
    lens_ptr: tl.tensor,
    cu_q_ptr: tl.tensor,
    batch: tl.tensor,
    num_splits: tl.tensor,
    window: tl.tensor,
    out_row: tl.constexpr,
    out_head: tl.constexpr,
    v_dim: tl.constexpr,
    block_n: tl.constexpr,
    block_dv: tl.constexpr,
    chunk: tl.constexpr,
    has_window: tl.constexpr,
    mixed: tl.constexpr,
    pdl: tl.constexpr,
) -> None:
    head = tl.program_id(0)
    seq = tl.program_id(1)
    if pdl:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    row, has_query, length = _find_query(cu_q_ptr, lens_ptr, seq)
    if mixed and not has_query:
        return
    _, _, tiles = _key_tiles(length, window, has_window, block_n)
    parts = tl.minimum(tiles, num_splits)

    dv = tl.arange(0, block_dv)
    base = (seq.to(tl.int64) * tl.num_programs(0) + head) * num_splits
    m_i = tl.full([1], LOWEST, tl.float32)
    l_i = tl.zeros([1], tl.float32)
    acc = tl.zeros([block_dv], tl.float32)
    for start in range(0, parts, chunk):
        s = start + tl.arange(0, chunk)
        lse = tl.load(lse_ptr + base + s, mask=s < parts, other=float("-inf"))
        at = (base + s)[:, None] * v_dim + dv[None, :]
        part = tl.load(part_ptr + at, mask=(s < parts)[:, None] & (dv < v_dim)[None, :], other=0.0)  # [chunk, Dv]
        m_new = tl.maximum(m_i, tl.max(lse, 0))
        weight = tl.exp2(lse - m_new)
        alpha = tl.exp2(m_i - m_new)
        l_i = l_i * alpha + tl.sum(weight, 0)
        acc = acc * alpha + tl.sum(weight[:, None] * part, 0)
        m_i = m_new
    out = (acc / tl.where(l_i > 0.0, l_i, 1.0)).to(out_ptr.dtype.element_ty)
    out_ptr += head * out_head + dv
    tl.store(out_ptr + row.to(tl.int64) * out_row, out, mask=dv < tl.where(has_query, v_dim, 0))
    if not mixed and seq >= tl.load(cu_q_ptr + batch):  # a padding row, of no sequence
        tl.store(out_ptr + seq.to(tl.int64) * out_row, tl.zeros_like(out), mask=dv < v_dim)


def decode_workspace(
    batch: int, num_heads: int, v_dim: int, splits: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Partial outputs [B, Hq, S, Dv] and their log-sum-exps [B, Hq, S]; good for every launch that needs no more."""
    shape = (batch, num_heads, splits)
    return torch.empty(*shape, v_dim, device=device), torch.empty(shape, device=device)


def paged_attention_decode(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    cu_q: Tensor,
    max_q: int = 1,
    *,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    out: Tensor | None = None,
    scales: Tensor | None = None,
    max_len: int = 0,
    mixed: bool = False,
    num_splits: int = 0,
    workspace: tuple[Tensor, Tensor] | None = None,
    tiles: DecodeTiles | None = None,
    pdl: bool | None = None,
) -> Tensor:
    """`paged_attention` for batches of at most one query per sequence, with as many rows as sequences.

    When `mixed`, sequences may have any number of queries and rows may be any number: the rows of sequences with one
    query are written, no others. `max_len` bounds seq_lens (0: what the block table can hold). `num_splits`,
    `workspace` and `tiles` are chosen here unless given. pdl starts the kernels while the ones in front end (37.1 us
    against 38.3 for one sequence of 64k keys of 64); None: where the device can.
    """
    (rows, num_heads, dim), (_, page_size, kv_heads, v_dim), batch = q.shape, v_pages.shape, seq_lens.shape[0]
    assert mixed or (max_q <= 1 and rows == batch), (max_q, rows, batch)
    out = q.new_empty(rows, num_heads, v_dim) if out is None else out
    if batch == 0:
        return out
    given, tiles = tiles, tiles or decode_tiles(num_heads // kv_heads, dim, v_dim, q.element_size(), scales is not None)
    reach = max_len or block_table.shape[1] * page_size
    reach = min(reach, window + tiles.block_n) if window else reach  # the window may begin inside a tile
    splits = num_splits or decode_splits(batch, kv_heads, reach, sm_count(q.device))
    if splits == 1 and not given and scales is None:
        tiles = replace(tiles, num_stages=2)  # 245 us against 282 for 64 x 4k keys: more programs share an SM
    partial, pdl = splits > 1, has_pdl(q.device) if pdl is None else pdl
    parts = lse = out
    if partial:
        parts, lse = workspace or decode_workspace(batch, num_heads, v_dim, splits, q.device)
        assert lse.numel() >= batch * num_heads * splits, (lse.shape, splits)
        assert parts.numel() >= batch * num_heads * splits * v_dim, (parts.shape, splits)

    pre, cap = score_scales(scale, softcap)
    constants = kernel_constants(q, k_pages, v_pages, out, scales)
    both = {"block_n": tiles.block_n, "has_window": window > 0, "mixed": mixed, "pdl": pdl}
    launch = {"launch_pdl": True} if pdl else {}
    _decode_kernel[(kv_heads, splits, batch)](
        *(parts, lse, q, k_pages, v_pages, scales, block_table, seq_lens, cu_q, alibi_slopes, sinks),
        *(batch, block_table.stride(0), splits, window, pre, cap),
        **constants,
        **both,
        block_m=max(16, triton.next_power_of_2(constants["group"])),
        has_cap=softcap > 0,
        partial=partial,
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
        **launch,
    )
    if partial:
        _combine_kernel[(num_heads, batch)](
            *(out, parts, lse, seq_lens, cu_q, batch, splits, window),
            **{name: constants[name] for name in ("out_row", "out_head", "v_dim", "block_dv")},
            **both,
            chunk=COMBINE_CHUNK,
            **launch,
        )
    return out
