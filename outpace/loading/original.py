"""A checkpoint that is written anew in another form: where it is, what it is, and the files beside its weights."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from outpace.errors import ModelError
from outpace.loading.cache import models_dir
from outpace.loading.checkpoint import fetch, local_path
from outpace.loading.default_model import DEFAULT_MODEL, SAMPLING, default_model_path
from outpace.loading.foreign.method import CONFIG_KEYS, OLD_GPTQ
from outpace.loading.gguf import read_gguf
from outpace.loading.layout import DESCRIPTOR
from outpace.loading.problems import LOAD_ERRORS, REMEDY, line
from outpace.loading.read_tokenizer import is_default
from outpace.loading.sampling_defaults import FILE

_BESIDE = ("*.json", "*.model", "*.txt", "*.jinja", "*.tiktoken", "*.vocab", "*.bpe", "additional_chat_templates/*")
_NOT_BESIDE = ("*.index.json", DESCRIPTOR, "outpace.json", OLD_GPTQ)
CONFIG = "config.json"


def find_model(model: str | Path | None) -> Path:
    """The file or folder of a model, fetched where it is none."""
    path = None if model is None else local_path(model)
    if is_default(model, path):
        return default_model_path()
    return (path or fetch(str(model))).resolve()


def opened(path: Path) -> tuple[PreTrainedConfig, Callable[[Path], None]]:
    """The config of a model, and what writes the files beside its weights into another folder."""
    return _of_gguf(path) if path.suffix.lower() == ".gguf" else _of_folder(path)


def _of_folder(path: Path) -> tuple[PreTrainedConfig, Callable[[Path], None]]:
    folder = path if path.is_dir() else path.parent
    if not (folder / CONFIG).is_file():
        raise ModelError(f"model: {folder} has no {CONFIG}, which says what the model is; put the model's own there")
    try:
        config: PreTrainedConfig = AutoConfig.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    except LOAD_ERRORS as error:
        raise ModelError(f"model: cannot use {folder / CONFIG} ({line(error)}); {REMEDY}") from error
    return config, lambda target: _copy_beside(folder, target)


def _copy_beside(folder: Path, target: Path) -> None:
    """Config, tokenizer and templates; no weights, and what is written anew is not overwritten."""
    for pattern in _BESIDE:
        for path in folder.glob(pattern):
            copied = target / path.relative_to(folder)
            if path.is_file() and not copied.exists() and not any(path.match(other) for other in _NOT_BESIDE):
                copied.parent.mkdir(exist_ok=True)
                shutil.copyfile(path, copied)
    if folder.resolve() == (models_dir() / DEFAULT_MODEL).resolve():  # known by its place, which the copy has not
        set_entries(target / FILE, do_sample=True, **SAMPLING)


def _of_gguf(path: Path) -> tuple[PreTrainedConfig, Callable[[Path], None]]:
    file = read_gguf(path)

    def beside(target: Path) -> None:
        file.config.save_pretrained(target)
        if file.tokenizer is not None:
            file.tokenizer.save_pretrained(target)

    return file.config, beside


def set_entries(config: Path, **entries: Any) -> None:
    """Change entries of a config.json, or of another such file."""
    content = json.loads(config.read_text())
    if "dtype" in entries:
        content.pop("torch_dtype", None)  # the older name of it
    config.write_text(json.dumps(content | entries, indent=2) + "\n")


def say_plain(config: Path) -> None:
    """Remove what a config.json says about quantization: weights are written plain."""
    content = json.loads(config.read_text())
    parts = [part for part in (content, content.get("text_config")) if isinstance(part, dict)]
    removed = [part.pop(key) for part in parts for key in CONFIG_KEYS if key in part]
    if removed:
        config.write_text(json.dumps(content, indent=2) + "\n")


def own_dtype(config: PreTrainedConfig) -> torch.dtype:
    """What quantized weights are written in where no dtype is asked for."""
    own: Any = config.dtype
    own = getattr(torch, own, own) if isinstance(own, str) else own
    return own if isinstance(own, torch.dtype) and own.is_floating_point and own.itemsize > 1 else torch.float32


def skeleton_of(config: PreTrainedConfig) -> PreTrainedModel:
    """The model of a config on the meta device: of the class it was saved from, else the one that writes text."""
    kind: Any = getattr(transformers, (config.architectures or [""])[0], None)
    try:
        with torch.device("meta"):
            if isinstance(kind, type) and issubclass(kind, PreTrainedModel):
                model: PreTrainedModel = kind(config)
            else:
                model = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    except LOAD_ERRORS as error:
        raise ModelError(
            f"model: cannot make a {config.model_type} of this config ({line(error)}); {REMEDY}"
        ) from error
    return model
