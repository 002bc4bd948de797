"""Routing and experts for the table of kernels: ours, torch's grouped product and Hugging Face's beside the same limit.

The limit is the time to read the experts that were touched, or that of the products, whichever is longer. Every run of
a graph has other tokens and so other experts, so that weights come from memory and not from the L2 cache.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from outpace.kernels.experts import experts_grouped, experts_invariant
from outpace.kernels.experts_few import experts_few
from outpace.kernels.experts_many import experts_many
from outpace.kernels.routing import Routing, route_ref, route_triton

TURNS = 8  # other tokens each
FEW_PAIRS = 256  # more are nothing for the kernels of few tokens
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 512, 2048, 8192)


@dataclass(frozen=True)
class MoE:
    """The sizes of a model that routing and experts see."""

    name: str
    family: str
    routing: Routing
    experts: int
    hidden: int
    inner: int


MODELS = (
    MoE("mixtral-8x7b", "Mixtral", Routing(top_k=2, renormalise=True), 8, 4096, 14336),
    MoE("qwen3-30b-a3b", "Qwen3Moe", Routing(top_k=8, renormalise=True), 128, 2048, 768),
)


@dataclass(frozen=True)
class Row:
    """One implementation at one number of tokens, and the least that it has to do."""

    kernel: str
    what: str
    runs: Sequence[Callable[[], object]]
    amount: float
    """Bytes or operations."""
    limit: str


def hugging_face(model: MoE, gate_up: Tensor, down: Tensor) -> Callable[..., Tensor]:
    """Hugging Face's own module with these weights, by its grouped product."""
    import transformers

    sizes = {"hidden_size": model.hidden, "num_local_experts": model.experts, "num_experts": model.experts}
    widths = {"intermediate_size": model.inner, "moe_intermediate_size": model.inner}
    config = getattr(transformers, f"{model.family}Config")(**sizes, **widths)
    config._experts_implementation = "grouped_mm"
    kind = config.model_type
    file = __import__(f"transformers.models.{kind}.modeling_{kind}", fromlist=["experts"])
    with torch.device("meta"):
        module = getattr(file, f"{model.family}Experts")(config)
    module.load_state_dict({"gate_up_proj": gate_up, "down_proj": down}, assign=True)
    module.requires_grad_(False)

    def run(x: Tensor, gate_up: Tensor, down: Tensor, weights: Tensor, chosen: Tensor, *, act: str) -> Tensor:
        return module(x, chosen, weights)

    return run


def cases(model: MoE, rates: Mapping[str, float], batches: Sequence[int] = BATCHES) -> Iterator[Row]:
    """Routing of many tokens, and experts of every number of tokens."""
    yield from _routing(model)
    make = partial(torch.randn, device="cuda", dtype=torch.bfloat16)
    gate_up = make(model.experts, 2 * model.inner, model.hidden) / model.hidden**0.5
    down = make(model.experts, model.hidden, model.inner) / model.inner**0.5
    runs: dict[str, Callable[..., Tensor]] = {
        "experts few": experts_few,
        "experts many": experts_many,
        "experts invariant": experts_invariant,
        "experts torch": experts_grouped,
        "experts Hugging Face": hugging_face(model, gate_up, down),
    }
    for tokens in batches:
        turns = [make(tokens, model.hidden) for _ in range(TURNS if tokens <= 512 else 2)]
        routed = [route_ref(make(tokens, model.experts), model.routing) for _ in turns]
        amount, limit = least(model, tokens, routed, rates)
        for name, run in runs.items():
            if name == "experts few" and tokens * model.routing.top_k > FEW_PAIRS:
                continue
            calls = [
                partial(run, x, gate_up, down, weights, chosen, act="silu")
                for x, (weights, chosen) in zip(turns, routed, strict=True)
            ]
            yield Row(name, f"{tokens} tokens", calls, amount, limit)


def least(
    model: MoE, tokens: int, routed: Any, rates: Mapping[str, float], expert_bytes: float | None = None
) -> tuple[float, str]:
    """Bytes of the experts that a run touches on average, or its operations: what takes longer, and which it is.

    expert_bytes: of one expert; None: in 16 bits.
    """
    touched = sum(len(chosen.unique()) for _, chosen in routed) / len(routed)
    weights = 3.0 * model.inner * model.hidden
    moved = touched * (2 * weights if expert_bytes is None else expert_bytes)
    operations = 2.0 * tokens * model.routing.top_k * weights
    return (moved, "read") if moved / rates["read"] > operations / rates["product"] else (operations, "product")


def _routing(model: MoE) -> Iterator[Row]:
    for tokens in (1, 8192):
        logits = [torch.randn(tokens, model.experts, device="cuda", dtype=torch.bfloat16) for _ in range(TURNS)]
        moved = tokens * (2.0 * model.experts + 8.0 * model.routing.top_k)
        for name, route in (("route", route_triton), ("route torch", route_ref)):
            yield Row(name, f"{tokens} tokens", [partial(route, x, model.routing) for x in logits], moved, "copy")
