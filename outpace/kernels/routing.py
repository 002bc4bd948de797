"""Which experts each token goes to, and with what weight: scores, group limits, the best k, their weights."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from outpace.kernels.invariant import bias_act_invariant


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
    """Of the mixer: an expert counts for a weight if it is at most 2 * jitter below the best, relatively."""


def route_ref(
    logits: Tensor,
    routing: Routing,
    bias: Tensor | None = None,
    *,
    slots: Tensor | None = None,
    counts: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Weights [T, K] float32 and experts [T, K] int32 of logits [T, E], best first; ties go to the smaller index.

    bias [E] counts for the choice and not for the weight. A NaN is chosen last. Rows with a negative slot (slots: [T])
    are padding: they choose expert -1 with weight 0. The tokens of each expert are added to counts (int32 [E]).
    """
    check_routing(logits, routing, bias, slots, counts)
    scores = _scores(logits.float(), routing)
    choice = scores if bias is None else scores + bias.float()
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
    """What every implementation relies on."""
    tokens, experts = logits.shape
    assert experts % routing.groups == 0, f"{experts} experts do not make {routing.groups} equal groups"
    allowed = experts // routing.groups * min(routing.kept_groups, routing.groups)
    assert 1 <= routing.top_k <= allowed, f"top_k {routing.top_k} of {allowed} experts"
    assert bias is None or bias.shape == (experts,)
    assert slots is None or slots.shape == (tokens,)
    assert counts is None or (counts.shape, counts.dtype) == ((experts,), torch.int32)


def _scores(logits: Tensor, routing: Routing) -> Tensor:
    """What experts are compared by, before any bias: fp32 [T, E]."""
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
