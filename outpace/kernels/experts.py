"""Each token through its experts: gate and up, activation, down, and the sum of what the experts say by their weights.

Every implementation has the same arguments: x [T, H], gate_up [E, 2I, H] (all gates, then all ups; with gated=False
[E, I, H]), down [E, H, I], weights [T, K] float32, chosen [T, K] int32. Ids outside 0..E-1 add nothing. Products and
activation are rounded to the dtype of x, the sum over the experts is taken in float32 and rounded once; `add` is added
to what was rounded, and that sum rounded again.

`rows`: "int8" or "fp8", which quantized weights must be too: rows of both products may be rounded to it, each with its
own scale. Only our kernels of many tokens do, where experts have so many rows that the products take the time; what
does not depend on the batch never does.
"""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from operator import itemgetter
from typing import Required, TypedDict, Unpack

import torch
import torch.nn.functional as F
from torch import Tensor

from outpace.kernels.activation import bias_act_ref, gated_act_ref
from outpace.kernels.experts_few import experts_few
from outpace.kernels.experts_few_packed import experts_few_packed, takes_few_packed
from outpace.kernels.experts_many import experts_many, fixed_tiles, stack_shape, takes_rounded
from outpace.kernels.invariant import bias_act_invariant, gated_act_invariant
from outpace.kernels.matmul import matmul_invariant_ref
from outpace.kernels.packed import Packed
from outpace.kernels.quantize import quantize_rows_ref
from outpace.kernels.triton_stub import HAS_TRITON


class Options(TypedDict, total=False):
    """The keywords of every implementation."""

    act: Required[str]
    gate_up_bias: Tensor | None
    """[E, 2I]; without gates [E, I]."""
    down_bias: Tensor | None
    """[E, H]."""
    limit: float | None
    alpha: float | None
    """GPT-OSS's activation: (clamp(up) + 1) * gate * sigmoid(alpha * gate), with gate and up clamped to the limit."""
    gated: bool
    """Default: True."""
    add: Tensor | None
    """[T, H]: is added to the result."""
    out: Tensor | None
    """[T, H]: gets the result. May be `add`, or x, neither of which is read any more when it is written."""


ROUNDED_ROWS = 64
"""Rows of an expert in the mean from which on they are rounded, where they may be."""
Stack = Tensor | Packed
"""The weights of all experts, [E, N, K], plain or quantized."""
Product = Callable[[Tensor, Tensor, Tensor | None], Tensor]


@dataclass(frozen=True, slots=True)
class Activation:
    """What stands between the two products of an expert."""

    act: str
    gated: bool = True
    limit: float | None = None
    alpha: float | None = None

    def __post_init__(self) -> None:
        assert (self.limit is None) == (self.alpha is None), "limit and alpha come together"
        assert self.gated or self.limit is None, "only a gate can be clamped"

    def __call__(self, x: Tensor, invariant: bool = False) -> Tensor:
        """[M, 2I] → [M, I], or [M, I] → [M, I] without gates. `invariant`: a row does not depend on the others."""
        if self.limit is not None and self.alpha is not None:
            return _clamped(x, self.limit, self.alpha, invariant)
        if self.gated:
            return (gated_act_invariant if invariant else gated_act_ref)(x, self.act)
        return (bias_act_invariant if invariant else bias_act_ref)(x, None, self.act)


def _clamped(x: Tensor, limit: float, alpha: float, invariant: bool) -> Tensor:
    gate, up = x.float().chunk(2, dim=1)
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    sigmoid = bias_act_invariant if invariant else bias_act_ref
    return ((up + 1) * (gate * sigmoid(gate * alpha, None, "sigmoid"))).to(x.dtype)


