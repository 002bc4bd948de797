"""What Outpace finds out about somebody else's model."""

from typing import Any

import pytest
import torch
from torch import nn

from outpace.errors import ModelError
from outpace.loading.inspect import check_model, describe, generation_config, kept_in_fp32
from outpace.loading.skeleton import own_dtypes
from tests.models import POSITIONS, VOCAB, tiny

KINDS = {
    "llama": ("causal", True, POSITIONS),
    "gpt2": ("causal", True, POSITIONS),
    "bloom": ("causal", True, None),
    "t5": ("encoder-decoder", True, None),
    "whisper": ("encoder-decoder", True, None),
    "bert": ("encoder", False, POSITIONS),
}


@pytest.mark.parametrize("family", KINDS)
def test_the_facts_of_a_family(family: str) -> None:
    info = describe(tiny(family))
    assert (info.kind, info.can_generate, info.max_positions) == KINDS[family]
    assert info.vocab_size == VOCAB
    assert info.num_experts == 0
    assert not info.graphs_itself


def test_a_plain_module_and_one_with_a_generate_of_its_own() -> None:
    class Speaker(nn.Module):
        def generate(self) -> None: ...

    assert describe(nn.Linear(1, 1)).kind == "plain"
    assert not describe(nn.Linear(1, 1)).can_generate
    assert describe(Speaker()).can_generate


def test_experts_are_counted_unless_not_looked_for() -> None:
    assert describe(tiny("mixtral")).num_experts == 4
    assert describe(tiny("mixtral"), find_experts=False).num_experts == 0


@pytest.mark.parametrize("name", ["num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts"])
def test_experts_under_any_name(name: str) -> None:
    assert describe(tiny("llama"), {name: 6}).num_experts == 6


def test_overrides_take_the_place_of_the_models_own_entries() -> None:
    info = describe(tiny("llama"), {"max_position_embeddings": 5, "vocab_size": 3, "is_encoder_decoder": True})
    assert (info.max_positions, info.vocab_size, info.kind) == (5, 3, "encoder-decoder")


@pytest.mark.parametrize("value", [True, "12", None, 3.5])
def test_what_is_no_number_is_not_known(value: Any) -> None:
    assert describe(tiny("llama"), {"max_position_embeddings": value}).max_positions is None


def test_a_module_is_returned_as_it_is() -> None:
    model = nn.Linear(1, 1)
    assert check_model(model) is model


@pytest.mark.parametrize("wrong", ["gpt2", None, 3, nn.Linear])
def test_what_is_no_module(wrong: object) -> None:
    with pytest.raises(ModelError, match=r"model: expected a torch.nn.Module, got .*use outpace.LLM"):
        check_model(wrong)


def test_a_model_without_values() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(1, 1))
    with pytest.raises(ModelError, match=r"model: 0\.weight is on the meta device"):
        check_model(model)


def test_a_quantized_model() -> None:
    model = tiny("llama")
    model.is_quantized = True
    with pytest.raises(ModelError, match="model: it is quantized already"):
        check_model(model)


def test_what_stays_in_float32() -> None:
    assert {name.split(".")[-2] for name in kept_in_fp32(tiny("t5"), torch.float16)} == {"wo"}
    assert kept_in_fp32(tiny("t5"), torch.bfloat16) == set()
    assert kept_in_fp32(tiny("t5"), torch.float32) == set()
    strict = tiny("llama")
    strict._keep_in_fp32_modules_strict = {"lm_head"}
    for dtype in (torch.float16, torch.bfloat16):
        assert kept_in_fp32(strict, dtype) == {"lm_head.weight"}


def test_a_pattern_matches_whole_steps_of_a_name() -> None:
    model = tiny("llama")
    model._keep_in_fp32_modules = ["norm"]  # not input_layernorm
    assert kept_in_fp32(model, torch.float16) == {"model.norm.weight"}
    model._keep_in_fp32_modules = ["layers.0.mlp"]
    assert len(kept_in_fp32(model, torch.float16)) == 3


def test_buffers_have_the_dtype_their_class_makes_them_in() -> None:
    before = torch.get_default_dtype()
    found = own_dtypes(tiny("gemma3"), torch.bfloat16)
    assert found["model.embed_tokens.embed_scale"] == torch.bfloat16
    assert {dtype for name, dtype in found.items() if "inv_freq" in name} == {torch.float32}
    assert torch.get_default_dtype() == before
    assert own_dtypes(nn.BatchNorm1d(2), torch.bfloat16) == {}


def test_a_class_with_a_constructor_of_its_own_keeps_its_buffers() -> None:
    class Own(type(tiny("llama"))):  # type: ignore[misc]
        def __init__(self, config: Any, needed: int) -> None:
            super().__init__(config)

    assert own_dtypes(Own(tiny("llama").config, 3), torch.bfloat16) == {}


def test_the_generation_config_of_a_model() -> None:
    model = tiny("llama")
    assert generation_config(model) is model.generation_config
    assert generation_config(nn.Linear(1, 1)) is None
