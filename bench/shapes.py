"""The models that figures are given for: published shapes, random weights."""

from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

SHAPES: dict[str, dict[str, Any]] = {
    "llama-3.1-8b": {
        "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 128256,
        "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "tie_word_embeddings": False, "max_position_embeddings": 131072,
    },
    "llama-3.2-1b": {
        "model_type": "llama", "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
        "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64, "vocab_size": 128256,
        "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "tie_word_embeddings": True, "max_position_embeddings": 131072,
    },
    "qwen3-0.6b": {
        "model_type": "qwen3", "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28,
        "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936,
        "rms_norm_eps": 1e-6, "rope_theta": 1e6, "tie_word_embeddings": True, "max_position_embeddings": 40960,
    },
}  # fmt: skip


def build(name: str, dtype: torch.dtype, device: str, seed: int = 0) -> nn.Module:
    """A model of a published shape with random weights: normal with deviation 0.02, norms 1."""
    shape = dict(SHAPES[name])
    theta = shape.pop("rope_theta")
    config = AutoConfig.for_model(
        shape.pop("model_type"), rope_parameters={"rope_type": "default", "rope_theta": theta}, **shape
    )
    generator = torch.Generator(device).manual_seed(seed)
    with torch.device(device):
        model: nn.Module = AutoModelForCausalLM.from_config(config, dtype=dtype)
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.data.normal_(0, 0.02, generator=generator)
    return model.eval()


def bytes_read_per_token(model: nn.Module) -> int:
    """Bytes of weights that one decode step must read: all but the rows of the embedding that are not looked up."""
    embedding = model.get_input_embeddings().weight  # type: ignore[operator]
    head = model.get_output_embeddings().weight  # type: ignore[operator]
    total = sum(parameter.nbytes for parameter in model.parameters())
    return int(total) if head is embedding else int(total - embedding.nbytes)
