"""How models are cut over ranks: every tensor is covered, and the ranks' results add up to the model's."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PhiConfig, PhiForCausalLM

from outpace.errors import ConfigError, ModelError, NotSupported
from outpace.inject.plan import PlannedLayer, make_plan
from outpace.inject.policies import by_class
from outpace.inject.policies.llama import QWEN3
from outpace.inject.split import split_model
from outpace.parallel.spans import Split
from tests.models import tiny
from tests.parallel import own_models
from tests.sharded_models import NAMES, make

RANKS = (2, 3, 4)
PLANNED = [name for name in NAMES if name != "hugging face's plan"]


def part(tensor: Tensor, split: Split | None, rank: int) -> Tensor:
    """What a rank holds of a tensor."""
    if split is None:
        return tensor
    pieces = [tensor.narrow(split.dim, start, stop - start) for start, stop in split.spans[rank]]
    return torch.cat(pieces, split.dim)


@pytest.fixture(params=NAMES)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_every_index_is_held_and_only_key_heads_twice(name: str) -> None:
    model = make(name)
    for ranks in (2,) if name == "hugging face's plan" else RANKS:
        splits = split_model(model, ranks)
        assert splits.keys() == model.state_dict().keys()
        for path, split in splits.items():
            if split is None:
                continue
            size = model.state_dict()[path].shape[split.dim]
            held = [n for spans in split.spans for start, stop in spans for n in range(start, stop)]
            assert len(split.spans) == ranks
            assert set(held) == set(range(size)), path
            assert len(held) == size or any(
                word in path for word in ("k_proj", "v_proj", "qkv", "query_key_value", "c_attn")
            )
        cut = sum(split is not None for split in splits.values())
        assert cut >= 4 * 2, "qkv, out, up and down of two layers"


def test_an_even_split_is_what_torch_gives() -> None:
    model = tiny("llama")
    splits = split_model(model, 2)
    for path, dim in {"q_proj": 0, "k_proj": 0, "v_proj": 0, "o_proj": 1}.items():
        full = f"model.layers.1.self_attn.{path}.weight"
        for rank, chunk in enumerate(model.state_dict()[full].chunk(2, dim)):
            assert torch.equal(part(model.state_dict()[full], splits[full], rank), chunk)
    whole = {path for path, split in splits.items() if split is None}
    assert whole == {path for path in splits if "norm" in path}


def heads_of(weight: Tensor, layout: str, item: PlannedLayer, num_heads: int, num_kv_heads: int) -> list[Tensor]:
    """q, k, v [heads, D, H] of a fused weight, whole or a part, written from the definition of the layout."""
    size, group = item.settings.head_dim, num_heads // num_kv_heads
    if layout == "rows":
        return list(weight.view(-1, size, weight.shape[1]).split([num_heads, num_kv_heads, num_kv_heads]))
    if layout == "heads":
        return list(weight.view(num_heads, 3, size, -1).unbind(1))
    if layout == "groups":
        groups = weight.view(num_kv_heads, group + 2, size, -1)
        return [groups[:, :group].flatten(0, 1), groups[:, group], groups[:, group + 1]]
    quarters = 4 * num_heads // item.settings.num_heads
    query, value, key = weight.view(quarters, 3, num_heads // quarters, size, -1).unbind(1)
    return [query.flatten(0, 1), key.flatten(0, 1), value.flatten(0, 1)]


def attention(held: Mapping[str, Tensor], item: PlannedLayer, x: Tensor) -> Tensor:
    """Attention with the heads that these tensors have, and their part of the output projection."""
    policy, settings = item.policy, item.settings

    def weight(path: str) -> Tensor:
        found = held[f"{item.path}.{path}.weight"]
        return found.t() if policy.transposed else found

    num_heads = weight(policy.out).shape[1] // settings.head_dim
    if isinstance(policy.qkv, str):
        fused = weight(policy.qkv).contiguous()
        num_kv_heads = (fused.shape[0] // settings.head_dim - num_heads) // 2
        parts = heads_of(fused, policy.qkv_layout, item, num_heads, num_kv_heads)
    else:
        parts = [weight(path).unflatten(0, (-1, settings.head_dim)) for path in policy.qkv]
    query, key, value = (torch.einsum("th,ndh->ntd", x, heads) for heads in parts)
    found = F.scaled_dot_product_attention(query[None], key[None], value[None], is_causal=True, enable_gqa=True)[0]
    return found.transpose(0, 1).flatten(1) @ weight(policy.out).t()


def feed_forward(held: Mapping[str, Tensor], item: PlannedLayer, x: Tensor) -> Tensor:
    """The MLP with the columns that these tensors have."""
    policy = item.policy

    def linear(path: str, x: Tensor) -> Tensor:
        weight = held[f"{item.path}.{path}.weight"]
        bias = held.get(f"{item.path}.{path}.bias") if path != policy.down else None
        return F.linear(x, weight.t() if policy.transposed else weight, bias)

    assert policy.up is not None
    assert policy.down is not None
    ups = [linear(path, x) for path in ((policy.up,) if isinstance(policy.up, str) else policy.up)]
    gate, up = ups if len(ups) == 2 else ups[0].chunk(2, -1) if policy.gated else (ups[0], torch.ones_like(ups[0]))
    return linear(policy.down, F.silu(gate) * up)


def experts(held: Mapping[str, Tensor], item: PlannedLayer, x: Tensor, rank: int) -> Tensor:
    """The model's own MLP with these tensors; biases behind the sum of all ranks belong to the first."""
    assert item.policy.moe is not None
    block = item.policy.moe.block
    mlp: Any = item.layer.get_submodule(block)
    mine = {path: held[f"{item.path}.{block}.{path}"] for path, _ in mlp.named_parameters()}
    mine = {path: value * (rank == 0) if path.endswith("down_proj_bias") else value for path, value in mine.items()}
    found = torch.func.functional_call(mlp, mine, (x[None],))
    return (found[0] if isinstance(found, tuple) else found)[0]


