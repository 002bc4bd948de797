"""Open a checkpoint of any kind: its tensors by name, known and checked before any of them is read."""

from collections.abc import Mapping
from pathlib import Path

from outpace.errors import ModelError
from outpace.loading.checkpoint import local_path
from outpace.loading.layout import Layout, find_layout, lone_safetensors, read_index
from outpace.loading.safetensors_file import read_safetensors
from outpace.loading.weights import Source, Weights


def open_weights(source: str | Path) -> Weights:
    """The weights that a folder or file holds."""
    path = local_path(source)
    if path is None:
        raise ModelError(f"model: no such file or folder {str(source)!r}; check the name")
    if path.is_dir():
        return _of_layout(path, find_layout(path) or lone_safetensors(path))
    if path.name.endswith(".index.json"):
        return _of_layout(path.parent, read_index(path))
    if path.suffix.lower() == ".safetensors":
        return Weights(str(path), read_safetensors(path))
    raise ModelError(f"model: {path} is no checkpoint; name a folder or a .safetensors file")


def _of_layout(folder: Path, layout: Layout | None) -> Weights:
    if layout is None:
        raise ModelError(f"model: {folder} has no weights (model.safetensors); download the model again")
    return Weights(str(folder), union({path: read_safetensors(path) for path in layout.files}, layout.places))


def union(files: Mapping[Path, Mapping[str, Source]], places: Mapping[str, Path] | None = None) -> dict[str, Source]:
    """The tensors of several files, none of which is in two. places: where an index says they are."""
    for name, path in (places or {}).items():
        if name not in files[path]:
            raise ModelError(f"model: {path} lacks {name[:200]!r}, which the index says it has; download it again")
    found: dict[str, Source] = {}
    owner: dict[str, Path] = {}
    for path, sources in files.items():
        for name, source in sources.items():
            if name in found:
                raise ModelError(f"model: {name[:200]!r} is in two files, {owner[name]} and {path}; remove one of them")
            found[name], owner[name] = source, path
    return found
