"""Maps GGUF architectures, metadata keys and tensor names to Hugging Face's, and builds the config."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig, PreTrainedConfig

from outpace.errors import ModelError

Metadata: TypeAlias = Mapping[str, Any]


@dataclass(frozen=True)
class Architecture:
    """How one GGUF architecture maps to Hugging Face."""

    model_type: str  # Hugging Face's name
    model_class: str
    permuted: bool  # q and k rows are stored for interleaved rope; Hugging Face rotates halves


ARCHITECTURES = {
    "llama": Architecture("llama", "LlamaForCausalLM", permuted=True),
    "qwen2": Architecture("qwen2", "Qwen2ForCausalLM", permuted=False),
    "qwen3": Architecture("qwen3", "Qwen3ForCausalLM", permuted=False),
}

TOP_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
ROPE_FREQS = "rope_freqs.weight"  # Llama 3's frequency divisors, which become part of the config

_SIZES = {
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
}
# Keys that are read one by one below.
_READ = {
    *("attention.head_count_kv", "attention.key_length", "attention.value_length", "attention.layer_norm_rms_epsilon"),
    *("rope.dimension_count", "rope.freq_base", "vocab_size", "attention.sliding_window"),
    *("rope.scaling.type", "rope.scaling.factor", "rope.scaling.original_context_length", "rope.scale_linear"),
    *("rope.scaling.yarn_beta_fast", "rope.scaling.yarn_beta_slow"),
}
# Keys that have no effect if they have this value; None: whatever the value.
_NEUTRAL: Mapping[str, Any] = {
    "attention.causal": True,
    "attention.layer_norm_epsilon": None,  # no layer norms here, only RMS norms
    "expert_count": 0,
    "expert_used_count": 0,
    "pooling_type": None,  # for embeddings only
    "rope.scaling.attn_factor": 1.0,
    "rope.scaling.finetuned": None,
    "tensor_data_layout": None,
    "use_parallel_residual": False,
}
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def hf_name(name: str) -> str | None:
    """Hugging Face's name of a GGUF tensor; None: unknown."""
    stem, _, leaf = name.rpartition(".")
    if stem in TOP_NAMES:
        return f"{TOP_NAMES[stem]}.{leaf}"
    parts = stem.split(".")
    if len(parts) == 3 and parts[0] == "blk" and parts[1].isdecimal() and parts[2] in LAYER_NAMES:
        return f"model.layers.{parts[1]}.{LAYER_NAMES[parts[2]]}.{leaf}"
    return None


def architecture_of(metadata: Metadata) -> tuple[str, Architecture]:
    """The GGUF name of the architecture, and its entry."""
    name = metadata.get("general.architecture")
    if name not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise ModelError(f"general.architecture: {name!r} is not supported in a GGUF file; supported: {known}")
    return name, ARCHITECTURES[name]


