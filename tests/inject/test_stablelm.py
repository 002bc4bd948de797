"""StableLM and OLMo."""

from typing import Any

import pytest
import torch
from transformers import OlmoConfig, OlmoForCausalLM, StableLmConfig, StableLmForCausalLM

from outpace.errors import NotSupported
from tests.inject.checks import injected_copy, padded_prompts, randomised, same_forward, same_paged_logits, same_tokens

SMALL: dict[str, Any] = {
    "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 3, "num_attention_heads": 6,
    "num_key_value_heads": 2, "max_position_embeddings": 128,
    "vocab_size": 97, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip

CASES: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "stablelm": (StableLmConfig, StableLmForCausalLM, {"partial_rotary_factor": 0.25}),
    "stablelm parallel, biases": (
        StableLmConfig, StableLmForCausalLM,
        {"use_parallel_residual": True, "use_qkv_bias": True, "partial_rotary_factor": 0.5, "hidden_size": 72},
    ),
    "olmo": (OlmoConfig, OlmoForCausalLM, {}),
    "olmo clipped, biases, tied": (
        OlmoConfig, OlmoForCausalLM, {"clip_qkv": 0.7, "attention_bias": True, "tie_word_embeddings": True},
    ),
}  # fmt: skip


@pytest.fixture(params=list(CASES), ids=str)
def model(request: pytest.FixtureRequest) -> torch.nn.Module:
    config, kind, options = CASES[request.param]
    return randomised(kind(config(**{**SMALL, **options})))


def test_forward(model: torch.nn.Module) -> None:
    same_forward(model, padded_prompts(97))


def test_paged_logits(model: torch.nn.Module) -> None:
    same_paged_logits(model, 97)


def test_tokens(model: torch.nn.Module) -> None:
    same_tokens(model, padded_prompts(97))


def test_norms_of_each_head_are_refused() -> None:
    model = StableLmForCausalLM(StableLmConfig(**{**SMALL, "qk_layernorm": True}))
    with pytest.raises(NotSupported, match="qk_layernorm"):
        injected_copy(model)
