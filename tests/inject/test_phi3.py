"""Phi-3."""

from typing import Any

import pytest
import torch
from transformers import Phi3Config, Phi3ForCausalLM

from outpace.errors import NotSupported
from outpace.inject.paged import PagedModel
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
    "num_key_value_heads": 2, "vocab_size": 97, "max_position_embeddings": 256,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None,
}  # fmt: skip
PARTIAL: dict[str, Any] = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.75}


def longrope(original: int, pairs: int = 4) -> dict[str, Any]:
    """Options of a model whose frequencies change beyond `original` positions."""
    rope = {
        "rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0 + 0.1 * i for i in range(pairs)],
        "long_factor": [3.0 + i for i in range(pairs)],
    }  # fmt: skip
    return {"rope_parameters": rope, "original_max_position_embeddings": original}


CASES: dict[str, dict[str, Any]] = {
    "gqa": {},
    "partial": {"rope_parameters": PARTIAL, "num_key_value_heads": 6},
    "partial, odd head": {"rope_parameters": {**PARTIAL, "partial_rotary_factor": 0.4}, "hidden_size": 60},
    "window": {"sliding_window": 5, "num_key_value_heads": 1},
    "longrope": longrope(128),
    "longrope, window": {**longrope(100), "sliding_window": 6, "tie_word_embeddings": True},
}


def made(options: dict[str, Any]) -> torch.nn.Module:
    return randomised(Phi3ForCausalLM(Phi3Config(**{**SMALL, **options})))


@pytest.fixture(params=list(CASES), ids=str)
def model(request: pytest.FixtureRequest) -> torch.nn.Module:
    return made(CASES[request.param])


def test_forward(model: torch.nn.Module) -> None:
    same_forward(model, padded_prompts(97))


def test_tokens(model: torch.nn.Module) -> None:
    same_tokens(model, padded_prompts(97))
    same_paged_logits(model, 97)


def test_longrope_beyond_its_original_length_is_for_hugging_face() -> None:
    model: Any = made(longrope(32))
    fused: Any
    fused, injected = injected_copy(model)
    inputs = padded_prompts(97)
    expected = model.generate(**inputs, max_new_tokens=64, do_sample=False)
    assert torch.equal(fused.generate(**inputs, max_new_tokens=64, do_sample=False), expected)
    with pytest.raises(NotSupported, match="longrope changes its frequencies with the length beyond 32"):
        PagedModel(fused, injected, 76)
    PagedModel(fused, injected, 32)