def check_experts(
    x: Tensor, gate_up: Stack, down: Stack, weights: Tensor, chosen: Tensor, **options: Unpack[Options]
) -> tuple[Activation, Tensor | None, Tensor | None]:
    """Checks shapes and dtypes; the activation and the two biases."""
    activation = Activation(options["act"], options.get("gated", True), options.get("limit"), options.get("alpha"))
    gate_up_bias, down_bias = options.get("gate_up_bias"), options.get("down_bias")
    likes = options.get("add"), options.get("out")
    (tokens, hidden), (experts, *_), (*_, inner) = x.shape, stack_shape(gate_up), stack_shape(down)
    rows = inner * (2 if activation.gated else 1)
    assert stack_shape(gate_up) == (experts, rows, hidden), (gate_up.shape, (experts, rows, hidden))
    assert stack_shape(down) == (experts, hidden, inner), (down.shape, (experts, hidden, inner))
    assert chosen.shape == weights.shape, (chosen.shape, weights.shape)
    assert chosen.shape[0] == tokens, (chosen.shape, tokens)
    assert (weights.dtype, chosen.dtype) == (torch.float32, torch.int32), (weights.dtype, chosen.dtype)
    assert gate_up_bias is None or gate_up_bias.shape == (experts, rows)
    assert down_bias is None or down_bias.shape == (experts, hidden)
    assert all(t is None or t.shape == x.shape for t in likes), "add and out have the shape of x"
    plain = [stack for stack in (gate_up, down) if isinstance(stack, Tensor)]
    assert all(t is None or t.dtype == x.dtype for t in (*plain, gate_up_bias, down_bias, *likes)), "one dtype for all"
    return activation, gate_up_bias, down_bias


def experts_ref(
    x: Tensor,
    gate_up: Stack,
    down: Stack,
    weights: Tensor,
    chosen: Tensor,
    *,
    invariant: bool = False,
    rows: str | None = None,
    **options: Unpack[Options],
) -> Tensor:
    """The sum of each token's experts, [T, H], one expert after the other; the host reads which were chosen.

    invariant: each token bit for bit as if it were alone. rows: they are rounded.
    """
    activation, gate_up_bias, down_bias = check_experts(x, gate_up, down, weights, chosen, **options)
    product: Product = matmul_invariant_ref if invariant else F.linear
    top_k, flat = chosen.shape[1], weights.flatten()
    x = _rounded(x, rows)
    total = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for expert, pairs in _by_expert(chosen, stack_shape(gate_up)[0]):
        tokens = pairs // top_k
        h = product(x[tokens], _one(gate_up, expert, x.dtype), None if gate_up_bias is None else gate_up_bias[expert])
        bias = None if down_bias is None else down_bias[expert]
        y = product(_rounded(activation(h, invariant), rows), _one(down, expert, x.dtype), bias)
        total.index_add_(0, tokens, y.float() * flat[pairs, None])
    return _added(total.to(x.dtype), options)


def _rounded(x: Tensor, kind: str | None) -> Tensor:
    """x with each row rounded to the kind."""
    if kind is None:
        return x
    values, scales = quantize_rows_ref(x, kind)
    return (values.float() * scales).to(x.dtype)


def _one(stack: Stack, expert: int, dtype: torch.dtype) -> Tensor:
    """The weight of one expert."""
    return stack[expert].dequantized(dtype) if isinstance(stack, Packed) else stack[expert]


def _plain(stack: Stack, dtype: torch.dtype) -> Tensor:
    """The weights of all experts in dtype."""
    return stack.dequantized(dtype) if isinstance(stack, Packed) else stack


def _added(y: Tensor, options: Options) -> Tensor:
    """y + add, in `out`."""
    add, out = options.get("add"), options.get("out")
    if add is not None:
        y = add.add_(y) if out is add else add + y
    return y if out is None or out is y else out.copy_(y)


def _by_expert(chosen: Tensor, experts: int) -> Iterator[tuple[int, Tensor]]:
    """Each expert that was chosen, in order, and its pairs (token * K + k), in order."""
    ids, order = chosen.flatten().sort(stable=True)
    hit, counts = ids.unique_consecutive(return_counts=True)
    for expert, pairs in zip(hit.tolist(), order.split(counts.tolist()), strict=True):
        if 0 <= expert < experts:
            yield expert, pairs


