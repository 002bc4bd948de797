"""Mixtral, Qwen2-MoE, Qwen3-MoE and GPT-OSS: a fused attention beside experts that stay as they are."""

from typing import Any

import pytest
import torch
from transformers import (
    GptOssConfig,
    GptOssForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from tests.inject.checks import injected_copy, padded_prompts, randomised, same_forward, same_paged_logits, same_tokens

SMALL: dict[str, Any] = {
    "hidden_size": 48, "intermediate_size": 40, "num_hidden_layers": 3, "num_attention_heads": 6,
    "num_key_value_heads": 2, "vocab_size": 97, "max_position_embeddings": 256,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None, "num_experts_per_tok": 2,
}  # fmt: skip
MIXTRAL: dict[str, Any] = {"num_local_experts": 4}
QWEN: dict[str, Any] = {"num_experts": 5, "moe_intermediate_size": 24}
QWEN2: dict[str, Any] = {**QWEN, "shared_expert_intermediate_size": 32}
OSS: dict[str, Any] = {"num_local_experts": 4, "head_dim": 12, "sliding_window": 5}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}

CASES: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "mixtral": (MixtralConfig, MixtralForCausalLM, MIXTRAL),
    "mixtral window, odd head": (MixtralConfig, MixtralForCausalLM, {**MIXTRAL, "sliding_window": 5, "head_dim": 20}),
    "qwen2": (Qwen2MoeConfig, Qwen2MoeForCausalLM, QWEN2),
    "qwen2 mixed, windows": (
        Qwen2MoeConfig, Qwen2MoeForCausalLM,
        {**QWEN2, "mlp_only_layers": [1], "use_sliding_window": True, "sliding_window": 6, "max_window_layers": 2},
    ),
    "qwen2 no biases": (Qwen2MoeConfig, Qwen2MoeForCausalLM, {**QWEN2, "qkv_bias": False, "norm_topk_prob": True}),
    "qwen3": (Qwen3MoeConfig, Qwen3MoeForCausalLM, {**QWEN, "head_dim": 16}),
    "qwen3 sparse step, window": (
        Qwen3MoeConfig, Qwen3MoeForCausalLM,
        {
            **QWEN, "head_dim": 20, "decoder_sparse_step": 2, "use_sliding_window": True, "sliding_window": 5,
            "attention_bias": True, "norm_topk_prob": True, "num_key_value_heads": 1,
        },
    ),
    "gpt-oss": (GptOssConfig, GptOssForCausalLM, OSS),
    "gpt-oss no yarn, mha": (
        GptOssConfig, GptOssForCausalLM,
        {
            **OSS, "num_key_value_heads": 6, "head_dim": 8, "attention_bias": False,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        },
    ),
    "gpt-oss yarn, full first": (
        GptOssConfig, GptOssForCausalLM,
        {
            **OSS, "rope_parameters": YARN, "num_key_value_heads": 1,
            "layer_types": ["full_attention", "sliding_attention", "full_attention"],
        },
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


def test_router_logits_are_still_recorded() -> None:
    model = randomised(MixtralForCausalLM(MixtralConfig(**{**SMALL, **MIXTRAL})))
    inputs = padded_prompts(97)
    expected, found = (item(**inputs, output_router_logits=True) for item in (model, injected_copy(model)[0]))
    real = inputs["attention_mask"].bool().flatten()
    for want, got in zip(expected.router_logits, found.router_logits, strict=True):
        torch.testing.assert_close(got.view(-1, 4)[real], want.view(-1, 4)[real], rtol=1e-4, atol=1e-4)
