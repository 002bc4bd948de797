"""Experts of many tokens: pairs of a token and an expert sorted by expert, then products of tiles of one expert each.

Four or five kernels, and the host waits for none: how large each grid is depends on shapes alone, and a program that
finds no work ends. `count` counts the pairs of each expert, where they are so many that `place` does not count them
itself; `place` lists the pairs by expert, those of one in their order, so that the result is always the same, and says
which rows each tile has; the two products gather their rows by that list; `add` takes the weighted sum of each token's
experts. No row of a tile depends on another one: with fixed tiles each token is bit for bit as if it were alone.

With `rows` both products take rows that are rounded to int8 or fp8, like the weights, so that matrix units multiply
both as they are: two more kernels round the tokens, and what is between the products.
"""
# mypy: disallow-untyped-decorators=False

from dataclasses import dataclass

import torch
from torch import Tensor

from outpace.kernels.activation import activate, activate_gated, activation_kind
from outpace.kernels.gemv import has_pdl, row_stride
from outpace.kernels.packed import Packed
from outpace.kernels.packed_tile import packed_step, scale_form, step_depth
from outpace.kernels.quantize import quantize_rows_triton
from outpace.kernels.triton_stub import tl, triton

PLACE_BLOCKS = (256, 1024, 4096)  # pairs that a program looks at together; few sizes, since each is compiled
ADD_BLOCK = 1024


@dataclass(frozen=True, slots=True)
class Tiles:
    """Rows of a tile, the weight rows of the two products (of a gated one: gates and ups together), and columns."""

    block_m: int
    up_n: int
    down_n: int
    block_k: int = 64
    num_warps: int = 4
    num_stages: int = 4
    group_m: int = 8


def tiles_for(pairs: int, experts: int, dtype: torch.dtype, kind: str | None = None) -> Tiles:
    """Tiles by the pairs of an expert, if all had as many: the best of bench.experts_sweep on an H200.

    kind: of quantized weights (int8, int4, fp8), whose tiles are not measured yet: bench.experts_sweep --kinds.

    Up to 64 rows a tile is as fast as its weights are read. More than one tile for an expert would read them again.
    """
    rows = pairs / max(1, min(experts, pairs))
    if dtype == torch.float32:  # no matrix instruction
        return Tiles(16 if rows <= 16 else 32, 64, 32, 32, num_stages=2)
    if rows <= 12:
        return Tiles(16, 128, 128, 128)
    if rows <= 96:
        return Tiles(64, 128, 128, 128, num_warps=8)
    return Tiles(128, 256 if kind is None else 128, 128, num_warps=8)


def scaled_tiles() -> Tiles:
    """Tiles of rounded rows, of which there are many: not measured yet (bench.experts_sweep --kinds)."""
    return Tiles(128, 128, 128, 128, num_warps=8, num_stages=3)


def takes_rounded(rows: str | None, *stacks: Tensor | Packed) -> bool:
    """Whether both products can take rows of this kind: weights of the same kind, no zeros, scales for whole steps."""
    return all(
        isinstance(stack, Packed)
        and stack.kind == rows
        and stack.zero is None
        and (stack.group >= stack.shape[1] or stack.group % 32 == 0)
        for stack in stacks
    )


