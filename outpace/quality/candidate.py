"""A model to evaluate: its config is read first, its weights are loaded only when it runs."""

import gc
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedTokenizerBase

from outpace.config import LLMConfig
from outpace.config.sections import SchedulerConfig
from outpace.errors import InputError, ModelError
from outpace.llm import LLM
from outpace.load_paged import DEFAULT_LENGTH
from outpace.loading.build import find
from outpace.loading.inspect import ModelInfo, describe

AnyModel = str | os.PathLike[str] | nn.Module | LLM | None
"""A model as `LLM` takes it, or an LLM."""


@dataclass(frozen=True)
class Candidate:
    """A model, and the facts about it that need no weights."""

    source: AnyModel
    config: LLMConfig
    tokenizer: PreTrainedTokenizerBase | None
    max_length: int
    vocab_size: int | None

    @classmethod
    def of(cls, source: AnyModel, options: Mapping[str, Any]) -> "Candidate":
        """Read a model's config. `options` are those of `LLM`."""
        if isinstance(source, LLM):
            if options:
                raise InputError(f"{next(iter(options))}: the LLM was made without it; give the model, or remove it")
            return cls(source, source.config, source.tokenizer, source.max_model_len, None)
        given = dict(options)
        tokenizer, config = given.pop("tokenizer", None), LLMConfig.of(given.pop("config", None), **given)
        if not isinstance(tokenizer, PreTrainedTokenizerBase | None):
            raise InputError(f"tokenizer: expected a Hugging Face tokenizer, got {type(tokenizer).__name__}")
        if isinstance(source, nn.Module):
            return cls(source, config, tokenizer, *_sizes(describe(source, config.config), config))
        if not isinstance(source, str | os.PathLike | None):
            raise ModelError(
                f"model: expected a name, a path, a torch.nn.Module or an LLM, got {type(source).__name__}"
            )
        name = None if source is None else os.fspath(source)
        found = find(name, dtype=config.compute_dtype, device=config.torch_device)
        return cls(source, config, tokenizer or found.tokenizer, *_sizes(describe(found.model, config.config), config))

    @property
    def options(self) -> str:
        """The options that are set, without the device and the compute dtype."""
        asked = self.config.model_dump(exclude_unset=True, exclude={"dtype", "device"})
        if self.config.dtype is not None and self.config.compute_dtype is None:
            asked = {"dtype": "int8", **asked}
        return ", ".join(f"{name}={value}" for name, value in _flat(asked))

    @contextmanager
    def started(self) -> Iterator[LLM]:
        """The model, ready to run; its memory is freed afterwards. An LLM is used as it is."""
        if isinstance(self.source, LLM):
            yield self.source
            return
        llm = LLM(self.source, tokenizer=self.tokenizer, config=_for_prompts(self.config))
        try:
            yield llm
        finally:
            llm.shutdown()
            gc.collect()  # modules are in reference cycles
            if llm.device.type == "cuda":
                torch.cuda.empty_cache()


def _sizes(info: ModelInfo, config: LLMConfig) -> tuple[int, int | None]:
    """Most tokens of a request, and the size of the vocabulary."""
    own = info.max_positions or DEFAULT_LENGTH
    return config.max_out_tokens or own, info.vocab_size


def _flat(values: Mapping[str, Any], section: str = "") -> Iterator[tuple[str, Any]]:
    """The fields of nested sections by their paths."""
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{section}{name}.")
        else:
            yield f"{section}{name}", value


def _for_prompts(config: LLMConfig) -> LLMConfig:
    """The config with a faster start and the same results: prompts run one at a time and without CUDA graphs."""
    given, scheduler = config.given(), config.scheduler.given()
    if config.enforce_eager is None and config.enable_cuda_graph is None:
        given["enforce_eager"] = True
    given["scheduler"] = SchedulerConfig(**{"max_num_seqs": 1, **scheduler})
    return LLMConfig(**given)
