"""Decode attention over pages: one query per sequence, the keys of a sequence split over programs, then combined.

The grid depends on (batch, KV heads, splits) alone and each program reads its sequence's length on the device, so a CUDA
graph can hold the launch while sequences grow. Scores are kept in units of log2, so that `exp2` needs no multiplication.
"""
# ruff: noqa: N803

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from outpace.kernels.triton_stub import tl, triton

LOG2E = tl.constexpr(1.4426950408889634)
LOWEST = tl.constexpr(-1.0e30)  # finite, so that a row that has seen no key yet never computes inf - inf
COMBINE_CHUNK = 16  # splits combined at a time: constant, so that the order of additions never depends on the batch
MIN_SPLIT = 64  # tokens: a shorter split costs more to combine than it saves


@dataclass(frozen=True, slots=True)
class DecodeTiles:
    """How one program of the decode kernel is cut: keys per step, warps, and steps in flight."""

    block_n: int
    num_warps: int = 4
    num_stages: int = 3


def decode_tiles(head_dim: int, v_head_dim: int, itemsize: int) -> DecodeTiles:
    """The default tiles: a step holds about 32 KiB of keys and values, so that two or more programs share an SM."""
    row_bytes = itemsize * (triton.next_power_of_2(head_dim) + triton.next_power_of_2(v_head_dim))
    return DecodeTiles(block_n=max(16, min(128, 32768 // row_bytes)))


def decode_splits(batch: int, num_kv_heads: int, max_len: int, num_sms: int) -> int:
    """How many programs share one (sequence, KV head): enough for two waves of two programs per SM, else 1."""
    wanted = 4 * num_sms // max(1, batch * num_kv_heads)
    return max(1, min(wanted, -(-max_len // MIN_SPLIT)))


@cache
def num_sms(device: torch.device) -> int:
    """The number of SMs of a device; 1 where there are none (Triton's interpreter)."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


@triton.jit
def shape_scores(s: Any, distance: Any, slopes: Any, scale: Any, cap: Any, ALIBI: tl.constexpr, SOFTCAP: tl.constexpr) -> Any:
    """Raw q·k to log2 units: scale, cap, bias. With a cap c, `scale` is 2·log2e·scale/c and `cap` is c·log2e."""
    s = s * scale
    if SOFTCAP:
        s = cap - 2.0 * cap / (1.0 + tl.exp2(s))  # c * tanh(x) = c - 2c / (1 + exp(2x))
    if ALIBI:
        s += slopes[:, None] * distance
    return s


def score_scales(scale: float, softcap: float) -> tuple[float, float]:
    """The two numbers `shape_scores` takes, from the natural scale and cap."""
    log2e = LOG2E.value
    return (2.0 * log2e * scale / softcap, log2e * softcap) if softcap > 0 else (log2e * scale, 0.0)


@triton.jit
def _key_tiles(length: Any, window: Any, WINDOW: tl.constexpr, BLOCK_N: tl.constexpr) -> Any:
    """First visible key, the tile it is in, and the number of tiles up to `length`."""
    first = tl.maximum(length - window, 0) if WINDOW else length * 0
    tile_0 = first // BLOCK_N
    return first, tile_0, tl.cdiv(length, BLOCK_N) - tile_0


@triton.jit
def _num_parts(tiles: Any, num_splits: Any, FIXED_TILES: tl.constexpr) -> Any:
    """How many splits of a sequence have work; they are the first ones."""
    return tl.minimum(tl.cdiv(tiles, FIXED_TILES) if FIXED_TILES else tiles, num_splits)


@triton.jit
def _decode_kernel(
    out_ptr: Any,  # [T, Hq, Dv]; with PARTIAL: fp32 [B, Hq, S, Dv]
    lse_ptr: Any,  # with PARTIAL: fp32 [B, Hq, S]
    q_ptr: Any,  # [T, Hq, D]
    k_ptr: Any,  # [N, PAGE, Hkv, D]
    v_ptr: Any,  # [N, PAGE, Hkv, Dv]
    table_ptr: Any,  # [B, M]
    lens_ptr: Any,  # [B]
    cu_q_ptr: Any,  # [B + 1]
    slopes_ptr: Any,  # [Hq]
    sinks_ptr: Any,  # [Hq]
    batch: Any,
    table_stride: Any,
    num_splits: Any,
    window: Any,
    scale: Any,
    cap: Any,
    Q_ROW: tl.constexpr,
    Q_HEAD: tl.constexpr,
    OUT_ROW: tl.constexpr,
    OUT_HEAD: tl.constexpr,
    K_PAGE: tl.constexpr,
    K_ROW: tl.constexpr,
    K_HEAD: tl.constexpr,
    V_PAGE: tl.constexpr,
    V_ROW: tl.constexpr,
    V_HEAD: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    PAGE: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    FIXED_TILES: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    ALIBI: tl.constexpr,
    SINKS: tl.constexpr,
    PARTIAL: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    kv_head = tl.program_id(0)
    split = tl.program_id(1)
    seq = tl.program_id(2)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.load(cu_q_ptr + seq)
    has_query = tl.load(cu_q_ptr + seq + 1) > row
    length = tl.where(has_query, tl.load(lens_ptr + seq), 0)
    first, tile_0, tiles = _key_tiles(length, window, WINDOW, BLOCK_N)

    parts = _num_parts(tiles, num_splits, FIXED_TILES)
    if PARTIAL and split >= parts:
        return  # the combine kernel knows not to read this split
    if FIXED_TILES:
        begin = tile_0 + split * FIXED_TILES
        end = tl.minimum(begin + FIXED_TILES, tile_0 + tiles)
    else:
        begin = tile_0 + split * tiles // tl.maximum(parts, 1)
        end = tile_0 + (split + 1) * tiles // tl.maximum(parts, 1)

    m = tl.arange(0, BLOCK_M)
    d = tl.arange(0, BLOCK_D)
    dv = tl.arange(0, BLOCK_DV)
    heads = kv_head * GROUP + m
    real = (m < GROUP) & has_query
    q_at = row.to(tl.int64) * Q_ROW + heads[:, None] * Q_HEAD + d[None, :]
    q = tl.load(q_ptr + q_at, mask=real[:, None] & (d < D)[None, :], other=0.0)  # [BLOCK_M, BLOCK_D]

    slopes = tl.load(slopes_ptr + heads, mask=real, other=0.0).to(tl.float32) * LOG2E if ALIBI else 0.0
    m_i = tl.full([BLOCK_M], LOWEST, tl.float32)
    l_i = tl.zeros([BLOCK_M], tl.float32)
    if SINKS and split == 0:  # the sink is one more key, seen by the first split, that adds no value
        m_i = tl.load(sinks_ptr + heads, mask=real, other=0.0).to(tl.float32) * LOG2E
        l_i += 1.0
    acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)

    table_ptr += seq.to(tl.int64) * table_stride
    k_ptr += kv_head * K_HEAD
    v_ptr += kv_head * V_HEAD
    n = begin * BLOCK_N + tl.arange(0, BLOCK_N)  # key positions
    seen = (n >= first) & (n < length)
    page = tl.load(table_ptr + n // PAGE, mask=seen, other=0).to(tl.int64)
    for _ in range(begin, end):
        k_at = page * K_PAGE + n % PAGE * K_ROW
        v_at = page * V_PAGE + n % PAGE * V_ROW
        k = tl.load(k_ptr + k_at[:, None] + d[None, :], mask=seen[:, None] & (d < D)[None, :], other=0.0)
        v = tl.load(v_ptr + v_at[:, None] + dv[None, :], mask=seen[:, None] & (dv < DV)[None, :], other=0.0)
        s = tl.dot(q, tl.trans(k), input_precision="ieee")  # [BLOCK_M, BLOCK_N]
        s = shape_scores(s, (n - length + 1)[None, :], slopes, scale, cap, ALIBI, SOFTCAP)
        s = tl.where(seen[None, :], s, float("-inf"))
        m_new = tl.maximum(m_i, tl.max(s, 1))
        p = tl.exp2(s - m_new[:, None])
        alpha = tl.exp2(m_i - m_new)
        l_i = l_i * alpha + tl.sum(p, 1)
        acc = tl.dot(p.to(v.dtype), v, acc * alpha[:, None], input_precision="ieee")
        m_i = m_new
        n += BLOCK_N
        seen = (n >= first) & (n < length)
        page = tl.load(table_ptr + n // PAGE, mask=seen, other=0).to(tl.int64)  # a step ahead of its use

    acc = acc / tl.where(l_i > 0.0, l_i, 1.0)[:, None]
    keep = real[:, None] & (dv < DV)[None, :]
    if PARTIAL:
        at = (seq.to(tl.int64) * tl.num_programs(0) * GROUP + heads) * num_splits + split
        tl.store(lse_ptr + at, m_i + tl.log2(l_i), mask=real)
        tl.store(out_ptr + at[:, None] * DV + dv[None, :], acc, mask=keep)
    else:
        out_at = heads[:, None] * OUT_HEAD + dv[None, :]
        tl.store(out_ptr + row.to(tl.int64) * OUT_ROW + out_at, acc.to(out_ptr.dtype.element_ty), mask=keep)
        if seq >= tl.load(cu_q_ptr + batch):  # a row of no sequence (padding)
            zero = tl.zeros([BLOCK_M, BLOCK_DV], out_ptr.dtype.element_ty)
            no_row = (m < GROUP)[:, None] & (dv < DV)[None, :]
            tl.store(out_ptr + seq.to(tl.int64) * OUT_ROW + out_at, zero, mask=no_row)


@triton.jit
def _combine_kernel(
    out_ptr: Any,  # [T, Hq, Dv]
    part_ptr: Any,  # [B, Hq, S, Dv]
    lse_ptr: Any,  # [B, Hq, S]
    lens_ptr: Any,
    cu_q_ptr: Any,
    batch: Any,
    num_splits: Any,
    window: Any,
    OUT_ROW: tl.constexpr,
    OUT_HEAD: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    CHUNK: tl.constexpr,
    FIXED_TILES: tl.constexpr,
    WINDOW: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    head = tl.program_id(0)
    seq = tl.program_id(1)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.load(cu_q_ptr + seq)
    has_query = tl.load(cu_q_ptr + seq + 1) > row
    length = tl.where(has_query, tl.load(lens_ptr + seq), 0)
    _, _, tiles = _key_tiles(length, window, WINDOW, BLOCK_N)
    parts = _num_parts(tiles, num_splits, FIXED_TILES)

    dv = tl.arange(0, BLOCK_DV)
    base = (seq.to(tl.int64) * tl.num_programs(0) + head) * num_splits
    m_i = tl.full([1], LOWEST, tl.float32)
    l_i = tl.zeros([1], tl.float32)
    acc = tl.zeros([BLOCK_DV], tl.float32)
    for start in range(0, parts, CHUNK):
        s = start + tl.arange(0, CHUNK)
        live = s < parts
        lse = tl.load(lse_ptr + base + s, mask=live, other=float("-inf"))
        at = (base + s)[:, None] * DV + dv[None, :]
        part = tl.load(part_ptr + at, mask=live[:, None] & (dv < DV)[None, :], other=0.0)
        m_new = tl.maximum(m_i, tl.max(lse, 0))
        weight = tl.exp2(lse - m_new)
        alpha = tl.exp2(m_i - m_new)
        acc = acc * alpha + tl.sum(weight[:, None] * part, 0)
        l_i = l_i * alpha + tl.sum(weight, 0)
        m_i = m_new
    out = (acc / tl.where(l_i > 0.0, l_i, 1.0)).to(out_ptr.dtype.element_ty)
    out_ptr += head * OUT_HEAD
    tl.store(out_ptr + row.to(tl.int64) * OUT_ROW + dv, out, mask=(dv < DV) & has_query)
    if seq >= tl.load(cu_q_ptr + batch):  # a row of no sequence (padding)
        tl.store(out_ptr + seq.to(tl.int64) * OUT_ROW + dv, tl.zeros_like(out), mask=dv < DV)


def decode_workspace(batch: int, num_heads: int, v_head_dim: int, splits: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Partial outputs [B, Hq, S, Dv] and their log-sum-exps [B, Hq, S], for as many splits as any launch will use."""
    parts = torch.empty(batch, num_heads, splits, v_head_dim, device=device, dtype=torch.float32)
    return parts, torch.empty(batch, num_heads, splits, device=device, dtype=torch.float32)


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
    max_len: int = 0,
    num_splits: int = 0,
    fixed_split: int = 0,
    workspace: tuple[Tensor, Tensor] | None = None,
    tiles: DecodeTiles | None = None,
    pdl: bool = False,
) -> Tensor:
    """`paged_attention` for batches of at most one query per sequence, with as many rows as sequences.

    `max_len` bounds seq_lens (0: what the block table can hold). `fixed_split` tokens per split make the result of a
    sequence independent of its batch, bit for bit. `num_splits`, `workspace` and `tiles` are chosen here unless given.
    """
    (rows, num_heads, dim), (_, page, kv_heads, v_dim), batch = q.shape, v_pages.shape, seq_lens.shape[0]
    assert max_q == 1, max_q
    assert rows == batch, (rows, batch)
    out = q.new_empty(rows, num_heads, v_dim) if out is None else out
    if batch == 0:
        return out
    tiles = tiles or decode_tiles(dim, v_dim, q.element_size())
    reach = min(max_len or block_table.shape[1] * page, window + 2 * tiles.block_n if window else 1 << 30)
    if fixed_split:
        assert fixed_split % tiles.block_n == 0, (fixed_split, tiles.block_n)
        num_splits = -(-reach // fixed_split)
    splits = num_splits or decode_splits(batch, kv_heads, reach, num_sms(q.device))
    partial = splits > 1 or fixed_split > 0
    parts, lse = out, out
    if partial:
        parts, lse = workspace or decode_workspace(batch, num_heads, v_dim, splits, q.device)
        assert lse.numel() >= batch * num_heads * splits, (lse.shape, splits)
        assert parts.numel() >= batch * num_heads * splits * v_dim, (parts.shape, splits)

    group = num_heads // kv_heads
    pre, cap = score_scales(scale, softcap)
    shared = dict(
        DV=v_dim,
        BLOCK_N=tiles.block_n,
        BLOCK_DV=triton.next_power_of_2(v_dim),
        FIXED_TILES=fixed_split // tiles.block_n,
        WINDOW=window > 0,
        OUT_ROW=out.stride(0),
        OUT_HEAD=out.stride(1),
        PDL=pdl,
    )
    launch = {"launch_pdl": True} if pdl else {}
    _decode_kernel[(kv_heads, splits, batch)](
        *(parts, lse, q, k_pages, v_pages, block_table, seq_lens, cu_q),
        *(q if alibi_slopes is None else alibi_slopes, q if sinks is None else sinks),
        *(batch, block_table.stride(0), splits, window, pre, cap),
        *(q.stride(0), q.stride(1)),
        K_PAGE=k_pages.stride(0),
    )
    return out