def fixed_tiles(dtype: torch.dtype) -> Tiles:
    """The tiles that every number of tokens gets when a token must not depend on its batch."""
    return Tiles(16, 64, 32, 32, num_stages=2) if dtype == torch.float32 else Tiles(64, 128, 128)


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
    pairs: tl.tensor,
    tiles: tl.tensor,
    experts: tl.constexpr,
    pdl: tl.constexpr,
    block_m: tl.constexpr,
    block_e: tl.constexpr,
    block: tl.constexpr,
) -> None:
    if pdl:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    expert = tl.program_id(0)
    lane = tl.arange(0, block)
    e = tl.arange(0, block_e)
    if counts_ptr is None:
        ids = tl.load(chosen_ptr + lane, mask=lane < pairs, other=-1)
        real = (ids >= 0) & (ids < experts)
        stray = block - tl.sum(real.to(tl.int32), axis=0)  # counted for the first expert, and taken off
        counts = tl.histogram(tl.where(real, ids, 0), block_e) - tl.where(e == 0, stray, 0)
    else:
        counts = tl.load(counts_ptr + e, mask=e < experts, other=0)
    first = tl.sum(tl.where(e < expert, counts, 0), axis=0)
    tile = tl.sum(tl.where(e < expert, (counts + block_m - 1) // block_m, 0), axis=0)
    if expert == experts:  # one program more says which tiles have no rows
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


@triton.jit
def _packed_product(
    x_ptrs: tl.tensor,  # [M, K]
    live: tl.tensor,  # [M]
    values_ptr: tl.tensor,
    scale_ptr: tl.tensor,
    zero_ptr: tl.tensor,  # or None
    row: tl.tensor,  # [N]
    values_row: tl.tensor,
    scale_row: tl.tensor,
    zero_row: tl.tensor,
    depth: tl.tensor,
    group: tl.constexpr,
    shared_rows: tl.constexpr,
    form: tl.constexpr,
    even: tl.constexpr,
    tile_n: tl.constexpr,
) -> tl.tensor:
    """x @ weight.T of these rows of a quantized weight: fp32 [M, N]."""
    block_k: tl.constexpr = x_ptrs.shape[1]
    row = row.to(tl.int64)[:, None]
    byte = tl.arange(0, block_k // 2 if values_ptr.dtype.element_ty == tl.uint8 else block_k)[None, :]
    values_ptrs = values_ptr + row * values_row + byte
    scale_ptrs = scale_ptr + row // shared_rows * scale_row
    zero_ptrs = None if zero_ptr is None else zero_ptr + row // shared_rows * zero_row
    row_zero = None
    if zero_ptr is not None and form == "row":
        row_zero = tl.load(zero_ptrs).to(tl.float32)
    acc = tl.zeros([tile_n, x_ptrs.shape[0]], tl.float32)
    for k in range(0, depth, block_k):
        acc = packed_step(
            acc, x_ptrs, live[:, None], values_ptrs, scale_ptrs, zero_ptrs, row_zero, k, depth, group, form, even
        )
    if form == "row":
        acc *= tl.load(scale_ptrs).to(tl.float32)
    return tl.trans(acc)


@triton.jit
def _rounded_product(
    x_ptrs: tl.tensor,  # int8 or fp8 [M, K]
    live: tl.tensor,  # [M]
    weight_ptrs: tl.tensor,  # as x, [N, K]
    scale_ptrs: tl.tensor,  # [N, 1]
    depth: tl.tensor,
    group: tl.constexpr,
    form: tl.constexpr,
    even: tl.constexpr,
) -> tl.tensor:
    """x @ weight.T of rounded rows, without their scales: fp32 [M, N]. See scaled_linear.py for the sums."""
    block_k: tl.constexpr = x_ptrs.shape[1]
    whole: tl.constexpr = x_ptrs.dtype.element_ty == tl.int8
    sums: tl.constexpr = tl.int32 if whole else tl.float32
    exact: tl.constexpr = whole and form == "row"
    col = tl.arange(0, block_k)[None, :]
    acc = tl.zeros([weight_ptrs.shape[0], x_ptrs.shape[0]], sums if exact else tl.float32)
    for k in range(0, depth, block_k):
        if even:
            x = tl.load(x_ptrs + k, mask=live[:, None], other=0.0)
            w = tl.load(weight_ptrs + k)
        else:
            x = tl.load(x_ptrs + k, mask=live[:, None] & (k + col < depth), other=0.0)
            w = tl.load(weight_ptrs + k, mask=k + col < depth, other=0.0)
        if exact:
            acc = tl.dot(w, tl.trans(x), acc, out_dtype=sums)
        elif form == "row":
            acc += tl.dot(w, tl.trans(x), out_dtype=sums)
        else:
            scale = tl.load(scale_ptrs + k // group).to(tl.float32)
            acc += tl.dot(w, tl.trans(x), out_dtype=sums).to(tl.float32) * scale
    y = acc.to(tl.float32)
    if form == "row":
        y *= tl.load(scale_ptrs).to(tl.float32)
    return tl.trans(y)


@triton.jit(do_not_specialize=["tiles"])
def _grouped_kernel(
    x_ptr: tl.tensor,  # [T, K]: `gather`; else [pairs, K] in the order of the list
    x_scale_ptr: tl.tensor,  # fp32 [T] or [pairs], of rounded rows, or None
    weight_ptr: tl.tensor,  # [E, N, K]; gated: [E, 2N, K]; quantized: its values
    scale_ptr: tl.tensor,  # of a quantized weight, or None
    zero_ptr: tl.tensor,  # as scale, or None
    bias_ptr: tl.tensor,  # [E, N] or [E, 2N], or None
    order_ptr: tl.tensor,
    tiles_ptr: tl.tensor,
    out_ptr: tl.tensor,  # [pairs, N]: in the order of the list if `gather`, else of the pairs
    tiles: tl.tensor,
    outputs: tl.tensor,
    depth: tl.tensor,
    x_stride: tl.tensor,
    expert_stride: tl.tensor,
    row_stride: tl.tensor,
    scale_expert: tl.tensor,
    scale_row: tl.tensor,
    zero_expert: tl.tensor,
    zero_row: tl.tensor,
    group: tl.constexpr,
    shared_rows: tl.constexpr,
    form: tl.constexpr,
    gather: tl.constexpr,
    top_k: tl.constexpr,
    activation: tl.constexpr,
    gated: tl.constexpr,
    limit: tl.constexpr,
    alpha: tl.constexpr,
    even: tl.constexpr,
    pdl: tl.constexpr,
    group_m: tl.constexpr,
    block_m: tl.constexpr,
    tile_n: tl.constexpr,
    block_k: tl.constexpr,
) -> None:
    if pdl:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    block_n: tl.constexpr = tile_n // 2 if gated else tile_n
    band = group_m * tl.cdiv(outputs, block_n)  # programs of one group of row tiles
    lowest = tl.program_id(0) // band * group_m
    height = tl.minimum(tiles - lowest, group_m)
    turn = tl.program_id(0) % band
    tile = lowest + turn % height
    expert = tl.load(tiles_ptr + tile)
    if expert >= 0:
        far = expert.to(tl.int64)  # a stack may have more than 2**31 weights
        m = tl.load(tiles_ptr + tiles + tile) + tl.arange(0, block_m)  # [M] places in the list
        live = m < tl.load(tiles_ptr + 2 * tiles + tile)
        pair = tl.load(order_ptr + m, mask=live, other=0)
        begin = turn // height * block_n
        lane = tl.arange(0, tile_n)
        if gated:  # gate and up rows in turn
            row = tl.minimum(begin + lane // 2, outputs - 1) + lane % 2 * outputs
        else:
            row = tl.minimum(begin + lane, outputs - 1)
        col = tl.arange(0, block_k)[None, :]
        source = pair // top_k if gather else m
        x_ptrs = x_ptr + source.to(tl.int64)[:, None] * x_stride + col
        base = weight_ptr + far * expert_stride
        if x_scale_ptr is not None:
            at = row.to(tl.int64)[:, None]
            scale_ptrs = scale_ptr + far * scale_expert + at // shared_rows * scale_row
            y = _rounded_product(x_ptrs, live, base + at * row_stride + col, scale_ptrs, depth, group, form, even)
            y *= tl.load(x_scale_ptr + source, mask=live, other=0.0)[:, None]
        elif scale_ptr is not None:
            y = _packed_product(
                x_ptrs, live, base, scale_ptr + far * scale_expert,
                None if zero_ptr is None else zero_ptr + far * zero_expert,
                row, row_stride, scale_row, zero_row, depth, group, shared_rows, form, even, tile_n,
            )  # fmt: skip
        else:
            weight_ptrs = base + row.to(tl.int64)[:, None] * row_stride + col
            y = tl.zeros([block_m, tile_n], tl.float32)
            for k in range(0, depth, block_k):
                if even:
                    x = tl.load(x_ptrs + k, mask=live[:, None], other=0.0)
                    weight = tl.load(weight_ptrs + k)
                else:
                    x = tl.load(x_ptrs + k, mask=live[:, None] & (k + col < depth), other=0.0)
                    weight = tl.load(weight_ptrs + k, mask=k + col < depth, other=0.0)
                y = tl.dot(x, tl.trans(weight), y, input_precision="ieee")
        if bias_ptr is not None:
            y += tl.load(bias_ptr + far * (2 * outputs if gated else outputs) + row).to(tl.float32)[None, :]
        if gated:
            gate, up = tl.split(tl.reshape(y, [block_m, block_n, 2]))
            y = activate_gated(gate, up, activation, limit, alpha)
        elif activation is not None:
            y = activate(y, activation)
        n = begin + tl.arange(0, block_n)[None, :]
        target = m if gather else pair
        out_ptrs = out_ptr + target.to(tl.int64)[:, None] * outputs + n
        tl.store(out_ptrs, y.to(out_ptr.dtype.element_ty), mask=live[:, None] & (n < outputs))


@triton.jit
def _add_kernel(
    y_ptr: tl.tensor,  # [T * K, H]; rows of pairs without an expert were never written
    weights_ptr: tl.tensor,  # fp32 [T, K]
    chosen_ptr: tl.tensor,  # int32 [T, K]
    add_ptr: tl.tensor,  # [T, H] or None; may be out: each program reads what it writes, and no more
    out_ptr: tl.tensor,  # [T, H]
    experts: tl.tensor,
    width: tl.tensor,
    add_stride: tl.tensor,
    out_stride: tl.tensor,
    top_k: tl.constexpr,
    pdl: tl.constexpr,
    block: tl.constexpr,
) -> None:
    if pdl:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    token = tl.program_id(0).to(tl.int64)
    col = tl.program_id(1) * block + tl.arange(0, block)
    if add_ptr is not None:
        add = tl.load(add_ptr + token * add_stride + col, mask=col < width, other=0.0).to(tl.float32)
    total = tl.zeros([block], tl.float32)
    for k in tl.static_range(top_k):
        pair = token * top_k + k
        expert = tl.load(chosen_ptr + pair)
        found = (expert >= 0) & (expert < experts)
        y = tl.load(y_ptr + pair * width + col, mask=col < tl.where(found, width, 0), other=0.0).to(tl.float32)
        total += tl.where(found, y * tl.load(weights_ptr + pair), 0.0)
    if add_ptr is not None:
        total = total.to(out_ptr.dtype.element_ty).to(tl.float32) + add
    tl.store(out_ptr + token * out_stride + col, total.to(out_ptr.dtype.element_ty), mask=col < width)


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
    both = {"pdl": pdl, "block": block, "num_warps": min(8, max(1, block // 256)), **_launch(pdl)}
    counts = None if pairs <= block else torch.empty(experts, dtype=torch.int32, device=chosen.device)
    if counts is not None:
        _count_kernel[(experts,)](chosen, counts, pairs, **both)
    block_e = max(2, triton.next_power_of_2(experts))
    _place_kernel[(experts + 1,)](
        *(chosen, counts, order, places, pairs, tiles), experts=experts, block_m=block_m, block_e=block_e, **both
    )
    return order, places


def stack_shape(stack: Tensor | Packed) -> tuple[int, int, int]:
    """(E, N, K) of a stack of weights."""
    if isinstance(stack, Packed):
        assert stack.experts is not None, "a single weight is no stack of experts"
        return stack.experts, *stack.shape
    experts, rows, columns = stack.shape
    return experts, rows, columns


def _strides(stack: Tensor | Packed | None) -> tuple[int, int]:
    """Of experts and of rows."""
    return (stack.stride(0), stack.stride(1)) if isinstance(stack, Tensor) else (0, 0)


def _launch(pdl: bool) -> dict[str, bool]:
    return {"launch_pdl": True} if pdl else {}


def experts_many(
    x: Tensor,
    gate_up: Tensor | Packed,
    down: Tensor | Packed,
    weights: Tensor,
    chosen: Tensor,
    *,
    act: str,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    limit: float | None = None,
    alpha: float | None = None,
    gated: bool = True,
    add: Tensor | None = None,
    out: Tensor | None = None,
    rows: str | None = None,
    tiles: Tiles | None = None,
    pdl: bool | None = None,
) -> Tensor:
    """experts_ref in four or five kernels, with `rows` two more. pdl: as in gemv_triton; None: for few tokens."""
    assert rows is None or takes_rounded(rows, gate_up, down), f"these weights take no rows of {rows}"
    (tokens, hidden), (experts, _, inner), top_k = x.shape, stack_shape(down), chosen.shape[1]
    pairs = tokens * top_k
    usual = tiles_for(pairs, experts, x.dtype, gate_up.kind if isinstance(gate_up, Packed) else None)
    tiles = tiles or (usual if rows is None else scaled_tiles())
    pdl = (tokens <= 64 if pdl is None else pdl) and has_pdl(x.device)
    order, places = sort_pairs(chosen, experts, tiles.block_m, pdl=pdl)
    h, y = (torch.empty((pairs, width), dtype=x.dtype, device=x.device) for width in (inner, hidden))
    out = torch.empty((tokens, hidden), dtype=x.dtype, device=x.device) if out is None else out

    def product(
        a: Tensor, weight: Tensor | Packed, bias: Tensor | None, into: Tensor, tile_n: int, first: bool
    ) -> None:
        """One of the two products; the first has rows of x, and the activation."""
        (width, depth), count = (into.shape[1], a.shape[1]), places.shape[1]
        a, a_scales = (a, None) if rows is None else quantize_rows_triton(a, rows)
        halves = 2 if first and gated else 1
        packed = weight if isinstance(weight, Packed) else None
        values, scale, zero = (weight, None, None) if packed is None else (packed.values, packed.scale, packed.zero)
        block_k = tiles.block_k if packed is None else step_depth(packed, tiles.block_k)
        _grouped_kernel[(count * triton.cdiv(width, tile_n // halves),)](
            *(a, a_scales, values, scale, zero, bias, order, places, into, count, width, depth),
            *(row_stride(a), *_strides(values), *_strides(scale), *_strides(zero)),
            group=None if packed is None else min(packed.group, depth),
            shared_rows=None if packed is None else packed.block,
            form=None if packed is None else scale_form(packed, block_k),
            gather=first,
            top_k=top_k,
            activation=activation_kind(act) if first else None,
            gated=first and gated,
            limit=limit if first else None,
            alpha=alpha if first else None,
            even=depth % block_k == 0,
            pdl=pdl,
            group_m=tiles.group_m,
            block_m=tiles.block_m,
            tile_n=tile_n,
            block_k=block_k,
            num_warps=tiles.num_warps,
            num_stages=tiles.num_stages,
            **_launch(pdl),
        )

    product(x, gate_up, gate_up_bias, h, tiles.up_n, True)
    product(h, down, down_bias, y, tiles.down_n, False)
    _add_kernel[(tokens, triton.cdiv(hidden, ADD_BLOCK))](
        *(y, weights, chosen, add, out, experts, hidden, row_stride(add), row_stride(out)),
        top_k=top_k,
        pdl=pdl,
        block=ADD_BLOCK,
        **_launch(pdl),
    )
    return out
