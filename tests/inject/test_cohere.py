"""Command R: Cohere and Cohere 2."""

from typing import Any

import pytest
import torch
from transformers import Cohere2Config, Cohere2ForCausalLM, CohereConfig, CohereForCausalLM

from outpace.errors import NotSupported
from tests.inject.checks import (
    injected_copy,
    padded_prompts,
    randomised,
    same_forward,
    same_paged_logits,
    same_tokens,
)

SMALL: dict[str, Any] = {
    "hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 6,
    "num_key_value_heads": 2, "vocab_size": 97, "max_position_embeddings": 256, "tie_word_embeddings": False,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None, "logit_scale": 0.4,
}  # fmt: skip
KINDS = ["sliding_attention", "full_attention", "sliding_attention"]

CASES: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "cohere": (CohereConfig, CohereForCausalLM, {}),
    "cohere biases, tied": (
        CohereConfig, CohereForCausalLM, {"attention_bias": True, "tie_word_embeddings": True, "hidden_size": 60},
    ),
    "cohere2": (Cohere2Config, Cohere2ForCausalLM, {"layer_types": KINDS, "sliding_window": 5}),
    "cohere2 mqa": (
        Cohere2Config, Cohere2ForCausalLM,
        {"layer_types": KINDS[1:] + KINDS[:1], "sliding_window": 7, "num_key_value_heads": 1, "attention_bias": True},
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


def test_norms_of_single_heads_are_refused() -> None:
    with pytest.raises(NotSupported, match="use_qk_norm"):
        injected_copy(CohereForCausalLM(CohereConfig(**SMALL, use_qk_norm=True)))
