"""Experts of few tokens with quantized weights: experts_few.py with packed_product.py's products."""
# mypy: disallow-untyped-decorators=False

from typing import Any

import torch
from torch import Tensor

from outpace.kernels.activation import activate, activate_gated
from outpace.kernels.experts_call import ExpertsCall
from outpace.kernels.launch_options import has_pdl, pdl_options, row_stride
from outpace.kernels.packed import Packed
from outpace.kernels.packed_gemv import CHUNK, fitting_depth, takes_chunks, words_of_chunk
from outpace.kernels.packed_product import packed_product
from outpace.kernels.triton_stub import tl, triton


@triton.jit
def _packed_up_kernel(
    x_ptr: tl.tensor,  # [T, H]
    values_ptr: tl.tensor,  # [E, 2I, H]; not gated: [E, I, H]; int4: half as wide; or the same as int32
    scale_ptr: tl.tensor,
    zero_ptr: tl.tensor,  # as scale, or None
    bias_ptr: tl.tensor,  # [E, 2I] or [E, I], or None
    chosen_ptr: tl.tensor,  # int32 [T, K]
    out_ptr: tl.tensor,  # [T * K, I]
    experts: tl.tensor, inner: tl.tensor, x_stride: tl.tensor, values_expert: tl.tensor,
    values_row: tl.tensor, scale_expert: tl.tensor, scale_row: tl.tensor, zero_expert: tl.tensor,
    zero_row: tl.tensor,
    depth: tl.constexpr, group: tl.constexpr, shared_rows: tl.constexpr, default_zero: tl.constexpr,
    top_k: tl.constexpr, activation: tl.constexpr, gated: tl.constexpr, limit: tl.constexpr,
    alpha: tl.constexpr, pdl: tl.constexpr, block_n: tl.constexpr, block_k: tl.constexpr, chunk: tl.constexpr,
    words: tl.constexpr,
) -> None:  # fmt: skip
    # A gated tile holds gate and up rows in turn. Rows beyond the last repeat the last.
    tile_n: tl.constexpr = 2 * block_n if gated else block_n
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
        n = row.to(tl.int64)[None, :, None, None]
        token = (pair // top_k + tl.arange(0, 1)).to(tl.int64)[:, None, None, None, None]
        y, _ = packed_product(
            x_ptr + token * x_stride,
            None,
            values_ptr + far * values_expert + n[:, :, :, :, None] * values_row,
            scale_ptr + far * scale_expert + n // shared_rows * scale_row,
            None if zero_ptr is None else zero_ptr + far * zero_expert + n // shared_rows * zero_row,
            0.0, depth, group, default_zero, False, block_k, chunk, words,
        )  # fmt: skip
        y = tl.reshape(y, [tile_n])
        if bias_ptr is not None:
            y += tl.load(bias_ptr + far * (2 * inner if gated else inner) + row).to(tl.float32)
        if gated:
            gate, up = tl.split(tl.reshape(y, [block_n, 2]))
            y = activate_gated(gate, up, activation, limit, alpha)
        else:
            y = activate(y, activation)
        at = first + tl.arange(0, block_n)
        tl.store(out_ptr + pair.to(tl.int64) * inner + at, y.to(out_ptr.dtype.element_ty), mask=at < inner)
    else:  # the second kernel multiplies the rows of all pairs
        none = tl.program_id(1) * block_n + tl.arange(0, block_n)
        tl.store(out_ptr + pair.to(tl.int64) * inner + none, 0.0, mask=none < inner)


@triton.jit
def _packed_down_kernel(
    h_ptr: tl.tensor,  # [T * K, I]; rows of pairs without an expert are zero
    values_ptr: tl.tensor,  # [E, H, I]; int4: half as wide; or the same as int32
    scale_ptr: tl.tensor,
    zero_ptr: tl.tensor,  # as scale, or None
    bias_ptr: tl.tensor,  # [E, H] or None
    weights_ptr: tl.tensor,  # fp32 [T, K]
    chosen_ptr: tl.tensor,  # int32 [T, K]
    add_ptr: tl.tensor,  # [T, H] or None
    out_ptr: tl.tensor,  # [T, H]
    experts: tl.tensor, outputs: tl.tensor, values_expert: tl.tensor, values_row: tl.tensor,
    scale_expert: tl.tensor, scale_row: tl.tensor, zero_expert: tl.tensor, zero_row: tl.tensor,
    add_stride: tl.tensor, out_stride: tl.tensor,
    depth: tl.constexpr, group: tl.constexpr, shared_rows: tl.constexpr, default_zero: tl.constexpr,
    top_k: tl.constexpr, pdl: tl.constexpr, block_p: tl.constexpr, block_n: tl.constexpr,
    block_k: tl.constexpr, chunk: tl.constexpr, words: tl.constexpr,
) -> None:  # fmt: skip
    # M are the experts of one token. Those beyond the last repeat the last, and a pair without an expert reads the
    # first: neither is added. With pdl `chosen` is read before the wait: see experts_few.py.
    token = tl.program_id(0)
    p = tl.arange(0, block_p)
    pair = token * top_k + tl.minimum(p, top_k - 1)
    expert = tl.load(chosen_ptr + pair)
    found = (p < top_k) & (expert >= 0) & (expert < experts)
    far = tl.where(found, expert, 0).to(tl.int64)[:, None, None, None]
    first = tl.program_id(1) * block_n
    row = tl.minimum(first + tl.arange(0, block_n), outputs - 1)
    n = row.to(tl.int64)[None, :, None, None]
    y, _ = packed_product(
        h_ptr + pair.to(tl.int64)[:, None, None, None, None] * depth,
        None,
        values_ptr + far[:, :, :, :, None] * values_expert + n[:, :, :, :, None] * values_row,
        scale_ptr + far * scale_expert + n // shared_rows * scale_row,
        None if zero_ptr is None else zero_ptr + far * zero_expert + n // shared_rows * zero_row,
        0.0, depth, group, default_zero, pdl, block_k, chunk, words,
    )  # fmt: skip
    if bias_ptr is not None:
        bias_ptrs = bias_ptr + tl.where(found, expert, 0).to(tl.int64)[:, None] * outputs + row[None, :]
        y += tl.load(bias_ptrs).to(tl.float32)
    weights = tl.load(weights_ptr + pair)
    y = tl.sum(tl.where(found[:, None], y * weights[:, None], 0.0), axis=0)  # [N]
    at = first + tl.arange(0, block_n)
    out_at = token.to(tl.int64)
    if add_ptr is not None:
        add = tl.load(add_ptr + out_at * add_stride + at, mask=at < outputs, other=0.0).to(tl.float32)
        y = y.to(out_ptr.dtype.element_ty).to(tl.float32) + add
    tl.store(out_ptr + out_at * out_stride + at, y.to(out_ptr.dtype.element_ty), mask=at < outputs)


def few_packed_config(weight: Packed, block_p: int, gated: bool) -> dict[str, int]:
    """The default tiles of either kernel. Not measured yet: `scripts/bench kernels --only experts --sweep`."""
    width: int = max(CHUNK, triton.next_power_of_2(weight.shape[1]))
    block_k = min(2048 if block_p == 1 and weight.kind == "int4" else max(256, 1024 // block_p), width)
    warps = max(1, min(4, block_k // (32 * CHUNK)))
    return {"block_n": 2 if gated or block_p > 1 else 4, "block_k": block_k, "num_warps": warps}


def takes_few_packed(*stacks: Packed) -> bool:
    """Whether these kernels take stacks with these groups."""
    return all(takes_chunks(stack) for stack in stacks)


def experts_few_packed(
    *operands: Any,
    up: dict[str, int] | None = None,
    down_tiles: dict[str, int] | None = None,
    **options: Any,
) -> Tensor:
    """An `ExpertsCall` in two kernels, both weights quantized. up, down_tiles: see few_packed_config."""
    call = ExpertsCall(*operands, **options)
    x, gate_up, down, chosen = call.x, call.gate_up, call.down, call.chosen
    assert isinstance(gate_up, Packed), "quantized weights"
    assert isinstance(down, Packed), "quantized weights"
    assert takes_few_packed(gate_up, down), f"groups of columns are no multiples of {CHUNK}"
    (tokens, hidden), inner, top_k, experts = x.shape, down.shape[1], chosen.shape[1], down.experts
    h, out = torch.empty((tokens * top_k, inner), dtype=x.dtype, device=x.device), call.empty_out()
    both = {"top_k": top_k, **pdl_options(has_pdl(x.device))}
    values, form, meta = _read(gate_up, x.dtype, up or few_packed_config(gate_up, 1, call.gated))
    _packed_up_kernel[(tokens * top_k, triton.cdiv(inner, meta["block_n"]))](
        *(x, values, gate_up.scale, gate_up.zero, call.gate_up_bias, chosen, h, experts, inner),
        *(row_stride(x), *_strides(values, gate_up.scale, gate_up.zero)),
        **form,
        **call.after_up,
        **both,
        **meta,
    )
    block_p = triton.next_power_of_2(top_k)
    values, form, meta = _read(down, x.dtype, down_tiles or few_packed_config(down, block_p, False))
    _packed_down_kernel[(tokens, triton.cdiv(hidden, meta["block_n"]))](
        *(h, values, down.scale, down.zero, call.down_bias, call.weights, chosen, call.add, out, experts, hidden),
        *(*_strides(values, down.scale, down.zero), row_stride(call.add), row_stride(out)),
        **form,
        block_p=block_p,
        **both,
        **meta,
    )
    return out


def _strides(*tensors: Tensor | None) -> tuple[int, ...]:
    """The strides of experts and rows of each tensor."""
    return tuple(stride for t in tensors for stride in ((0, 0) if t is None else (t.stride(0), t.stride(1))))


def _read(stack: Packed, dtype: torch.dtype, tiles: dict[str, int]) -> tuple[Tensor, dict[str, int], dict[str, int]]:
    """The values (as words of int32 where possible), the kernels' constants for them, and tiles that fit."""
    depth, words = stack.shape[1], words_of_chunk(stack, dtype)
    chunk = words * (8 if stack.kind == "int4" else 4)
    words, chunk = (words, chunk) if 0 < chunk <= depth else (0, CHUNK)
    form = {
        "depth": depth,
        "group": min(stack.group, depth),
        "shared_rows": stack.block,
        "default_zero": stack.default_zero,
        "chunk": chunk,
        "words": words,
    }
    block_k = fitting_depth(stack, max(chunk, tiles["block_k"]))
    return stack.values.view(torch.int32) if words else stack.values, form, {**tiles, "block_k": block_k}
