"""Help for tests of `match`: models of many families, their skeletons, and checkpoints in memory."""

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMaskedLM, PreTrainedModel

from outpace.loading.weights import Piece, Source, Weights
from tests.models import FAMILIES, VOCAB, tiny

_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 1,
}
_EXPERTS: dict[str, Any] = {**_SIZES, "moe_intermediate_size": 16, "num_experts_per_tok": 2, "head_dim": 8}
_LATENT: dict[str, Any] = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4}
TWELVE = 12
"""Experts: the tenth comes after the second."""
OTHERS: Mapping[str, Mapping[str, Any]] = {
    "qwen2_moe": _EXPERTS | {"num_experts": TWELVE, "shared_expert_intermediate_size": 16},
    "qwen3_moe": _EXPERTS | {"num_experts": TWELVE, "tie_word_embeddings": True},
    "gpt_oss": _EXPERTS | {"num_local_experts": TWELVE},
    "olmoe": _EXPERTS | {"num_experts": TWELVE},
    "granitemoe": _SIZES | {"num_local_experts": TWELVE},
    "deepseek_v3": _EXPERTS
    | _LATENT
    | {"n_routed_experts": TWELVE, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1, "v_head_dim": 8},
    "minimax_m2": _EXPERTS | {"num_local_experts": TWELVE},
    "phimoe": _SIZES | {"num_local_experts": TWELVE},
    "qwen3_next": _EXPERTS
    | {"num_experts": TWELVE, "shared_expert_intermediate_size": 16, "linear_num_key_heads": 2}
    | {"linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8},
    "nomic_bert": _SIZES,
    "gemma2": _SIZES | {"head_dim": 8},
    "phi3": _SIZES,
    "gptj": {"vocab_size": VOCAB, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "rotary_dim": 4},
    "falcon": {key: value for key, value in _SIZES.items() if key != "intermediate_size"},
}
ALL = (*FAMILIES, *OTHERS)


def make(family: str, **changes: Any) -> Any:
    """A model with random weights everywhere, also where the class would put ones and zeros."""
    if family in FAMILIES:
        return tiny(family, **changes)
    config = AutoConfig.for_model(family, **OTHERS[family], **changes)
    auto: Any = AutoModelForMaskedLM if family == "nomic_bert" else AutoModelForCausalLM
    torch.manual_seed(0)
    model = auto.from_config(config)
    with torch.no_grad():
        for value in (*model.parameters(), *model.state_dict().values()):
            value.copy_(torch.randn(value.shape))
    return model


def skeleton(model: PreTrainedModel) -> PreTrainedModel:
    """The same class on the meta device."""
    with torch.device("meta"):
        return type(model)(model.config)


def memory(tensors: Mapping[str, Tensor]) -> Weights:
    """A checkpoint of tensors that are in memory."""
    return Weights("memory", {name: _in_memory(value) for name, value in tensors.items()})


def _in_memory(value: Tensor) -> Source:
    shape = tuple(value.shape)
    return Source(shape, value.dtype, (Piece(lambda: value, shape, value.dtype),))


Kept = dict[str, tuple[str, list[int]]]
"""Tensors by name: dtype and shape."""


def plain(shapes: dict[str, list[int]]) -> Kept:
    return {name: ("BF16", shape) for name, shape in shapes.items()}


def empty_llama(
    folder: Path, width: int, layers: int, vocab: int, kept: Callable[[dict[str, list[int]]], Kept] = plain
) -> int:
    """A Llama of zeros in bfloat16, in a file that takes no room on the disk; the bytes of its weights."""
    folder.mkdir()
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": width, "dtype": "bfloat16"}
    config |= {"intermediate_size": 4 * width, "num_hidden_layers": layers, "num_attention_heads": width // 64}
    config |= {"num_key_value_heads": width // 64, "vocab_size": vocab, "max_position_embeddings": 64}
    (folder / "config.json").write_text(json.dumps(config))
    shapes = {
        "model.embed_tokens.weight": [vocab, width],
        "lm_head.weight": [vocab, width],
        "model.norm.weight": [width],
    }
    for layer in range(layers):
        name = f"model.layers.{layer}"
        shapes |= {f"{name}.self_attn.{part}_proj.weight": [width, width] for part in "qkvo"}
        shapes |= {f"{name}.mlp.{part}_proj.weight": [4 * width, width] for part in ("gate", "up")}
        shapes |= {f"{name}.mlp.down_proj.weight": [width, 4 * width]}
        shapes |= {f"{name}.{part}_layernorm.weight": [width] for part in ("input", "post_attention")}
    header, at = {}, 0
    for name, (dtype, shape) in kept(shapes).items():
        size = (4 if dtype == "I32" else 2) * math.prod(shape)
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + at)
    return at
