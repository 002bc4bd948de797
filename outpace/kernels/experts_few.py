"""Experts of few tokens: each pair of a token and an expert streams that expert's weights, without sorting.

Two kernels. The first computes gate and up of a pair and their activation, the second adds the down products of all
experts of a token, with their weights, in one program: nothing is added in memory, so the order never changes. Pairs
are neighbours in the grid: those that share an expert find its weights in the L2 cache.
"""
# mypy: disallow-untyped-decorators=False

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from outpace.kernels.activation import activate, activate_gated
from outpace.kernels.experts_call import ExpertsCall
from outpace.kernels.launch_options import has_pdl, pdl_options, row_stride
from outpace.kernels.triton_stub import tl, triton


@triton.jit
def _load_weights(
    ptrs: tl.tensor, live: tl.tensor, col: tl.tensor, k: tl.tensor, depth: tl.constexpr, even: tl.constexpr
) -> tl.tensor:
    """The tile k columns on, not kept in caches; zero for pairs without an expert, and beyond the depth."""
    if even:
        tile = tl.load(ptrs + k, mask=live, other=0.0, eviction_policy="evict_first")
    else:
        tile = tl.load(ptrs + k, mask=live & (k + col < depth), other=0.0, eviction_policy="evict_first")
    return tile


@triton.jit
def _add_products(
    acc: tl.tensor, w: tl.tensor, x_ptrs: tl.tensor, live: tl.tensor, col: tl.tensor, k: tl.tensor,
    depth: tl.constexpr, even: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """acc + x * w, element by element."""
    if even:
        x = tl.load(x_ptrs + k, mask=live, other=0.0)
    else:
        x = tl.load(x_ptrs + k, mask=live & (k + col < depth), other=0.0)
    return acc + x.to(tl.float32) * w.to(tl.float32)


@triton.jit
def _pair_up_kernel(
    x_ptr: tl.tensor,  # [T, H]
    weight_ptr: tl.tensor,  # [E, 2I, H]; not gated: [E, I, H]
    bias_ptr: tl.tensor,  # [E, 2I] or [E, I], or None
    chosen_ptr: tl.tensor,  # int32 [T, K]
    out_ptr: tl.tensor,  # [T * K, I]
    experts: tl.tensor, inner: tl.tensor, x_stride: tl.tensor, expert_stride: tl.tensor,
    row_stride: tl.tensor,
    depth: tl.constexpr, top_k: tl.constexpr, activation: tl.constexpr, gated: tl.constexpr,
    limit: tl.constexpr, alpha: tl.constexpr, pdl: tl.constexpr, block_n: tl.constexpr, block_k: tl.constexpr,
) -> None:  # fmt: skip
    # Tiles are [N, K]; a gated one holds gate and up rows in turn. Rows beyond the last repeat the last.
    tile_n: tl.constexpr = 2 * block_n if gated else block_n
    even: tl.constexpr = depth % block_k == 0
    last: tl.constexpr = (depth - 1) // block_k * block_k  # where the last tile begins
    if pdl:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    pair = tl.program_id(0)
    expert = tl.load(chosen_ptr + pair)
    if (expert >= 0) & (expert < experts):
        far = expert.to(tl.int64)  # a stack may have more than 2**31 weights
        first = tl.program_id(1) * block_n
        lane = tl.arange(0, tile_n)
        if gated:
            row = tl.minimum(first + lane // 2, inner - 1) + lane % 2 * inner
        else:
            row = tl.minimum(first + lane, inner - 1)
        col = tl.arange(0, block_k)[None, :]
        live = col >= 0
        weight_ptrs = weight_ptr + far * expert_stride + row.to(tl.int64)[:, None] * row_stride + col
        x_ptrs = x_ptr + (pair // top_k).to(tl.int64) * x_stride + col
        acc = tl.zeros([tile_n, block_k], tl.float32)
        w = _load_weights(weight_ptrs, live, col, 0, depth, even)
        for k in range(0, last, block_k):  # the next tile is loaded to registers while this one is used
            ahead = _load_weights(weight_ptrs, live, col, k + block_k, depth, even)
            acc = _add_products(acc, w, x_ptrs, live, col, k, depth, True)
            w = ahead
        acc = _add_products(acc, w, x_ptrs, live, col, last, depth, even)
        y = tl.sum(acc, axis=1)  # [N]
        if bias_ptr is not None:
            y += tl.load(bias_ptr + far * (2 * inner if gated else inner) + row).to(tl.float32)
        if gated:
            gate, up = tl.split(tl.reshape(y, [block_n, 2]))
            y = activate_gated(gate, up, activation, limit, alpha)
        else:
            y = activate(y, activation)
        n = first + tl.arange(0, block_n)
        tl.store(out_ptr + pair.to(tl.int64) * inner + n, y.to(out_ptr.dtype.element_ty), mask=n < inner)


@triton.jit
def _pair_down_kernel(
    h_ptr: tl.tensor,  # [T * K, I]; rows of pairs without an expert were never written
    weight_ptr: tl.tensor,  # [E, H, I]
    bias_ptr: tl.tensor,  # [E, H] or None
    weights_ptr: tl.tensor,  # fp32 [T, K]
    chosen_ptr: tl.tensor,  # int32 [T, K]
    add_ptr: tl.tensor,  # [T, H] or None; may be out: each program reads only what it writes
    out_ptr: tl.tensor,  # [T, H]
    experts: tl.tensor, outputs: tl.tensor, expert_stride: tl.tensor, row_stride: tl.tensor,
    add_stride: tl.tensor, out_stride: tl.tensor,
    depth: tl.constexpr, top_k: tl.constexpr, pdl: tl.constexpr, block_p: tl.constexpr, block_n: tl.constexpr,
    block_k: tl.constexpr,
) -> None:  # fmt: skip
    # Tiles are [P, N, K], P the experts of one token.
    even: tl.constexpr = depth % block_k == 0
    last: tl.constexpr = (depth - 1) // block_k * block_k
    token = tl.program_id(0)
    p = tl.arange(0, block_p)
    pair = token * top_k + p
    # With pdl this and the first weights are read before the wait: the previous kernel, which writes h, has itself
    # waited for the writer of `chosen` before it let this one start.
    expert = tl.load(chosen_ptr + pair, mask=p < top_k, other=-1)
    found = (expert >= 0) & (expert < experts)  # [P]
    expert = tl.where(found, expert, 0).to(tl.int64)
    live = found[:, None, None]
    first = tl.program_id(1) * block_n
    row = tl.minimum(first + tl.arange(0, block_n), outputs - 1)
    col = tl.arange(0, block_k)[None, None, :]
    weight_ptrs = (
        weight_ptr + expert[:, None, None] * expert_stride + row.to(tl.int64)[None, :, None] * row_stride + col
    )
    h_ptrs = h_ptr + pair.to(tl.int64)[:, None, None] * depth + col
    w = _load_weights(weight_ptrs, live, col, 0, depth, even)
    if pdl:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    n = first + tl.arange(0, block_n)
    far = token.to(tl.int64)
    if add_ptr is not None:
        add = tl.load(add_ptr + far * add_stride + n, mask=n < outputs, other=0.0).to(tl.float32)
    acc = tl.zeros([block_p, block_n, block_k], tl.float32)
    for k in range(0, last, block_k):
        ahead = _load_weights(weight_ptrs, live, col, k + block_k, depth, even)
        acc = _add_products(acc, w, h_ptrs, live, col, k, depth, True)
        w = ahead
    acc = _add_products(acc, w, h_ptrs, live, col, last, depth, even)
    y = tl.sum(acc, axis=2)  # [P, N]
    if bias_ptr is not None:
        bias_ptrs = bias_ptr + expert[:, None] * outputs + row[None, :]
        y += tl.load(bias_ptrs, mask=found[:, None], other=0.0).to(tl.float32)
    weights = tl.load(weights_ptr + pair, mask=found, other=0.0)
    y = tl.sum(tl.where(found[:, None], y * weights[:, None], 0.0), axis=0)  # [N]
    if add_ptr is not None:
        y = y.to(out_ptr.dtype.element_ty).to(tl.float32) + add
    tl.store(out_ptr + far * out_stride + n, y.to(out_ptr.dtype.element_ty), mask=n < outputs)


def up_config(inner: int, depth: int, gated: bool) -> dict[str, int]:
    """Tiles of the first kernel: gated ones the best of a sweep on an H200, the others those of gemv."""
    width: int = triton.next_power_of_2(depth)
    if gated and 1024 < depth <= 2048:
        tile = (1, 1024, 4)
    elif gated:
        tile = (2, min(4096, width), 8 if depth > 1024 else 2)
    else:
        tile = (4 if inner >= 4096 else 2, min(2048, width), 4)
    return {"block_n": tile[0], "block_k": tile[1], "num_warps": tile[2]}


def down_config(top_k: int, depth: int) -> dict[str, int]:
    """Tiles of the second kernel: 2048 weights for four warps, the best of a sweep for 2 and 8 experts."""
    block_p = triton.next_power_of_2(top_k)
    block_k = min(triton.next_power_of_2(depth), max(128, 512 // block_p))
    return {"block_n": max(1, 2048 // (block_p * block_k)), "block_k": block_k, "num_warps": 4}


def experts_few(
    *operands: Any,
    up: Mapping[str, int] | None = None,
    down_tiles: Mapping[str, int] | None = None,
    **options: Any,
) -> Tensor:
    """An `ExpertsCall` in two kernels. up, down_tiles: tiles other than the default ones."""
    call = ExpertsCall(*operands, **options)
    x, gate_up, down, chosen = call.x, call.gate_up, call.down, call.chosen
    assert isinstance(gate_up, Tensor), "plain weights"
    assert isinstance(down, Tensor), "plain weights"
    (tokens, hidden), (experts, _, inner), top_k = x.shape, down.shape, chosen.shape[1]
    h, out = torch.empty((tokens * top_k, inner), dtype=x.dtype, device=x.device), call.empty_out()
    both = {"top_k": top_k, **pdl_options(has_pdl(x.device))}
    meta = {**up_config(inner, hidden, call.gated), **(up or {})}
    _pair_up_kernel[(tokens * top_k, triton.cdiv(inner, meta["block_n"]))](
        *(x, gate_up, call.gate_up_bias, chosen, h, experts, inner),
        *(row_stride(x), gate_up.stride(0), gate_up.stride(1)),
        depth=hidden,
        **call.after_up,
        **both,
        **meta,
    )
    meta = {**down_config(top_k, inner), **(down_tiles or {})}
    _pair_down_kernel[(tokens, triton.cdiv(hidden, meta["block_n"]))](
        *(h, down, call.down_bias, call.weights, chosen, call.add, out, experts, hidden),
        *(down.stride(0), down.stride(1), row_stride(call.add), row_stride(out)),
        depth=inner,
        block_p=triton.next_power_of_2(top_k),
        **both,
        **meta,
    )
    return out
