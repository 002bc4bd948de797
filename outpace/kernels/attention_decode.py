"""Decode attention over pages: one query per sequence; the keys of a long sequence are split among programs.

The grid depends on (batch, KV heads, items) alone, so that a CUDA graph can hold the launch while sequences grow. Each
program reads on the device which part of which sequence it computes: see `decode_plan`. The last program of a sequence
to finish merges its parts. In a mixed batch, sequences with more than one query are skipped.
"""
# mypy: disallow-untyped-decorators=False

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from outpace.kernels.attention_tile import LOG2E, LOWEST, Scoring, attend, kernel_constants
from outpace.kernels.decode_merge import (
    COMBINE_CHUNK,
    MERGE_STEPS,
    combine_kernel,
    find_part,
    key_tiles,
    merge_chunk,
    merge_parts,
)
from outpace.kernels.decode_plan import MIN_PART, DecodePlan, DecodePlans
from outpace.kernels.launch_options import has_pdl, pdl_options, sm_count
from outpace.kernels.triton_stub import tl, triton

MIN_SPLIT = 64  # tokens
FOLD = True  # the last program of a sequence merges its parts; False: `combine_kernel` does


@dataclass(frozen=True, slots=True)
class DecodeTiles:
    """How one program of the decode kernel works: keys per step, warps, and steps in flight."""

    block_n: int
    num_warps: int = 4
    num_stages: int = 3


