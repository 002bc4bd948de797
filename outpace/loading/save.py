"""A model saved as shards: a live module, or a checkpoint whose tensors pass through one at a time."""

import json
import shutil
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from outpace.errors import InputError, ModelError, as_field
from outpace.inject.split import known_splits, split_model
from outpace.loading.checkpoint import fetch, local_path, weight_files
from outpace.loading.default_model import default_model_path
from outpace.loading.dtypes import short
from outpace.loading.gguf import read_gguf
from outpace.loading.inspect import kept_in_fp32
from outpace.loading.layout import DESCRIPTOR
from outpace.loading.names import match
from outpace.loading.open import open_weights
from outpace.loading.problems import LOAD_ERRORS, REMEDY, line
from outpace.loading.read_tokenizer import is_default
from outpace.loading.unchanged import Unchanged
from outpace.loading.weights import Piece, Source
from outpace.loading.write_shards import Progress, Written, check_out, write_shards
from outpace.log import chosen, size_text

_BESIDE = ("*.json", "*.model", "*.txt", "*.jinja", "*.tiktoken", "*.vocab", "*.bpe", "additional_chat_templates/*")
_NOT_BESIDE = ("*.index.json", DESCRIPTOR, "outpace.json")
_CONFIG = "config.json"


def save_shards(
    module: nn.Module,
    path: str | Path,
    tp_size: int,
    dtype: torch.dtype | None,
    sources: Mapping[str, Source] | None = None,
) -> Written:
    """Write a module that nothing was changed in yet; shards that are there are replaced.

    dtype: what floating tensors are written in; None: as they are. sources: where the values are, if the module is
    on the meta device.
    """
    with as_field("tensor_parallel.tp_size", known_as="tensor parallelism"):
        splits = split_model(module, tp_size)
    found = _own(module, _live(module) if sources is None else sources)
    keep = kept_in_fp32(module, dtype) if dtype is not None else set()
    beside = _configs_of(module, dtype)
    field = "save_mp_checkpoint_path"
    written = write_shards(
        found, splits, Path(path), ranks=tp_size, dtype=dtype, keep=keep, beside=beside, force=True, field=field
    )
    chosen(field, written.folder, f"{size_text(written.nbytes)} for {tp_size} rank{'s' * (tp_size != 1)}")
    return written


def shard_model(
    model: str | Path | None,
    ranks: int,
    out: Path,
    *,
    dtype: torch.dtype | None = None,
    force: bool = False,
    progress: Progress = lambda done, total: None,
) -> Written:
    """Write the shards of a checkpoint of any kind; everything is checked before the first byte."""
    check_out(out, force=force)
    path = _find(model)
    if path.is_relative_to(out.expanduser().resolve()):
        raise InputError(f"out: {out} holds the model itself; give another folder")
    config, beside = _of_gguf(path) if path.suffix.lower() == ".gguf" else _of_folder(path)
    unchanged = Unchanged.of(weight_files(path))
    skeleton = _skeleton(config)
    with as_field("tp", known_as="tensor parallelism"):
        splits = split_model(skeleton, ranks)
    shapes = {name: tuple(value.shape) for name, value in skeleton.state_dict().items()}
    sources = _own(skeleton, match(skeleton, open_weights(path, shapes=shapes, splits=partial(known_splits, skeleton))))
    keep = kept_in_fp32(skeleton, dtype) if dtype is not None else set()

    def write_beside(folder: Path) -> None:
        beside(folder)
        if dtype is not None:
            _set(folder / _CONFIG, dtype=short(dtype))

    return write_shards(
        sources,
        splits,
        out,
        ranks=ranks,
        dtype=dtype,
        keep=keep,
        beside=write_beside,
        force=force,
        unchanged=unchanged,
        progress=progress,
    )


def _find(model: str | Path | None) -> Path:
    """The file or folder of a model, fetched where it is none."""
    path = None if model is None else local_path(model)
    if is_default(model, path):
        return default_model_path()
    return (path or fetch(str(model))).resolve()


def _of_folder(path: Path) -> tuple[PreTrainedConfig, Callable[[Path], None]]:
    folder = path if path.is_dir() else path.parent
    if not (folder / _CONFIG).is_file():
        raise ModelError(f"model: {folder} has no {_CONFIG}, which says what the model is; put the model's own there")
    try:
        config: PreTrainedConfig = AutoConfig.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    except LOAD_ERRORS as error:
        raise ModelError(f"model: cannot use {folder / _CONFIG} ({line(error)}); {REMEDY}") from error
    return config, lambda target: _copy_beside(folder, target)


def _copy_beside(folder: Path, target: Path) -> None:
    """Config, tokenizer and templates; no weights, and what is written anew is not overwritten."""
    for pattern in _BESIDE:
        for path in folder.glob(pattern):
            copied = target / path.relative_to(folder)
            if path.is_file() and not copied.exists() and not any(path.match(other) for other in _NOT_BESIDE):
                copied.parent.mkdir(exist_ok=True)
                shutil.copyfile(path, copied)


def _of_gguf(path: Path) -> tuple[PreTrainedConfig, Callable[[Path], None]]:
    file = read_gguf(path)

    def beside(target: Path) -> None:
        file.config.save_pretrained(target)
        if file.tokenizer is not None:
            file.tokenizer.save_pretrained(target)

    return file.config, beside


def _configs_of(module: nn.Module, dtype: torch.dtype | None) -> Callable[[Path], None]:
    """Writes what a module of Hugging Face knows of itself; another module has weights alone."""

    def beside(target: Path) -> None:
        for name in ("config", "generation_config"):
            config: Any = getattr(module, name, None)
            if isinstance(module, PreTrainedModel) and config is not None:
                config.save_pretrained(target)
        if isinstance(module, PreTrainedModel):
            _set(target / _CONFIG, architectures=[type(module).__name__])
            if dtype is not None:
                _set(target / _CONFIG, dtype=short(dtype))

    return beside


def _set(config: Path, **entries: Any) -> None:
    """Change entries of a config.json."""
    content = json.loads(config.read_text())
    if "dtype" in entries:
        content.pop("torch_dtype", None)  # the older name of it
    config.write_text(json.dumps(content | entries, indent=2) + "\n")


def _skeleton(config: PreTrainedConfig) -> PreTrainedModel:
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


def _live(module: nn.Module) -> dict[str, Source]:
    """The tensors of a module, each taken to the host when it is written."""
    tensors = {name: value for name, value in module.state_dict().items() if isinstance(value, Tensor)}
    if empty := [name for name, value in tensors.items() if value.is_meta]:
        raise ModelError(
            f"save_mp_checkpoint_path: {empty[0]} and {len(empty) - 1} more have no values; give checkpoint="
        )
    return {
        name: Source(tuple(value.shape), value.dtype, (Piece(value.cpu, tuple(value.shape), value.dtype),))
        for name, value in tensors.items()
    }


def _own(module: nn.Module, sources: Mapping[str, Source]) -> dict[str, Source]:
    """One name of each tensor: what is tied is written once."""
    names: dict[int, str] = {}
    for name, value in module.state_dict(keep_vars=True).items():
        if name in sources:
            names.setdefault(id(value), name)
    return {name: sources[name] for name in names.values()}
