"""Merges the parts of decode attention: in the last program of a sequence, or in a separate kernel."""
# mypy: disallow-untyped-decorators=False

from outpace.kernels.attention_tile import LOWEST
from outpace.kernels.decode_plan import FIELDS
from outpace.kernels.triton_stub import tl, triton

COMBINE_CHUNK = 16  # parts that a program of `combine_kernel` merges at a time
MERGE_STEPS = 10  # most steps of a merge in the last program of a sequence: each is a trip to the L2 cache
MERGE_NUMBERS = 2048  # numbers that a warp reads in one step: 64 registers
ITEM = tl.constexpr(FIELDS)


def merge_chunk(group: int, v_dim: int, num_warps: int, parts: int = 0) -> int:
    """How many parts the last program of a sequence merges at a time.

    `parts`: no more than this many parts need, in half of the registers, so that no fewer programs share an SM.
    """
    rows, columns = triton.next_power_of_2(group), max(16, triton.next_power_of_2(v_dim))
    held = num_warps * MERGE_NUMBERS // (rows * columns)
    if held <= 4:  # the sums themselves take many registers
        held //= 2
    if parts:
        held = min(held // 2, triton.next_power_of_2(-(-parts // MERGE_STEPS)))
    return max(1, min(32, held))


@triton.jit
def find_part(
    plan_ptr: tl.tensor, lens_ptr: tl.tensor, cu_q_ptr: tl.tensor, item: tl.tensor, batch: tl.tensor,
    num_splits: tl.tensor,
    mixed: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """The fields of an item (see `DecodePlan.items`): from the plan, or with `num_splits` parts for each sequence."""
    if plan_ptr is not None:
        at = plan_ptr + item * ITEM
        seq = tl.load(at)
        part = tl.load(at + 1)
        parts = tl.load(at + 2)
        row = tl.load(at + 3)
        length = tl.load(at + 4)
        padding = tl.load(at + 5)
    else:
        seq = item // num_splits
        part = item % num_splits
        parts = num_splits
        start = tl.load(cu_q_ptr + seq)
        single = tl.load(cu_q_ptr + seq + 1) == start + 1
        row = tl.where(single, start, -1)
        length = tl.where(single, tl.load(lens_ptr + seq), 0)
        padding = seq * 0 - 1
        if not mixed:
            padding = tl.where(seq >= tl.load(cu_q_ptr + batch), seq, -1)
        seq = tl.where(single | (padding >= 0), seq, -1)
    return seq, part, parts, row, length, padding


@triton.jit
def key_tiles(length: tl.tensor, window: tl.tensor, has_window: tl.constexpr, block_n: tl.constexpr) -> tl.tensor:
    """First visible key, the tile it is in, and the number of tiles from there to the end."""
    first = tl.maximum(length - window, 0) if has_window else length * 0
    return first, first // block_n, tl.cdiv(length, block_n) - first // block_n


@triton.jit
def merge_parts(
    part_ptr: tl.tensor,  # [I, Hq, Dv]
    lse_ptr: tl.tensor,  # [I, Hq]
    item: tl.tensor,  # the first item of the sequence
    parts: tl.tensor,
    head: tl.tensor,  # the first head
    count: tl.constexpr,  # of heads
    num_heads: tl.constexpr, v_dim: tl.constexpr, rows: tl.constexpr, chunk: tl.constexpr,
    block_dv: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """The attention of some heads, [rows, Dv], merged from its parts, always in the same order.

    Maxima and sums of a row are kept for each of its columns, so that no step waits for another thread.
    """
    p = tl.arange(0, chunk)
    g = tl.arange(0, rows)
    dv = tl.arange(0, block_dv)
    m_i = tl.full([rows, block_dv], LOWEST, tl.float32)
    l_i = tl.zeros([rows, block_dv], tl.float32)
    acc = tl.zeros([rows, block_dv], tl.float32)
    for start in range(0, parts, chunk):
        at = (item + start + p).to(tl.int64)[None, :] * num_heads + (head + g)[:, None]
        real = (start + p < parts)[None, :] & (g < count)[:, None]
        # Other programs wrote these numbers while this one ran: L1 may be stale.
        lse = tl.load(lse_ptr + at, mask=real, other=float("-inf"), cache_modifier=".cg")
        found = tl.load(
            part_ptr + at[:, :, None] * v_dim + dv[None, None, :],
            mask=real[:, :, None] & (dv < v_dim)[None, None, :],
            other=0.0,
            cache_modifier=".cg",
        )  # [rows, chunk, Dv]
        largest = tl.maximum(tl.max(lse, 1), LOWEST)
        weight = tl.exp2(lse - largest[:, None])
        m_new = tl.maximum(m_i, largest[:, None])
        alpha = tl.exp2(m_i - m_new)
        beta = tl.exp2(largest[:, None] - m_new)
        l_i = l_i * alpha + tl.sum(weight, 1)[:, None] * beta
        acc = acc * alpha + tl.sum(weight[:, :, None] * found, 1) * beta
        m_i = m_new
    return acc / tl.where(l_i > 0.0, l_i, 1.0)


@triton.jit(do_not_specialize=["batch", "num_splits", "window"])
def combine_kernel(
    out_ptr: tl.tensor,  # [T, Hq, Dv]
    part_ptr: tl.tensor,  # [I, Hq, Dv]
    lse_ptr: tl.tensor,  # [I, Hq]
    plan_ptr: tl.tensor,  # [I, FIELDS] or None
    lens_ptr: tl.tensor, cu_q_ptr: tl.tensor, batch: tl.tensor,
    num_splits: tl.tensor,  # with a plan: 1
    window: tl.tensor,
    out_row: tl.constexpr, out_head: tl.constexpr, v_dim: tl.constexpr, num_heads: tl.constexpr,
    block_n: tl.constexpr, block_dv: tl.constexpr, chunk: tl.constexpr, has_window: tl.constexpr,
    mixed: tl.constexpr, pdl: tl.constexpr,
) -> None:  # fmt: skip
    head = tl.program_id(0)
    item = tl.program_id(1) * num_splits
    if pdl:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    seq, part, parts, row, length, _ = find_part(plan_ptr, lens_ptr, cu_q_ptr, item, batch, num_splits, mixed)
    _, _, tiles = key_tiles(length, window, has_window, block_n)
    parts = tl.minimum(parts, tiles)
    if (seq < 0) | (part > 0) | (parts <= 1):
        return  # sequences of one part are done
    # fmt: off
    found = merge_parts(
        part_ptr, lse_ptr, item, parts, head, 1, num_heads, v_dim, 1, chunk, block_dv,
    )
    # fmt: on
    dv = tl.arange(0, block_dv)
    out_ptr += row.to(tl.int64) * out_row + head * out_head + dv[None, :]
    tl.store(out_ptr, found.to(out_ptr.dtype.element_ty), mask=(dv < v_dim)[None, :])
