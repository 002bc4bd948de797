"""Loads a model for `LLM`: finds it, and prepares it to run over pages."""

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedTokenizerBase

from outpace.cache.kv_cache import check_page_dtype
from outpace.config import LLMConfig
from outpace.errors import ConfigError, ModelError, NotSupported
from outpace.inject.injection import Injection, check_split
from outpace.inject.paged import BatchModel
from outpace.inject.quantize_others import weights_of
from outpace.inject.quantized import QuantizedReport
from outpace.inject.staged import stages_of
from outpace.kernels.compile_ahead import getting_ready
from outpace.kernels.dispatch import choose_kernels
from outpace.loading.build import Found, Loaded, find
from outpace.loading.inspect import (
    ModelInfo,
    describe,
    encoder_decoder,
    generation_config,
    token_list,
)
from outpace.loading.measure_plan import measured_plan
from outpace.loading.names import match
from outpace.loading.sampling_defaults import sampling_defaults
from outpace.loading.sensitivity import weights as weights_found
from outpace.loading.skeleton import outside
from outpace.offload.streaming import Streaming
from outpace.prepare import prepare
from outpace.quant.plan import QuantPlan

DEFAULT_LENGTH = 2048  # tokens of a request if neither the model nor the user sets a limit


@outside()
def find_plan(model: str | os.PathLike[str] | None, config: LLMConfig) -> QuantPlan:
    """Choose a scheme for each weight of a model by measuring (`quant.auto`), without preparing it to run."""
    assert config.quant is not None, "asked for"
    assert config.quant.auto is not None, "asked for"
    found = _find(model, config, tokenizer=config.quant.reads_text)
    info, sources = describe(found.model, config.config), match(found.model, found.weights, found.dtype)
    made = weights_found(weights_of(found.model, None, choose_kernels(config.torch_device, config.kernels)))
    if any(weight.role == "experts" for weight in made):
        raise NotSupported(
            f"auto: {found.name} has experts, and the layout of the written files has no form for plans with experts; "
            "give quant.auto when the model is loaded, or choose a scheme"
        )
    device = config.torch_device
    return measured_plan(found.model, made, config.quant, info, sources, found.dtype, device, found.tokenizer)


@dataclass(frozen=True)
class PagedParts:
    """A model that runs batches over pages, and facts about it."""

    model: BatchModel
    module: nn.Module
    """The same model as a Hugging Face module, with its layers replaced."""
    config: LLMConfig
    name: str
    tokenizer: PreTrainedTokenizerBase | None
    eos_token_ids: tuple[int, ...]
    vocab_size: int | None
    max_model_len: int
    dtype: torch.dtype
    dtype_reason: str
    device: torch.device
    seconds: dict[str, float]
    """Seconds of each part of loading."""
    sampling: Mapping[str, float] = field(default_factory=dict)
    """Default sampling parameters, by field of SamplingParams."""
    weight_bytes: int = 0
    """Bytes that were read to load it."""
    quantized: QuantizedReport | None = None
    """How its weights are quantized; None: they are in `dtype`."""
    streaming: Streaming | None = None
    """Layers that are streamed to the device; None: all layers stay there."""


def find_divisible(
    model: str | os.PathLike[str] | None, config: LLMConfig, tokenizer: bool | PreTrainedTokenizerBase
) -> Found:
    """Find a model without loading its weights, and check that the ranks that the config asks for can divide it."""
    found, asked = _find(model, config, _reads(config, tokenizer)), config.pipeline_parallel
    if asked.pp_size > 1:
        stages_of(found.model, asked.pp_size, asked.layers)
    check_split(found.model, config)
    return found


def _reads(config: LLMConfig, tokenizer: bool | PreTrainedTokenizerBase) -> bool:
    return tokenizer is True or (tokenizer is False and config.quant is not None and config.quant.reads_text)