def experts_torch(
    x: Tensor,
    gate_up: Stack,
    down: Stack,
    weights: Tensor,
    chosen: Tensor,
    *,
    rows: str | None = None,
    **options: Unpack[Options],
) -> Tensor:
    """experts_ref by torch's own products; on a GPU the host waits for nothing, so that a graph can hold it."""
    if not x.is_cuda or len(x) == 0:
        return experts_ref(x, gate_up, down, weights, chosen, **options)
    gate_up, down = _plain(gate_up, x.dtype), _plain(down, x.dtype)  # quantized ones: slow, but right
    run = experts_grouped if has_grouped_mm(x.device, x.dtype, (x.shape[1], down.shape[2])) else experts_one_by_one
    return run(x, gate_up, down, weights, chosen, **options)


@cache
def has_grouped_mm(device: torch.device, dtype: torch.dtype, widths: tuple[int, ...]) -> bool:
    """Whether torch multiplies groups of rows without a look at their sizes on the host, for rows of these widths."""
    if device.type != "cuda" or dtype != torch.bfloat16 or any(width % 8 for width in widths):
        return False
    return torch.version.hip is None and torch.cuda.get_device_capability(device)[0] in (9, 10)


def experts_grouped(
    x: Tensor, gate_up: Tensor, down: Tensor, weights: Tensor, chosen: Tensor, **options: Unpack[Options]
) -> Tensor:
    """experts_ref with the pairs of token and expert sorted by expert, and one product over all groups."""
    activation, gate_up_bias, down_bias = check_experts(x, gate_up, down, weights, chosen, **options)
    (tokens, top_k), experts = chosen.shape, len(gate_up)
    real = (chosen >= 0) & (chosen < experts)
    ids, order = chosen.masked_fill(~real, experts).flatten().sort(stable=True)
    ends = torch.searchsorted(ids, torch.arange(experts, device=x.device, dtype=ids.dtype), right=True, out_int32=True)
    expert = ids.clamp(max=experts - 1)
    h = _grouped_linear(x[order // top_k], gate_up, gate_up_bias, ends, expert)
    y = _grouped_linear(activation(h), down, down_bias, ends, expert)
    pairs = torch.empty_like(y).index_copy_(0, order, y).view(tokens, top_k, x.shape[1])
    total = (pairs.float() * weights[:, :, None]).masked_fill(~real[:, :, None], 0.0).sum(dim=1)
    return _added(total.to(x.dtype), options)


def _grouped_linear(x: Tensor, weight: Tensor, bias: Tensor | None, ends: Tensor, expert: Tensor) -> Tensor:
    """Rows up to ends[e] that no expert before it has times the weight of expert e; the rest is left as it was."""
    y: Tensor = F.grouped_mm(x, weight.transpose(1, 2), offs=ends)
    return y if bias is None else y + bias[expert]


def experts_one_by_one(
    x: Tensor, gate_up: Tensor, down: Tensor, weights: Tensor, chosen: Tensor, **options: Unpack[Options]
) -> Tensor:
    """experts_ref where there is no grouped product: every pair by itself, or every token through every expert.

    Which of the two is decided by what takes fewer products; neither waits for the device.
    """
    activation, gate_up_bias, down_bias = check_experts(x, gate_up, down, weights, chosen, **options)
    experts, top_k = len(gate_up), chosen.shape[1]
    total = torch.zeros(x.shape, dtype=torch.float32, device=x.device)

    def answer(rows: Tensor, pick: Callable[[Tensor], Tensor]) -> Tensor:
        """What the expert that is picked of each stack says of the rows, in fp32."""
        biases = [None if b is None else pick(b) for b in (gate_up_bias, down_bias)]
        return F.linear(activation(F.linear(rows, pick(gate_up), biases[0])), pick(down), biases[1]).float()

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
    return _added(total.to(x.dtype), options)


def _one_of(stack: Tensor, at: Tensor) -> Tensor:
    """stack[at] for an index on the device, which is not waited for."""
    return stack.index_select(0, at)[0]


def prefers_few(tokens: int, top_k: int, experts: int) -> bool:
    """Whether the kernels of few tokens are used.

    They read an expert once for each pair, the others once for each tile. On an H200, of Qwen3-30B-A3B's 128 experts, 8
    for a token, 8 tokens take 122 us by the one and 128 by the other, 16 tokens 215 and 187; of Mixtral's 8 experts, 2
    for a token, one token takes 162 and 195 us, 8 tokens 861 and 575.
    """
    return tokens == 1 or 2 * tokens * top_k <= experts


def prefers_rounded(tokens: int, top_k: int, experts: int) -> bool:
    """Whether rows are rounded where they may be: products take longer than reading weights. Not measured yet."""
    return tokens * top_k > ROUNDED_ROWS * experts


def experts_triton(
    x: Tensor,
    gate_up: Stack,
    down: Stack,
    weights: Tensor,
    chosen: Tensor,
    *,
    rows: str | None = None,
    **options: Unpack[Options],
) -> Tensor:
    """experts_ref by our kernels: those of few tokens or those of many."""
    _check_layout(x, gate_up, down, weights, chosen, **options)
    if min(x.numel(), chosen.numel(), *stack_shape(down)) == 0:
        return _added(torch.zeros_like(x), options)
    sizes = len(chosen), chosen.shape[1], stack_shape(gate_up)[0]
    few = prefers_few(*sizes)
    if few and isinstance(gate_up, Tensor) and isinstance(down, Tensor):
        return experts_few(x, gate_up, down, weights, chosen, **options)
    if few and isinstance(gate_up, Packed) and isinstance(down, Packed) and takes_few_packed(gate_up, down):
        return experts_few_packed(x, gate_up, down, weights, chosen, **options)
    many = prefers_rounded(*sizes) and takes_rounded(rows, gate_up, down)
    return experts_many(x, gate_up, down, weights, chosen, rows=rows if many else None, **options)


def experts_invariant(
    x: Tensor,
    gate_up: Stack,
    down: Stack,
    weights: Tensor,
    chosen: Tensor,
    *,
    rows: str | None = None,
    **options: Unpack[Options],
) -> Tensor:
    """experts_ref, each token bit for bit as if it were alone: on a GPU the kernels of many tokens with fixed tiles."""
    if not (HAS_TRITON and x.is_cuda):
        return experts_ref(x, gate_up, down, weights, chosen, invariant=True, **options)
    return experts_invariant_triton(x, gate_up, down, weights, chosen, **options)


def experts_invariant_triton(
    x: Tensor,
    gate_up: Stack,
    down: Stack,
    weights: Tensor,
    chosen: Tensor,
    *,
    rows: str | None = None,
    **options: Unpack[Options],
) -> Tensor:
    """experts_invariant by Triton."""
    _check_layout(x, gate_up, down, weights, chosen, **options)
    if min(x.numel(), chosen.numel(), *stack_shape(down)) == 0:
        return _added(torch.zeros_like(x), options)
    return experts_many(x, gate_up, down, weights, chosen, tiles=fixed_tiles(x.dtype), **options)


def _check_layout(
    x: Tensor, gate_up: Stack, down: Stack, weights: Tensor, chosen: Tensor, **options: Unpack[Options]
) -> None:
    """What the kernels rely on beyond what all do."""
    _, *biases = check_experts(x, gate_up, down, weights, chosen, **options)
    rows = (x, *_tensors(gate_up), *_tensors(down), options.get("add"), options.get("out"))
    assert all(t is None or t.shape[-1] == 1 or t.stride(-1) == 1 for t in rows), "rows must be contiguous"
    assert all(t is None or t.is_contiguous() for t in (weights, chosen, *biases)), "must be contiguous"


def _tensors(stack: Stack) -> tuple[Tensor | None, ...]:
    """What a stack consists of."""
    return (stack.values, stack.scale, stack.zero) if isinstance(stack, Packed) else (stack,)
