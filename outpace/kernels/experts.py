"""Mixtures of experts in torch, and the choice among our kernels by the number of tokens.

Every implementation takes the fields of `ExpertsCall`: x, gate_up, down, weights and chosen by position, the others by
name.
"""

import itertools
from collections.abc import Callable, Iterator
from functools import cache, partial
from operator import itemgetter
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from outpace.kernels.activation import bias_act_torch, gated_act_torch
from outpace.kernels.experts_call import ExpertsCall, Stack, stack_shape
from outpace.kernels.experts_few import experts_few
from outpace.kernels.experts_few_packed import experts_few_packed, takes_few_packed
from outpace.kernels.experts_many import experts_many, fixed_tiles, takes_rounded
from outpace.kernels.invariant import bias_act_invariant, gated_act_invariant
from outpace.kernels.matmul import matmul_invariant_torch
from outpace.kernels.packed import Packed
from outpace.kernels.quantize import quantize_rows_torch

ROUNDED_ROWS = 64
"""If experts have more rows than this on average, the rows are rounded where they may be."""


def _activated(x: Tensor, call: ExpertsCall, invariant: bool = False) -> Tensor:
    """[M, 2I] → [M, I], or [M, I] → [M, I] without gates. `invariant`: a row does not depend on the others."""
    gated, plain = (gated_act_invariant, bias_act_invariant) if invariant else (gated_act_torch, bias_act_torch)
    if call.limit is not None and call.alpha is not None:
        gate, up = x.float().chunk(2, dim=1)
        gate, up = gate.clamp(max=call.limit), up.clamp(-call.limit, call.limit)
        return ((up + 1) * (gate * plain(gate * call.alpha, None, "sigmoid"))).to(x.dtype)
    return gated(x, call.act) if call.gated else plain(x, None, call.act)


def experts_in_turn(*operands: Any, invariant: bool = False, **options: Any) -> Tensor:
    """One expert after the other, [T, H]; the host reads which were chosen.

    invariant: each token bit for bit as if it were alone. rows: they are rounded to this kind.
    """
    call = ExpertsCall(*operands, **options)
    call.check()
    product: Callable[..., Tensor] = matmul_invariant_torch if invariant else F.linear
    _, top_k, experts = call.sizes
    dtype, flat = call.x.dtype, call.weights.flatten()
    x = _rounded(call.x, call.rows)
    total = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for expert, pairs in _by_expert(call.chosen, experts):
        tokens = pairs // top_k
        biases = [None if bias is None else bias[expert] for bias in (call.gate_up_bias, call.down_bias)]
        h = _activated(product(x[tokens], _one(call.gate_up, expert, dtype), biases[0]), call, invariant)
        y = product(_rounded(h, call.rows), _one(call.down, expert, dtype), biases[1])
        total.index_add_(0, tokens, y.float() * flat[pairs, None])
    return call.finish(total.to(dtype))


def _rounded(x: Tensor, kind: str | None) -> Tensor:
    """x with each row rounded to the kind."""
    if kind is None:
        return x
    values, scales = quantize_rows_torch(x, kind)
    return (values.float() * scales).to(x.dtype)


def _one(stack: Stack, expert: int, dtype: torch.dtype) -> Tensor:
    """The weight of one expert."""
    return stack[expert].dequantized(dtype) if isinstance(stack, Packed) else stack[expert]


def _plain(stack: Stack, dtype: torch.dtype) -> Tensor:
    """The weights of all experts in dtype."""
    return stack.dequantized(dtype) if isinstance(stack, Packed) else stack


def _by_expert(chosen: Tensor, experts: int) -> Iterator[tuple[int, Tensor]]:
    """Each expert that was chosen, in order, and its pairs (token * K + k), in order."""
    ids, order = chosen.flatten().sort(stable=True)
    hit, counts = ids.unique_consecutive(return_counts=True)
    for expert, pairs in zip(hit.tolist(), order.split(counts.tolist()), strict=True):
        if 0 <= expert < experts:
            yield expert, pairs


def experts_torch(*operands: Any, rows: str | None = None, **options: Any) -> Tensor:
    """By torch's own products; on a GPU the host does not wait for the device, so that a graph can capture them."""
    call = ExpertsCall(*operands, **options)
    x = call.x
    if not x.is_cuda or len(x) == 0:
        return experts_in_turn(*call)
    call = call._replace(gate_up=_plain(call.gate_up, x.dtype), down=_plain(call.down, x.dtype))  # slow, but right
    grouped = has_grouped_mm(x.device, x.dtype, (x.shape[1], stack_shape(call.down)[2]))
    return experts_grouped(*call) if grouped else experts_one_by_one(*call)


@cache
def has_grouped_mm(device: torch.device, dtype: torch.dtype, widths: tuple[int, ...]) -> bool:
    """Whether torch can multiply groups of rows of these widths without reading the sizes of the groups on the host."""
    if device.type != "cuda" or dtype != torch.bfloat16 or any(width % 8 for width in widths):
        return False
    return torch.version.hip is None and torch.cuda.get_device_capability(device)[0] in (9, 10)


