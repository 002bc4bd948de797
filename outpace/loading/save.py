"""A model saved as shards: a live module, or a checkpoint whose tensors pass through one at a time."""

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from outpace.errors import InputError, ModelError, as_field
from outpace.inject.split import known_splits, split_model
from outpace.loading.checkpoint import weight_files
from outpace.loading.dtypes import short
from outpace.loading.inspect import kept_in_fp32
from outpace.loading.names import match
from outpace.loading.open import open_weights
from outpace.loading.original import CONFIG, find_model, opened, own_dtype, say_plain, set_entries, skeleton_of
from outpace.loading.out_folder import check_out
from outpace.loading.unchanged import Unchanged
from outpace.loading.weights import Piece, Source
from outpace.loading.write_shards import SHARDS, Progress, Written, write_shards
from outpace.log import chosen, size_text


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
    check_out(out, SHARDS, force=force)
    path = find_model(model)
    if path.is_relative_to(out.expanduser().resolve()):
        raise InputError(f"out: {out} holds the model itself; give another folder")
    config, beside = opened(path)
    unchanged = Unchanged.of(weight_files(path))
    skeleton = skeleton_of(config)
    with as_field("tp", known_as="tensor parallelism"):
        splits = split_model(skeleton, ranks)
    shapes = {name: tuple(value.shape) for name, value in skeleton.state_dict().items()}
    weights = open_weights(path, shapes=shapes, splits=partial(known_splits, skeleton))
    sources = _own(skeleton, match(skeleton, weights, dtype or own_dtype(config)))
    keep = kept_in_fp32(skeleton, dtype) if dtype is not None else set()

    def write_beside(folder: Path) -> None:
        beside(folder)
        say_plain(folder / CONFIG)
        if dtype is not None:
            set_entries(folder / CONFIG, dtype=short(dtype))

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


def _configs_of(module: nn.Module, dtype: torch.dtype | None) -> Callable[[Path], None]:
    """Writes what a module of Hugging Face knows of itself; another module has weights alone."""

    def beside(target: Path) -> None:
        for name in ("config", "generation_config"):
            config: Any = getattr(module, name, None)
            if isinstance(module, PreTrainedModel) and config is not None:
                config.save_pretrained(target)
        if isinstance(module, PreTrainedModel):
            set_entries(target / CONFIG, architectures=[type(module).__name__])
            say_plain(target / CONFIG)
            if dtype is not None:
                set_entries(target / CONFIG, dtype=short(dtype))

    return beside


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
