"""Models with random weights: of published shapes, or of anybody's config."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig

from outpace.errors import ModelError

DEVIATION = 0.02
POOL = 1_000_003  # values that are drawn for a CPU; a prime, so that rows differ
SHAPES: Mapping[str, Mapping[str, Any]] = {
    "llama-3.1-8b": {
        "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 128256,
        "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "tie_word_embeddings": False, "max_position_embeddings": 131072,
    },
    "llama-3.1-70b": {
        "model_type": "llama", "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80,
        "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 128256,
        "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "tie_word_embeddings": False, "max_position_embeddings": 131072,
    },
    "llama-3.1-405b": {
        "model_type": "llama", "hidden_size": 16384, "intermediate_size": 53248, "num_hidden_layers": 126,
        "num_attention_heads": 128, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 128256,
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
    "qwen3-30b-a3b": {
        "model_type": "qwen3_moe", "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 48,
        "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "vocab_size": 151936,
        "rms_norm_eps": 1e-6, "rope_theta": 1e6, "tie_word_embeddings": False, "max_position_embeddings": 40960,
        "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768, "norm_topk_prob": True,
    },
    "qwen3-235b-a22b": {
        "model_type": "qwen3_moe", "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 94,
        "num_attention_heads": 64, "num_key_value_heads": 4, "head_dim": 128, "vocab_size": 151936,
        "rms_norm_eps": 1e-6, "rope_theta": 1e6, "tie_word_embeddings": False, "max_position_embeddings": 40960,
        "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 1536, "norm_topk_prob": True,
    },
    "mixtral-8x7b": {
        "model_type": "mixtral", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 32000,
        "rms_norm_eps": 1e-5, "rope_theta": 1e6, "tie_word_embeddings": False, "max_position_embeddings": 32768,
        "num_local_experts": 8, "num_experts_per_tok": 2,
    },
    "gpt-oss-20b": {
        "model_type": "gpt_oss", "hidden_size": 2880, "intermediate_size": 2880, "num_hidden_layers": 24,
        "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64, "vocab_size": 201088,
        "rms_norm_eps": 1e-5, "tie_word_embeddings": False, "max_position_embeddings": 131072, "sliding_window": 128,
        "num_local_experts": 32, "num_experts_per_tok": 4, "swiglu_limit": 7.0,
        "rope_parameters": {
            "rope_type": "yarn", "rope_theta": 150000.0, "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0,
            "original_max_position_embeddings": 4096, "truncate": False,
        },
    },
    "deepseek-v2-lite": {
        "model_type": "deepseek_v2", "hidden_size": 2048, "intermediate_size": 10944, "num_hidden_layers": 27,
        "num_attention_heads": 16, "num_key_value_heads": 16, "vocab_size": 102400, "kv_lora_rank": 512,
        "q_lora_rank": None, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
        "rms_norm_eps": 1e-6, "tie_word_embeddings": False, "max_position_embeddings": 163840,
        "n_routed_experts": 64, "n_shared_experts": 2, "num_experts_per_tok": 6, "moe_intermediate_size": 1408,
        "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "topk_method": "greedy", "norm_topk_prob": False,
        "routed_scaling_factor": 1.0,
        "rope_parameters": {
            "rope_type": "yarn", "rope_theta": 10000.0, "factor": 40.0, "beta_fast": 32.0, "beta_slow": 1.0,
            "mscale": 0.707, "mscale_all_dim": 0.707, "original_max_position_embeddings": 4096,
        },
    },
    "small": {
        "model_type": "llama", "hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 8,
        "num_attention_heads": 16, "num_key_value_heads": 16, "head_dim": 64, "vocab_size": 1024,
        "rms_norm_eps": 1e-5, "rope_theta": 1e4, "tie_word_embeddings": False, "max_position_embeddings": 4096,
    },
    "tiny": {
        "model_type": "llama", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 256,
        "rms_norm_eps": 1e-5, "rope_theta": 1e4, "tie_word_embeddings": False, "max_position_embeddings": 2048,
    },
    "tiny-moe": {
        "model_type": "qwen3_moe", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 256,
        "rms_norm_eps": 1e-6, "rope_theta": 1e4, "tie_word_embeddings": False, "max_position_embeddings": 2048,
        "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "norm_topk_prob": True,
    },
}  # fmt: skip
"""Entries of the published config.json files; small, tiny and tiny-moe are for tries without a GPU. The layers of small
are nearly all of it, so that stages of a pipeline are equal."""
SMALL = ("llama-3.1-8b", "llama-3.2-1b", "qwen3-0.6b")
"""Dense ones that one GPU runs with room to spare."""
DENSE = tuple(name for name, shape in SHAPES.items() if "num_experts_per_tok" not in shape)


DRAWING = (
    "normal_",
    "uniform_",
    "trunc_normal_",
    *(f"{who}_{what}_" for who in ("kaiming", "xavier") for what in ("normal", "uniform")),
)


class _NoDrawing(TorchFunctionMode):
    """Random initializers of matrices do nothing: the values would be drawn twice more, and thrown away.

    Vectors (biases, attention sinks) are drawn here, since what is not drawn is not set at all.
    """

    def __init__(self, generator: torch.Generator) -> None:
        super().__init__()
        self._generator = generator

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options = kwargs or {}
        if func.__name__ not in DRAWING:
            return func(*args, **options)
        tensor: torch.Tensor = args[0] if args else options["tensor"]
        if tensor.dim() < 2:
            tensor.data.normal_(0, DEVIATION, generator=self._generator)
        return tensor


def rank_shape(name: str, tp: int, ep: int | None = None) -> dict[str, Any]:
    """The shape of a model whose layers are as large as one rank's share of them, so that it runs without collectives.

    Heads, rows of the MLP and of the vocabulary are split over `tp` ranks, experts over `ep` groups of them (None: each
    rank has whole experts). Key heads that are fewer than ranks are there more than once. Of the experts that a token
    goes to, a rank has its mean share; its router is smaller than the whole one, which all ranks have.
    """
    shape, groups = dict(SHAPES[name]), tp if ep is None else ep
    if tp < 1 or groups < 1 or tp % groups:
        raise ModelError(f"ranks: ep={groups} groups need a tp that is a multiple of it, got {tp}")
    for key in ("num_attention_heads", "num_key_value_heads", "intermediate_size", "vocab_size"):
        shape[key] = _part(name, key, shape[key], tp)
    if "moe_intermediate_size" in shape:
        shape["moe_intermediate_size"] = _part(
            name, "moe_intermediate_size", shape["moe_intermediate_size"], tp // groups
        )
    for key in ("num_experts", "num_local_experts", "n_routed_experts"):
        if key in shape:
            shape[key] = _part(name, key, shape[key], groups)
    if "num_experts_per_tok" in shape:
        shape["num_experts_per_tok"] = max(1, shape["num_experts_per_tok"] // groups)
    return shape


def _part(name: str, key: str, size: int, ranks: int) -> int:
    """One rank's part of a size."""
    if key == "num_key_value_heads" and size < ranks and ranks % size == 0:
        return 1
    if size % ranks:
        raise ModelError(f"ranks: {key}={size} of {name} cannot be split over {ranks} ranks evenly")
    return size // ranks


