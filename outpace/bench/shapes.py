"""Models with random weights, for published shapes or any config."""

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


def _shape(
    model_type: str, hidden: int, inner: int, layers: int, heads: int, kv_heads: int, vocab: int, positions: int,
    eps: float = 1e-5, tied: bool = False, **more: Any,
) -> Mapping[str, Any]:  # fmt: skip
    """Entries of a config.json that all families but OPT and GPT-NeoX share."""
    return {
        "model_type": model_type, "hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": layers,
        "num_attention_heads": heads, "num_key_value_heads": kv_heads, "vocab_size": vocab,
        "max_position_embeddings": positions, "rms_norm_eps": eps, "tie_word_embeddings": tied,
        **more,
    }  # fmt: skip


def _opt(hidden: int, inner: int, layers: int) -> Mapping[str, Any]:
    return {
        "model_type": "opt", "hidden_size": hidden, "ffn_dim": inner, "num_hidden_layers": layers,
        "num_attention_heads": 32, "vocab_size": 50272, "word_embed_proj_dim": hidden, "max_position_embeddings": 2048,
        "do_layer_norm_before": True, "activation_function": "relu",
    }  # fmt: skip


_YARN = {"rope_type": "yarn", "beta_fast": 32.0, "beta_slow": 1.0, "original_max_position_embeddings": 4096}
_LLAMA_3: Any = {"rope_theta": 5e5}
_QWEN_3: Any = {"head_dim": 128, "rope_theta": 1e6}
_EXPERTS: Any = {"num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": True}
# hidden size, MLP, layers, heads, key heads, vocabulary, positions
SHAPES: Mapping[str, Mapping[str, Any]] = {
    "llama-3.1-8b": _shape("llama", 4096, 14336, 32, 32, 8, 128256, 131072, head_dim=128, **_LLAMA_3),
    "llama-3.1-70b": _shape("llama", 8192, 28672, 80, 64, 8, 128256, 131072, head_dim=128, **_LLAMA_3),
    "llama-3.1-405b": _shape("llama", 16384, 53248, 126, 128, 8, 128256, 131072, head_dim=128, **_LLAMA_3),
    "llama-3.2-1b": _shape("llama", 2048, 8192, 16, 32, 8, 128256, 131072, head_dim=64, tied=True, **_LLAMA_3),
    "qwen3-0.6b": _shape("qwen3", 1024, 3072, 28, 16, 8, 151936, 40960, 1e-6, tied=True, **_QWEN_3),
    "qwen2.5-7b": _shape("qwen2", 3584, 18944, 28, 28, 4, 152064, 131072, 1e-6, rope_theta=1e6),
    "gemma-2-2b": _shape(
        "gemma2", 2304, 9216, 26, 8, 4, 256000, 8192, 1e-6, head_dim=256, rope_theta=1e4,
        sliding_window=4096, query_pre_attn_scalar=256, attn_logit_softcapping=50.0, final_logit_softcapping=30.0,
        hidden_activation="gelu_pytorch_tanh", tied=True,
    ),
    "llama-2-7b": _shape("llama", 4096, 11008, 32, 32, 32, 32000, 4096, head_dim=128, rope_theta=1e4),
    "pythia-6.9b": {
        "model_type": "gpt_neox", "hidden_size": 4096, "intermediate_size": 16384, "num_hidden_layers": 32,
        "num_attention_heads": 32, "vocab_size": 50432, "layer_norm_eps": 1e-5, "tie_word_embeddings": False,
        "max_position_embeddings": 2048, "use_parallel_residual": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25},
    },
    "opt-6.7b": _opt(4096, 16384, 32),
    "opt-1.3b": _opt(2048, 8192, 24),
    "qwen3-30b-a3b": _shape(
        "qwen3_moe", 2048, 6144, 48, 32, 4, 151936, 40960, 1e-6, moe_intermediate_size=768, **_QWEN_3, **_EXPERTS
    ),
    "qwen3-235b-a22b": _shape(
        "qwen3_moe", 4096, 12288, 94, 64, 4, 151936, 40960, 1e-6, moe_intermediate_size=1536, **_QWEN_3, **_EXPERTS
    ),
    "mixtral-8x7b": _shape(
        "mixtral", 4096, 14336, 32, 32, 8, 32000, 32768, head_dim=128, rope_theta=1e6,
        num_local_experts=8, num_experts_per_tok=2,
    ),
    "gpt-oss-20b": _shape(
        "gpt_oss", 2880, 2880, 24, 64, 8, 201088, 131072, head_dim=64, sliding_window=128,
        num_local_experts=32, num_experts_per_tok=4, swiglu_limit=7.0,
        rope_parameters={**_YARN, "rope_theta": 150000.0, "factor": 32.0, "truncate": False},
    ),
    "deepseek-v2-lite": _shape(
        "deepseek_v2", 2048, 10944, 27, 16, 16, 102400, 163840, 1e-6, kv_lora_rank=512, q_lora_rank=None,
        qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128, n_routed_experts=64, n_shared_experts=2,
        num_experts_per_tok=6, moe_intermediate_size=1408, first_k_dense_replace=1, n_group=1, topk_group=1,
        topk_method="greedy", norm_topk_prob=False, routed_scaling_factor=1.0,
        rope_parameters={**_YARN, "rope_theta": 1e4, "factor": 40.0, "mscale": 0.707, "mscale_all_dim": 0.707},
    ),
    "small": _shape("llama", 1024, 2816, 8, 16, 16, 1024, 4096, head_dim=64, rope_theta=1e4),
    "tiny": _shape("llama", 32, 48, 2, 4, 2, 256, 2048, head_dim=8, rope_theta=1e4),
    "tiny-moe": _shape(
        "qwen3_moe", 32, 48, 2, 4, 2, 256, 2048, 1e-6, head_dim=8, rope_theta=1e4,
        num_experts=8, num_experts_per_tok=2, moe_intermediate_size=16, norm_topk_prob=True,
    ),
}  # fmt: skip
"""Entries of the published config.json files; small, tiny and tiny-moe are for trials without a GPU. Almost all weights
of small are in its layers, so that pipeline stages are equal."""
SMALL = ("llama-3.1-8b", "llama-3.2-1b", "qwen3-0.6b")
"""Dense models that fit one GPU with room to spare."""
DENSE = tuple(name for name, shape in SHAPES.items() if "num_experts_per_tok" not in shape)


