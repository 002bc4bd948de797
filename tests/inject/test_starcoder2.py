"""StarCoder 2."""

from typing import Any

import pytest
import torch
from transformers import Starcoder2Config, Starcoder2ForCausalLM

from tests.inject.checks import padded_prompts, randomised, same_forward, same_paged_logits, same_tokens

SMALL: dict[str, Any] = {
    "hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 6,
    "num_key_value_heads": 2, "vocab_size": 97, "max_position_embeddings": 256,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None,
}  # fmt: skip

CASES: dict[str, dict[str, Any]] = {
    "gqa": {},
    "window, no biases": {"sliding_window": 5, "use_bias": False, "num_key_value_heads": 1},
    "mha, untied": {"num_key_value_heads": 6, "tie_word_embeddings": False, "hidden_size": 60},
}


@pytest.fixture(params=list(CASES), ids=str)
def model(request: pytest.FixtureRequest) -> torch.nn.Module:
    return randomised(Starcoder2ForCausalLM(Starcoder2Config(**{**SMALL, **CASES[request.param]})))


def test_forward(model: torch.nn.Module) -> None:
    same_forward(model, padded_prompts(97))


def test_tokens(model: torch.nn.Module) -> None:
    same_tokens(model, padded_prompts(97))
    same_paged_logits(model, 97)
