"""One token for each row of logits, by temperature, min_p, top_k and top_p, without sorting the vocabulary.

The weight of a token is w = exp((x - max) / temperature) in fp32, and its mass is w in units of 2**-40, an integer:
integers add up to the same in every order, so what a row draws depends neither on its batch nor on tiles. A row keeps
the weights at or above one threshold: min_p of the largest, then the k-th largest, then the largest threshold that
keeps top_p of the mass that is left. Tokens that tie with the threshold are all kept. The token is drawn by inverting
the cumulated mass, in the order of token ids, at a hash of the row's key and the number of tokens it has drawn.
"""
# mypy: disallow-untyped-decorators=False

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from outpace.kernels.triton_stub import tl, triton

MASS = tl.constexpr(float(2**40))  # of a row's largest weight; a vocabulary of 2**22 tokens fits into 63 bits
ONE = tl.constexpr(0x3F800000)  # the bits of 1.0: those of positive floats are in the order of their values
SPLITMIX = (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)  # its step, its factors
STEP = tl.constexpr(SPLITMIX[0])
FACTOR_1 = tl.constexpr(SPLITMIX[1])
FACTOR_2 = tl.constexpr(SPLITMIX[2])


def hashed(keys: Tensor, counters: Tensor) -> Tensor:
    """31 random bits for each (key, counter), by splitmix64. int64 in torch wraps round, and shifts with the sign."""
    step, *factors = (bits - 2**64 for bits in SPLITMIX)  # the three have the sign bit
    z = keys + (counters + 1) * step
    for shift, factor in zip((30, 27), factors, strict=True):
        z = (z ^ ((z >> shift) & ((1 << (64 - shift)) - 1))) * factor
    return ((z ^ ((z >> 31) & ((1 << 33) - 1))) >> 33) & (2**31 - 1)


class Drawing(NamedTuple):
    """How a token is drawn from each row of logits. All [S]."""

    temperature: Tensor
    """fp32. 0: take the first maximum, as in rows whose maximum is infinite. NaN is never drawn."""
    top_k: Tensor
    """int64. 0: all."""
    top_p: Tensor
    """fp32. 1: all."""
    min_p: Tensor
    """fp32"""
    keys: Tensor
    """int64: keys of the random numbers."""
    counters: Tensor
    """int64: tokens that the row has drawn so far."""


def draw_torch(logits: Tensor, how: Drawing, *, filtered: bool = True) -> Tensor:
    """Token ids [S] int64 of logits [S, V]. filtered=False: no row has top_k or top_p."""
    temperature, top_k, top_p, min_p, keys, counters = how
    x = logits.float()
    x = x.masked_fill(x.isnan(), float("-inf"))
    top, best = x.max(dim=1, keepdim=True)  # [S, 1]
    best = torch.where(x == top, torch.arange(x.shape[1], device=x.device), x.shape[1]).amin(dim=1)
    heat = torch.where(temperature > 0, temperature, 1.0)[:, None]
    w = ((x - top) * (1 / heat)).exp()
    w = w.masked_fill(w.isnan(), 0.0)  # infinities
    floor = min_p[:, None]  # [S, 1]
    if filtered:
        floor = _threshold_torch(w, floor, top_k[:, None], top_p[:, None])
    ends = _mass_torch(w, floor).cumsum(dim=1)  # [S, V]
    total = ends[:, -1]
    random = hashed(keys, counters)
    # random / 2**31 of total, rounded down
    goal = 2 * random * (total >> 32) + ((random * (total & (2**32 - 1))) >> 31)
    drawn = (ends <= goal[:, None]).sum(dim=1)
    return torch.where((temperature > 0) & (total > 0), drawn, best)


def _mass_torch(w: Tensor, floor: Tensor) -> Tensor:
    return (w.masked_fill(w < floor, 0.0) * 2.0**40).long()