DRAWING = (
    "normal_",
    "uniform_",
    "trunc_normal_",
    *(f"{who}_{what}_" for who in ("kaiming", "xavier") for what in ("normal", "uniform")),
)


class _NoDrawing(TorchFunctionMode):
    """Turns off random initializers of matrices, because `build` draws all matrices itself.

    Vectors (biases, attention sinks) are still drawn, since `build` does not set them.
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


def rank_shape(name: str, ranks: int) -> dict[str, Any]:
    """The shape of a model with layers as large as one rank's share, so that it runs without collectives.

    Heads, rows of the MLP and of the vocabulary, and whole experts are split over the ranks. If there are fewer key
    heads than ranks, ranks share copies. A rank gets its mean share of the experts of a token. Its router is smaller
    than the real one, which every rank has as a whole.
    """
    if ranks < 1:
        raise ModelError(f"ranks: expected at least 1, got {ranks}")
    shape = dict(SHAPES[name])
    split = ("num_attention_heads", "num_key_value_heads", "intermediate_size", "vocab_size")
    if missing := [key for key in split if key not in shape]:
        raise ModelError(f"ranks: {name} has no {missing[0]}; its share of a rank is not known")
    for key in (*split, "num_experts", "num_local_experts", "n_routed_experts"):
        if key in shape:
            shape[key] = _part(name, key, shape[key], ranks)
    if "num_experts_per_tok" in shape:
        shape["num_experts_per_tok"] = max(1, shape["num_experts_per_tok"] // ranks)
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

    Weights are made on their device and in their dtype, so that a start never holds them twice: stacks of experts stay
    as they are, and other weights are fused one at a time.
    """
    config, generator = config_of(source), torch.Generator(device).manual_seed(seed)
    with torch.device(device), _NoDrawing(generator):
        model: nn.Module = AutoModelForCausalLM.from_config(config, dtype=dtype)
    _fill([parameter.data for parameter in model.parameters() if parameter.dim() > 1], generator)
    return model.eval().requires_grad_(False)


def _fill(weights: list[torch.Tensor], generator: torch.Generator) -> None:
    """Draw the weights. On a CPU, which draws 20 million per second, they repeat the same million values: 8B weights
    would take minutes."""
    if generator.device.type != "cpu":
        for weight in weights:
            weight.normal_(0, DEVIATION, generator=generator)
        return
    pool = torch.empty(POOL).normal_(0, DEVIATION, generator=generator)
    for weight in weights:
        for part in weight.view(-1).split(POOL):
            part.copy_(pool[: len(part)])


def config_of(source: str | Path | Mapping[str, Any]) -> PreTrainedConfig:
    """The config of a shape (its entries or its name), or of a folder."""
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
