"""Llama and the families that share its layer."""

from typing import Any

import pytest
import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    SmolLM3Config,
    SmolLM3ForCausalLM,
)

from tests.inject.checks import padded_prompts, randomised, same_forward, same_tokens

SMALL = {
    "hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 6,
    "num_key_value_heads": 2, "vocab_size": 97, "max_position_embeddings": 256,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}

CASES: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "llama gqa": (LlamaConfig, LlamaForCausalLM, {}),
    "llama biases": (LlamaConfig, LlamaForCausalLM, {"attention_bias": True, "mlp_bias": True, "head_dim": 20}),
    "llama3 rope, tied": (LlamaConfig, LlamaForCausalLM, {"rope_parameters": LLAMA3, "tie_word_embeddings": True}),
    "llama yarn": (LlamaConfig, LlamaForCausalLM, {"rope_parameters": YARN}),
    "llama linear, mha": (LlamaConfig, LlamaForCausalLM, {"rope_parameters": LINEAR, "num_key_value_heads": 6}),
    "mistral window": (MistralConfig, MistralForCausalLM, {"sliding_window": 5}),
    "mistral full": (MistralConfig, MistralForCausalLM, {"sliding_window": None}),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM, {}),
    "qwen2 windows": (
        Qwen2Config, Qwen2ForCausalLM, {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1},
    ),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM, {"head_dim": 16}),
    "qwen3 mqa": (Qwen3Config, Qwen3ForCausalLM, {"head_dim": 8, "num_key_value_heads": 1}),
    "smollm3": (SmolLM3Config, SmolLM3ForCausalLM, {}),
    "smollm3 all rope": (SmolLM3Config, SmolLM3ForCausalLM, {"no_rope_layers": [1, 1, 1]}),
}  # fmt: skip


@pytest.fixture(params=list(CASES), ids=str)
def model(request: pytest.FixtureRequest) -> torch.nn.Module:
    config, kind, options = CASES[request.param]
    return randomised(kind(config(**{**SMALL, **options})))


def test_forward(model: torch.nn.Module) -> None:
    same_forward(model, padded_prompts(97))


def test_tokens(model: torch.nn.Module) -> None:
    same_tokens(model, padded_prompts(97))
