"""Reads files of torch.save, always with weights_only=True. Tensors are memory-mapped and read when used."""

import pickletools
import re
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from outpace.errors import ModelError
from outpace.loading.layout import check_fetched
from outpace.loading.problems import line
from outpace.loading.weights import Piece, Source

_ZIP = b"PK\x03\x04"
_WRAPPERS = ("module", "model", "state_dict")
_EXTRA = "_extra_state"  # of TransformerEngine: settings, no weights
_MAX_DEPTH = 16
_MAX_NAMES = 500_000
_MAX_SCANNED = 1 << 20
_GLOBAL = re.compile(r"GLOBAL (\S+)")
_OURS = ("torch", "collections", "_codecs")  # modules that occur in all files of tensors


@dataclass(frozen=True)
class RankFile:
    """The file of one tensor-parallel rank of a training run."""

    sources: Mapping[str, Source]
    version: float | None
    """Megatron's version, which defines the layout of fused query, key and value. None: the file does not say."""
    degree: int | None
    """The number of ranks that saved the checkpoint; None: the file does not say."""


def read_torch(
    path: Path, *, ranks: int = 1, remedy: str = "name the folder that holds all of them"
) -> dict[str, Source]:
    """The tensors of a file: a state dict, or a mapping with one under `module`, `model` or `state_dict`."""
    found = _mapping(path, load_object(path))
    if (degree := _degree(found)) not in (None, ranks):
        raise ModelError(f"model: {path} is the file of one rank of {degree}; {remedy}")
    inside = [key for key in _WRAPPERS if isinstance(found.get(key), Mapping)]
    if len(inside) > 1:
        raise ModelError(f"model: {path} has both {inside[0]!r} and {inside[1]!r}; save one of them as safetensors")
    return _sources(path, found[inside[0]] if inside else found)


def read_rank(path: Path) -> RankFile:
    """Read the file of one rank of DeepSpeed or Megatron, which has exactly one of the keys `module` and `model`."""
    found = _mapping(path, load_object(path))
    keys = [key for key in ("module", "model") if key in found]
    if len(keys) != 1:
        if "model0" in found:
            raise ModelError(f"model: {path} holds interleaved pipeline stages (model0, ..); save it without pipeline")
        problem = "both keys 'module' and 'model'" if keys else "neither a key 'module' nor 'model'"
        raise ModelError(f"model: {path} has {problem}; it is not a checkpoint of one rank of DeepSpeed or Megatron")
    sources = _sources(path, _mapping(path, found[keys[0]]))
    if not any(0 not in source.shape for source in sources.values()):
        raise ModelError(
            f"model: {path} holds no weights: ZeRO-3 keeps them in the files of its optimizer; run zero_to_fp32.py "
            "(DeepSpeed puts it beside them) and name what it writes"
        )
    version = found.get("checkpoint_version")
    if version is not None and (isinstance(version, bool) or not isinstance(version, int | float)):
        raise ModelError(f"model: {path}: checkpoint_version is {version!r:.50}, not a number; save the file again")
    return RankFile(sources, version, _degree(found))


def load_object(path: Path) -> Any:
    """Load a file of torch.save that holds only data; code in the file never runs."""
    if not path.is_file():
        raise ModelError(f"model: {path} is missing or not a plain file; download the model again")
    check_fetched(path)
    try:
        return torch.load(path, weights_only=True, mmap=_is_zip(path), map_location="cpu")
    except Exception as error:  # torch raises many kinds of errors for damaged files
        raise ModelError(_refusal(path, error)) from error


def _is_zip(path: Path) -> bool:
    """Whether a file can be memory-mapped. Files from before torch 1.6 are not archives and are read into memory."""
    with path.open("rb") as file:
        if file.read(len(_ZIP)) != _ZIP:
            return False
    with zipfile.ZipFile(path) as archive:
        if any(entry.compress_type != zipfile.ZIP_STORED for entry in archive.infolist()):
            raise ValueError("parts of it are compressed, which torch.save never does")
    return True


