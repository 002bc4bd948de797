"""Tiny models of every layout that a split has to know, with four query heads or more."""

import warnings
from collections.abc import Mapping
from typing import Any

import torch
import transformers as hf
from transformers import PreTrainedModel

from tests.models import tiny

_SIZES: Mapping[str, Any] = {
    "vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64, "pad_token_id": 1, "bos_token_id": 2,
    "eos_token_id": None,
}  # fmt: skip
_OLD: Mapping[str, Any] = {
    "vocab_size": 97, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "pad_token_id": 1, "bos_token_id": 2,
    "eos_token_id": None,
}  # fmt: skip
_FALCON: Mapping[str, Any] = {
    key: value for key, value in _SIZES.items() if key not in ("num_key_value_heads", "head_dim", "intermediate_size")
}

_TINY = ("llama", "qwen3", "gemma3", "gpt2", "opt", "bloom", "gpt_neox", "mixtral", "bert")
_MADE: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "one head a key head": ("Llama", {**_SIZES, "num_key_value_heads": 4, "attention_bias": True, "mlp_bias": True}),
    "five key heads": (
        "Llama", {**_SIZES, "num_attention_heads": 10, "num_key_value_heads": 5, "hidden_size": 80, "vocab_size": 98},
    ),
    "tied": ("Llama", {**_SIZES, "tie_word_embeddings": True}),
    "falcon 7b": ("Falcon", {**_FALCON, "bias": True}),
    "falcon 40b": ("Falcon", {**_FALCON, "new_decoder_architecture": True, "num_kv_heads": 2}),
    "falcon 11b": (
        "Falcon", {**_FALCON, "new_decoder_architecture": True, "num_kv_heads": 2, "num_ln_in_parallel_attn": 1},
    ),
    "falcon rw": ("Falcon", {**_FALCON, "alibi": True, "multi_query": False, "parallel_attn": False, "bias": True}),
    "phi3": ("Phi3", {key: value for key, value in _SIZES.items() if key != "head_dim"}),
    "mpt": ("Mpt", {"vocab_size": 97, "d_model": 32, "n_heads": 4, "n_layers": 2, "max_seq_len": 64}),
    "bigcode": ("GPTBigCode", {**_OLD, "multi_query": True}),
    "bigcode, all key heads": ("GPTBigCode", {**_OLD, "multi_query": False}),
    "codegen": ("CodeGen", {**_OLD, "rotary_dim": 4, "tie_word_embeddings": False}),
    "qwen2 moe": (
        "Qwen2Moe",
        {**_SIZES, "num_experts": 4, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 40,
         "num_experts_per_tok": 2, "mlp_only_layers": [1]},
    ),
    "gpt-oss": ("GptOss", {**_SIZES, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "granite moe": ("GraniteMoe", {**_SIZES, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "dots1": (
        "Dots1",
        {**_SIZES, "n_routed_experts": 4, "n_group": 2, "topk_group": 1, "num_experts_per_tok": 2,
         "moe_intermediate_size": 24, "n_shared_experts": 1, "first_k_dense_replace": 1},
    ),
    "phi moe": ("Phimoe", {**_SIZES, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "granite moe shared": (
        "GraniteMoeShared",
        {**_SIZES, "num_local_experts": 4, "num_experts_per_tok": 2, "shared_intermediate_size": 24},
    ),
    "hugging face's plan": ("Olmo2", {**_SIZES, "num_key_value_heads": 4}),
}  # fmt: skip

NAMES = (*_TINY, *_MADE)


def make(name: str) -> Any:
    """The model, in eval mode, with the same weights at every call."""
    if name in _TINY:
        return tiny(name)
    family, options = _MADE[name]
    with warnings.catch_warnings(action="ignore"):  # GPT-BigCode scripts functions when it is imported
        kind, config = getattr(hf, f"{family}ForCausalLM"), getattr(hf, f"{family}Config")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model: PreTrainedModel = kind(config(**options))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.3 * torch.randn(parameter.shape))
    return model.eval()
