"""Opens a checkpoint to write it in another form (shards, quantized), and copies its files other than weights."""

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from outpace.errors import InputError, ModelError
from outpace.inject.split import known_splits
from outpace.loading.cache import models_dir
from outpace.loading.check_config import check_layers, fields_of, reason
from outpace.loading.checkpoint import weight_files
from outpace.loading.default_model import DEFAULT_MODEL, SAMPLING
from outpace.loading.foreign.method import CONFIG_KEYS, OLD_GPTQ
from outpace.loading.gguf import read_gguf
from outpace.loading.layout import DESCRIPTOR
from outpace.loading.open import open_weights
from outpace.loading.problems import LOAD_ERRORS, REMEDY
from outpace.loading.read_tokenizer import model_path
from outpace.loading.sampling_defaults import FILE
from outpace.loading.unchanged import Unchanged
from outpace.loading.weights import Weights

_BESIDE = ("*.json", "*.model", "*.txt", "*.jinja", "*.tiktoken", "*.vocab", "*.bpe", "additional_chat_templates/*")
_NOT_BESIDE = ("*.index.json", DESCRIPTOR, "outpace.json", OLD_GPTQ)
CONFIG = "config.json"


@dataclass(frozen=True)
class Original:
    """A checkpoint that will be written in another form."""

    path: Path
    config: PreTrainedConfig
    skeleton: PreTrainedModel
    """Its model, on the meta device."""
    weights: Weights
    unchanged: Unchanged
    """Its files, to check at the end that they did not change."""
    beside: Callable[[Path], None]
    """Writes the files other than weights into a folder."""

    @classmethod
    def of(cls, model: str | Path | None, out: Path) -> "Original":
        """Find and open a model that will be written to `out`; a model on Hugging Face is downloaded."""
        path = model_path(model).resolve()
        if path.is_relative_to(out.expanduser().resolve()):
            raise InputError(f"out: {out} holds the model itself; give another folder")
        config, beside = _of_gguf(path) if path.suffix.lower() == ".gguf" else _of_folder(path)
        unchanged = Unchanged.of(weight_files(path))
        skeleton = _skeleton_of(config)
        shapes = {name: tuple(value.shape) for name, value in skeleton.state_dict().items()}
        weights = open_weights(path, shapes=shapes, splits=partial(known_splits, skeleton))
        return cls(path, config, skeleton, weights, unchanged, beside)


def _of_folder(path: Path) -> tuple[PreTrainedConfig, Callable[[Path], None]]:
    folder = path if path.is_dir() else path.parent
    if not (folder / CONFIG).is_file():
        raise ModelError(f"model: {folder} has no {CONFIG}, which describes the model; copy it there")
    return read_config(folder), lambda target: _copy_beside(folder, target)


def read_config(folder: Path) -> PreTrainedConfig:
    """The config of a folder; code in the folder never runs."""
    path = folder / CONFIG
    fields = fields_of(path)
    check_layers(fields, f"model: {path}")
    try:
        config: PreTrainedConfig = AutoConfig.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    except LOAD_ERRORS as error:
        raise ModelError(f"model: cannot use {path} ({reason(error, fields)}); {REMEDY}") from error
    return config


def _copy_beside(folder: Path, target: Path) -> None:
    """Copy config, tokenizer and templates, without overwriting new files."""
    for pattern in _BESIDE:
        for path in folder.glob(pattern):
            copied = target / path.relative_to(folder)
            if path.is_file() and not copied.exists() and not any(path.match(other) for other in _NOT_BESIDE):
                copied.parent.mkdir(exist_ok=True)
                shutil.copyfile(path, copied)
    if folder.resolve() == (models_dir() / DEFAULT_MODEL).resolve():
        # the copy is no longer recognized as the default model, so it needs the sampling values in a file
        set_entries(target / FILE, do_sample=True, **SAMPLING)


def _of_gguf(path: Path) -> tuple[PreTrainedConfig, Callable[[Path], None]]:
    file = read_gguf(path)

    def beside(target: Path) -> None:
        file.config.save_pretrained(target)
        if file.tokenizer is not None:
            file.tokenizer.save_pretrained(target)

    return file.config, beside


def set_entries(config: Path, **entries: Any) -> None:
    """Set entries of a JSON config."""
    content = json.loads(config.read_text())
    if "dtype" in entries:
        content.pop("torch_dtype", None)  # its older name
    config.write_text(json.dumps(content | entries, indent=2) + "\n")


def remove_quantization(config: Path) -> None:
    """Remove quantization entries from a config.json, because weights are written plain."""
    content = json.loads(config.read_text())
    parts = [part for part in (content, content.get("text_config")) if isinstance(part, dict)]
    removed = [part.pop(key) for part in parts for key in CONFIG_KEYS if key in part]
    if removed:
        config.write_text(json.dumps(content, indent=2) + "\n")


def own_dtype(config: PreTrainedConfig) -> torch.dtype:
    """The dtype in which quantized weights are written if none is asked for."""
    own: Any = config.dtype
    own = getattr(torch, own, own) if isinstance(own, str) else own
    return own if isinstance(own, torch.dtype) and own.is_floating_point and own.itemsize > 1 else torch.float32


def _skeleton_of(config: PreTrainedConfig) -> PreTrainedModel:
    """The model of a config on the meta device: of its own class, else the causal model."""
    kind: Any = getattr(transformers, (config.architectures or [""])[0], None)
    try:
        with torch.device("meta"):
            if isinstance(kind, type) and issubclass(kind, PreTrainedModel):
                model: PreTrainedModel = kind(config)
            else:
                model = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    except LOAD_ERRORS as error:
        why = reason(error, config.to_dict())
        raise ModelError(f"model: cannot make a {config.model_type} of this config ({why}); {REMEDY}") from error
    return model
