"""BLOOM."""

from typing import Any

import pytest
import torch
from transformers import BloomConfig, BloomForCausalLM

from outpace.errors import NotSupported
from tests.inject.checks import injected_copy, padded_prompts, randomised, same_forward, same_paged_logits, same_tokens

SMALL: dict[str, Any] = {
    "hidden_size": 48, "n_layer": 3, "n_head": 4,
    "vocab_size": 97, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip

CASES: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "four heads": (BloomConfig, BloomForCausalLM, {}),
    "six heads": (BloomConfig, BloomForCausalLM, {"n_head": 6}),
    "eleven odd heads, untied": (
        BloomConfig, BloomForCausalLM, {"n_head": 11, "hidden_size": 55, "tie_word_embeddings": False},
    ),
    "residual behind the norm": (BloomConfig, BloomForCausalLM, {"apply_residual_connection_post_layernorm": True}),
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


def test_slices_are_refused() -> None:
    model = BloomForCausalLM(BloomConfig(**{**SMALL, "slow_but_exact": True, "pretraining_tp": 2}))
    with pytest.raises(NotSupported, match="slow_but_exact"):
        injected_copy(model)
