"""Routes tokens to experts: scores, group limits, the best k experts, and their weights."""
# mypy: disallow-untyped-decorators=False

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from outpace.kernels.invariant import bias_act_invariant
from outpace.kernels.launch_options import has_pdl, pdl_options
from outpace.kernels.triton_stub import tl, triton

LOWEST = tl.constexpr(-(2**31))  # a key below that of every float


@dataclass(frozen=True, slots=True, kw_only=True)
class Routing:
    """How a router turns logits into experts and weights."""

    top_k: int
    score: Literal["softmax", "sigmoid", "chosen", "mixer"] = "softmax"
    """softmax over all experts; sigmoid; softmax over the chosen ones alone; Phi-MoE's sparsemixer in eval mode."""
    renormalise: bool = False
    """The weights are divided by their sum + epsilon."""
    epsilon: float = 0.0
    scale: float = 1.0
    """The weights are multiplied by it, last."""
    groups: int = 1
    kept_groups: int = 1
    """Only experts of the best `kept_groups` of `groups` equal groups may be chosen."""
    group_score: Literal["max", "two"] = "max"
    """A group counts as much as its best expert, or as its two best together."""
    jitter: float = 0.0
    """For the mixer: an expert counts for a weight if it is at most 2 * jitter below the best, relatively."""


