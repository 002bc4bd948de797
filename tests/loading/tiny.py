"""Tiny random models, and GGUF files of them written the way llama.cpp's converter does."""

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Kind
from gguf.quants import dequantize, quantize
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.convert_slow_tokenizer import bytes_to_unicode

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MERGES = ["h e", "l l", "he ll", "hell o", "Ġ w", "o r", "Ġw or", "l d", "Ġwor ld", "1 2", "12 3", "123 4"]
TOKENS = [*SPECIAL, *bytes_to_unicode().values(), *(merge.replace(" ", "") for merge in MERGES)]
VOCAB = 288  # some rows more than there are tokens, as in real models
CHATML = (
    "{% for message in messages %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def tiny_model(architecture: str, **changes: Any) -> PreTrainedModel:
    """A model of a few thousand weights, in eval mode."""
    sizes: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    }
    torch.manual_seed(0)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(AutoConfig.for_model(architecture, **sizes | changes))
    with torch.no_grad():
        for name, value in model.named_parameters():
            value.copy_(1 + 0.1 * torch.randn(value.shape) if "norm" in name else 0.1 * torch.randn(value.shape))
    model.eval()
    return model


def token_metadata() -> dict[str, Any]:
    """The metadata of a small byte-level tokenizer."""
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": TOKENS,
        "tokenizer.ggml.token_type": [3] * len(SPECIAL) + [1] * (len(TOKENS) - len(SPECIAL)),
        "tokenizer.ggml.merges": MERGES,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.padding_token_id": 2,
        "tokenizer.chat_template": CHATML,
    }


def model_metadata(model: PreTrainedModel) -> dict[str, Any]:
    """What the converter writes about a model; 64-bit floats are written as 32-bit ones."""
    config = model.config
    return {
        "context_length": config.max_position_embeddings,
        "block_count": config.num_hidden_layers,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": config.head_dim if hasattr(config, "head_dim") else 16,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "rope.freq_base": config.rope_parameters["rope_theta"],
    }


def gguf_tensors(model: PreTrainedModel) -> dict[str, np.ndarray]:
    """The tensors of a model under GGUF's names (gguf's own table), with llama's q and k rows permuted."""
    config = model.config
    by_type = {name: arch for arch, name in gguf.MODEL_ARCH_NAMES.items()}
    names = gguf.get_tensor_name_map(by_type[config.model_type], config.num_hidden_layers)
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    tensors: dict[str, np.ndarray] = {}
    for name, value in model.state_dict().items():
        data = value.numpy().copy()
        projection = name.split(".")[-2]
        if config.model_type == "llama" and projection in heads:
            halves = data.reshape(heads[projection], 2, -1, *data.shape[1:])
            data = halves.swapaxes(1, 2).reshape(data.shape)
        if not (name == "lm_head.weight" and config.tie_word_embeddings):
            tensors[str(names.get_name(name, try_suffixes=(".weight", ".bias")))] = data
    return tensors


def write_gguf(
    path: Path,
    model: PreTrainedModel,
    kind: Kind = Kind.F32,
    *,
    metadata: dict[str, Any] | None = None,
    tensors: dict[str, np.ndarray | None] | None = None,
    endianess: gguf.GGUFEndian = gguf.GGUFEndian.LITTLE,
) -> Path:
    """Write a GGUF file; `metadata` and `tensors` replace entries, None removes one."""
    architecture = model.config.model_type
    writer = gguf.GGUFWriter(path, architecture, endianess=endianess)
    facts = {f"{architecture}.{key}": value for key, value in model_metadata(model).items()} | token_metadata()
    for key, value in (facts | (metadata or {})).items():
        if value is not None:
            _add(writer, key, value)
    for name, data in (gguf_tensors(model) | (tensors or {})).items():
        if data is None:
            continue
        own = kind if data.ndim == 2 and data.dtype == np.float32 else None
        writer.add_tensor(name, data if own is None else quantize(data, own), raw_dtype=own)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def requantized(model: PreTrainedModel, kind: Kind) -> PreTrainedModel:
    """The same model with its matrices rounded as the quantization rounds them."""
    with torch.no_grad():
        for value in model.parameters():
            if value.ndim == 2:
                value.copy_(torch.from_numpy(dequantize(quantize(value.numpy(), kind), kind)))
    return model


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if key == "general.architecture":  # the writer has written one already
        writer.kv_data[0].pop(key)
        writer.add_string(key, value)
    elif isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)
