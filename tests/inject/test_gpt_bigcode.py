"""GPT-BigCode: GPT-2 with one key head."""

import warnings
from typing import Any

import pytest
import torch

from tests.inject.checks import padded_prompts, randomised, same_forward, same_paged_logits, same_tokens

with warnings.catch_warnings():  # its file uses torch.jit
    warnings.simplefilter("ignore", DeprecationWarning)
    from transformers import GPTBigCodeConfig, GPTBigCodeForCausalLM

SMALL: dict[str, Any] = {
    "n_embd": 48, "n_layer": 3, "n_head": 4, "n_positions": 128,
    "vocab_size": 97, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip

CASES: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "one key head": (GPTBigCodeConfig, GPTBigCodeForCausalLM, {}),
    "all key heads, untied": (
        GPTBigCodeConfig, GPTBigCodeForCausalLM, {"multi_query": False, "n_embd": 36, "tie_word_embeddings": False},
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
