"""Builds a model from a name: finds and checks it, chooses the dtype, makes its skeleton, and fills it."""

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from outpace.errors import ModelError, NotSupported
from outpace.inject.split import known_splits
from outpace.loading.bars import progress
from outpace.loading.check_config import check_sizes, reason
from outpace.loading.checkpoint import fetch, local_path, open_checkpoint
from outpace.loading.default_model import DEFAULT_MODEL, SAMPLING, default_model_path
from outpace.loading.dtypes import choose_dtype, short
from outpace.loading.fill import fill
from outpace.loading.gguf import read_gguf
from outpace.loading.inspect import encoder_decoder, use_engine
from outpace.loading.layout import find_layout
from outpace.loading.names import match
from outpace.loading.open import open_weights
from outpace.loading.original import CONFIG, read_config
from outpace.loading.problems import LOAD_ERRORS, REMEDY, line
from outpace.loading.read_tokenizer import is_default, read_tokenizer
from outpace.loading.skeleton import outside, skeleton
from outpace.loading.stored import log_converted
from outpace.loading.stream import lock_ahead
from outpace.loading.targets import Before
from outpace.loading.weights import Weights, stored_bytes
from outpace.log import chosen


@dataclass(frozen=True)
class Found:
    """A model that was found and checked; only the values of its weights are missing."""

    model: nn.Module
    """Parameters are on the meta device, buffers have values."""
    weights: Weights
    tokenizer: PreTrainedTokenizerBase | None
    name: str
    path: Path
    dtype: torch.dtype
    dtype_reason: str
    sampling: Mapping[str, float] = field(default_factory=dict)
    """Sampling values that its authors recommend outside of generation_config.json."""


@dataclass(frozen=True)
class Loaded:
    """A model that is ready to run, with its dtype and where it came from."""

    model: nn.Module  # in eval mode, on its device
    tokenizer: PreTrainedTokenizerBase | None
    name: str
    path: Path | None
    dtype: torch.dtype
    dtype_reason: str


@outside()
def load(source: str | Path | None, *, dtype: torch.dtype | None = None, device: torch.device | None = None) -> Loaded:
    """Load a plain Hugging Face model, without injection; see `find` for `source`."""
    device = device or choose_device()
    found = find(source, dtype=dtype, device=device)
    sources = match(found.model, found.weights, found.dtype)
    log_converted(sources, found.dtype, note="")
    with progress(sources) as advance:
        fill(found.model, Before.of(found.model, found.dtype), sources, device, advance)
    model = found.model.eval().requires_grad_(False)
    return Loaded(model, found.tokenizer, found.name, found.path, found.dtype, found.dtype_reason)


def find(
    source: str | Path | None,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device,
    tokenizer: bool = True,
) -> Found:
    """Find and check a folder, a .gguf or .safetensors file, a Hugging Face id, or the default model (None).

    tokenizer: False skips it where that saves time.
    """
    path = None if source is None else local_path(source)
    if is_default(source, path):
        found = _find_folder(default_model_path(), DEFAULT_MODEL, dtype, device, tokenizer)
        return replace(found, sampling=SAMPLING)
    if path is None:
        return _find_folder(fetch(str(source)), str(source), dtype, device, tokenizer)
    if not path.is_dir() and path.suffix.lower() == ".gguf":
        return _find_gguf(path, dtype, device)
    name = path.resolve().name if path.is_dir() else path.stem
    return _find_folder(path, name, dtype, device, tokenizer)


def _find_folder(path: Path, name: str, dtype: torch.dtype | None, device: torch.device, with_tokenizer: bool) -> Found:
    """Find the model of a folder, or of one weight file in a folder."""
    folder = open_checkpoint(path)
    config = read_config(folder)
    _check_kind(config, name)
    weights = _open(path, folder, config)
    shapes = (source.shape for source in weights.sources.values())
    check_sizes(config.to_dict(), shapes, f"model: {folder / CONFIG}")
    lock_ahead(stored_bytes(weights.sources), device)
    dtype, reason = _decide_dtype(dtype, _own_dtype(config, weights), device)
    tokenizer = read_tokenizer(folder) if with_tokenizer else None
    return Found(_make_skeleton(config, dtype, folder), weights, tokenizer, name, path, dtype, reason)


def _find_gguf(path: Path, dtype: torch.dtype | None, device: torch.device) -> Found:
    file = read_gguf(path)
    dtype, reason = _decide_dtype(dtype, None, device)
    if (tokenizer := file.tokenizer) is None:
        chosen("tokenizer", None, f"{path.name} holds none; pass token ids")
    return Found(skeleton(file.config, dtype), file.weights(dtype), tokenizer, path.stem, path, dtype, reason)


def _make_skeleton(config: PreTrainedConfig, dtype: torch.dtype, folder: Path) -> nn.Module:
    model, file = _empty(config, dtype, folder), folder / "generation_config.json"
    try:
        if file.is_file():
            model.generation_config = GenerationConfig.from_pretrained(folder, local_files_only=True)
    except LOAD_ERRORS as error:
        raise ModelError(f"model: cannot use {file} ({line(error)}); {REMEDY}") from error
    return model


def _empty(config: PreTrainedConfig, dtype: torch.dtype, folder: Path) -> PreTrainedModel:
    try:
        return skeleton(config, dtype)
    except LOAD_ERRORS as error:
        why = reason(error, config.to_dict())
        raise ModelError(f"model: cannot use {folder / CONFIG} ({why}); {REMEDY}") from error


def _open(path: Path, folder: Path, config: PreTrainedConfig) -> Weights:
    """The weights of a folder or file. Joining the files of several ranks needs the shapes of the model."""
    if path != folder or find_layout(folder):
        return open_weights(path)
    model = _empty(copy.deepcopy(config), torch.float32, folder)  # a copy: a skeleton writes its dtype into its config
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    return open_weights(path, shapes=shapes, splits=partial(known_splits, model))


def choose_device() -> torch.device:
    """The first GPU, or else the CPU."""
    found = torch.cuda.is_available()
    device = torch.device("cuda" if found else "cpu")
    chosen("device", device, "torch sees a GPU" if found else "torch sees no GPU")
    return device


def _decide_dtype(asked: torch.dtype | None, own: torch.dtype | None, device: torch.device) -> tuple[torch.dtype, str]:
    dtype, reason = (asked, "asked for") if asked is not None else choose_dtype(own, device)
    chosen("dtype", short(dtype), reason)
    return dtype, reason


def _own_dtype(config: PreTrainedConfig, weights: Weights) -> torch.dtype:
    dtypes = (source.dtype for source in weights.sources.values())
    stored = (dtype for dtype in dtypes if dtype.is_floating_point and dtype.itemsize > 1)
    own: Any = config.dtype or next(stored, torch.float32)
    own = getattr(torch, own, own) if isinstance(own, str) else own
    if not isinstance(own, torch.dtype) or not own.is_floating_point:
        raise ModelError(f"model: config.json: dtype: {own!r:.60} is no floating-point dtype; correct it, or remove it")
    return own


def _check_kind(config: PreTrainedConfig, name: str) -> None:
    """Refuse models that no decoder class can load, before weights are read."""
    kind = (config.architectures or [config.model_type])[0]
    if config.is_encoder_decoder:
        raise encoder_decoder(name, kind)
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise NotSupported(f"model: {name} is a {kind}, which does not generate text from text; {use_engine(kind)}")