def _threshold_torch(w: Tensor, floor: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """The least weight that is kept, [S, 1]. w: [S, V], the rest [S, 1]."""
    ordered = w.sort(dim=1, descending=True).values
    least = ordered.gather(1, top_k.clamp(1, w.shape[1]) - 1)
    floor = torch.where(top_k > 0, torch.maximum(floor, least), floor)
    mass = _mass_torch(ordered, floor)
    ends = mass.cumsum(dim=1)
    wanted = (ends[:, -1:].double() * top_p).long()
    needed = (ends - mass < wanted).sum(dim=1, keepdim=True)  # tokens before which there is too little mass
    least = ordered.gather(1, needed.clamp(min=1) - 1)
    return torch.where(top_p < 1, torch.maximum(floor, least), floor)


@triton.jit
def _hash(key: tl.tensor, counter: tl.tensor) -> tl.tensor:
    z = key.to(tl.uint64) + (counter + 1).to(tl.uint64) * STEP
    z = (z ^ (z >> 30)) * FACTOR_1
    z = (z ^ (z >> 27)) * FACTOR_2
    return ((z ^ (z >> 31)) >> 33).to(tl.int64)


@triton.jit
def _weights(x_ptr: tl.tensor, col: tl.tensor, width: tl.tensor, top: tl.tensor, cold: tl.tensor) -> tl.tensor:
    """exp((x - top) * cold) of the columns; NaN where x is, or where both are infinite. Comparisons leave NaN out."""
    x = tl.load(x_ptr + col, mask=col < width, other=float("-inf")).to(tl.float32)
    return tl.exp((x - top) * cold)


@triton.jit
def _mass(w: tl.tensor, kept: tl.tensor) -> tl.tensor:
    return tl.where(kept, w * MASS, 0.0).to(tl.int64)


@triton.jit
def _append(list_ptr: tl.tensor, count: tl.tensor, values: tl.tensor, kept: tl.tensor) -> tl.tensor:
    """Append the kept values to a list of `count`; returns the new count."""
    kept = kept.to(tl.int32)
    place = count + tl.cumsum(kept, axis=0) - 1
    tl.debug_barrier()  # the values may come from this list: all are read before one is overwritten
    tl.store(list_ptr + place, values, mask=kept != 0)
    return count + tl.sum(kept, axis=0)


@triton.jit
def _gather(
    x_ptr: tl.tensor, list_ptr: tl.tensor, width: tl.tensor, top: tl.tensor, cold: tl.tensor,
    floor: tl.tensor,
    block: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """List the weights of a row at or above the floor; returns their number."""
    lane = tl.arange(0, block)
    count = tl.full((), 0, tl.int32)
    for start in range(0, width, block):
        w = _weights(x_ptr, start + lane, width, top, cold)
        count = _append(list_ptr, count, w, w >= floor)
    tl.debug_barrier()
    return count


@triton.jit
def _select(
    list_ptr: tl.tensor, count: tl.tensor, floor: tl.tensor, wanted: tl.tensor,
    by_mass: tl.constexpr, block: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """The largest t >= floor such that `wanted` listed weights, or weights of this mass, are >= t; floor if none is.

    Bisects the bits of t. Weights that are decided leave the list, so it is soon short.
    """
    lane = tl.arange(0, block)
    low = floor.to(tl.int32, bitcast=True)
    high = tl.full((), ONE, tl.int32)
    above = tl.full((), 0, tl.int64)  # of the weights over `high`
    while (low < high) & (count > 1):
        middle = low + (high - low + 1) // 2
        least, half, most = (
            low.to(tl.float32, bitcast=True),
            middle.to(tl.float32, bitcast=True),
            high.to(tl.float32, bitcast=True),
        )
        found = tl.zeros([block], tl.int64)
        left = tl.full((), 0, tl.int32)
        for start in range(0, count, block):
            w = tl.load(list_ptr + start + lane, mask=start + lane < count, other=-1.0)
            open_ = (w >= least) & (w <= most)
            counted = open_ & (w >= half)
            if by_mass:
                found += _mass(w, counted)
            else:
                found += counted.to(tl.int64)
            left = _append(list_ptr, left, w, open_)
        tl.debug_barrier()
        count = left
        total = above + tl.sum(found, axis=0)
        enough = total >= wanted
        low = tl.where(enough, middle, low)
        high = tl.where(enough, high, middle - 1)
        above = tl.where(enough, above, total)
    return low.to(tl.float32, bitcast=True)


@triton.jit
def _pick(
    x_ptr: tl.tensor, width: tl.tensor, top: tl.tensor, cold: tl.tensor, floor: tl.tensor, random: tl.tensor,
    otherwise: tl.tensor,
    tiles: tl.constexpr, block: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """The token at random / 2**31 of the mass at or above the floor; `otherwise` if there is none."""
    lane = tl.arange(0, block)
    tile = tl.arange(0, tiles)
    masses = tl.zeros([tiles], tl.int64)
    for start in range(0, width, block):
        w = _weights(x_ptr, start + lane, width, top, cold)
        masses = tl.where(tile == start // block, tl.sum(_mass(w, w >= floor), axis=0), masses)
    total = tl.sum(masses, axis=0)
    goal = 2 * random * (total >> 32) + ((random * (total & 0xFFFFFFFF)) >> 31)
    passed = tl.cumsum(masses, axis=0) <= goal
    start = tl.sum(passed.to(tl.int32), axis=0) * block
    w = _weights(x_ptr, start + lane, width, top, cold)
    ends = tl.sum(tl.where(passed, masses, 0), axis=0) + tl.cumsum(_mass(w, w >= floor), axis=0)
    token = start + tl.sum((ends <= goal).to(tl.int32), axis=0)
    return tl.where(total > 0, token, otherwise)


@triton.jit
def _draw_kernel(
    x_ptr: tl.tensor, temperature_ptr: tl.tensor, top_k_ptr: tl.tensor, top_p_ptr: tl.tensor,
    min_p_ptr: tl.tensor, keys_ptr: tl.tensor, counters_ptr: tl.tensor, lists_ptr: tl.tensor,
    out_ptr: tl.tensor, width: tl.tensor, x_stride: tl.tensor,
    tiles: tl.constexpr, block: tl.constexpr,
) -> None:  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, block)  # [B]
    x_ptr += row * x_stride
    list_ptr = lists_ptr + row * (tiles * block)
    peak = tl.full([block], float("-inf"), tl.float32)  # each lane keeps its own maximum
    place = lane
    for start in range(0, width, block):
        x = tl.load(x_ptr + start + lane, mask=start + lane < width, other=float("-inf")).to(tl.float32)
        place = tl.where(x > peak, start + lane, place)
        peak = tl.where(x > peak, x, peak)
    top = tl.max(peak, axis=0)
    token = tl.min(tl.where(peak == top, place, 2147483647), axis=0)

    temperature = tl.load(temperature_ptr + row)
    if temperature > 0:
        cold = 1 / temperature
        floor = tl.abs(tl.load(min_p_ptr + row))  # -0.0 would be the lowest integer of all
        top_k = tl.load(top_k_ptr + row)
        top_p = tl.load(top_p_ptr + row)
        if top_k > 0:
            # The k-th largest of the lanes' maxima is no more than that of the row, and few weights lie between.
            tl.store(list_ptr + lane, tl.exp((peak - top) * cold))
            tl.debug_barrier()
            bound = _select(list_ptr, tl.full((), block, tl.int32), floor, top_k, False, block)
            count = _gather(x_ptr, list_ptr, width, top, cold, bound, block)
            floor = _select(list_ptr, count, bound, top_k, False, block)
        if top_p < 1:
            masses = tl.zeros([block], tl.int64)
            for start in range(0, width, block):
                w = _weights(x_ptr, start + lane, width, top, cold)
                masses += _mass(w, w >= floor)
            total = tl.sum(masses, axis=0)
            # All weights below (1 - top_p) / width of the total have less mass together than may be dropped.
            bound = tl.maximum(floor, 0.5 * (1 - top_p) / width * (total.to(tl.float32) / MASS))
            count = _gather(x_ptr, list_ptr, width, top, cold, bound, block)
            wanted = (total.to(tl.float64) * top_p).to(tl.int64)
            floor = _select(list_ptr, count, bound, wanted, True, block)
        random = _hash(tl.load(keys_ptr + row), tl.load(counters_ptr + row))
        token = _pick(x_ptr, width, top, cold, floor, random, token, tiles, block)
    tl.store(out_ptr + row, token.to(tl.int64))


def draw_config(width: int) -> dict[str, int]:
    """Tile of the draw: one program per row, many columns at a time; for 16384 there are too few registers."""
    block = max(128, min(8192, triton.next_power_of_2(width)))  # a block of one number does not compile
    return {"block": block, "num_warps": min(32, max(1, block // 256))}


def draw_triton(
    logits: Tensor, how: Drawing, *, filtered: bool = True, config: Mapping[str, int] | None = None
) -> Tensor:
    """draw_torch in one kernel."""
    rows, width = logits.shape
    out = torch.empty(rows, dtype=torch.int64, device=logits.device)
    if rows == 0:
        return out
    assert logits.stride(1) == 1 or width == 1, "rows must be contiguous"
    assert all(t.dtype == torch.int64 and t.is_contiguous() for t in (how.top_k, how.keys, how.counters))
    assert all(t.dtype == torch.float32 and t.is_contiguous() for t in (how.temperature, how.top_p, how.min_p))
    meta = {**draw_config(width), **(config or {})}
    tiles = triton.next_power_of_2(triton.cdiv(width, meta["block"]))
    # Without filters nothing is listed, but the same kernel runs, so that each row draws the same.
    lists = torch.empty((rows if filtered else 0, tiles * meta["block"]), dtype=torch.float32, device=logits.device)
    _draw_kernel[(rows,)](
        *(logits, *how, lists, out, width, logits.stride(0)),
        tiles=tiles,
        **meta,
    )
    return out
