"""GPT-Neo: windows in its local layers, scores that are not scaled."""

from typing import Any

import pytest
import torch
from transformers import GPTNeoConfig, GPTNeoForCausalLM

from tests.inject.checks import padded_prompts, randomised, same_forward, same_paged_logits, same_tokens

SMALL: dict[str, Any] = {
    "hidden_size": 48, "num_layers": 4, "num_heads": 4, "max_position_embeddings": 128,
    "attention_types": [[["global", "local"], 2]], "window_size": 5,
    "vocab_size": 97, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip

CASES: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "alternating": (GPTNeoConfig, GPTNeoForCausalLM, {}),
    "local only, untied": (
        GPTNeoConfig, GPTNeoForCausalLM,
        {"attention_types": [[["local"], 4]], "window_size": 3, "tie_word_embeddings": False, "num_heads": 3},
    ),
    "global only, odd heads": (
        GPTNeoConfig, GPTNeoForCausalLM,
        {"attention_types": [[["global"], 4]], "hidden_size": 35, "num_heads": 5, "intermediate_size": 50},
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