def decode_tiles(group: int, head_dim: int, v_head_dim: int, itemsize: int, quantized: bool = False) -> DecodeTiles:
    """The default tiles: a step holds about 32 KiB of keys and values, so that two or more programs share an SM.

    Quantized keys are converted in registers: for 64 x 1,088 keys of 128 in fp8 on an H200 two warps take 43 us, four
    take 56 at best; bf16 takes 69.
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


@triton.jit(do_not_specialize=["batch", "table_stride", "num_splits", "window"])
def _decode_kernel(
    out_ptr: tl.tensor,  # [T, Hq, Dv]
    part_ptr: tl.tensor,  # [I, Hq, Dv] fp32, for sequences in several parts
    lse_ptr: tl.tensor,  # [I, Hq] fp32
    arrived_ptr: tl.tensor,  # [I, Hkv], or None: `combine_kernel` merges the parts
    plan_ptr: tl.tensor,  # [I, FIELDS], or None: each sequence has num_splits parts, according to
    lens_ptr: tl.tensor,  # [B]
    cu_q_ptr: tl.tensor,  # [B + 1]
    q_ptr: tl.tensor,  # [T, Hq, D]
    k_ptr: tl.tensor,  # [N, page_size, Hkv, D]
    v_ptr: tl.tensor,  # [N, page_size, Hkv, Dv]
    s_ptr: tl.tensor,  # [N, 2, Hkv, page_size] or None
    table_ptr: tl.tensor,  # [B, M]
    slopes_ptr: tl.tensor,  # [Hq] or None
    sinks_ptr: tl.tensor,  # [Hq] or None
    batch: tl.tensor, table_stride: tl.tensor, num_splits: tl.tensor, window: tl.tensor, scale: tl.tensor,
    cap: tl.tensor,
    q_row: tl.constexpr, q_head: tl.constexpr, out_row: tl.constexpr, out_head: tl.constexpr,
    k_page: tl.constexpr, k_row: tl.constexpr, k_head: tl.constexpr, v_page: tl.constexpr,
    v_row: tl.constexpr, v_head: tl.constexpr, s_page: tl.constexpr, s_value: tl.constexpr, dim: tl.constexpr,
    v_dim: tl.constexpr, page_size: tl.constexpr, kv_heads: tl.constexpr, group: tl.constexpr,
    block_m: tl.constexpr, block_n: tl.constexpr, block_d: tl.constexpr, block_dv: tl.constexpr,
    block_g: tl.constexpr, chunk: tl.constexpr, has_window: tl.constexpr, has_cap: tl.constexpr,
    mixed: tl.constexpr, divides: tl.constexpr, pdl: tl.constexpr,
) -> None:  # fmt: skip
    kv_head = tl.program_id(0)
    item = tl.program_id(1)
    if pdl:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    seq, part, parts, row, length, padding = find_part(plan_ptr, lens_ptr, cu_q_ptr, item, batch, num_splits, mixed)
    if seq < 0:
        return
    first, tile_0, tiles = key_tiles(length, window, has_window, block_n)
    begin = 0
    end = tiles
    if divides:
        parts = tl.maximum(tl.minimum(parts, tiles), 1)  # only the first parts have work
        if part >= parts:
            return
        begin = part * tiles // parts
        end = (part + 1) * tiles // parts

    m = tl.arange(0, block_m)
    d = tl.arange(0, block_d)
    dv = tl.arange(0, block_dv)
    heads = kv_head * group + m
    real = m < tl.where(row >= 0, group, 0)
    q_at = row.to(tl.int64) * q_row + heads[:, None] * q_head + d[None, :]
    q = tl.load(q_ptr + q_at, mask=real[:, None] & (d < dim)[None, :], other=0.0)  # [M, D]

    slopes = None
    if slopes_ptr is not None:
        slopes = tl.load(slopes_ptr + heads, mask=real, other=0.0).to(tl.float32) * LOG2E
    m_i = tl.full([block_m], LOWEST, tl.float32)
    l_i = tl.zeros([block_m], tl.float32)
    if sinks_ptr is not None:  # a sink is one more key, seen by the first part, that adds no value
        sinks = tl.load(sinks_ptr + heads, mask=real, other=0.0).to(tl.float32) * LOG2E
        m_i = tl.where(part == 0, sinks, m_i)
        l_i += 1.0  # in the other parts it vanishes next to any real key
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
    out_at = out_ptr + row.to(tl.int64) * out_row + dv[None, :]
    if not divides or parts == 1:
        tl.store(out_at + heads[:, None] * out_head, acc.to(out_ptr.dtype.element_ty), mask=real[:, None] & columns)
    else:
        part_at = item.to(tl.int64) * (kv_heads * group) + heads
        tl.store(lse_ptr + part_at, m_i + tl.log2(l_i), mask=real)
        tl.store(part_ptr + part_at[:, None] * v_dim + dv[None, :], acc, mask=real[:, None] & columns)
        if arrived_ptr is not None:
            first_item = item - part
            counter = arrived_ptr + first_item * kv_heads + kv_head
            tl.debug_barrier()  # one thread publishes what all have stored
            others = tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu")
            tl.debug_barrier()
            if others == parts - 1:
                g = kv_head * group + tl.arange(0, block_g)
                # fmt: off
                found = merge_parts(
                    part_ptr, lse_ptr, first_item, parts, kv_head * group, group, kv_heads * group, v_dim, block_g,
                    chunk, block_dv,
                )
                # fmt: on
                mine = (g < kv_head * group + group)[:, None] & columns
                tl.store(out_at + g[:, None] * out_head, found.to(out_ptr.dtype.element_ty), mask=mine)
                tl.store(counter, 0)  # for the next launch
    if not mixed and (padding >= 0) & (part == 0):  # a row of no sequence
        zeros = tl.zeros([block_m, block_dv], out_ptr.dtype.element_ty)
        zeros_at = out_ptr + padding.to(tl.int64) * out_row + heads[:, None] * out_head + dv[None, :]
        tl.store(zeros_at, zeros, mask=(m < group)[:, None] & columns)


def empty_parts(items: int, num_heads: int, v_dim: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Memory for the attention [I, Hq, Dv] and the log-sum-exps [I, Hq] of parts."""
    return torch.empty(items, num_heads, v_dim, device=device), torch.empty(items, num_heads, device=device)


