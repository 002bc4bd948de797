"""Finds the files of a folder that hold the weights. Imports no torch and reads no weights."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from outpace.errors import ModelError
from outpace.loading.strict_json import read_object

DESCRIPTOR = "ds_inference_config.json"
"""DeepSpeed's name of the descriptor next to the files of ranks."""
SAVE_ID = "save_id"
"""Key of a random id in the descriptor and in the metadata of all files that were written together."""

_LFS_POINTER = b"version https://git-lfs"
Kind = Literal["safetensors", "torch"]
_NAMES: Mapping[str, Kind] = {"model.safetensors": "safetensors", "pytorch_model.bin": "torch"}


@dataclass(frozen=True)
class Layout:
    """The files that together hold each tensor once."""

    kind: Kind
    files: tuple[Path, ...]
    places: Mapping[str, Path] = field(default_factory=dict)
    """Name of a tensor -> its file, if there is an index."""


def inside(folder: Path, name: str, what: str, remedy: str = "name files inside it") -> Path:
    """`folder / name`; names that leave the folder are refused. what: where the name was read, for the error."""
    path = folder / name
    outside = ".." in Path(name).parts or not path.absolute().is_relative_to(folder.absolute())
    if not name or "\0" in name or outside:
        raise ModelError(f"{what}: {name[:200]!r} lies outside {folder}; {remedy}")
    return path


def check_fetched(path: Path) -> None:
    """Refuse a Git LFS pointer in place of a large file."""
    with path.open("rb") as file:
        if file.read(len(_LFS_POINTER)) == _LFS_POINTER:
            raise ModelError(
                f"model: {path} is a Git LFS pointer in place of the weights; run `git lfs pull` in {path.parent}"
            )


def find_layout(folder: Path) -> Layout | None:
    """The weight files of a Hugging Face folder; None: there are none with the usual names."""
    for name, kind in _NAMES.items():
        if (folder / name).is_file():
            return Layout(kind, (folder / name,))
        if (index := folder / f"{name}.index.json").is_file():
            return read_index(index)
    return None


def lone_safetensors(folder: Path) -> Layout | None:
    """The only .safetensors file of a folder, whatever its name; None: there is none."""
    found = sorted(folder.glob("*.safetensors"))
    if len(found) > 1:
        names = ", ".join(path.name for path in found[:5])
        raise ModelError(
            f"model: {folder} has {len(found)} .safetensors files ({names} ..) and no index that says which belong "
            "together; name one file, or add model.safetensors.index.json"
        )
    return Layout("safetensors", (found[0],)) if found else None


def read_index(index: Path) -> Layout:
    """The files that an index lists; a missing file is an error."""
    listed = read_object(index, "weight index").get("weight_map")
    if not isinstance(listed, dict) or not listed or not all(isinstance(name, str) for name in listed.values()):
        raise ModelError(
            f"model: {index} is not a weight index (weight_map does not give each tensor a file); download it again"
        )
    places = {tensor: inside(index.parent, name, f"model: {index.name}") for tensor, name in listed.items()}
    files = tuple(sorted(set(places.values())))
    for path in files:
        if not path.is_file():
            raise ModelError(f"model: {path} is missing, though the index lists it; download the model again")
    kind: Kind = "safetensors" if index.name.endswith(".safetensors.index.json") else "torch"
    return Layout(kind, files, places)
