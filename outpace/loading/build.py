"""Load a model, read top to bottom: find it, check it, choose the dtype, build it, place it."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from outpace.errors import ModelError, NotSupported
from outpace.loading.bars import bars_on_terminals_only
from outpace.loading.checkpoint import Checkpoint, fetch, local_path, open_checkpoint
from outpace.loading.default_model import DEFAULT_MODEL, SAMPLING, default_model_path
from outpace.loading.dtypes import choose_dtype, short
from outpace.loading.gguf import GGUFModel, read_gguf, skeleton
from outpace.loading.inspect import encoder_decoder, use_engine
from outpace.loading.problems import LOAD_ERRORS, REMEDY, line
from outpace.loading.read_tokenizer import is_default, read_tokenizer
from outpace.log import chosen, logger


@dataclass(frozen=True)
class Loaded:
    """A model ready to run, and what was decided on the way."""

    model: nn.Module  # in eval mode, on its device
    tokenizer: PreTrainedTokenizerBase | None
    name: str
    path: Path | None
    dtype: torch.dtype
    dtype_reason: str
    sampling: Mapping[str, float] = field(default_factory=dict)
    """Sampling values that its authors recommend elsewhere than in generation_config.json."""


def load(
    source: str | Path | None,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | None = None,
    tokenizer: bool = True,
) -> Loaded:
    """Load a folder, a .gguf file, a Hugging Face id, or (None) the default model.

    tokenizer: False leaves it out where that saves time.
    """
    device = device or _choose_device()
    path = None if source is None else local_path(source)
    if is_default(source, path):
        found = _load_folder(default_model_path(), DEFAULT_MODEL, dtype, device, tokenizer)
        return replace(found, sampling=SAMPLING)
    if path is None:
        return _load_folder(fetch(str(source)), str(source), dtype, device, tokenizer)
    if path.is_dir():
        return _load_folder(path, path.resolve().name, dtype, device, tokenizer)
    if path.suffix.lower() == ".gguf":
        return _load_gguf(path, dtype, device)
    raise ModelError(f"model: {path} is neither a folder nor a .gguf file; name the folder that holds the model")


def _load_folder(
    folder: Path, name: str, dtype: torch.dtype | None, device: torch.device, with_tokenizer: bool
) -> Loaded:
    checkpoint = open_checkpoint(folder)
    config = _read_config(folder)
    _check_kind(config, name)
    dtype, reason = _decide_dtype(dtype, _own_dtype(config, checkpoint), device)
    tokenizer = read_tokenizer(checkpoint) if with_tokenizer else None  # before the weights: it fails sooner
    with bars_on_terminals_only():
        model = _read_weights(checkpoint, config, dtype).to(device)  # type: ignore[arg-type]
    return Loaded(_ready(model), tokenizer, name, folder, dtype, reason)


def _load_gguf(path: Path, dtype: torch.dtype | None, device: torch.device) -> Loaded:
    file = read_gguf(path)
    dtype, reason = _decide_dtype(dtype, None, device)
    if (tokenizer := file.tokenizer) is None:
        chosen("tokenizer", None, f"{path.name} holds none; pass token ids")
    model = _fill(skeleton(file.config, dtype), file, dtype, device)
    return Loaded(_ready(model), tokenizer, path.stem, path, dtype, reason)


def _fill(model: PreTrainedModel, file: GGUFModel, dtype: torch.dtype, device: torch.device) -> PreTrainedModel:
    """Replace every parameter of a skeleton by the file's, one at a time, and its buffers by computed ones."""
    for name, tensor in file.tensors(dtype):
        owner, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(owner), leaf, nn.Parameter(tensor.to(device), requires_grad=False))
    model.tie_weights()
    rotary = model.get_submodule("model.rotary_emb")
    model.set_submodule("model.rotary_emb", type(rotary)(config=model.config).to(device))
    empty = [name for name, value in (*model.named_parameters(), *model.named_buffers()) if value.is_meta]
    assert not empty, f"never filled: {empty}"
    return model


def _ready(model: nn.Module) -> nn.Module:
    return model.eval().requires_grad_(False)


def _choose_device() -> torch.device:
    found = torch.cuda.is_available()
    device = torch.device("cuda" if found else "cpu")
    chosen("device", device, "torch sees a GPU" if found else "torch sees no GPU")
    return device


def _decide_dtype(asked: torch.dtype | None, own: torch.dtype | None, device: torch.device) -> tuple[torch.dtype, str]:
    dtype, reason = (asked, "asked for") if asked is not None else choose_dtype(own, device)
    chosen("dtype", short(dtype), reason)
    return dtype, reason


def _own_dtype(config: PreTrainedConfig, checkpoint: Checkpoint) -> torch.dtype:
    own = config.dtype or checkpoint.stored_dtype() or torch.float32
    return own if isinstance(own, torch.dtype) else getattr(torch, str(own))


def _read_config(folder: Path) -> PreTrainedConfig:
    try:
        config: PreTrainedConfig = AutoConfig.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    except LOAD_ERRORS as error:
        raise ModelError(f"model: cannot use {folder / 'config.json'} ({line(error)}); {REMEDY}") from error
    return config


def _check_kind(config: PreTrainedConfig, name: str) -> None:
    """Refuse what no class of decoders can load, before the weights are read."""
    kind = (config.architectures or [config.model_type])[0]
    if config.is_encoder_decoder:
        raise encoder_decoder(name, kind)
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise NotSupported(f"model: {name} is a {kind}, which does not generate text from text; {use_engine(kind)}")


def _read_weights(checkpoint: Checkpoint, config: PreTrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            checkpoint.folder,
            config=config,
            dtype=dtype,
            use_safetensors=checkpoint.safetensors,
            trust_remote_code=False,
            local_files_only=True,
            output_loading_info=True,
        )
    except LOAD_ERRORS as error:
        raise ModelError(f"model: cannot load {checkpoint.folder} ({line(error)}); {REMEDY}") from error
    model: PreTrainedModel = loaded[0]
    report = loaded[1]
    if missing := sorted(report["missing_keys"]):
        raise ModelError(
            f"model: the weights in {checkpoint.folder} lack {len(missing)} parameters of the model "
            f"({', '.join(missing[:5])} ..); it would run with random ones, so it does not"
        )
    if unexpected := sorted(report["unexpected_keys"]):
        logger.warning("weights that this model has no place for: %s (%d)", ", ".join(unexpected[:5]), len(unexpected))
    return model
