"""Granite and Granite MoE: a multiplier nearly everywhere."""

from typing import Any

import pytest
import torch
from transformers import GraniteConfig, GraniteForCausalLM, GraniteMoeConfig, GraniteMoeForCausalLM

from tests.inject.checks import padded_prompts, randomised, same_forward, same_paged_logits, same_tokens

SMALL: dict[str, Any] = {
    "hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 6,
    "num_key_value_heads": 2, "vocab_size": 97, "max_position_embeddings": 256, "tie_word_embeddings": False,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None, "attention_multiplier": 0.3,
    "residual_multiplier": 0.7, "embedding_multiplier": 3.0, "logits_scaling": 5.0,
}  # fmt: skip
MOE: dict[str, Any] = {"num_local_experts": 4, "num_experts_per_tok": 2}

CASES: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "granite": (GraniteConfig, GraniteForCausalLM, {}),
    "granite biases, mqa": (
        GraniteConfig, GraniteForCausalLM,
        {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 1, "hidden_size": 60},
    ),
    "granite moe": (GraniteMoeConfig, GraniteMoeForCausalLM, MOE),
    "granite moe tied": (
        GraniteMoeConfig, GraniteMoeForCausalLM,
        {**MOE, "tie_word_embeddings": True, "num_key_value_heads": 6, "attention_bias": True},
    ),
}  # fmt: skip


@pytest.fixture(params=list(CASES), ids=str)
def model(request: pytest.FixtureRequest) -> torch.nn.Module:
    config, kind, options = CASES[request.param]
    return randomised(kind(config(**{**SMALL, **options})))


def test_forward(model: torch.nn.Module) -> None:
    same_forward(model, padded_prompts(97))


def test_tokens(model: torch.nn.Module) -> None:
    same_tokens(model, padded_prompts(97))
    same_paged_logits(model, 97)
