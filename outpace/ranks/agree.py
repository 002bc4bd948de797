"""Checks that all ranks have the same versions and the same model files."""

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path

import msgspec

from outpace.errors import EngineDead
from outpace.load_paged import PagedParts
from outpace.loading.checkpoint import WEIGHT_FILES, fetch, local_path
from outpace.loading.default_model import default_model_path
from outpace.loading.read_tokenizer import is_default

WEIGHTS = (*WEIGHT_FILES, ".gguf")
CONFIGS = ("config.json", "model.safetensors.index.json", "pytorch_model.bin.index.json")
HEAD = 1 << 20  # files up to this size are compared whole
SAMPLES, SAMPLE = 64, 4096  # of larger files: places to compare, and bytes at each


def facts(parts: PagedParts, model: str | None) -> dict[str, str]:
    """What a rank has loaded, as short texts. Files by contents, since their times differ between machines."""
    config = parts.config.model_dump(mode="json", exclude={"device", "nodes"}, fallback=repr)
    files = _files(model)
    return {
        **({} if files else {"model": parts.name}),
        "config": _digest(config),
        **{f"file {name}": value for name, value in files.items()},
        "max_model_len": str(parts.max_model_len),
        "ranks": str(parts.model.ranks.size),
    }


def check_same(first: Mapping[str, str], other: Mapping[str, str], rank: int) -> None:
    for name, value in first.items():
        if (found := other.get(name)) != value:
            raise EngineDead(
                f"ranks differ in {name}: {value} in rank 0, {found} in rank {rank}; give all of them the same files "
                "and versions, and start again"
            )


def _files(model: str | None) -> dict[str, str]:
    """A digest of each model file that affects results."""
    path = model_path(model)
    files = [path] if path.is_file() else [Path(entry.path) for entry in os.scandir(path) if entry.is_file()]
    return {file.name: sample(file) for file in sorted(files) if file.suffix in WEIGHTS or file.name in CONFIGS}


def model_path(model: str | None) -> Path:
    """The path of a model on this machine; fetched if missing."""
    path = None if model is None else local_path(model)
    if is_default(model, path):
        return default_model_path()
    return fetch(str(model)) if path is None else path


def sample(file: Path) -> str:
    """A digest of a file's size, beginning, end and sampled places."""
    found = hashlib.sha256()
    with file.open("rb") as opened:
        size = opened.seek(0, os.SEEK_END)
        found.update(size.to_bytes(8, "little"))
        opened.seek(0)
        found.update(opened.read(HEAD))  # of safetensors: names, shapes and places of all tensors
        for part in range(1, SAMPLES + 1):
            opened.seek(max(0, size * part // SAMPLES - SAMPLE))
            found.update(opened.read(SAMPLE))
    return found.hexdigest()[:16]


def _digest(value: object) -> str:
    return hashlib.sha256(msgspec.json.encode(value, order="deterministic")).hexdigest()[:16]
