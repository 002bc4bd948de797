"""Random weights: which, and of what."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from outpace.bench.shapes import DENSE, SHAPES, build, config_of, rank_shape
from outpace.errors import ModelError
from outpace.llm import LLM
from outpace.loading.inspect import describe
from tests.models import tiny


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tiny("qwen3").config.save_pretrained(tmp_path)
    return tmp_path


def test_weights_of_a_folder_with_a_config_alone(folder: Path) -> None:
    model = build(folder, torch.bfloat16, "cpu")
    weights = dict(model.named_parameters())
    drawn = weights["model.layers.1.mlp.up_proj.weight"]
    assert drawn.dtype == torch.bfloat16
    assert float(drawn.float().std()) == pytest.approx(0.02, rel=0.1)
    assert abs(float(drawn.float().mean())) < 0.002
    assert not torch.equal(drawn[0], drawn[1])
    assert torch.equal(weights["model.norm.weight"], torch.ones(32, dtype=torch.bfloat16))
    assert torch.isfinite(model(torch.tensor([[3, 4, 5]])).logits).all()


def test_the_same_seed_gives_the_same_weights(folder: Path) -> None:
    first, again, other = (
        build(folder, torch.float32, "cpu", seed).get_parameter("lm_head.weight") for seed in (1, 1, 2)
    )
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_rotary_frequencies_are_the_config_s_own(folder: Path) -> None:
    made = build(folder, torch.float32, "cpu").get_buffer("model.rotary_emb.inv_freq")
    assert torch.equal(made, tiny("qwen3").model.rotary_emb.inv_freq)


BILLIONS = {
    "llama-3.1-8b": 8.03, "llama-3.1-70b": 70.55, "llama-3.1-405b": 405.85, "llama-3.2-1b": 1.236,
    "qwen3-0.6b": 0.596, "qwen2.5-7b": 7.616, "gemma-2-2b": 2.614, "llama-2-7b": 6.738, "pythia-6.9b": 6.857,
    "opt-6.7b": 6.658, "opt-1.3b": 1.316, "qwen3-30b-a3b": 30.53,
    "qwen3-235b-a22b": 235.09, "mixtral-8x7b": 46.70, "tiny": 3.19e-5, "small": 0.1049,
    "gpt-oss-20b": 20.91, "deepseek-v2-lite": 15.71, "tiny-moe": 4.78e-5,
}  # fmt: skip
ACTIVE = {
    "qwen3-30b-a3b": 3.35,
    "qwen3-235b-a22b": 22.2,
    "mixtral-8x7b": 12.88,
    "gpt-oss-20b": 4.19,
    "deepseek-v2-lite": 2.66,
}
"""With embedding and head, which the names of some models leave out."""


def on_meta(name: str | dict[str, Any]) -> Any:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config_of(name))


@pytest.mark.parametrize("name", SHAPES)
def test_published_shapes_have_their_published_sizes(name: str) -> None:
    billions = sum(weight.numel() for weight in on_meta(name).parameters()) / 1e9
    assert billions == pytest.approx(BILLIONS[name], rel=0.01)
    assert (name in DENSE) == (describe(on_meta(name)).num_experts == 0)


@pytest.mark.parametrize("name", ACTIVE)
def test_published_shapes_use_as_many_weights_for_a_token_as_published(name: str) -> None:
    info, model = describe(on_meta(name)), on_meta(name)
    experts = sum(weight.numel() for path, weight in model.named_parameters() if ".experts." in path)
    others = sum(weight.numel() for weight in model.parameters()) - experts
    used = (others + experts * info.experts_per_token / info.num_experts) / 1e9
    assert used == pytest.approx(ACTIVE[name], rel=0.01)


def test_random_experts_are_started_without_being_copied() -> None:
    model: Any = build("tiny-moe", torch.float32, "cpu")
    before = {weight.data_ptr() for path, weight in model.named_parameters() if ".experts." in path}
    assert len(before) == 4
    LLM(model, device="cpu", max_model_len=64)
    after = {weight.data_ptr() for weight in model.parameters() if weight.dim() == 3}
    assert after == before


def test_vectors_that_an_initializer_draws_are_drawn(tmp_path: Path) -> None:
    small = {"num_hidden_layers": 1, "hidden_size": 16, "intermediate_size": 16, "num_local_experts": 2, "head_dim": 8}
    config = AutoConfig.for_model(
        "gpt_oss", **small, num_experts_per_tok=1, num_attention_heads=4, num_key_value_heads=2, vocab_size=64
    )
    config.save_pretrained(tmp_path)
    sinks = [
        build(tmp_path, torch.float32, "cpu", seed).get_parameter("model.layers.0.self_attn.sinks")
        for seed in (1, 1, 2)
    ]
    assert torch.equal(sinks[0], sinks[1])
    assert not torch.equal(sinks[0], sinks[2])
    assert 0 < float(sinks[0].abs().max()) < 0.2


def test_what_has_no_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"random weights need one of llama-3.1-8b, .* or a folder with a config.json"):
        build(tmp_path, torch.float32, "cpu")
    (tmp_path / "config.json").write_text('{"model_type": "nobody"}')
    with pytest.raises(ModelError, match=r"cannot use .*config.json"):
        build(tmp_path, torch.float32, "cpu")


@pytest.mark.parametrize(("name", "tp"), [("llama-3.1-8b", 8), ("llama-3.1-70b", 4), ("qwen3-235b-a22b", 8)])
def test_the_shares_of_all_ranks_are_the_model(name: str, tp: int) -> None:
    whole, part = ({path: weight.numel() for path, weight in on_meta(each).named_parameters()}
                   for each in (name, rank_shape(name, tp)))  # fmt: skip
    same = {path for path in whole if part[path] == whole[path]}
    twice = {path for path in whole if ".k_proj.weight" in path or ".v_proj.weight" in path}
    copies = tp // SHAPES[name]["num_key_value_heads"] or 1  # of each key head
    assert all(path.endswith("norm.weight") for path in same)
    for path in whole.keys() - same:
        assert part[path] * tp == whole[path] * (copies if path in twice else 1)


def test_whole_experts_are_split() -> None:
    shape = rank_shape("qwen3-235b-a22b", 4)
    assert (shape["num_experts"], shape["num_experts_per_tok"], shape["moe_intermediate_size"]) == (32, 2, 1536)
    assert rank_shape("qwen3-235b-a22b", 16)["num_experts_per_tok"] == 1


@pytest.mark.parametrize(
    ("name", "ranks", "wrong"),
    [
        ("tiny", 3, "num_attention_heads=4 of tiny .* 3 ranks"),
        ("tiny", 0, "at least 1, got 0"),
        ("opt-1.3b", 2, "opt-1.3b has no num_key_value_heads"),
    ],
)
def test_shares_that_are_none(name: str, ranks: int, wrong: str) -> None:
    with pytest.raises(ModelError, match=wrong):
        rank_shape(name, ranks)


def test_a_rank_s_share_runs_as_a_model() -> None:
    llm = LLM(build(rank_shape("tiny-moe", 4), torch.float32, "cpu"), device="cpu", max_model_len=64)
    assert len(llm.generate([[3, 4, 5]], use_tqdm=False)[0].outputs[0].token_ids) == 16
