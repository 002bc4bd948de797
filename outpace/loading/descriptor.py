"""Reads DeepSpeed's JSON descriptor of a checkpoint: which files hold whole tensors or parts of ranks. No torch."""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from outpace.errors import ModelError
from outpace.loading.layout import SAVE_ID, find_layout, inside
from outpace.loading.strict_json import read_object
from outpace.loading.training import find_ranks

_REQUIRED = ("type", "checkpoints", "version")
_OPTIONAL = ("parallelization", "tp_size", "mp_size", "base_dir", "dtype", SAVE_ID)
_SUFFIXES = (".safetensors", ".pt", ".pth", ".bin")
_VERSIONS = (0, 1.0, 2.0, 3.0)
_DTYPES: Mapping[str, str] = {
    "float32": "float32",
    "fp32": "float32",
    "float": "float32",
    "float16": "float16",
    "fp16": "float16",
    "half": "float16",
    "bfloat16": "bfloat16",
    "bf16": "bfloat16",
}


@dataclass(frozen=True)
class _Origin:
    """The name of a descriptor in errors, and whether the caller can pass base_dir."""

    name: str
    takes_base_dir: bool

    def __str__(self) -> str:
        return self.name

    def remedy(self, plain: str, with_base_dir: str) -> str:
        return f"{plain}, or {with_base_dir}" if self.takes_base_dir else plain


@dataclass(frozen=True)
class Descriptor:
    """A checked descriptor; all files that it names exist."""

    origin: str
    megatron: bool
    whole: tuple[Path, ...]
    """Files with whole tensors; each tensor is in one of them."""
    ranks: tuple[tuple[Path, ...], ...]
    """The files of each rank."""
    version: float | None
    dtype: str | None
    """torch's name of the dtype of its tensors; None: not given."""
    save_id: str | None = None
    """The id in the metadata of all files of `outpace shard` that belong to it."""


def read_descriptor(
    source: Path | Mapping[str, Any], base_dir: str = "", *, takes_base_dir: bool = False
) -> Descriptor:
    """Check a descriptor, given as a file or a mapping. base_dir: the folder of its files, overriding its own entry.

    takes_base_dir: whether the caller could pass base_dir, so that errors suggest it.
    """
    if isinstance(source, Mapping):
        origin, fields = _Origin("checkpoint", True), dict(source)
    else:
        origin, fields = _Origin(str(source), takes_base_dir), read_object(source, "checkpoint descriptor")
    _check_keys(origin, fields)
    kind = _kind(origin, fields["type"])
    base = _base(origin, source, base_dir, fields.get("base_dir") or "")
    version = _version(origin, fields["version"], megatron=kind == "Megatron")
    whole, split = _files(origin, base, fields["checkpoints"], kind)
    dtype = _dtype(origin, fields.get("dtype"))
    if _parallelization(origin, fields, kind) == "pp":
        return Descriptor(str(origin), False, split, (), version, dtype)
    ranks = _by_rank(origin, split, _degree(origin, fields) or len(split))
    if kind == "Megatron" and any(len(files) > 1 or files[0].suffix == ".safetensors" for files in ranks):
        raise ModelError(
            f"{origin}: checkpoints: Megatron saves one .pt file for each of {len(ranks)} ranks; list those"
        )
    return Descriptor(
        str(origin), kind == "Megatron", whole, ranks, version, dtype, _save_id(origin, fields.get(SAVE_ID))
    )


def _save_id(origin: _Origin, found: Any) -> str | None:
    if found is not None and not isinstance(found, str):
        raise ModelError(f"{origin}: {SAVE_ID}: {found!r:.50} is not an id; shard the model again")
    return found


