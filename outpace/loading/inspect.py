"""Collects the facts about a Hugging Face or plain torch model that the engine needs."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from outpace.errors import ConfigError, InputError, ModelError, NotSupported
from outpace.inject.modules import Made
from outpace.inject.quantized import PackedExperts, PackedLinear

Kind = Literal["causal", "encoder-decoder", "encoder", "plain"]

_EXPERT_COUNTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
_EXPERTS_PER_TOKEN = ("num_experts_per_tok", "experts_per_token", "num_experts_per_token", "moe_top_k", "moe_k")
_READ = ("is_encoder_decoder", "vocab_size", "max_position_embeddings", *_EXPERT_COUNTS)


@dataclass(frozen=True)
class ModelInfo:
    """The facts the engine needs about a model."""

    kind: Kind
    can_generate: bool
    vocab_size: int | None
    max_positions: int | None
    num_experts: int
    """Largest number of experts in a layer; 0: no expert layers, or `find_experts` is False."""
    experts_per_token: int
    """Number of experts for each token; 0: the config does not say."""
    graphs_itself: bool
    """A submodule captures its own CUDA graphs."""


def describe(model: nn.Module, overrides: Mapping[str, Any] | None = None, *, find_experts: bool = True) -> ModelInfo:
    """Read a model's config. overrides: replaces entries of the config."""
    config = getattr(model, "config", None)
    unread = sorted((overrides or {}).keys() - set(_READ))
    if unread:
        raise ConfigError(f"config: {unread[0]!r} is not an entry that the engine reads: {', '.join(_READ)}")

    def read(name: str) -> Any:
        return overrides[name] if overrides and name in overrides else getattr(config, name, None)

    def largest(names: tuple[str, ...]) -> int:
        return max((_int_or_none(read(name)) or 0 for name in names), default=0) if find_experts else 0

    return ModelInfo(
        kind=_kind(model, read("is_encoder_decoder")),
        can_generate=_can_generate(model),
        vocab_size=_int_or_none(read("vocab_size")),
        max_positions=_int_or_none(read("max_position_embeddings")),
        num_experts=largest(_EXPERT_COUNTS),
        experts_per_token=largest(_EXPERTS_PER_TOKEN),
        graphs_itself=any(getattr(module, "enable_cuda_graph", False) is True for module in model.modules()),
    )


def embedding_sizes(model: nn.Module) -> tuple[int, ...]:
    """Widths to which embeddings may be truncated (Matryoshka); empty: only the full width."""
    config = getattr(model, "config", None)
    listed = getattr(config, "matryoshka_dimensions", None)
    if not listed and getattr(config, "is_matryoshka", False) is True:
        listed = range(1, (_int_or_none(getattr(config, "hidden_size", None)) or 0) + 1)
    return tuple(size for size in listed or () if isinstance(size, int))


def check_model(model: object, *, empty: bool = False) -> nn.Module:
    """Return the model if it can be run; otherwise raise an error with a remedy.

    empty: weights may be missing, since they come from a checkpoint.
    """
    if not isinstance(model, nn.Module):
        raise ModelError(
            f"model: expected a torch.nn.Module, got {type(model).__name__}; to start from a name, a folder or a .gguf "
            "file use outpace.LLM, or load it first"
        )
    for name, tensor in _tensors(model):
        if tensor.is_meta and not empty:
            raise ModelError(
                f"model: {name} is on the meta device and has no values; load the weights first, or name them with "
                "checkpoint="
            )
    if getattr(model, "is_quantized", False):
        raise ModelError("model: it is quantized already, so its dtype cannot be changed; load it unquantized")
    made = next((module for module in model.modules() if isinstance(module, Made)), None)
    if made is not None:  # its weights no longer have their original names
        what = "its linears are quantized" if isinstance(made, PackedLinear | PackedExperts) else "its layers are fused"
        raise ModelError(f"model: {what} already; use the engine that it is part of, or load the model again")
    return model


def encoder_decoder(name: str, kind: str | None = None) -> NotSupported:
    """The error for an encoder-decoder model. kind: its class, if it is not loaded yet."""
    return NotSupported(
        f"model: {name} is an encoder-decoder model, but LLM, outpace serve and outpace verify run only decoders; "
        f"{use_engine(kind)}"
    )


def use_engine(kind: str | None) -> str:
    """The remedy for a model that `LLM` and `verify` cannot run. kind: its class, if it is not loaded yet."""
    load = "" if kind is None else f"load it with transformers ({kind}.from_pretrained) and "
    return f"{load}call it with outpace.init_inference(model)"


def kept_in_fp32(model: nn.Module, dtype: torch.dtype) -> set[str]:
    """Names of the parameters and buffers that must stay float32 when the model runs in `dtype`."""
    if dtype not in (torch.float16, torch.bfloat16):
        return set()
    patterns = set(getattr(model, "_keep_in_fp32_modules_strict", None) or ())
    if dtype == torch.float16:
        patterns |= set(getattr(model, "_keep_in_fp32_modules", None) or ())
    return {name for name, _ in _tensors(model) if any(_has_path(name, pattern) for pattern in patterns)}


def text_config(model: nn.Module) -> Any:
    """The part of the model's config about text; None: it has no config."""
    config: Any = getattr(model, "config", None)
    return config.get_text_config() if hasattr(config, "get_text_config") else config


def generation_config(model: nn.Module) -> Any:
    return getattr(model, "generation_config", None)


def token_list(name: str, value: Any) -> list[int]:
    """Token ids from one id, a list of ids or a tensor."""
    try:
        return [] if value is None else [int(token) for token in torch.as_tensor(value).reshape(-1).tolist()]
    except (TypeError, ValueError, RuntimeError):
        raise InputError(f"{name}: expected a token id or several, got {value!r:.60}") from None


def _has_path(name: str, pattern: str) -> bool:
    """Whether the dotted `pattern` occurs as whole components in the dotted `name`."""
    return f".{pattern}." in f".{name}."


def _tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from model.named_parameters()
    yield from model.named_buffers()


def _can_generate(model: nn.Module) -> bool:
    says = getattr(model, "can_generate", None)
    return bool(says()) if callable(says) else callable(getattr(model, "generate", None))


def _kind(model: nn.Module, is_encoder_decoder: object) -> Kind:
    if getattr(model, "config", None) is None:
        return "plain"
    if is_encoder_decoder:
        return "encoder-decoder"
    return "causal" if _can_generate(model) else "encoder"


def _int_or_none(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None
