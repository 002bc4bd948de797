"""`injection_policy` of `init_inference`: a full policy for a class of layers, or DeepSpeed's names of linears."""

import logging
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from transformers.models.llama.modeling_llama import LlamaDecoderLayer
from transformers.models.mistral.modeling_mistral import MistralDecoderLayer

import outpace
from outpace import ConfigError, InferenceEngine, ModelError
from outpace.inject.modules import FusedLayer
from outpace.inject.policies.llama import LLAMA
from tests.models import padded, prompts, tiny

REDUCED = ("self_attn.o_proj", "mlp.down_proj")
MINE = replace(LLAMA, layers=())  # the key says which class it is for


def engine(policy: Any, **options: Any) -> InferenceEngine:
    return outpace.init_inference(tiny("llama"), injection_policy=policy, device="cpu", **options)


def fused(made: InferenceEngine) -> list[FusedLayer]:
    return [module for module in made.modules() if isinstance(module, FusedLayer)]


def same_as_plain(made: InferenceEngine) -> bool:
    """Greedy tokens of a padded batch are those of the plain model."""
    inputs: Any = padded(prompts(9, 4), "left")
    expected = tiny("llama").generate(**inputs, max_new_tokens=12, do_sample=False)
    return torch.equal(made.generate(**inputs, max_new_tokens=12, do_sample=False), expected)


def test_a_full_policy_makes_fused_layers() -> None:
    made = engine({LlamaDecoderLayer: MINE})
    assert [layer.policy.layers for layer in fused(made)] == [("LlamaDecoderLayer",)] * 2
    assert same_as_plain(made)


def test_the_fields_of_a_full_policy_act() -> None:
    made = engine({LlamaDecoderLayer: replace(MINE, readers={"scale": lambda config, index: float(index)})})
    assert [layer.settings.scale for layer in fused(made)] == [0.0, 1.0]
    assert not same_as_plain(made)


def test_a_full_policy_is_for_that_engine_alone() -> None:
    engine({LlamaDecoderLayer: replace(MINE, norm_eps=1e-3)})
    made = outpace.init_inference(tiny("llama"), kernel_inject=True, device="cpu")
    assert {layer.attn_norm.eps for layer in fused(made)} == {1e-6}


@pytest.mark.parametrize("names", [REDUCED, list(REDUCED), "mlp.down_proj"], ids=["tuple", "list", "one name"])
def test_names_of_linears_are_checked_and_nothing_is_replaced(names: Any, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="outpace"):
        made = engine({LlamaDecoderLayer: names})
    assert fused(made) == []
    assert same_as_plain(made)
    assert (
        "injection_policy of LlamaDecoderLayer: checked (there is one rank, so nothing is reduced)" in caplog.messages
    )


def test_both_forms_together() -> None:
    made = engine({LlamaDecoderLayer: MINE, nn.Embedding: ()})
    assert len(fused(made)) == 2
    assert same_as_plain(made)


def test_deepspeeds_other_name_for_it() -> None:
    made = outpace.init_inference(tiny("llama"), injection_dict={LlamaDecoderLayer: MINE}, device="cpu")
    assert len(fused(made)) == 2


def test_a_wrong_name_of_a_linear_is_told_with_the_nearest() -> None:
    with pytest.raises(
        ModelError, match=r"LlamaDecoderLayer has no 'attn\.o_proj'; nearest: self_attn\.o_proj"
    ) as seen:
        engine({LlamaDecoderLayer: ("attn.o_proj", "mlp.down_proj")})
    assert len(str(seen.value).splitlines()) == 1


@pytest.mark.parametrize(
    ("field", "value", "nearest"),
    [
        ("out", "self_attn.out_proj", r"self_attn\.o_proj"),
        ("mlp_norm", "post_attention_norm", "post_attention_layernorm"),
        ("qkv", ("self_attn.q", "self_attn.k_proj", "self_attn.v_proj"), r"self_attn\.q_proj"),
    ],
)
def test_a_wrong_name_in_a_full_policy_is_told_with_the_nearest(field: str, value: Any, nearest: str) -> None:
    with pytest.raises(ModelError, match=rf"LlamaDecoderLayer has no '.*'; nearest: .*{nearest}"):
        engine({LlamaDecoderLayer: replace(MINE, **{field: value})})


def test_a_path_to_what_is_no_linear() -> None:
    with pytest.raises(ModelError, match="LlamaMLP is not a linear layer with a weight"):
        engine({LlamaDecoderLayer: replace(MINE, down="mlp")})


def test_an_offset_that_would_have_no_effect() -> None:
    with pytest.raises(ConfigError, match=r"norm_offset=1\.0 is for norm='rms'"):
        replace(MINE, norm="layer", norm_offset=1.0)


@pytest.mark.parametrize("key", ["LlamaDecoderLayer", int, None], ids=["a name", "int", "None"])
def test_keys_are_classes_of_layers(key: Any) -> None:
    with pytest.raises(ConfigError, match="injection_policy: keys are classes of layers, got "):
        engine({key: REDUCED})


@pytest.mark.parametrize("value", [None, 3, ("mlp.down_proj", 3), {"out": "mlp.down_proj"}, LlamaDecoderLayer])
def test_values_are_names_or_policies(value: Any) -> None:
    with pytest.raises(
        ConfigError, match=r"injection_policy\[LlamaDecoderLayer\]: expected names of linears or a Policy"
    ):
        engine({LlamaDecoderLayer: value})


def test_names_for_a_class_that_the_model_has_not() -> None:
    with pytest.raises(ConfigError, match="injection_policy: LlamaForCausalLM has no MistralDecoderLayer"):
        engine({MistralDecoderLayer: REDUCED})


def test_a_policy_for_a_class_that_the_model_has_not() -> None:
    with pytest.raises(ConfigError, match="injection_policy: LlamaForCausalLM has no layer of class Mistral"):
        engine({MistralDecoderLayer: MINE})


@pytest.mark.parametrize("value", [MINE, REDUCED], ids=["policy", "names"])
@pytest.mark.parametrize("name", ["kernel_inject", "replace_with_kernel_inject"])
def test_not_together_with_our_policies(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=r"injection_policy with replace_with_kernel_inject: .*; give one"):
        engine({LlamaDecoderLayer: value}, **{name: True})


def test_the_model_is_untouched_by_a_config_that_is_refused() -> None:
    model = tiny("llama")
    with pytest.raises(ConfigError):
        outpace.init_inference(model, injection_policy={LlamaDecoderLayer: 3}, device="cpu")
    ids = prompts(5)[0][None]
    with torch.no_grad():
        assert torch.equal(model(input_ids=ids).logits, tiny("llama")(input_ids=ids).logits)
