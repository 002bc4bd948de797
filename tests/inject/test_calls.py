"""What callers ask of Hugging Face's layers, asked of the fused ones."""

from typing import Any

import pytest
import torch
from transformers import BertConfig, BertModel, Gemma2Config, Gemma2ForCausalLM, LlamaConfig, LlamaForCausalLM

from outpace.errors import NotSupported
from outpace.inject.paged import PagedModel
from tests.inject.checks import injected_copy, padded_prompts, pair_of, randomised, same_forward

SMALL: dict[str, Any] = {
    "hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 6, "vocab_size": 97,
    "head_dim": 8,
}  # fmt: skip


def llama(**options: Any) -> torch.nn.Module:
    return randomised(LlamaForCausalLM(LlamaConfig(**SMALL, num_key_value_heads=2, **options)))


def gemma2() -> torch.nn.Module:
    return randomised(Gemma2ForCausalLM(Gemma2Config(**SMALL, num_key_value_heads=2)))


def bert() -> torch.nn.Module:
    return randomised(BertModel(BertConfig(**SMALL)))


def test_outputs_are_recorded_by_a_model_that_recorded_some_before() -> None:
    model, inputs = llama(), padded_prompts(97)
    model(**inputs, output_hidden_states=True)  # Hugging Face puts its hooks in once
    same_forward(pair_of(model), inputs)


def test_a_hook_on_a_layer_outlives_the_layer() -> None:
    model: Any = llama()
    seen: list[torch.Tensor] = []
    handle = model.model.layers[1].register_forward_hook(lambda module, args, output: seen.append(output))
    fused, _ = injected_copy(model)
    fused(**padded_prompts(97))
    handle.remove()
    assert len(seen) == 1


@pytest.mark.parametrize("make", [llama, gemma2, bert])
def test_attention_weights_are_refused(make: Any) -> None:
    fused, _ = injected_copy(make())
    with pytest.raises(NotSupported, match="output_attentions"):
        fused(**padded_prompts(97), output_attentions=True)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("make", [llama, bert])
def test_the_direction_asked_for_in_a_call(make: Any, padded: bool, causal: bool) -> None:
    inputs = padded_prompts(97)
    if not padded:
        inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
    same_forward(pair_of(make()), {**inputs, "is_causal": causal})


def test_a_config_that_looks_ahead_never_runs_through_pages() -> None:
    model = llama(is_causal=False)
    inputs = padded_prompts(97)
    same_forward(pair_of(model), {**inputs, "attention_mask": torch.ones_like(inputs["input_ids"])})
    fused, injected = injected_copy(model)
    with pytest.raises(NotSupported, match="is_causal=False"):
        PagedModel(fused, injected, 64)