def paged_attention_decode(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    cu_q: Tensor,
    max_q: int = 1,
    *,
    out: Tensor | None = None,
    scales: Tensor | None = None,
    max_len: int = 0,
    mixed: bool = False,
    num_splits: int = 0,
    tiles: DecodeTiles | None = None,
    plans: DecodePlans | None = None,
    plan: DecodePlan | None = None,
    fold: bool | None = None,
    **scoring: Any,
) -> Tensor:
    """`paged_attention` for batches of at most one query per sequence, with as many rows as sequences.

    `mixed`: sequences may have any number of queries, and there may be any number of rows; only the rows of sequences
    with one query are written. `max_len` bounds seq_lens (0: what the block table can hold). `plan` divides the keys
    among programs; None: it comes from `plans`, which belong to this batch, or is made here. `num_splits` instead cuts
    every sequence into this many parts. `tiles` and `fold` (whether the last program of a sequence merges its parts)
    are chosen here unless given. Each kernel starts before the previous one ends if the device can (37.1 us against
    38.3 for one sequence of 64k keys of 64).
    """
    (rows, num_heads, dim), (_, page_size, kv_heads, v_dim), batch = q.shape, v_pages.shape, seq_lens.shape[0]
    assert mixed or (max_q <= 1 and rows == batch), (max_q, rows, batch)
    out = q.new_empty(rows, num_heads, v_dim) if out is None else out
    if batch == 0:
        return out
    how, group, sms = Scoring(**scoring), num_heads // kv_heads, sm_count(q.device)
    given, tiles = tiles, tiles or decode_tiles(group, dim, v_dim, q.element_size(), scales is not None)
    reach = max_len or block_table.shape[1] * page_size
    reach = min(reach, how.window) if how.window else reach
    many = decode_splits(batch, kv_heads, reach, sms) == 1
    if many and not given and scales is None:
        tiles = replace(tiles, num_stages=2)  # 245 us against 282 for 64 x 4k keys: more programs share an SM
    chunk = merge_chunk(group, v_dim, tiles.num_warps, -(-2 * sms // kv_heads) if many else 0)
    mergeable = chunk * MERGE_STEPS * kv_heads >= sms  # otherwise too few parts could be merged to fill the device
    fold = (FOLD and mergeable) if fold is None else fold
    most = min(-(-reach // MIN_PART), chunk * MERGE_STEPS if fold else reach)
    if plan is None and num_splits == 0 and most > 1:
        plans = DecodePlans() if plans is None else plans
        plan = plans.get(seq_lens, cu_q, kv_heads, most=most, window=how.window, mixed=mixed)
    splits = max(1, num_splits)
    items, divides = (batch * splits, splits > 1) if plan is None else (plan.items.shape[0], plan.most > 1)
    parts = lse = arrived = None
    if divides:
        parts, lse = empty_parts(items, num_heads, v_dim, q.device)
    if divides and fold:
        arrived = seq_lens.new_zeros(items, kv_heads) if plan is None else plan.arrived

    constants = kernel_constants(q, k_pages, v_pages, out, scales)
    where = (None, seq_lens, cu_q) if plan is None else (plan.items, None, None)
    static = mixed and plan is None  # with a plan, one compiled kernel serves mixed batches too
    both: dict[str, Any] = {"block_n": tiles.block_n, "has_window": how.window > 0, "mixed": static}
    both |= pdl_options(has_pdl(q.device))
    _decode_kernel[(kv_heads, items)](
        *(out, parts, lse, arrived, *where, q, k_pages, v_pages, scales, block_table, how.alibi_slopes, how.sinks),
        *(batch, block_table.stride(0), splits, how.window, *how.in_log2),
        **constants,
        **both,
        kv_heads=kv_heads,
        block_m=max(16, triton.next_power_of_2(group)),
        block_g=triton.next_power_of_2(group),
        chunk=chunk,
        has_cap=how.softcap > 0,
        divides=divides,
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
    )
    if divides and not fold:
        combine_kernel[(num_heads, items // splits)](
            *(out, parts, lse, *where, batch, splits, how.window),
            **{name: constants[name] for name in ("out_row", "out_head", "v_dim", "block_dv")},
            **both,
            num_heads=num_heads,
            chunk=COMBINE_CHUNK,
        )
    return out
