"""Routing: what Hugging Face's routers choose, and what must hold of every choice."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from outpace.kernels.routing import Routing, route_torch, route_triton
from tests.kernels.buffers import random_rows
from tests.kernels.tolerances import DTYPES, assert_close, assert_equal, on_gpu

# numpy's words on what a GPU does in silence, in lanes that are not kept
pytestmark = pytest.mark.filterwarnings("ignore:(divide by zero|invalid|overflow|All-NaN).* encountered:RuntimeWarning")

Route = Callable[..., tuple[Tensor, Tensor]]
BOTH = pytest.mark.parametrize("route", [route_torch, route_triton])
NAN, INF = float("nan"), float("inf")
ROUTINGS = [
    Routing(top_k=1),
    Routing(top_k=2, renormalise=True),
    Routing(top_k=8),
    Routing(top_k=8, renormalise=True, scale=2.5),
    Routing(top_k=4, score="chosen"),
    Routing(top_k=2, score="mixer", jitter=0.01),
    Routing(top_k=3, score="mixer", jitter=0.1),
    Routing(top_k=6, groups=4, kept_groups=2, scale=16.0),
    Routing(top_k=5, score="sigmoid", groups=8, kept_groups=3, group_score="two", renormalise=True, epsilon=1e-20),
    Routing(top_k=4, score="sigmoid", groups=4, kept_groups=4, group_score="two"),
]


def hf_router(name: str, **config: Any) -> tuple[Any, Routing, Tensor | None]:
    """A router of Hugging Face, the same as data, and its bias."""
    import transformers

    small = {
        "hidden_size": 24,
        "num_attention_heads": 2,
        "num_experts_per_tok": 3,
        "num_local_experts": 16,
        "num_experts": 16,
        **config,
    }
    made = getattr(transformers, f"{name}Config")(**small)
    module = __import__(f"transformers.models.{made.model_type}.modeling_{made.model_type}", fromlist=["x"])
    router = next(getattr(module, name + end) for end in ("TopKRouter", "TopkRouter") if end in "".join(dir(module)))(
        made
    ).float()
    for parameter in router.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    bias = getattr(router, "e_score_correction_bias", None)
    if bias is not None:
        bias.data.uniform_(-0.5, 0.5)
    return router.eval(), HF[name][1], bias


V2 = {"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2, "n_routed_experts": 16}
V3 = {"n_group": 4, "topk_group": 2, "n_routed_experts": 16}
HF: dict[str, tuple[dict[str, Any], Routing]] = {
    "Mixtral": ({}, Routing(top_k=3, renormalise=True)),
    "Qwen3Moe": ({"norm_topk_prob": True}, Routing(top_k=3, renormalise=True)),
    "Olmoe": ({}, Routing(top_k=3)),
    "GptOss": ({}, Routing(top_k=3, score="chosen")),
    "Phimoe": ({"num_experts_per_tok": 2, "router_jitter_noise": 0.2}, Routing(top_k=2, score="mixer", jitter=0.2)),
    "DeepseekV2": ({**V2, "routed_scaling_factor": 3.0}, Routing(top_k=3, groups=4, kept_groups=2, scale=3.0)),
    "DeepseekV3": (
        {**V3, "routed_scaling_factor": 2.5, "norm_topk_prob": True},
        Routing(
            top_k=3,
            score="sigmoid",
            renormalise=True,
            epsilon=1e-20,
            scale=2.5,
            groups=4,
            kept_groups=2,
            group_score="two",
        ),
    ),
}


@pytest.mark.parametrize("name", HF)
def test_as_hugging_face(name: str) -> None:
    router, routing, bias = hf_router(name, **HF[name][0])
    x = torch.randn(50, 24)
    with torch.no_grad():
        logits, weights, experts = router(x)
        got_weights, got_experts = route_torch(logits, routing, bias)
    order = weights.argsort(dim=1, descending=True)  # DeepSeek's come in any order
    got = got_weights.argsort(dim=1, descending=True)
    if name == "Phimoe":
        order = got = torch.arange(2).expand(50, 2)
    assert_equal(got_experts.gather(1, got).long(), experts.gather(1, order))
    assert_close(got_weights.gather(1, got), weights.gather(1, order))
    assert (got_weights.dtype, got_experts.dtype) == (torch.float32, torch.int32)


def choices(logits: Tensor, routing: Routing, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Weights and experts of every row from the definition, by plain Python, and what experts are compared by."""
    scores = logits.double()
    scores = {"softmax": lambda x: x.softmax(1), "sigmoid": torch.sigmoid}.get(routing.score, lambda x: x)(scores)
    choice = scores if bias is None else scores + bias.double()
    size = logits.shape[1] // routing.groups
    all_weights, all_experts = [], []
    for row, raw in zip(choice.tolist(), scores.tolist(), strict=True):
        groups = [sorted(row[g * size : (g + 1) * size], reverse=True) for g in range(routing.groups)]
        worth = [sum(group[:2]) if routing.group_score == "two" else group[0] for group in groups]
        kept = sorted(range(routing.groups), key=lambda g: -worth[g])[: routing.kept_groups]
        allowed = [e for e in range(len(row)) if e // size in kept]
        best = sorted(allowed, key=lambda e: -row[e])[: routing.top_k]
        weights = torch.tensor([raw[e] for e in best])
        if routing.score == "chosen":
            weights = weights.softmax(0)
        if routing.renormalise:
            weights = weights / (weights.sum() + routing.epsilon)
        all_weights.append(weights * routing.scale)
        all_experts.append(best)
    return torch.stack(all_weights).float().cpu(), torch.tensor(all_experts, dtype=torch.int32), choice.cpu()


@BOTH
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("routing", [r for r in ROUTINGS if r.score != "mixer"], ids=str)
def test_by_the_definition(route: Route, routing: Routing, dtype: torch.dtype, device: torch.device) -> None:
    logits = random_rows((9, 32), dtype, device)
    for bias in (None, torch.randn(32, device=device)):
        weights, experts = (t.cpu() for t in route(logits, routing, bias))
        want_weights, want_experts, choice = choices(logits, routing, bias)
        # Rounding may change the order of experts that are nearly the same: rows with such a pair are left out.
        best = choice.sort(dim=1, descending=True).values
        clear = (best.diff(dim=1).abs() > 1e-5).all(dim=1) if bias is not None else torch.ones(9, dtype=torch.bool)
        assert_equal(experts[clear], want_experts[clear])
        assert_close(weights[clear], want_weights[clear])


@pytest.mark.parametrize("shape", [(1, 1), (2, 3), (7, 60), (9, 8), (3, 160), (2, 512)])
def test_the_kernel_against_the_reference(shape: tuple[int, int], device: torch.device) -> None:
    size = shape[1]
    for routing in ROUTINGS:
        limited = size % routing.groups == 0 and size // routing.groups > 1
        if not limited:
            routing = replace(routing, groups=1, kept_groups=1)
        routing = replace(routing, top_k=min(routing.top_k, max(1, size // 4)))
        logits = random_rows(shape, torch.float32, device)
        weights, experts = route_triton(logits, routing)
        want_weights, want_experts = route_torch(logits, routing)
        if routing.group_score == "max":
            assert_equal(experts, want_experts)
        same = (experts == want_experts).all(dim=1)
        assert same.float().mean() > 0.9 or len(same) < 10
        assert_close(weights[same], want_weights[same], roundings=4)


@BOTH
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(1, 4), st.sampled_from([1, 3, 8, 32, 128]), st.integers(1, 8), st.booleans(), st.integers(0, 2**31))
def test_every_token_has_k_different_experts(
    route: Route, device: torch.device, tokens: int, size: int, top_k: int, renormalise: bool, seed: int
) -> None:
    torch.manual_seed(seed)
    top_k = min(top_k, size)
    logits = torch.randint(-3, 4, (tokens, size), device=device).float()  # many ties
    score = ("softmax", "sigmoid")[seed % 2]
    counts = torch.ones(size, dtype=torch.int32, device=device)
    routing = Routing(top_k=top_k, score=score, renormalise=renormalise, scale=1.5)  # type: ignore[arg-type]
    weights, experts = route(logits, routing, counts=counts)
    assert all(len(set(row)) == top_k and min(row) >= 0 and max(row) < size for row in experts.tolist())
    assert (logits.gather(1, experts.long()).diff(dim=1) <= 0).all()  # best first
    assert_equal(counts, 1 + torch.bincount(experts.flatten(), minlength=size).int())
    if renormalise:
        assert_close(weights.sum(dim=1), torch.full((tokens,), 1.5, device=device))


@BOTH
def test_ties_go_to_the_smaller_index(route: Route, device: torch.device) -> None:
    zeros = torch.zeros(2, 9, device=device)
    zeros[:, ::2] = -0.0
    for score in ("softmax", "sigmoid", "chosen", "mixer"):
        _, experts = route(zeros, Routing(top_k=4, score=score))
        assert experts.tolist() == [[0, 1, 2, 3]] * 2


@BOTH
@pytest.mark.parametrize("routing", ROUTINGS, ids=str)
def test_garbage_chooses_experts_that_exist(route: Route, routing: Routing, device: torch.device) -> None:
    """And different ones. A NaN is chosen last."""
    rows = torch.randn(7, 32, device=device)
    rows[0], rows[1, 5], rows[2], rows[3], rows[4, 1], rows[5, ::2] = NAN, NAN, -INF, INF, INF, -INF
    alone = route(rows[6:], routing)
    weights, experts = route(rows, routing)
    assert all(len(set(row)) == routing.top_k and min(row) >= 0 and max(row) < 32 for row in experts.tolist())
    assert_equal(weights[6:], alone[0])
    if routing.score in ("sigmoid", "chosen"):
        assert 5 not in experts[1].tolist()


@BOTH
def test_padding_chooses_nothing_and_is_not_counted(route: Route, device: torch.device) -> None:
    logits, counts = torch.randn(4, 8, device=device), torch.zeros(8, dtype=torch.int32, device=device)
    slots = torch.tensor([5, -1, 0, -1], device=device)
    weights, experts = route(logits, Routing(top_k=2), slots=slots, counts=counts)
    plain = route(logits, Routing(top_k=2))
    assert_equal(experts[[0, 2]], plain[1][[0, 2]])
    assert_equal(weights[[0, 2]], plain[0][[0, 2]])
    assert (experts[[1, 3]] == -1).all()
    assert (weights[[1, 3]] == 0).all()
    assert counts.sum() == 4


@BOTH
@pytest.mark.parametrize("routing", ROUTINGS, ids=str)
def test_a_row_is_the_same_in_every_batch(route: Route, routing: Routing, device: torch.device) -> None:
    logits, bias = torch.randn(12, 32, device=device), torch.randn(32, device=device)
    weights, experts = route(logits, routing, bias)
    for part in (slice(0, 1), slice(3, 11), slice(11, 12)):
        some = route(logits[part].clone(), routing, bias)
        assert_equal(some[0], weights[part])
        assert_equal(some[1], experts[part])


@BOTH
def test_what_it_refuses(route: Route, device: torch.device) -> None:
    logits = torch.zeros(2, 8, device=device)
    for routing in (Routing(top_k=9), Routing(top_k=0), Routing(top_k=3, groups=4), Routing(top_k=1, groups=3)):
        with pytest.raises(AssertionError):
            route(logits, routing)
    assert route(logits[:0], Routing(top_k=2))[1].shape == (0, 2)


@on_gpu
@BOTH
def test_a_graph_holds_it(route: Route, device: torch.device) -> None:
    """Captured once, replayed for other logits and other padding."""
    for routing in (r for r in ROUTINGS if r.group_score == "max"):
        logits, slots = torch.randn(9, 32, device=device), torch.arange(9, device=device)
        counts = torch.zeros(32, dtype=torch.int32, device=device)
        for _ in range(2):
            route(logits, routing, slots=slots, counts=counts)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            weights, experts = route(logits, routing, slots=slots, counts=counts)
        logits.normal_()
        slots[4:] = -1
        counts.zero_()
        graph.replay()
        want_weights, want_experts = route_torch(logits, routing, slots=slots)
        assert_equal(experts, want_experts)
        assert_close(weights, want_weights, roundings=4)
        assert counts.sum() == 4 * routing.top_k