def route_torch(
    logits: Tensor,
    routing: Routing,
    bias: Tensor | None = None,
    *,
    slots: Tensor | None = None,
    counts: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Weights [T, K] float32 and experts [T, K] int32 of logits [T, E], best first; ties go to the smaller index.

    Where scores have the same order as logits, experts are compared by logits, since different logits may round to one
    score. bias [E] counts for the choice and not for the weight. A NaN is chosen last. Rows with a negative slot
    (slots: [T]) are padding: they choose expert -1 with weight 0. The tokens of each expert are added to counts (int32
    [E]).
    """
    check_routing(logits, routing, bias, slots, counts)
    scores = _scores(logits.float(), routing)
    choice = logits.float() if _by_logits(routing, bias) else scores if bias is None else scores + bias.float()
    choice = choice.nan_to_num(nan=float("-inf"), posinf=float("inf"), neginf=float("-inf"))
    if routing.kept_groups < routing.groups:
        choice = _limit_groups(choice, routing)
    chosen = choice.sort(dim=1, descending=True, stable=True).indices[:, : routing.top_k]
    weights = _mixer_weights(scores, chosen, routing) if routing.score == "mixer" else scores.gather(1, chosen)
    if routing.score == "chosen":
        weights = weights.softmax(dim=1)
    if routing.renormalise:
        weights = weights / (weights.sum(dim=1, keepdim=True) + routing.epsilon)
    weights, experts = weights * routing.scale, chosen.int()
    if slots is not None:
        padding = (slots < 0)[:, None]
        weights, experts = weights.masked_fill(padding, 0.0), experts.masked_fill(padding, -1)
    if counts is not None:
        real = (experts >= 0).int().flatten()
        counts.index_add_(0, experts.flatten().clamp(min=0), real)
    return weights, experts


def check_routing(
    logits: Tensor, routing: Routing, bias: Tensor | None, slots: Tensor | None, counts: Tensor | None
) -> None:
    """Assert what every implementation relies on."""
    tokens, experts = logits.shape
    assert experts % routing.groups == 0, f"{experts} experts do not make {routing.groups} equal groups"
    allowed = experts // routing.groups * min(routing.kept_groups, routing.groups)
    assert 1 <= routing.top_k <= allowed, f"top_k {routing.top_k} of {allowed} experts"
    assert bias is None or bias.shape == (experts,)
    assert slots is None or slots.shape == (tokens,)
    assert counts is None or (counts.shape, counts.dtype) == ((experts,), torch.int32)


def _by_logits(routing: Routing, bias: Tensor | None) -> bool:
    """Whether the order of the scores is all that the choice depends on."""
    return bias is None and (routing.kept_groups >= routing.groups or routing.group_score == "max")


def _scores(logits: Tensor, routing: Routing) -> Tensor:
    """The scores of experts, before any bias: fp32 [T, E]."""
    if routing.score == "softmax":
        return logits.softmax(dim=1)
    if routing.score == "sigmoid":  # on a CPU torch computes the last numbers of a tensor differently from the others
        return logits.sigmoid() if logits.is_cuda else bias_act_invariant(logits, None, "sigmoid")
    return logits


def _limit_groups(choice: Tensor, routing: Routing) -> Tensor:
    """-inf for experts outside the best groups."""
    grouped = choice.unflatten(1, (routing.groups, -1))  # [T, G, E / G]
    if routing.group_score == "two" and grouped.shape[2] > 1:
        worth = grouped.topk(2, dim=2).values.sum(dim=2)
        worth = worth.nan_to_num(nan=float("-inf"), posinf=float("inf"), neginf=float("-inf"))  # inf - inf
    else:
        worth = grouped.amax(dim=2)
    kept = worth.sort(dim=1, descending=True, stable=True).indices[:, : routing.kept_groups]
    allowed = torch.zeros_like(worth, dtype=torch.bool).scatter_(1, kept, True)
    return grouped.masked_fill(~allowed[:, :, None], float("-inf")).flatten(1)


def _mixer_weights(logits: Tensor, chosen: Tensor, routing: Routing) -> Tensor:
    """Each chosen expert's softmax among those not chosen before it that are near enough to it."""
    weights, left = [], logits
    for k in range(routing.top_k):
        at = chosen[:, k : k + 1]
        best = logits.gather(1, at)
        far = (best - logits) / logits.abs().maximum(best) > 2 * routing.jitter
        weights.append(left.masked_fill(far, float("-inf")).softmax(dim=1).gather(1, at))
        left = left.scatter(1, at, float("-inf"))
    return torch.cat(weights, dim=1)


@triton.jit
def _ordered(x: tl.tensor) -> tl.tensor:
    """int32 in the order of the floats; NaN is as low as -inf, and the two zeros are one."""
    x = tl.where(x != x, float("-inf"), tl.where(x == 0, 0.0, x))
    bits = x.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _score(x: tl.tensor, top: tl.tensor, total: tl.tensor, score: tl.constexpr) -> tl.tensor:
    """The scores of logits; top and total are the largest of the row and the sum of exp(x - top)."""
    if score == "softmax":
        x = tl.exp(x - top) / total
    elif score == "sigmoid":
        x = tl.sigmoid(x)
    return x


@triton.jit
def _choice(
    x: tl.tensor, bias_ptr: tl.tensor, lane: tl.tensor, inside: tl.tensor, top: tl.tensor, total: tl.tensor,
    score: tl.constexpr, by_logits: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """The keys by which the experts at these lanes are compared, ordered int32; LOWEST where there is no expert."""
    if not by_logits:
        x = _score(x, top, total, score)
        if bias_ptr is not None:
            x += tl.load(bias_ptr + lane, mask=inside, other=0.0).to(tl.float32)
    return tl.where(inside, _ordered(x), LOWEST)


@triton.jit
def _allowed_groups(keys: tl.tensor, kept: tl.constexpr, two: tl.constexpr, block_g: tl.constexpr) -> tl.tensor:
    """Which groups are among the best `kept`: int32 [G] of 0 and 1. keys: [G, S] of each group's experts."""
    best = tl.max(keys, axis=1)  # [G]
    if two:
        member = tl.arange(0, keys.shape[1])[None, :]
        at = tl.argmax(keys, axis=1)
        second = tl.max(tl.where(member == at[:, None], LOWEST, keys), axis=1)
        worth = _ordered(_float(best) + tl.where(second == LOWEST, 0.0, _float(second)))
        best = tl.where(best == LOWEST, LOWEST, worth)
    g = tl.arange(0, block_g)
    # A group's rank is the number of better ones: those of more worth, or of the same and before it.
    better = (best[None, :] > best[:, None]) | ((best[None, :] == best[:, None]) & (g[None, :] < g[:, None]))
    return (tl.sum(better.to(tl.int32), axis=1) < kept).to(tl.int32)


@triton.jit
def _float(key: tl.tensor) -> tl.tensor:
    """The float that _ordered made a key of."""
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _route_kernel(
    logits_ptr: tl.tensor,  # [T, E]
    bias_ptr: tl.tensor,  # [E] or None
    slots_ptr: tl.tensor,  # [T] or None
    counts_ptr: tl.tensor,  # int32 [E] or None
    weights_ptr: tl.tensor,  # fp32 [T, K]
    experts_ptr: tl.tensor,  # int32 [T, K]
    stride: tl.tensor, epsilon: tl.tensor, scale: tl.tensor, jitter: tl.tensor,
    experts: tl.constexpr, top_k: tl.constexpr, score: tl.constexpr, by_logits: tl.constexpr,
    renormalise: tl.constexpr, groups: tl.constexpr, kept_groups: tl.constexpr, two: tl.constexpr,
    pdl: tl.constexpr, block: tl.constexpr, block_k: tl.constexpr, block_g: tl.constexpr,
    block_s: tl.constexpr,
) -> None:  # fmt: skip
    if pdl:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * stride
    lane = tl.arange(0, block)
    inside = lane < experts
    x = tl.load(logits_ptr + lane, mask=inside, other=float("-inf")).to(tl.float32)
    top = tl.max(x, axis=0)
    total = tl.sum(tl.exp(x - top), axis=0)
    key = _choice(x, bias_ptr, lane, inside, top, total, score, by_logits)
    if kept_groups < groups:
        size: tl.constexpr = experts // groups
        g = tl.arange(0, block_g)[:, None]
        member = tl.arange(0, block_s)[None, :]
        there = (g < groups) & (member < size)
        at = g * size + member
        grouped = tl.load(logits_ptr + at, mask=there, other=float("-inf")).to(tl.float32)
        keys = _choice(grouped, bias_ptr, at, there, top, total, score, by_logits)
        allowed = _allowed_groups(keys, kept_groups, two, block_g)
        mine = (lane[:, None] // size == tl.arange(0, block_g)[None, :]) & (allowed[None, :] != 0)
        lowest = _ordered(tl.full([block], float("-inf"), tl.float32))
        key = tl.where(inside & (tl.sum(mine.to(tl.int32), axis=1) == 0), lowest, key)

    k = tl.arange(0, block_k)
    chosen = tl.zeros([block_k], tl.int32)
    weights = tl.zeros([block_k], tl.float32)
    for i in tl.static_range(top_k):
        at = tl.argmax(key, axis=0)  # the first of equal ones
        if score == "mixer":
            best = tl.sum(tl.where(lane == at, x, 0.0), axis=0)
            far = ((best - x) / tl.maximum(tl.abs(x), best) > 2 * jitter) | (key == LOWEST)
            near = tl.sum(tl.where(far, 0.0, tl.exp(x - best)), axis=0)
            weights = tl.where(k == i, 1.0 / near, weights)
        key = tl.where(lane == at, LOWEST, key)
        chosen = tl.where(k == i, at, chosen)
    real = k < top_k
    if score != "mixer":
        picked = tl.load(logits_ptr + chosen, mask=real, other=float("-inf")).to(tl.float32)
        if score == "chosen":
            picked = tl.exp(picked - tl.max(picked, axis=0))
            weights = picked / tl.sum(picked, axis=0)
        else:
            weights = tl.where(real, _score(picked, top, total, score), 0.0)
    if renormalise:
        weights = weights / (tl.sum(weights, axis=0) + epsilon)
    weights *= scale
    if slots_ptr is not None:
        padding = tl.load(slots_ptr + row) < 0
        weights = tl.where(padding, 0.0, weights)
        chosen = tl.where(padding, -1, chosen)
    tl.store(weights_ptr + row * top_k + k, weights, mask=real)
    tl.store(experts_ptr + row * top_k + k, chosen, mask=real)
    if counts_ptr is not None:
        tl.atomic_add(counts_ptr + chosen, 1, mask=real & (chosen >= 0), sem="relaxed")


def route_config(experts: int) -> dict[str, int]:
    """Warps of a row: one as long as it holds the row in registers. Not measured yet."""
    return {"num_warps": 1 if experts <= 256 else 2}


def route_triton(
    logits: Tensor,
    routing: Routing,
    bias: Tensor | None = None,
    *,
    slots: Tensor | None = None,
    counts: Tensor | None = None,
    config: Mapping[str, int] | None = None,
) -> tuple[Tensor, Tensor]:
    """route_torch in one kernel, a row for each program."""
    check_routing(logits, routing, bias, slots, counts)
    tokens, experts = logits.shape
    weights = torch.empty((tokens, routing.top_k), dtype=torch.float32, device=logits.device)
    chosen = torch.empty((tokens, routing.top_k), dtype=torch.int32, device=logits.device)
    if tokens == 0:
        return weights, chosen
    assert logits.stride(1) == 1 or experts == 1, "rows must be contiguous"
    assert all(t is None or t.is_contiguous() for t in (bias, slots, counts))
    _route_kernel[(tokens,)](
        *(logits, bias, slots, counts, weights, chosen, logits.stride(0)),
        *(routing.epsilon, routing.scale, routing.jitter),
        experts=experts,
        top_k=routing.top_k,
        score=routing.score,
        by_logits=_by_logits(routing, bias),
        renormalise=routing.renormalise,
        groups=routing.groups,
        kept_groups=routing.kept_groups,
        two=routing.group_score == "two",
        block=max(2, triton.next_power_of_2(experts)),
        block_k=max(2, triton.next_power_of_2(routing.top_k)),
        block_g=max(2, triton.next_power_of_2(routing.groups)),
        block_s=max(2, triton.next_power_of_2(experts // routing.groups)),
        **{**route_config(experts), **(config or {})},
        **pdl_options(has_pdl(logits.device)),
    )
    return weights, chosen