def build(
    source: str | Path | Mapping[str, Any], dtype: torch.dtype, device: str | torch.device, seed: int = 0
) -> nn.Module:
    """A model of a shape, or of the config.json in a folder: weights normal with deviation 0.02, norms 1.

    They are made where they run and in the dtype they run in, so what is started from it never holds them twice:
    stacks of experts stay as they are, and what is fused is fused one weight at a time.
    """
    config, generator = config_of(source), torch.Generator(device).manual_seed(seed)
    with torch.device(device), _NoDrawing(generator):
        model: nn.Module = AutoModelForCausalLM.from_config(config, dtype=dtype)
    _fill([parameter.data for parameter in model.parameters() if parameter.dim() > 1], generator)
    return model.eval().requires_grad_(False)


def _fill(weights: list[torch.Tensor], generator: torch.Generator) -> None:
    """Draw the weights. A CPU gets the same million values over and over: it draws 20 million a second, and 8B weights
    would take minutes."""
    if generator.device.type != "cpu":
        for weight in weights:
            weight.normal_(0, DEVIATION, generator=generator)
        return
    pool = torch.empty(POOL).normal_(0, DEVIATION, generator=generator)
    for weight in weights:
        for part in weight.view(-1).split(POOL):
            part.copy_(pool[: len(part)])


def bytes_read_per_token(model: nn.Module) -> int:
    """Bytes of weights that one decode step of a model without experts must read: all but the rows of the embedding
    that are not looked up."""
    embedding = model.get_input_embeddings().weight  # type: ignore[operator]
    head = model.get_output_embeddings().weight  # type: ignore[operator]
    total = sum(parameter.nbytes for parameter in model.parameters())
    return int(total) if head is embedding else int(total - embedding.nbytes)


def config_of(source: str | Path | Mapping[str, Any]) -> PreTrainedConfig:
    """The config of a shape, of a named one, or of a folder."""
    if isinstance(source, Mapping) or str(source) in SHAPES:
        shape = dict(source if isinstance(source, Mapping) else SHAPES[str(source)])
        if "rope_theta" in shape:
            shape["rope_parameters"] = {"rope_type": "default", "rope_theta": shape.pop("rope_theta")}
        return AutoConfig.for_model(shape.pop("model_type"), **shape)
    if not (Path(source) / "config.json").is_file():
        raise ModelError(
            f"model: random weights need one of {', '.join(SHAPES)} or a folder with a config.json; got {source}"
        )
    try:
        config: PreTrainedConfig = AutoConfig.from_pretrained(source, trust_remote_code=False, local_files_only=True)
    except (OSError, ValueError, TypeError, LookupError, AttributeError) as error:
        raise ModelError(f"model: cannot use {Path(source) / 'config.json'} ({error})") from error
    return config
