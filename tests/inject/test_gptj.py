"""GPT-J and CodeGen."""

from typing import Any

import pytest
import torch
from transformers import CodeGenConfig, CodeGenForCausalLM, GPTJConfig, GPTJForCausalLM

from tests.inject.checks import padded_prompts, randomised, same_forward, same_paged_logits, same_tokens

SMALL: dict[str, Any] = {
    "n_embd": 48, "n_layer": 3, "n_head": 4, "n_positions": 128, "rotary_dim": 8,
    "vocab_size": 97, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip

CASES: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "gptj": (GPTJConfig, GPTJForCausalLM, {}),
    "gptj tied, whole heads": (GPTJConfig, GPTJForCausalLM, {"tie_word_embeddings": True, "rotary_dim": 12}),
    "gptj odd heads": (GPTJConfig, GPTJForCausalLM, {"n_embd": 45, "n_head": 3, "rotary_dim": 6, "n_inner": 70}),
    "codegen": (CodeGenConfig, CodeGenForCausalLM, {"tie_word_embeddings": False}),
    "codegen eight heads": (CodeGenConfig, CodeGenForCausalLM, {"n_head": 8, "rotary_dim": 4}),
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
