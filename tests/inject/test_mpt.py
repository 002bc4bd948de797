"""MPT."""

from typing import Any

import pytest
import torch
from transformers import MptConfig, MptForCausalLM

from tests.inject.checks import padded_prompts, randomised, same_forward, same_paged_logits, same_tokens

SMALL: dict[str, Any] = {
    "d_model": 48, "n_layers": 3, "n_heads": 4, "max_seq_len": 128, "use_cache": True,
    "vocab_size": 97, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip

CASES: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "four heads": (MptConfig, MptForCausalLM, {}),
    "six heads, clipped, untied": (
        MptConfig, MptForCausalLM, {"n_heads": 6, "attn_config": {"clip_qkv": 0.8}, "tie_word_embeddings": False},
    ),
    "eleven odd heads, scaled": (
        MptConfig, MptForCausalLM, {"n_heads": 11, "d_model": 55, "attn_config": {"softmax_scale": 0.3}},
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