def _check_keys(origin: _Origin, fields: Mapping[str, Any]) -> None:
    if missing := [key for key in _REQUIRED if key not in fields]:
        raise ModelError(f"{origin}: {missing[0]}: the descriptor lacks this key; it needs {', '.join(_REQUIRED)}")
    known = (*_REQUIRED, *_OPTIONAL)
    for key in fields:
        if key not in known:
            near = get_close_matches(str(key), known, n=1)
            remedy = f"did you mean {near[0]}?" if near else f"known are {', '.join(known)}"
            raise ModelError(f"{origin}: {str(key)[:200]}: a descriptor has no such key; {remedy}")


def _kind(origin: _Origin, found: Any) -> str:
    """Like DeepSpeed, ignore the case of ds_model and bloom, but not of Megatron."""
    if found == "Megatron":
        return "Megatron"
    if isinstance(found, str) and found.lower() in ("ds_model", "bloom"):
        return found.lower()
    raise ModelError(f"{origin}: type: {found!r:.200} is unknown; use 'ds_model', 'bloom' or 'Megatron'")


def _version(origin: _Origin, found: Any, *, megatron: bool) -> float | None:
    if found is None and megatron:
        return None
    if isinstance(found, bool) or not isinstance(found, int | float):
        raise ModelError(f"{origin}: version: expected a number, got {found!r:.50}; use 0, 1.0, 2.0 or 3.0")
    if found not in _VERSIONS:
        raise ModelError(f"{origin}: version: {found!r:.50} is unknown; use 0, 1.0, 2.0 or 3.0")
    return float(found)


def _base(origin: _Origin, source: Path | Mapping[str, Any], given: str, own: Any) -> Path:
    """The folder of the files: the caller's base_dir, else the descriptor's own, else the folder it is in."""
    if not isinstance(own, str):
        raise ModelError(f"{origin}: base_dir: expected a path, got {own!r:.200}; remove it")
    if given:
        base = Path(given).expanduser()
    elif isinstance(source, Mapping):
        base = Path(own).expanduser()
    elif own and Path(own).is_absolute():
        base = Path(os.path.normpath(own))
        if not base.is_relative_to(source.parent.absolute()):
            raise ModelError(
                f"{origin}: base_dir: {own!r} lies outside {source.parent}; "
                + origin.remedy("copy the files into it", "pass base_dir yourself to allow it")
            )
    else:
        base = inside(source.parent, own, f"{origin}: base_dir") if own else source.parent
    if not base.is_dir():
        remedy = origin.remedy("correct it in the descriptor", "pass base_dir with the folder of the files")
        raise ModelError(f"{origin}: base_dir: {base} is not a folder; {remedy}")
    return base


def _inside(origin: _Origin, base: Path, name: str, key: str) -> Path:
    remedy = origin.remedy("name files inside it", "pass base_dir with the folder that they are in")
    return inside(base, name, f"{origin}: {key}", remedy)


def _files(origin: _Origin, base: Path, found: Any, kind: str) -> tuple[tuple[Path, ...], tuple[Path, ...]]:
    """(files with whole tensors, if they are listed separately; all other files)."""
    if isinstance(found, Mapping):
        if not found.keys() <= {"non_tp", "tp"} or "tp" not in found:
            raise ModelError(f"{origin}: checkpoints: needs the keys non_tp and tp, and no others")
        return _listed(origin, base, found.get("non_tp", []), "non_tp", empty=True), _listed(
            origin, base, found["tp"], "tp"
        )
    if isinstance(found, str):
        return (), _named(origin, base, found, kind)
    return (), _listed(origin, base, found, "checkpoints")


def _listed(origin: _Origin, base: Path, found: Any, key: str, *, empty: bool = False) -> tuple[Path, ...]:
    if not isinstance(found, list | tuple) or not (found or empty) or not all(isinstance(name, str) for name in found):
        raise ModelError(f"{origin}: {key}: needs a list of file names")
    paths = tuple(_file(origin, base, name, key) for name in found)
    if len(set(paths)) < len(paths):
        raise ModelError(f"{origin}: {key}: names a file twice")
    return paths