@pytest.mark.parametrize("name", PLANNED)
def test_results_of_the_ranks_add_up_to_the_model_s(name: str) -> None:
    model = make(name).float()
    if any(item.policy.moe for item in make_plan(model, by_class()).layers):
        model.set_experts_implementation("eager")
    tensors = {path: value.detach() for path, value in model.state_dict().items()}
    x = torch.randn(6, make_plan(model, by_class()).config.hidden_size, generator=torch.Generator().manual_seed(0))
    for ranks in RANKS:
        splits = split_model(model, ranks)
        held = [{path: part(value, splits[path], rank) for path, value in tensors.items()} for rank in range(ranks)]
        for item in make_plan(model, by_class()).layers:
            if item.policy.qkv_layout != "quarters" or 4 % ranks == 0:
                same(attention(tensors, item, x), [attention(mine, item, x) for mine in held])
            if item.policy.moe is None:
                same(feed_forward(tensors, item, x), [feed_forward(mine, item, x) for mine in held])
            else:
                with torch.no_grad():
                    found = [experts(mine, item, x, rank) for rank, mine in enumerate(held)]
                    same(experts(tensors, item, x, 0), found)


def same(whole: Tensor, parts: list[Tensor]) -> None:
    total = torch.stack(parts).sum(0)
    assert (whole - total).abs().max() <= 1e-5 * max(1.0, whole.abs().max().item())


def test_a_skeleton_is_split_as_the_model_is(name: str) -> None:
    model = make(name)
    with torch.device("meta"):
        skeleton = type(model)(model.config)
    assert split_model(skeleton, 2) == split_model(model, 2)


def test_sinks_follow_their_heads() -> None:
    splits = split_model(make("gpt-oss"), 2)
    assert splits["model.layers.0.self_attn.sinks"] == Split(0, (((0, 2),), ((2, 4),)))
    assert splits["model.layers.0.mlp.experts.gate_up_proj"] == Split(2, (((0, 48),), ((48, 96),)))
    assert splits["model.layers.0.mlp.experts.down_proj_bias"] is None


def test_one_rank_holds_everything_of_any_model() -> None:
    for model in (tiny("t5"), nn.Linear(2, 2)):
        assert set(split_model(model, 1).values()) == {None}


def test_norms_with_weights_for_every_head() -> None:
    policies = {"Olmo2DecoderLayer": replace(QWEN3, attn_norm="post_attention_layernorm")}
    with pytest.raises(NotSupported, match=r"q_norm is a norm with 32 values and 8 a head"):
        split_model(make("hugging face's plan"), 2, policies)
    over_all = {name: replace(policy, qk_norm_over="all") for name, policy in policies.items()}
    halves = Split(0, (((0, 16),), ((16, 32),)))
    assert split_model(make("hugging face's plan"), 2, over_all)["model.layers.0.self_attn.q_norm.weight"] == halves
    per_head = PhiForCausalLM(
        PhiConfig(vocab_size=97, hidden_size=32, num_hidden_layers=1, num_attention_heads=4, qk_layernorm=True)
    )
    assert split_model(per_head, 2)["model.layers.0.self_attn.q_layernorm.weight"] is None


class Odd(nn.Module):
    """An MLP that no rule knows."""

    def __init__(self) -> None:
        super().__init__()
        self.mystery = nn.Linear(4, 4)


def _mystery() -> Any:
    model = tiny("mixtral")
    model.model.layers[1].mlp.odd = Odd()
    return model


def _wrong_head() -> Any:
    model = tiny("llama")
    model.model.layers[0].self_attn.q_proj = nn.Linear(32, 40)
    return model


REFUSED: Mapping[str, tuple[Any, int, type[Exception], str]] = {
    "no rank": (lambda: tiny("llama"), 0, ConfigError, "at least one rank, got 0"),
    "more ranks than heads": (lambda: tiny("llama"), 5, NotSupported, "4 attention heads .* over 5 ranks"),
    "t5": (lambda: tiny("t5"), 2, NotSupported, "T5ForConditionalGeneration is split over 2 ranks: Outpace has no"),
    "a plain module": (lambda: nn.Linear(4, 4), 2, NotSupported, "how Linear is split over 2 ranks"),
    "heads that Hugging Face's plan cannot split": (
        lambda: own_models.make("ernie"), 3, NotSupported, "num_attention_heads=4 of Ernie4_5ForCausalLM .* by 3 ranks",
    ),
    "a part of an MLP that no rule knows": (
        _mystery, 2, NotSupported, r"how model\.layers\.1\.mlp\.odd\.mystery\.weight is split",
    ),
    "rows that are not the heads'": (_wrong_head, 2, ModelError, r"q_proj\.weight has size 40"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_split_is_refused(case: str) -> None:
    model, ranks, kind, words = REFUSED[case]
    with pytest.raises(kind, match=words):
        split_model(model(), ranks)
