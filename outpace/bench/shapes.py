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


DRAWING = (
    "normal_",
    "uniform_",
    "trunc_normal_",
    *(f"{who}_{what}_" for who in ("kaiming", "xavier") for what in ("normal", "uniform")),
)


class _NoDrawing(TorchFunctionMode):
    """Random initializers do nothing here: the values would be drawn twice more, and thrown away."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options = kwargs or {}
        if func.__name__ in DRAWING:
            return args[0] if args else options["tensor"]
        return func(*args, **options)


def build(source: str | Path, dtype: torch.dtype, device: str | torch.device, seed: int = 0) -> nn.Module:
    """A model of a named shape, or of the config.json in a folder: weights normal with deviation 0.02, norms 1."""
    config, generator = config_of(source), torch.Generator(device).manual_seed(seed)
    with torch.device(device), _NoDrawing():
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
    """Bytes of weights that one decode step must read: all but the rows of the embedding that are not looked up."""
    embedding = model.get_input_embeddings().weight  # type: ignore[operator]
    head = model.get_output_embeddings().weight  # type: ignore[operator]
    total = sum(parameter.nbytes for parameter in model.parameters())
    return int(total) if head is embedding else int(total - embedding.nbytes)


def config_of(source: str | Path) -> PreTrainedConfig:
    """The config of a named shape, or of a folder."""
    if str(source) in SHAPES:
        shape = dict(SHAPES[str(source)])
        rope = {"rope_type": "default", "rope_theta": shape.pop("rope_theta")}
        return AutoConfig.for_model(shape.pop("model_type"), rope_parameters=rope, **shape)
    if not (Path(source) / "config.json").is_file():
        raise ModelError(
            f"model: random weights need one of {', '.join(SHAPES)} or a folder with a config.json; got {source}"
        )
    try:
        config: PreTrainedConfig = AutoConfig.from_pretrained(source, trust_remote_code=False, local_files_only=True)
    except (OSError, ValueError, TypeError, LookupError, AttributeError) as error:
        raise ModelError(f"model: cannot use {Path(source) / 'config.json'} ({error})") from error
    return config