def experts_grouped(*operands: Any, **options: Any) -> Tensor:
    """The pairs of token and expert sorted by expert, and one product over all groups."""
    call = ExpertsCall(*operands, **options)
    call.check()
    x, chosen = call.x, call.chosen
    tokens, top_k, experts = call.sizes
    real = (chosen >= 0) & (chosen < experts)
    ids, order = chosen.masked_fill(~real, experts).flatten().sort(stable=True)
    ends = torch.searchsorted(ids, torch.arange(experts, device=x.device, dtype=ids.dtype), right=True, out_int32=True)
    expert = ids.clamp(max=experts - 1)
    h = _grouped_linear(x[order // top_k], _plain(call.gate_up, x.dtype), call.gate_up_bias, ends, expert)
    y = _grouped_linear(_activated(h, call), _plain(call.down, x.dtype), call.down_bias, ends, expert)
    pairs = torch.empty_like(y).index_copy_(0, order, y).view(tokens, top_k, x.shape[1])
    total = (pairs.float() * call.weights[:, :, None]).masked_fill(~real[:, :, None], 0.0).sum(dim=1)
    return call.finish(total.to(x.dtype))


def _grouped_linear(x: Tensor, weight: Tensor, bias: Tensor | None, ends: Tensor, expert: Tensor) -> Tensor:
    """Rows ends[e - 1] to ends[e] times the weight of expert e; rows after the last end are not written."""
    y: Tensor = F.grouped_mm(x, weight.transpose(1, 2), offs=ends)
    return y if bias is None else y + bias[expert]


def experts_one_by_one(*operands: Any, **options: Any) -> Tensor:
    """Without a grouped product: every pair by itself, or every token through every expert, whichever takes fewer
    products. Neither waits for the device."""
    call = ExpertsCall(*operands, **options)
    call.check()
    x, chosen, weights = call.x, call.chosen, call.weights
    _, top_k, experts = call.sizes
    total = torch.zeros(x.shape, dtype=torch.float32, device=x.device)

    def answer(rows: Tensor, pick: Callable[[Tensor], Tensor]) -> Tensor:
        """The result in fp32 of the expert that is picked from each stack."""
        biases = [None if b is None else pick(b) for b in (call.gate_up_bias, call.down_bias)]
        up, down = (pick(_plain(stack, x.dtype)) for stack in (call.gate_up, call.down))
        return F.linear(_activated(F.linear(rows, up, biases[0]), call), down, biases[1]).float()

    if chosen.numel() < experts:
        for token, k in itertools.product(range(len(x)), range(top_k)):
            expert = chosen[token, k : k + 1]
            hit = (expert >= 0) & (expert < experts)
            at = expert.clamp(0, experts - 1)
            y = answer(x[token : token + 1], partial(_one_of, at=at))
            total[token] += torch.where(hit, y[0] * weights[token, k], 0.0)
    else:
        for number in range(experts):
            here = chosen == number  # [T, K]
            y = answer(x, itemgetter(number))
            y *= (weights * here).sum(dim=1, keepdim=True)
            total += y.masked_fill_(~here.any(dim=1, keepdim=True), 0.0)
    return call.finish(total.to(x.dtype))


def _one_of(stack: Tensor, at: Tensor) -> Tensor:
    """stack[at] for an index on the device, without waiting for it."""
    return stack.index_select(0, at)[0]


def prefers_few(tokens: int, top_k: int, experts: int) -> bool:
    """Whether to use the kernels of few tokens instead of those of many.

    The former read an expert once for each pair, the latter once for each tile. On an H200 Qwen3-30B-A3B (8 of 128
    experts for each token) takes 122 us with the former and 128 with the latter for 8 tokens, 215 and 187 for 16
    tokens; Mixtral (2 of 8 experts) 162 and 195 for one token, 861 and 575 for 8.
    """
    return tokens == 1 or 2 * tokens * top_k <= experts


def prefers_rounded(tokens: int, top_k: int, experts: int) -> bool:
    """Whether rows are rounded where they may be: if products take longer than reading weights. Not measured yet."""
    return tokens * top_k > ROUNDED_ROWS * experts


def experts_triton(*operands: Any, **options: Any) -> Tensor:
    """By our kernels: those of few tokens or those of many."""
    call = ExpertsCall(*operands, **options)
    call.check_layout()
    if call.is_empty:
        return call.finish(torch.zeros_like(call.x))
    gate_up, down, few = call.gate_up, call.down, prefers_few(*call.sizes)
    if few and isinstance(gate_up, Tensor) and isinstance(down, Tensor):
        return experts_few(*call)
    if few and isinstance(gate_up, Packed) and isinstance(down, Packed) and takes_few_packed(gate_up, down):
        return experts_few_packed(*call)
    rounds = prefers_rounded(*call.sizes) and takes_rounded(call.rows, gate_up, down)
    return experts_many(*call._replace(rows=call.rows if rounds else None))


def experts_invariant_torch(*operands: Any, rows: str | None = None, **options: Any) -> Tensor:
    """Each token bit for bit as if it were alone."""
    return experts_in_turn(*operands, invariant=True, **options)


def experts_invariant_triton(*operands: Any, rows: str | None = None, **options: Any) -> Tensor:
    """Each token bit for bit as if it were alone: the kernels of many tokens with fixed tiles."""
    call = ExpertsCall(*operands, **options)
    call.check_layout()
    if call.is_empty:
        return call.finish(torch.zeros_like(call.x))
    return experts_many(*call, tiles=fixed_tiles(call.x.dtype))