def _file(origin: _Origin, base: Path, name: str, key: str) -> Path:
    path = _inside(origin, base, name, key)
    if not path.is_file():
        remedy = origin.remedy("copy it there", "pass base_dir")
        raise ModelError(f"{origin}: {key}: {path} does not exist; {remedy}")
    if path.suffix.lower() not in _SUFFIXES:
        raise ModelError(
            f"{origin}: {key}: {path.name} is not a checkpoint; name files ending in {', '.join(_SUFFIXES)}"
        )
    return path


def _named(origin: _Origin, base: Path, name: str, kind: str) -> tuple[Path, ...]:
    """The files of one name, which may be a file, a pattern with *, or a folder."""
    path = _inside(origin, base, name, "checkpoints")
    if "*" in path.name:
        found = sorted(path.parent.glob(path.name), key=_numbers)
        if not found:
            raise ModelError(f"{origin}: checkpoints: no file in {path.parent} matches {path.name!r}; correct it")
        return _listed(origin, base, [str(entry.relative_to(base)) for entry in found], "checkpoints")
    if not path.is_dir():
        return (_file(origin, base, name, "checkpoints"),)
    layout = None if kind == "Megatron" else find_layout(path)
    files = layout.files if layout else find_ranks(path)
    if not files:
        raise ModelError(f"{origin}: checkpoints: {path} holds no checkpoint; name its files")
    return files


def _numbers(path: Path) -> list[int]:
    """The numbers in a name, so that rank 10 sorts after rank 9."""
    return [int(digits[:18]) for digits in re.findall(r"\d+", path.name)]


def _parallelization(origin: _Origin, fields: Mapping[str, Any], kind: str) -> str:
    given = fields.get("parallelization")
    if given not in (None, "pp", "tp"):
        raise ModelError(f"{origin}: parallelization: {given!r:.50} is unknown; use 'pp' or 'tp'")
    by_rank = kind == "Megatron" or isinstance(fields["checkpoints"], Mapping)
    if given == "pp" and by_rank:
        raise ModelError(f"{origin}: parallelization: 'pp' contradicts files of ranks; use 'tp', or remove it")
    if given != "tp" and not by_rank and (degree := _degree(origin, fields)) and degree > 1:
        key = "mp_size" if "mp_size" in fields else "tp_size"
        raise ModelError(f"{origin}: {key}: {degree} ranks need parallelization 'tp'; add it, or remove {key}")
    return "tp" if by_rank else given or "pp"


def _degree(origin: _Origin, fields: Mapping[str, Any]) -> int | None:
    """Number of ranks that saved the files: mp_size, else tp_size."""
    found = None
    for key in ("tp_size", "mp_size"):
        if key in fields:
            found = fields[key]
            if type(found) is not int:
                raise ModelError(f"{origin}: {key}: expected a number of ranks, got {found!r:.50}; use 1 or more")
            if found < 1:
                raise ModelError(f"{origin}: {key}: {found} is not a number of ranks; use 1 or more")
    return found


def _by_rank(origin: _Origin, files: tuple[Path, ...], degree: int) -> tuple[tuple[Path, ...], ...]:
    """Group files by rank: DeepSpeed lists the first file of each rank, then the second of each, and so on."""
    if len(files) % degree:
        raise ModelError(f"{origin}: checkpoints: {len(files)} files cannot belong to {degree} ranks; list all of them")
    return tuple(files[rank::degree] for rank in range(degree))


def _dtype(origin: _Origin, found: Any) -> str | None:
    if found is None:
        return None
    if not isinstance(found, str) and type(found).__module__ != "torch":
        raise ModelError(f"{origin}: dtype: expected a name, got {found!r:.50}; use {', '.join(_DTYPES)}")
    name = str(found).removeprefix("torch.")
    if name not in _DTYPES:
        remedy = "this release reads no int8 weights" if name == "int8" else f"use {', '.join(_DTYPES)}"
        raise ModelError(f"{origin}: dtype: {name[:50]!r} cannot be read; {remedy}")
    return _DTYPES[name]
