"""Divides the keys of a decode batch among programs: a plan, made on the device from the lengths of the sequences.

A launch of the decode kernel has a fixed number of items. A plan assigns a part of a sequence to each item: a long
sequence gets several items, a short one gets one, and items that are left over do nothing. A kernel makes the plan,
once for all layers of a step with the same KV heads and window, so a CUDA graph makes a new plan in every replay.
"""
# mypy: disallow-untyped-decorators=False

from dataclasses import dataclass

from torch import Tensor

from outpace.kernels.launch_options import has_pdl, pdl_options, sm_count
from outpace.kernels.triton_stub import tl, triton

FEW_PROGRAMS = 2  # per SM, for batches that do not fill the device unless keys are split
MANY_PROGRAMS = 4  # per SM, for those that do: parts small enough to end together with the short sequences
MIN_PART = 128  # keys
WHOLE = 512  # keys: up to here one program is faster than several and a merge, about 5 us against 8 on an H200
FIELDS = 8  # of an item: sequence, part, parts, row of the query, keys, row of padding; two are unused
NO_WINDOW = 2**31 - 1
BLOCK_SEQS = 256  # at least; fewer sequences do not compile another kernel
BLOCK = 4096  # items times sequences that a program of the planner looks at


def part_budget(batch: int, num_kv_heads: int, num_sms: int) -> int:
    """The number of parts that the keys of all sequences are cut into, if they could be cut anywhere."""
    programs = FEW_PROGRAMS if batch * num_kv_heads < FEW_PROGRAMS * num_sms else MANY_PROGRAMS
    return max(1, programs * num_sms // num_kv_heads)


def item_bound(batch: int, budget: int, most: int) -> int:
    """The most items that a plan can have if no sequence has more parts than `most`.

    A sequence with a share s of all keys has max(1, floor(s * budget)) parts: together at most budget - 1 extra ones.
    """
    return batch + min(budget - 1, batch * (most - 1))


@dataclass(frozen=True, slots=True)
class DecodePlan:
    """The work of each program. Only launches of one stream may use it, one after the other."""

    items: Tensor
    """[I, FIELDS] int32: sequence (-1: nothing to do), part, parts, row of the query (-1: none), keys, row that is
    padding (-1: none). The parts of a sequence are next to each other; sequences of several parts come first."""
    arrived: Tensor
    """[I, Hkv] int32: how many parts of a sequence are done, at its first item. Zeros between launches."""
    most: int
    """The most parts of a sequence."""


class DecodePlans:
    """The plans of one batch in one forward, each made when a layer first needs it.

    They live no longer than the forward, so that a graph holds the kernels that make its own plans.
    """

    def __init__(self) -> None:
        self._made: dict[tuple[object, ...], DecodePlan] = {}

    def get(
        self, seq_lens: Tensor, cu_q: Tensor, num_kv_heads: int, *, most: int, window: int, mixed: bool
    ) -> DecodePlan:
        """The plan of this batch for layers with this number of KV heads and this window."""
        key = num_kv_heads, most, window, mixed
        if key not in self._made:
            self._made[key] = make_plan(seq_lens, cu_q, num_kv_heads, most=most, window=window, mixed=mixed)
        return self._made[key]


@triton.jit
def _chosen(mine: tl.tensor, values: tl.tensor) -> tl.tensor:
    """The value of the column that is mine; 0: none is. mine: [I, B], values: [B]."""
    return tl.sum(tl.where(mine, values[None, :], 0), 1)


@triton.jit(
    do_not_specialize=["batch", "num_items", "budget", "min_part", "whole", "most", "window"],
    do_not_specialize_on_alignment=["lens_ptr", "cu_q_ptr"],
)
def _plan_kernel(
    items_ptr: tl.tensor,  # [I, FIELDS]
    arrived_ptr: tl.tensor,  # [I, Hkv]
    lens_ptr: tl.tensor,  # [B]
    cu_q_ptr: tl.tensor,  # [B + 1]
    batch: tl.tensor, num_items: tl.tensor, budget: tl.tensor, min_part: tl.tensor, whole: tl.tensor,
    most: tl.tensor, window: tl.tensor,
    kv_heads: tl.constexpr, fields: tl.constexpr, block_b: tl.constexpr, block_i: tl.constexpr,
    block_z: tl.constexpr, mixed: tl.constexpr, pdl: tl.constexpr,
) -> None:  # fmt: skip
    if pdl:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    s = tl.arange(0, block_b)
    here = s < batch
    row = tl.load(cu_q_ptr + s, mask=here, other=0)
    single = here & (tl.load(cu_q_ptr + s + 1, mask=here, other=0) == row + 1)
    length = tl.where(single, tl.load(lens_ptr + s, mask=here, other=0), 0)
    seen = tl.minimum(length, window).to(tl.int64)
    wanted = (seen * budget // tl.maximum(tl.sum(seen, 0), 1)).to(tl.int32)
    possible = tl.minimum(tl.cdiv(seen, min_part).to(tl.int32), most)
    possible = tl.where(seen > whole, possible, 1)
    parts = tl.maximum(tl.minimum(wanted, possible), 1)
    padding = s < 0
    if not mixed:
        padding = here & (s >= tl.load(cu_q_ptr + batch))
    parts = tl.where(single | padding, parts, 0)
    long = tl.where(parts > 1, parts, 0)  # these come first, so that the device ends with short ones
    after_long = tl.sum(long, 0) + tl.cumsum(parts - long, 0)
    start = tl.where(parts > 1, tl.cumsum(long, 0), after_long) - parts

    item = tl.program_id(0) * block_i + tl.arange(0, block_i)
    mine = (start[None, :] <= item[:, None]) & (item[:, None] < (start + parts)[None, :])  # [I, B]
    at = items_ptr + item * fields
    real = item < num_items
    tl.store(at, _chosen(mine, s + 1) - 1, mask=real)
    tl.store(at + 1, item - _chosen(mine, start), mask=real)
    tl.store(at + 2, _chosen(mine, parts), mask=real)
    tl.store(at + 3, _chosen(mine, tl.where(single, row, -1)), mask=real)
    tl.store(at + 4, _chosen(mine, length), mask=real)
    tl.store(at + 5, _chosen(mine, tl.where(padding, s, -1)), mask=real)
    zero = tl.program_id(0) * block_i * kv_heads + tl.arange(0, block_z)
    end = tl.minimum((tl.program_id(0) + 1) * block_i, num_items) * kv_heads
    tl.store(arrived_ptr + zero, tl.zeros([block_z], tl.int32), mask=zero < end)


def make_plan(
    seq_lens: Tensor,
    cu_q: Tensor,
    num_kv_heads: int,
    *,
    most: int,
    window: int = 0,
    mixed: bool = False,
    budget: int = 0,
    min_part: int = MIN_PART,
    whole: int = WHOLE,
) -> DecodePlan:
    """Plan a batch. A sequence gets at most `most` parts, and at most one for every `min_part` keys that it sees; one
    part if it sees up to `whole` keys.

    `mixed`: only sequences of one query get items; otherwise padding rows get items too.
    """
    batch, device = seq_lens.shape[0], seq_lens.device
    budget = budget or part_budget(batch, num_kv_heads, sm_count(device))
    count = item_bound(batch, budget, most)
    made = DecodePlan(seq_lens.new_empty(count, FIELDS), seq_lens.new_empty(count, num_kv_heads), most)
    block_b, pdl = max(BLOCK_SEQS, triton.next_power_of_2(batch)), has_pdl(device)
    block_i = max(1, BLOCK // block_b)
    _plan_kernel[(triton.cdiv(count, block_i),)](
        *(made.items, made.arrived, seq_lens, cu_q, batch, count, budget, min_part, whole, most, window or NO_WINDOW),
        kv_heads=num_kv_heads,
        fields=FIELDS,
        block_b=block_b,
        block_i=block_i,
        block_z=triton.next_power_of_2(block_i * num_kv_heads),
        mixed=mixed,
        **pdl_options(pdl),
    )
    return made
