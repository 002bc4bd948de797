"""Experts of many tokens: pairs of a token and an expert sorted by expert, then products of tiles of one expert each.

Four or five kernels, and the host waits for none: grid sizes depend on shapes alone, and a program that finds no work
ends. One or two sort the pairs (`experts_sort`); the two products gather their rows by that list; `add` takes the
weighted sum of each token's experts. No row of a tile depends on another one: with fixed tiles each token is bit for
bit as if it were alone.

With `rows` both products take rows that are rounded to int8 or fp8, like the weights, so that matrix units multiply
them as they are: two more kernels round the tokens, and the result of the activation.
"""
# mypy: disallow-untyped-decorators=False

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from outpace.kernels.activation import activate, activate_gated
from outpace.kernels.experts_call import ExpertsCall, Stack, stack_shape
from outpace.kernels.experts_sort import sort_pairs
from outpace.kernels.launch_options import has_pdl, pdl_options, row_stride
from outpace.kernels.packed import Packed
from outpace.kernels.packed_tile import packed_step, scale_form, step_depth
from outpace.kernels.quantize import quantize_rows_triton
from outpace.kernels.triton_stub import tl, triton

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
    """Tiles by the mean number of pairs of an expert: the best of a sweep on an H200 (bench/kernels.py).

    kind: of quantized weights (int8, int4, fp8), whose tiles are not measured yet.

    Up to 64 rows, a tile takes as long as reading its weights. A second tile for an expert would read them again.
    """
    rows = pairs / max(1, min(experts, pairs))
    if dtype == torch.float32:  # no matrix instruction
        return Tiles(16 if rows <= 16 else 32, 64, 32, 32, num_stages=2)
    if rows <= 12:
        return Tiles(16, 128, 128, 128)
    if rows <= 96:
        return Tiles(64, 128, 128, 128, num_warps=8)
    return Tiles(128, 256 if kind is None else 128, 128, num_warps=8)


def rounded_tiles() -> Tiles:
    """Tiles of rounded rows, of which there are many: not measured yet."""
    return Tiles(128, 128, 128, 128, num_warps=8, num_stages=3)


def takes_rounded(rows: str | None, *stacks: Stack) -> bool:
    """Whether both products can take rows of this kind: weights of the same kind, no zeros, scales for whole steps."""
    return all(
        isinstance(stack, Packed)
        and stack.kind == rows
        and stack.zero is None
        and (stack.group >= stack.shape[1] or stack.group % 32 == 0)
        for stack in stacks
    )


def fixed_tiles(dtype: torch.dtype) -> Tiles:
    """The tiles for every number of tokens when a token must not depend on its batch."""
    return Tiles(16, 64, 32, 32, num_stages=2) if dtype == torch.float32 else Tiles(64, 128, 128)


@triton.jit
def _packed_product(
    x_ptrs: tl.tensor,  # [M, K]
    live: tl.tensor,  # [M]
    values_ptr: tl.tensor, scale_ptr: tl.tensor,
    zero_ptr: tl.tensor,  # or None
    row: tl.tensor,  # [N]
    values_row: tl.tensor, scale_row: tl.tensor, zero_row: tl.tensor, depth: tl.tensor,
    group: tl.constexpr, shared_rows: tl.constexpr, form: tl.constexpr, even: tl.constexpr,
    tile_n: tl.constexpr,
) -> tl.tensor:  # fmt: skip
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
    order_ptr: tl.tensor, tiles_ptr: tl.tensor,
    out_ptr: tl.tensor,  # [pairs, N]: in the order of the list if `gather`, else of the pairs
    tiles: tl.tensor, outputs: tl.tensor, depth: tl.tensor, x_stride: tl.tensor, expert_stride: tl.tensor,
    row_stride: tl.tensor, scale_expert: tl.tensor, scale_row: tl.tensor, zero_expert: tl.tensor,
    zero_row: tl.tensor,
    group: tl.constexpr, shared_rows: tl.constexpr, form: tl.constexpr, gather: tl.constexpr,
    top_k: tl.constexpr, activation: tl.constexpr, gated: tl.constexpr, limit: tl.constexpr,
    alpha: tl.constexpr, even: tl.constexpr, pdl: tl.constexpr, group_m: tl.constexpr, block_m: tl.constexpr,
    tile_n: tl.constexpr, block_k: tl.constexpr,
) -> None:  # fmt: skip
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
    add_ptr: tl.tensor,  # [T, H] or None; may be out: each program reads only what it writes
    out_ptr: tl.tensor,  # [T, H]
    experts: tl.tensor, width: tl.tensor, add_stride: tl.tensor, out_stride: tl.tensor,
    top_k: tl.constexpr, pdl: tl.constexpr, block: tl.constexpr,
) -> None:  # fmt: skip
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


