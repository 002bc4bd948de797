"""Mixtures that no policy knows: people's own, and DeepSpeed's MoE layers."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH, INNER, EXPERTS = 24, 40, 5
Act = Callable[[Tensor], Tensor]


class Gated(nn.Module):
    """As Mixtral's experts were."""

    def __init__(self, width: int = WIDTH, act: Act = F.silu) -> None:
        super().__init__()
        self.w1 = nn.Linear(width, INNER, bias=False)
        self.w2 = nn.Linear(INNER, width, bias=False)
        self.w3 = nn.Linear(width, INNER, bias=False)
        self.act = act

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.w2(self.act(self.w1(x)) * self.w3(x))
        return result


class Plain(nn.Module):
    """As Megatron's MLP."""

    def __init__(self, width: int = WIDTH, act: Act = F.gelu) -> None:
        super().__init__()
        self.dense_h_to_4h, self.dense_4h_to_h = nn.Linear(width, INNER), nn.Linear(INNER, width)
        self.act = act

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.dense_4h_to_h(self.act(self.dense_h_to_4h(x)))
        return result


class Packed(nn.Module):
    """Gate and up in one linear."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.net = nn.ModuleDict({"in": nn.Linear(width, 2 * INNER, bias=False), "out": nn.Linear(INNER, width)})

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.net["in"](x).chunk(2, dim=-1)
        result: Tensor = self.net["out"](F.relu(gate) * up)
        return result


def routed(x: Tensor, logits: Tensor, experts: nn.ModuleList, top_k: int, score: str, renormalise: bool) -> Tensor:
    """[T, H]: the sum of the best experts, one token after the other."""
    scores = logits.float().softmax(-1) if score == "softmax" else logits.float().sigmoid()
    rows = []
    for token, values in zip(x, scores, strict=True):
        weights, chosen = values.topk(top_k)
        weights = weights / weights.sum() if renormalise else weights
        pairs = zip(weights, chosen.tolist(), strict=True)
        rows.append(torch.stack([weight * experts[number](token[None])[0] for weight, number in pairs]).sum(0))
    return torch.stack(rows).to(x.dtype)


class Mine(nn.Module):
    """Somebody's own mixture."""

    def __init__(
        self, kind: Any = Gated, top_k: int = 2, score: str = "softmax", renormalise: bool = True, logits: int = 0,
        width: int = WIDTH, bias: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        self.experts = nn.ModuleList(kind(width) for _ in range(EXPERTS))
        self.router = nn.Linear(width, EXPERTS, bias=bias)
        self.how = top_k, score, renormalise
        self.logits = logits

    def forward(self, hidden: Tensor) -> Any:
        rows = hidden.reshape(-1, hidden.shape[-1])
        logits = self.router(rows)
        result = routed(rows, logits, self.experts, *self.how).view(hidden.shape)
        if self.logits:
            return result, logits.view(*hidden.shape[:-1], -1) if self.logits == 3 else logits
        return result


class TopKGate(nn.Module):
    def __init__(self, k: int) -> None:
        super().__init__()
        self.wg, self.k = nn.Linear(WIDTH, EXPERTS, bias=False), k


class Experts(nn.Module):
    def __init__(self, kind: Any) -> None:
        super().__init__()
        self.deepspeed_experts = nn.ModuleList(kind() for _ in range(EXPERTS))


class MOELayer(nn.Module):
    def __init__(self, k: int, kind: Any) -> None:
        super().__init__()
        self.gate, self.experts = TopKGate(k), Experts(kind)


class MoE(nn.Module):
    """`deepspeed.moe.layer.MoE` with the names that it has there; nothing is dropped."""

    def __init__(self, k: int = 1, use_residual: bool = False, kind: Any = Plain) -> None:
        super().__init__()
        self.use_residual, self.deepspeed_moe = use_residual, MOELayer(k, kind)
        if use_residual:
            self.mlp, self.coefficient = kind(), nn.Linear(WIDTH, 2)

    def forward(self, hidden_states: Tensor, used_token: Tensor | None = None) -> Any:
        gate, rows = self.deepspeed_moe.gate, hidden_states.reshape(-1, WIDTH)
        logits = gate.wg.float()(rows.float())
        experts = self.deepspeed_moe.experts.deepspeed_experts
        result = routed(rows, logits, experts, gate.k, "softmax", gate.k > 1).view(hidden_states.shape)
        if self.use_residual:
            shares = self.coefficient(hidden_states).softmax(-1)
            result = result * shares[..., :1] + self.mlp(hidden_states) * shares[..., 1:]
        return result, torch.tensor(0.5), logits.topk(gate.k).indices.flatten().bincount(minlength=EXPERTS)


class Net(nn.Module):
    """A model of two mixtures."""

    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.blocks, self.head = nn.ModuleList(blocks), nn.Linear(WIDTH, 7)

    def forward(self, x: Tensor) -> Any:
        beside: list[Any] = []
        for block in self.blocks:
            result = block(x)
            result, *rest = result if isinstance(result, tuple) else (result,)
            x, beside = x + result, [*beside, rest]
        return self.head(x), beside


def net(make: Callable[[], nn.Module]) -> Net:
    torch.manual_seed(0)
    return Net(make(), make()).eval()


def inputs() -> Tensor:
    return torch.randn(3, 9, WIDTH, generator=torch.Generator().manual_seed(1))
