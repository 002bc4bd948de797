"""OPT: every size, 350m with its norms behind the parts."""

from typing import Any

import pytest
import torch
from transformers import OPTConfig, OPTForCausalLM

from tests.inject.checks import padded_prompts, randomised, same_forward, same_paged_logits, same_tokens

SMALL: dict[str, Any] = {
    "hidden_size": 48, "ffn_dim": 80, "num_hidden_layers": 3, "num_attention_heads": 4, "word_embed_proj_dim": 48,
    "max_position_embeddings": 128,
    "vocab_size": 97, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip

CASES: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "125m": (OPTConfig, OPTForCausalLM, {}),
    "350m": (OPTConfig, OPTForCausalLM, {"do_layer_norm_before": False, "word_embed_proj_dim": 20}),
    "350m as wide as its words": (OPTConfig, OPTForCausalLM, {"do_layer_norm_before": False}),
    "no biases, bare norms": (
        OPTConfig, OPTForCausalLM,
        {"enable_bias": False, "layer_norm_elementwise_affine": False, "activation_function": "gelu"},
    ),
    "narrow words, untied, no last norm": (
        OPTConfig, OPTForCausalLM,
        {"word_embed_proj_dim": 24, "tie_word_embeddings": False, "_remove_final_layer_norm": True,
         "hidden_size": 45, "num_attention_heads": 5},
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