def _strides(stack: Stack | None) -> tuple[int, int]:
    """The strides of experts and rows."""
    return (stack.stride(0), stack.stride(1)) if isinstance(stack, Tensor) else (0, 0)


def experts_many(*operands: Any, tiles: Tiles | None = None, **options: Any) -> Tensor:
    """An `ExpertsCall` in four or five kernels, with `rows` two more. With few tokens the kernels overlap."""
    call = ExpertsCall(*operands, **options)
    x, gate_up, down, chosen, rows = call.x, call.gate_up, call.down, call.chosen, call.rows
    assert rows is None or takes_rounded(rows, gate_up, down), f"these weights do not take {rows} rows"
    (tokens, hidden), (experts, _, inner), top_k = x.shape, stack_shape(down), chosen.shape[1]
    pairs = tokens * top_k
    usual = tiles_for(pairs, experts, x.dtype, gate_up.kind if isinstance(gate_up, Packed) else None)
    tiles = tiles or (usual if rows is None else rounded_tiles())
    pdl = tokens <= 64 and has_pdl(x.device)
    order, places = sort_pairs(chosen, experts, tiles.block_m, pdl=pdl)
    h, y = (torch.empty((pairs, width), dtype=x.dtype, device=x.device) for width in (inner, hidden))
    out = call.empty_out()

    def product(a: Tensor, weight: Stack, bias: Tensor | None, into: Tensor, tile_n: int, first: bool) -> None:
        """One of the two products; the first has rows of x, and the activation."""
        (width, depth), count = (into.shape[1], a.shape[1]), places.shape[1]
        a, a_scales = (a, None) if rows is None else quantize_rows_triton(a, rows)
        packed = weight if isinstance(weight, Packed) else None
        values, scale, zero = (weight, None, None) if packed is None else (packed.values, packed.scale, packed.zero)
        block_k = tiles.block_k if packed is None else step_depth(packed, tiles.block_k)
        _grouped_kernel[(count * triton.cdiv(width, tile_n // (2 if first and call.gated else 1)),)](
            *(a, a_scales, values, scale, zero, bias, order, places, into, count, width, depth),
            *(row_stride(a), *_strides(values), *_strides(scale), *_strides(zero)),
            group=None if packed is None else min(packed.group, depth),
            shared_rows=None if packed is None else packed.block,
            form=None if packed is None else scale_form(packed, block_k),
            gather=first,
            top_k=top_k,
            **(call.after_up if first else {"activation": None, "gated": False, "limit": None, "alpha": None}),
            even=depth % block_k == 0,
            group_m=tiles.group_m,
            block_m=tiles.block_m,
            tile_n=tile_n,
            block_k=block_k,
            num_warps=tiles.num_warps,
            num_stages=tiles.num_stages,
            **pdl_options(pdl),
        )

    product(x, gate_up, call.gate_up_bias, h, tiles.up_n, True)
    product(h, down, call.down_bias, y, tiles.down_n, False)
    _add_kernel[(tokens, triton.cdiv(hidden, ADD_BLOCK))](
        *(y, call.weights, chosen, call.add, out, experts, hidden, row_stride(call.add), row_stride(out)),
        top_k=top_k,
        block=ADD_BLOCK,
        **pdl_options(pdl),
    )
    return out
