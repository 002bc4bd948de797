"""What all ranks must have in common, and what to say where they have not."""

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path

import msgspec
import torch
import transformers

from outpace._version import __version__
from outpace.errors import EngineDead
from outpace.prepare import PagedParts


def versions() -> dict[str, str]:
    """Of what decides what a rank computes."""
    return {"outpace": __version__, "torch": str(torch.__version__), "transformers": transformers.__version__}


def facts(parts: PagedParts, model: str | None) -> dict[str, str]:
    """What a rank has loaded, as short texts."""
    config = parts.config.model_dump(mode="json", exclude={"device"}, fallback=repr)
    return {
        "model": parts.name,
        "config": _digest(config),
        "files": _digest(_files(model)),
        "max_model_len": str(parts.max_model_len),
        "ranks": str(parts.model.ranks.size),
    }


def check_same(first: Mapping[str, str], other: Mapping[str, str], rank: int) -> None:
    """Refuse a rank that has something else than the first."""
    for name, value in first.items():
        if (found := other.get(name)) != value:
            raise EngineDead(
                f"ranks differ in {name}: {value} in rank 0, {found} in rank {rank}; give all of them the same files "
                "and versions, and start again"
            )


def _files(model: str | None) -> list[tuple[str, int, int]]:
    """Name, size and time of the files of a model that is on disk."""
    path = Path(model or "")
    if model is None or not path.exists():
        return []
    files = [path] if path.is_file() else [Path(entry.path) for entry in os.scandir(path) if entry.is_file()]
    found = [(file.name, file.stat()) for file in sorted(files)]
    return [(name, stat.st_size, stat.st_mtime_ns) for name, stat in found]


def _digest(value: object) -> str:
    return hashlib.sha256(msgspec.json.encode(value, order="deterministic")).hexdigest()[:16]