def load_paged(
    model: str | os.PathLike[str] | nn.Module | Found | None,
    asked: LLMConfig,
    *,
    tokenizer: bool | PreTrainedTokenizerBase = True,
) -> PagedParts:
    """Load a model (a name, a folder, a .gguf file, a live module, or a found model) and prepare it to run over pages.

    tokenizer: one to use instead of the model's own (True). False loads none, for an engine that gets only token ids,
    unless quantization must tokenize a text.
    """
    check_page_dtype(asked.kv_cache_dtype, asked.torch_device)
    begin = time.perf_counter()
    if asked.torch_device.type == "cuda":
        getting_ready()  # in the background, while weights are loaded
    loaded: Loaded | Found
    if isinstance(model, Found):
        loaded = model
    else:
        loaded = _live(model, asked) if isinstance(model, nn.Module) else _find(model, asked, _reads(asked, tokenizer))
    if isinstance(tokenizer, PreTrainedTokenizerBase):
        loaded = replace(loaded, tokenizer=tokenizer)
    info = describe(loaded.model, asked.config)
    if info.kind == "encoder-decoder":
        raise encoder_decoder(loaded.name)
    if not info.can_generate:
        raise ModelError(f"model: {loaded.name} is not a generative model; call it with outpace.init_inference")
    config = LLMConfig(**{**asked.given(), "dtype": loaded.dtype, "quant": asked.asked_quant or asked.quant})
    at_load = time.perf_counter()

    def check(info: ModelInfo, injection: Injection | None) -> None:
        length = _max_model_len(info, config)
        if injection is None or not injection.has_pages(length):
            raise ModelError(f"model: {loaded.name} cannot run over pages; call it with outpace.init_inference")
        if config.deterministic and (reason := injection.varies()):
            raise NotSupported(f"deterministic: {loaded.name} depends on the batch: {reason}; remove deterministic")

    weights = loaded.weights if isinstance(loaded, Found) else None
    options: dict[str, Any] = {"deterministic": config.deterministic, "check": check, "tokenizer": loaded.tokenizer}
    prepared = prepare(loaded.model, config, weights=weights, **options)
    paged = prepared.paged()
    assert paged is not None, "checked before"
    length, own = _max_model_len(prepared.info, config), generation_config(prepared.module)
    return PagedParts(
        model=paged(length),
        module=prepared.module,
        config=config,
        name=loaded.name,
        tokenizer=loaded.tokenizer,
        eos_token_ids=tuple(token_list("eos_token_id", own.eos_token_id)),
        vocab_size=prepared.info.vocab_size,
        max_model_len=length,
        dtype=prepared.dtype,
        dtype_reason=loaded.dtype_reason,
        device=prepared.device,
        seconds={"load": at_load - begin, **prepared.seconds},
        sampling=sampling_defaults(config.generation_config, own, loaded.sampling if isinstance(loaded, Found) else {}),
        weight_bytes=prepared.weight_bytes,
        quantized=prepared.quantized,
        streaming=prepared.streaming,
    )


def _find(model: str | os.PathLike[str] | None, config: LLMConfig, tokenizer: bool) -> Found:
    if not isinstance(model, str | os.PathLike | None):
        raise ModelError(f"model: expected a name, a path or a torch.nn.Module, got {type(model).__name__}")
    source = None if model is None else os.fspath(model)
    return find(source, dtype=config.compute_dtype, device=config.torch_device, tokenizer=tokenizer)


def _live(model: nn.Module, config: LLMConfig) -> Loaded:
    """A module the caller made: its own dtype, unless another is asked for."""
    own = next((tensor.dtype for tensor in model.parameters() if tensor.is_floating_point()), torch.float32)
    asked = config.compute_dtype
    dtype, reason = (asked, "asked for") if asked else (own, "the module's own")
    return Loaded(model, None, type(model).__name__, None, dtype, reason)


def _max_model_len(info: ModelInfo, config: LLMConfig) -> int:
    asked, own = config.max_out_tokens, info.max_positions
    if asked is not None and own is not None and asked > own:
        raise ConfigError(f"max_model_len: {asked} is more than the {own} positions of the model; ask for fewer")
    return asked or own or DEFAULT_LENGTH