def build_config(metadata: Metadata, tensors: frozenset[str], rope_freqs: np.ndarray | None) -> PreTrainedConfig:
    """The Hugging Face config of the model in the file, without `vocab_size`, which comes from the embedding."""
    name, architecture = architecture_of(metadata)
    prefix = f"{name}."
    keys = {key.removeprefix(prefix): value for key, value in metadata.items() if key.startswith(prefix)}
    _refuse_unknown(prefix, keys)
    sizes = {ours: _whole(prefix, keys, key) for key, ours in _SIZES.items()}
    heads, hidden = sizes["num_attention_heads"], sizes["hidden_size"]
    head_dim = _whole(prefix, keys, "attention.key_length", hidden // heads)
    _refuse_odd_shapes(prefix, keys, head_dim)
    fields = {
        **sizes,
        "num_key_value_heads": _whole(prefix, keys, "attention.head_count_kv", heads),
        "head_dim": head_dim,
        "rms_norm_eps": _decimal(_required(prefix, keys, "attention.layer_norm_rms_epsilon")),
        "rope_parameters": _rope(prefix, keys, head_dim, rope_freqs),
        "tie_word_embeddings": "output.weight" not in tensors,
        **_biases(architecture, tensors),
        **_token_ids(metadata),
    }
    try:
        return AutoConfig.for_model(architecture.model_type, architectures=[architecture.model_class], **fields)
    except StrictDataclassError as error:  # the last line says what is wrong
        raise ModelError(f"{prefix}*: {str(error).splitlines()[-1].strip()}") from error


def _refuse_unknown(prefix: str, keys: Metadata) -> None:
    for key, value in keys.items():
        if key in _SIZES or key in _READ:
            continue
        if key not in _NEUTRAL or _NEUTRAL[key] not in (None, value):
            raise ModelError(f"{prefix}{key}: {value!r} is not supported; convert another model")


def _refuse_odd_shapes(prefix: str, keys: Metadata, head_dim: int) -> None:
    for key in ("attention.value_length", "rope.dimension_count"):
        if (got := keys.get(key, head_dim)) != head_dim:
            raise ModelError(f"{prefix}{key}: {got} differs from the head size {head_dim}, which is not supported")
    window = keys.get("attention.sliding_window") or keys["context_length"]
    if window < keys["context_length"]:
        raise ModelError(f"{prefix}attention.sliding_window: {window} is not supported in a GGUF file; use safetensors")


def _biases(architecture: Architecture, tensors: frozenset[str]) -> dict[str, bool]:
    """Config entries for biases, from the tensors in the file. Qwen2 always has its biases."""
    if architecture.model_type == "qwen2":
        return {}
    biases = {"attention_bias": "blk.0.attn_q.bias" in tensors}
    return biases | ({"mlp_bias": "blk.0.ffn_gate.bias" in tensors} if architecture.model_type == "llama" else {})


def _token_ids(metadata: Metadata) -> dict[str, int | list[int] | None]:
    """Special token ids; `eos_token_id` is a list if several tokens can end a turn."""
    ends = [metadata.get(f"tokenizer.ggml.{kind}_token_id") for kind in ("eos", "eot", "eom")]
    eos = list(dict.fromkeys(token for token in ends if token is not None))
    return {
        "bos_token_id": metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": eos if len(eos) > 1 else next(iter(eos), None),
        "pad_token_id": metadata.get("tokenizer.ggml.padding_token_id"),
    }


def _rope(prefix: str, keys: Metadata, head_dim: int, rope_freqs: np.ndarray | None) -> dict[str, Any]:
    theta = float(keys.get("rope.freq_base", 10000.0))
    legacy = float(keys.get("rope.scale_linear", 1.0))
    kind = keys.get("rope.scaling.type", "linear" if legacy != 1.0 else "none")
    if rope_freqs is not None:
        if kind != "none":
            raise ModelError(f"{prefix}rope.scaling.type: {kind!r} together with {ROPE_FREQS} is not supported")
        return _llama3_rope(theta, head_dim, rope_freqs)
    if kind == "none":
        return {"rope_type": "default", "rope_theta": theta}
    if kind == "linear":
        return {"rope_type": "linear", "rope_theta": theta, "factor": float(keys.get("rope.scaling.factor", legacy))}
    if kind == "yarn":
        return {"rope_type": "yarn", "rope_theta": theta, **_yarn(prefix, keys)}
    raise ModelError(
        f"{prefix}rope.scaling.type: {kind!r} is not supported in a GGUF file; supported: none, linear, yarn"
    )


def _yarn(prefix: str, keys: Metadata) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "factor": float(_required(prefix, keys, "rope.scaling.factor")),
        "original_max_position_embeddings": _whole(prefix, keys, "rope.scaling.original_context_length"),
    }
    for field in ("beta_fast", "beta_slow"):
        if (value := keys.get(f"rope.scaling.yarn_{field}")) is not None:
            fields[field] = _decimal(value)
    return fields


def _llama3_rope(theta: float, head_dim: int, divisors: np.ndarray) -> dict[str, Any]:
    """Recover Llama 3's rope parameters from the frequency divisors; other divisors are refused."""
    factor = float(divisors.max(initial=1.0))
    wavelengths = 2 * math.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
    low, high, context = _LLAMA3.values()
    smooth = np.clip((context / wavelengths - low) / (high - low), 0, 1)
    expected = 1 / ((1 - smooth) / factor + smooth)
    if divisors.shape != expected.shape or not np.allclose(divisors, expected, rtol=1e-4):
        raise ModelError(f"{ROPE_FREQS}: these are not Llama 3's rope factors, and no others are supported")
    if factor == 1.0:
        return {"rope_type": "default", "rope_theta": theta}
    return {"rope_type": "llama3", "rope_theta": theta, "factor": factor, **_LLAMA3}


def _required(prefix: str, keys: Metadata, key: str) -> Any:
    if key not in keys:
        raise ModelError(f"{prefix}{key}: missing from the file; convert the model again")
    return keys[key]


def _whole(prefix: str, keys: Metadata, key: str, default: int | None = None) -> int:
    """A positive integer. Lists with one value for each layer are refused."""
    value = keys.get(key, default) if default is not None else _required(prefix, keys, key)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ModelError(f"{prefix}{key}: must be one positive integer, got {str(value)[:40]}")
    return value


def _decimal(value: float) -> float:
    """The short decimal that was stored as float32: 1e-05 for 9.999999747378752e-06."""
    return float(str(np.float32(value)))
