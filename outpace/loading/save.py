"""Saves a live module or a checkpoint as shards for tensor parallelism, one tensor at a time."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from outpace.errors import ModelError, as_field
from outpace.inject.split import split_model
from outpace.loading.dtypes import short
from outpace.loading.inspect import kept_in_fp32
from outpace.loading.names import match
from outpace.loading.original import CONFIG, Original, own_dtype, remove_quantization, set_entries
from outpace.loading.out_folder import check_out
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
    """Write the shards of an unchanged module; existing shards are replaced.

    dtype: dtype of floating tensors; None: their own. sources: the values, if the module is on the meta device.
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
    """Write the shards of a checkpoint of any kind; everything is checked before anything is written."""
    check_out(out, SHARDS, force=force)
    original = Original.of(model, out)
    skeleton = original.skeleton
    with as_field("tp", known_as="tensor parallelism"):
        splits = split_model(skeleton, ranks)
    sources = _own(skeleton, match(skeleton, original.weights, dtype or own_dtype(original.config)))
    keep = kept_in_fp32(skeleton, dtype) if dtype is not None else set()

    def write_beside(folder: Path) -> None:
        original.beside(folder)
        remove_quantization(folder / CONFIG)
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
        unchanged=original.unchanged,
        progress=progress,
    )


def _configs_of(module: nn.Module, dtype: torch.dtype | None) -> Callable[[Path], None]:
    """A function that writes the configs of a Hugging Face module; other modules have only weights."""

    def beside(target: Path) -> None:
        if not isinstance(module, PreTrainedModel):
            return
        for name in ("config", "generation_config"):
            config: Any = getattr(module, name, None)
            if config is not None:
                config.save_pretrained(target)
        set_entries(target / CONFIG, architectures=[type(module).__name__])
        remove_quantization(target / CONFIG)
        if dtype is not None:
            set_entries(target / CONFIG, dtype=short(dtype))

    return beside


def _live(module: nn.Module) -> dict[str, Source]:
    """The tensors of a module as sources; each is copied to the host when it is written."""
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
    """The sources with one name for each tensor, so that tied weights are written once."""
    names: dict[int, str] = {}
    for name, value in module.state_dict(keep_vars=True).items():
        if name in sources:
            names.setdefault(id(value), name)
    return {name: sources[name] for name in names.values()}
