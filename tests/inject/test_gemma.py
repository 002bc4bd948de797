"""Gemma 1, 2 and 3."""

from typing import Any

import pytest
import torch
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    Gemma3TextModel,
    GemmaConfig,
    GemmaForCausalLM,
)

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
    "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 97, "max_position_embeddings": 256,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None, "tie_word_embeddings": False,
}  # fmt: skip
KINDS = ["sliding_attention", "full_attention", "sliding_attention"]
TABLES: dict[str, Any] = {
    "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
}
SHARED: dict[str, Any] = {"sliding_window": 5, "query_pre_attn_scalar": 10}
GEMMA2: dict[str, Any] = {**SHARED, "attn_implementation": "eager"}  # sdpa, the default in 5.17, drops the cap
GEMMA3: dict[str, Any] = {**SHARED, "layer_types": KINDS, "rope_parameters": TABLES}

CASES: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "gemma tied": (GemmaConfig, GemmaForCausalLM, {"tie_word_embeddings": True}),
    "gemma mqa, biases": (
        GemmaConfig, GemmaForCausalLM, {"num_key_value_heads": 1, "head_dim": 20, "attention_bias": True},
    ),
    "gemma2 caps": (
        Gemma2Config, Gemma2ForCausalLM,
        {**GEMMA2, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0},
    ),
    "gemma2 no caps": (
        Gemma2Config, Gemma2ForCausalLM,
        {**GEMMA2, "attn_logit_softcapping": None, "final_logit_softcapping": None, "head_dim": 20},
    ),
    "gemma2 full first": (
        Gemma2Config, Gemma2ForCausalLM,
        {**GEMMA2, "layer_types": ["full_attention", *KINDS[:2]], "attention_bias": True, "num_key_value_heads": 6},
    ),
    "gemma3": (Gemma3TextConfig, Gemma3ForCausalLM, GEMMA3),
    "gemma3 tied": (Gemma3TextConfig, Gemma3ForCausalLM, {**GEMMA3, "tie_word_embeddings": True}),
    "gemma3 cap": (
        Gemma3TextConfig, Gemma3ForCausalLM,
        {**GEMMA3, "final_logit_softcapping": 3.0, "attn_logit_softcapping": 0.5, "head_dim": 20},
    ),
    "gemma3 mqa, default layers": (
        Gemma3TextConfig, Gemma3ForCausalLM,
        {"sliding_window": 4, "num_key_value_heads": 1, "head_dim": 8, "attention_bias": True},
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


def test_a_bidirectional_one_runs_as_hugging_face_masks_it_and_never_through_pages() -> None:
    config = Gemma3TextConfig(**{**SMALL, **GEMMA3, "use_bidirectional_attention": True})
    same_forward(randomised(Gemma3TextModel(config)), padded_prompts(97))
    fused, injected = injected_copy(Gemma3ForCausalLM(config))
    with pytest.raises(NotSupported, match="use_bidirectional_attention"):
        PagedModel(fused, injected, 64)


def test_frequencies_of_one_kind_of_layer_that_change_with_the_length_are_not_for_pages() -> None:
    tables = {**TABLES, "full_attention": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}
    fused, injected = injected_copy(
        Gemma3ForCausalLM(Gemma3TextConfig(**{**SMALL, **GEMMA3, "rope_parameters": tables}))
    )
    PagedModel(fused, injected, 256)
    with pytest.raises(NotSupported, match="dynamic changes its frequencies with the length beyond 256"):
        PagedModel(fused, injected, 257)
