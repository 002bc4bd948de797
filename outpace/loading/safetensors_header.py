"""Reads and checks the header of a safetensors file: the place of each tensor. Imports no torch."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from outpace.errors import ModelError
from outpace.loading.layout import check_fetched
from outpace.loading.strict_json import parse

DTYPES: Mapping[str, tuple[str, int]] = {
    "F64": ("float64", 8),
    "F32": ("float32", 4),
    "F16": ("float16", 2),
    "BF16": ("bfloat16", 2),
    "C64": ("complex64", 8),
    "BOOL": ("bool", 1),
    "F8_E4M3": ("float8_e4m3fn", 1),
    "F8_E5M2": ("float8_e5m2", 1),
    "F8_E4M3FNUZ": ("float8_e4m3fnuz", 1),
    "F8_E5M2FNUZ": ("float8_e5m2fnuz", 1),
    "F8_E8M0": ("float8_e8m0fnu", 1),
    **{
        f"{kind}{8 * size}": (f"{name}int{8 * size}", size)
        for kind, name in (("I", ""), ("U", "u"))
        for size in (8, 4, 2, 1)
    },
}
"""dtype in a safetensors file -> (torch's name of it, bytes of an element)."""
_MAX_HEADER = 100_000_000  # the limit of the safetensors library
_MAX_DIMS = 64
_MAX_ELEMENTS = 2**63 - 1
_PREFIX = 8
_METADATA = "__metadata__"
_FIELDS = frozenset(("dtype", "shape", "data_offsets"))


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor of a file."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    """Offset in the file."""
    stop: int


@dataclass(frozen=True, slots=True)
class Header:
    """All tensors of a file; they fill it completely without overlaps."""

    entries: Mapping[str, Entry]
    metadata: Mapping[str, str]


def read_header(path: Path) -> Header:
    """Read and check the header; at most 100 MB are read, whatever the file claims."""
    try:
        if not path.is_file():
            raise ModelError(f"model: {path} is missing or not a plain file; download the model again")
        check_fetched(path)
        with path.open("rb") as file:
            return _read(file, os.fstat(file.fileno()).st_size)
    except ModelError:
        raise
    except (OSError, ValueError) as error:
        raise ModelError(f"model: {path} is damaged or incomplete ({error}); download it again") from error


def _read(file: BinaryIO, size: int) -> Header:
    if size < _PREFIX:
        raise ValueError(f"it has {size} bytes, fewer than the length of a header")
    length = int.from_bytes(file.read(_PREFIX), "little")
    if length > _MAX_HEADER:
        raise ValueError(f"its header claims {length:,} bytes; at most {_MAX_HEADER:,} are allowed")
    if length > size - _PREFIX:
        raise ValueError(f"its header claims {length:,} bytes, but only {size - _PREFIX:,} follow")
    text = file.read(length)
    if len(text) != length or not text.startswith(b"{"):
        raise ValueError("its header is not a JSON object")
    return _header(parse(text), _PREFIX + length, size)


def _header(found: dict[str, Any], data: int, size: int) -> Header:
    """data: offset of the first tensor in the file."""
    metadata = found.pop(_METADATA, {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise ValueError(f"{_METADATA} is not an object of strings")
    entries = {name: _entry(name, value, data) for name, value in found.items()}
    end = data
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].start, item[1].stop)):
        if entry.start != end:
            problem = "overlaps another tensor" if entry.start < end else "follows bytes that belong to no tensor"
            raise ValueError(f"{name[:200]!r} {problem}")
        end = entry.stop
    if end != size:
        raise ValueError(f"its tensors end at byte {end:,}, but it has {size:,} bytes")
    return Header(entries, metadata)


def _entry(name: str, value: Any, data: int) -> Entry:
    name = repr(name[:200])
    if not isinstance(value, dict) or value.keys() != _FIELDS:
        raise ValueError(f"{name} needs exactly dtype, shape and data_offsets")
    dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise ValueError(f"{name} has the unknown dtype {str(dtype)[:50]!r}")
    if not _are_counts(shape) or len(shape) > _MAX_DIMS:
        raise ValueError(f"the shape of {name} is not a list of sizes")
    if not _are_counts(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise ValueError(f"data_offsets of {name} are not [start, stop]")
    if _elements(name, shape) * DTYPES[dtype][1] != offsets[1] - offsets[0]:
        raise ValueError(f"{name} is {dtype} of shape {shape}, but has {offsets[1] - offsets[0]:,} bytes")
    return Entry(dtype, tuple(shape), data + offsets[0], data + offsets[1])


def _are_counts(found: Any) -> bool:
    """Whether it is a list of integers from 0 to 2^63 - 1. Bools do not count."""
    return isinstance(found, list) and all(type(item) is int and 0 <= item <= _MAX_ELEMENTS for item in found)


def _elements(name: str, shape: list[int]) -> int:
    count = 1
    for size in shape:
        count *= size
        if count > _MAX_ELEMENTS:
            raise ValueError(f"the shape of {name} has too many elements")
    return count
