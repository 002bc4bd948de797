"""Sorts pairs of a token and an expert by expert, on the device: the rows of each tile of a product.

`count` counts the pairs of each expert, unless they are so few that `place` counts them itself; `place` lists the pairs
by expert, those of one expert in their order, so that the result is always the same.
"""
# mypy: disallow-untyped-decorators=False

import torch
from torch import Tensor

from outpace.kernels.launch_options import pdl_options
from outpace.kernels.triton_stub import tl, triton

PLACE_BLOCKS = (256, 1024, 4096)  # pairs that a program looks at together; few sizes, since each is compiled


@triton.jit(do_not_specialize=["pairs"])
def _count_kernel(
    chosen_ptr: tl.tensor,  # int32 [pairs]
    counts_ptr: tl.tensor,  # int32 [E]
    pairs: tl.tensor,
    pdl: tl.constexpr,
    block: tl.constexpr,
) -> None:
    if pdl:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    expert = tl.program_id(0)
    lane = tl.arange(0, block)
    found = tl.zeros([block], tl.int32)
    for start in range(0, pairs, block):
        ids = tl.load(chosen_ptr + start + lane, mask=start + lane < pairs, other=-1)
        found += (ids == expert).to(tl.int32)
    tl.store(counts_ptr + expert, tl.sum(found, axis=0))


@triton.jit(do_not_specialize=["pairs", "tiles"])
def _place_kernel(
    chosen_ptr: tl.tensor,  # int32 [pairs]
    counts_ptr: tl.tensor,  # int32 [E]; None: all pairs fit in one block, and every program counts them
    order_ptr: tl.tensor,  # int32 [pairs]: pairs by expert
    tiles_ptr: tl.tensor,  # int32 [3, tiles]: expert (-1: none), first place in `order`, end of the expert's places
    pairs: tl.tensor, tiles: tl.tensor,
    experts: tl.constexpr, pdl: tl.constexpr, block_m: tl.constexpr, block_e: tl.constexpr,
    block: tl.constexpr,
) -> None:  # fmt: skip
    if pdl:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    expert = tl.program_id(0)
    lane = tl.arange(0, block)
    e = tl.arange(0, block_e)
    if counts_ptr is None:
        ids = tl.load(chosen_ptr + lane, mask=lane < pairs, other=-1)
        real = (ids >= 0) & (ids < experts)
        stray = block - tl.sum(real.to(tl.int32), axis=0)  # counted for the first expert, then subtracted
        counts = tl.histogram(tl.where(real, ids, 0), block_e) - tl.where(e == 0, stray, 0)
    else:
        counts = tl.load(counts_ptr + e, mask=e < experts, other=0)
    first = tl.sum(tl.where(e < expert, counts, 0), axis=0)
    tile = tl.sum(tl.where(e < expert, (counts + block_m - 1) // block_m, 0), axis=0)
    if expert == experts:  # one more program marks the tiles without rows
        for start in range(tile, tiles, block):
            tl.store(tiles_ptr + start + lane, -1, mask=start + lane < tiles)
    else:
        count = tl.sum(tl.where(e == expert, counts, 0), axis=0)
        own = (count + block_m - 1) // block_m
        for start in range(0, own, block):
            mask = start + lane < own
            ptrs = tiles_ptr + tile + start + lane
            tl.store(ptrs, expert, mask=mask)
            tl.store(ptrs + tiles, first + (start + lane) * block_m, mask=mask)
            tl.store(ptrs + 2 * tiles, first + count, mask=mask)
        if count > 0:
            place = first
            for start in range(0, pairs, block):
                ids = tl.load(chosen_ptr + start + lane, mask=start + lane < pairs, other=-1)
                here = (ids == expert).to(tl.int32)
                tl.store(order_ptr + place + tl.cumsum(here, axis=0) - 1, start + lane, mask=here != 0)
                place += tl.sum(here, axis=0)


def max_tiles(pairs: int, experts: int, block_m: int) -> int:
    """Tiles of `block_m` rows that `pairs` pairs can need: each expert that has any wastes less than one."""
    return (pairs + min(pairs, experts) * (block_m - 1)) // block_m


def sort_pairs(chosen: Tensor, experts: int, block_m: int, *, pdl: bool = False) -> tuple[Tensor, Tensor]:
    """The pairs of chosen [T, K] by expert, each expert's in their order, and the tiles of `block_m` of them.

    int32 [T * K], whose end is not written if there are pairs without an expert, and int32 [3, tiles]: the expert of
    each tile (-1: no rows), its first place in the list, and the place where its expert ends.
    """
    pairs = chosen.numel()
    tiles = max_tiles(pairs, experts, block_m)
    order = torch.empty(pairs, dtype=torch.int32, device=chosen.device)
    places = torch.empty((3, tiles), dtype=torch.int32, device=chosen.device)
    block = next((size for size in PLACE_BLOCKS if pairs <= size), PLACE_BLOCKS[-1])
    both = {"block": block, "num_warps": min(8, max(1, block // 256)), **pdl_options(pdl)}
    counts = None if pairs <= block else torch.empty(experts, dtype=torch.int32, device=chosen.device)
    if counts is not None:
        _count_kernel[(experts,)](chosen, counts, pairs, **both)
    block_e = max(2, triton.next_power_of_2(experts))
    _place_kernel[(experts + 1,)](
        *(chosen, counts, order, places, pairs, tiles), experts=experts, block_m=block_m, block_e=block_e, **both
    )
    return order, places
