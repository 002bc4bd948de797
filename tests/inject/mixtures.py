"""Tiny mixtures of experts of every family that a policy knows: routers, stacks, shared experts, and dense layers."""

from typing import Any

import torch

from tests.inject.families import made

SMALL: dict[str, Any] = {
    "hidden_size": 48, "intermediate_size": 40, "num_hidden_layers": 3, "num_attention_heads": 6,
    "num_key_value_heads": 2, "vocab_size": 97, "max_position_embeddings": 256,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None, "num_experts_per_tok": 2,
}  # fmt: skip
MIXTRAL: dict[str, Any] = {"num_local_experts": 4}
QWEN: dict[str, Any] = {"num_experts": 5, "moe_intermediate_size": 24}
QWEN2: dict[str, Any] = {**QWEN, "shared_expert_intermediate_size": 32}
OSS: dict[str, Any] = {"num_local_experts": 4, "head_dim": 12, "sliding_window": 5}
EXPERTS: dict[str, Any] = {"num_experts": 5}
GROUPS: dict[str, Any] = {
    "n_routed_experts": 6, "n_group": 3, "topk_group": 2, "first_k_dense_replace": 1, "moe_intermediate_size": 24,
    "n_shared_experts": 1, "routed_scaling_factor": 1.7, "norm_topk_prob": True, "head_dim": 8,
}  # fmt: skip
MULTIPLIERS: dict[str, Any] = {
    "attention_multiplier": 0.3, "residual_multiplier": 0.7, "embedding_multiplier": 3.0, "logits_scaling": 5.0,
}  # fmt: skip
PLAIN_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}

MIXTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("Mixtral", MIXTRAL),
    "mixtral window, odd head": ("Mixtral", {**MIXTRAL, "sliding_window": 5, "head_dim": 20}),
    "qwen2": ("Qwen2Moe", QWEN2),
    "qwen2 mixed, windows": (
        "Qwen2Moe",
        {**QWEN2, "mlp_only_layers": [1], "use_sliding_window": True, "sliding_window": 6, "max_window_layers": 2},
    ),
    "qwen2 no biases": ("Qwen2Moe", {**QWEN2, "qkv_bias": False, "norm_topk_prob": True}),
    "qwen3": ("Qwen3Moe", {**QWEN, "head_dim": 16}),
    "qwen3 sparse step, window": (
        "Qwen3Moe",
        {
            **QWEN, "head_dim": 20, "decoder_sparse_step": 2, "use_sliding_window": True, "sliding_window": 5,
            "attention_bias": True, "norm_topk_prob": True, "num_key_value_heads": 1,
        },
    ),
    "olmoe": ("Olmoe", EXPERTS),
    "olmoe clipped, grouped": (
        "Olmoe", {**EXPERTS, "clip_qkv": 0.9, "norm_topk_prob": True, "attention_bias": True, "num_key_value_heads": 3},
    ),
    "phi-moe": ("Phimoe", {**MIXTRAL, "rope_parameters": PLAIN_ROPE}),
    "phi-moe biases, wide jitter": (
        "Phimoe",
        {
            **MIXTRAL, "num_local_experts": 7, "rope_parameters": PLAIN_ROPE, "attention_bias": True,
            "lm_head_bias": True, "router_jitter_noise": 0.4, "sliding_window": 6,
        },
    ),
    "dots1": ("Dots1", GROUPS),
    "dots1 unscaled, windows": (
        "Dots1",
        {
            **GROUPS, "n_group": 1, "topk_group": 1, "norm_topk_prob": False, "n_shared_experts": 2,
            "sliding_window": 5, "max_window_layers": 1,
        },
    ),
    "glm4": ("Glm4Moe", GROUPS),
    "glm4 normed": ("Glm4Moe", {**GROUPS, "use_qk_norm": True, "attention_bias": True, "first_k_dense_replace": 2}),
    "granite": ("GraniteMoe", {**MIXTRAL, **MULTIPLIERS, "tie_word_embeddings": False}),
    "granite tied, all key heads": (
        "GraniteMoe",
        {**MIXTRAL, **MULTIPLIERS, "tie_word_embeddings": True, "num_key_value_heads": 6, "attention_bias": True},
    ),
    "granite shared": ("GraniteMoeShared", {**MIXTRAL, **MULTIPLIERS, "shared_intermediate_size": 32}),
    "granite not shared": ("GraniteMoeShared", {**MIXTRAL, **MULTIPLIERS, "shared_intermediate_size": 0}),
    "gpt-oss": ("GptOss", OSS),
    "gpt-oss no yarn, mha": (
        "GptOss",
        {
            **OSS, "num_key_value_heads": 6, "head_dim": 8, "attention_bias": False,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        },
    ),
    "gpt-oss yarn, full first": (
        "GptOss",
        {
            **OSS, "rope_parameters": YARN, "num_key_value_heads": 1,
            "layer_types": ["full_attention", "sliding_attention", "full_attention"],
        },
    ),
}  # fmt: skip


def mixture(case: str, **changes: Any) -> Any:
    """The model of a case, with the same weights at every call."""
    family, options = MIXTURES[case]
    model = made(family, {**SMALL, **options, **changes})
    for name, buffer in model.named_buffers():
        if name.endswith("correction_bias"):
            buffer.copy_(torch.randn(buffer.shape, generator=torch.Generator().manual_seed(3)) * 0.2)
    return model


def build(case: str) -> Any:
    """The tiny model of a case, with weights of a size that 16 bits hold."""
    model = mixture(case)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.data *= 0.3
    return model.cuda()