def _refusal(path: Path, error: Exception) -> str:
    """The error for a file. Torch's own message is not used: it suggests running the code in the file."""
    text = str(error)
    found = _GLOBAL.search(text)
    if name := found[1] if found else _foreign_global(path):
        allow = f", or allow it with torch.serialization.add_safe_globals([{name}]) if you know that it is harmless"
        return (
            f"model: {path} holds {name}, which is not a tensor, and files are read with weights_only=True: code in "
            f"them never runs. Convert it to safetensors if you trust it{allow if 'not an allowed' in text else ''}"
        )
    return f"model: {path} is damaged or incomplete ({_reason(path, error)}); download it again"


def _reason(path: Path, error: Exception) -> str:
    if not path.stat().st_size:
        return "it is empty"
    if isinstance(error, zipfile.BadZipFile | EOFError):
        return "it ends early"
    if isinstance(error, OSError) or (type(error) in (ValueError, RuntimeError) and "weights_only" not in str(error)):
        return line(error)
    return "it is not a file of torch.save"


def _foreign_global(path: Path) -> str | None:
    """The first class or function in a pickle that a file of tensors does not need. The pickle is not executed."""
    strings: list[str] = []
    try:
        for code, argument, _ in pickletools.genops(_pickled(path)):
            name = str(argument).replace(" ", ".") if code.name in ("GLOBAL", "INST") else None
            if code.name == "STACK_GLOBAL":
                name = ".".join(strings[-2:])
            elif isinstance(argument, str):
                strings.append(argument)
            if name and name.partition(".")[0] not in _OURS:
                return name[:200]
    except Exception:  # damaged: genops raises many kinds of errors
        return None
    return None


def _pickled(path: Path) -> bytes:
    """The beginning of the pickle in a file of torch.save, or of a plain pickle."""
    if not zipfile.is_zipfile(path):
        with path.open("rb") as file:
            return file.read(_MAX_SCANNED)
    with zipfile.ZipFile(path) as archive:
        name = next(name for name in archive.namelist() if name.endswith("data.pkl"))
        with archive.open(name) as file:
            return file.read(_MAX_SCANNED)


def _mapping(path: Path, found: Any) -> Mapping[Any, Any]:
    if not isinstance(found, Mapping):
        raise ModelError(f"model: {path} holds a {type(found).__name__}, not tensors by name; save its state_dict()")
    return found


def _degree(found: Mapping[Any, Any]) -> int | None:
    degree = found.get("mp_world_size")
    return degree if type(degree) is int else None


def _sources(path: Path, found: Mapping[Any, Any]) -> dict[str, Source]:
    """The tensors of nested mappings, with names joined by dots."""
    values: dict[str, Any] = {}
    pending: list[tuple[str, Any, int]] = [("", found, 0)]
    while pending:
        name, value, depth = pending.pop()
        if isinstance(value, Mapping):
            # limits, because a small pickle can reference one mapping so often that walking it may not terminate
            if depth > _MAX_DEPTH or len(values) + len(pending) + len(value) > _MAX_NAMES:
                raise ModelError(f"model: {path} is nested too deeply or has too many names; convert it to safetensors")
            inner = [(f"{name}.{key}" if name else str(key), item, depth + 1) for key, item in value.items()]
            pending += reversed(inner)
        elif name in values:
            raise ModelError(f"model: {path} has two tensors that are both called {name[:200]!r}; save it again")
        elif not name.endswith(_EXTRA):
            values[name] = value
    return {name: _source(path, name, value) for name, value in values.items()}


def _source(path: Path, name: str, value: Any) -> Source:
    if not isinstance(value, Tensor):
        problem = f"is a {type(value).__name__}, not a tensor"
    elif value.layout != torch.strided or value.is_quantized or value.is_meta:
        problem = "is sparse, quantized or without values"
    elif value.numel() * value.element_size() > value.untyped_storage().nbytes():
        problem = f"claims the shape {tuple(value.shape)}, but has too little data"
    else:
        tensor = value.detach()
        return Source(tuple(tensor.shape), tensor.dtype, (Piece(lambda: tensor, tuple(tensor.shape), tensor.dtype),))
    raise ModelError(f"model: {path}: {name[:200]!r} {problem}; save the state_dict() of the model alone")
