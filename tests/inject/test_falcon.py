"""Falcon: 7b, 40b and rw layouts."""

from typing import Any

import pytest
import torch
from transformers import FalconConfig, FalconForCausalLM

from outpace.errors import NotSupported
from outpace.inject.paged import PagedModel
from tests.inject.checks import injected_copy, padded_prompts, randomised, same_forward, same_paged_logits, same_tokens

SMALL: dict[str, Any] = {
    "hidden_size": 48, "num_hidden_layers": 3, "num_attention_heads": 6, "max_position_embeddings": 128,
    "vocab_size": 97, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip

CASES: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "7b": (FalconConfig, FalconForCausalLM, {}),
    "7b biases, untied": (
        FalconConfig, FalconForCausalLM, {"bias": True, "tie_word_embeddings": False, "num_attention_heads": 4},
    ),
    "40b": (FalconConfig, FalconForCausalLM, {"new_decoder_architecture": True, "num_kv_heads": 2}),
    "11b, one norm": (
        FalconConfig, FalconForCausalLM,
        {"new_decoder_architecture": True, "num_kv_heads": 3, "num_ln_in_parallel_attn": 1, "ffn_hidden_size": 70},
    ),
    "rw": (
        FalconConfig, FalconForCausalLM, {"alibi": True, "multi_query": False, "parallel_attn": False, "bias": True},
    ),
    "rw, one key head, side by side": (FalconConfig, FalconForCausalLM, {"alibi": True, "num_attention_heads": 8}),
    "all key heads": (FalconConfig, FalconForCausalLM, {"multi_query": False, "parallel_attn": False}),
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


def test_rounded_alibi_runs_without_pages() -> None:
    """Sixteen heads have slopes that bfloat16 rounds: Hugging Face's loop is exact, pages refuse."""
    model: Any = randomised(FalconForCausalLM(FalconConfig(**{**SMALL, "alibi": True, "num_attention_heads": 16})))
    prompts = padded_prompts(97)
    same_forward(model, prompts)
    fused: Any
    fused, injected = injected_copy(model)
    expected, found = (item.generate(**prompts, max_new_tokens=32, do_sample=False) for item in (model, fused))
    assert torch.equal(expected, found)
    with pytest.raises(NotSupported, match="bfloat16"):
        PagedModel(fused, injected, 64)


def test_alibi_added_twice_is_refused() -> None:
    config = FalconConfig(**{**SMALL, "alibi": True, "attn_implementation": "eager"})
    with pytest.raises(NotSupported, match="twice"):
        injected_copy(FalconForCausalLM(config))
