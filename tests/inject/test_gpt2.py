"""GPT-2."""

from typing import Any

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from outpace.errors import NotSupported
from outpace.inject.paged import PagedModel
from tests.inject.checks import injected_copy, padded_prompts, randomised, same_forward, same_paged_logits, same_tokens

SMALL: dict[str, Any] = {
    "n_embd": 48, "n_layer": 3, "n_head": 4, "n_positions": 128,
    "vocab_size": 97, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip

CASES: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "gpt2": (GPT2Config, GPT2LMHeadModel, {}),
    "gpt2 untied, scale by layer": (
        GPT2Config, GPT2LMHeadModel,
        {"n_head": 3, "n_inner": 40, "tie_word_embeddings": False, "scale_attn_by_inverse_layer_idx": True},
    ),
    "gpt2 unscaled, relu": (
        GPT2Config, GPT2LMHeadModel, {"scale_attn_weights": False, "activation_function": "relu", "n_embd": 36},
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


def test_cross_attention_is_refused() -> None:
    model = GPT2LMHeadModel(GPT2Config(**{**SMALL, "add_cross_attention": True}))
    with pytest.raises(NotSupported, match="cross-attention"):
        injected_copy(model)


def test_encoder_states_are_refused() -> None:
    fused, _ = injected_copy(GPT2LMHeadModel(GPT2Config(**SMALL)))
    with pytest.raises(NotSupported, match="encoder_hidden_states"):
        fused(**padded_prompts(97), encoder_hidden_states=torch.zeros(3, 2, 48))


@pytest.mark.parametrize(("asked", "found"), [(64, 64), (128, 128), (1024, 128)])
def test_pages_know_how_many_positions_there_are(asked: int, found: int) -> None:
    fused, injected = injected_copy(GPT2LMHeadModel(GPT2Config(**SMALL)))
    assert PagedModel(fused, injected, asked).max_positions == found
