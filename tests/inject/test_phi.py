"""Phi 1, 1.5 and 2."""

from typing import Any

import pytest
import torch
from transformers import PhiConfig, PhiForCausalLM

from tests.inject.checks import padded_prompts, randomised, same_forward, same_paged_logits, same_tokens

SMALL: dict[str, Any] = {
    "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 3, "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "vocab_size": 97, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip

CASES: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "half rotated": (PhiConfig, PhiForCausalLM, {"partial_rotary_factor": 0.5}),
    "grouped, tied": (
        PhiConfig, PhiForCausalLM,
        {"num_key_value_heads": 2, "tie_word_embeddings": True, "partial_rotary_factor": 0.4, "hidden_size": 60},
    ),
    "q and k norms": (PhiConfig, PhiForCausalLM, {"qk_layernorm": True}),
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
