"""Sizes of tiny models that no policy knows: they run their own layers over pages (level 0)."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

import outpace
from outpace import InferenceEngine
from tests.inject.families import VOCAB

SMALL: Mapping[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 6,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 128, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": None,
}  # fmt: skip
MIXED: Mapping[str, Any] = {
    **SMALL, "num_hidden_layers": 3, "sliding_window": 5,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
}  # fmt: skip
LATENT: Mapping[str, Any] = {
    **{name: value for name, value in SMALL.items() if name != "head_dim"}, "num_key_value_heads": 6,
    "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 12, "v_head_dim": 10,
    "n_routed_experts": 8, "n_group": 2, "topk_group": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
    "first_k_dense_replace": 1,
}  # fmt: skip


def engine(model: nn.Module, **options: Any) -> InferenceEngine:
    return outpace.init_inference(model, **{"device": "cpu", "dtype": torch.float32, "kernel_inject": True, **options})
